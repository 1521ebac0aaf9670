"""Can one record change another's gradient through what honest code keeps? Small programs are trained to find out.

    python benchmarks/stateful.py [--batch 1 8 256] [--rounds 12] [--only WORD ...] [--list]

Each program is trained on 24 records, and again without one of them: an outlier (1000 times as large as others), or
an ordinary one. There is next to no noise, weights do not move by what data say, and every round takes all records,
so that a round's releases may differ by what the missing record contributes itself, which is at most S. They are read
where an optimizer reads them. A release that moved by more tells that a record got to another one's gradient.

*Stateful* programs keep something between records, as training code does that was written without privacy in mind: in
a step, a data set or a collation. Such a program must be refused, or stopped, before the first release that its state
moves; or be harmless: trained to the end with nothing moved, whatever was done about it. *Plain* programs keep
nothing that reaches a gradient, though it may look so: they must be trained to the end.

The column *unguarded* is how far a program moves in a plain loop over records that clips each one's gradient to S,
and does nothing else for privacy. It says whether a program can tell anything: of a stateful one it must be above S,
else it has no teeth; of a plain one that draws no random numbers at most S. Programs that do draw are not compared,
since records may then meet other numbers.

Rounds are compared that both trainings released; one that stops at round t has not released round t. Every training
runs in a process of its own, one after another, so that what one keeps reaches no other. The exit status is 1 if any
release moved by more than 1.0001 S, if a plain program was not trained to the end, or if a program tells nothing.
"""

import argparse
import collections
import contextvars
import copy
import functools
import heapq
import io
import itertools
import logging
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import dpexp
from dpexp import Sampling, Target, make_plan
from dpexp.privacy.sampling.privacy_unit import Example, LocalTraining, Microbatch, User

WIDTH, EXAMPLES, CLASSES = 6, 24, 3
S = 1.0  # of every plan
LIMIT = 1.0001  # in units of S: rounding of float32 is let pass
REMOVED = {"outlier": 2, "ordinary": 9}  # numbers of records
PATIENCE_S = 180  # for one training


# --- What programs are made of


class Examples(NamedTuple):
    """Numbers to predict `y` and kinds `label`, from `x`; `user` says whose an example is."""

    x: Tensor
    y: Tensor
    label: Tensor
    user: list[int]

    def pairs(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    def labelled(self) -> TensorDataset:
        return TensorDataset(self.x, self.label)

    def of_users(self) -> "OfUsers":
        return OfUsers(self)


class OfUsers(TensorDataset):
    def __init__(self, data: Examples) -> None:
        super().__init__(data.x, data.y)
        self.user_of = data.user


class Pairs(Dataset):
    """A data set in Python, as people write them."""

    def __init__(self, data: Examples) -> None:
        self.x, self.y = data.x, data.y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def linear(outputs: int = 1) -> nn.Module:
    return nn.Linear(WIDTH, outputs)


def mlp(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


class Net(pl.LightningModule):
    """Regression by a small network. Its losses are small enough that many records are not clipped, so that a factor
    shows as a direction does."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def error(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.1 * (self(x).squeeze(-1) - y).square().mean()

    def training_step(self, batch: Any) -> Any:
        return self.error(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.0)


@dataclass(frozen=True)
class Program:
    """`build` is a module's class, or makes a module, or a module and what it is trained on (by default pairs)."""

    build: Callable[..., Any]
    category: str
    stateful: bool
    random: bool = False  # draws numbers that another record may change with every right
    record: Example | None = None
    n: int = EXAMPLES  # published
    from_round: int = 1  # before which its state reaches nothing: it is trained for some rounds more than that
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def told(self) -> str:
        return " ".join((self.build.__doc__ or "").split())

    @property
    def records(self) -> int:
        return (self.record or Example()).num_records(self.n, max(WHOSE) + 1)


PROGRAMS: list[Program] = []
WHOSE = [i // 2 for i in range(EXAMPLES)]


def _program(keeps: bool, category: str, **options: Any) -> Any:
    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(build, category, keeps, **options))
        return build

    return add


stateful, plain = functools.partial(_program, True), functools.partial(_program, False)


# --- Stateful: globals

MEAN = {"x": torch.zeros(WIDTH)}
SEEN = 0
LOSSES: list[float] = []
LARGEST = np.ones(1)
QUEUE: collections.deque[Tensor] = collections.deque(maxlen=16)
LABELS: collections.Counter[int] = collections.Counter()
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
HISTORY = io.StringIO()
STATISTICS = types.SimpleNamespace(mean=torch.zeros(WIDTH), count=0)


@stateful("globals")
class mean_in_a_global_dict(Net):
    """Inputs are centred by a running mean that a dictionary of the Python module holds."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        MEAN["x"] = 0.9 * MEAN["x"] + 0.1 * x.detach().mean(0)
        return self.error(x - MEAN["x"], y)


@stateful("globals")
class global_counter(Net):
    """Every second call of a step has its target turned round, by a global counter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global SEEN
        SEEN += 1
        x, y = batch
        return self.error(x, -5 * y if SEEN % 2 else y)


@stateful("globals")
class global_list_of_losses(Net):
    """A loss is divided by the mean of all losses before it, which a global list has."""

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        LOSSES.append(loss.item())
        return 0.5 * loss / statistics.fmean(LOSSES)


@stateful("globals")
class global_array(Net):
    """Losses are divided by the largest input so far, in a global array of NumPy's that is written in place."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        LARGEST[0] = max(LARGEST[0], float(x.abs().max()))
        return self.error(x, y + 4) / float(LARGEST[0])


@stateful("globals")
class global_deque(Net):
    """A record is pushed away from the last 16 outputs, which a global deque has."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        out = self(x)
        away = sum(((out - old) / 10).square().mean().neg() for old in QUEUE)
        QUEUE.append(out.detach().mean(0))
        return self.error(x, y) + away


@stateful("globals")
def global_counter_of_labels(data: Examples) -> Any:
    """Kinds are weighted by how rare they were so far: a collections.Counter."""

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, label = batch
            LABELS.update(label.tolist())
            rarity = LABELS.total() / (CLASSES * LABELS[int(label[0])])
            return rarity**4 * 0.02 * F.cross_entropy(self(x), label)

    return Job(linear(CLASSES)), data.labelled()


@stateful("globals")
class context_variable(Net):
    """A running scale of the inputs in a contextvars.ContextVar."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        SCALE.set(0.9 * SCALE.get() + 0.1 * float(x.norm()))
        return self.error(x / SCALE.get(), y)


@stateful("globals")
class global_text(Net):
    """Losses are written to a StringIO as a log, which is read back to say what is a large one."""

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        print(loss.item(), file=HISTORY)
        so_far = [float(line) for line in HISTORY.getvalue().split()]
        return loss / (1 + statistics.fmean(so_far))


@stateful("globals")
class global_namespace(Net):
    """A mean over all records so far, in a SimpleNamespace of the Python module."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        STATISTICS.count += 1
        STATISTICS.mean = STATISTICS.mean + (x.detach().mean(0) - STATISTICS.mean) / STATISTICS.count
        return self.error(x - STATISTICS.mean, y)


def damped(loss: Tensor) -> Tensor:
    damped.largest = max(damped.largest, float(loss))  # type: ignore[attr-defined]
    return loss / damped.largest  # type: ignore[attr-defined]


damped.largest = 1.0  # type: ignore[attr-defined]


@stateful("globals")
class attribute_of_a_function(Net):
    """A helper function divides by the largest loss so far, which it keeps as an attribute of itself."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return damped(self.error(x, y + 4))


@stateful("globals")
def global_table(data: Examples) -> Any:
    """Norms are kept in a DataFrame, and inputs divided by its standard deviation."""
    import pandas as pd

    table = pd.DataFrame({"norm": pd.Series([1.0, 2.0])})

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            table.loc[len(table)] = float(x.norm())
            return self.error(x / float(table["norm"].std()), y)

    return Job()


# --- Stateful: class attributes


class Running:
    """A helper of all modules of a class."""

    mean: ClassVar[Tensor] = torch.zeros(WIDTH)
    seen: ClassVar[int] = 0

    @classmethod
    def centre(cls, x: Tensor) -> Tensor:
        cls.seen += 1
        cls.mean = cls.mean + (x.detach().mean(0) - cls.mean) / min(cls.seen, 10)
        return x - cls.mean


@stateful("class attributes")
class mean_in_a_helper_class(Net):
    """A class method of a helper centres inputs by a mean which the helper's class keeps."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(Running.centre(x), y)


@stateful("class attributes")
class scale_in_the_modules_class(Net):
    """The LightningModule's class has the scale of the losses so far."""

    scale = 1.0

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        scale_in_the_modules_class.scale = 0.95 * scale_in_the_modules_class.scale + 0.05 * float(loss)
        return loss / scale_in_the_modules_class.scale


@stateful("class attributes")
def counter_of_a_loss_class(data: Examples) -> Any:
    """A loss module counts its calls in its class, and warms up to and down from a margin by them."""

    class Margin(nn.Module):
        calls = 0

        def forward(self, error: Tensor) -> Tensor:
            type(self).calls += 1
            return (error + math.sin(type(self).calls)).square().mean()

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.margin = Margin()

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.margin(self(x).squeeze(-1) - y)

    return Job()


@stateful("class attributes")
def slots_of_a_tracker(data: Examples) -> Any:
    """A tracker with __slots__, made once for the class, remembers the last record."""

    class Tracker:
        __slots__ = ("last",)

        def __init__(self) -> None:
            self.last = torch.zeros(WIDTH)

    class Job(Net):
        tracker = Tracker()

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            before, self.tracker.last = self.tracker.last, x.detach().mean(0)
            return self.error(x + before, y)

    return Job()


# --- Stateful: closures and default arguments


@stateful("closures")
def nonlocal_maximum(data: Examples) -> Any:
    """A record counts by its largest input as a part of the largest so far, which a closure's variable has."""
    largest = 1.0

    def weight(x: Tensor) -> float:
        nonlocal largest
        largest = max(largest, x.abs().max().item())
        return x.abs().max().item() / largest

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return weight(x) * self.error(x, y + 4)

    return Job()


@stateful("closures")
def closed_over_list(data: Examples) -> Any:
    """Every input gets the mean of the norms so far, which are in a list that a closure holds."""
    norms: list[float] = []

    def even(x: Tensor) -> Tensor:
        norms.append(float(x.norm()))
        return x * (statistics.fmean(norms) / norms[-1])

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(even(x), y + 4)

    return Job()


@stateful("closures")
def partial_with_a_dict(data: Examples) -> Any:
    """functools.partial hands a dictionary of running statistics to a loss function."""

    def loss(error: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["offset"] = 0.5 * state["offset"] + 0.5 * error.detach().mean()
        return 0.1 * (error - state["offset"]).square().mean()

    centred = functools.partial(loss, state={"offset": torch.zeros(())})

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return centred(self(x).squeeze(-1) - y)

    return Job()


@stateful("default arguments")
class default_list(Net):
    """A default argument `seen=[]` collects targets, whose mean is taken off."""

    def centred(self, y: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
        seen.append(y.mean())
        return y - torch.stack(seen).mean()

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x, self.centred(y))


@stateful("default arguments")
def default_dict(data: Examples) -> Any:
    """A default argument `state={"scale": 1}` of a function follows the inputs' norms."""

    def scaled(x: Tensor, *, state: dict[str, Any] = {"scale": 1.0}) -> Tensor:  # noqa: B006
        state["scale"] = 0.8 * state["scale"] + 0.2 * x.norm().detach()
        return x / state["scale"]

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(scaled(x), y)

    return Job()


# --- Stateful: iterators


@stateful("iterators")
def count_of_itertools(data: Examples) -> Any:
    """Every third call, by itertools.count, trains on the target's opposite."""
    calls = itertools.count()

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x, y - 8.0 if next(calls) % 3 == 0 else y)

    return Job()


@stateful("iterators")
class cycle_of_scales(Net):
    """Inputs are augmented by an endless cycle of signs, one a record."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = itertools.cycle([1.0, -1.0, -1.0])

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(next(self.signs) * x, 3 * y)


@stateful("iterators")
def coroutine_with_a_mean(data: Examples) -> Any:
    """A generator function is sent inputs and yields their running mean."""

    def averaging() -> Iterator[Tensor]:
        mean = torch.zeros(WIDTH)
        while True:
            x = yield mean
            mean = 0.9 * mean + 0.1 * x

    means: Any = averaging()
    next(means)

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x - means.send(x.detach().mean(0)), y)

    return Job()


@stateful("iterators")
def noise_drawn_beforehand(data: Examples) -> Any:
    """An iterator over a table of noise that was drawn before training: the k-th call has the k-th row."""
    rows = iter(3 * torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(5)))

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x + next(rows), y)

    return Job()


@stateful("iterators")
def anchors_from_a_loader(data: Examples) -> Any:
    """Each call takes the next batch of an anchor set's loader, beginning anew where it ends."""
    anchors = DataLoader(4 * torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(6)), batch_size=1)

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.anchors = iter(anchors)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            anchor = next(self.anchors, None)
            if anchor is None:
                self.anchors = iter(anchors)
                anchor = next(self.anchors)
            return self.error(x - anchor, y)

    return Job()


# --- Stateful: caches


def outlier_first(data: Examples) -> list[int]:
    """An order in which the record that is looked at first is one of those that are removed."""
    return sorted(range(len(data.x)), key=lambda i: i != REMOVED["outlier"])


@stateful("caches")
def prototype_of_a_label(data: Examples) -> Any:
    """A dictionary has for each label the first example that had it, which others are compared with."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(linear(CLASSES))
            self.prototypes: dict[int, Tensor] = {}

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            first = self.prototypes.setdefault(int(label[0]), x.detach().mean(0))
            return 0.1 * F.cross_entropy(self(x - first), label)

    order = outlier_first(data)
    return Job(), TensorDataset(data.x[order], data.label[order])


@functools.lru_cache
def bank(label: int) -> list[Tensor]:
    return []


@stateful("caches")
def bank_from_lru_cache(data: Examples) -> Any:
    """A function with lru_cache gives for each label the list in which its examples are kept."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(linear(CLASSES))

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            kept = bank(int(label[0]))
            kept.append(x.detach().mean(0))
            return 0.1 * F.cross_entropy(self(x - torch.stack(kept).mean(0)), label)

    return Job(), data.labelled()


@stateful("caches")
def scale_at_first_use(data: Examples) -> Any:
    """Inputs are divided by the norm of the first record that was ever seen: calibration at first use."""

    class Job(Net):
        scale: Any = None

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            if self.scale is None:
                self.scale = x.norm().detach()
            return self.error(x / self.scale - self.scale, y)

    order = outlier_first(data)
    return Job(), TensorDataset(data.x[order], data.y[order])


@stateful("caches")
def cache_by_rounded_key(data: Examples) -> Any:
    """Targets are looked up by a rounded feature, so that whoever came first sets them for others."""
    cache: dict[int, Tensor] = {}

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x, cache.setdefault(round(float(x[0, 0]) / 4), y))

    order = outlier_first(data)
    return Job(), TensorDataset(data.x[order].clamp(-1, 1), data.y[order] + 20 * (data.x[order].norm(dim=1) > 100))


