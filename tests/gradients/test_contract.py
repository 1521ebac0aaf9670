"""Steps that break the contract in ways people do by mistake, and what happens to each.

As a program, it prints the table: PYTHONPATH=tests:tests/gradients python tests/gradients/test_contract.py
"""

import os
import random
import re
import signal
import tempfile
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.module_copy import attributes
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.round import PrivateRound

N, ROUNDS, Q, S, SILENT = 12, 6, 1 / 3, 0.5, 1e-8
REFUSED, USERS = "refused before round 1", "the user's: as when traced"
W, B = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64), 0.1


class Still(torch.optim.SGD):
    """Leaves weights as they are, so that rounds can be compared."""

    def step(self, closure=None):
        return closure()


class Model(pl.LightningModule):
    """Half of factor · (Wx + B - target)², where an entry of the table says what factor and target are."""

    def __init__(self, start=None):
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        with torch.no_grad():
            self.net.weight.copy_(W)
            self.net.bias.fill_(B)
        if start:
            start(self)

    def factor(self, x):
        return 1.0

    def target(self, x):
        return 0.0

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return self.factor(x) * (self.net(x) - self.target(x)).square().sum() / 2

    def configure_optimizers(self):
        optimizer = Still(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class Everything(Logger):
    """Keeps what it is told."""

    name, version = "everything", 0

    def __init__(self):
        super().__init__()
        self.told = []

    experiment = property(lambda self: self)

    def log_hyperparams(self, *args, **kwargs): ...

    def log_metrics(self, metrics, step=None):
        self.told.append(dict(metrics))


@dataclass
class Ended:
    """What a job has come to: rounds' samples and releases, and everything else that it holds in the end."""

    samples: list = field(default_factory=list)
    released: list = field(default_factory=list)
    error: Exception | None = None
    committed: int = 0
    said: str = ""
    mode: str | None = None
    reason: str = ""
    holds: dict = field(default_factory=dict)


class Watch(pl.Callback):
    def __init__(self, ended):
        self.ended = ended

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.ended.released.append(torch.cat([p.grad.flatten() for p in (module.net.weight, module.net.bias)]) * N * Q)


def job(folder, case, records):
    """Trains by a step of the table on records [N, 3]."""
    ended, logger = Ended(), Everything()
    pl.seed_everything(0, verbose=False)
    module = type("Odd", (Model,), case.methods)(case.start)
    plan = plan_of(module, n=N, q=Q, steps=ROUNDS, noise_multiplier=SILENT, clip_norm=FixedClipNorm(S))
    privacy = dpexp.PrivacyCallback(plan, ledger := Path(tempfile.mkdtemp(dir=folder)) / "ledger.jsonl", noise_seed=5)
    run = trainer(privacy, Watch(ended), logger=logger, log_every_n_steps=1)
    begin, add = PrivateRound.begin, PrivateRound.add_chunk

    def begun(self, t=0):
        ended.samples.append([])
        begin(self, t)

    def added(self, loss_of, batch, size):
        ended.samples[-1] += batch[0][:, 0].tolist()
        add(self, loss_of, batch, size)
        ended.mode, ended.reason = self.mode, self.reason

    data = pl.LightningDataModule.from_datasets(TensorDataset(records), batch_size=4)
    with (
        mock.patch.object(PrivateRound, "begin", begun), mock.patch.object(PrivateRound, "add_chunk", added),
        warnings.catch_warnings(record=True) as said, mock.patch.dict(os.environ),
    ):  # fmt: skip
        warnings.simplefilter("always")
        handler = signal.signal(signal.SIGINT, lambda *_: setattr(run, "should_stop", True))
        try:
            run.fit(module, datamodule=data)
        except Exception as error:
            ended.error = error
        finally:
            signal.signal(signal.SIGINT, handler)
    ended.committed = len(read_ledger(ledger)) if ledger.exists() else 0
    ended.said = " ".join(str(one.message) for one in said)
    state = {**dict(module.named_buffers()), **attributes(module), "metrics": run.callback_metrics, "told": logger.told}
    ended.holds = {name: repr(value) for name, value in state.items() if not isinstance(value, nn.Module)}
    return ended


def by_hand(case, ended, t):
    """The sum of round t's clipped gradients."""
    total = torch.zeros(4, dtype=torch.float64)
    for x in torch.tensor(ended.samples[t], dtype=torch.float64).reshape(-1, 3):
        factor, target = case.right(t, x)
        gradient = factor * (x @ W + B - target) * torch.cat([x, torch.ones(1)])
        total += gradient * min(1.0, S / float(gradient.norm()))
    return total


class Case(NamedTuple):
    what: str
    outcome: str
    sentence: str  # of the error, the reason or a warning
    right: Any  # from a round and a record to factor and target; None: random
    start: Any
    methods: dict


CASES = []


def case(what, outcome, sentence="", right=lambda t, x: (1.0, 0.0), start=None, **methods):
    CASES.append(Case(what, outcome, sentence, right, start, methods))


def asks(x):
    """Makes a step one that is not traced."""
    return bool(x.sum() > 1e9)


def own(name, value):
    return lambda m: setattr(m, name, value())


def buffer(value):
    return lambda m: m.register_buffer("state", value)


def teacher():
    return nn.utils.skip_init(nn.Linear, 3, 1, dtype=torch.float64).requires_grad_(False)


def filled(layer, value):
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def assigned(layer, t):
    layer.load_state_dict(filled(teacher(), t + 1.0).state_dict(), assign=True)


def replaced(layer, t):
    layer.weight = nn.Parameter(torch.full((1, 3), t + 1.0, dtype=torch.float64), requires_grad=False)


def averaged(layer, t):
    layer.weight.mul_(0.5).add_(0.5 * (t + 1) ** 2)


FOLLOWED = [0.5]
for _t in range(ROUNDS):
    FOLLOWED.append(0.5 * FOLLOWED[-1] + 0.5 * (_t + 1) ** 2)
HELD = {"teacher": filled(teacher(), 0.5), "factor": 1.0}
PLACES = {
    "an attribute": (own("teacher", lambda: filled(teacher(), 0.5)), lambda m: m.teacher),
    "a list": (own("teacher", lambda: [filled(teacher(), 0.5)]), lambda m: m.teacher[0]),
    "a global": (lambda m: HELD.update(teacher=filled(teacher(), 0.5)), lambda m: HELD["teacher"]),
}
WAYS = {"load_state_dict(assign=True)": assigned, "weight = Parameter(…)": replaced, "in place": averaged}
for _place, (_start, _find) in PLACES.items():
    for _way, _change in WAYS.items():
        case(
            f"a teacher in {_place}, changed by {_way} in a hook", TRACED, "",
            lambda t, x, way=_way: (1.0, (FOLLOWED[t] if way == "in place" else max(t, 0.5)) * x.sum()), _start,
            target=lambda m, x, find=_find: find(m)(x),
            on_train_batch_end=lambda m, *_, find=_find, change=_change: change(find(m), m.global_step - 1),
        )  # fmt: skip


# What a step keeps of its records


def enqueue(m, x):
    m.state = torch.cat([m.state[1:], x.detach()])
    return m.state.mean()


def enqueue_in_place(m, x):
    m.state[0] = x.detach()[0]
    return m.state.mean()


def append(m, x):
    m.state.append(x.detach().mean())
    return m.state[0]


def mean_kept(m, x):
    m.state = 0.9 * m.state + 0.1 * x.detach().mean(0)
    return m.state.sum()


def mean_kept_in_place(m, x):
    m.state.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return m.state.sum()


def first(value):
    def use(m, x):
        if m.state is None:
            m.state = value(x)
        return m.state.sum() / 3

    return use


def counted(m, x):
    m.state += 1
    return m.state


def list_of_losses(m, x):
    m.state.append(x.sum().detach())
    return 1.0


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def unread(m, x):
    counted(m, x)
    return 1.0


SETS, CHANGED = "training_step sets {}state", "state is changed inside training_step"
case(
    "a queue of features, buffer assigned",
    REFUSED,
    SETS.format("the buffer "),
    start=buffer(zeros(4, 3)),
    factor=enqueue,
)
case("a queue of features, buffer in place", REFUSED, CHANGED, start=buffer(zeros(4, 3)), factor=enqueue_in_place)
case("a queue of features, list", REFUSED, SETS.format(""), start=own("state", list), factor=append)
case("a queue of features, deque", REFUSED, SETS.format(""), start=own("state", lambda: deque(maxlen=4)), factor=append)
case("a hidden state, attribute", REFUSED, SETS.format(""), start=own("state", lambda: zeros(3)), factor=mean_kept)
case("a hidden state, attribute, untraced", LOOP, "(__bool__)", lambda t, x: (1 + 0.1 * x.mean() * 3, 0.0),
     own("state", lambda: zeros(3)), factor=lambda m, x: asks(x) + 1 + mean_kept(m, x))  # fmt: skip
case("a running mean, buffer assigned", REFUSED, SETS.format("the buffer "), start=buffer(zeros(3)), factor=mean_kept)
case("a running mean, buffer in place", REFUSED, CHANGED, start=buffer(zeros(3)), factor=mean_kept_in_place)
case("a running mean, buffer in place, untraced", LOOP, "(__bool__)", lambda t, x: (1 + 0.1 * x.mean() * 3, 0.0),
     buffer(zeros(3)), factor=lambda m, x: asks(x) + 1 + mean_kept_in_place(m, x))  # fmt: skip
case("a list of losses that a hook reads", REFUSED, "keeps values of records in self.state, and on_train_epoch_end",
     start=own("state", list), factor=list_of_losses,
     on_train_epoch_end=lambda m: m.log("mean", torch.stack(m.state).mean()))  # fmt: skip
case("a list of losses that nobody reads", TRACED, "sets self.state", start=own("state", list), factor=list_of_losses)
case("a counter in the loss", REFUSED, SETS.format(""), start=own("state", int), factor=counted)
case("a counter that nobody reads", TRACED, "training_step sets self.state", start=own("state", int), factor=unread)
case("a constant mask, made for the first record", TRACED, "", start=own("state", lambda: None),
     factor=first(lambda x: torch.ones(3)))  # fmt: skip
case("a mask kept of the first record", REFUSED, SETS.format(""), start=own("state", lambda: None),
     factor=first(lambda x: x.detach()))  # fmt: skip
case("a cache by shape", TRACED, "", start=own("state", dict),
     factor=lambda m, x: m.state.setdefault(x.shape, torch.ones(3)).mean())  # fmt: skip


# What changes between rounds


class Rate:
    value = 1.0


OPENED, HEARD = [], []


def set_rate(m):
    Rate.value = 1.0 + m.current_epoch


def per_round(m, *_):
    m.rate = 1.0 + m.global_step


def closed_over():
    rate = [1.0]
    return {
        "factor": lambda m, x: rate[0],
        "on_train_epoch_start": lambda m: rate.__setitem__(0, 1.0 + m.current_epoch),
    }


def by_epoch(t, x):
    return 1.0 + t // 3, 0.0


def by_round(t, x):
    return 1.0 + t, 0.0


def set_class(m):
    type(m).rate = 1.0 + m.current_epoch


def lower(m):
    os.environ["RATE"] = str(1.0 + m.current_epoch)


case("a curriculum by self.current_epoch", TRACED, "", by_epoch, factor=lambda m, x: 1.0 + m.current_epoch)
case("a curriculum by self.global_step", LOOP, "changes within an epoch", by_round,
     factor=lambda m, x: 1.0 + m.global_step)  # fmt: skip
case("a curriculum by an attribute set in on_train_epoch_start", TRACED, "", by_epoch, factor=lambda m, x: m.rate,
     on_train_epoch_start=lambda m: setattr(m, "rate", 1.0 + m.current_epoch))  # fmt: skip
case("a curriculum by an attribute set in on_train_batch_start", LOOP, "in every round", by_round,
     factor=lambda m, x: m.rate, on_train_batch_start=per_round)  # fmt: skip
case("a curriculum by the learning rate of self.optimizers()", LOOP, "changes within an epoch",
     lambda t, x: (0.5**t, 0.0), factor=lambda m, x: m.optimizers().param_groups[0]["lr"])  # fmt: skip
case("a curriculum by a class attribute", USERS, "", factor=lambda m, x: m.rate, on_train_epoch_start=set_class)
case("a curriculum by a global of a class", USERS, "", factor=lambda m, x: Rate.value, on_train_epoch_start=set_rate)
case("a curriculum by a variable closed over", USERS, "", **closed_over())
case("a curriculum by os.environ", USERS, "", factor=lambda m, x: float(os.environ["RATE"]), on_train_epoch_start=lower)


# What a step does besides


def told(m, x):
    loss = x.sum()
    m.log("loss", loss)
    m.log_dict({"a": loss, "b": 2 * loss})
    m.logger.experiment.add_scalar("loss", loss, m.global_step)
    m.logger.log_metrics({"loss": loss.item()})
    return 1.0


def written(m, x):
    with (Path(OPENED[-1]) / "losses.txt").open("a") as file:
        file.write(f"{x.sum()}\n")
    return 1.0


def stopped(m, x):
    m.trainer.should_stop = True
    return 1.0


def signalled(m, x):
    if m.global_step == 2 and not HEARD:
        HEARD.append(True)
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0


def caught(m, x):
    try:
        return 1.0 if x.sum() > 0 else 2.0
    except Exception:
        return 1.0


def seeded(m, x):
    torch.manual_seed(0)
    return torch.rand(())


def clamped(m, x):
    for p in m.parameters():
        p.data.clamp_(-0.2, 0.2)
    return 1.0


def frozen(m, x):
    m.net.bias.requires_grad_(False)
    return 1.0


def evaluated(m, x):
    m.eval()
    return m.drop(torch.ones(1))


def measured(m, x):
    m.metric(x.sum())
    return 1.0


def untraced(step):
    return lambda m, x: step(m, x) + asks(x)


def printed(m, x):
    print(x.sum())
    return 1.0


case("loggers told, traced", TRACED, "a, b, loss", factor=told)
case("loggers told, untraced", LOOP, "(__bool__)", factor=untraced(told))
case("a record printed", LOOP, "(__", factor=printed)
case("a record written to a file of its own", LOOP, "(__format__)", factor=written)
case("trainer.should_stop = True, traced", TRACED, "", factor=stopped)
case("trainer.should_stop = True, untraced", LOOP, "(__bool__)", factor=untraced(stopped))
case("trainer.datamodule read", REFUSED, "reads trainer.datamodule", factor=lambda m, x: len(m.trainer.datamodule.x))
case("trainer.train_dataloader read", REFUSED, "reads trainer.train_dataloader",
     factor=lambda m, x: len(m.trainer.train_dataloader))  # fmt: skip
case("random.random()", LOOP, "Python's or NumPy's generator", None, factor=lambda m, x: random.random())
case("np.random.rand()", LOOP, "Python's or NumPy's generator", None, factor=lambda m, x: np.random.rand())
case("torch.manual_seed", REFUSED, "seeded inside training_step", factor=seeded)
case("a torch.Generator of its own", REFUSED, "keeps state of a record", start=own("generator", torch.Generator),
     factor=lambda m, x: torch.rand((), generator=m.generator))  # fmt: skip
case("try and except around a branch", LOOP, "catches an error", lambda t, x: (1.0 if x.sum() > 0 else 2.0, 0.0),
     factor=caught)  # fmt: skip
case("a metric updated, and computed by a hook", REFUSED, "", start=own("metric", MeanMetric), factor=measured,
     on_train_epoch_end=lambda m: m.log("mean", m.metric.compute()))  # fmt: skip
case("a metric updated, and read by a hook", REFUSED, "", start=own("metric", MeanMetric), factor=measured,
     on_train_epoch_end=lambda m: m.log("mean", float(m.metric.compute())))  # fmt: skip
case("a metric updated, and read by a hook, untraced", REFUSED, "", start=own("metric", MeanMetric), factor=untraced(measured),
     on_train_epoch_end=lambda m: m.log("mean", float(m.metric.compute())))  # fmt: skip
case("a metric read", REFUSED, "", start=own("metric", MeanMetric), factor=lambda m, x: float(m.metric(x.sum())))
case(
    "a signal within a record, untraced", LOOP, "(__bool__)", start=lambda m: HEARD.clear(), factor=untraced(signalled)
)
case("time.time() in the loss", REFUSED, "differs after other records", factor=lambda m, x: time.time())
case("weights clamped", REFUSED, "changed inside training_step", factor=clamped)
case("weights clamped, untraced", REFUSED, "changed inside training_step", factor=untraced(clamped))
case("requires_grad set", TRACED, "", factor=frozen)
case("requires_grad set, untraced", REFUSED, "", factor=untraced(frozen))
case("self.eval()", TRACED, "", start=own("drop", lambda: nn.Dropout(0.5)), factor=evaluated)
case("dropout switched off by a hook", TRACED, "", lambda t, x: (1.0, 0.0) if t >= 3 else None,
     own("drop", lambda: nn.Dropout(0.5)), factor=lambda m, x: m.drop(torch.ones(1)),
     on_train_epoch_start=lambda m: m.drop.train(m.current_epoch == 0))  # fmt: skip


def records(seed=1):
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


if __name__ == "__main__":
    import sys

    for one in CASES:
        if len(sys.argv) > 1 and not re.search(sys.argv[1], one.what):
            continue
        began = time.time()
        OPENED.append(tempfile.mkdtemp())
        e = job(OPENED[-1], one, records())
        ok = [
            bool(torch.allclose(r, by_hand(one, e, t), atol=1e-6))
            for t, r in enumerate(e.released)
            if one.right and one.right(t, torch.zeros(3).double())
        ]
        print(
            "##",
            one.what,
            "|",
            one.outcome,
            "| got",
            e.mode,
            e.reason[-80:],
            "| rounds",
            len(e.released),
            e.committed,
            ok,
            "| error",
            type(e.error).__name__,
            str(e.error)[:200],
            f"{time.time() - began:.1f}s",
        )
        if one.sentence and one.sentence not in f"{e.error} {e.reason} {e.said}":
            print("   SENTENCE", one.sentence, "NOT IN", e.error, e.reason, e.said)
