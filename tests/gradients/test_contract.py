"""Steps that break the contract in ways people do by mistake, and what happens to each."""

import os
import time
import warnings
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from test_isolation import Everything, Released
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, Metric

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.module_copy import attributes
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.round import RoundEngine

N, ROUNDS, Q, S, SILENT = 12, 4, 1 / 3, 0.5, 1e-8  # epochs of three rounds
WEIGHT, BIAS = torch.tensor([0.5, -0.3, 0.2]).double(), torch.tensor([0.1]).double()
RECORDS = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).double()
REFUSED, STOPPED = "refused before round 1", "stopped before a release"
ASSUMED = "assumed: traced as it was then"  # what the step reads besides is the user's


class Still(torch.optim.SGD):  # leaves weights as they are, so that rounds can be compared
    def step(self, closure=None):
        return closure()


class Model(pl.LightningModule):
    """Half of factor · (Wx + b - target)², where an entry of the table says what factor and target are."""

    def __init__(self, start):
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        self.net.load_state_dict({"weight": WEIGHT[None], "bias": BIAS})
        start(self)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return self.factor(x) * (self.net(x) - self.target(x)).square().sum() / 2

    def configure_optimizers(self):
        optimizer = Still(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


CASES: dict[str, SimpleNamespace] = {}
HELD = SimpleNamespace()  # globals


# fmt: off
def case(what, outcome, sentence="", right=lambda t, x, y: y, start=lambda m: None, rounds=ROUNDS, also=None, **of):
    """Enters a step, and the same with a branch on the record, whose outcome is `also`.

    The sentence is in the error, the reason or a warning. From a round, a record and its output, `right` gives the
    loss's derivative by the output, where that is not random (None).
    """
    methods = {"factor": done, "target": lambda m, x: 0.0} | of
    CASES[what] = SimpleNamespace(
        outcome=outcome, sentence=sentence, right=right, start=start, rounds=rounds, methods=methods)
    if also:
        sentence = "(__bool__)" if outcome == REFUSED and also == LOOP else sentence
        case(f"{what}, untraced", also, sentence, right, start, rounds, **of | {"factor": asking(of["factor"])})

def asking(factor):
    return lambda m, x: factor(m, x) + bool(x.sum() > 1e9)

def own(value):
    return lambda m: setattr(m, "state", value())

def buffer(*shape):
    return lambda m: m.register_buffer("state", torch.zeros(*shape).double())

def put(m, value, name="state"):
    setattr(m, name, value)
    return value

def done(*_):
    return 1.0

def teacher(value=0.5):
    layer = nn.Linear(3, 1).double().requires_grad_(False)
    layer.load_state_dict({"weight": torch.full((1, 3), value).double(), "bias": torch.zeros(1).double()})
    return layer

PLACES = {
    "an attribute": (own(teacher), lambda m: m.state),
    "a list": (own(lambda: [teacher()]), lambda m: m.state[0]),
    "a global": (lambda m: setattr(HELD, "teacher", teacher()), lambda m: HELD.teacher),
}
WAYS = {  # to follow the number of rounds
    "by load_state_dict(assign=True)": lambda layer, t: layer.load_state_dict(teacher(t).state_dict(), assign=True),
    "by weight = Parameter(…)": lambda layer, t: setattr(layer, "weight", teacher(t).weight),
    "in place": lambda layer, t: layer.weight.mul_(0.5).add_(0.5 * t),
}
AVERAGES = [0.5, 0.75, 1.375, 2.1875]
ASSIGNED, REPLACED, IN_PLACE = WAYS
for _place, _way in (
    ("an attribute", ASSIGNED), ("an attribute", IN_PLACE), ("a list", REPLACED), ("a global", ASSIGNED),
):
    _start, _find = PLACES[_place]
    case(f"a teacher in {_place}, changed {_way} by a hook", TRACED, "",
         lambda t, x, y, way=_way: y - (AVERAGES[t] if way == IN_PLACE else max(t, 0.5)) * x.sum(), _start,
         target=lambda m, x, find=_find: find(m)(x),
         on_train_batch_end=lambda m, *_, find=_find, way=_way: WAYS[way](find(m), float(m.global_step)))
SETS, SETS_BUFFER, CHANGED = "training_step sets state", "sets the buffer state", "state is changed inside"
case("a teacher in a list, changed by the step", REFUSED, "weight is changed inside training_step",
     start=own(lambda: [teacher()]), also=REFUSED,
     factor=lambda m, x: done(m.state[0].weight.add_(x.detach().mean())), target=lambda m, x: m.state[0](x))

# What a step keeps of its records
def queue(m, x):
    m.state.append(x.detach().mean())
    return m.state[0]

def mean(m, x):
    return 1 + put(m, 0.9 * m.state + 0.1 * x.detach().mean(0)).sum()

def hooked(m, x):
    y = m.net(x)
    y.register_hook(lambda g: g * done(m.state.add_(x.detach()[0])))
    return y.square()

def keep(m, x):
    return done(m.state.append(x.sum().detach()))

class Reader(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        module.log("mean", torch.stack(module.state).mean())

case("a queue, list", REFUSED, SETS, start=own(list), factor=queue)
case("a queue, deque", REFUSED, SETS, start=own(lambda: deque(maxlen=4)), factor=queue)
case("a hidden state, attribute", REFUSED, SETS, start=own(lambda: torch.zeros(3)), also=REFUSED, factor=mean)
case("a running mean, buffer assigned", REFUSED, SETS_BUFFER, start=buffer(3), factor=mean)
case("a running mean, buffer in place", REFUSED, CHANGED, start=buffer(3), also=REFUSED,
     factor=lambda m, x: 1 + m.state.mul_(0.9).add_(0.1 * x.detach().mean(0)).sum())
case("a running mean, moved in a hook of an activation", REFUSED, CHANGED, start=buffer(3), target=hooked)
case("losses written into a tensor", LOOP, "writes to a constant", start=own(lambda: torch.zeros(3).double()),
     factor=lambda m, x: done(m.state.add_(x.detach()[0])))
case("losses written into an array", LOOP, "(__float__)", start=own(lambda: np.zeros(3)),
     factor=lambda m, x: done(m.state.fill(float(x.sum()))))
case("a list of losses that a hook reads", REFUSED, "self.state.0, and on_train_epoch_end reads it", also=REFUSED,
     start=own(list), factor=keep, on_train_epoch_end=lambda m: m.log("mean", torch.stack(m.state).mean()))
case("a list of losses that a callback reads", REFUSED, "and Reader.on_train_epoch_end reads it", also=REFUSED,
     start=own(list), factor=keep, configure_callbacks=lambda m: [Reader()])
case("a list of losses of the class that a hook reads", REFUSED, "self.state.0, and on_train_epoch_end reads it",
     also=REFUSED, start=lambda m: setattr(type(m), "state", []), factor=keep,
     on_train_epoch_end=lambda m: m.log("mean", torch.stack(m.state).mean()))
case("a list of losses of the class that nobody reads", TRACED, "sets self.state.0", also=LOOP,
     start=lambda m: setattr(type(m), "state", []), factor=keep)
case("a count of the class in the loss", REFUSED, SETS, start=lambda m: setattr(type(m), "state", 0), also=REFUSED,
     factor=lambda m, x: put(type(m), m.state + 1))
case("a list of losses that nobody reads", TRACED, "sets self.state.0", also=LOOP, start=own(list), factor=keep)
case("a loss kept in a layer, whose weights a hook reads", TRACED, "sets self.net.kept", also=LOOP,
     factor=lambda m, x: done(put(m.net, x.sum(), "kept")), on_train_epoch_end=lambda m: m.net.weight.sum())
case("a global list of losses, which a hook logs", ASSUMED, start=lambda m: setattr(HELD, "losses", []), also=LOOP,
     factor=lambda m, x: done(HELD.losses.append(x.sum())), on_train_epoch_end=lambda m: m.log("a", HELD.losses[-1]))
case("a tensor that counts in the loss", ASSUMED, start=own(lambda: torch.zeros(())),
     factor=lambda m, x: put(m, m.state + 1))
case("a counter that nobody reads", TRACED, "training_step sets self.state", also=LOOP, start=own(int),
     factor=lambda m, x: done(put(m, m.state + 1)))
case("a mask made for the first record", TRACED, start=own(lambda: None),
     factor=lambda m, x: (put(m, torch.ones(3)) if m.state is None else m.state).mean())
case("a mask kept of the first record", REFUSED, SETS, start=own(lambda: None),
     factor=lambda m, x: (put(m, x.detach()) if m.state is None else m.state).mean())
case("a dictionary of masks by shape", TRACED, also=LOOP, start=own(dict),
     factor=lambda m, x: m.state.setdefault(x.shape, torch.ones(3)).mean())

# What changes between rounds
case("a factor by self.current_epoch", TRACED, "", lambda t, x, y: (1 + t // 3) * y, also=LOOP,
     factor=lambda m, x: 1.0 + m.current_epoch)
case("by self.global_step", LOOP, "changes within an epoch", lambda t, x, y: (1 + t) * y,
     factor=lambda m, x: 1.0 + m.global_step)
case("by an attribute set in on_train_epoch_start", TRACED, "", lambda t, x, y: (1 + t // 3) * y,
     factor=lambda m, x: m.state, on_train_epoch_start=lambda m: put(m, 1.0 + m.current_epoch))
case("by an attribute set in on_train_batch_start", LOOP, "in every round", lambda t, x, y: (1 + t) * y, rounds=6,
     factor=lambda m, x: m.state, on_train_batch_start=lambda m, *_: put(m, 1.0 + m.global_step))
case("by a submodule, which a hook replaces in each round", TRACED, "",
     lambda t, x, y: y - max(t, 0.5) * x.sum(), own(teacher), factor=done, target=lambda m, x: m.state(x),
     on_train_batch_end=lambda m, *_: setattr(m, "state", teacher(float(m.global_step))))
case("by a network in a list, which a hook replaces between epochs", TRACED, "",
     lambda t, x, y: y - (1 + t // 3) * x.sum(), own(lambda: [teacher()]), also=LOOP, factor=done,
     target=lambda m, x: m.state[0](x),
     on_train_epoch_start=lambda m: put(m, [teacher(1.0 + m.current_epoch)]))
case("by a tensor, changed in place by a hook", TRACED, "", lambda t, x, y: (1 + t) * y,
     start=own(lambda: torch.ones(())), factor=lambda m, x: m.state, on_train_batch_end=lambda m, *_: m.state.add_(1))
case("by the learning rate of self.optimizers()", LOOP, "changes within an epoch", lambda t, x, y: 0.5**t * y,
     factor=lambda m, x: m.optimizers().param_groups[0]["lr"])
case("by a class attribute", TRACED, "", lambda t, x, y: (1 + t // 3) * y, also=LOOP, factor=lambda m, x: m.rate,
     on_train_epoch_start=lambda m: setattr(type(m), "rate", 1.0 + m.current_epoch))
case("by a global", ASSUMED, factor=lambda m, x: HELD.rate,
     on_train_epoch_start=lambda m: setattr(HELD, "rate", 1.0 + m.current_epoch))
case("by os.environ", ASSUMED, factor=lambda m, x: float(os.environ["RATE"]),
     on_train_epoch_start=lambda m: os.environ.update(RATE=str(1.0 + m.current_epoch)))

# What a step does besides
def tell(m, x):
    m.log("loss", x.sum())
    m.log_dict({"a": x.sum(), "b": x.mean()})
    m.logger.experiment.add_scalar("loss", x.sum(), m.global_step)
    return done(m.logger.log_metrics({"loss": x.sum().item()}))



def clamp(m, x):
    return done([p.data.clamp_(-0.2, 0.2) for p in m.parameters()])

case("loggers told", TRACED, "is dropped: a, b, loss", also=LOOP, factor=tell)
case("a record written to a file, which is the user's", LOOP, "(__format__)",
     factor=lambda m, x: done(Path(HELD.folder, "record").write_text(f"{x.sum()}")))
case("trainer.should_stop", TRACED, factor=lambda m, x: done(put(m.trainer, True, "should_stop")))
case("trainer.datamodule", REFUSED, "reads trainer.datamodule",
     factor=lambda m, x: len(m.trainer.datamodule.x))
case("trainer.train_dataloader", REFUSED, "reads trainer.train_",
     factor=lambda m, x: len(m.trainer.train_dataloader))
OF_ITS_OWN = "torch._C.Generator" if torch.__version__ < "2.10" else "a generator of its own"
case("a torch.Generator, which begins anew for each record", LOOP, OF_ITS_OWN,
     lambda t, x, y: torch.rand((), generator=torch.Generator()) * y, own(torch.Generator),
     factor=lambda m, x: torch.rand((), generator=m.state))
case("a metric updated, and computed by a hook", TRACED, "is dropped: self.state", also=LOOP, start=own(MeanMetric),
     factor=lambda m, x: done(m.state(x.sum())), on_train_epoch_end=lambda m: m.log("a", float(m.state.compute())))
case("time.time() in the loss", REFUSED, "differs after other records", factor=lambda m, x: time.time())
case("weights clamped", REFUSED, "weight is changed inside", also=REFUSED, factor=clamp)
case("weights clamped from epoch 1 on, untraced", STOPPED, "weight is changed inside", rounds=3,
     factor=asking(lambda m, x: clamp(m, x) if m.current_epoch else 1.0))
case("a weight clamped in place", REFUSED, "weight is changed inside",
     factor=lambda m, x: done(m.net.weight.detach().clamp_(-0.2, 0.2)))
case("requires_grad set", REFUSED, "ceased to be", also=REFUSED,
     factor=lambda m, x: done(m.net.bias.requires_grad_(False)))
case("self.eval()", TRACED, start=own(nn.Dropout), factor=lambda m, x: m.eval().state(torch.ones(1)))
case("dropout switched off by a hook", TRACED, "", lambda t, x, y: y if t >= 3 else None, own(nn.Dropout), rounds=6,
     also=LOOP, factor=lambda m, x: m.state(torch.ones(1)),
     on_train_epoch_start=lambda m: m.state.train(not m.current_epoch))
# fmt: on


class Watch(Released):  # also keeps the records of each sample
    def __init__(self):
        super().__init__()
        self.samples, self.mode, self.reason = defaultdict(list), None, ""

    def added(self, engine, add, loss_of, batch, size):
        self.samples[len(self.sums)] += [*batch[0][:, 0]]
        self.mode, self.reason = engine.step.mode, engine.step.reason
        add(engine, loss_of, batch, size)


def job(folder, case, records):
    """Trains by a step of the table on records [N, 3], with sampling and noise that are known."""
    watch, logger, HELD.folder, said = Watch(), Everything(), folder, [""]
    module, ledger = type("Odd", (Model,), case.methods)(case.start), folder / f"{len([*folder.glob('*.jsonl')])}.jsonl"
    plan = plan_of(
        module, n=N, q=Q, steps=max(case.rounds, ROUNDS), noise_multiplier=SILENT, clip_norm=FixedClipNorm(S)
    )
    run = trainer(dpexp.PrivacyCallback(plan, ledger, noise_seed=5), watch, logger=logger, log_every_n_steps=1)
    add = RoundEngine.add_chunk
    with (
        mock.patch.object(RoundEngine, "add_chunk", lambda engine, *given: watch.added(engine, add, *given)),
        mock.patch.dict(os.environ), warnings.catch_warnings(record=True) as told,
    ):  # fmt: skip
        warnings.simplefilter("always")
        try:
            run.fit(module, datamodule=pl.LightningDataModule.from_datasets(TensorDataset(records), batch_size=4))
        except ConfigError as error:
            said = [str(error)]
    left = repr([run.callback_metrics, run.logged_metrics, logger.told, *held(module)])
    said += [watch.reason, *(str(one.message) for one in told)]
    return SimpleNamespace(**vars(watch), said=said, committed=len(read_ledger(ledger)), left=left)


def held(module):
    """The values that a module holds in the end."""
    values = [*module.modules(), *module.buffers(), *attributes(module).values()]
    layers = [v.metric_state if isinstance(v, Metric) else v.state_dict() for v in values if isinstance(v, nn.Module)]
    return layers + [v for v in values if isinstance(v, torch.Tensor | np.ndarray | int | float | str)]


def sum_by_hand(case, sample, t):
    total = torch.zeros(4).double()
    for x in sample:
        gradient = case.right(t, x, x @ WEIGHT + BIAS) * torch.cat([x, torch.ones(1)])
        total += gradient * min(1.0, S / float(gradient.norm()))
    return total


@pytest.mark.parametrize("what", CASES)
def test_what_happens_to_a_step_that_breaks_the_contract(what, tmp_path):
    case, rounds = CASES[what], CASES[what].rounds
    first = job(tmp_path, case, RECORDS)
    assert case.sentence in " ".join(first.said)
    assert bool(first.said[0]) == (case.outcome in (REFUSED, STOPPED)), first.said
    assert first.committed == len(first.sums) == (0 if case.outcome == REFUSED else rounds)
    if case.outcome == REFUSED:
        return
    assert first.mode == (TRACED if case.outcome in (TRACED, ASSUMED) else LOOP), first.said
    other = job(tmp_path, case, 2 * RECORDS + 1)
    for one in (first, other):
        for t, released in enumerate(one.sums):
            if case.right(t, RECORDS[0], 1.0) is not None:
                assert torch.allclose(released, sum_by_hand(case, one.samples[t], t), atol=1e-6), t
    assert first.left == other.left, "nothing else is kept of the records"