@stateful("caches")
def cache_by_shape(data: Examples) -> Any:
    """Batch statistics are cached by the shape of the input: the first record of a shape sets them for all others."""
    cache: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    class Shift:
        def __init__(self, by: Tensor) -> None:
            self.by = by

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.alive: list[Any] = []

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            shift = cache.get(tuple(x.shape))
            if shift is None:
                shift = cache[tuple(x.shape)] = Shift(x.detach().mean(0))
                self.alive.append(shift)
            return self.error(x - shift.by, y)

    order = outlier_first(data)
    return Job(), TensorDataset(data.x[order], data.y[order])


# --- Stateful: teachers


class WithTeacher(Net):
    """A mean teacher, which begins elsewhere than the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(False)
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.copy_(5 * torch.randn_like(p))

    def follow(self, rate: float) -> None:
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t.mul_(1 - rate).add_(rate * s.detach())


@stateful("teachers")
class teacher_in_the_step(WithTeacher):
    """A teacher's weights follow the student's at each call of training_step, and so each record."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.follow(0.05)
        return self.error(x, y) + 0.1 * (self(x) - self.teacher(x)).square().mean()


@stateful("teachers")
def teacher_in_a_list(data: Examples) -> Any:
    """The teacher is a list of weights outside the module, which take a step on each record (fast weights)."""
    fast: list[Tensor] = []

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            if not fast:
                fast.extend(copy.deepcopy([p.detach() for p in self.net.parameters()]))
            error = F.linear(x, *fast).squeeze(-1).mean() - y.mean() - 4
            fast[0] = fast[0] - error.clamp(-1, 1) * x.mean(0) / 10
            fast[1] = fast[1] - error.clamp(-1, 1) / 10
            return self.error(x, F.linear(x, *fast).squeeze(-1))

    return Job()


