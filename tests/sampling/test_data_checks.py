"""Data sets and collate_fns that keep state are refused before the first round; honest ones train."""

import os
import random
import weakref
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_isolation import Items, Model, padded, rows, sequences, sum_of_clipped, trained
from test_loader import Seeding
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from dpexp.errors import ConfigError
from dpexp.privacy.sampling.data_state import StateTest, refuse_state
from dpexp.privacy.sampling.privacy_unit import Microbatch

pytestmark = pytest.mark.filterwarnings("ignore")
WAY_OUT = "draw random numbers from torch's, NumPy's or Python's global generator; keep no state between records"


class Kept(Dataset):
    """Each record as `change` gives it, which is given the data set to keep things in."""

    def __init__(self, change, items=None):
        self.items, self.change = items or rows(6), change
        self.count, self.mean, self.kept = 0, torch.zeros(4).double(), {}
        self.own, self.buffer = torch.Generator().manual_seed(0), np.zeros(4)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        x, y = self.items[index]
        self.count += 1
        return self.change(self, index, x), y


def running_mean(data, index, x):
    data.mean = data.mean + 1e-9 * (x - data.mean)
    return x - data.mean


def one_buffer(data, index, x):
    data.buffer[:] = x.numpy()
    return data.buffer


def counter(data, index, x):
    return x * (1 + data.count % 3)


def scaled_by_the_first(data, index, x):
    return x / data.kept.setdefault("first", x.norm())


STATEFUL = [
    running_mean, counter, one_buffer, scaled_by_the_first,
    lambda data, index, x: data.items[torch.randperm(6, generator=data.own)[index]][0],  # shuffled
    lambda data, index, x: x if data.count < 10 else x * data.count,  # from the tenth on
]  # fmt: skip


def refusal_of(loader, units=None):
    """The sentence that refuses a loader's data; None: it passes."""
    try:
        return refuse_state(loader, units)
    except ConfigError as refused:
        return str(refused)


def assert_refused(loader, who, units=None):
    said = refusal_of(loader, units)
    assert said.startswith(f"data: {who} gave a record another value after other records were fetched, so")
    assert said.endswith(f"{WAY_OUT}.")


@pytest.mark.parametrize(
    "data, named, workers",
    [
        *((Kept(change), "Kept", 0) for change in STATEFUL), (Kept(running_mean), "Kept", 2),
        (Kept(scaled_by_the_first), "Kept", 2), (Subset(Subset(Kept(counter), range(5)), range(4)), "Kept", 0),
        (ConcatDataset([Kept(scaled_by_the_first), Kept(scaled_by_the_first)]), "ConcatDataset", 0),
    ],
)  # fmt: skip
def test_a_data_set_with_state_is_refused(data, named, workers):
    assert_refused(DataLoader(data, 2, num_workers=workers), f"the data set {named}")


def test_state_is_refused_before_the_ledger_is_opened(tmp_path):
    with pytest.raises(ConfigError, match="data set Kept"):
        trained(tmp_path, Model(), DataLoader(Kept(counter), 2), steps=3)
    assert not list(tmp_path.glob("*.jsonl"))


SEEN = []


def by_all_seen(items):
    SEEN.append(1)
    x, y = default_collate(items)
    return x * len(SEEN), y


class Normalise:
    def __init__(self):
        self.last = torch.ones(())

    def __call__(self, items):
        x, y = default_collate(items)
        last, self.last = self.last, x.norm()
        return x / last, y


@pytest.mark.parametrize("collate, name, workers", [(by_all_seen, "by_all_seen", 0), (Normalise(), "Normalise", 2)])
def test_a_collate_fn_with_state_is_refused(collate, name, workers):
    assert_refused(DataLoader(Items(rows(6)), 2, collate_fn=collate, num_workers=workers), f"the collate_fn {name}")


def test_a_data_set_with_state_is_refused_for_records_of_several_examples():
    data = Kept(running_mean)
    assert_refused(DataLoader(data), "the data set Kept", Microbatch(2).units(data))


# Honest ones


def cached(data, index, x):
    return data.kept.setdefault(index, x * 2)


def augmented(data, index, x):
    return x + torch.rand(4) * (-1 if random.random() < 0.5 else np.random.rand())


