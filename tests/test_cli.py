"""The command line: what it accepts, refuses, prints and leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = ("tracking=none", "sampling.steps=3", "privacy.noise_multiplier=1.0", "trainer.evaluations=0")


def test_the_default_job_leaves_a_result(dpexp_job, capsys):
    output = dpexp_job("group=conv_fc", "mechanism=joint", *QUICK, "accountant=all")
    result = json.loads((output / "result.json").read_text())
    assert result["rounds"] == 3 and result["delta"] == 1e-4 and result["private"] is True
    assert list(result["epsilon"]) == ["pld", "rdp", "moments", "strong", "basic", "gdp"]
    assert set(result["groups"]) == {"conv", "fc"}
    assert 0 <= result["metrics"]["test_accuracy"] <= 1 and result["seconds"] > 0
    printed = capsys.readouterr().out
    for expected in ("conv", "σ̃_g", "noise per coordinate", "Test accuracy", "ε =", "round 3/3"):
        assert expected in printed


def test_the_non_private_twin(dpexp_job):
    output = dpexp_job("tracking=none", "sampling.steps=3", "privacy.enabled=false")
    result = json.loads((output / "result.json").read_text())
    assert result["private"] is False and result["rounds"] == 3 and "epsilon" not in result
    assert not (output / "ledger.jsonl").exists()


def test_the_non_private_twin_takes_batches_of_the_same_size(dpexp_job, monkeypatch):
    from dpexp.training.classifier import Classifier

    sizes = []
    step = Classifier.training_step
    monkeypatch.setattr(
        Classifier, "training_step", lambda self, batch: (sizes.append(len(batch[0])), step(self, batch))[1]
    )
    dpexp_job("tracking=none", "sampling.steps=3", "sampling.expected_batch_size=100", "privacy.enabled=false")
    assert sizes == [100, 100, 100]


def test_loader_processes_are_started_and_change_nothing(dpexp_job, monkeypatch):
    from dpexp.training.data import TensorData

    workers = []
    loader = TensorData.train_dataloader
    monkeypatch.setattr(TensorData, "train_dataloader", lambda self: (workers.append(self.workers), loader(self))[1])
    results = []
    for count in (0, 2):
        output = dpexp_job(*QUICK, "privacy.noise_seed=1", f"trainer.workers={count}")
        results.append(json.loads((output / "result.json").read_text())["metrics"])
    assert set(workers) == {0, 2} and results[0] == results[1]


def test_a_known_noise_seed_is_not_called_private(dpexp_job):
    first = dpexp_job(*QUICK, "privacy.noise_seed=1")
    second = dpexp_job(*QUICK, "privacy.noise_seed=1")
    results = [json.loads((output / "result.json").read_text()) for output in (first, second)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["private"] is False


def test_every_model_and_bf16_train(dpexp_job):
    for choice in (("model=logistic",), ("model=mlp", "optimizer=adam"), ("trainer.precision=bf16-mixed",)):
        output = dpexp_job(*QUICK, *choice)
        assert json.loads((output / "result.json").read_text())["rounds"] == 3


def test_users_bring_their_own_model_group_and_scheduler(dpexp_job, tmp_path, monkeypatch):
    """A plain module and a LightningModule of the user's, and a group in their own --config-dir."""
    (tmp_path / "mine_for_test.py").write_text(
        "import torch, pytorch_lightning as pl\n"
        "from torch import nn\n"
        "def plain(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
        "class Whole(pl.LightningModule):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.net = plain(width)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "    def test_step(self, batch, batch_idx):\n"
        "        self.log('test_accuracy', (self.net(batch[0]).argmax(1) == batch[1]).float().mean())\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.Adam(self.parameters())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my" / "group").mkdir(parents=True)
    (tmp_path / "my" / "group" / "early_late.yaml").write_text(
        "_target_: dpexp.privacy.groups.Groups\ngroups:\n  early: {parameters: ['*.1.*']}\n  late: {rest: true}\n"
    )
    own = ("--config-dir", "my", *QUICK, "group=early_late", "+model.width=7", "~model.shape", "~model.classes")
    scheduler = "scheduler={_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.9}"
    plain = dpexp_job(*own, "model._target_=mine_for_test.plain", scheduler)
    whole = dpexp_job(*own, "model._target_=mine_for_test.Whole")
    for output in (plain, whole):
        assert set(json.loads((output / "result.json").read_text())["groups"]) == {"early", "late"}


def test_a_multirun_runs_each_choice(dpexp_job, tmp_path):
    dpexp_job("-m", "model=logistic", "mechanism=separate,joint", *QUICK)
    assert len(list((tmp_path / "outputs" / "multirun").glob("*/*/*/result.json"))) == 2