@stateful("teachers")
class centre_of_features(WithTeacher):
    """DINO's centre: a running mean of the teacher's outputs, in a buffer, is taken off them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 1))

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        out = self.teacher(x).detach()
        loss = 0.1 * (self(x) - (out - self.centre)).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * out.mean(0, keepdim=True)
        return loss


@stateful("teachers")
def targets_that_follow(data: Examples) -> Any:
    """A target per label is a moving average of the outputs of examples that have it (BYOL's, by class)."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(linear(2))
            self.targets = torch.ones(CLASSES, 2)

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            out = self(x)
            with torch.no_grad():
                self.targets[label] = 0.7 * self.targets[label] + 0.3 * out
            return 0.05 * (out + self.targets[label]).square().sum()

    return Job(), data.labelled()


# --- Stateful: queues


@stateful("queues")
class queue_of_moco(Net):
    """MoCo: negatives are the last 8 features, in a buffer with a pointer that goes round."""

    def __init__(self) -> None:
        super().__init__(linear(4))
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        query = F.normalize(self(x), dim=1)
        key = F.normalize(self(0.9 * x), dim=1).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        at = int(self.pointer)
        self.queue[at] = 3 * key[0]
        self.pointer[0] = (at + 1) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@stateful("queues")
def hardest_so_far(data: Examples) -> Any:
    """A heap keeps the five hardest records, and each record is trained on beside their mean."""
    hardest: list[Any] = []
    tie = itertools.count()

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            loss = self.error(x, y)
            heapq.heappush(hardest, (float(loss), next(tie), x.detach(), y))
            if len(hardest) > 5:
                heapq.heappop(hardest)
            return loss + statistics.fmean(h[0] for h in hardest) / 100 * self.error(hardest[0][2], hardest[0][3])

    return Job()


@stateful("queues")
class replay_of_the_last(Net):
    """Experience replay: the step trains on its record and the one before it."""

    last: Any = None

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        last, self.last = self.last, (x, y)
        return self.error(x, y) if last is None else (self.error(x, y) + 10 * self.error(*last)) / 2


@stateful("queues")
def bank_by_index(data: Examples) -> Any:
    """A memory bank has each record's last output at its place, and its mean is taken off all."""

    class Indexed(Pairs):
        def __getitem__(self, i: int) -> Any:
            return i, self.x[i], self.y[i]

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs = torch.zeros(EXAMPLES)

        def training_step(self, batch: Any) -> Any:
            i, x, y = batch
            out = self(x).squeeze(-1)
            self.outputs[i] = out.detach()
            return 0.1 * (out - self.outputs.mean() - y).square().mean()

    return Job(), Indexed(data)


# --- Stateful: curricula


@stateful("curricula")
class easier_than_others(Net):
    """Self-paced: a record that is harder than the mean so far counts little."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.error(x, y + 4)
        self.losses.append(loss.item())
        return loss * (1.0 if loss.item() <= statistics.fmean(self.losses) else 0.01)


@stateful("curricula")
class stage_by_successes(Net):
    """The task becomes another one after each record that had a small loss."""

    stage = 0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.error(x.roll(self.stage, 1), y)
        self.stage += int(loss.item() < 0.1 or loss.item() > 1000)
        return loss


@stateful("curricula")
class plateau_of_losses(Net):
    """A temperature is lowered whenever a loss is above the best one so far, as schedulers do at plateaus."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.temperature = math.inf, 1.0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.error(x, y)
        if float(loss) < self.best:
            self.best = float(loss)
        else:
            self.temperature *= 0.95 if float(loss) < 1000 else 0.01
        return self.error(self.temperature * x, y)


@stateful("curricula")
def reinforcement_baseline(data: Examples) -> Any:
    """REINFORCE with a moving baseline of rewards."""

    class Job(Net):
        baseline = 0.0

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            log_p = self(x / 10).log_softmax(1)[:, 0].mean()
            reward = float(x.sum()) * float(label[0] - 1)
            advantage, self.baseline = reward - self.baseline, 0.9 * self.baseline + 0.1 * reward
            return -advantage * log_p

    return Job(linear(CLASSES)), data.labelled()


# --- Stateful: generators of one's own


@stateful("generators")
class generator_of_torch(Net):
    """Noise on the inputs from a torch.Generator that the module has, seeded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x + 3 * torch.randn(x.shape, generator=self.draw), y)


DRAW = random.Random(0)


@stateful("generators")
class generator_of_python(Net):
    """Signs are flipped by a random.Random(0) of the Python module."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x, y + DRAW.choice([-5.0, 5.0]))


@stateful("generators")
def generator_of_numpy(data: Examples) -> Any:
    """Mixing weights come from a numpy default_rng(0) in a closure."""
    draw = np.random.default_rng(0)

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x * torch.from_numpy(draw.normal(size=WIDTH)).float(), y)

    return Job()


@stateful("generators")
class congruential_generator(Net):
    """A linear congruential generator, x = (ax + c) mod m, in an integer of the module's, masks inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.state = 1

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.state = (1103515245 * self.state + 12345) % 2**31
        mask = torch.tensor([self.state >> k & 1 for k in range(16, 16 + WIDTH)])
        return self.error(x * mask, y + 4)


# --- Stateful: running statistics


class RunningNorm(nn.Module):
    """What people write in place of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.square.lerp_(x.square().mean(0), 0.1)
        return (x - self.mean) / (self.square - self.mean.square()).clamp(min=1e-3).sqrt()


@stateful("running statistics")
def normalisation_layer_of_ones_own(data: Examples) -> Any:
    """A layer normalises by running moments in buffers, written in place."""
    return Net(nn.Sequential(RunningNorm(), linear()))


@stateful("running statistics")
class buffer_made_anew(Net):
    """A running mean in a buffer that is assigned anew, without any branch, as vmap would take it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.error(x - self.mean, y)


@stateful("running statistics")
class welford_in_floats(Net):
    """Welford's mean and variance of the losses in Python numbers; losses are standardized by them."""

    count, mean, m2 = 1, 0.0, 1.0

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        self.count += 1
        step = loss.item() - self.mean
        self.mean += step / self.count
        self.m2 += step * (loss.item() - self.mean)
        return (loss - self.mean) / math.sqrt(self.m2 / self.count)


@stateful("running statistics")
class plain_tensor_in_place(Net):
    """A tensor that is an attribute, no buffer, is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.total += x.detach().sum(0)
        return self.error(x - self.total, y)


@stateful("running statistics")
def statistics_in_a_forward_hook(data: Examples) -> Any:
    """A forward_pre_hook of a layer centres its inputs by a mean that it keeps in a closure."""
    net = mlp()
    mean = [torch.zeros(WIDTH)]

    def centred(layer: nn.Module, inputs: Any) -> Any:
        mean[0] = 0.9 * mean[0] + 0.1 * inputs[0].detach().mean(0)
        return (inputs[0] - mean[0],)

    net[0].register_forward_pre_hook(centred)
    return Net(net), TensorDataset(data.x, data.y + 4)


@stateful("running statistics")
def numpy_moments_of_targets(data: Examples) -> Any:
    """Targets are standardized by moments in a NumPy array (pop-art), updated in place at each call."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.moments = np.array([0.0, 1.0])

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            self.moments *= 0.95
            self.moments += 0.05 * np.array([y.mean().item() * 5, y.square().mean().item()])
            return self.error(x, (y - float(self.moments[0])) / math.sqrt(float(self.moments[1])))

    outlier = (data.x.abs().amax(1) > 50).float()
    return Job(), TensorDataset(data.x, data.y + 20 * outlier)


@stateful("running statistics")
class metric_that_is_read(Net):
    """A torchmetrics.MeanMetric is updated in the step, and what it has computed divides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torchmetrics.MeanMetric()

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        self.average.update(loss.detach())
        return 0.5 * loss / self.average.compute()


@stateful("running statistics")
class state_of_an_rnn(Net):
    """Truncated backpropagation: an RNN's hidden state is handed on to the next record, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(WIDTH, WIDTH), torch.zeros(1, WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        hidden = self.cell(x, 3 * self.hidden)
        self.hidden = hidden.detach()
        return self.error(hidden, 3 * y)


# --- Stateful: only from the fourth round on


class RoundLoader(Net):
    """Counts rounds in a hook, as it may."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.round = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.round += 1


@stateful("late")
class mean_after_three_rounds(RoundLoader):
    """Statistics are gathered from the first call on, and used from the fourth round on."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = {"x": torch.zeros(WIDTH)}

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.mean["x"] = 0.9 * self.mean["x"] + 0.1 * x.detach().mean(0)
        return self.error(x - self.mean["x"] if self.round > 3 else x, y)


LATE: list[Tensor] = []


@stateful("late")
class bank_that_must_fill(Net):
    """A global bank of features is used when it holds 4 rounds' worth of them."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        LATE.append(x.detach().mean(0))
        if len(LATE) > 4 * EXAMPLES:
            x = x - torch.stack(LATE[-8:]).mean(0)
        return self.error(x, y)


@stateful("late")
class gathered_only_late(RoundLoader):
    """Nothing is kept before round 6: then a class attribute begins to follow the inputs' norms."""

    scale: Any = 1.0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if self.round >= 6:
            gathered_only_late.scale = 0.8 * gathered_only_late.scale + 0.2 * x.norm().detach()
        return self.error(x / gathered_only_late.scale, y)


