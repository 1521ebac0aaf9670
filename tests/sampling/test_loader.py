"""A record that cannot be delivered contributes nothing, and ends nothing; what a data set does reaches no step."""

import random
import warnings

import numpy as np
import pytest
import torch
from plans import plan_of
from test_isolation import Items, Model, S, rows, trained
from torch.utils.data import DataLoader, Dataset

from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.sampling.batches import FailedRecord, SingleCollation
from dpexp.privacy.sampling.loader import RoundLoader


class Speechless(Exception):
    def __str__(self):
        raise ValueError


class NoStack(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.stack:
            raise RuntimeError
        return super().__torch_function__(func, types, args, kwargs or {})


def raising(error):
    raise error


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self):
        return raising, (ValueError("secret of the record"),)


class Odd(Dataset):
    """The first record is odd."""

    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = rows(6)[index]
        if index:
            return x, y, 0
        if isinstance(self.what, type) and issubclass(self.what, BaseException):
            raise self.what
        return self.what(x, y)


ODD = {
    "exits": SystemExit, "ends a generator": GeneratorExit, "cannot say why": Speechless,
    "cannot be pickled": lambda x, y: (x, y, lambda: 0), "cannot be unpickled": lambda x, y: (x, y, Unreadable()),
    "cannot be stacked": lambda x, y: (x.as_subclass(NoStack), y, 0),
}  # fmt: skip


def first(items):
    return tuple(part[None] if isinstance(part, torch.Tensor) else part for part in items[0])


class Two(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "what, workers",
    [
        *((what, 0) for what in ODD if "pickled" not in what),  # of which only loader processes ask it
        *((what, 1) for what in ("exits", "cannot be pickled", "cannot be unpickled")),
    ],
)
def test_a_record_that_cannot_be_delivered_contributes_nothing(tmp_path, what, workers):
    options = {"batch_size": 2, "collate_fn": first}
    loader = DataLoader(Odd(ODD[what]), num_workers=workers, timeout=20 * workers, **options)
    (found,), _ = trained(tmp_path, Two(), loader)
    (others,), _ = trained(tmp_path, Two(), DataLoader(Items([(x, y, 0) for x, y in rows(6)[1:]]), **options))
    assert torch.allclose(found, others, atol=1e-6) and others.norm() > S / 10


def test_an_interrupt_is_of_no_record():
    with pytest.raises(KeyboardInterrupt):
        FailedRecord.because(KeyboardInterrupt())


def test_what_requires_gradients_arrives(tmp_path):
    items = [(x.clone().requires_grad_(k == 0), y, 0) for k, (x, y) in enumerate(rows(6))]
    found = [
        trained(tmp_path, Two(), DataLoader(Items(items), 2, collate_fn=first, num_workers=n, timeout=20 * n))[0][0]
        for n in (0, 1)
    ]
    assert torch.allclose(*found, atol=1e-6)
    assert all(not tensor.grad_fn for part in SingleCollation(first)(items) for tensor in part.batch[:2])


class Seeding(Dataset):
    """As for augmentations that are the same in each epoch."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        return rows(8)[index]


class Drawing(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        drawn = {"torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}[self.kind]
        return super().training_step((x, y), batch_idx) * drawn


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_seeds_of_a_data_set_reach_no_step(tmp_path, kind):
    found = []
    for _ in range(2):
        module = Drawing()
        module.kind = kind
        (released,), _ = trained(tmp_path, module, DataLoader(Seeding(), 2), callback={"max_physical_batch_size": 8})
        found.append(released)
    assert not torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("q, batch_size, said", [(0.5, 32, True), (0.4, 4, False), (0.5, 1, False)])
def test_a_loaders_batch_size_that_is_not_used_is_said_in_one_line(q, batch_size, said):
    plan = plan_of(torch.nn.Linear(2, 1), n=10, q=q, steps=1, noise_multiplier=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RoundLoader(DataLoader(rows(10), batch_size), plan, 8, KeyStream(), KeyStream())
    found = [str(one.message) for one in caught if "batch_size" in str(one.message)]
    assert len(found) == said and all("batch_size=32 is not used; a round's sample has about 5" in one for one in found)
