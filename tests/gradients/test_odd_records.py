"""Records that fail, that are not what they say, and what is random: each is its own alone, and trains as by hand."""

import contextlib
import functools
import os
import random
import signal
import threading
import time
import weakref
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jobs import FORKS
from plans import plan_of, trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException
from reference import engine_of, sums_of
from test_isolation import (
    CLASSES,
    Items,
    Model,
    assert_as_by_hand,
    loader_of,
    rows,
    stepping,
    sum_of_clipped,
    trained,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.privacy.gradients.per_example import undisturbed
from dpexp.privacy.noise.randomness import KeyStream, seed_everything
from dpexp.privacy.sampling.privacy_unit import Microbatch

pytestmark = pytest.mark.filterwarnings("ignore")

# Records that fail


class Speechless(ValueError):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class Leaving(SystemExit):
    __str__ = __repr__ = Speechless.__str__


class Missing(Items):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        if item is None:
            raise FileNotFoundError("no such image")
        return item


X, Y = rows(1, seed=5)[0]
ODD = {  # a record
    "other shape": (torch.ones(9).double(), 0), "no label": (X, None), "too large": (X, 2**70),
    "sparse": (X.to_sparse(), 0), "not there": None, "its loss is None": (X, 3), "its step fails": (X, 4),
    "its step ends the process": (X, 5),
}  # fmt: skip


@pytest.mark.parametrize("odd, place", [(odd, 5 * (k % 2)) for k, odd in enumerate(ODD)])
def test_one_bad_record_ends_no_training_wherever_it_stands(tmp_path, odd, place):
    def step(m, x, y):
        of_class = float(y.max())  # a question, so that records are processed one at a time
        if of_class in (4, 5):
            raise {4: Speechless, 5: Leaving}[of_class](3)
        return None if of_class == 3 else F.cross_entropy(m.net(x), y)

    good = [(x, int(y)) for x, y in rows(5)]
    loader = DataLoader(Missing([*good[:place], ODD[odd], *good[place:]]), batch_size=2)
    assert_as_by_hand(tmp_path, stepping(step), loader, rows(5), callback={"max_physical_batch_size": 8})


# Records that are not what they say


class Alike:
    """Says that it equals another of the same label."""

    def __init__(self, label, x):
        self.label, self.x = label, x

    def __eq__(self, other):
        return self.label == other.label

    def __hash__(self):
        return hash(self.label)


def key_of(batch):
    return next(key for key in batch if key != "y")


EQUAL = {  # records, their collation, and what the step makes of a batch: x, a sign, y
    "objects": (
        [Alike(int(y), x) for x, y in rows(6)],
        lambda items: {"item": items[0]},
        lambda b: (b["item"].x[None], 1, torch.tensor([b["item"].label])),
    ),
    "zero and minus zero": (
        [(x, y, 0.0 if k % 2 else -0.0) for k, (x, y) in enumerate(rows(6))],
        lambda items: (items[0][0][None], items[0][1][None], items[0][2]),
        lambda b: (b[0], float(np.copysign(1, b[2])), b[1]),
    ),
    "keys": (
        [{(1, True)[k > 0]: x, "y": y} for k, (x, y) in enumerate(rows(5))],
        None,
        lambda b: (b[key_of(b)], 1 if key_of(b) is True else -1, b["y"]),
    ),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_records_that_are_equal_but_not_the_same_are_kept_apart(tmp_path, kind):
    items, collate, read = EQUAL[kind]

    class Reading(Model):
        def training_step(self, batch, batch_idx):
            x, sign, y = read(batch)
            return F.cross_entropy(self.net(x) * sign, y)

    together, alone = (
        trained(
            tmp_path, Reading(), DataLoader(Items(items), batch_size=2, collate_fn=collate),
            callback={"max_physical_batch_size": physical},
        )[0][0]
        for physical in (6, 1)
    )  # fmt: skip
    assert torch.allclose(together, alone, atol=1e-6)
    same = torch.allclose(together, sum_of_clipped(Model(), rows(len(items))), atol=1e-3)
    assert same == (kind == "objects")


def test_a_leaf_whose_repr_fails_ends_no_training(tmp_path):
    class Shy:
        def __repr__(self):
            raise RuntimeError("secret of the record")

    loader = DataLoader(Items(rows(4)), batch_size=2, collate_fn=lambda i: (i[0][0][None], i[0][1][None], Shy()))
    assert_as_by_hand(tmp_path, stepping(lambda m, x, y, _: F.cross_entropy(m.net(x), y)), loader, rows(4))


# Modules and Trainers that are not as usual


def test_validation_before_the_fit_may_leave_tensors_behind(tmp_path):
    """Those of inference mode, of which PyTorch counts no changes."""

    class Remembering(Model):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.kept = self.net(batch[0])

    module = Remembering()
    trainer().validate(module, loader_of(rows(4)), verbose=False)
    assert module.kept.is_inference()
    assert_as_by_hand(tmp_path, module, rows(5), rows(5))


def test_a_step_that_was_set_on_the_module_is_there_again_afterwards(tmp_path):
    module = Model()
    module.training_step = step = functools.partial(Model.training_step, module)
    trained(tmp_path, module, rows(4))
    assert module.training_step is step


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has the other way only since 2.9")
def test_both_ways_to_set_precision_train_the_same(tmp_path):
    found = FORKS.Value("d", 0.0)
    process = FORKS.Process(target=trained_with_the_other_way_to_set_precision, args=(tmp_path, found))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and found.value == pytest.approx(norm_in_float32(tmp_path), rel=0.02)


def norm_in_float32(folder):
    (released,), _ = trained(folder, Model().float(), [(x.float(), y) for x, y in rows(6)])
    return float(released.norm())


def trained_with_the_other_way_to_set_precision(folder, found):
    """In a process of its own, which for PyTorch is set this way for good."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    found.value = norm_in_float32(folder)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


# Randomness


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_are_each_records_own(tmp_path, draw):
    drawn = {}

    def scaled(m, x, y):
        drawn[float(x[0, 0])] = scale = draw()
        return F.cross_entropy(scale * m.net(x), y)

    trained(tmp_path, stepping(scaled), rows(6), callback={"max_physical_batch_size": 6})
    assert len({drawn[float(x[0])] for x, _ in rows(6)}) == 6


def test_seeding_fills_the_whole_state_of_every_generator():
    def drawn(key):
        seed_everything(KeyStream(key))
        return torch.randint(2**16, (2000,)).tolist(), np.random.randint(2**31, size=700).tolist(), random.random()

    before = torch.get_rng_state(), np.random.get_state()
    try:
        words = KeyStream(b"k" * 32).words(2 * 624)[:624] & 0xFFFFFFFF
        state, independent = {"key": words.numpy().astype(np.uint32), "pos": 624}, np.random.MT19937()
        independent.state = {"bit_generator": "MT19937", "state": state}
        first, other = drawn(b"k" * 32), drawn(b"l" * 32)
        assert first[0] == (independent.random_raw(2000) & 0xFFFF).tolist()
        assert first == drawn(b"k" * 32) and all(a != b for a, b in zip(first, other, strict=True))
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])


class Augmented(Items):
    def __getitem__(self, index):
        x, y = self.items[index]
        return x * torch.rand(1).double(), y


@pytest.mark.parametrize("workers", [0, 1])
def test_a_public_seed_does_not_tell_what_was_augmented_or_dropped(tmp_path, workers):
    def released(noise_seed=None):
        pl.seed_everything(7, verbose=False)
        module = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, CLASSES)))
        loader = DataLoader(Augmented(rows(8)), batch_size=2, num_workers=workers)
        return trained(tmp_path, module, loader, callback={"noise_seed": noise_seed})[0][0]

    assert not torch.allclose(released(), released(), atol=1e-3)
    assert torch.equal(released(3), released(3))


def test_keys_are_nowhere_after_the_fit(tmp_path, monkeypatch):
    drawn, begin = [], KeyStream.__init__

    def noted(stream, key=None):
        begin(stream, key)
        drawn.append(weakref.ref(stream))

    monkeypatch.setattr(KeyStream, "__init__", noted)
    _, run = trained(tmp_path, Model(), rows(5), steps=2)
    assert run.global_step == 2 and len(drawn) >= 3
    assert [stream() for stream in drawn if stream() is not None] == []


def test_random_numbers_elsewhere_do_not_depend_on_records_of_another_shape(tmp_path):
    """A unit with fewer examples than others draws, and is first seen in the first round."""

    def loss_of(m, record):
        x, y = record
        return F.cross_entropy(m(F.dropout(x) if len(x) < 4 else x), y)

    def numbers(n):
        module, x = nn.Linear(3, 2), torch.randn(n, 3)
        plan = plan_of(
            module, sampling="full_batch", q=1.0, n=16, steps=2, noise_multiplier=1.0, privacy_unit=Microbatch(4)
        )
        private = dpexp.Private(module, torch.optim.SGD(module.parameters(), 0.1), plan, tmp_path / f"{n}.jsonl")
        torch.manual_seed(1)
        for sample in private.rounds(TensorDataset(x, torch.zeros(n, dtype=torch.long))):
            private.step(loss_of, sample)
            yield torch.rand(1).item()

    assert [*numbers(16)] == [*numbers(18)]


# Signals


class Counting(nn.Linear):
    """Has data on its class, and a step that a signal meets at its k-th call: it then sleeps for a minute."""

    seen: ClassVar = {"calls": 0}


def met_by(number, at, around=contextlib.nullcontext):
    calls = []

    def loss_of(m, x):
        calls.append(1)
        type(m).seen["calls"] += 1
        if len(calls) == at:
            with around():
                os.kill(os.getpid(), number)
                time.sleep(60)
            for _ in range(6000):  # where its exception was caught, it comes again
                time.sleep(0.01)
        loss = m(x).sum()
        return loss if loss > -1e9 or not float(x.sum()) else -loss  # a question: what is not traced runs alone

    return loss_of, calls


@contextlib.contextmanager
def handled_by(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


PHASES = [1, 2, 3]  # the first trace; and, of a step that cannot be traced, its synthetic records, and their test


@pytest.mark.parametrize(
    "number, around",
    [
        (signal.SIGTERM, contextlib.nullcontext),
        (signal.SIGINT, contextlib.nullcontext),
        (signal.SIGUSR1, lambda: contextlib.suppress(BaseException)),
    ],
)
@pytest.mark.parametrize("at", PHASES)
def test_a_signal_ends_a_dry_run_at_once_and_its_handler_finds_what_was_there(at, number, around):
    module, whole = Counting(4, 2), []
    held = {name: (t, t.clone()) for name, t in module.named_parameters()}

    def end(*_):
        whole.append(all(module.get_parameter(name) is t and torch.equal(t, was) for name, (t, was) in held.items()))
        modes = torch.overrides._len_torch_function_stack()
        whole.append(Counting.seen == {"calls": 0} and modes == 0 and torch.zeros(1).item() == 0)
        raise SystemExit(128 + number)

    engine, (loss_of, calls) = engine_of(module), met_by(number, at, around)
    began = time.monotonic()
    with handled_by(number, end), pytest.raises(SystemExit, match=str(128 + number)):
        sums_of(engine, loss_of, torch.randn(6, 4))
    assert time.monotonic() - began < 20 and len(calls) == at and whole == [True, True]
    assert engine.step.mode is None and not engine._sums, "the next round decides"
    assert not any("raise_again" in t.name for t in threading.enumerate())


@pytest.mark.parametrize("at", PHASES)
def test_a_dry_run_that_a_handler_interrupts_and_does_not_end_begins_again(at, tmp_path):
    """The handler saves a checkpoint."""
    module, x, got = Counting(4, 2), torch.randn(6, 4), []

    def save(*_):
        got.append(Counting.seen["calls"])
        torch.save(module.state_dict(), tmp_path / "saved.pt")

    with handled_by(signal.SIGTERM, save):
        found = sums_of(engine_of(module), met_by(signal.SIGTERM, at)[0], x)
    expected = sums_of(engine_of(module), met_by(signal.SIGTERM, None)[0], x)
    assert got == [0] and all(torch.equal(found[name], total) for name, total in expected.items())
    assert torch.equal(torch.load(tmp_path / "saved.pt")["weight"], module.weight)


def test_an_exception_of_a_signal_waits_until_a_context_is_left():
    """What a context manager undoes is undone wholly: the exception comes again, half a second later."""
    undone = []

    @contextlib.contextmanager
    def slow():
        yield
        os.kill(os.getpid(), signal.SIGTERM)
        undone.append(1)

    def run():
        with slow():
            pass
        time.sleep(60)

    def end(*_):
        raise SystemExit(143)

    with handled_by(signal.SIGTERM, end), pytest.raises(SystemExit):
        undisturbed(run)
    assert undone == [1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_a_step_is_handled_after_it(tmp_path, number):
    """Lightning has a handler of SIGTERM."""
    runs = []

    def step(m, x, y):
        if float(x.sum()) > -1e9 and m.trainer.global_step == 2:  # a question, so that it runs in each round
            os.kill(os.getpid(), number)
        return F.cross_entropy(m.net(x), y)

    class Handling(pl.Callback):
        def on_train_start(self, trainer, module):
            runs.append(trainer)
            if number == signal.SIGUSR1:
                signal.signal(number, lambda *_: setattr(trainer, "should_stop", True))

    is_ended = pytest.raises(SIGTERMException) if number == signal.SIGTERM else contextlib.nullcontext()
    with handled_by(number, signal.getsignal(number)), is_ended:
        trained(tmp_path, stepping(step), rows(4), steps=9, callbacks=[Handling()])
    assert number == signal.SIGTERM or runs[0].global_step == 3
    assert len(read_ledger(tmp_path / "0.jsonl")) <= 4