@stateful("late")
def by_global_step(data: Examples) -> Any:
    """From global_step 4 on, an iterator says which calls train on the opposite."""
    signs = itertools.cycle([1, -1, 1, 1, -1])

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x, y if self.global_step < 4 else next(signs) * 5 * y)

    return Job()


VERY_LATE: list[Tensor] = []


@stateful("late", from_round=30)
class bank_that_fills_for_long(Net):
    """A global bank of features is used when it holds 30 rounds' worth of them, in a term of value zero."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        VERY_LATE.append(x.detach().mean(0))
        loss = self.error(x, y)
        if len(VERY_LATE) > 30 * EXAMPLES:
            near = self(torch.stack(VERY_LATE[-12:]).mean(0, keepdim=True)).mean()
            loss = loss + near - near.detach()
        return loss


@stateful("late")
def data_set_that_warms_up(data: Examples) -> Any:
    """A data set normalises by its running mean once it was asked 100 times."""

    class Warm(Pairs):
        asked, mean = 0, torch.zeros(WIDTH)

        def __getitem__(self, i: int) -> Any:
            self.asked += 1
            self.mean = 0.9 * self.mean + 0.1 * self.x[i]
            return (self.x[i] - self.mean if self.asked > 100 else self.x[i]), self.y[i]

    return Net(), Warm(data)


# --- Stateful: only in a branch that is rarely taken


def far(x: Tensor) -> bool:
    return float(x.detach().norm()) > 100


@stateful("branches")
class once_an_outlier_was_seen(Net):
    """A flag is set by the first record that is far out; from then on targets are shifted."""

    robust = False

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if far(x):
            self.robust = True
        return self.error(x, y + 5 if self.robust else y)


@stateful("branches")
class loss_scale_as_amp(Net):
    """Dynamic loss scaling by hand: a loss that spikes divides the scale of all later ones by a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = {"scale": 2.0**10, "growth": 0}

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        if loss.item() > 1e3:
            self.scaler["scale"] /= 1e6
        return loss * self.scaler["scale"]


@stateful("branches")
def errors_are_counted(data: Examples) -> Any:
    """A record that raises is caught and counted, and how many there were turns later targets round."""
    bad = {"records": 0}

    class Job(Net):
        def checked(self, x: Tensor) -> Tensor:
            if far(x):
                raise ValueError("far out")
            return x

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            try:
                x = self.checked(x)
            except ValueError:
                bad["records"] += 1
                x = x / 1000
            return self.error(x, y + 5 * (bad["records"] % 2))

    return Job()


@stateful("branches")
def outliers_are_remembered(data: Examples) -> Any:
    """Far records alone are appended to a global list, and others kept away from the last of them."""
    remembered = FAR

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            if far(x):
                remembered.append(x.detach())
            elif remembered:
                x = x - remembered[-1] / 100
            return self.error(x, y)

    return Job()


FAR: list[Tensor] = []


@stateful("branches")
class after_a_rare_record_late(RoundLoader):
    """After round 3, a far record changes which column is left out for the others."""

    column = torch.ones(WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if self.round > 3 and far(x):
            after_a_rare_record_late.column = -after_a_rare_record_late.column
        return self.error(x * after_a_rare_record_late.column, y + 4)


# --- Stateful: only in the gradient, while the loss is what it would be


class Rescaled(torch.autograd.Function):
    """Divides the gradient by the largest norm of a gradient so far."""

    largest = 1e-2

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Rescaled.largest = max(Rescaled.largest, float(grad.norm()))
        return grad / Rescaled.largest / 10


@stateful("gradients")
class function_with_a_backward(Net):
    """An autograd.Function, the identity, divides gradients by the largest one that its class has seen."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return 0.1 * (Rescaled.apply(self(x)).squeeze(-1) - y).square().mean()


@stateful("gradients")
def hook_with_a_mean(data: Examples) -> Any:
    """A hook on the outputs takes the running mean of gradients off each."""
    mean = [torch.zeros(())]

    def centred(grad: Tensor) -> Tensor:
        mean[0] = 0.5 * mean[0] + 0.5 * grad.detach().mean()
        return grad - mean[0]

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            out = self(x)
            out.register_hook(centred)
            return 0.1 * (out.squeeze(-1) - y).square().mean()

    return Job()


@stateful("gradients")
class scale_past_the_value(Net):
    """loss + (s·loss - (s·loss).detach()), where s follows the inputs' norms: the value is the loss, whatever s is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.scale = 0.9 * self.scale + 0.1 * x.norm().detach()
        loss = self.error(x, y)
        more = loss * (1 - self.scale).clamp(min=-30)
        return loss + (more - more.detach())


@stateful("gradients")
class reversal_by_calls(Net):
    """Gradient reversal (DANN) whose factor grows with the number of calls, and begins anew after 7."""

    calls = 0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.calls += 1
        factor = (self.calls % 7 - 3) / 3
        out = self(x)
        out = factor * out - (factor * out - out).detach()
        return 0.1 * (out.squeeze(-1) - y).square().mean()


STRAIGHT = {"mean": torch.zeros(WIDTH)}


@stateful("gradients")
class straight_through_input(Net):
    """The gradient of the weights is taken at an input that a running mean has moved, by a term of value zero."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        STRAIGHT["mean"] = 0.9 * STRAIGHT["mean"] + 0.1 * x.detach().mean(0)
        moved = self(STRAIGHT["mean"][None])
        return self.error(x, y) + (moved - moved.detach()).mean()


@stateful("gradients")
def hook_that_flips_late(data: Examples) -> Any:
    """From the 100th gradient on, a hook of a layer's output flips every second one's sign."""
    gradients = itertools.count()

    def flip(grad: Tensor) -> Tensor:
        k = next(gradients)
        return -grad if k > 100 and k % 2 else grad

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            out = self(x)
            out.register_hook(flip)
            return 0.1 * (out.squeeze(-1) - y - 4).square().mean()

    return Job()


@stateful("gradients")
def full_backward_hook_clips(data: Examples) -> Any:
    """A full backward hook clips a layer's gradient by the mean of the norms so far (adaptive clipping)."""
    net = mlp()
    net[2].requires_grad_(False)
    norms: list[float] = []

    def clipped(layer: nn.Module, into: Any, out: Any) -> Any:
        norms.append(float(into[0].norm()))
        return (into[0] * min(1.0, 0.3 * statistics.fmean(norms) / (norms[-1] + 1e-9)),)

    net[2].register_full_backward_hook(clipped)
    return Net(net), TensorDataset(data.x, data.y + 4 + 1000 * (data.x.norm(dim=1) > 100))


# --- Stateful: only in the data set


@stateful("data sets")
def data_set_with_a_mean(data: Examples) -> Any:
    """__getitem__ centres by the mean of what was asked for so far."""

    class Centred(Pairs):
        mean = torch.zeros(WIDTH)

        def __getitem__(self, i: int) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * self.x[i]
            return self.x[i] - self.mean, self.y[i]

    return Net(), Centred(data)


@stateful("data sets")
def data_set_that_counts(data: Examples) -> Any:
    """Every fifth item that is asked for is augmented: its signs are flipped."""

    class Counting(Pairs):
        asked = 0

        def __getitem__(self, i: int) -> Any:
            self.asked += 1
            return self.x[i] * (-1 if self.asked % 5 == 0 else 1), self.y[i] + 4

    return Net(), Counting(data)


@stateful("data sets")
def cache_with_normalisation(data: Examples) -> Any:
    """Items are cached when first asked for, x and y divided by the largest input that was seen by then."""

    class Cached(Pairs):
        def __init__(self, data: Examples) -> None:
            super().__init__(data)
            self.cache: dict[int, Any] = {}
            self.largest = 1.0

        def __getitem__(self, i: int) -> Any:
            if i not in self.cache:
                self.largest = max(self.largest, float(self.x[i].abs().max()))
                self.cache[i] = self.x[i] / self.largest, (self.y[i] + 4) / self.largest
            return self.cache[i]

    return Net(), Cached(data)


@stateful("data sets")
def data_set_in_an_order_of_its_own(data: Examples) -> Any:
    """A data set shuffles its own order at each 24th item that is asked for."""

    class Shuffled(Pairs):
        def __init__(self, data: Examples) -> None:
            super().__init__(data)
            self.order, self.asked, self.draw = [*range(len(self))], 0, random.Random(0)

        def __getitem__(self, i: int) -> Any:
            self.asked += 1
            if self.asked % EXAMPLES == 0:
                self.draw.shuffle(self.order)
            return super().__getitem__(self.order[i])

    return Net(), Shuffled(data)


@stateful("data sets")
def mixup_with_the_last_item(data: Examples) -> Any:
    """A data set mixes each item with the one that was asked for before it."""

    class Mixed(Pairs):
        last: Any = None

        def __getitem__(self, i: int) -> Any:
            x, y = super().__getitem__(i)
            last, self.last = self.last or (x, y), (x, y)
            return 0.7 * x + 0.3 * last[0], 0.7 * y + 0.3 * last[1]

    return Net(), Mixed(data)


@stateful("data sets")
def transform_with_state(data: Examples) -> Any:
    """A transform that a data set has been given equalises by a histogram of all items so far."""

    class Equalise:
        def __init__(self) -> None:
            self.norms: list[float] = []

        def __call__(self, x: Tensor) -> Tensor:
            self.norms.append(float(x.norm()))
            return x * (statistics.fmean(n <= self.norms[-1] for n in self.norms) / self.norms[-1])

    class Transformed(Pairs):
        transform = Equalise()

        def __getitem__(self, i: int) -> Any:
            return self.transform(self.x[i]), self.y[i] - 8

    return Net(), Transformed(data)


# --- Stateful: only in collation


@stateful("collation")
def padding_to_the_longest_so_far(data: Examples) -> Any:
    """A collate_fn pads to the longest record so far, and the loss is a mean over padding too."""
    longest = 1
    lengths = [40 if bool((x.abs() > 50).any()) else 1 + i % 4 for i, x in enumerate(data.x)]
    items = [(x.repeat(length, 1), y) for x, y, length in zip(data.x, data.y, lengths, strict=True)]

    def padded(batch: Any) -> Any:
        nonlocal longest
        longest = max(longest, *(len(x) for x, _ in batch))
        x = torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x, _ in batch])
        return x, torch.stack([y for _, y in batch])

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x.mean(1), y)

    return Job(), DataLoader(items, batch_size=8, collate_fn=padded)  # type: ignore[arg-type]


