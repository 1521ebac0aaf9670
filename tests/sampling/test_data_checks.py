"""Data sets and collate_fns that keep state are found before the first round, or in the round; honest ones train."""

import functools
import random
import time

import numpy as np
import pytest
import torch
from plans import plan_of, trainer
from test_isolation import Items, Model, padded, rows, sequences, sum_of_clipped, trained
from test_loader import Seeding
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.sampling import fetching, loader
from dpexp.privacy.sampling.fetching import Checked, CheckSchedule, RecordFetcher, Request, StateFound
from dpexp.privacy.sampling.privacy_unit import Microbatch

pytestmark = pytest.mark.filterwarnings("ignore")
WAY_OUT = "draw random numbers from torch's, NumPy's or Python's global generator; keep no state between records"


class Kept(Dataset):
    """Each record as `change` gives it, which is given the data set to keep things in."""

    def __init__(self, change, items=None):
        self.items, self.change = items or rows(6), change
        self.count, self.mean, self.last, self.kept = 0, torch.zeros(4).double(), None, {}
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


def counter(data, index, x):
    return x * (1 + data.count % 3)


def shuffled(data, index, x):
    return data.items[torch.randperm(6, generator=data.own)[index]][0]


def own_flip(data, index, x):
    return -x if torch.rand((), generator=data.own) < 0.5 else x


def last_item(data, index, x):
    scale, data.last = 1.0 if data.last is None else data.last, x.norm()
    return x / scale


def iterator(data, index, x):
    data.own = data.own if hasattr(data.own, "__next__") else iter(range(10**6))
    return x + next(data.own)


def from_the_tenth_on(data, index, x):
    return x if data.count < 10 else x * data.count


def one_buffer(data, index, x):
    data.buffer[:] = x.numpy()
    return data.buffer


STATEFUL = [running_mean, counter, shuffled, own_flip, last_item, iterator, from_the_tenth_on, one_buffer]


def assert_refused(tmp_path, loader, who):
    with pytest.raises(StateFound) as raised:
        trained(tmp_path, Model(), loader, steps=3)
    said = str(raised.value)
    assert said.startswith(f"data: {who} gave a record another value after other records were fetched, so")
    assert said.endswith(f"{WAY_OUT}.") and raised.value.last_clean_round == 0
    assert not list(tmp_path.glob("*.jsonl")), "before the ledger is opened"


@pytest.mark.parametrize(
    "change, workers", [*((change, 0) for change in STATEFUL), (running_mean, 2)]
)  # fmt: skip
def test_a_data_set_with_state_is_refused(tmp_path, change, workers):
    assert_refused(tmp_path, DataLoader(Kept(change), 2, num_workers=workers), "the data set Kept")


def test_the_innermost_data_set_is_named(tmp_path):
    assert_refused(tmp_path, DataLoader(Subset(Subset(Kept(counter), range(5)), range(4)), 2), "the data set Kept")


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
def test_a_collate_fn_with_state_is_refused(tmp_path, collate, name, workers):
    loader = DataLoader(Items(rows(6)), 2, collate_fn=collate, num_workers=workers)
    assert_refused(tmp_path, loader, f"the collate_fn {name}")


def test_records_of_several_examples_are_checked():
    plan = plan_of(
        Model(), n=6, sampling="full_batch", q=1.0, steps=2, noise_multiplier=1.0, privacy_unit=Microbatch(2)
    )

    def rounds(change):
        return loader.RoundLoader(DataLoader(Kept(change)), plan, 4, KeyStream(), KeyStream())

    with pytest.raises(StateFound, match="data set Kept"):
        rounds(running_mean)
    loaded = rounds(lambda data, index, x: x)
    for _ in loaded:
        parts = [part for _, parts in loaded.sample(torch.device("cpu")) for part in parts]
        assert sum(part.size for part in parts) == 3 and all(part.batch[0].shape[1:] == (2, 4) for part in parts)
        loaded.sampler.completed += 1


# Honest ones


def cached(data, index, x):
    return data.kept.setdefault(index, x * 2)


def augmented(data, index, x):
    return x + torch.rand(4) * (-1 if random.random() < 0.5 else np.random.rand())


