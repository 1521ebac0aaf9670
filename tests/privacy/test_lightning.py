"""Lightning as people know it: its options, callbacks, schedules; stopping, and going on."""

import functools
import inspect
import json
import re
import shutil
import signal

import pytest
import pytorch_lightning as pl
import torch
from filelock import FileLock
from jobs import result_of, signal_after, store_of
from safetensors import safe_open

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.rounding import up
from dpexp.commands.trainer import OWN
from dpexp.commands.validate import REFUSED
from dpexp.training import callbacks

QUICK = ("tracking=none", "privacy.noise_multiplier=1.0", "model=logistic", "sampling.steps=6",
         "trainer.num_evaluations=0")  # fmt: skip
HONOURED = {
    "strategy": "auto", "devices": 1, "num_nodes": 1, "accelerator": "cpu", "precision": "64-true",
    "max_time": "{hours: 1}", "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1,
    "num_sanity_val_steps": 1, "log_every_n_steps": 2, "enable_progress_bar": False, "enable_model_summary": True,
    "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "deterministic": True, "benchmark": False,
    "inference_mode": False, "detect_anomaly": True,
}  # fmt: skip


def test_every_option_of_the_trainer_is_honoured_or_refused_by_name():
    assert set(inspect.signature(pl.Trainer).parameters) == set(HONOURED) | set(REFUSED)
    assert not set(HONOURED) & set(REFUSED) and not set(OWN) & set(inspect.signature(pl.Trainer).parameters)


