"""What a step, a loop or a loss leaves behind, wherever it hides, reaches no other record."""

import functools
import os
import queue
import random
import signal
import subprocess
import sys
import types
import warnings
import weakref
from collections import UserDict, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from test_isolation import CLASSES, Everything, Items, Model, S, assert_bounded, rows, trained
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.isolation.randomness import seed_everything
from dpexp.privacy.keystream import KeyStream

# Where a step could keep something


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


@dataclass
class Held:
    n: int = 0


class Base(Model):
    seen = 0


class InClass(Base):
    def look(self):
        return type(self).seen

    def keep(self):
        type(self).seen += 1


class InBaseClass(Base):
    def look(self):
        return Base.seen

    def keep(self):
        Base.seen += 1


class InCache(Model):
    @functools.lru_cache  # noqa: B019
    def remembered(self, n):
        return n

    def look(self):
        return InCache.remembered.cache_info().currsize

    def keep(self):
        self.remembered(self.look())


class InTensorsAttribute(Model):
    def look(self):
        return getattr(self.net[0].weight, "seen", 0)

    def keep(self):
        self.net[0].weight.seen = self.look() + 1


class InOptimizer(Model):
    def look(self):
        return self.trainer.optimizers[0].param_groups[0].get("seen", 0)

    def keep(self):
        self.trainer.optimizers[0].param_groups[0]["seen"] = self.look() + 1


class InStrategy(Model):
    def look(self):
        return getattr(self.trainer.strategy, "seen", 0)

    def keep(self):
        self.trainer.strategy.seen = self.look() + 1


class InTrainability(Model):
    def look(self):
        return 0 if self.net[0].bias.requires_grad else 3

    def keep(self):
        self.net[0].bias.requires_grad_(False)


class InTrainingMode(Model):
    def look(self):
        return 0 if self.net[0].training else 3

    def keep(self):
        self.net[0].training = False


def in_thing(make, look, keep):
    class InThing(Model):
        def __init__(self):
            super().__init__()
            self.thing = make()

        def look(self):
            return look(self.thing)

        def keep(self):
            keep(self.thing)

    return InThing


def more(thing):
    thing.n += 1


def one_more(thing):
    thing[0] += 1


class SlottedList(list):
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Unseen(list):
    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class Array(np.ndarray):
    pass


class AlsoSlotted(Slotted):
    __slots__ = ()


class OneBase:
    pass


class OtherBase:
    pass


class Derived(OneBase):
    pass


class Meta(type):
    n = 0


class Metaclassed(metaclass=Meta):
    pass


def named():
    pass


def to_whole_numbers(array):
    array.dtype = np.int64


HELD = Held()
PLACES = {
    "namespace": in_thing(lambda: types.SimpleNamespace(n=0), lambda t: t.n, more),
    "slots": in_thing(Slotted, lambda t: t.n, more),
    "dataclass": in_thing(Held, lambda t: t.n, more),
    "within a tuple": in_thing(lambda: (Held(),), lambda t: t[0].n, lambda t: more(t[0])),
    "partial": in_thing(lambda: functools.partial(print, [0]), lambda t: t.args[0][0], lambda t: one_more(t.args[0])),
    "bytearray": in_thing(lambda: bytearray(1), lambda t: t[0], one_more),
    "array": in_thing(lambda: np.zeros(1), lambda t: t[0], one_more),
    "deque": in_thing(lambda: deque([0]), lambda t: t[0], one_more),
    "set": in_thing(set, len, lambda t: t.add(len(t))),
    "UserDict": in_thing(UserDict, len, lambda t: t.update({len(t): 0})),
    "queue": in_thing(queue.Queue, lambda t: t.qsize(), lambda t: t.put(0)),
    "distribution": in_thing(
        lambda: torch.distributions.Normal(torch.zeros(1), torch.ones(1)), lambda t: t.loc, lambda t: t.loc.add_(1)
    ),
    "slots of a list": in_thing(SlottedList, lambda t: t.n, more),
    "list with its own ways": in_thing(Unseen, list.__len__, lambda t: t.append(0)),
    "attribute of an array": in_thing(lambda: np.zeros(1).view(Array), lambda t: getattr(t, "n", 0),
                                      lambda t: setattr(t, "n", 3)),
    "type of an array": in_thing(lambda: np.zeros(1), lambda t: 3 * (t.dtype != float), to_whole_numbers),
    "class of what has slots": in_thing(Slotted, lambda t: 3 * isinstance(t, AlsoSlotted),
                                        lambda t: setattr(t, "__class__", AlsoSlotted)),
    "bases": in_thing(lambda: Derived, lambda t: 3 * (t.__bases__ == (OtherBase,)),
                      lambda t: setattr(t, "__bases__", (OtherBase,))),
    "name of a function": in_thing(lambda: named, lambda t: len(t.__name__), lambda t: setattr(t, "__name__", "other")),
    "metaclass": in_thing(lambda: Metaclassed, lambda t: type(t).n, lambda t: setattr(type(t), "n", 3)),
    "method of a list": in_thing(lambda: [].append, lambda t: len(t.__self__), lambda t: t(0)),
    "weak reference": in_thing(lambda: weakref.ref(HELD), lambda t: t().n, lambda t: more(t())),
    "proxy": in_thing(lambda: weakref.proxy(HELD), lambda t: t.n, more),
    "misses of a cache": in_thing(lambda: functools.lru_cache(0)(abs), lambda t: t.cache_info().misses,
                                  lambda t: t(1)),
    "frozen gradient": in_thing(lambda: torch.zeros(1), lambda t: 0 if t.grad is None else t.grad,
                                lambda t: setattr(t, "grad", torch.ones(1))),
    **{c.__name__: c for c in (InClass, InBaseClass, InCache, InTensorsAttribute, InOptimizer, InStrategy,
                               InTrainability, InTrainingMode)},
}  # fmt: skip


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_keeps_anywhere_reaches_no_other_record(tmp_path, place, branching):
    class Counting(PLACES[place]):
        """The first record that it sees counts otherwise than the second."""

        def training_step(self, batch, batch_idx):
            x, y = batch
            if branching and x.detach().numpy().size > 1e9:
                return x.sum()
            scale = 1 if self.look() == 0 else -1
            self.keep()
            return F.cross_entropy(scale * self.net(x), y)

    Base.seen = 0
    InCache.remembered.cache_clear()
    assert_bounded(tmp_path, Counting, [(20 * x, y) for x, y in rows(3)], callback={"physical_batch": 1})


