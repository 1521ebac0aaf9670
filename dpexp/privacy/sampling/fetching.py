"""Fetches records of the user's data set, collates each by itself, and checks that none depends on which records were
fetched before.

A data set or `collate_fn` that keeps state (a running mean, a counter, an iterator, a random generator of its own) lets
one record change another, which (ε, δ) does not bound. So a few records are fetched and collated twice from equal
states of the global random generators, with other records in between, in the process that fetches those, and compared
bit for bit: before the first round, and in the rounds. What is compared is not trained on.
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
from dpexp.privacy.checks import StateFound, bits_of
from dpexp.privacy.noise.randomness import KeyStream, own_randomness, seed_everything
from dpexp.privacy.sampling.batches import FailedRecord, PackedBatch, RecordBatch, SingleCollation, flattened
from dpexp.privacy.sampling.privacy_unit import Units


class _Rows(Dataset):
    """A TensorDataset, of which many rows are fetched and collated at once: none can change another."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: list[int]) -> list[RecordBatch]:
        if not indices:
            return []
        rows = torch.tensor(indices)
        return [RecordBatch(len(indices), [tensor.index_select(0, rows).unsqueeze(1) for tensor in self._tensors])]


class _RowsOfUnits(Dataset):
    """A TensorDataset's records of several examples, fetched and collated at once where they have equally many."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, drawn: list[list[int]]) -> list[RecordBatch]:
        by_size: dict[int, list[list[int]]] = {}
        for positions in drawn:
            by_size.setdefault(len(positions), []).append(positions)
        return [
            RecordBatch(len(some), [tensor[torch.tensor(some)] for tensor in self._tensors])
            for some in by_size.values()
        ]


class Seeding:
    """Gives each loader process secret random numbers of its own, then does what the user wants done."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._also = worker_init_fn
        self.key = b""  # of the processes that are started next

    def __call__(self, worker: int) -> None:
        seed_everything(KeyStream(hashlib.sha256(self.key + worker.to_bytes(8, "big")).digest()))
        if self._also is not None:
            self._also(worker)


def all_records(loader: Any, physical_batch: int, randomness: KeyStream) -> Iterator[RecordBatch | FailedRecord]:
    """Every record of the user's loader once, each fetched and collated by itself; as for a sample, of what is drawn
    meanwhile nothing follows from what the data set did to the generators.

    Raises:
        ConfigError: the loader's records cannot be sampled, or one that was checked changed.
    """
    dataset = sampled_dataset(loader)
    seeding = Seeding(loader.worker_init_fn)
    seeding.key = randomness.words(4).numpy().tobytes()
    order = BatchSampler(SequentialSampler(dataset), physical_batch, drop_last=False)  # type: ignore[arg-type]
    checks = Results()
    for chunk in fetching_loader(loader, order, seeding, randomness):
        parts = opened(checks.without(chunk))
        seed_everything(randomness)
        yield from parts


def fetching_loader(
    loader: Any, order: Sampler[list[Any]] | None, seeding: Seeding, stream: KeyStream, units: Units | None = None
) -> DataLoader:
    """A loader of the user's records in chunks, each by itself: lists of `RecordBatch | FailedRecord | PackedBatch |
    Checked`.

    Args:
        order: None: a dry run, of no chunks where nothing of the user's runs.
        stream: of which records are checked.
    """
    dataset: Any = sampled_dataset(loader)
    chunks: Any = [] if order is None else order
    if only_rows(loader):
        dataset = _Rows(dataset) if units is None else _RowsOfUnits(dataset)
    else:
        size = len(dataset if units is None else units)

        def draw() -> Any:
            i = int(stream.words(1)) % size
            return i if units is None else units.draw(i, stream)

        dataset = RecordFetcher(dataset, loader.collate_fn, units)
        chunks = CheckSchedule(order, draw, stream, max(1, loader.num_workers))
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