def seeded_from_torch(data, index, x):
    return x.numpy() + np.random.default_rng(int(torch.randint(2**31, ()))).random(4)


def lazily_opened(data, index, x):
    if "file" not in data.kept:
        data.kept["file"] = open(__file__, "rb")  # noqa: SIM115
    data.kept["file"].seek(index)
    return x + data.kept["file"].read(1)[0]


def not_a_number(data, index, x):
    return torch.where(x > 0, x, torch.nan)


def fails_at_times(data, index, x):
    if index == 0 and data.count % 2:
        raise OSError
    return x


def jittered(items):
    x, y = default_collate(items)
    return x + torch.randn_like(x) * np.random.rand(), y


HONEST = {
    "a cache": (Kept(cached), None),
    "random augmentation": (Kept(augmented), None),
    "a generator seeded by torch's": (Kept(seeded_from_torch), None),
    "a file that is opened lazily": (Kept(lazily_opened), None),
    "NaN": (Kept(not_a_number), None),
    "an error at times": (Kept(fails_at_times), None),
    "seeds": (Seeding(), None),
    "padding": (Items(sequences(6)), padded),
    "a random collate_fn": (Items(rows(6)), jittered),
    "half of a data set": (Subset(Kept(cached), range(3)), None),
}


@pytest.mark.parametrize("what, workers", [*((what, 0) for what in HONEST), ("random augmentation", 2)])
def test_honest_data_train(tmp_path, what, workers):
    data, collate = HONEST[what]
    module = Model(torch.nn.Sequential(torch.nn.Linear(4, 3), Mean())) if "padding" in what else Model()
    trained(tmp_path, module, DataLoader(data, 2, collate_fn=collate, num_workers=workers), steps=3)
    assert len(read_ledger(tmp_path / "0.jsonl")) == 3


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(1)


class Odd:
    """Equal to none other, not even to itself."""

    __eq__ = __hash__ = None


class Described(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_of_every_kind_train(tmp_path, workers):
    items = [
        {"x": x, "y": y, "name": f"record {k}", "none": None, "set": {"a", str(k)}, ("a", 1): [np.float32(k), k, -0.0],
         "odd": Odd() if workers == 0 else k, "all": {"raw": x.numpy(), "text": b"b"}}
        for k, (x, y) in enumerate(rows(6))
    ]  # fmt: skip

    loader = DataLoader(Items(items), 2, collate_fn=first, num_workers=workers)
    released, _ = trained(tmp_path, Described(), loader, steps=2)
    assert len(released) == 2 and torch.allclose(released[0], sum_of_clipped(Model(), rows(6)), atol=1e-6)


def first(items):
    return {**items[0], "x": items[0]["x"][None], "y": items[0]["y"][None]}


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

    for values, name in (((before, after), "the data set Two"), ((before, before), None)):
        (found,) = RecordFetcher(Two(*values), list, None).__getitems__(Request([], [0], b"0" * 32, 0))
        assert found == Checked(name)


def test_nothing_is_checked_where_nothing_of_the_user_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "RecordFetcher", None)
    x, y = map(torch.stack, zip(*rows(6), strict=True))
    trained(tmp_path, Model(), DataLoader(TensorDataset(x, y), 2))
    with pytest.raises(TypeError):
        trained(tmp_path, Model(), DataLoader(TensorDataset(x, y), 2, collate_fn=jittered))


# In the rounds


def late(data, index, x, after=150):
    return x if data.count < after else x + data.count


def rarely(data, index, x):
    data.last = (data.last or 0) + (index == 7)
    return x + data.last


@pytest.mark.parametrize("workers", [0, 2])
def test_state_that_shows_late_stops_the_round(tmp_path, workers):
    """50 records are fetched in a round, and 2 for the check; before, 16 in the dry run. Two loader
    processes take half of it each, and begin again in each epoch, which is a round."""
    data = Kept(functools.partial(late, after=20 if workers else 150), rows(50))
    loader = DataLoader(data, 2, num_workers=workers)
    with pytest.raises(StateFound, match=rf"Kept gave .* \(round {1 if workers else 3}\), so") as raised:
        trained(tmp_path, Model(), loader, steps=5, callback={"max_physical_batch_size": 25 if workers else 50})
    assert raised.value.last_clean_round == len(read_ledger(tmp_path / "0.jsonl")) == (0 if workers else 2)


