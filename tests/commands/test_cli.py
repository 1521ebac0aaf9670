"""The command line: what it accepts, refuses, prints and leaves behind."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from jobs import result_of, store_of
from safetensors.torch import load_file

import dpexp
from dpexp import config
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.build import data_of
from dpexp.commands.command_line import as_overrides, compose, help, read_options
from dpexp.commands.table_schema import Options, Source
from dpexp.errors import ConfigError

SMALL = ("tracking=none", "sampling.steps=3", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0",
         "accountant=moments")  # fmt: skip
QUICK = (*SMALL, "model=logistic")
OWN = """
import errno, torch, pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dpexp.training.data import Digits

def plain(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

class Whole(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.net = plain(width)
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def test_step(self, batch, batch_idx):
        self.log('test_accuracy', (self.net(batch[0]).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class TwoOptimizers(Whole):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], 0.1) for p in self.parameters()]

class NoTestSet(pl.LightningDataModule):
    def train_dataloader(self):
        return Digits().train_dataloader()

class TestSetOfNone(NoTestSet):
    def test_dataloader(self):
        return None

class Empty(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(0, 1, 8, 8)), batch_size=4, shuffle=True)

class NoTrainingSet(pl.LightningDataModule):
    pass

class Unfinished(Whole):
    def __init__(self):
        super().__init__()
        self.net[1].weight.data[0, 0] = float('nan')

class Later(Whole):
    def __init__(self, width):
        super().__init__()
        self.net, self.width = None, width
    def configure_model(self):
        self.net = self.net or plain(self.width)

class Foreign(Whole):
    __module__ = 'lightning.pytorch.core'

class Watched(Whole):
    def test_step(self, batch, batch_idx):
        self.tested = True
        torch.rand(1)
        return super().test_step(batch, batch_idx)
    def on_train_end(self):
        assert not hasattr(self, 'tested') and not self.trainer.callback_metrics.keys() & {'test_accuracy'}

class FailsToValidate(Whole):
    def validation_step(self, batch, batch_idx):
        {}['no such key']

class OtherLabels(Digits):
    def __init__(self, users):
        super().__init__()
        self.test = TensorDataset(self.test.tensors[0], self.test.tensors[1] + self.more)
    def val_dataloader(self):
        return Digits.test_dataloader(Digits())
    more = 5

class NegativeLabels(OtherLabels):
    more = -1

class Unreadable(OtherLabels):
    def test_dataloader(self):
        raise FileNotFoundError('no such file: test.npy')

class Fails(Digits):
    def __init__(self, where, batch_size=256, num_workers=0):
        super().__init__()
        self.where = where
        self.fail('__init__')
    def fail(self, name):
        if name == self.where:
            open('nowhere/train.csv')
        if self.where == name + '_import':
            import nowhere
        if self.where == name + '_text':
            raise ValueError('record 7 is odd')
    def prepare_data(self):
        self.fail('prepare_data')
    def setup(self, stage):
        self.fail('setup')
    def train_dataloader(self):
        self.fail('train_dataloader')
        return super().train_dataloader()
    def val_dataloader(self):
        self.fail('val_dataloader')
        return super().val_dataloader()