def only_rows(loader: Any) -> bool:
    """Whether records are rows of tensors, so that nothing of the user's runs to fetch and collate them."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def fetch_one(loader: Any, units: Units | None, drawn: Any) -> list[Any]:
    """One record, fetched in this process."""
    dataset: Any = sampled_dataset(loader)
    if only_rows(loader):
        return (_Rows(dataset) if units is None else _RowsOfUnits(dataset)).__getitems__([drawn])
    return RecordFetcher(dataset, loader.collate_fn, units).__getitems__(Request([drawn], [], b"", None))


def opened(parts: list[RecordBatch | FailedRecord | PackedBatch]) -> list[RecordBatch | FailedRecord]:
    return [part.opened() if isinstance(part, PackedBatch) else part for part in parts]


def _unchanged(
    records: list[RecordBatch | FailedRecord | PackedBatch],
) -> list[RecordBatch | FailedRecord | PackedBatch]:
    return records


def sampled_dataset(loader: Any) -> Dataset:
    """The data set whose records are sampled; a ConfigError if the loader draws in a way of its own."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
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


_DRY_RUN = 8  # records that are checked before the first round
_ALWAYS = 8  # first rounds, in each of which a record is checked after every chunk
_SHARE = 0.02  # of the time, which later checks may take


_STATE = (
    "data: {what} gave a record another value after other records were fetched{round}, so that records would change "
    "one another; draw random numbers from torch's, NumPy's or Python's global generator; keep no state between "
    "records."
)


WRITES = (
    "data: fetching a record changes {name}, which training_step reads, so that records would change one another; let "
    "data sets and collate_fn leave the module and its variables alone."
)


@dataclass
class Request:
    """A chunk's records.

    Attributes:
        checked: those to fetch before these and again afterwards; key: of the random numbers that they draw.
        round: if it is one of this job's first, in which those that were fetched before its first chunk are fetched
            again after each, however long it takes; None later.
    """

    records: list[Any]
    checked: list[Any]
    key: bytes
    round: int | None


@dataclass
class Checked:
    """Among a chunk's parts: records were checked. `found`: what gave one of them another value, if anything did."""

    found: str | None


class CheckSchedule(Sampler[Request]):
    """Asks for a check in every chunk that has records.

    Args:
        chunks: those of a RoundSampler; others count as a round for each process; None: a dry run, one chunk without
            records for each process that fetches.
        draw: a random record of the data.
        stream: of the keys of the checked records' random numbers.
        workers: processes that fetch, which take the chunks in turn.
    """

    def __init__(self, chunks: Any, draw: Callable[[], Any], stream: KeyStream, workers: int) -> None:
        self._chunks, self._draw, self._stream, self._workers = chunks, draw, stream, workers
        self._first: int | None = None

    def __iter__(self) -> Iterator[Request]:
        pending = getattr(self._chunks, "pending", None)
        for k, chunk in enumerate([[]] * self._workers if self._chunks is None else self._chunks):
            count = _DRY_RUN if self._chunks is None else min(1, len(chunk))
            key = self._stream.words(4).numpy().tobytes()
            t = k // self._workers if pending is None else self._chunks.pending[-1].round
            self._first = t if self._first is None else self._first
            yield Request(chunk, [self._draw() for _ in range(count)], key, t if t < self._first + _ALWAYS else None)