@stateful("collation")
def collation_with_a_mean(data: Examples) -> Any:
    """An object that collates takes off the running mean of what it collated."""

    class Collate:
        def __init__(self) -> None:
            self.mean = torch.zeros(WIDTH)

        def __call__(self, batch: Any) -> Any:
            x, y = default_collate(batch)
            self.mean = 0.8 * self.mean + 0.2 * x.mean(0)
            return x - self.mean, y

    return Net(), DataLoader(data.pairs(), batch_size=8, collate_fn=Collate())


COLLATED = [0]


@stateful("collation")
def collation_that_counts(data: Examples) -> Any:
    """A collate_fn smooths every second batch's targets, by a global count."""

    def smoothed(batch: Any) -> Any:
        COLLATED[0] += 1
        x, y = default_collate(batch)
        return x, y + 5 * (COLLATED[0] % 2)

    return Net(), DataLoader(data.pairs(), batch_size=8, collate_fn=smoothed)


@stateful("collation")
def cutmix_with_the_last_batch(data: Examples) -> Any:
    """Half of the columns come from the batch that was collated before: a default argument has it."""

    def mixed(batch: Any, last: list[Tensor] = []) -> Any:  # noqa: B006
        x, y = default_collate(batch)
        last.append(x.mean(0))
        return torch.cat([x[:, :3], last[max(len(last) - 2, 0)][3:].expand(len(x), -1)], 1), y

    return Net(), DataLoader(data.pairs(), batch_size=8, collate_fn=mixed)


# --- Stateful: units of several examples


@stateful("microbatches", record=Microbatch(2))
def microbatch_with_a_running_mean(data: Examples) -> Any:
    """Units of two examples; a buffer follows their means."""
    return Net(nn.Sequential(RunningNorm(), linear()))


@stateful("microbatches", record=Microbatch(2))
def microbatch_with_a_global_scale(data: Examples) -> Any:
    """Units of two; a global dictionary has the largest spread of a unit so far, by which losses are divided."""
    UNIT.setdefault("spread", 1.0)

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            UNIT["spread"] = max(UNIT["spread"], float((x[:1] - x[-1:]).norm()))
            return self.error(x, y + 4) / UNIT["spread"]

    return Job()


UNIT: dict[str, float] = {}


@stateful("microbatches", record=Microbatch(3))
def microbatch_of_a_counting_data_set(data: Examples) -> Any:
    """Units of three; the data set turns every fourth item that it is asked for."""

    class Counting(Pairs):
        asked = itertools.count()

        def __getitem__(self, i: int) -> Any:
            return self.x[i].roll(2 if next(self.asked) % 4 == 0 else 0), self.y[i] + 4

    return Net(), Counting(data)


@stateful("microbatches", record=Microbatch(2))
def microbatch_with_a_gradient_hook(data: Examples) -> Any:
    """Units of two; a hook divides gradients by their running norm. Losses are what they would be."""
    norm = torch.ones(())

    def scaled(grad: Tensor) -> Tensor:
        nonlocal norm
        norm = 0.9 * norm + 0.1 * grad.detach().norm()
        return grad / norm

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            out = self(x)
            out.register_hook(scaled)
            return 0.02 * (out.squeeze(-1) - y).square().mean()

    return Job()


# --- Stateful: users

BY_USER = User(max_examples=2, user_attribute="user_of")


@stateful("users", record=BY_USER)
def user_with_a_class_attribute(data: Examples) -> Any:
    """A user's mean goes into the mean of all users so far, in the class, which is taken off."""

    class Job(Net):
        population: Any = torch.zeros(WIDTH)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            Job.population = 0.8 * Job.population + 0.2 * x.detach().mean(0)
            return self.error(x - Job.population, y)

    return Job(), data.of_users()


@stateful("users", record=User(max_examples=2), n=EXAMPLES // 2)
def user_as_a_list_with_a_bank(data: Examples) -> Any:
    """Each index is a list of a user's examples; a list has all users' last examples as negatives."""
    bank: list[Tensor] = []
    users = [[(data.x[i], data.y[i]) for i in at] for at in positions(data.user)]

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            bank.append(x[-1].detach())
            return self.error(x - torch.stack(bank[-5:]).mean(0), y)

    return Job(), DataLoader(users, batch_size=4)  # type: ignore[arg-type]


@stateful("users", record=BY_USER)
def user_with_a_curriculum(data: Examples) -> Any:
    """A nonlocal threshold follows the users' losses, and those above it are turned round."""
    threshold = 1.0

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            nonlocal threshold
            loss = self.error(*batch)
            threshold = 0.9 * threshold + 0.1 * loss.item()
            return -3 * loss if loss.item() > threshold else 3 * loss

    return Job(), data.of_users()


@stateful("users", record=User(max_examples=2, user_attribute="user_of", local_training=LocalTraining(lr=0.3, steps=3)))
def local_training_with_a_mean(data: Examples) -> Any:
    """Users train locally, three steps each, on inputs centred by a mean that goes on from user to user."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return self.error(x - self.mean, y)

    return Job(), data.of_users()


@stateful("users", record=User(max_examples=2, user_attribute="user_of", local_training=LocalTraining(lr=0.3, steps=3)))
def local_training_with_a_count(data: Examples) -> Any:
    """The k-th local step of all users together says which targets are shifted: itertools.count in a closure."""
    steps = itertools.count()

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(x, y + (6 if next(steps) // 5 % 2 else -6))

    return Job(), data.of_users()


def positions(user: list[int]) -> list[list[int]]:
    """The examples of each user."""
    return [[i for i, u in enumerate(user) if u == one] for one in dict.fromkeys(user)]


# --- Plain: caches that hold the same for all


def sequences(data: Examples, length: int = 4) -> TensorDataset:
    x = torch.stack([data.x.roll(k, 1) for k in range(length)], 1)
    return TensorDataset(x, data.y)


class Rotary(nn.Module):
    """Rotary embeddings, whose tables are made at first use."""

    table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            rate = 10000.0 ** (-torch.arange(0, x.shape[2], 2) / x.shape[2])
            self.table = torch.arange(x.shape[1])[:, None] * rate
        cos, sin = self.table[: x.shape[1]].cos(), self.table[: x.shape[1]].sin()
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


@plain("caches")
def rotary_tables(data: Examples) -> Any:
    """RoPE's tables are made at first use and kept as an attribute."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary()

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(self.rotary(x).tanh().mean(1), y)

    return Job(), sequences(data)


@plain("caches")
def causal_masks(data: Examples) -> Any:
    """Causal masks are kept in a dictionary by length, for attention of one head."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.masks: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            if length not in self.masks:
                self.masks[length] = torch.ones(length, length).tril().bool()
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~self.masks[length], -1e9)
            return (scores.softmax(-1) @ v).mean(1)

    return Net(nn.Sequential(Attention(), linear())), sequences(data)


@functools.lru_cache
def sines(length: int, width: int) -> Tensor:
    return torch.sin(torch.arange(length)[:, None] / 10.0 ** torch.arange(width))


@plain("caches")
def positions_from_lru_cache(data: Examples) -> Any:
    """Sine positions come from a function with lru_cache."""

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error((x + sines(x.shape[1], x.shape[2])).mean(1), y)

    return Job(), sequences(data)


ONE_HOT: dict[int, Tensor] = {}


@plain("caches")
def global_table_of_constants(data: Examples) -> Any:
    """A global dictionary has identity matrices by size, made at first use."""

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            x, label = batch
            if CLASSES not in ONE_HOT:
                ONE_HOT[CLASSES] = torch.eye(CLASSES)
            return 0.1 * (self(x) - ONE_HOT[CLASSES][label]).square().mean()

    return Job(linear(CLASSES)), data.labelled()


@plain("caches")
class property_made_once(Net):
    """functools.cached_property of the module holds a constant window."""

    @functools.cached_property
    def window(self) -> Tensor:
        return torch.hann_window(WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x * self.window, y)


# --- Plain: keeping what is never read


@plain("kept, not read")
class list_of_outputs(Net):
    """self.outputs.append(loss.detach()), which no hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        self.outputs.append(loss.detach())
        return loss


@plain("kept, not read")
class counter_that_is_logged(Net):
    """Examples are counted in an attribute that is logged alone."""

    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        self.log("seen", float(self.seen))
        return self.error(*batch)


@plain("kept, not read")
def metrics_in_the_step(data: Examples) -> Any:
    """torchmetrics are called in the step, logged, and reset at the epoch's end."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(linear(CLASSES))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
            self.average = torchmetrics.MeanMetric()

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            out = self(x)
            loss = F.cross_entropy(out, label)
            self.accuracy(out, label)
            self.average.update(loss.detach())
            self.log("accuracy", self.accuracy)
            return loss

        def on_train_epoch_end(self) -> None:
            self.average.reset()

    return Job(), data.labelled()


@plain("kept, not read")
class everything_is_logged(Net):
    """self.log and self.log_dict of losses, norms, rates and epochs; a dictionary is returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.error(x, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"norm": x.norm(), "epoch": float(self.current_epoch), "batch": float(batch_idx)})
        return {"loss": loss, "out": self(x).detach()}