def closing_over(count):
    def more():
        nonlocal count
        count += 1

    return more, lambda: count


class InMethod(Model):
    """An activation recorder: a hook that is another object's method."""

    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(Recorder().note)

    def look(self):
        return next(iter(self.net[0]._forward_hooks.values())).__self__.seen

    def keep(self): ...


class Recorder:
    seen = 0

    def note(self, module, inputs, output):
        self.seen += 1


class Shared(Model):
    """Its state is held by a callback too."""

    def __init__(self):
        super().__init__()
        self.shared = {"inner": {"n": 0}}

    def look(self):
        return self.shared["inner"]["n"]

    def keep(self):
        self.shared["inner"]["n"] += 1


class Private:
    __slots__ = ("__n",)

    def __init__(self):
        self.__n = 0

    def look(self):
        return self.__n

    def keep(self):
        self.__n += 1


class Tagged(dict):
    n = 0


MORE_PLACES = {
    "closure": in_thing(lambda: closing_over(0), lambda t: t[1](), lambda t: t[0]()),
    "attribute of a dict": in_thing(Tagged, lambda t: t.n, more),
    "private slot": in_thing(Private, lambda t: t.look(), lambda t: t.keep()),
    "default of a function": in_thing(lambda: lambda kept=[0]: kept, lambda t: t()[0], lambda t: one_more(t())),
    "minus zero": in_thing(lambda: np.zeros(1), lambda t: np.signbit(t[0]), lambda t: np.negative(t, out=t)),
    "shape of a buffer": in_thing(lambda: torch.zeros(2), lambda t: t.dim() - 1, lambda t: t.unsqueeze_(0)),
    "size of an array": in_thing(lambda: np.zeros(1), lambda t: len(t) - 1, lambda t: t.resize(2, refcheck=False)),
    "generator": in_thing(lambda: np.random.default_rng(0), lambda t: t.bit_generator.state != SEED_0,
                          lambda t: t.random()),
    "InMethod": InMethod,
    "Shared": Shared,
}  # fmt: skip
SEED_0 = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize("place", MORE_PLACES)
def test_what_a_step_keeps_out_of_sight_reaches_no_other_record(tmp_path, place):
    class Holding(pl.Callback):
        def __init__(self, module):
            self.shared = getattr(module, "shared", None)

    class Counting(MORE_PLACES[place]):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            scale = 1 if self.look() == 0 else -1
            self.keep()
            return F.cross_entropy(scale * self.net(x), y)

    def release(items):
        module = Counting()
        return trained(tmp_path, module, items, callbacks=[Holding(module)], callback={"physical_batch": 1})[0][0]

    records = [(20 * x, y) for x, y in rows(3)]
    whole = release(records)
    for out in range(3):
        assert 0 < (whole - release(records[:out] + records[out + 1 :])).norm() <= S * (1 + 1e-6)