class RecordFetcher(Dataset):
    """Fetches and collates each record of a chunk by itself, and checks what it is asked to: of a data set of which
    `__getitems__`, which is given several records at once, is not called."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], units: Units | None) -> None:
        self._dataset, self._collate, self._units = dataset, collate, units
        self._alone = SingleCollation(collate if units is None else self._collate_unit)
        self._began: float | None = None
        self._checking = 0.0  # seconds
        self._before: tuple[int | None, list[tuple[Any, bytes, Any]]] = None, []  # of a round: what was fetched first

    def __getitems__(self, request: Request) -> list[Any]:
        began = time.perf_counter()
        self._began = self._began or began
        if request.round is None:
            checking = self._checking <= _SHARE * (began - self._began)
            before = [self._seen(record, request.key) for record in request.checked if checking]
        else:
            if self._before[0] != request.round or not self._before[1]:
                self._before = request.round, [self._seen(record, request.key) for record in request.checked]
            before = self._before[1]
        fetching = time.perf_counter()
        parts: list[Any] = [*self._alone([self._fetched(record) for record in request.records])]
        if before:
            fetched = time.perf_counter()
            changes = (self._changed(was, self._snapshot(record, key)) for record, key, was in before)
            parts.append(Checked(next(filter(None, changes), None)))
            self._checking += time.perf_counter() - fetched + fetching - began if request.round is None else 0.0
        return parts

    def _seen(self, record: Any, key: bytes) -> tuple[Any, bytes, Any]:
        return record, key, self._snapshot(record, key)

    def _fetched(self, record: Any) -> Any:
        try:
            return self._dataset[record] if self._units is None else self._units.examples(self._dataset, record)
        except BaseException as error:
            return FailedRecord.because(error)

    def _collate_unit(self, items: list[Any]) -> Any:
        return self._collate(items[0])

    def _snapshot(self, record: Any, key: bytes) -> Any:
        """The record's item and the bits of that when fetched, of its batch, and of the item when that was made."""
        with own_randomness(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"), KeyStream(key)):
            item = self._fetched(record)
            try:
                return item, _bits(item), _bits(self._collate([item] if self._units is None else item)), _bits(item)
            except BaseException as error:
                return FailedRecord.because(error)

    def _changed(self, before: Any, after: Any) -> str | None:
        """What gave another value; nothing is said of a record that failed."""
        if any(isinstance(one, FailedRecord) or isinstance(one[0], FailedRecord) for one in (before, after)):
            return None
        item, fetched, collated, left = before
        if fetched != after[1] or left != _bits(item):  # the latter where each record is written to the same memory
            source = self._dataset
            while type(source) is Subset:
                source = source.dataset
            return f"the data set {type(source).__name__}"
        name = getattr(self._collate, "__name__", type(self._collate).__name__)
        return None if collated == after[2] else f"the collate_fn {name}"


def refuse_order(
    dataset: Any, collate: Callable[[list[Any]], Any], units: Units | None, draw: Callable[[], Any]
) -> None:
    """Fetches some records in one order and, as if none had been fetched, in the reverse order: what is set once, by
    whichever record comes first, is found so. State in attributes is told apart by copies of the data set.
    """
    drawn = [(draw(), KeyStream().key) for _ in range(_DRY_RUN)]
    try:
        there, back = (RecordFetcher(_copied(dataset), collate, units) for _ in range(2))
    except Exception:  # of a data set that cannot be copied
        return
    first = [there._snapshot(record, key) for record, key in drawn]
    second = [back._snapshot(record, key) for record, key in reversed(drawn)]
    for one, other in zip(first, reversed(second), strict=True):
        found = there._changed(one, other)
        if found is not None:
            raise StateFound(_STATE.format(what=found, round=""))


def mixing(loader: DataLoader, draw: Callable[[], int]) -> str | None:
    """The loader's collate_fn, if it makes of a record another one among others: of a with b, and of a with c from the
    same random state, it gives rows of equal shapes, none of which is in both. Nothing else is told of them."""
    dataset: Any = sampled_dataset(loader)
    collate, device = loader.collate_fn, torch.device("cpu")
    for _ in range(2 * _DRY_RUN if collate is not default_collate else 0):
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
        except BaseException:  # of records that cannot be fetched, or not together
            return None
        if forms[0] == forms[1] != [] and rows[0].isdisjoint(rows[1]):
            return f"the collate_fn {getattr(collate, '__name__', type(collate).__name__)}"
    return None


def _copied(dataset: Any) -> Any:
    """A copy that shares the data, but no attributes and none of the lists and dictionaries in them."""
    made = copy.copy(dataset)
    for name, value in vars(dataset).items():
        if isinstance(value, Dataset):
            vars(made)[name] = _copied(value)
        elif isinstance(value, dict | list | set | deque):
            vars(made)[name] = copy.copy(value)
    return made


def _bits(value: Any) -> tuple[Any, list[Any]]:
    leaves, structure = flattened(value)
    return structure, [(type(leaf), bits_of(leaf)) for leaf in leaves]


class Results:
    """Of the checks, in the process that trains."""

    def __init__(self) -> None:
        self._clean = self._checked = 0  # rounds: of the check before that of the last, and of that

    def without(self, parts: list[Any], round: int = 0) -> list[Any]:
        """A chunk's parts without what a check says.

        Raises:
            StateFound: a record's value changed.
        """
        if not (parts and isinstance(parts[-1], Checked)):
            return parts
        if round > self._checked:
            self._clean, self._checked = self._checked, round
        if parts[-1].found is not None:
            when = f" (round {round})" if round else ""
            raise StateFound(_STATE.format(what=parts[-1].found, round=when), self._clean)
        return parts[:-1]
