"""Fetches records of the user's data set, collates each by itself, and checks that none depends on earlier records.

A data set or `collate_fn` with state (a running mean, a counter, an iterator, its own random generator) lets one record
change another, which (ε, δ) does not cover. So a few records are fetched and collated twice from equal states of the
global random generators, with other records in between, in the same process, and compared bit for bit: before the first
round, and in the rounds. The records that are compared are not trained on.
"""

import copy
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.dataloader import default_collate

from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream, own_randomness, seed_everything
from dpexp.privacy.sampling.batches import FailedRecord, PackedBatch, RecordBatch, SingleCollation, flattened
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.privacy.state_checks import StateFound, bits_of

_CHECKED_BEFORE = 8  # records that are checked before the first round
_CHECKED_ROUNDS = 8  # first rounds, in each of which a record is checked after every chunk
_CHECK_TIME = 0.02  # share of the time that later checks may take

_STATE = (
    "data: {what} gave a record another value after other records were fetched{round}, so that records would change "
    "one another; draw random numbers from torch's, NumPy's or Python's global generator; keep no state between "
    "records."
)
CHANGES_STEP = (
    "data: fetching a record changes {name}, which training_step reads, so that records would change one another; let "
    "data sets and collate_fn leave the module and its variables alone."
)


class _Rows(Dataset):
    """A TensorDataset, whose rows are fetched and collated at once, since none can change another."""

    def __init__(self, dataset: TensorDataset, units: Units | None) -> None:
        self._tensors, self._units = dataset.tensors, units

    def __getitems__(self, drawn: list[Any]) -> list[RecordBatch]:
        if self._units is None:
            if not drawn:
                return []
            rows = torch.tensor(drawn)
            return [RecordBatch(len(drawn), [tensor.index_select(0, rows).unsqueeze(1) for tensor in self._tensors])]
        by_size: dict[int, list[list[int]]] = {}
        for positions in drawn:
            by_size.setdefault(len(positions), []).append(positions)
        return [
            RecordBatch(len(some), [tensor[torch.tensor(some)] for tensor in self._tensors])
            for some in by_size.values()
        ]


class Seeding:
    """A worker_init_fn that seeds each loader process from a secret key, and then calls the user's."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._users = worker_init_fn
        self.key = b""  # of the processes that are started next

    def __call__(self, worker: int) -> None:
        seed_everything(KeyStream(hashlib.sha256(self.key + worker.to_bytes(8, "big")).digest()))
        if self._users is not None:
            self._users(worker)


def all_records(loader: Any, max_records: int, randomness: KeyStream) -> Iterator[RecordBatch | FailedRecord]:
    """Every record of the user's loader once, fetched in chunks of `max_records` and collated by itself.

    The generators are seeded again after each chunk, so that nothing depends on what the data set does to them.

    Raises:
        ConfigError: the loader's records cannot be sampled, or the data set or collate_fn has state.
    """
    dataset = sampled_dataset(loader)
    seeding = Seeding(loader.worker_init_fn)
    seeding.key = randomness.words(4).numpy().tobytes()
    order = BatchSampler(SequentialSampler(dataset), max_records, drop_last=False)  # type: ignore[arg-type]
    checks = CheckResults()
    for chunk in fetching_loader(loader, order, seeding, randomness):
        records = unpacked(checks.remove(chunk))
        seed_everything(randomness)
        yield from records


def fetching_loader(
    loader: Any, order: Sampler[list[Any]] | None, seeding: Seeding, stream: KeyStream, units: Units | None = None
) -> DataLoader:
    """A loader of the user's records in chunks: lists of `RecordBatch | FailedRecord | PackedBatch | Checked`.

    Args:
        order: the chunks' records; None: a dry run, which only checks records.
        stream: chooses the records that are checked.
    """
    dataset: Any = sampled_dataset(loader)
    chunks: Any = [] if order is None else order
    if only_rows(loader):
        dataset = _Rows(dataset, units)
    else:
        size = len(dataset if units is None else units)
        dataset = RecordFetcher(dataset, loader.collate_fn, units)
        chunks = CheckSchedule(order, lambda: draw_record(size, units, stream), stream, max(1, loader.num_workers))
    return DataLoader(
        dataset,
        batch_sampler=chunks,
        collate_fn=_unchanged,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=seeding,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _unchanged(records: list[Any]) -> list[Any]:
    return records


def only_rows(loader: Any) -> bool:
    """Whether records are rows of tensors, so that none of the user's code runs to fetch and collate them."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def draw_record(size: int, units: Units | None, stream: KeyStream) -> Any:
    """What a random record of `size` contributes to a round: its index, or what `units` draws for it."""
    i = int(stream.words(1)) % size
    return i if units is None else units.draw(i, stream)


def fetch_one(loader: Any, units: Units | None, drawn: Any) -> list[Any]:
    """One record, fetched in this process."""
    dataset: Any = sampled_dataset(loader)
    if only_rows(loader):
        return _Rows(dataset, units).__getitems__([drawn])
    return RecordFetcher(dataset, loader.collate_fn, units).__getitems__(Request([drawn], [], b"", None))


