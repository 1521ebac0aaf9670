"""Fetches records of the user's data set, and collates each alone."""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)  # fmt: skip
from torch.utils.data.dataloader import default_collate

from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream, seed_everything
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch, Rows, SingleCollation
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.rows import PLAIN


class Seeding:
    """A worker_init_fn that seeds each loader process from a secret key, and then calls the user's."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, key: bytes = b"") -> None:
        self._users, self.key = worker_init_fn, key  # of the processes that are started next

    def __call__(self, worker: int) -> None:
        seed_everything(KeyStream(hashlib.sha256(self.key + worker.to_bytes(8, "big")).digest()))
        if self._users is not None:
            self._users(worker)


def all_records(loader: Any, max_records: int, randomness: KeyStream) -> Iterator[RecordBatch | FailedRecord]:
    """Every record of the user's loader once, fetched in chunks of `max_records` and collated alone.

    The generators are seeded again after each chunk, so that nothing depends on what the data set does to them.

    Raises:
        ConfigError: the loader's records cannot be sampled.
    """
    order = BatchSampler(SequentialSampler(sampled_dataset(loader)), max_records, drop_last=False)  # type: ignore
    seeding = Seeding(loader.worker_init_fn, randomness.words(4).numpy().tobytes())
    for records in fetching_loader(loader, fetcher(loader), order, seeding):
        seed_everything(randomness)
        yield from records


def fetching_loader(loader: Any, source: Dataset, order: Any, seeding: Seeding) -> DataLoader:
    """A loader with the options of the user's, of what `source` gives for each chunk in `order`."""
    options: Any = {name: getattr(loader, name) for name in _OPTIONS}
    return DataLoader(source, batch_sampler=order, collate_fn=list, worker_init_fn=seeding, **options)


_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip


def fetcher(loader: Any, units: Units | None = None, of_copy: bool = False) -> "Rows | RecordFetcher":
    """The data set of chunks of records; `of_copy`: of a copy of the user's, which opens files of its own."""
    dataset: Any = sampled_dataset(loader)
    if only_rows(loader):
        return Rows(dataset, units)
    return RecordFetcher(copied(dataset) if of_copy else dataset, loader.collate_fn, units)


def only_rows(loader: Any) -> bool:
    """Whether records are rows of tensors, so that none of the user's code runs to fetch and collate them."""
    return type(loader.dataset) in PLAIN and loader.collate_fn is default_collate


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


class RecordFetcher(Dataset):
    """Fetches and collates each record of a chunk alone.

    The data set's own `__getitems__`, which gets several records at once, is not called.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], units: Units | None) -> None:
        self._dataset, self._collate, self._units = dataset, collate, units
        self._collate_one = collate if units is None else partial(_collate_unit, collate)
        self._collate_each = SingleCollation(self._collate_one)

    def __getitems__(self, drawn: list[Any]) -> list[Any]:
        return self._collate_each([attempt(self._get, record) for record in drawn])

    def _get(self, record: Any) -> Any:
        return self._dataset[record] if self._units is None else self._units.examples(self._dataset, record)


def _collate_unit(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    return collate(items[0])


def attempt(do: Callable[[Any], Any], value: Any) -> Any:
    """do(value), or a FailedRecord."""
    try:
        return do(value)
    except BaseException as error:
        return FailedRecord.because(error)


def copied(dataset: Any) -> Any:
    """A copy that shares the data, but neither attributes nor containers in them; itself, if that cannot be had."""
    try:
        made = copy.copy(dataset)
        for name, value in vars(dataset).items():
            if issubclass(type(value), Dataset):
                vars(made)[name] = copied(value)
            elif type(value) is list:
                vars(made)[name] = [copied(one) if issubclass(type(one), Dataset) else one for one in value]
            elif issubclass(type(value), dict | list | set | deque):
                vars(made)[name] = copy.copy(value)
    except Exception:
        return dataset
    return made