def test_state_that_shows_late_stops_the_round_in_chunks_of_one_record_too(tmp_path):
    """10 records are fetched in a round, one before, and that one after each; before, 16 in the dry run."""
    data = Kept(functools.partial(late, after=16 + 21 + 21 + 12), rows(10))
    with pytest.raises(StateFound, match=r"Kept gave .* \(round 3\), so") as raised:
        trained(tmp_path, Model(), DataLoader(data, 2), steps=5, callback={"max_physical_batch_size": 1})
    assert raised.value.last_clean_round == len(read_ledger(tmp_path / "0.jsonl")) == 2


def test_state_that_few_records_leave_is_found(tmp_path, monkeypatch):
    """One of 300, which is in every fourth sample: with this seed, not in the first."""
    monkeypatch.setattr(fetching, "_CHECKED_BEFORE", 0)
    module = Model()
    plan = plan_of(module, n=300, q=0.25, steps=50, noise_multiplier=1.0)
    callback = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl", noise_seed=3)
    with pytest.raises(StateFound, match="Kept") as raised:
        trainer(callback).fit(module, DataLoader(Kept(rarely, rows(300)), 2))
    assert 1 <= raised.value.last_clean_round == callback.rounds_done == len(read_ledger(tmp_path / "l.jsonl")) < 8


def test_preparations_see_no_state_either():
    data = Kept(late, rows(300))
    with pytest.raises(StateFound, match="Kept"):
        list(fetching.all_records(DataLoader(data, 2), 50, KeyStream()))


def test_checks_change_nothing_that_is_released(tmp_path, monkeypatch):
    def released():
        loader = DataLoader(Kept(augmented), 2)
        return torch.stack(trained(tmp_path, Model(), loader, steps=3, callback={"noise_seed": 1})[0])

    checked = released()
    monkeypatch.setattr(fetching, "_CHECKED_ROUNDS", 0)
    monkeypatch.setattr(fetching, "_CHECK_TIME", -1.0)
    monkeypatch.setattr(fetching, "_CHECKED_BEFORE", 0)
    assert torch.equal(checked, released()) and not torch.equal(checked[0], checked[1])


def test_which_records_are_checked():
    chunks = [list(range(k % 4)) for k in range(100)]
    stream = KeyStream.known(0, "checks", 0)
    requests = [*CheckSchedule(chunks, lambda: int(stream.words(1)) % 10, stream, 2)]
    assert [request.records for request in requests] == chunks
    assert [len(request.checked) for request in requests] == [min(1, len(chunk)) for chunk in chunks]
    assert [request.round for request in requests] == [k // 2 if k < 16 else None for k in range(100)]
    assert len({request.key for request in requests}) == 100
    assert {i for request in requests for i in request.checked} == set(range(10))
    (request, _) = CheckSchedule(None, lambda: 0, stream, 2)
    assert request.records == [] and len(request.checked) == 8 and request.round == 0


def test_later_checks_take_a_fiftieth_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Items):
        def __getitem__(self, index):
            now[0] += 1
            return self.items[index]

    data = RecordFetcher(Slow(rows(6)), default_collate, None)
    checks = sum(
        isinstance(data.__getitems__(Request([0] * 20, [1], b"0" * 32, None))[-1], Checked) for _ in range(1000)
    )
    assert checks == pytest.approx(0.02 * (20 * 1000 + 2 * checks) / 2, abs=2)


LARGEST = {"value": 1.0}


def test_a_data_set_that_sets_what_the_step_reads_is_refused(tmp_path):
    """A global variable here: the graph would hold what another record has set."""

    class Scaled(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * LARGEST["value"]

    def largest(data, index, x):
        LARGEST["value"] += float(x.abs().max())  # another one at each fetch, whichever record comes twice
        return x

    with pytest.raises(StateFound, match="fetching a record changes LARGEST, which training_step reads"):
        trained(tmp_path, Scaled(), DataLoader(Kept(largest), batch_size=2), steps=3)
    assert not (tmp_path / "0.jsonl").exists() or len(read_ledger(tmp_path / "0.jsonl")) == 0