def unpacked(records: list[RecordBatch | FailedRecord | PackedBatch]) -> list[RecordBatch | FailedRecord]:
    return [part.unpack() if isinstance(part, PackedBatch) else part for part in records]


def sampled_dataset(loader: Any) -> Dataset:
    """The data set of a DataLoader; a ConfigError if the loader chooses records by itself."""
    streamed = loader if isinstance(loader, IterableDataset) else getattr(loader, "dataset", None)
    if isinstance(streamed, IterableDataset):
        raise ConfigError(
            f"data: {type(streamed).__name__} streams its records in an order of its own, which no accountant covers: "
            "samples are drawn at random. Give a data set with __getitem__ and __len__, such as memory-mapped Arrow "
            "(datasets.load_from_disk), a numpy.memmap or an index of the files."
        )
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"data: the training loader is a {type(loader).__name__}; sampling needs one DataLoader over "
            "a data set that can be indexed."
        )
    batches = loader.batch_sampler
    order: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    of_all = type(order) in (SequentialSampler, RandomSampler) and order.data_source is loader.dataset
    if not of_all or type(batches) not in (BatchSampler, type(None)):
        kind = "sampler" if batches is None or order is loader.sampler else "batch_sampler"
        own = batches if kind == "batch_sampler" and type(batches) is not BatchSampler else order
        raise ConfigError(
            f"data: the training loader has a {kind} of its own ({type(own).__name__}), which the plan's would "
            "replace; choose records with torch.utils.data.Subset instead."
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "data: the training loader has batch_size=None, so its data set gives whole batches; sampling draws "
            "single records, so give it a batch_size and let the data set give one record for an index."
        )
    return loader.dataset


@dataclass
class Request:
    """A chunk's records.

    Attributes:
        records: what is drawn of each.
        checked: records to fetch before these and again afterwards; key: of the random numbers of their fetching.
        round: one of this job's first rounds, in which the records checked before its first chunk are fetched again
            after each chunk, without a limit of time; None: a later round.
    """

    records: list[Any]
    checked: list[Any]
    key: bytes
    round: int | None


@dataclass
class Checked:
    """The last part of a chunk in which records were checked. `changed_by`: what gave one another value, if any did."""

    changed_by: str | None


class CheckSchedule(Sampler[Request]):
    """Asks for a check in every chunk that has records.

    Args:
        chunks: a RoundSampler; other iterables count one round for each loader process; None: a dry run, one chunk
            without records for each process.
        draw: a random record.
        stream: of the keys of the checked records' random numbers.
        workers: the number of processes, which take chunks in turn.
    """

    def __init__(self, chunks: Any, draw: Callable[[], Any], stream: KeyStream, workers: int) -> None:
        self._chunks, self._draw, self._stream, self._workers = chunks, draw, stream, workers
        self._first: int | None = None

    def __iter__(self) -> Iterator[Request]:
        pending = getattr(self._chunks, "pending", None)
        for k, chunk in enumerate([[]] * self._workers if self._chunks is None else self._chunks):
            count = _CHECKED_BEFORE if self._chunks is None else min(1, len(chunk))
            key = self._stream.words(4).numpy().tobytes()
            t = k // self._workers if pending is None else self._chunks.pending[-1].round
            self._first = t if self._first is None else self._first
            always = t < self._first + _CHECKED_ROUNDS
            yield Request(chunk, [self._draw() for _ in range(count)], key, t if always else None)


