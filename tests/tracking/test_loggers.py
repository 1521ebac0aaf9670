"""Lightning's loggers beside MLflow get what it gets."""

import csv
from types import SimpleNamespace

import pytest
from jobs import store_of
from tensorboard.backend.event_processing import event_accumulator

from dpexp.commands.trainer import _to_tensorboard
from dpexp.errors import ConfigError
from dpexp.tracking.mirror import shown
from dpexp.tracking.record import MetricsLogger

JOB = (
    "model=logistic", "sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=1",
    "private_metrics.release={train_loss: {clip_norm: 4, budget_share: 0.01}}", "accountant=moments",
)  # fmt: skip


def test_a_table_has_the_metrics_that_mlflow_has_and_tensorboards_file_has_no_times(dpexp_job, tmp_path):
    output = dpexp_job(*JOB, "logger=[csv,tensorboard]", "callbacks=[learning_rate,ema]")
    (folder,) = (output / "csv").iterdir()
    assert [path.name for path in folder.iterdir()] == ["metrics.csv"], "no hyperparameters"
    with (folder / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    written = {
        (name, int(row["step"]), shown(name, float(row[name]))) for row in rows for name in row if row[name] != ""
    }
    written = {point for point in written if point[0] != "step"}
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    logged = {
        (name, point.step, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    }
    names = {name for name, *_ in written}
    assert written <= logged and {point for point in logged if point[0] in names} <= written
    assert {"epsilon", "test_accuracy", "test_accuracy_unaveraged", "private/train_loss", "lr-SGD"} <= names
    assert not names & {"train_loss", "train_accuracy", "epoch"} and {point[1] for point in written} <= {0, 1, 2, 3, 4}

    (folder,) = (output / "tensorboard").iterdir()
    found = event_accumulator.EventAccumulator(str(folder)).Reload()
    points = [point for name in found.Tags()["scalars"] for point in found.Scalars(name)]
    assert len(points) > 10 and all(point.wall_time == point.step <= 4 for point in points)
    assert {"private/train_loss", "epsilon"} <= {*found.Tags()["scalars"]}
    assert found.Tags()["graph"] is False and not found.Tags()["tensors"]


def test_without_mlflow_a_logger_gets_them_all_the_same(dpexp_job):
    output = dpexp_job(*JOB[:-2], "logger=csv", "tracking=none", "accountant=moments")
    (file,) = output.glob("csv/*/metrics.csv")
    assert "epsilon" in file.read_text().splitlines()[0] and not (output / "mlflow_run_id").exists()


def test_tensorboard_gets_the_round_in_place_of_the_time():
    calls, flushed = [], []
    experiment = SimpleNamespace(
        add_scalar=lambda *values, walltime: calls.append((*values, walltime)), flush=lambda: flushed.append(1)
    )
    logger = MetricsLogger(lambda *sent: _to_tensorboard(SimpleNamespace(experiment=experiment), *sent), "tensorboard")
    logger.rounds = lambda: 7
    logger.log_metrics({"epsilon": 1.5, "epoch": 0}, step=6)
    assert calls == [("epsilon", 1.5, 7, 7)] and flushed
    assert logger.log_hyperparams({"secret": 1}) is None
    with pytest.raises(ConfigError, match=r"self\.logger\.experiment\.add_histogram: what it"):
        logger.experiment.add_histogram("weights", [1.0])


@pytest.mark.parametrize(
    "options, said",
    [
        ("logger=wandb", "logger has no option 'wandb'"),
        ("logger=[csv,wandb]", "logger has no option 'wandb'"),
        ("+logger.mine._target_=pytorch_lightning.loggers.WandbLogger", "logger.mine: WandbLogger may write times"),
        ("+trainer.logger=true", "choose tracking, or logger at the top level"),
    ],
)
def test_what_cannot_be_muted_is_refused_by_name(options, said, dpexp_job, tmp_path):
    with pytest.raises(SystemExit) as refused:
        dpexp_job(*JOB, options)
    assert said in str(refused.value) and not [*tmp_path.rglob("ledger.jsonl")]