def test_honoured_options_reach_the_trainer_and_learning_rates_the_record_without_a_server(dpexp_job, monkeypatch):
    given = {}
    make = pl.Trainer

    @functools.wraps(make)
    def noted(**options):
        given.update({name: value for name, value in options.items() if name not in given})
        return make(**options)

    monkeypatch.setattr(pl, "Trainer", noted)
    there = ("accelerator", "precision", "strategy", "devices", "num_nodes")
    asked = [f"{'' if name in there else '+'}trainer.{name}={value}" for name, value in HONOURED.items()]
    rates = ("callbacks=[learning_rate]", "scheduler=cosine")
    output = dpexp_job(*QUICK, "sampling.expected_batch_size=8", *rates, *asked)
    assert {name: given[name] for name in HONOURED} == HONOURED | {"max_time": {"hours": 1}}
    assert result_of(output)["rounds"] == 6
    rows = [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert any("lr-SGD" in row for row in rows)


NEEDING = """
from pytorch_lightning import Callback
from pytorch_lightning.utilities.exceptions import MisconfigurationException

class Needs(Callback):
    def setup(self, *args, **named):
        raise MisconfigurationException("Cannot use Needs without\\n a server.")
"""


@pytest.mark.parametrize(
    "argument, said",
    [
        *((f"+trainer.{name}=1", f"^dpexp: trainer.{name}=1 cannot be honoured: {re.escape(REFUSED[name])}\\.$")
          for name in [*REFUSED][::8]),
        ("trainer.max_epochs=1", r"trainer\.max_epochs cannot be honoured: .* give sampling\.steps"),
        ("+trainer.speed=9", r"trainer\.speed=9 is no option of Lightning's Trainer"),
        ("+callbacks.mine._target_=collections.OrderedDict",
         r"callbacks\.mine: collections\.OrderedDict gives no Lightning callback"),
        ("+callbacks.mine._target_=needing.Needs",
         r"trainer or callbacks: Cannot use Needs without a server\."),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_told_in_one_sentence(dpexp_job, tmp_path, monkeypatch, argument, said):
    """An option of the Trainer with what has its place."""
    (tmp_path / "needing.py").write_text(NEEDING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=said):
        dpexp_job(*QUICK, argument)
    assert "Needs" in argument or not list(tmp_path.glob("outputs/*/*/config.yaml"))


@pytest.mark.parametrize(
    "make, rates",
    [
        (callbacks.cosine, [1, 0.853553, 0.5, 0.146447]),
        (functools.partial(callbacks.cosine, warmup=0.5), [1 / 3, 2 / 3, 1, 0.5]),
        (functools.partial(callbacks.linear_warmup, warmup=0.5), [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_learning_rates_by_round(make, rates):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer, rounds=4), []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(rates, abs=1e-6)


def test_an_optimizer_for_a_module_that_has_its_own_is_refused(dpexp_job, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("""
import pytorch_lightning as pl, torch
class Own(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.net = torch.nn.Linear(64, 10)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0].flatten(1)), batch[1])
    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", (self.net(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
""")
    monkeypatch.syspath_prepend(tmp_path)
    own = ("~model.shape", "~model.classes", "model._target_=own.Own", "model=logistic")
    assert result_of(dpexp_job(*QUICK, *own))["rounds"] == 6
    with pytest.raises(SystemExit, match="optimizer=adam would be ignored: Own configures its own"):
        dpexp_job(*QUICK, *own, "optimizer=adam")


def test_debug_is_three_rounds_and_leaves_nothing_in_mlflow(dpexp_job, tmp_path):
    output = dpexp_job("debug=true", "privacy.noise_multiplier=1.0", "model=logistic", "sampling.expected_batch_size=8")
    assert result_of(output)["rounds"] == 3 and not (tmp_path / "outputs" / "mlflow.db").exists()


# Stop and go on

LONG = ("privacy.noise_multiplier=1.0", "model=logistic", "sampling.steps=150", "trainer.num_evaluations=2",
        "trainer.threads=1", "checkpoint.every_n_rounds=3")  # fmt: skip


def test_a_killed_training_goes_on_in_its_folder_ledger_and_run(dpexp_job, forked, tmp_path, capsys):
    folder = tmp_path / "job (1), a=b"
    forked(*LONG, f"hydra.run.dir={folder}", first=(signal_after, 5, signal.SIGKILL)).ended()
    assert not (folder / "result.json").exists()
    before = (folder / "ledger.jsonl").read_bytes()
    spent = up(dpexp.epsilon(ledger_so_far(folder / "ledger.jsonl"), 1e-4), 4)
    again = ledger_so_far(folder / "ledger.jsonl").training_rounds - 3
    dpexp_job("resume", str(folder))
    said, result, ledger = capsys.readouterr().out, result_of(folder), read_ledger(folder / "ledger.jsonl")
    assert f"Resuming at round 3 of 150, ε = {spent} spent" in said and len(ledger) == 150 + again > 150
    assert f"{again} rounds after the checkpoint were released" in said
    assert f"will end at ε ≤ {up(result['epsilon']['pld'], 4)}. checkpoint.every_n_rounds" in said.replace("\n", " ")
    kept = before.rstrip().rpartition(b"\n")[0]  # the last line may be half a line, or the closing one
    assert (folder / "ledger.jsonl").read_bytes().startswith(kept)
    assert result["rounds"] == 150 <= len(ledger) and not (folder / "last.ckpt").exists()
    assert result["epsilon"]["pld"] == pytest.approx(dpexp.epsilon(ledger, 1e-4))
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    assert run.info.status == "FINISHED" and run.info.run_id == result["mlflow_run_id"]
    assert run.data.metrics["epsilon"] == float(up(result["epsilon"]["pld"], 5))
    assert result["metrics"]["test_accuracy"] > 0.8
    with pytest.raises(SystemExit, match="has finished; there is nothing to resume"):
        dpexp_job("resume", result["mlflow_run_id"])


@pytest.fixture
def stopped_before_it_kept_its_model(dpexp_job, tmp_path, monkeypatch):
    """Runs a job that is interrupted after its last round; returns its folder."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    def job(*arguments):
        with monkeypatch.context() as patched:
            patched.setattr("dpexp.commands.train.save_model", interrupted)
            with pytest.raises(SystemExit, match="130"):
                dpexp_job(*arguments, *QUICK[1:], f"hydra.run.dir={tmp_path}/job")
        return tmp_path / "job"

    return job


def test_a_job_stopped_after_its_last_round_keeps_its_averaged_model_when_resumed(
    stopped_before_it_kept_its_model, dpexp_job, tmp_path
):
    from dpexp.training.data import Digits

    known = ("tracking=none", "callbacks=[ema]", "callbacks.ema.decay=0.5", "privacy.noise_seed=1")
    folder = stopped_before_it_kept_its_model(*known)
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert (folder / "last.ckpt").exists() and not (folder / "result.json").exists()
    dpexp_job("resume", str(folder))
    assert (folder / "ledger.jsonl").read_bytes() == ledger, "no further round, and closed once"
    assert (folder / "card.md").exists() and not (folder / "last.ckpt").exists()
    dpexp_job(*QUICK[1:], *known, f"hydra.run.dir={tmp_path}/other")
    metrics = result_of(folder)["metrics"]
    assert metrics == result_of(tmp_path / "other")["metrics"], "averaged and not, as in one go"
    assert {"test_accuracy", "test_accuracy_unaveraged", "test_loss", "test_loss_unaveraged"} <= set(metrics)
    assert metrics["test_loss"] != metrics["test_loss_unaveraged"]
    x, y = Digits().test.tensors
    with torch.no_grad():
        accuracy = (dpexp.load(folder)(x).argmax(1) == y).float().mean()
    assert float(accuracy) == pytest.approx(metrics["test_accuracy"], abs=1e-6)


def claims_privacy(folder):
    """Removes from a job's configuration what makes its run not private."""
    config, overrides = folder / "config.yaml", folder / ".hydra" / "overrides.yaml"
    config.write_text(config.read_text().replace("noise_seed: 7", "noise_seed: null").replace(": unsafe", ": none"))
    overrides.write_text(re.sub("- (privacy.noise_seed=7|diagnostics=unsafe)\n", "", overrides.read_text()))


def assert_not_private(folder, run, word):
    """For what happened, whatever its configuration says by now."""
    assert result_of(folder)["private"] is False and "**Not private**" in (folder / "card.md").read_text()
    assert re.match(f"no.*{word}", run.data.tags["dpexp.private"])


def test_a_damaged_checkpoint_is_told_and_options_of_ones_own_are_resumed_but_none_that_claims_privacy(
    stopped_before_it_kept_its_model, dpexp_job, tmp_path
):
    (tmp_path / "my" / "group").mkdir(parents=True)
    (tmp_path / "my" / "group" / "own.yaml").write_text(
        "_target_: dpexp.privacy.plan.groups.Groups\ngroups:\n  mine: {rest: true}\n"
    )
    folder = stopped_before_it_kept_its_model("--config-dir", "my", "group=own", "diagnostics=unsafe")
    whole = (folder / "last.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit, match=r"^dpexp: the checkpoint \S+last.ckpt cannot be read .*: it is damaged"):
        dpexp_job("resume", str(folder))
    (folder / "last.ckpt").write_bytes(whole)
    claims_privacy(folder)
    dpexp_job("resume", str(folder))
    assert [*result_of(folder)["groups"]] == ["mine"]
    (run,) = store_of(tmp_path).search_runs(["1"])
    assert_not_private(folder, run, "unsafe")


def test_a_second_resume_leaves_the_run_of_the_first_alone_and_a_copied_folder_has_its_own(
    stopped_before_it_kept_its_model, dpexp_job, tmp_path
):
    folder, copied = stopped_before_it_kept_its_model("privacy.noise_seed=7"), tmp_path / "copy"
    with FileLock(folder / "job.lock"), pytest.raises(SystemExit, match="running in another process"):
        dpexp_job("resume", str(folder))
    (run,) = store_of(tmp_path).search_runs(["1"])
    assert run.info.status == "KILLED" and run.data.tags["dpexp.error"] == "interrupted by the keyboard"
    shutil.copytree(folder, copied)
    for path in (folder, copied):
        claims_privacy(path)
        dpexp_job("resume", str(path))
    runs = {run.info.run_id: run for run in store_of(tmp_path).search_runs(["1"])}
    assert len(runs) == 2
    for path in (folder, copied):
        run = runs[result_of(path)["mlflow_run_id"]]
        assert run.data.params["sampling.steps"] == "6" and run.data.tags["dpexp.output"] == str(path)
        assert_not_private(path, run, "seed")


def test_a_training_that_ended_early_goes_on_but_only_as_it_was(dpexp_job, tmp_path):
    folder = tmp_path / "job"
    dpexp_job(
        *LONG, "trainer.num_evaluations=9", "tracking=none", "optimizer.lr=0", "callbacks=[early_stopping]",
        "callbacks.early_stopping.patience=1", "+trainer.max_time=00:01:00:00", f"hydra.run.dir={folder}",
    )  # fmt: skip
    before = result_of(folder)["rounds"]
    kept = torch.load(folder / "last.ckpt", weights_only=False)
    assert before < 150 and not any("Timer" in name for name in kept["callbacks"]), "a resumed job has its time anew"
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("vectors: layer", "vectors: parameter"))
    with pytest.raises(SystemExit, match="vectors=layer was parameter when the checkpoint"):
        dpexp_job("resume", str(folder))
    (folder / "config.yaml").write_text(config)
    dpexp_job("resume", str(folder))
    after = result_of(folder)["rounds"]
    assert before < after <= len(read_ledger(folder / "ledger.jsonl"))
    with safe_open(folder / "weights.safetensors", "pt") as file:
        assert file.metadata()["rounds"] == str(after)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "needs one job's folder"),
        (["nosuch"], "no file or folder here, and no run"),
        (["{empty}"], "holds no checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_told(dpexp_job, tmp_path, arguments, expected):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=expected):
        dpexp_job("resume", *(argument.format(empty=tmp_path / "empty") for argument in arguments))
