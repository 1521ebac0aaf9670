"""Records that fail, that are not what they say, and what is random: each is its own alone."""

import os
import random
import signal
import warnings
import weakref

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from test_isolation import CLASSES, Items, Model, S, rows, sum_of_clipped, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream, seed_everything

# Records that fail


class Speechless(ValueError):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class Leaving(SystemExit):
    __str__ = __repr__ = Speechless.__str__


@pytest.mark.parametrize("error", [Speechless, Leaving])
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
    (released,), _ = trained(tmp_path, Decomposing(), records, callback={"max_physical_batch_size": physical})
    assert torch.allclose(released, sum_of_clipped(Decomposing(), records), atol=1e-6)


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

    with pytest.raises(ConfigError, match="fails for every synthetic record"):
        trained(tmp_path, Failing(), rows(5), steps=3)
    assert len(read_ledger(tmp_path / "0.jsonl")) == 0, "nothing was spent"


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("no backward pass")


def test_none_is_the_loss_of_a_record_that_contributes_nothing(tmp_path):
    class Choosy(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return None if float(x.sum()) > 0 else F.cross_entropy(self.net(x), y)

    chosen = [(x, y) for x, y in rows(8) if float(x.sum()) <= 0]
    assert 0 < len(chosen) < 8
    (released,), _ = trained(tmp_path, Choosy(), rows(8))
    assert torch.allclose(released, sum_of_clipped(Model(), chosen), atol=1e-6)


@pytest.mark.parametrize(
    "bad, place", [("other shape", 0), ("no label", 5), ("too large", 0), ("sparse", 5), ("not there", 0)]
)
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
        "no label": (x, None),
        "too large": (x, 2**70),
        "sparse": (x.to_sparse(), y),
        "not there": None,
    }[bad]
    records = [*good[:place], item, *good[place:]]
    loader = DataLoader(Missing(records), batch_size=2)
    (released,), _ = trained(tmp_path, Sized(), loader, callback={"max_physical_batch_size": 8})
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


def test_data_of_which_no_record_can_be_fetched_ends_the_training(tmp_path):
    class Missing(Items):
        def __getitem__(self, index):
            raise FileNotFoundError("no such image")

    with pytest.raises(ConfigError, match=r"none of the records .* can be fetched: FileNotFoundError: no such image"):
        trained(tmp_path, Model(), DataLoader(Missing(rows(5)), batch_size=2))
    assert len(read_ledger(tmp_path / "0.jsonl")) == 0


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


def stacked_dict(items):
    return {key: torch.as_tensor(value)[None] for key, value in items[0].items()}


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
    "keys, collated": (
        [{(1, True)[k > 0]: x, "y": y} for k, (x, y) in enumerate(rows(5))],
        stacked_dict,
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


@pytest.mark.filterwarnings("ignore")
def test_a_leaf_whose_repr_fails_ends_no_training(tmp_path):
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


# Randomness


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_are_each_records_own(tmp_path, draw):
    drawn = {}

    class Scaled(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            drawn[float(x[0, 0])] = scale = draw()
            return F.cross_entropy(scale * self.net(x), y)

    trained(tmp_path, Scaled(), rows(6), callback={"max_physical_batch_size": 6})
    assert len({drawn[float(x[0])] for x, _ in rows(6)}) == 6


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


# Signals


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_a_step_is_handled_after_it(tmp_path, number):
    class Signalled(Model):
        def training_step(self, batch, batch_idx):
            x, _ = batch
            if float(x.sum()) > -1e9 and self.trainer.global_step == 2:  # a question, so that it runs in each round
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