BAD = {
    "grop=flat": "there is no 'grop'; did you mean 'group'",
    "group=flta": "group has no option 'flta'; did you mean 'flat'",
    "trainer.physcal_batch=3": "trainer has no key 'physcal_batch'; did you mean 'physical_batch'",
    "bound.totl=1": "bound has no key 'totl'; did you mean 'total'",
    "trainer.physical_batch=many": "trainer.physical_batch=many: Value 'many' of type 'str' could not be converted",
    "trainer.physical_batch=0": "trainer.physical_batch=0 must be at least 1",
    "trainer.accelerator=abacus": "invalid accelerator name: `accelerator='abacus'`",
    "trainer.evaluations=-1": "trainer.evaluations=-1 must be at least 0",
    "trainer.workers=-1": "trainer.workers=-1 must be at least 0",
    "seed=-1": "seed=-1 must lie between",
    "privacy.epsilon=0": "privacy.epsilon=0.0 must be a finite number above 0",
    "privacy.epsilon=-1": "privacy.epsilon=-1.0 must be a finite number above 0",
    "privacy.delta=1": "privacy.delta=1.0 must lie strictly between 0 and 1",
    "privacy.epsilon=1e-9 privacy.delta=1e-12 sampling.q=1 sampling.steps=1000000": "cannot be reached",
    "privacy.epsilon=1 privacy.noise_multiplier=1": "exactly one of privacy.epsilon or privacy.noise_multiplier",
    "sampling.q=1.5": "sampling.q=1.5 must lie in (0, 1]",
    "sampling.expected_batch_size=2000": "exceeds data.n=1437",
    "sampling.steps=0": "sampling.steps=0 must be at least 1",
    "data.n=0": "data.n=0 must be a whole number of at least 1",
    "data.n=${nowhere}": "data.n: Interpolation key 'nowhere' not found",
    "mechanism=joint mechanism.alpha=0": "mechanism.alpha=0 must be a finite number above 0",
    "mechanism=joint mechanism.alpha=[1,-1,1,1]": "mechanism.alpha[1]=-1 must be a finite number above 0",
    "mechanism=joint mechanism.S=3": "mechanism.S=3.0 of group all must lie in (0, √k]",
    "bound=fixed bound.value={fc:1}": "bound.value names the groups fc; the model has all",
    "allocation=weighted": "allocation.weights must be given",
    "group=conv_fc allocation=weighted allocation.weights={conv:0.5,fc:0.4}": "add up to 0.9; they must add up to 1",
    "allocation=explicit allocation.sigma={all:1}": "allocation=explicit fixes the noise itself",
    "group=custom group.groups={rnn:{layers:[LSTM]},all:{rest:true}}":
        "group: rnn (Match(parameters=(), layers=['LSTM'], rest=False)) matches none of the parameters model.0.weight",
    "group=custom group.groups={a:{parameters:['*']},b:{layers:[Linear]}}":
        "group: parameter model.7.weight falls in both a and b",
    "group=custom group.groups={fc:{layers:[Linear]}}":
        "group: parameter model.0.weight falls in no group",
    "group._target_=nowhere.f": "group: nowhere.f cannot be made",
    "model._target_=torch.nn.BatchNorm1d +model.num_features=64 ~model.shape ~model.classes":
        "the layer (root) (BatchNorm1d) mixes the records",
    "model._target_=builtins.dict": "gives a dict, not a torch.nn.Module",
    "optimizer.lr=-1": "Invalid learning rate: -1",
    "vectors=neuron": "vectors=neuron is unknown; choose one of layer, parameter",
    "diagnostics=loud": "diagnostics=loud is unknown; choose one of none, unsafe",
    "accountant.names=[guess]": "accountant.names=['guess'] must be among pld, rdp",
    "tracking=mlflow tracking.uri=sqlite:////dev/null/x.db": "tracking.uri=sqlite:////dev/null/x.db cannot be used",
    "data=mnist data.root=nowhere": "data.root=nowhere lacks train-images-idx3-ubyte.gz",
}  # fmt: skip


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_sentence_before_training(arguments, dpexp_job, monkeypatch, tmp_path):
    import pooch

    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(pooch.core, "stream_download", no_network)
    words = ["tracking=none", *arguments.split()]
    with pytest.raises(SystemExit) as stopped:
        dpexp_job(*words)
    message = str(stopped.value)
    assert message.startswith("dpexp: ") and BAD[arguments] in message and "\n" not in message
    assert not list(tmp_path.rglob("ledger.jsonl"))


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "dpexp", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_a_mistake_ends_the_process_with_one_line_and_an_error_code(tmp_path):
    done = command("privacy.delta=2", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip() == (
        "dpexp: privacy.delta=2.0 must lie strictly between 0 and 1; well below 1/n is usual."
    )


def test_help_lists_the_groups_and_cfg_shows_the_resolved_configuration(tmp_path):
    shown = command("--help", cwd=tmp_path).stdout
    for line in (
        "group: conv_fc, custom, flat, per_layer",
        "mechanism: joint, separate",
        "bound: dimension, fixed, uniform",
    ):
        assert line in shown
    shown = command("--cfg", "job", "mechanism=joint", cwd=tmp_path).stdout
    assert "delta: 0.0001" in shown and "_target_: dpexp.privacy.mechanisms.Joint" in shown and "${" not in shown


def test_the_configuration_is_shown_without_torch(tmp_path):
    code = (
        "import sys; sys.argv = ['dpexp', '--cfg', 'job']; from dpexp.__main__ import main; main();"
        "print([m for m in ('torch', 'pytorch_lightning', 'mlflow') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout
    assert shown.rstrip().endswith("[]")


def test_configuration_files_ship_with_the_package():
    """Every folder of conf/ and sweeps/ that a wheel must hold is declared."""
    import tomllib

    top = Path(__file__).parent.parent
    declared = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert declared["package-dir"]["dpexp.conf"] == "conf" and declared["package-dir"]["dpexp.conf.sweep"] == "sweeps"
    packages = {
        ".".join(path.parent.relative_to(top).parts)
        for path in (top / "dpexp").rglob("*.py")
        if "conf" not in path.parts
    }
    assert packages <= set(declared["packages"])