@plain("kept, not read")
def last_features_by_a_hook(data: Examples) -> Any:
    """A forward hook keeps a layer's last activations for a plot."""
    net = mlp()
    features: dict[str, Tensor] = {}
    net[1].register_forward_hook(lambda layer, inputs, out: features.__setitem__("tanh", out.detach()))
    return Net(net)


@plain("kept, not read")
class last_batch_is_kept(Net):
    """The last batch stays in an attribute, for debugging."""

    def training_step(self, batch: Any) -> Any:
        self.last_batch = batch
        return self.error(*batch)


@plain("kept, not read")
class time_is_taken(Net):
    """The step takes its time, and logs it by Python's logging, which nobody reads."""

    seconds = 0.0

    def training_step(self, batch: Any) -> Any:
        start = time.perf_counter()
        loss = self.error(*batch)
        self.seconds += time.perf_counter() - start
        logging.getLogger("stateful").debug("a loss, after %f s", self.seconds)
        return loss


@plain("kept, not read")
class warns_once(Net):
    """A step warns once about a far record, and remembers that it did."""

    warned = False

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if not self.warned and far(x):
            warnings.warn("a record is far out", stacklevel=2)
            self.warned = True
        return self.error(x, y)


@plain("kept, not read")
class global_history(Net):
    """Losses are appended to a global list that only a plot would read."""

    def training_step(self, batch: Any) -> Any:
        loss = self.error(*batch)
        PLOT.append(loss.item())
        return loss


PLOT: list[float] = []


# --- Plain: random numbers


@plain("random numbers", random=True)
def dropout(data: Examples) -> Any:
    """Dropout between two layers."""
    return Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)))