def seeded_from_torch(data, index, x):
    return x.numpy() + np.random.default_rng(int(torch.randint(2**31, ()))).random(4)


def fails_at_times(data, index, x):
    if index == 0 and data.count % 2:
        raise OSError
    return x


def jittered(items):
    x, y = default_collate(items)
    return x + torch.randn_like(x) * np.random.rand(), y


def first(items):
    return {**items[0], "x": items[0]["x"][None]}


class Odd:
    """Equal to none other, not even to itself."""

    __eq__ = __hash__ = None


ODD_ITEMS = [
    {"x": x, "none": None, "set": {"a", str(y)}, ("a", 1): [np.float32(2), 3, -0.0], "odd": Odd(), "raw": x.numpy()}
    for x, y in rows(6)
]
HONEST = {
    "a cache": (Kept(cached), None),
    "random augmentation": (Kept(augmented), None),
    "a generator seeded by torch's": (Kept(seeded_from_torch), None),
    "NaN": (Kept(lambda data, index, x: torch.where(x > 0, x, torch.nan)), None),
    "an error at times": (Kept(fails_at_times), None),
    "seeds": (Seeding(), None),
    "padding": (Items(sequences(6)), padded),
    "a random collate_fn": (Items(rows(6)), jittered),
    "half of a data set": (Subset(Kept(cached), range(3)), None),
    "values of every kind": (Items(ODD_ITEMS), first),
}


@pytest.mark.parametrize("what, workers", [*((what, 0) for what in HONEST), ("random augmentation", 2)])
def test_honest_data_pass(what, workers):
    data, collate = HONEST[what]
    assert refusal_of(DataLoader(data, 2, collate_fn=collate, num_workers=workers)) is None


@pytest.mark.parametrize(
    "before, after",
    [
        (1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ([1], (1,)), ({"a": 1}, {"b": 1}), (None, 0), (1, [1]),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)), (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.zeros(2, dtype=np.float32)), (np.zeros((2, 1)), np.zeros((1, 2))),
        (torch.ones(9), torch.ones(9) + 2**-23), (torch.tensor(1 + 1j), torch.tensor(1 + 1j).conj()),
    ],
)  # fmt: skip
def test_values_that_differ_in_anything_differ(before, after):
    class Two(Dataset):
        def __init__(self, *values):
            self.values = iter(values)

        def __getitem__(self, index):
            return next(self.values)

    for values, found in (((before, before, after), ["the data set Two"]), ((before, before, before), [])):
        assert StateTest(Two(*values), list, None).__getitems__([(0, b"0" * 32)]) == found


class File:
    """As lmdb's: it may be used only by the process that opened it, in which it may be open once."""

    live: ClassVar = weakref.WeakSet()

    def __init__(self, path):
        self.opened, self.content = (path, os.getpid()), np.load(path, mmap_mode="r")
        assert all(file.opened != self.opened for file in self.live), "it is already open"
        self.live.add(self)

    def __getitem__(self, index):
        assert self.opened[1] == os.getpid(), "it is of another process"
        return torch.tensor(self.content[index])


class Opened(Dataset):
    """Opens its file with the first record."""

    file = None

    def __init__(self, folder):
        self.path, self.log = folder / "x.npy", folder / "opened"
        np.save(self.path, np.stack([x.numpy() for x, _ in rows(6)]))

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.file is None:
            self.file = File(self.path)
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        return self.file[index], rows(6)[index][1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_is_opened_once_by_each_loader_process(tmp_path, workers):
    data = Opened(tmp_path)
    loader = DataLoader(ConcatDataset([data]), 2, num_workers=workers)
    released, _ = trained(tmp_path, Model(), loader, steps=3, callback={"max_physical_batch_size": 3})
    expected = sum_of_clipped(Model(), rows(6))
    assert len(released) == 3 and all(torch.allclose(found, expected, atol=1e-6) for found in released)
    opened = Counter(map(int, data.log.read_text().split()))
    of_this = opened.pop(os.getpid())
    if workers:  # two are tested, and two begin in each epoch, which is a round
        assert data.file is None and sorted(opened.values()) == [1] * 6 + [2] * 2
    else:
        assert of_this == 2 and not opened, "by the copy that is tested, and for good"
