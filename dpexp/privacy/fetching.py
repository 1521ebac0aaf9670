"""Fetches records of the user's data set, and collates each by itself."""

import hashlib
from collections.abc import Callable, Iterator
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
    TensorDataset,
)
from torch.utils.data.dataloader import default_collate

from dpexp.errors import ConfigError
from dpexp.privacy.data_checks import EachAlone, Request, Results, WithChecks
from dpexp.privacy.isolation.randomness import seed_everything
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.records import Units
from dpexp.privacy.stacking import Failed, Parcel, Records


class _Rows(Dataset):
    """A TensorDataset, of which many rows are fetched and collated at once: none can change another."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: list[int]) -> list[Records]:
        if not indices:
            return []
        rows = torch.tensor(indices)
        return [Records(len(indices), [tensor.index_select(0, rows).unsqueeze(1) for tensor in self._tensors])]


class _RowsOfUnits(Dataset):
    """A TensorDataset's records of several examples, fetched and collated at once where they have equally many."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, drawn: list[list[int]]) -> list[Records]:
        by_size: dict[int, list[list[int]]] = {}
        for positions in drawn:
            by_size.setdefault(len(positions), []).append(positions)
        return [
            Records(len(some), [tensor[torch.tensor(some)] for tensor in self._tensors]) for some in by_size.values()
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


def all_records(loader: Any, physical_batch: int, randomness: KeyStream) -> Iterator[Records | Failed]:
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
    for chunk in each_alone(loader, order, seeding, randomness):
        parts = opened(checks.without(chunk))
        seed_everything(randomness)
        yield from parts


def each_alone(
    loader: Any, order: Sampler[list[Any]] | None, seeding: Seeding, stream: KeyStream, units: Units | None = None
) -> DataLoader:
    """A loader of the user's records in chunks, each by itself: lists of `Records | Failed | Parcel | Checked`.

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

        dataset = EachAlone(dataset, loader.collate_fn, units)
        chunks = WithChecks(order, draw, stream, max(1, loader.num_workers))
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


def fetched_alone(loader: Any, units: Units | None, drawn: Any) -> list[Any]:
    """One record, fetched in this process."""
    dataset: Any = sampled_dataset(loader)
    if only_rows(loader):
        return (_Rows(dataset) if units is None else _RowsOfUnits(dataset)).__getitems__([drawn])
    return EachAlone(dataset, loader.collate_fn, units).__getitems__(Request([drawn], [], b"", False))


def opened(parts: list[Records | Failed | Parcel]) -> list[Records | Failed]:
    return [part.opened() if isinstance(part, Parcel) else part for part in parts]


def _unchanged(records: list[Records | Failed | Parcel]) -> list[Records | Failed | Parcel]:
    return records


def sampled_dataset(loader: Any) -> Dataset:
    """The data set whose records are sampled; a ConfigError if the loader draws in a way of its own."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"data: the training loader is a {type(loader).__name__}; sampling needs one DataLoader over "
            "a data set that can be indexed."
        )
    plain = (SequentialSampler, RandomSampler)
    if type(loader.sampler) not in plain or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigError(
            f"data: the training loader has a sampler of its own ({type(loader.sampler).__name__}), which the plan's "
            "would replace; choose records with torch.utils.data.Subset instead."
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "data: the training loader has batch_size=None, so its data set gives whole batches; sampling draws "
            "single records, so give it a batch_size and let the data set give one record for an index."
        )
    return loader.dataset
