"""What no Trainer, model or data set may do: each is refused by a sentence, before the first round where possible."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from pytorch_lightning.callbacks import BaseFinetuning, GradientAccumulationScheduler, LearningRateFinder
from pytorch_lightning.tuner import Tuner
from test_isolation import CLASSES, Items, Model, rows, stepping, trained
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, default_collate

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
HOOKS = {
    "register_hook": lambda g: g,
    "register_post_accumulate_grad_hook": lambda p: None,
    "register_full_backward_hook": lambda *a: None,
    "register_full_backward_pre_hook": lambda *a: None,
}


def with_hook(kind):
    module = Model()
    layer = module.net[0]
    getattr(layer if "full" in kind else layer.weight, kind)(HOOKS[kind])
    return module


def hooking(m, x, y):
    """Untraced, each record adds a hook; a traced step's belongs to the graph of one record."""
    m.net[0].weight.register_hook(lambda g: g / 2)
    return F.cross_entropy(m.net(x[x.sum(1) != 0]), y)


def callback(**hooks):
    return type("Odd", (pl.Callback,), {name: lambda self, *given, do=do: do(*given) for name, do in hooks.items()})()


class Thawing(BaseFinetuning):
    def freeze_before_training(self, module): ...

    def finetune_function(self, module, epoch, optimizer):
        module.net[0].weight.requires_grad_(epoch == 1)


def frozen():
    module = Model()
    module.net[0].weight.requires_grad_(False)
    return module


class FunctionalBatchNorm(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, torch.zeros(5), torch.ones(5), training=True)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("no backward pass")


def in_place(m, x, y):
    h = m.net[0](x).exp()
    scores = m.net[2](h)
    h += 1
    return F.cross_entropy(scores, y) + h.mean()


class Missing(Items):
    def __getitem__(self, index):
        raise FileNotFoundError("no such image")


def fit_again(first, module, *_):
    if first.global_step == 1:
        trainer(max_steps=1).fit(module, DataLoader(Items(rows(4)), batch_size=2))


def nosy(owner, hook):
    return type("Nosy", (owner,), {hook: lambda self, *given: given[-2][0].mean()})()


def of_items(make):
    def loader():
        made = make()
        return DataLoader(Items(rows(3)), batch_size=2, collate_fn=lambda items: (made, items[0][1][None]))

    return {"data": loader}


def called(**callbacks):
    return {"callbacks": lambda: [callback(**callbacks)], "steps": 3}


def net(*layers):
    return {"module": lambda: Model(nn.Sequential(*(layer() for layer in layers)))}


UNTRAINED, LINEAR, CLASSIFY = "fails for every synthetic record", lambda: nn.Linear(4, 5), lambda: nn.Linear(5, CLASSES)
SEALED, GRADIENT = "sealed", r"net\.0.*hook, which would not be called"
REFUSED = {  # what is said, whether some rounds are released before, and functions that make the arguments of `trained`
    # Of the Trainer
    "layers that thaw": ("changes the parameters, or which", False, {
        "module": frozen, "callbacks": lambda: [Thawing()], "steps": 3}),
    "rounds accumulated": ("accumulate_grad_batches=2", True, {
        "callbacks": lambda: [GradientAccumulationScheduler(scheduling={0: 1, 1: 2})], "steps": 3}),
    "no average released": ("released no average", False, {
        "module": lambda: type("Odd", (Model,), {"optimizer_step": lambda *given: given[-1]()})(), "steps": 3}),
    "a fit inside a fit": ("", True, called(on_train_batch_start=fit_again)),
    "a step outside rounds": ("outside the plan's rounds", False, called(
        on_train_epoch_start=lambda trainer, module: module.training_step(default_collate(rows(2)), 0).backward())),
    "more steps than planned": ("min_steps=9 is more than the plan's 3 rounds", False, {"steps": 3, "min_steps": 9}),
    "a learning rate finder": ("LearningRateFinder trains on records without noise", False, {
        "module": lambda: Model(lr=0.1), "callbacks": lambda: [LearningRateFinder(attr_name="rate")]}),
    **{f"{hook} reads a batch, {owner.__name__}": (SEALED, hook.endswith("end"), (
        {"module": functools.partial(nosy, Model, hook)} if owner is Model
        else {"callbacks": lambda hook=hook: [nosy(pl.Callback, hook)]}))
        for hook in ("on_train_batch_start", "on_train_batch_end") for owner in (Model, pl.Callback)},
    # Of the model
    **{kind: (GRADIENT, False, {"module": functools.partial(with_hook, kind)}) for kind in HOOKS},
    "a callback's hook": (r"net\.0\.weight has a gradient hook", False, called(
        on_train_start=lambda trainer, module: module.net[0].weight.register_hook(lambda g: 0 * g))),
    "a step's hook": ("differs after other records", False, {"module": functools.partial(stepping, hooking)}),
    "spectral norm": ("weight_norm", False, net(lambda: parametrizations.spectral_norm(nn.Linear(4, CLASSES)))),
    "old spectral norm": ("weight_norm", False, net(lambda: nn.utils.spectral_norm(nn.Linear(4, CLASSES)))),
    "a scripted module": (r"module net\.0 is a TorchScript module", False, net(
        lambda: torch.jit.script(nn.Linear(4, CLASSES)))),
    "batch norm, called": ("training_step", False, {
        **net(LINEAR, FunctionalBatchNorm, CLASSIFY), "callback": {"max_physical_batch_size": 1}}),
    "no backward pass": (UNTRAINED, False, {
        "module": lambda: stepping(lambda m, x, y: F.cross_entropy(NoBackward.apply(m.net(x)), y))}),
    "a backward pass that fails": (UNTRAINED, False, {"module": lambda: stepping(in_place)}),
    # Of the data
    "whole batches as items": ("batch_size=None", False, {
        "data": lambda: DataLoader(Items([(torch.randn(3, 4), torch.zeros(3))]), batch_size=None)}),
    "no record that can be fetched": (
        r"none of the records .* can be fetched: FileNotFoundError: no such image", False, {
            "data": lambda: DataLoader(Missing(rows(5)), batch_size=2)}),
    "sparse tensors": ("sparse, nested or quantized", False, of_items(lambda: torch.eye(2).to_sparse())),
    "nested tensors": ("sparse, nested or quantized", False, of_items(
        lambda: torch.nested.nested_tensor([torch.ones(2)]))),
    "quantized tensors": ("sparse, nested or quantized", False, of_items(
        lambda: torch.quantize_per_tensor(torch.ones(1, 2), 0.1, 0, torch.qint8))),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what, tmp_path):
    said, late, given = REFUSED[what]
    given = {"module": Model, "data": lambda: rows(5)} | given
    given = {name: make() if callable(make) else make for name, make in given.items()}
    with pytest.raises((ConfigError, TypeError) if what == "a fit inside a fit" else ConfigError, match=said):
        trained(tmp_path, **given)
    rounds = sum(len(read_ledger(ledger)) for ledger in tmp_path.glob("*.jsonl"))
    assert bool(rounds) == late


def test_a_tuner_is_refused(tmp_path):
    plan = plan_of(Model(), n=10, sampling="full_batch", q=1.0, steps=2, noise_multiplier=1.0)
    run = trainer(dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl"), default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match="LearningRateFinder"):
        Tuner(run).lr_find(Model(lr=0.1), DataLoader(Items(rows(5)), batch_size=2), attr_name="rate")
    assert not (tmp_path / "l.jsonl").exists()