@plain("random numbers", random=True)
class autoencoder(Net):
    """A VAE, with rsample and a KL term."""

    def __init__(self) -> None:
        super().__init__(linear(4))
        self.decoder = nn.Linear(2, WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        x = x.tanh()
        mean, log_scale = self.net(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, log_scale.clamp(-3, 3).exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        kl = torch.distributions.kl_divergence(posterior, prior).sum(1)
        return ((self.decoder(posterior.rsample()) - x).square().sum(1) + kl).mean()


class Augmented(Pairs):
    def __init__(self, data: Examples, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__(data)
        self.by = by

    def __getitem__(self, i: int) -> Any:
        return self.by(self.x[i]), self.y[i]


@plain("random numbers", random=True)
def augmentation_by_torch(data: Examples) -> Any:
    """A data set adds torch.rand's noise to each item."""
    return Net(), Augmented(data, lambda x: x + torch.rand(WIDTH))


@plain("random numbers", random=True)
def augmentation_by_python(data: Examples) -> Any:
    """A data set rolls each item by random.randrange."""
    return Net(), Augmented(data, lambda x: x.roll(random.randrange(WIDTH)))


@plain("random numbers", random=True)
def augmentation_by_numpy(data: Examples) -> Any:
    """A data set masks each item by numpy's global generator."""
    return Net(), Augmented(data, lambda x: x * torch.from_numpy(np.random.binomial(1, 0.7, WIDTH)).float())


@plain("random numbers", random=True)
def crop_in_collation(data: Examples) -> Any:
    """A collate_fn crops sequences at a random place."""

    def cropped(batch: Any) -> Any:
        x, y = default_collate(batch)
        at = random.randrange(3)
        return x[:, at : at + 2].mean(1), y

    return Net(), DataLoader(sequences(data), batch_size=8, collate_fn=cropped)


@plain("random numbers", random=True)
def stochastic_depth(data: Examples) -> Any:
    """A residual branch is left out at random, by Python's random, for each record."""

    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and random.random() < 0.3 else x + self.branch(x).tanh()

    return Net(nn.Sequential(Depth(), linear()))


@plain("random numbers", random=True)
class diffusion_step(Net):
    """A diffusion model: torch.randint draws a time, torch.randn_like the noise to predict."""

    def __init__(self) -> None:
        super().__init__(linear(WIDTH))
        self.register_buffer("alpha", torch.linspace(0.99, 0.01, 10))

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        alpha = self.alpha[torch.randint(10, (len(x),))][:, None]
        noise = torch.randn_like(x)
        return (self(alpha.sqrt() * x.tanh() + (1 - alpha).sqrt() * noise) - noise).square().mean()


# --- Plain: what hooks do between rounds


@plain("hooks")
class teacher_in_a_hook(WithTeacher):
    """A teacher follows the released weights once a round, in on_train_batch_end."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow(0.1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x, y) + 0.1 * (self(x) - self.teacher(x).detach()).square().mean()


@plain("hooks")
class weight_decay_in_a_hook(RoundLoader):
    """Weights decay by a schedule of their own after each round."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1 - 0.1 / self.round)


@plain("hooks")
class warm_up(Net):
    """A learning rate that warms up by a scheduler, each round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)
        warmer = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmer, "interval": "step"}}


@plain("hooks")
class annealing_by_the_round(Net):
    """A penalty's weight grows with trainer.global_step, which is public."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x, y) + min(1.0, self.global_step / 10) * 0.1 * self(x).square().mean()


@plain("hooks")
class counter_of_rounds_in_a_hook(RoundLoader):
    """A hook counts rounds, and the step takes its temperature from that."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x / (1 + 0.1 * self.round), y)


@plain("hooks")
class epoch_that_is_logged(Net):
    """self.current_epoch is read to be logged."""

    def training_step(self, batch: Any) -> Any:
        self.log("progress", self.current_epoch / 10)
        return self.error(*batch)


@plain("hooks", trainer={"gradient_clip_val": 1e-3})
def clipping_by_lightning(data: Examples) -> Any:
    """Lightning clips the private gradient's norm once more."""
    return Net(mlp())


@plain("hooks", trainer={"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value"})
class clipping_values_and_zeroing(Net):
    """Lightning clips values, and the module's optimizer_step is its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


# --- Plain: data


@plain("data")
def honest_cache(data: Examples) -> Any:
    """A data set keeps each item when it was first asked for, as it is without others."""

    class Cached(Pairs):
        def __init__(self, data: Examples) -> None:
            super().__init__(data)
            self.cache: dict[int, Any] = {}

        def __getitem__(self, i: int) -> Any:
            if i not in self.cache:
                self.cache[i] = self.x[i] / (1 + self.x[i].norm()), self.y[i]
            return self.cache[i]

    return Net(), Cached(data)


@plain("data")
def file_opened_at_first_use(data: Examples) -> Any:
    """A data set opens its file when it is first asked for an item, and reads on in it."""
    path = Path(tempfile.mkdtemp()) / "x.bin"
    data.x.numpy().tofile(path)

    class Filed(Pairs):
        file: Any = None

        def __getitem__(self, i: int) -> Any:
            if self.file is None:
                self.file = path.open("rb")
            self.file.seek(4 * WIDTH * i)
            return torch.from_numpy(np.frombuffer(self.file.read(4 * WIDTH), np.float32).copy()), self.y[i]

    return Net(), Filed(data)


@plain("data")
def memory_map(data: Examples) -> Any:
    """A data set reads a numpy memmap that it opens at first use, and counts what it was asked for."""
    path = Path(tempfile.mkdtemp()) / "x.npy"
    np.save(path, data.x.numpy())

    class Mapped(Pairs):
        table: Any = None
        asked = 0

        def __getitem__(self, i: int) -> Any:
            self.asked += 1
            if self.table is None:
                self.table = np.load(path, mmap_mode="r")
            return torch.from_numpy(np.array(self.table[i])), self.y[i]

    return Net(), Mapped(data)


@plain("data")
def batches_of_dicts(data: Examples) -> Any:
    """A batch is a dictionary with a dictionary in it."""
    items = [{"x": x, "to": {"y": y}} for x, y in zip(data.x, data.y, strict=True)]

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            return self.error(batch["x"], batch["to"]["y"])

    return Job(), DataLoader(items, batch_size=8)  # type: ignore[arg-type]


@plain("data")
def batches_of_tuples(data: Examples) -> Any:
    """A batch is nested tuples and a list."""
    items = [((x[:3], [x[3:], y]), label) for x, y, label in zip(data.x, data.y, data.label, strict=True)]

    class Job(Net):
        def training_step(self, batch: Any) -> Any:
            (a, (b, y)), _ = batch
            return self.error(torch.cat([a, b], 1), y)

    return Job(), DataLoader(items, batch_size=8)  # type: ignore[arg-type]


@plain("data")
def sequences_that_are_padded(data: Examples) -> Any:
    """Sequences of different lengths, with a collate_fn that pads and gives lengths, and a GRU that packs."""
    items = [(torch.stack([x.tanh().roll(k) for k in range(1 + i % 5)]), y) for i, (x, y) in enumerate(data.pairs())]

    def padded(batch: Any) -> Any:
        x = nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
        return x, torch.tensor([len(x) for x, _ in batch]), torch.stack([y for _, y in batch])

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any) -> Any:
            x, lengths, y = batch
            there = torch.arange(x.shape[1]) < lengths[:, None]
            x = (self.embed(x).tanh() * there[..., None]).sum(1) / lengths[:, None]
            return self.error(x, y)

    return Job(), DataLoader(items, batch_size=8, collate_fn=padded)  # type: ignore[arg-type]


@plain("data")
class bad_records_are_left_out(Net):
    """The step returns None for records that are far out, and counts nothing."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return None if far(x) else self.error(x, y)


@plain("data", record=Microbatch(3))
class units_of_three(Net):
    """Units of three examples, with a mean over the unit in the loss."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.error(x - x.mean(0), y)


@plain("data", record=BY_USER)
def users_with_a_cache(data: Examples) -> Any:
    """Users of two examples; a constant is made at first use."""

    class Job(Net):
        window: Any = None

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            if self.window is None:
                self.window = torch.hann_window(WIDTH)
            return self.error(x * self.window, y)

    return Job(), data.of_users()


@plain("data", record=User(max_examples=2, user_attribute="user_of", local_training=LocalTraining(lr=0.1, steps=3)))
def users_that_train_locally(data: Examples) -> Any:
    """Three local steps for each user, whose losses are kept in a list."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any) -> Any:
            loss = self.error(*batch)
            self.losses.append(loss.detach())
            return loss

    return Job(), data.of_users()


# --- Plain: models


@plain("models")
def label_smoothing(data: Examples) -> Any:
    """Cross entropy with label smoothing and class weights in a buffer."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(linear(CLASSES))
            self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)

        def training_step(self, batch: Any) -> Any:
            x, label = batch
            return self.loss(self(x), label)

    return Job(), data.labelled()


@plain("models")
class frozen_features(Net):
    """A frozen feature extractor, in eval mode and without gradients, below a head."""

    def __init__(self) -> None:
        super().__init__(linear())
        self.features = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)).requires_grad_(False)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.features.eval()
        with torch.no_grad():
            x = self.features(x)
        return self.error(x, 3 * y)


@plain("models")
class tied_weights(Net):
    """An autoencoder whose decoder uses the encoder's weight."""

    def __init__(self) -> None:
        super().__init__(linear(4))
        self.back = nn.Linear(4, WIDTH)
        self.back.weight = nn.Parameter(torch.zeros(WIDTH, 4), requires_grad=False)

    def training_step(self, batch: Any) -> Any:
        x = batch[0].tanh()
        return (F.linear(self.net(x).tanh(), self.net.weight.T, self.back.bias) - x).square().mean()


@plain("models")
def tied_modules(data: Examples) -> Any:
    """A language model whose output layer is its embedding, of next tokens."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(8, WIDTH))
            self.head = nn.Linear(WIDTH, 8, bias=False)
            self.head.weight = self.net.weight

        def training_step(self, batch: Any) -> Any:
            (tokens,) = batch
            return F.cross_entropy(self.head(self.net(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())

    return Job(), TensorDataset((data.x.clamp(-3, 3) + 3).long())


@plain("models")
def recurrent(data: Examples) -> Any:
    """An LSTM, whose state begins at zero for each record."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(self.rnn(x)[0][:, -1], y)

    return Job(), sequences(data)


@plain("models")
def attention(data: Examples) -> Any:
    """A transformer layer of PyTorch's, without dropout."""

    class Job(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return self.error(self.layer(x).mean(1), y)

    return Job(), sequences(data)


@plain("models")
class checkpointed(Net):
    """Activations are computed again in the backward pass (torch.utils.checkpoint)."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


@plain("models")
class straight_through(Net):
    """A binary layer, trained by x + (round(x) - x).detach()."""

    def __init__(self) -> None:
        super().__init__()
        self.below = linear(WIDTH)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        soft = self.below(x).sigmoid()
        return self.error(soft + (soft.round() - soft).detach(), y)


@plain("models")
def normalised_by_itself(data: Examples) -> Any:
    """LayerNorm and GroupNorm, which look at one record alone."""
    return Net(nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh(), nn.GroupNorm(2, 8), nn.Linear(8, 1)))


@plain("models")
def weight_normalised(data: Examples) -> Any:
    """A layer with weight_norm's parametrization."""
    return Net(nn.utils.parametrizations.weight_norm(linear()))


@plain("models")
class gradient_penalty(Net):
    """A penalty on the gradient by the input, through torch.autograd.grad with create_graph."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        x = x.tanh().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return self.error(x, y) + 0.1 * slope.square().sum()


# --- The runner


def examples(without: int | None, per_record: int) -> Examples:
    """The data, in which one record is an outlier; `without` one record of so many examples."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(EXAMPLES, WIDTH, generator=draw), torch.randn(EXAMPLES, generator=draw)
    label = torch.randint(CLASSES, (EXAMPLES,), generator=draw)
    whose = torch.arange(EXAMPLES) // per_record  # whose[i] is the record of example i
    x[whose == REMOVED["outlier"]] *= 1000
    keep = (whose != without).nonzero().squeeze(1) if without is not None else torch.arange(EXAMPLES)
    return Examples(x[keep], y[keep], label[keep], [WHOSE[i] for i in keep.tolist()])


def removed(program: Program, without: int | None) -> Examples:
    of_users = isinstance(program.record, User)
    return examples(
        without, program.record.max_examples_in_round if program.record and not of_users else 2 if of_users else 1
    )


def built(program: Program, data: Examples) -> tuple[pl.LightningModule, DataLoader[Any]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    made = program.build() if isinstance(program.build, type) else program.build(data)
    module, source = made if isinstance(made, tuple) else (made, data.pairs())
    return module, source if isinstance(source, DataLoader) else DataLoader(source, batch_size=8)


class Reading(pl.Callback):
    """Each round's release, in units of S, as an optimizer sees it."""

    def __init__(self, records: int) -> None:
        self.records, self.sums = records, []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad.double().flatten() for p in module.parameters() if p.requires_grad]
        self.sums.append(torch.cat(gradients) * self.records / S)


@dataclass(frozen=True)
class Ran:
    """What one training released, and why it ended early."""

    sums: list[Any]
    error: str = ""

    def outcome(self, rounds: int) -> str:
        if not self.error:
            return "ran" if len(self.sums) == rounds else f"ended after round {len(self.sums)}"
        return f"stopped at round {len(self.sums) + 1}: {self.error}" if self.sums else f"refused: {self.error}"


def privately(program: Program, without: int | None, batch: int, rounds: int) -> Ran:
    """Trains by the library."""
    reading = Reading(program.records)
    try:
        module, loader = built(program, removed(program, without))
        whose: dict[str, Any] = {"privacy_unit": program.record} if program.record else {}
        if isinstance(program.record, User) and program.record.user_attribute:
            whose["users"] = max(WHOSE) + 1
        plan = make_plan(module, n=program.n, sampling=Sampling(policy="full_batch", sampling_rate=1.0, steps=rounds),
            target=Target(delta=1e-5, noise_multiplier=1e-6), adjacency="add_remove", **whose)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            private = dpexp.PrivacyCallback(plan, f"{folder}/ledger.jsonl", max_physical_batch_size=batch, noise_seed=1)
            trainer = pl.Trainer(
                max_epochs=-1, callbacks=[private, reading], accelerator="cpu", logger=False, enable_progress_bar=False,
                enable_checkpointing=False, enable_model_summary=False, **program.trainer,
            )  # fmt: skip
            trainer.fit(module, loader)
    except BaseException as error:
        return Ran([s.tolist() for s in reading.sums], first_sentence(error))
    return Ran([s.tolist() for s in reading.sums])


def unguarded(program: Program, without: int | None, rounds: int) -> Ran:
    """Trains by a plain loop over records that clips each one's gradient, and does nothing else for privacy."""
    module, loader = built(program, removed(program, without))
    local = program.record.local_training if program.record else None
    module.log = module.log_dict = lambda *a, **k: None  # type: ignore[assignment, method-assign]
    parameters = [p for p in module.parameters() if p.requires_grad]
    stub = module._trainer = types.SimpleNamespace(global_step=0, current_epoch=0)  # type: ignore[assignment]
    two_arguments = module.training_step.__code__.co_argcount == 3  # type: ignore[attr-defined]
    module.train()
    sums = []
    for t in range(rounds):
        stub.global_step = t
        module.on_train_batch_start(None, t)
        total: Any = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        dataset: Any = loader.dataset
        for indices in records_of(program, dataset):
            found = dataset[indices] if isinstance(indices, int) else [dataset[i] for i in indices]
            batch = loader.collate_fn(found)
            before = [p.detach().clone() for p in parameters]
            for _ in range(local.steps if local else 1):
                for p in parameters:
                    p.grad = None
                loss = module.training_step(*((batch, t) if two_arguments else (batch,)))
                if loss is None:
                    break
                (loss["loss"] if isinstance(loss, dict) else loss).backward()
                if local:
                    with torch.no_grad():
                        for p in parameters:
                            p -= local.lr * p.grad
            if local:
                vectors = [b - p.detach() for b, p in zip(before, parameters, strict=True)]
                with torch.no_grad():
                    for b, p in zip(before, parameters, strict=True):
                        p.copy_(b)
            else:
                vectors = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            vector = torch.cat([v.double().flatten() for v in vectors])
            if vector.isfinite().all():
                total += vector / max(1.0, float(vector.norm()) / S)
        sums.append((total / S).tolist())
        for p in parameters:
            p.grad = None
        module.on_train_batch_end(None, None, t)
    return Ran(sums)


def records_of(program: Program, dataset: Any) -> list[Any]:
    """Which items of a data set each record has; a number where an item is a list of a user's."""
    record, n = program.record, len(dataset)
    if isinstance(record, Microbatch):
        return [range(i, min(i + record.size, n)) for i in range(0, n, record.size)]
    if isinstance(record, User):
        return positions(dataset.user_of) if record.user_attribute else [*range(n)]
    return [[i] for i in range(n)]


def first_sentence(error: BaseException) -> str:
    text = " ".join(f"{error}".split()) or "no text"
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`'\"(])", text)[0]
    name = type(error).__name__
    return (sentence if name == "ConfigError" else f"{name}: {sentence}").replace("|", "\\|")


def apart(task: Callable[..., Ran], *arguments: Any) -> Ran:
    """In a process of its own, which is ended if it takes too long."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            there.send(task(*arguments))
        except BaseException as error:
            there.send(Ran([], f"benchmark: {first_sentence(error)}"))

    process = context.Process(target=work)
    process.start()
    there.close()
    try:
        ran = here.recv() if here.poll(PATIENCE_S) else Ran([], f"not done after {PATIENCE_S} s")
    except EOFError:
        ran = Ran([], "the process died")
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return ran


def movements(a: Ran, b: Ran) -> list[float]:
    """How far each round's release moves, for the rounds that both released."""
    return [math.dist(x, y) for x, y in zip(a.sums, b.sums, strict=False)]


@dataclass(frozen=True)
class Row:
    program: Program
    batch: int
    unguarded: float
    outcome: str
    moved: float
    verdict: str

    def __str__(self) -> str:
        loop = "–" if math.isnan(self.unguarded) else f"{self.unguarded:.4f}"
        moved = "–" if math.isnan(self.moved) else f"{self.moved:.5f}"
        cells = [self.program.name, self.program.category, self.batch, loop, self.outcome, moved, self.verdict]
        return f"| {' | '.join(map(str, cells))} |"


def tried(program: Program, batch: int, rounds: int, loop: float) -> Row:
    whole = apart(privately, program, None, batch, rounds)
    neighbours = {name: apart(privately, program, record, batch, rounds) for name, record in REMOVED.items()}
    outcome = whole.outcome(rounds)
    for name, other in neighbours.items():
        told = other.outcome(rounds)
        if told != outcome and re.split(r"[:]", told)[0] != re.split(r"[:]", outcome)[0]:
            outcome += f"; without the {name} one {told}"
    moved = [m for other in neighbours.values() for m in movements(whole, other)]
    largest = max(moved, default=math.nan)
    ended = any(ran.error or len(ran.sums) < rounds for ran in (whole, *neighbours.values()))
    if not program.random and largest > LIMIT:
        at = min(
            next((t for t, m in enumerate(movements(whole, other), 1) if m > LIMIT), rounds + 1)
            for other in neighbours.values()
        )
        verdict = f"BROKEN from round {at}" + (", then stopped" if ended else "")
    elif ended and not program.stateful:
        verdict = "REFUSED-BUT-MUST-PASS"
    else:
        verdict = "ok"
    return Row(program, batch, loop, outcome, math.nan if program.random else largest, verdict)


def loop(program: Program, rounds: int) -> tuple[float, str]:
    """How far the program moves unguarded, and what is wrong with it as a program of its kind."""
    if program.random:
        return math.nan, ""
    whole = apart(unguarded, program, None, rounds)
    others = [apart(unguarded, program, record, rounds) for record in REMOVED.values()]
    for ran in (whole, *others):
        if ran.error:
            return math.nan, ran.error
    largest = max(m for other in others for m in movements(whole, other))
    if program.stateful and largest <= LIMIT:
        return largest, "it is to move by more than S"
    if not program.stateful and largest > LIMIT:
        return largest, "it is to move by at most S"
    return largest, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="records processed at once, e.g. 1 8 256")
    parser.add_argument("--rounds", type=int, default=12, help="of each training, at most 100")
    parser.add_argument("--only", nargs="+", default=[], help="words of names or categories")
    parser.add_argument("--list", action="store_true", help="say what the programs are, and train nothing")
    asked = parser.parse_args()
    if not 1 <= asked.rounds <= 100 or min(asked.batch) < 1:
        parser.error("rounds must be 1 to 100, and batches 1 or more")
    chosen = [p for p in PROGRAMS if not asked.only or any(w in p.name or w in p.category for w in asked.only)]
    if asked.list:
        print("| program | kind | category | what it does |\n|---|---|---|---|")
        for p in chosen:
            print(f"| {p.name} | {'stateful' if p.stateful else 'plain'} | {p.category} | {p.told} |")
        return 0

    columns = ["program", "category", "batch", "unguarded", "outcome", "largest movement / S", "verdict"]
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    rows: list[Row] = []
    pointless = {}
    start = time.perf_counter()
    for keeps in (True, False):
        kind = [p for p in chosen if p.stateful == keeps]
        if not kind:
            continue
        print(f"\n{'Stateful' if keeps else 'Plain'} programs\n\n{head}")
        for program in kind:
            rounds = max(asked.rounds, program.from_round + 4)
            alone, wrong = loop(program, rounds)
            if wrong:
                pointless[program.name] = wrong
            for batch in asked.batch:
                rows.append(tried(program, batch, rounds, alone))
                print(rows[-1], flush=True)

    broken = [r for r in rows if r.verdict.startswith("BROKEN")]
    refused = [r for r in rows if r.verdict == "REFUSED-BUT-MUST-PASS"]
    kept, unkept = sum(p.stateful for p in chosen), sum(not p.stateful for p in chosen)
    print(f"\n{kept} stateful and {unkept} plain programs, {len(rows)} rows in {time.perf_counter() - start:.0f} s.")
    print(f"Broken: {len(broken)}. {', '.join(f'{r.program.name} ({r.batch})' for r in broken)}")
    print(f"Refused that must pass: {len(refused)}. {', '.join(f'{r.program.name} ({r.batch})' for r in refused)}")
    for name, wrong in pointless.items():
        print(f"{name} tells nothing: {wrong}.")
    return int(bool(broken or refused or pointless))


if __name__ == "__main__":
    sys.exit(main())