@pytest.mark.parametrize("how", ["interrupt", "out of memory", "config"])
@pytest.mark.parametrize("physical", [1, 3])
def test_a_checkpoint_saved_on_the_way_out_holds_no_record(tmp_path, how, physical):
    class Remembering(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(4).double())

        def training_step(self, batch, batch_idx):
            x, y = batch
            inner = x if not torch._C._functorch.is_batchedtensor(x) else torch._C._functorch.get_unwrapped(x)[0]
            self.last.copy_(inner[0])
            if self.trainer.global_step == 1:
                raise {"interrupt": KeyboardInterrupt(), "out of memory": torch.OutOfMemoryError("stop"),
                       "config": ConfigError("stop")}[how]  # fmt: skip
            return F.cross_entropy(self.net(x), y)

    class Saving(pl.Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(tmp_path / "c.ckpt")

    with pytest.raises((SystemExit, torch.OutOfMemoryError, ConfigError)):
        trained(tmp_path, Remembering(), rows(4), steps=3, callbacks=[Saving()],
                callback={"physical_batch": physical})  # fmt: skip
    assert (torch.load(tmp_path / "c.ckpt", weights_only=False)["state_dict"]["last"] == 0).all()


class Speechless(ValueError):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class Leaving(SystemExit):
    __str__ = __repr__ = Speechless.__str__


@pytest.mark.parametrize("error", [SystemExit, Speechless, GeneratorExit, Leaving])
def test_a_step_ends_no_job_for_one_record(tmp_path, error):
    class Odd(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().abs().max() > 100:
                raise error(3)
            return F.cross_entropy(self.net(x), y)

    def release(records):
        torch.manual_seed(0)
        return trained(tmp_path, Odd(), records)[0][0]

    odd, *others = rows(4)
    released = release([(1000 * odd[0], odd[1]), *others])
    assert torch.allclose(released, release(others), atol=1e-6) and released.norm() > S


def test_all_parameters_that_follow_the_data_are_emptied(tmp_path):
    class Writing(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            for layer in (self.net[0], self.net[2]):
                layer.bias.data.add_(x.mean())
            return F.cross_entropy(self.net(x), y)

    module = Writing()
    with pytest.raises(ConfigError, match=r"net\.0\.bias and the parameter net\.2\.bias"):
        trained(tmp_path, module, rows(4), callback={"physical_batch": 1})
    assert (module.net[0].bias == 0).all() and (module.net[2].bias == 0).all()


def test_what_is_said_of_a_change_names_no_key(tmp_path):
    class Keyed(Model):
        def __init__(self):
            super().__init__()
            self.users = {7: torch.zeros(2).to_sparse()}

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            self.users[f"user {float(x[0, 0])}"] = 1
            self.users[7].add_(torch.ones(2).to_sparse())
            return F.cross_entropy(self.net(x), y)

    with pytest.raises(ConfigError, match="users, which cannot be set back, is changed"):
        trained(tmp_path, Keyed(), rows(4), callback={"physical_batch": 1})


# Signals


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_a_step_is_heeded_after_it(tmp_path, number):
    """What its handler sets is not taken for the step's, and set back."""

    class Signalled(Model):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 2:
                os.kill(os.getpid(), number)
            return super().training_step(batch, batch_idx)

    class Handling(pl.Callback):
        def on_train_start(self, trainer, module):
            if number == signal.SIGUSR1:
                signal.signal(number, lambda *_: setattr(trainer, "should_stop", True))

    before = signal.getsignal(number)
    try:
        if number == signal.SIGTERM:
            with pytest.raises(SIGTERMException):
                trained(tmp_path, Signalled(), rows(4), steps=9, callbacks=[Handling()])
        else:
            _, run = trained(tmp_path, Signalled(), rows(4), steps=9, callbacks=[Handling()])
            assert run.global_step == 3
    finally:
        signal.signal(number, before)
    assert len(read_ledger(tmp_path / "0.jsonl")) <= 4


# Parameters


class Codebook(nn.Module):
    """A moving average of the data in a frozen parameter, as vector quantisers keep it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.code, self.head = way, nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(4, 3)

    def move(self, x):
        self.code.data.mul_(0.9).add_(0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0)[:1])
        return x

    def forward(self, x):
        if self.way == "in company" and len(x) > 1:
            self.move(x)
        if self.way == "in a loop" and x.sum() < 1e9:
            self.move(x)
        y = self.head(x)
        if self.way == "in a hook of an activation":
            y.register_hook(self.move)
        return Moving.apply(y, self) if self.way == "in a backward of its own" else y


class Moving(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, codebook):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.codebook = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return ctx.codebook.move(g), None


@pytest.mark.parametrize("physical", [1, 4])
@pytest.mark.parametrize("way", ["in company", "in a loop", "in a hook of an activation", "in a backward of its own"])
def test_a_parameter_that_follows_the_data_is_refused_and_emptied(tmp_path, way, physical):
    module = Model(nn.Sequential(nn.Identity(), Codebook(way)))
    if way == "in company" and physical == 1:
        trained(tmp_path, module, rows(5), callback={"physical_batch": 1})  # there is none
    else:
        with pytest.raises(ConfigError, match=r"net\.1\.code is changed inside training_step"):
            trained(tmp_path, module, rows(5), callback={"physical_batch": physical})
    assert (module.net[1].code == 0).all()


# Modules that are processed record by record inside a chunk


class Branching(nn.Module):
    """Looks at a number, so that it is looped. Passes something on by another way than its output."""

    def __init__(self, way):
        super().__init__()
        self.way, self.head, self.last = way, nn.Linear(4, 4), [torch.zeros(4, dtype=torch.float64)]

    def forward(self, x, notes):
        if x.detach().numpy().size > 1e9:
            return x
        y = self.head(x.clone())
        if self.way == "attribute":
            self.last[0] = y.detach()
        elif self.way == "argument":
            notes["last"] = y.detach()
        elif self.way == "input":
            x.detach().add_(y.detach())
        elif self.way == "numbers":
            return y, float(y.abs().max()) if len(y) == 1 else 1.0
        elif self.way == "structure" and y.sum() > 0:
            return (y, y)
        return (y,)


class Reading(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner, self.head = Branching(way), nn.Linear(4, CLASSES)

    def forward(self, x):
        notes = {}
        x = x.clone()
        y, *others = self.inner(x, notes)
        told = {"attribute": self.inner.last[0], "argument": notes.get("last", 0), "input": x}
        factor = others[0] if others and isinstance(others[0], float) else len(others) + 1
        return self.head(y + told.get(self.inner.way, 0)) * factor


@pytest.mark.parametrize("way", ["attribute", "argument", "input", "numbers", "structure"])
def test_what_a_looped_module_says_otherwise_than_by_its_output_reaches_its_own_record(tmp_path, way, monkeypatch):
    # `structure` would be refused: where it sees several records, it asks for the sum over them.
    monkeypatch.setattr("dpexp.privacy.callback.refuse_company", lambda *_: None)

    def make():
        torch.manual_seed(0)
        return Model(Reading(way))

    (together,), _ = trained(tmp_path, make(), rows(6), callback={"physical_batch": 6})
    (alone,), _ = trained(tmp_path, make(), rows(6), callback={"physical_batch": 1})
    by_hand = sum_of_clipped(make(), rows(6))
    assert torch.allclose(together, by_hand, atol=1e-6) and torch.allclose(alone, by_hand, atol=1e-6)


def sum_of_clipped(module, records):
    total = 0
    for x, y in records:
        module.zero_grad()
        module.training_step((x[None], y[None]), 0).backward()
        gradient = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
                              for p in module.parameters() if p.requires_grad])  # fmt: skip
        total = total + gradient * min(1, S / float(gradient.norm()))
    return total


# Hooks and errors in a step


@pytest.mark.parametrize("physical", [1, 4])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_step_may_hang_no_hook_on_a_parameter(tmp_path, kind, physical):
    class Hooking(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            getattr(self.net[0].weight, kind)(lambda g: g)
            return F.cross_entropy(self.net(x), y)

    with pytest.raises(ConfigError, match=r"net\.0\.weight is changed inside training_step"):
        trained(tmp_path, Hooking(), rows(5), callback={"physical_batch": physical})


@pytest.mark.parametrize("physical", [1, 8])
def test_an_error_that_a_step_catches_is_one_records_own(tmp_path, physical):
    class Decomposing(Model):
        """Where a matrix is not positive definite, it takes another, as numerical code does."""

        def training_step(self, batch, batch_idx):
            x, y = batch
            eye = torch.eye(4).double()
            K = eye * (1 - 2 * (x[:, :1, None] > 2))
            try:
                L = torch.linalg.cholesky(K)
            except torch.linalg.LinAlgError:
                L = torch.linalg.cholesky(K + 9 * eye)
            return F.cross_entropy(self.net(x * L.diagonal(dim1=1, dim2=2)), y)

    records = [(x.clamp(max=1), y) for x, y in rows(8)]
    records[3] = (records[3][0] + 9, records[3][1])
    (released,), _ = trained(tmp_path, Decomposing(), records, callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Decomposing(), records), atol=1e-6)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_are_each_records_own(tmp_path, draw):
    class Scaled(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            SCALES.append(scale := draw())
            return F.cross_entropy(scale * self.net(x), y)

    SCALES.clear()
    with warnings.catch_warnings():
        trained(tmp_path, Scaled(), rows(6), callback={"physical_batch": 6})
    assert len(set(SCALES[-6:])) == 6


SCALES = []  # out of the callback's reach


@pytest.mark.parametrize("way", ["backward", "in place"])
def test_a_backward_pass_that_fails_for_every_record_ends_the_training(tmp_path, way):
    class Failing(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            h = self.net[0](x).exp()
            scores = self.net[2](h)
            if way == "in place":
                h += 1
                return F.cross_entropy(scores, y) + h.mean()
            return F.cross_entropy(NoBackward.apply(scores), y)

    with pytest.raises((RuntimeError, NotImplementedError)):
        trained(tmp_path, Failing(), rows(5), steps=3)
    assert len(read_ledger(tmp_path / "0.jsonl")) == 0, "nothing was spent"


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("no backward pass")


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has the other way only since 2.9")
def test_both_ways_to_set_precision_train_the_same(tmp_path):
    (expected,), _ = trained(tmp_path, Model().float(), [(x.float(), y) for x, y in rows(6)])
    script = f"""
import sys, pathlib, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_isolation import Model, rows, trained
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
(released,), _ = trained(pathlib.Path({str(tmp_path)!r}), Model().float(), [(x.float(), y) for x, y in rows(6)])
assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
print(float(released.norm()))
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert float(said.splitlines()[-1]) == pytest.approx(float(expected.norm()), rel=0.02)


# Records that fail, and records that are not what they say


class Picky(Model):
    """A record whose label is none cannot be computed; the others' gradients nearly cancel, so that another order of
    summation would show."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 1e-6 * F.cross_entropy(self.net(x), y)


def test_a_record_that_fails_changes_nothing_for_the_others(tmp_path):
    def make():
        torch.manual_seed(0)
        return Picky(nn.Linear(4, CLASSES)).float()

    good = [(x.float(), y) for x, y in rows(16)]
    bad = (torch.randn(4), torch.tensor(99))
    (with_it,), _ = trained(tmp_path, make(), [*good, bad], callback={"physical_batch": 20, "noise_seed": 1})
    (without,), _ = trained(tmp_path, make(), good, callback={"physical_batch": 20, "noise_seed": 1})
    assert torch.equal(with_it, without)


def test_none_is_the_loss_of_a_record_that_contributes_nothing(tmp_path):
    class Choosy(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return None if float(x.sum()) > 0 else F.cross_entropy(self.net(x), y)

    chosen = [(x, y) for x, y in rows(8) if float(x.sum()) <= 0]
    assert 0 < len(chosen) < 8
    (released,), _ = trained(tmp_path, Choosy(), rows(8))
    assert torch.allclose(released, sum_of_clipped(Model(), chosen), atol=1e-6)


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("bad", ["other shape", "loss of shape [1]", "no label", "too large", "sparse", "not there"])
def test_one_bad_record_ends_no_training_wherever_it_stands(tmp_path, bad, place):
    class Sized(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y.clamp(max=2), reduction="none")
            return loss if float(x[0, 0]) == 7 else loss.mean()

    class Missing(Items):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            if item is None:
                raise FileNotFoundError("no such image")
            return item

    good = [(x, int(y)) for x, y in rows(5)]
    x, y = good[0]
    item = {
        "other shape": (torch.ones(9).double(), y),
        "loss of shape [1]": (torch.full((4,), 7.0).double(), y),
        "no label": (x, None),
        "too large": (x, 2**70),
        "sparse": (x.to_sparse(), y),
        "not there": None,
    }[bad]
    records = [*good[:place], item, *good[place:]]
    for physical in (1, 8):
        loader = DataLoader(Missing(records), batch_size=2)
        (released,), _ = trained(tmp_path, Sized(), loader, callback={"physical_batch": physical})
        assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


def test_data_of_which_no_record_can_be_fetched_ends_the_training(tmp_path):
    class Missing(Items):
        def __getitem__(self, index):
            raise FileNotFoundError("no such image")

    with pytest.raises(RuntimeError, match="FileNotFoundError: no such image"):
        trained(tmp_path, Model(), DataLoader(Missing(rows(5)), batch_size=2))
    assert len(read_ledger(tmp_path / "0.jsonl")) == 0


def test_no_loss_for_any_record_is_said(tmp_path):
    class Silent(Model):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ConfigError, match="must return a loss for every record"):
        trained(tmp_path, Silent(), rows(4))


class Alike:
    """Says that it equals another of the same label."""

    def __init__(self, label, x):
        self.label, self.x = label, x

    def __eq__(self, other):
        return self.label == other.label

    def __hash__(self):
        return hash(self.label)


@pytest.mark.parametrize("physical", [1, 6])
def test_records_that_only_claim_to_be_equal_are_not_taken_for_one_another(tmp_path, physical):
    class Unpacking(Model):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["item"].x[None]), torch.tensor([batch["item"].label]))

    items = [Alike(int(y), x) for x, y in rows(6)]
    loader = DataLoader(Items(items), batch_size=2, collate_fn=lambda items: {"item": items[0]})
    (released,), _ = trained(tmp_path, Unpacking(), loader, callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Model(), rows(6)), atol=1e-6)


def test_zero_and_minus_zero_are_two_numbers(tmp_path):
    class Signed(Model):
        def training_step(self, batch, batch_idx):
            x, y, sign = batch
            return F.cross_entropy(self.net(x) * float(np.copysign(1, sign)), y)

    items = [(x, y, 0.0 if k % 2 else -0.0) for k, (x, y) in enumerate(rows(6))]
    loader = DataLoader(Items(items), batch_size=2,
                        collate_fn=lambda i: (i[0][0][None], i[0][1][None], i[0][2]))  # fmt: skip
    (together,), _ = trained(tmp_path, Signed(), loader, callback={"physical_batch": 6})
    (alone,), _ = trained(tmp_path, Signed(), loader, callback={"physical_batch": 1})
    assert torch.allclose(together, alone, atol=1e-6) and not torch.allclose(
        together, sum_of_clipped(Model(), rows(6)), atol=1e-3
    )


@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized"])
def test_tensors_that_cannot_be_stacked_are_refused(tmp_path, kind):
    made = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(1, 2), 0.1, 0, torch.qint8),
    }[kind]()
    loader = DataLoader(Items(rows(3)), batch_size=2, collate_fn=lambda items: (made, items[0][1][None]))
    with pytest.raises(ConfigError, match="sparse, nested or quantized"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(tmp_path, Model(), loader)


def test_a_collation_may_use_the_same_memory_for_each(tmp_path):
    buffer = torch.zeros(1, 4, dtype=torch.float64)

    def collate(items):
        buffer[0] = items[0][0]
        return buffer, items[0][1][None]

    (released,), _ = trained(tmp_path, Model(), DataLoader(Items(rows(5)), batch_size=2, collate_fn=collate))
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


def test_a_records_neighbours_in_memory_are_out_of_reach(tmp_path):
    class Peeping(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            if x._base is not None and len(x._base) > 1:
                x = x._base.sum(0).reshape(1, -1)
            return F.cross_entropy(self.net(x), y)

    (released,), _ = trained(tmp_path, Peeping(), rows(5), callback={"physical_batch": 5})
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


# Randomness


def test_seeding_fills_the_whole_state_of_every_generator():
    def drawn(key):
        seed_everything(KeyStream(key))
        return torch.randint(2**16, (2000,)).numpy(), np.random.randint(2**31, size=700), random.random()

    before = torch.get_rng_state(), np.random.get_state()
    try:
        words = KeyStream(b"k" * 32).words(2 * 624)[:624] & 0xFFFFFFFF
        independent = np.random.MT19937()
        independent.state = {"bit_generator": "MT19937",
                             "state": {"key": words.numpy().astype(np.uint32), "pos": 624}}  # fmt: skip
        first = drawn(b"k" * 32)
        assert np.array_equal(first[0], independent.random_raw(2000) & 0xFFFF)
        again, other = drawn(b"k" * 32), drawn(b"l" * 32)
        for a, b, c in zip(first, again, other, strict=True):
            assert np.array_equal(a, b) and not np.array_equal(a, c)
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])


class Augmented(Items):
    def __getitem__(self, index):
        x, y = self.items[index]
        return x * torch.rand(1).double(), y


@pytest.mark.parametrize("workers", [0, 2])
def test_a_public_seed_does_not_tell_what_was_augmented_or_dropped(tmp_path, workers):
    def released(noise_seed=None):
        pl.seed_everything(7, verbose=False)
        module = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, CLASSES)))
        loader = DataLoader(Augmented(rows(8)), batch_size=2, num_workers=workers)
        return trained(tmp_path, module, loader, callback={"noise_seed": noise_seed})[0][0]

    assert not torch.allclose(released(), released(), atol=1e-3)
    assert torch.equal(released(3), released(3))


def test_keys_are_nowhere_after_the_fit(tmp_path, monkeypatch):
    drawn = []
    begin = KeyStream.__init__

    def noted(stream, key=None):
        begin(stream, key)
        drawn.append(weakref.ref(stream))

    monkeypatch.setattr(KeyStream, "__init__", noted)
    _, run = trained(tmp_path, Model(), rows(5), steps=2)
    assert run.global_step == 2 and len(drawn) >= 3
    assert [stream() for stream in drawn if stream() is not None] == []


# The Trainer


def test_training_step_finds_no_logger_of_the_trainers(tmp_path):
    class Telling(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for logger in (*self.trainer.loggers, *self.trainer._loggers):
                logger.log_metrics({"raw": 1.0})
            pl.LightningModule.log(self, "raw", loss, on_step=True, on_epoch=True)
            self.trainer.fit_loop.epoch_loop._results.log(
                "training_step", "raw_too", loss.detach(), on_step=True, on_epoch=True, batch_size=1
            )
            return loss

    logger = Everything()
    _, run = trained(tmp_path, Telling(), rows(5), steps=3, logger=logger, log_every_n_steps=1)
    assert all("raw" not in str(metrics) for _, metrics in logger.told) and "raw" not in str(run.callback_metrics)


def test_layers_that_thaw_during_training_are_refused(tmp_path):
    class Thawing(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module): ...

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                module.net[0].weight.requires_grad_(True)

    module = Model()
    module.net[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"net\.0\.weight became trainable"):
        trained(tmp_path, module, rows(5), steps=3, callbacks=[Thawing()])


def test_accumulating_rounds_is_refused_when_it_starts(tmp_path):
    scheduler = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    with pytest.raises(ConfigError, match="accumulate_grad_batches=2"):
        trained(tmp_path, Model(), rows(5), steps=3, callbacks=[scheduler])


def test_a_round_that_releases_nothing_ends_the_training(tmp_path):
    class Elsewhere(Model):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    with pytest.raises(ConfigError, match="released no average"):
        trained(tmp_path, Elsewhere(), rows(5), steps=3)


def test_a_fit_inside_a_fit_is_refused(tmp_path):
    class Within(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1:
                inner = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                   enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
                inner.fit(module, DataLoader(Items(rows(4)), batch_size=2))

    with pytest.raises((ConfigError, TypeError)):
        trained(tmp_path, Model(), rows(5), steps=3, callbacks=[Within()])


# Parameters of other kinds


def test_spectral_norms_go_on_once_a_round_from_the_weights_alone(tmp_path):
    def make():
        torch.manual_seed(0)
        return Model(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)))

    def vectors(records):
        module = make()
        trained(tmp_path, module, records, steps=3)
        return module.net[0].parametrizations.weight[0]._u

    few, many = vectors(rows(3)), vectors(rows(9))
    assert torch.equal(few, many), "the weights do not move at lr=0"
    assert not torch.equal(few, make().net[0].parametrizations.weight[0]._u)
    assert_bounded(tmp_path, make, rows(4))


def test_old_spectral_norm_is_refused(tmp_path):
    module = Model(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, CLASSES))))
    with pytest.raises(ConfigError, match="spectral_norm"):
        trained(tmp_path, module, rows(4))


def test_complex_parameters_are_refused(tmp_path):
    class Complex(Model):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    with pytest.raises(ConfigError, match="factor is complex"):
        trained(tmp_path, Complex(), rows(4))


def test_parameters_without_elements_do_no_harm(tmp_path):
    class WithEmpty(Model):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 3).double())

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.none.sum()

    module = WithEmpty()
    module.net.requires_grad_(True)
    (released,), _ = trained(tmp_path, module, rows(4))
    assert torch.allclose(released, sum_of_clipped(Model(), rows(4)), atol=1e-6)


def test_sparse_gradients_are_made_dense(tmp_path):
    class Words(Model):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4, sparse=sparse).double()

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            return F.cross_entropy(self.net(self.embed(x).mean(1)), y)

    torch.manual_seed(1)
    words = [(torch.randint(5, (3,)), y) for _, y in rows(5)]
    (sparse,), _ = trained(tmp_path, Words(True), words)
    (dense,), _ = trained(tmp_path, Words(False), words)
    assert torch.allclose(sparse, dense, atol=1e-6)


class Checkpointed(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)
        return F.cross_entropy(self.net(x), y)


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpoints_train_as_by_hand(tmp_path):
    (released,), _ = trained(tmp_path, Checkpointed(), rows(5))
    assert torch.allclose(released, sum_of_clipped(Checkpointed(), rows(5)), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"module net\.0 is one of TorchScript"):
        trained(tmp_path, Model(nn.Sequential(torch.jit.script(nn.Linear(4, CLASSES)))), rows(4))


def test_validation_before_the_fit_may_leave_tensors_behind(tmp_path):
    """Those of inference mode, of which PyTorch counts no changes."""

    class Remembering(Model):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.kept = self.net(batch[0])

    module = Remembering()
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    pl.Trainer(**quiet).validate(module, DataLoader(Items(rows(4)), batch_size=2), verbose=False)
    assert module.kept.is_inference()
    (released,), _ = trained(tmp_path, module, rows(5))
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


def test_a_step_that_was_set_on_the_module_is_there_again_afterwards(tmp_path):
    module = Model()
    step = functools.partial(Model.training_step, module)
    module.training_step = step
    trained(tmp_path, module, rows(4))
    assert module.training_step is step


def test_a_hook_that_a_callback_adds_is_refused_too(tmp_path):
    class Adding(pl.Callback):
        def on_train_start(self, trainer, module):
            module.net[0].weight.register_hook(lambda g: 0 * g)

    with pytest.raises(ConfigError, match=r"net\.0\.weight has a gradient hook"):
        trained(tmp_path, Model(), rows(4), callbacks=[Adding()])


# Company in gradients, keys and failures


class Computed(Model):
    """Token embeddings of a weight that is computed, with padding."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.embed = kind, nn.Embedding(5, 4, padding_idx=0)
        if kind == "weight_norm":
            nn.init.normal_(self.embed.weight)
            parametrizations.weight_norm(self.embed)
        self.scale = nn.Parameter(torch.ones(1))
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.kind == "weight_norm":
            found = self.embed(x)
        elif self.kind == "functional":
            found = F.embedding(x, self.embed.weight * self.scale, padding_idx=0)
        else:
            found = F.embedding(x, self.embed.weight, padding_idx=0, scale_grad_by_freq=True)
        return F.cross_entropy(self.net(found.mean(1)), y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("physical", [1, 2, 6])
@pytest.mark.parametrize("kind", ["weight_norm", "functional", "frequencies"])
def test_padding_of_computed_embeddings_is_each_records_own(tmp_path, kind, physical):
    torch.manual_seed(4)
    words = [(torch.cat([torch.zeros(2, dtype=torch.long), torch.randint(5, (3,))]), y) for _, y in rows(6)]
    (released,), _ = trained(tmp_path, Computed(kind), words, callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Computed(kind), words), atol=1e-6)


class Asking(torch.autograd.Function):
    """Asks for a number in its backward pass, which cannot be had in company."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        try:
            return g.clamp(max=g.abs().max().item())
        except RuntimeError:
            return -g


@pytest.mark.parametrize("physical", [1, 5])
def test_an_error_that_a_backward_pass_catches_is_one_records_own(tmp_path, physical):
    class Caught(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(Asking.apply(self.net(x)), y)

    (released,), _ = trained(tmp_path, Caught(), rows(5), callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


@pytest.mark.parametrize("collate", [None, lambda items: {k: torch.as_tensor(v)[None] for k, v in items[0].items()}])
def test_keys_that_are_equal_but_not_the_same_are_kept_apart(tmp_path, collate):
    class Keyed(Model):
        def training_step(self, batch, batch_idx):
            key = next(key for key in batch if key != "y")
            return F.cross_entropy(self.net(batch[key]) * (1 if key is True else -1), batch["y"])

    items = [{(1, True)[k > 0]: x, "y": y} for k, (x, y) in enumerate(rows(5))]
    loader = DataLoader(Items(items), batch_size=2, collate_fn=collate)
    (together,), _ = trained(tmp_path, Keyed(), loader, callback={"physical_batch": 5})
    (alone,), _ = trained(tmp_path, Keyed(), loader, callback={"physical_batch": 1})
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("trained_one", [False, True])
def test_an_exchanged_parameter_is_refused(tmp_path, trained_one):
    class Exchanging(Model):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.zeros(4).double(), requires_grad=False)

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            owner, name = (self.net[0], "bias") if trained_one else (self, "code")
            values = x.detach().mean().expand(5 if trained_one else 4).clone()
            torch.utils.swap_tensors(getattr(owner, name), nn.Parameter(values, requires_grad=trained_one))
            return F.cross_entropy(self.net(x), y)

    module = Exchanging()
    with pytest.raises((ConfigError, RuntimeError)):
        trained(tmp_path, module, rows(4), callback={"physical_batch": 1})
    assert (module.code == 0).all()


def test_one_failing_record_of_many_is_found_in_few_runs(tmp_path):
    class Counted(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            SCALES.append(1)
            return F.cross_entropy(self.net(x), y)

    records = [*rows(256), (torch.ones(4).double(), torch.tensor(77))]
    trained(tmp_path, Counted(), records, callback={"physical_batch": 300})
    SCALES.clear()
    (released,), _ = trained(tmp_path, Counted(), records, callback={"physical_batch": 300})
    assert len(SCALES) < 90, "of which 48 are those that see whether company matters"
    assert torch.allclose(released, sum_of_clipped(Model(), records[:-1]), atol=1e-5)


def test_an_odd_record_slows_no_other(tmp_path):
    """One that needs to be alone, first of all."""

    class Choosy(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            SCALES.append(1)
            try:
                L = torch.linalg.cholesky(torch.eye(4).double() * (1 - 2 * (x[:, :1, None] > 5)))
            except torch.linalg.LinAlgError:
                L = torch.eye(4).double()[None]
            return F.cross_entropy(self.net(x) + L.sum((1, 2))[:, None], y)

    records = [(torch.full((4,), 9.0).double(), torch.tensor(0)), *((x.clamp(max=1), y) for x, y in rows(64))]
    SCALES.clear()
    (released,), _ = trained(tmp_path, Choosy(), records, steps=1, callback={"physical_batch": 100})
    assert torch.allclose(released, sum_of_clipped(Choosy(), records), atol=1e-5) and len(SCALES) < 90 + 65


def test_records_that_cannot_be_stacked_are_said_to_be_slow(tmp_path):
    items = [(x, y, f"file {k}") for k, (x, y) in enumerate(rows(12))]

    class Named(Model):
        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return F.cross_entropy(self.net(x), y)

    plan = dpexp.make_plan(Named(), n=12, sampling="all", q=1.0, steps=1, noise_multiplier=1.0)
    run = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_epochs=-1,
        callbacks=[dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl")], enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="no two records of a batch look alike"):
        run.fit(Named(), DataLoader(Items(items), batch_size=2))


@pytest.mark.filterwarnings("ignore")
def test_a_leaf_that_cannot_show_itself_ends_no_training(tmp_path):
    class Shy:
        def __repr__(self):
            raise RuntimeError("secret of the record")

    class Holding(Model):
        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return F.cross_entropy(self.net(x), y)

    loader = DataLoader(Items(rows(4)), batch_size=2, collate_fn=lambda i: (i[0][0][None], i[0][1][None], Shy()))
    (released,), _ = trained(tmp_path, Holding(), loader)
    assert torch.allclose(released, sum_of_clipped(Model(), rows(4)), atol=1e-6)