class FullDisk(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise OSError(errno.ENOSPC, 'No space left on device', '/tmp/source', None, 'here/last.part')
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, `own_for_test`."""
    (tmp_path / "own_for_test.py").write_text(OWN)
    sys.modules.pop("own_for_test", None)
    monkeypatch.syspath_prepend(tmp_path)


def test_users_bring_their_own_model_group_and_scheduler(dpexp_job, tmp_path, own):
    """A plain module; a LightningModule that makes its parameters late; and a group in their own --config-dir."""
    (tmp_path / "my" / "group").mkdir(parents=True)
    (tmp_path / "my" / "group" / "early_late.yaml").write_text(
        "_target_: dpexp.privacy.plan.groups.Groups\ngroups:\n  early: {parameters: ['*.1.*']}\n  late: {rest: true}\n"
    )
    chosen = ("--config-dir", "my", *SMALL, "group=early_late", "+model.width=7", "~model.shape", "~model.classes")
    scheduler = "scheduler={_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.9}"
    plain = dpexp_job(*chosen, "model._target_=own_for_test.plain", scheduler)
    whole = dpexp_job(*chosen, "model._target_=own_for_test.Later")
    assert set(result_of(plain)["groups"]) == set(result_of(whole)["groups"]) == {"early", "late"}


def test_that_public_batches_are_tried_changes_nothing(dpexp_job, own, monkeypatch):
    from dpexp.training.callbacks import Watch

    model = ("~model.shape", "~model.classes", "model._target_=own_for_test.Watched")
    chosen = (*SMALL, *model, "privacy.noise_seed=1", "trainer.num_evaluations=1")
    tried = dpexp_job(*chosen)
    monkeypatch.delattr(Watch, "on_fit_start")
    not_tried = dpexp_job(*chosen, "+trainer.num_sanity_val_steps=0")
    first, second = (load_file(output / "weights.safetensors") for output in (tried, not_tried))
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert result_of(tried)["private"] is False, "its noise seed is known"


@pytest.mark.parametrize("callbacks, data", [("ema", "NoTestSet"), ("[]", "TestSetOfNone")])
def test_data_without_a_test_set_trains_and_leaves_a_model(dpexp_job, own, callbacks, data):
    with pytest.warns(UserWarning, match="could not be tested, and is kept: .*dataloader"):
        own_data = (f"data.module._target_=own_for_test.{data}", "~data.module.users")
        output = dpexp_job(*QUICK, *own_data, f"callbacks={callbacks}")
    result = result_of(output)
    assert result["metrics"] == {} and result["rounds"] == len(read_ledger(output / "ledger.jsonl"))
    assert (output / "weights.safetensors").exists() and (output / "card.md").exists()
    if data == "NoTestSet":
        with pytest.raises(SystemExit, match=r"evaluate: .*test_dataloader"):
            dpexp_job("evaluate", str(output))


# arguments -> words of the refusal, before anything is released
BAD = {
    "alpha=adaptive mechanism=by_group mechanism.by_group={all:separate}": "alpha gives the scales of joint clipping",
    "model=logistic tracking=mlflow register=a/b": "register=a/b cannot be used",
    "objective=f1": "objective=f1 is not an objective of this job: ",
    "objective=test_loss train=false": "objective=test_loss is not an objective of this job: ",
    "objective=noise_multiplier privacy.epsilon=null privacy.noise_multiplier=1":
        "objective=noise_multiplier is not an objective of this job: ",
    "objective=test_loss_unaveraged": "objective=test_loss_unaveraged is not an objective of this job: ",
    "objective=epsilon privacy.enabled=false": "objective=epsilon is not an objective of this job: ",
    "model._target_=nowhere.Net": "No module named 'nowhere'",
    "~model.shape ~model.classes model._target_=own_for_test.FailsToValidate trainer.num_evaluations=1":
        "first batch of the validation set fails (KeyError: 'no such key')",
    "alpha=adaptive": "alpha gives the scales of joint clipping; choose mechanism=joint too",
    "mechanism=joint clip_norm=dimension": "say these as well: alpha=fixed, uniform, dimension or adaptive",
    "trainer.accelerator=abacus": "(trainer.accelerator=abacus, trainer.precision=32-true)",
    "data.n=${nowhere}": "data.n: there is no nowhere; give another value.",
    "clip_rule=global": "clip_rule.threshold must be given",
    "group._target_=nowhere.f": "group: nowhere.f cannot be made: No module named 'nowhere'.",
    "sampling._target_=nowhere.P": "sampling.steps=None, sampling.epochs=40: No module named 'nowhere'.",
    "privacy_unit._target_=dpexp.Poisson": "privacy_unit: dpexp.Poisson is no subclass of dpexp.privacy.sampling.",
    "privacy_unit=microbatch privacy_unit.size=x": "privacy_unit.size=x must be an integer of at least 1.",
    "+model.inner={_target_:nowhere.f}": "model.inner={'_target_': 'nowhere.f'}: No module named 'nowhere'.",
    "optimizer=adam optimizer.betas=[0.9]": "betas=[0.9], optimizer.weight_decay=0.0: list index out of range",
    "optimizer=adam optimizer.betas=[0.9,2]": "optimizer: torch.optim.Adam cannot be made of optimizer.lr=auto, ",
    "scheduler={_target_:torch.optim.lr_scheduler.StepLR,step_size:0}": "cannot be made of scheduler.step_size=0: ",
    "hydra.run.dir=/dev/null": "hydra.run.dir=/dev/null cannot be read or written: it is a file, and must be a folder.",
    "clip_norm=adaptive +clip_norm.value=0.1": "clip_norm.value=0.1 is no option of dpexp.AdaptiveClipNorm",
    "mechanism=joint alpha=uniform alpha.total=-1": "alpha.total=-1 must be a finite number above 0.",
    "model._target_=torch.nn.BatchNorm1d +model.num_features=64 ~model.shape ~model.classes":
        "the layer (root) (BatchNorm1d) mixes the records",
    "model._target_=builtins.dict": "gives an object of type dict, not a torch.nn.Module",
    "optimizer.lr=abc": "optimizer.lr=abc must be a number, as torch.optim.SGD takes it",
    "model=logistic model.classes=0": "model: it has no trainable parameter (all are frozen, or have no element)",
    "tracking=mlflow tracking.uri=sqlite:////dev/null/x.db": "tracking.uri=sqlite:////dev/null/x.db cannot be used",
    "data=mnist data.root=nowhere": "data.root=nowhere lacks train-images-idx3-ubyte.gz",
    "data.shape=[1,9,9] model=mlp": "cannot process the validation set's records, of shape [1, 8, 8]; data.shape",
    "data.classes=5 model=logistic": "the validation set has a label 9; data.classes, or the model's own arguments",
    "data.module={_target_:own_for_test.OtherLabels} trainer.num_evaluations=0":
        "has shape [2, 10], but the test set has a label 14; data.classes, or the model's own arguments, must give",
    "data.module={_target_:own_for_test.NegativeLabels}": "data.module: the test set has a label -1; labels must be",
    "data.module={_target_:own_for_test.Unreadable}":
        "data.module: test_dataloader of own_for_test.Unreadable failed (FileNotFoundError in own_for_test.py, line",
    "callbacks=[early_stopping] callbacks.early_stopping.monitor=test_los":
        "EarlyStopping monitors test_los, which neither training_step nor the validation logs; known: epsilon, test_a",
    "callbacks=[ema] callbacks.ema.decay=[1]": "callbacks.ema.decay=[1] must be a number",
    "model=mlp model.hidden=wide": "mlp cannot be made of model.shape=[1, 8, 8], model.classes=10, model.hidden=wide: ",
    "~model.shape ~model.classes model._target_=own_for_test.Unfinished":
        "model: its initial weights net.1.weight are not finite",
    "~model.shape ~model.classes model._target_=own_for_test.Foreign":
        "is of the package lightning, and dpexp uses pytorch_lightning, since lightning was not imported before dpexp",
    "hydra.run.dir=/dev/null/here": "hydra.run.dir=/dev/null/here cannot be read or written: Not a directory",
    "~model.shape ~model.classes model._target_=own_for_test.TwoOptimizers":
        "as in a GAN, need a loop of your own, with a dpexp.Private for each that learns from records",
    "data.features_of={_target_:torch.nn.Linear,in_features:3,out_features:2}":
        "data.features_of: a call of torch.nn.Linear failed (RuntimeError",
    "data.features_of=3": "data.features_of=3 does not name what to make",
    "data.features_of={_target_:torch.nn.Linear,in_features:8}": "data.features_of: torch.nn.Linear cannot be made of",
    "data.features_of={_target_:dpexp.training.data.Backbone,model:{_target_:torch.nn.Identity},layer:7}":
        "data.features_of.layer=7 is no module of Identity",
    "data.module._target_=own_for_test.Empty ~data.module.users": "data.module: the training set is empty",
    "data.module._target_=own_for_test.NoTrainingSet ~data.module.users": "data.module: it has no train_dataloader",
    "~model.shape ~model.classes model._target_=own_for_test.Whole preprocessing=[pca]":
        "is for a plain model, and model=own_for_test.Whole is a LightningModule; use PreprocessedModel",
}  # fmt: skip
# The same, before torch is imported
EARLY = {
    "trian": "trian: this is no key=value, and no command. Known: account, audit, certificate, copy, evaluate",
    "--resolve": "--resolve needs --cfg job",
    "--turbo": "unrecognized arguments: --turbo",
    "--config-dir nowhere": "--config-dir=nowhere: there is no such folder",
    "--config-dir": "--config-dir/-cd: expected one argument",
    "--config-name nowhere": "Cannot find primary config 'nowhere'",
    "help mechanims": "help mechanims: there is no 'mechanims'; did you mean 'mechanism'? Known: account, ",
    "help defaults": "there is no 'defaults'",
    "help model data": "one name at a time",
    "rounds=40": "rounds is internal and follows from sampling; give sampling.steps",
    "draw=1": "draw is internal",
    "norms=jl": "norms is no option, since norms are always exact, and never estimated by projections",
    "+norms=jl": "norms is no option",
    "grop=flat": "there is no 'grop'; did you mean 'group'",
    "group=flta": "group has no option 'flta'; did you mean 'flat'",
    "max_grad_norm=1": "there is no 'max_grad_norm'; did you mean 'clip_norm'",
    "lr=0.1": "lr=0.1: there is no 'lr'; did you mean optimizer.lr?",
    "learning_rate=0.1": "did you mean optimizer.lr?",
    "batch_size=64": "did you mean sampling.expected_batch_size or sampling.max_batch_size or trainer.max_physical_",
    "optimizer.betas=[0.9,0.9]": "optimizer has no key 'betas', as optimizer=adam has. To add one that its _target_",
    "optimizer.momentum=2": "optimizer.momentum=2 must lie in [0, 1).",
    "data=labelled_texts model=mlp data.path=a data.test_path=b data.n=9 data.class_names=[a,b]":
        "data.module.tokenizer: there is no model.name; give model=causal_lm or model=sequence_classifier or another",
    "privacy.noise_multiplier=1 sampling.steps=100000000000000000000":
        "sampling.steps or sampling.epochs gives 100000000000000000000 rounds; at most 2^31 are possible.",
    "privacy.enabled=false sampling.epochs=1e20": "sampling.epochs gives 4",
    "data.path=a.csv": "data.path=a.csv: the chosen data has no such key, as data=csv or data=documents or ",
    "data=synthetic data.class_names=[a,b]": "the chosen data has no such key, as data=huggingface or data=images",
    "checkpoint.every_n_rounds=0": "checkpoint.every_n_rounds=0 must be at least 1, or null.",
    "trainer.threads=100000000000000000000": "must be between 1 and 1024",
    "sampling.q=0.1": "sampling.q: sampling has no key 'q'; did you mean 'sampling_rate'",
    "+privacy.max_loss=1": "privacy.max_loss: privacy has no key 'max_loss'; known: enabled, epsilon",
    "audit.num_canaries=200": "no audit is chosen; add audit=dirac",
    "hydra.run.dir=/proc/x": "/proc/x cannot be read or written: No such file or directory.",
    "-m hydra/launcher=ray": "hydra/launcher=ray is not installed; pip install 'dpexp[EXTRA]' with EXTRA joblib",
    "-m hydra/sweeper=optuna": "hydra/sweeper=optuna is not installed; pip install",
    "privacy.epsilon=1,2": "'privacy.epsilon=1,2': several values need -m",
    "privacy.epsilon={a:[1": "privacy.epsilon={a:[1: ",
    "+modle.x=3": "there is no 'modle'; did you mean 'model'",
    "model=null": "model has no option 'null'. Known: causal_lm, cnn, logistic",
    "model=least_squares": "model=least_squares is gone; choose logistic, which was as good or better",
    "model._target_=null": "does not name what to make",
    "optimizer.lr=nan": "optimizer.lr=nan is not a number",
    "privacy.epsilon=1 privacy.noise_multiplier=1": "exactly one of privacy.epsilon or privacy.noise_multiplier",
    "privacy.adjacency=neighbours": "privacy.adjacency=neighbours is unknown",
    "sampling=fixed_size accountant=strong": "accountant=strong has no bound for sampling=fixed_size",
    "sampling.steps=0": "sampling.steps=0 must be an integer of at least 1",
    "sampling=shuffle sampling.sampling_rate=0.5 data.n=2000 schedule.q=2": "schedule.q=2 needs sampling=poisson",
    "calibrate=beta": "calibrate=beta is unknown",
    "allocation=explicit privacy.epsilon=null": "exactly one of allocation.sigma or allocation.sigma_of_",
    "calibrate=steps": "calibrate=steps solves for the target privacy.epsilon=3.0 from the noise",
    "data.n=0": "data.n=0 must be an integer of at least 1",
    "data.shape=[1,0]": "data.shape=[1, 0] must hold integers of at least 1",
    "data.n=???": "data.n must be given",
    "--config-dir broken model=mine": 'not YAML: mapping values are not allowed here in "',
    "trainer.max_physical_batch_size=many": "trainer.max_physical_batch_size=many must be an integer of at least 1",
    "trainer.compile=maybe": "trainer.compile=maybe must be true, false or auto",
    "trainer.memory=least": "trainer.memory=least must be usual or low",
    "seed=-1": "seed=-1 must lie between",
    "diagnostics=loud": "diagnostics=loud is unknown; choose one of none, unsafe",
    "data.id='postgresql://me:x@h/db'": "data.id='postgresql://me:x@h/db' has a password, which would be shown",
    "accountant=moments accountant.names=[gdp]": "accountant=gdp is gone: its ε was an approximation",
    "train=perhaps": "train=perhaps: ",
    "mechanism=by_group mechanism.by_group={conv:join}": "mechanism.by_group.conv=join must be one of joint, separate",
    "mechanism=by_group mechanism.by_group=joint": "mechanism.by_group=joint must be {group: option}",
    "mechanism=by_group": "mechanism.by_group must be given",
    "mechanism=joint clip_norm.total=2": "clip_norm.total: no clip_norm is chosen; add clip_norm=OPTION",
    "mechanism=by_group mechanism.by_group={all:separate} clip_norm.total=2": "clip_norm.total: no clip_norm is chosen",
    "register=mine tracking=none": "register=mine needs MLflow's registry",
    "hydra.run.dir=taken": "taken already holds a run, with its config.yaml",
}  # fmt: skip


def is_refusal(message, words):
    return isinstance(message, str) and message.startswith("dpexp: ") and words in message and "\n" not in message


# where a data module's code fails -> what is told: not its text where records of the training set may be in it
FAILS = {
    **{name: f"{name} of own_for_test.Fails failed (FileNotFoundError in own_for_test.py"
       for name in ("prepare_data", "setup", "train_dataloader")},
    **{f"{name}_text": f"{name} of own_for_test.Fails failed (ValueError in own_for_test.py, line"
       for name in ("setup", "train_dataloader")},
    "val_dataloader": ", fail: [Errno 2] No such file or directory: 'nowhere/train.csv').",
    "val_dataloader_text": ", fail: record 7 is odd).",
    "setup_import": ", fail: No module named 'nowhere').",
    "__init__": "own_for_test.Fails cannot be made of data.module.where=__init__: [Errno 2]",
}  # fmt: skip


def test_an_error_in_a_data_module_is_told_without_the_text_that_may_quote_a_record(own):
    cfg = compose("~data.module.users", "data.module._target_=own_for_test.Fails", "+data.module.where=null")
    for where, said in FAILS.items():
        cfg.data.module.where = where
        with pytest.raises(ConfigError, match=f"^data.module: .*{re.escape(said)}") as told:
            data = data_of(cfg)
            data.prepare_data()
            data.setup("fit")
            data.train_dataloader()
            data.val_dataloader()
        assert ("record 7" in str(told.value)) is ("record 7" in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_named(dpexp_job):
    with pytest.raises(SystemExit, match=r"without a GPU that torch finds, choose trainer=cpu\.$"):
        dpexp_job("tracking=none", "trainer=gpu", "model=logistic")


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_sentence_before_training(arguments, dpexp_job, own, monkeypatch, tmp_path, caplog, capfd):
    """And nothing of the libraries' own is printed beside it."""

    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("pooch.core.stream_download", no_network)
    with pytest.raises(SystemExit) as stopped:
        dpexp_job("tracking=none", *arguments.split())
    assert is_refusal(stopped.value.code, BAD[arguments]), stopped.value.code
    assert not [path for path in tmp_path.rglob("ledger.jsonl") if len(read_ledger(path))]
    assert capfd.readouterr().err == "" and not caplog.records


ONE_PROCESS = """
import json, sys, dpexp
from dpexp.__main__ import main
from hydra._internal.hydra import Hydra
Hydra.get_mode = lambda *_, **__: None  # as `composed_once` does
def said(*words):
    sys.argv = ['dpexp', *words]
    try:
        main()
    except SystemExit as stopped:
        return stopped.code
def imported():
    slow = 'torch', 'pytorch_lightning', 'mlflow', 'dp_accounting', 'pandas'
    return [name for name in slow if name in sys.modules]
*refused, job = json.loads(sys.argv[1])
refusals = [said(*words.split()) for words in refused]
said('--cfg', 'job', 'mechanism=joint')
n = dpexp.compose('mechanism=joint').data.n
early = imported()
said(*job.split())
print(json.dumps([refusals, n, early, imported()]))
"""


def test_what_is_slow_is_imported_where_it_is_needed(tmp_path):
    """All in one process, whose modules tell: refusals, the resolved configuration and compose without torch; then a
    job without MLflow. Its warnings are sentences; those of others say where they come from."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("")
    (tmp_path / "broken" / "model").mkdir(parents=True)
    (tmp_path / "broken" / "model" / "mine.yaml").write_text("a: b: c\n")
    words = json.dumps([*EARLY, " ".join((*QUICK, "data.n=14370"))])
    run = [sys.executable, "-c", ONE_PROCESS, words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    refusals, n, early, late = json.loads(last)
    pairs = zip(EARLY.items(), refusals, strict=True)
    assert [(words, said) for (words, expected), said in pairs if not is_refusal(said, expected)] == []
    assert "  delta: 0.0001" in shown and "  _target_: dpexp.Joint" in shown and n == 1437
    assert "${" not in "".join(shown) and early == [] and "torch" in late and "mlflow" not in late
    assert list(tmp_path.rglob("weights.safetensors")) and not list(tmp_path.rglob("mlflow_model"))
    (told,) = [line for line in done.stderr.splitlines() if "data.n" in line]
    assert told.startswith("dpexp: data.n=14370, but the training set holds 1437 records")
    assert "0.1 times as long as intended" in told
    assert "Warning" not in done.stderr and "warnings.warn" not in done.stderr
    assert "x.py:7: UserWarning: theirs" in warnings.formatwarning("theirs", UserWarning, "x.py", 7)


# argument -> the value that Hydra reads
READ = {
    "data.path=data (1).csv": "data (1).csv", "data.path=a,b.csv": "a,b.csv", "data.path=a=b.csv": "a=b.csv",
    "data.path=[x].csv": "[x].csv", "data.path=[x]": "[x]", "data.path={a}": "{a}", "data.path=é日.csv": "é日.csv",
    "data.path=it's \"x\"": "it's \"x\"", "data.path= a ": " a ", "data.path=$x": "$x", "data.path=1e5": "1e5",
    "data.path=007": "007", "data.path=true": "true", "data.path=a\\'b": "a\\'b", "data.path=~x#;&": "~x#;&",
    "data.path='a, b'": "a, b", 'data.path="a, b"': "a, b", "data.path=null": None, "data.path=": "",
    "data.path=a\\,b": "a\\,b", "data.path=a\\\\b": "a\\\\b", "data.path=\\ a": "\\ a", "data.path=str(3)": "str(3)",
    "data.path=NULL": "NULL", "data.path=1_0": "1_0", "data.path=1E5": "1E5", "data.path=TRUE": "TRUE",
    "data.target=Age (years), at start": "Age (years), at start", "++data.path=a(1)": "a(1)",
    "data.shape=[1,8,8]": [1, 8, 8], "+model.weights=w (1).pt": "w (1).pt", "seed=7": 7, "privacy.adjacency=null": None,
    "hydra.run.dir=(1), a": "(1), a",
}  # fmt: skip


@pytest.mark.parametrize("argument", READ)
def test_a_text_is_read_as_it_is_and_other_values_by_hydras_grammar(argument):
    (override,) = OverridesParser.create().parse_overrides(as_overrides([argument]))
    assert override.value() == READ[argument]
    assert as_overrides(as_overrides([argument])) == as_overrides([argument])


def test_a_composed_configuration_has_texts_as_they_are_but_for_interpolations():
    data = compose("data.path=[x] (1)", "data.id=007", "data.test_path=(${seed}).csv").data
    assert (data.path, data.id, data.test_path) == ("[x] (1)", "007", "(0).csv")


def test_sweeps_and_flags_stay_as_they_are():
    given = ["--config-dir", "a=(1)", "-m", "data.path=a.csv,'b,c'", "seed=1,2", "data.root=choice(a,b)"]
    assert as_overrides([*given, "data.test_path=a (1)"]) == [*given, "data.test_path='a (1)'"]


def test_an_option_of_a_command_is_a_text_as_it_is():
    for text in ("${data.n}", "???", "$${x}", "\\${x}", "1e-5", "a=null", "[a", "", "~"):
        assert read_options(Options, [f"data.path={text}", "unsafe=true"]) == Options(Source(path=text), unsafe=True)
    assert read_options(Options, ["data.path=null"]) == Options()


def test_a_second_job_in_a_folder_changes_nothing(dpexp_job, tmp_path):
    planned = (*QUICK, "train=false")
    dpexp_job(*planned, "hydra.run.dir=a/here")
    dpexp_job("-m", *planned, "seed=1", "hydra.sweep.dir=a/there")

    def files():
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    folders = "hydra.run.dir=a/here", "hydra.run.dir=a/there/0", "hydra.run.dir=a/there", "hydra.sweep.dir=a/there"
    for folder in folders:
        several = ("-m", "seed=1,3") if "sweep" in folder else ()
        with pytest.raises(SystemExit, match="already holds a run"):
            dpexp_job(*several, folder, *planned)
    assert files() == before


def test_a_training_that_diverges_fails(dpexp_job, tmp_path):
    with pytest.raises(SystemExit, match="are not finite"):
        dpexp_job("sampling.steps=30", "model=logistic", "privacy.noise_multiplier=1", "optimizer.lr=inf")
    (run,) = store_of(tmp_path).search_runs(["1"])
    assert run.info.status == "FAILED" and "are not finite" in run.data.tags["dpexp.error"]


def test_a_delta_that_protects_nobody_is_told(dpexp_job, capsys):
    dpexp_job(*QUICK, "train=false", "privacy.delta=0.01")
    assert "privacy.delta=0.01 is not below 1/n = 0.0007" in capsys.readouterr().out


def test_a_disk_that_is_full_in_a_round_is_told_with_what_is_spent(dpexp_job, own, capsys):
    """As a copy says it, with the file that it read and the one that it could not write."""
    with pytest.raises(SystemExit, match=r"^dpexp: here/last.part cannot be .* written: No space left on device\.$"):
        dpexp_job(*QUICK, "callbacks={full: {_target_: own_for_test.FullDisk}}")
    assert "Interrupted after 2 of 3 rounds: ε = " in capsys.readouterr().out


def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m dpexp help | head -1"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_help_lists_commands_groups_and_values(dpexp_job, capsys):
    shown = []
    for words in ("--help", "help", "model=mlp -h", "--version"):
        dpexp_job(*words.split())
        shown.append(capsys.readouterr().out)
    assert shown[3] == f"dpexp {dpexp.__version__}\n" and shown[0] == shown[1] == shown[2]
    assert {
        "group: conv_fc, custom, flat, per_layer",
        "mechanism: by_group, joint, separate",
        "clip_norm: adaptive, by_group, dimension, fixed, uniform",
        "`python -m dpexp predict RUN FILE` lets a trained model predict.",
        "  noise_multiplier: null                         # z itself",
    } <= {*shown[0].splitlines()}
    assert not re.search("^(_target_|defaults|draw:|rounds:)", shown[0], re.M)


def test_version_says_what_a_report_of_a_bug_needs(dpexp_job, capsys, monkeypatch, tmp_path):
    dpexp_job("version")
    own, packages, device = capsys.readouterr().out.splitlines()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=config.CONF.parent, capture_output=True, text=True).stdout
    assert own.startswith(f"dpexp {dpexp.__version__}" + (f", commit {head.strip()}" if head else ""))
    assert packages.startswith(f"Python {platform.python_version()}, torch {torch.__version__}, pytorch-lightning ")
    assert device.endswith(f"; {platform.platform()}") and ("no GPU" in device) is not torch.cuda.is_available()
    inside = tmp_path / "env" / "dpexp" / "conf"  # an installed dpexp in another project's checkout has no commit
    inside.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr("dpexp.commands.versions.CONF", inside)
    dpexp_job("version")
    assert capsys.readouterr().out.startswith(f"dpexp {dpexp.__version__}\n")


def test_help_on_one_name(tmp_path):
    assert help(["mechanism"]) == (
        "How a group is clipped: as one vector, or its vectors scaled and clipped together.\n"
        "\n"
        "mechanism=by_group\n"
        "    One for each group: 'mechanism.by_group={conv: joint, fc: separate}'. The name of an option, or its "
        "_target_.\n"
        "    `clip_norm` gives S_g; by default that of each group's own mechanism.\n"
        "    defaults:\n"
        "      - override /clip_norm: null\n"
        "\n"
        "    mechanism:\n"
        "      by_group: ???  # {group: name of an option, or its _target_ with values}\n"
        "\n"
        "mechanism=joint\n"
        "    Vectors are scaled by 1/α_j, clipped together to S_g in (0, √k], and scaled back. `alpha` gives α_j, and "
        "`clip_norm`\n"
        "    S_g; by default √k.\n"
        "    defaults:\n"
        "      - override /clip_norm: null\n"
        "\n"
        "    mechanism:\n"
        "      _target_: dpexp.Joint\n"
        "      alpha: ${alpha}\n"
        "\n"
        "mechanism=separate (the default)\n"
        "    A group is clipped as one concatenated vector."
    )
    (tmp_path / "my" / "group").mkdir(parents=True)
    (tmp_path / "my" / "group" / "norms_apart.yaml").write_text("# Norms apart.\n_target_: x.Y\nwidth: 2  # of each\n")
    shown = help(["group", "--config-dir", str(tmp_path / "my")])
    assert "group=norms_apart\n    Norms apart.\n    width: 2  # of each" in shown
    assert "group=flat (the default)" in shown and "norms_apart" not in help(["group"])
    checkpoint = help(["checkpoint"])
    assert checkpoint.startswith("checkpoint:\n  every_n_rounds: null") and "privacy" not in checkpoint
    assert "\n\nhydra/sweeper=grid (the default)\n    Every combination of the values" in help(["hydra/sweeper"])
    assert help(["predict"]).startswith("`python -m dpexp predict RUN")


def test_every_configuration_file_says_first_what_it_is():
    paths = [*config.CONF.glob("**/*.yaml"), *config.CONF.glob("sweep/*.yaml")]
    texts = {path: path.read_text().removeprefix("# @package _global_\n") for path in paths}
    assert len(paths) > 100 and not [path for path, text in texts.items() if not text.startswith("# ")]


COMPLETE = """
eval "$(dpexp -sc install=bash)"
complete -p dpexp
for line in "dpexp group=" "dpexp group=per" "dpexp privacy.e"; do
    COMP_LINE="$line"; COMP_WORDS=($line); COMP_CWORD=1; COMP_POINT=${#line}
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_groups_options_and_values(tmp_path):
    """With the installed command; `python -m` has nothing that bash could complete by."""
    dpexp = tmp_path / "dpexp"
    dpexp.write_text(f"#!{sys.executable}\nfrom dpexp.__main__ import main\nmain()\n")
    dpexp.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", COMPLETE], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    registered, *completed = done.stdout.splitlines()
    assert registered.endswith("-F hydra_bash_completion dpexp")
    assert completed == [
        "group=conv_fc group=custom group=flat group=per_layer", "group=per_layer", "privacy.enabled= privacy.epsilon=",
    ]  # fmt: skip
