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
    "model=logistic", "sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=2",
    "private_metrics.release={train_loss: {clip_norm: 4, budget_share: 0.01}}", "accountant=moments",
    "sampling.expected_batch_size=512",
)  # fmt: skip


def test_a_table_has_the_metrics_that_mlflow_has_and_tensorboards_file_has_no_times(dpexp_job, tmp_path):
    output = dpexp_job(*JOB, "logger=[csv,tensorboard]", "callbacks=[learning_rate,ema]")
    (file,) = (path for path in output.glob("csv/*/*"))
    assert file.name == "metrics.csv", "no hyperparameters"
    with file.open() as lines:
        rows = [*csv.DictReader(lines)]
    names = rows[0].keys() - {"step"}
    written = {(name, int(row["step"]), shown(name, float(row[name]))) for row in rows for name in names if row[name]}
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    assert names <= run.data.metrics.keys() and not names & {"train_loss", "train_accuracy", "epoch"}
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    assert written == {(name, point.step, point.value) for name in names for point in histories[name]}
    assert {"epsilon", "test_accuracy", "test_accuracy_unaveraged", "private/train_loss", "lr-SGD"} <= names
    assert {step for _, step, _ in written} <= {*range(5)}
    # After one epoch, which is three rounds; after the last round; in the end.
    assert [point.step for point in histories["test_accuracy"]] == [3, 4, 4]

    (folder,) = (output / "tensorboard").iterdir()
    found = event_accumulator.EventAccumulator(str(folder)).Reload()
    points = [point for name in found.Tags()["scalars"] for point in found.Scalars(name)]
    assert len(points) > 10 and all(point.wall_time == point.step <= 4 for point in points)
    assert {"private/train_loss", "epsilon"} <= {*found.Tags()["scalars"]}
    assert found.Tags()["graph"] is False and not found.Tags()["tensors"]


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
