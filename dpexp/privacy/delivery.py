"""How a sample reaches the engine: in chunks of records that have not met.

Whatever is given several records at once, such as a `collate_fn` that pads to the longest, can let one of them change
another. So each is fetched and collated alone, as a batch of one, and only those batches are stacked whose tensors have
equal shapes. Lightning and its hooks are handed one sealed `Sample` a round, so that what they count are rounds, and
nothing that they keep, log or save has seen a record.
"""

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
from dpexp.privacy.isolation.randomness import own_randomness, renew, seed_everything
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.processes import Processes, digest_of_records, digest_of_rows
from dpexp.privacy.records import Units
from dpexp.privacy.sampling import Policy
from dpexp.privacy.stacking import Failed, Parcel, Records

_LOOKED_AT = 8  # records, until one can be fetched
_ALONE = 8  # records of a chunk, to say that each is processed alone


@dataclass
class Sample:
    """A round's sample as Lightning passes it about: sealed.

    Attributes:
        round: its number, a tensor so that Lightning takes the batch for one of size 1.
    """

    round: Tensor

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(_SEALED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(_SEALED)


_SEALED = (
    "a hook reads the training batch: outside training_step it is sealed, since what is learnt from records there "
    "would leave without noise; validation batches are not."
)


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


@dataclass(frozen=True)
class Chunk:
    """One physical part of a process's part of a sample: first and last of its round or not. `epoch`: see Policy.event.
    `digest`: of the whole sample, where several processes have a part."""

    first: bool
    last: bool
    epoch: int
    digest: int = 0


class RoundSampler(Sampler[list[Any]]):
    """A batch sampler that draws one sample a round and yields it, or this process's part of it, in chunks of at most
    `physical_batch` examples; an empty one as an empty chunk.

    It is drawn in the main process, so loader workers change nothing. Every chunk yielded is also queued in
    `pending`, from which whoever consumes the loader's batches takes them in the same order, however far the
    loader reads ahead. One iteration is one epoch: the rounds up to the next multiple of 1/q.

    Args:
        policy_at: the policy of each round.
        units: of several examples, of which is yielded what is drawn of each.
        dealing: a stream that all processes have in common: of which process takes which record.
    """

    def __init__(
        self,
        policy_at: Callable[[int], Policy],
        size: int,
        rounds: int,
        physical_batch: int,
        stream: KeyStream,
        units: Units | None = None,
        processes: Processes | None = None,
        dealing: KeyStream | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError("data: the training set is empty.")
        self.policy_at = policy_at
        self.size = size
        self.rounds = rounds
        self.physical_batch = physical_batch
        self.stream = stream
        self.units = units
        self.processes = processes or Processes()
        self.dealing = dealing or KeyStream()
        self.completed = 0
        self.turns: list[Sequence[int]] = []  # whose it is, one after the other; drawn before the first round
        self.sampled_from: dict[int, Sequence[int]] = {}  # in each round, for those who look for canaries
        self._first = 0  # this job's
        self.pending: deque[Chunk] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        pending: deque[Chunk] = deque()
        self.pending = pending
        if not self.turns:
            self.turns, self._first = self.policy_at(0).parted(self.size, self.stream), self.completed
        samples: deque[list[int]] = deque()
        began = self._first
        for t in range(self.completed, self.epoch_end()):
            policy, part = self.policy_at(t), self.turns[t % len(self.turns)]
            if not samples:
                samples.extend(policy.samples(len(part), self.stream))
                began = self._first if policy.in_blocks else t
            rows, self.sampled_from[t] = [part[k] for k in samples.popleft()], part
            digest = 0 if self.processes.alone else digest_of_rows(rows)
            for k, chunk in enumerate(chunks := self._parts(rows)):
                pending.append(Chunk(k == 0, k == len(chunks) - 1, began, digest))
                yield chunk

    def _parts(self, rows: list[int]) -> list[list[Any]]:
        """At least one. Records of several examples are sorted by how many these are: equally large ones are processed
        together. All processes draw for the whole sample, so that they go on drawing the same.

        Which process takes a record is drawn for each by itself. So where processes are not alike, in what is compared
        or in anything else, it is chance that tells how a record is computed, and no other record.
        """
        if self.units is None:
            rows = self._own(rows)
            starts = range(0, max(1, len(rows)), self.physical_batch)
            return [rows[start : start + self.physical_batch] for start in starts]
        parts: list[list[Any]] = [[]]
        examples = 0
        for drawn in sorted(self._own([self.units.draw(i, self.stream) for i in rows]), key=self.units.size):
            examples += self.units.size(drawn)
            if parts[-1] and examples > self.physical_batch:
                parts.append([])
                examples = self.units.size(drawn)
            parts[-1].append(drawn)
        return parts

    def _own(self, sample: list[Any]) -> list[Any]:
        """What this process takes of it."""
        if self.processes.alone:
            return sample
        taken = self.dealing.words(len(sample)).remainder(self.processes.count).eq(self.processes.rank)
        return [sample[k] for k in taken.nonzero().flatten().tolist()]

    def epoch_end(self) -> int:
        """The round at which the epoch that is under way ends; rounds are never lost between epochs."""
        policy = self.policy_at(0)
        epoch = max(1, math.floor(self.completed / policy.rounds_per_epoch))
        while policy.rounds(epoch) <= self.completed:
            epoch += 1
        return min(policy.rounds(epoch), self.rounds)


class _Seeding:
    """Gives each loader process secret random numbers of its own, then does what the user wants done."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._also = worker_init_fn
        self.key = b""  # of the processes that are started next

    def __call__(self, worker: int) -> None:
        seed_everything(KeyStream(hashlib.sha256(self.key + worker.to_bytes(8, "big")).digest()))
        if self._also is not None:
            self._also(worker)


class Rounds:
    """What Lightning takes for the training loader: one sealed sample a round. An iteration is one epoch.

    Args:
        loader: the user's, of which data set, collation and workers are kept.
        stream: of samples; randomness: of the loader processes' random numbers; dealing: of which process takes which
            record.

    Attributes:
        digest: of the records, where several processes have a part.

    Raises:
        ConfigError: the loader's records cannot be sampled as the plan says, or its data set or collate_fn keeps state.
    """

    def __init__(
        self,
        loader: Any,
        plan: PrivacyPlan,
        physical_batch: int,
        stream: KeyStream,
        randomness: KeyStream,
        processes: Processes | None = None,
        dealing: KeyStream | None = None,
    ) -> None:
        dataset = sampled_dataset(loader)
        units = plan.record.units(dataset)
        size = len(dataset if units is None else units)  # type: ignore[arg-type]
        counted = plan.record.counted_by
        kind = plan.record.plural
        if plan.sampling.relies_on_n and size != plan.n:
            raise ConfigError(
                f"{counted}={plan.n}, but the training set holds {size} {kind}; sampling={plan.sampling.name} is only "
                "what is accounted if they are equal."
            )
        if abs(size - plan.n) > plan.n / 10:
            warnings.warn(
                f"{counted}={plan.n}, but the training set holds {size} {kind} (a private number, shown here alone): "
                f"the average of a round is divided by q·n, so it is {size / plan.n:.2g} times as long as meant; "
                f"(ε, δ) holds all the same. Set {counted} to a published number near it."
            )
        processes = processes or Processes()
        self.digest = 0 if processes.alone else digest_of_records(dataset, units)
        self.sampler = RoundSampler(
            lambda t: plan.at(t).sampling, size, plan.rounds, physical_batch, stream, units, processes, dealing
        )
        self._seeding, self.randomness = _Seeding(loader.worker_init_fn), randomness
        self._users_loader, self._units, self._only_rows = loader, units, _only_rows(loader)
        self._loader = _each_alone(loader, self.sampler, self._seeding, randomness, units)
        self._checks = Results()
        dry = _Seeding(loader.worker_init_fn)
        dry.key = KeyStream().key
        with own_randomness(torch.device("cpu"), KeyStream()):
            for parts in _each_alone(loader, None, dry, KeyStream(), units):
                self._checks.without(parts)
        self._chunks: Iterator[list[Records | Failed | Parcel]] = iter(())
        self._said_alone = False

    def __iter__(self) -> Iterator[Sample]:
        """Draws nothing before it is asked for the first: Lightning begins an iteration just to see whether it can."""
        self._seeding.key = self.randomness.words(4).numpy().tobytes()
        self._chunks = iter(self._loader)
        for t in range(self.sampler.completed, self.sampler.epoch_end()):
            yield Sample(torch.tensor(t))

    def example(self) -> Records | None:
        """A record, of which shapes, types and structure may be used; None: none can be fetched."""
        for i in range(min(_LOOKED_AT, self.sampler.size)):
            drawn = i if self._units is None else self._units.draw(i, KeyStream())
            with own_randomness(torch.device("cpu"), KeyStream()):
                parts = _fetched_alone(self._users_loader, self._units, drawn)
            for part in parts:
                if isinstance(part, Records):
                    return part
        return None

    def close(self) -> None:
        """Ends the loader's processes, and drops the keys, so that they are nowhere."""
        self._chunks = iter(())
        del self.sampler.stream, self.sampler.dealing, self.randomness, self._loader
        self._seeding.key = b""

    def sample(self, device: torch.device) -> Iterator[tuple[Chunk, list[Records | Failed]]]:
        """The chunks of the round under way. What the data set, or a collate_fn, did to this process's random number
        generators reaches no step on the device: they go on from other secret states.

        Raises:
            StateFound: a record that was checked changed.
        """
        last = False
        while not last:
            parts = _opened(self._checks.without(next(self._chunks), self.sampler.completed + 1))
            if not self._only_rows:
                renew(device, self.randomness)
            chunk = self.sampler.pending.popleft()
            last = chunk.last
            if len(parts) > _ALONE and not self._said_alone and all(getattr(part, "size", 1) == 1 for part in parts):
                self._said_alone = True
                warnings.warn(
                    "data: no two records of a batch look alike, so that each is processed alone, which is slow: they "
                    "hold tensors of different shapes, or values that are no tensors and differ; leave out of a batch "
                    "what training_step does not use."
                )
            yield chunk, parts


def all_records(loader: Any, physical_batch: int, randomness: KeyStream) -> Iterator[Records | Failed]:
    """Every record of the user's loader once, each fetched and collated by itself; as for a sample, of what is drawn
    meanwhile nothing follows from what the data set did to the generators.

    Raises:
        ConfigError: the loader's records cannot be sampled, or one that was checked changed.
    """
    dataset = sampled_dataset(loader)
    seeding = _Seeding(loader.worker_init_fn)
    seeding.key = randomness.words(4).numpy().tobytes()
    order = BatchSampler(SequentialSampler(dataset), physical_batch, drop_last=False)  # type: ignore[arg-type]
    checks = Results()
    for chunk in _each_alone(loader, order, seeding, randomness):
        parts = _opened(checks.without(chunk))
        seed_everything(randomness)
        yield from parts


def _each_alone(
    loader: Any, order: Sampler[list[Any]] | None, seeding: _Seeding, stream: KeyStream, units: Units | None = None
) -> DataLoader:
    """A loader of the user's records in chunks, each by itself: lists of `Records | Failed | Parcel | Checked`.

    Args:
        order: None: a dry run, of no chunks where nothing of the user's runs.
        stream: of which records are checked.
    """
    dataset: Any = sampled_dataset(loader)
    chunks: Any = [] if order is None else order
    if _only_rows(loader):
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


def _only_rows(loader: Any) -> bool:
    """Whether records are rows of tensors, so that nothing of the user's runs to fetch and collate them."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _fetched_alone(loader: Any, units: Units | None, drawn: Any) -> list[Any]:
    """One record, fetched in this process."""
    dataset: Any = sampled_dataset(loader)
    if _only_rows(loader):
        return (_Rows(dataset) if units is None else _RowsOfUnits(dataset)).__getitems__([drawn])
    return EachAlone(dataset, loader.collate_fn, units).__getitems__(Request([drawn], [], b"", False))


def _opened(parts: list[Records | Failed | Parcel]) -> list[Records | Failed]:
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