class RecordFetcher(Dataset):
    """Fetches and collates each record of a chunk by itself, and checks records.

    The data set's own `__getitems__`, which gets several records at once, is not called.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], units: Units | None) -> None:
        self._dataset, self._collate, self._units = dataset, collate, units
        self._collate_each = SingleCollation(collate if units is None else self._collate_unit)
        self._began: float | None = None
        self._checking = 0.0  # seconds
        self._before: tuple[int | None, list[tuple[Any, bytes, Any]]] = None, []  # a round, and its first snapshots

    def __getitems__(self, request: Request) -> list[Any]:
        began = time.perf_counter()
        self._began = self._began or began
        if request.round is None:
            checking = self._checking <= _CHECK_TIME * (began - self._began)
            before = [self._keyed(record, request.key) for record in request.checked if checking]
        else:
            if self._before[0] != request.round or not self._before[1]:
                self._before = request.round, [self._keyed(record, request.key) for record in request.checked]
            before = self._before[1]
        fetching = time.perf_counter()
        parts: list[Any] = [*self._collate_each([self._fetch(record) for record in request.records])]
        if before:
            fetched = time.perf_counter()
            changes = (self.changed_by(snapshot, self.snapshot(record, key)) for record, key, snapshot in before)
            parts.append(Checked(next(filter(None, changes), None)))
            self._checking += time.perf_counter() - fetched + fetching - began if request.round is None else 0.0
        return parts

    def _keyed(self, record: Any, key: bytes) -> tuple[Any, bytes, Any]:
        return record, key, self.snapshot(record, key)

    def _fetch(self, record: Any) -> Any:
        try:
            return self._dataset[record] if self._units is None else self._units.examples(self._dataset, record)
        except BaseException as error:
            return FailedRecord.because(error)

    def _collate_unit(self, items: list[Any]) -> Any:
        return self._collate(items[0])

    def snapshot(self, record: Any, key: bytes) -> Any:
        """The record's item, and the bits of the item, of its batch, and of the item after collation."""
        with own_randomness(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"), KeyStream(key)):
            item = self._fetch(record)
            try:
                return item, _bits(item), _bits(self._collate([item] if self._units is None else item)), _bits(item)
            except BaseException as error:
                return FailedRecord.because(error)

    def changed_by(self, before: Any, after: Any) -> str | None:
        """What gave another value in the second snapshot; None: nothing, or the record failed."""
        if any(isinstance(one, FailedRecord) or isinstance(one[0], FailedRecord) for one in (before, after)):
            return None
        item, fetched, collated, left = before
        if fetched != after[1] or left != _bits(item):  # the latter if all records are written to the same memory
            source = self._dataset
            while type(source) is Subset:
                source = source.dataset
            return f"the data set {type(source).__name__}"
        return None if collated == after[2] else _name(self._collate)


def _name(collate: Any) -> str:
    return f"the collate_fn {getattr(collate, '__name__', type(collate).__name__)}"


def refuse_order(
    dataset: Any, collate: Callable[[list[Any]], Any], units: Units | None, draw: Callable[[], Any]
) -> None:
    """Raises StateFound: some records differ when fetched in one order and, by a copy of the data set, in reverse.

    That finds state that the first record sets once and for all.
    """
    drawn = [(draw(), KeyStream().key) for _ in range(_CHECKED_BEFORE)]
    try:
        forward, backward = (RecordFetcher(_copied(dataset), collate, units) for _ in range(2))
    except Exception:  # the data set cannot be copied
        return
    first = [forward.snapshot(record, key) for record, key in drawn]
    second = [backward.snapshot(record, key) for record, key in reversed(drawn)]
    for one, other in zip(first, reversed(second), strict=True):
        what = forward.changed_by(one, other)
        if what is not None:
            raise StateFound(_STATE.format(what=what, round=""))


def _copied(dataset: Any) -> Any:
    """A copy that shares the data, but no attributes, nor lists and dictionaries in attributes."""
    made = copy.copy(dataset)
    for name, value in vars(dataset).items():
        if isinstance(value, Dataset):
            vars(made)[name] = _copied(value)
        elif isinstance(value, dict | list | set | deque):
            vars(made)[name] = copy.copy(value)
    return made


def mixing(loader: DataLoader, draw: Callable[[], int]) -> str | None:
    """The loader's collate_fn, if it mixes records of a batch.

    It does if, from the same random state, the batches of a with b and of a with c have rows of equal shapes, but no
    row in common.
    """
    dataset: Any = sampled_dataset(loader)
    collate, device = loader.collate_fn, torch.device("cpu")
    for _ in range(2 * _CHECKED_BEFORE if collate is not default_collate else 0):
        key, forms, rows = KeyStream().key, [], []
        try:
            with own_randomness(device, KeyStream()):
                a, b, c = (dataset[draw()] for _ in range(3))
            for other in (b, c):
                with own_randomness(device, KeyStream(key)):
                    leaves, _ = flattened(collate(copy.deepcopy([a, other])))
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == 2]
                forms.append([leaf.shape for leaf in tensors])
                rows.append({tuple(map(bits_of, row)) for row in zip(*tensors, strict=True)})
        except KeyboardInterrupt:
            raise
        except BaseException:  # records cannot be fetched, or collated together
            return None
        if forms[0] == forms[1] != [] and rows[0].isdisjoint(rows[1]):
            return _name(collate)
    return None


def _bits(value: Any) -> tuple[Any, list[Any]]:
    leaves, structure = flattened(value)
    return structure, [(type(leaf), bits_of(leaf)) for leaf in leaves]


class CheckResults:
    """The results of the checks, in the process that trains."""

    def __init__(self) -> None:
        self._clean = self._checked = 0  # rounds: the last one known to be clean, and the last one checked

    def remove(self, parts: list[Any], round: int = 0) -> list[Any]:
        """A chunk's parts without the result of its check.

        Raises:
            StateFound: a record's value changed.
        """
        if not (parts and isinstance(parts[-1], Checked)):
            return parts
        if round > self._checked:
            self._clean, self._checked = self._checked, round
        if parts[-1].changed_by is not None:
            when = f" (round {round})" if round else ""
            raise StateFound(_STATE.format(what=parts[-1].changed_by, round=when), self._clean)
        return parts[:-1]
