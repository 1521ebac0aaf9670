"""Delivers samples in chunks of records that are fetched and collated one by one.

Code that gets several records at once, such as a `collate_fn` that pads to the longest, can let one change another. So
each record is collated as a batch of one, and only batches of equal shapes are stacked. Lightning and its hooks get one
`SealedSample` a round, so that they count rounds, and nothing that they keep, log or save depends on a record.
"""

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.dataloader import default_collate

from dpexp.accounting.sampling import Policy
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import Processes, digest_of_records, digest_of_rows
from dpexp.privacy.noise.randomness import KeyStream, own_randomness, reseed
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch
from dpexp.privacy.sampling.data_state import refuse_state
from dpexp.privacy.sampling.fetching import (
    Seeding,
    copied,
    fetcher,
    fetching_loader,
    only_rows,
    sampled_dataset,
)
from dpexp.privacy.sampling.padding import PaddedCollation
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.privacy.training_memory import Memory, tensors_of

_COMPARED = 16  # records whose shapes are compared
_EXAMPLES = 64  # records to try, until one can be fetched and has a loss
_LIBRARIES = ("torch.", "transformers.", "dpexp.")  # whose collation is known
_MANY_SINGLE = 8  # records of a chunk that are all processed one by one, for a warning


@dataclass
class SealedSample:
    """A round's sample as Lightning sees it, without its records.

    Attributes:
        round: its number, a tensor so that Lightning counts a batch of size 1.
    """

    round: Tensor

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(_SEALED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(_SEALED)


_SEALED = (
    "the training batch is sealed outside training_step (in a loop: loss_of, as private.step(loss_of, sample) calls it "
    "with the model and a record), since what a hook or a loop learns from records would leave without noise; "
    "validation batches are not."
)


@dataclass(frozen=True)
class ChunkPosition:
    """Where a chunk, which is processed at once, stands among those of its round.

    Attributes:
        first: it is the first of the round's chunks in this process.
        last: it is the last of them.
        first_round: the first of the rounds whose samples were drawn together with this one.
        round: its round, counted from 0.
        digest: of the whole sample, where several processes share it.
    """

    first: bool
    last: bool
    first_round: int
    round: int
    digest: int = 0


def _checked(samples: list[list[int]], policy: Policy, size: int) -> list[list[int]]:
    """The samples of a policy, each of distinct records, as every accountant assumes."""
    for sample in samples:
        if len({*sample}) < len(sample) or (sample and not 0 <= min(sample) <= max(sample) < size):
            raise ConfigError(
                f"sampling: {type(policy).__name__}.draw gave a sample with a record twice, or an index outside "
                f"0 to {size - 1}; give distinct indices."
            )
    return samples


@dataclass(eq=False, repr=False)
class RoundSampler(Sampler[list[Any]]):
    """A batch sampler that draws one sample a round and yields this process's records in chunks.

    A chunk has at most `max_physical_batch_size` examples; an empty sample is one empty chunk. Samples are drawn in the
    main process, so that loader workers change nothing. The position of each chunk is queued in `pending`, in the order
    of the loader's batches, however far the loader reads ahead. One iteration is one epoch: the rounds up to the next
    multiple of 1/q.

    Args:
        policy_at: the policy of each round.
        size: number of records.
        units: records of several examples; chunks have what is drawn of each.
        dealing: a stream that all processes share; it assigns records to processes.
    """

    policy_at: Callable[[int], Policy]
    size: int
    rounds: int
    max_physical_batch_size: int
    stream: KeyStream
    units: Units | None = None
    processes: Processes = field(default_factory=Processes)
    dealing: KeyStream = field(default_factory=KeyStream)
    completed: int = field(default=0, init=False)
    partitions: list[Sequence[int]] = field(default_factory=list, init=False)  # sampled in turn
    sampled_from: dict[int, Sequence[int]] = field(default_factory=dict, init=False)  # the partition of each round
    pending: deque[ChunkPosition] = field(default_factory=deque, init=False)
    _first_of_job: int = field(default=0, init=False)  # the first round since the job began or was resumed

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("data: the training set is empty, or no record has a known user.")

    def __iter__(self) -> Iterator[list[Any]]:
        pending: deque[ChunkPosition] = deque()
        self.pending = pending
        if not self.partitions:
            self.partitions, self._first_of_job = self.policy_at(0).partition(self.size, self.stream), self.completed
        samples: deque[list[int]] = deque()  # those that were drawn together and are not used yet
        first_round = self._first_of_job
        for t in range(self.completed, self.epoch_end()):
            policy, partition = self.policy_at(t), self.partitions[t % len(self.partitions)]
            if not samples:
                drawn = _checked(policy.draw(len(partition), self.stream), policy, len(partition))
                samples.extend(drawn[t % len(drawn) :])  # those of the rest of a resumed epoch
                first_round = self._first_of_job if policy.is_cyclic else t
            rows, self.sampled_from[t] = [partition[k] for k in samples.popleft()], partition
            digest = 0 if self.processes.is_single else digest_of_rows(rows)
            for k, chunk in enumerate(chunks := self._chunks(rows)):
                pending.append(ChunkPosition(k == 0, k == len(chunks) - 1, first_round, t, digest))
                yield chunk

    def _chunks(self, rows: list[int]) -> list[list[Any]]:
        """A sample's chunks for this process, at least one.

        Records of several examples are sorted by size, since equally large ones are processed together. All processes
        draw for the whole sample, so that their streams stay equal. The process of each record is drawn independently:
        if processes compute differently, how a record is computed depends on chance, and on no other record.
        """
        if self.units is None:
            rows = self._own(rows)
            starts = range(0, max(1, len(rows)), self.max_physical_batch_size)
            return [rows[start : start + self.max_physical_batch_size] for start in starts]
        chunks: list[list[Any]] = [[]]
        examples = 0
        for drawn in sorted(self._own([self.units.draw(i, self.stream) for i in rows]), key=self.units.size):
            examples += self.units.size(drawn)
            if chunks[-1] and examples > self.max_physical_batch_size:
                chunks.append([])
                examples = self.units.size(drawn)
            chunks[-1].append(drawn)
        return chunks

    def _own(self, sample: list[Any]) -> list[Any]:
        """This process's records of a sample."""
        if self.processes.is_single:
            return sample
        taken = self.dealing.words(len(sample)).remainder(self.processes.count).eq(self.processes.rank)
        return [sample[k] for k in taken.nonzero().flatten().tolist()]

    def epoch_end(self) -> int:
        """The number of rounds at the end of the current epoch; no round is lost between epochs."""
        return min(self.policy_at(0).rounds(self._epoch(self.completed)), self.rounds)

    def place(self, t: int) -> tuple[int, int]:
        """A round's epoch, and its position there, counted from 0."""
        before = self._epoch(t) - 1
        return before, t - (self.policy_at(0).rounds(before) if before else 0)

    def _epoch(self, t: int) -> int:
        """The epoch of a round, counted from 1."""
        policy = self.policy_at(0)
        epoch = max(1, math.floor(t / policy.rounds_per_epoch))
        while policy.rounds(epoch) <= t:
            epoch += 1
        return epoch


def _check_size(plan: PrivacyPlan, size: int) -> None:
    """Refuses or warns of a training set whose number of records is not the published n."""
    key, units_name = plan.privacy_unit.count_key, plan.privacy_unit.plural
    if plan.sampling.needs_exact_n and size != plan.n:
        raise ConfigError(
            f"{key}={plan.n}, but the training set holds {size} {units_name}; sampling={plan.sampling.name} is "
            "accounted correctly only if they are equal."
        )
    if abs(size - plan.n) > plan.n / 10:
        warnings.warn(
            f"{key}={plan.n}, but the training set holds {size} {units_name} (a private number, shown only here): "
            f"a round's sum is divided by q·n, so the average is {size / plan.n:.2g} times as long as intended; "
            f"(ε, δ) holds nevertheless. Set {key} to a published number near it."
        )


def _warn_of_unused(loader: Any, plan: PrivacyPlan) -> None:
    """Warns of what the user's loader does for batches, which has no effect on samples of single records."""
    expected = max(1, round(plan.sampling.q * plan.n))
    if loader.batch_size not in (1, expected):
        warnings.warn(
            f"data: the training loader's batch_size={loader.batch_size} is not used; a round's sample has about "
            f"{expected} {plan.privacy_unit.plural}, as sampling.expected_batch_size or sampling.sampling_rate says"
        )
    if not getattr(loader.collate_fn, "__module__", "").startswith(_LIBRARIES):
        warnings.warn(
            "data: the collate_fn gets one record at a time, so that what it does across records, as mixup, has no "
            "effect"
        )


class RoundLoader:
    """Lightning's training loader: one sealed sample a round. An iteration is one epoch.

    Args:
        loader: the user's; its data set, collation and workers are used.
        stream: the random numbers of samples.
        randomness: the random numbers of the loader processes.
        dealing: the random numbers that assign records to processes.
        pad_to: the lengths to which records are padded.

    Attributes:
        digest: of the records, where several processes share a sample.
        memory: of the training set's tensors and arrays.
        of_examples: a record is one example.
        epoch_began: the first round of the present epoch.
        only_rows: none of the user's code runs to fetch records (see `fetching.only_rows`).

    Raises:
        ConfigError: the loader's records cannot be sampled by the plan's policy, or its data set or collate_fn has
            state.
    """

    def __init__(
        self,
        loader: Any,
        plan: PrivacyPlan,
        max_physical_batch_size: int,
        stream: KeyStream,
        randomness: KeyStream,
        processes: Processes | None = None,
        dealing: KeyStream | None = None,
        pad_to: Sequence[int] = (),
    ) -> None:
        if pad_to and loader.collate_fn is not default_collate:
            loader = copy.copy(loader)
            loader.collate_fn = PaddedCollation(loader.collate_fn, pad_to)
        dataset = sampled_dataset(loader)
        units = plan.privacy_unit.units(dataset)
        size = len(dataset if units is None else units)  # type: ignore[arg-type]
        _check_size(plan, size)
        _warn_of_unused(loader, plan)
        processes = processes or Processes()
        self.digest = 0 if processes.is_single else digest_of_records(copied(dataset), units)
        self.sampler = RoundSampler(
            lambda t: plan.at_round(t).sampling, size, plan.rounds, max_physical_batch_size, stream, units, processes,
            dealing or KeyStream(),
        )  # fmt: skip
        self._seeding, self.randomness = Seeding(loader.worker_init_fn), randomness
        self._users_loader, self._units, self.only_rows = loader, units, only_rows(loader)
        refuse_state(loader, units)
        self.memory, self.of_examples = Memory(tensors_of(dataset)), plan.privacy_unit.to_header() is None
        self._loader = fetching_loader(loader, fetcher(loader, units), self.sampler, self._seeding)
        self._chunks: Iterator[list[RecordBatch | FailedRecord]] = iter(())
        self._warned = False
        self.epoch_began = 0

    def __iter__(self) -> Iterator[SealedSample]:
        """Draws nothing before the first sample is asked for, since Lightning begins an iteration just to test it."""
        self._seeding.key = self.randomness.words(4).numpy().tobytes()
        self._chunks = iter(self._loader)
        self.epoch_began = self.sampler.completed
        for t in range(self.sampler.completed, self.sampler.epoch_end()):
            yield SealedSample(torch.tensor(t))

    @property
    def dataset(self) -> Any:
        """The training set, which hooks know as `trainer.train_dataloader.dataset`."""
        return self._users_loader.dataset

    def examples(self) -> Iterator[RecordBatch | FailedRecord]:
        """Some records, whose shapes, dtypes and structure may be used."""
        source, tried = fetcher(self._users_loader, self._units, of_copy=True), min(_EXAMPLES, self.sampler.size)
        for i in (k * self.sampler.size // tried for k in range(tried)):
            drawn = i if self._units is None else self._units.draw(i, KeyStream())
            with own_randomness(torch.device("cpu"), KeyStream()):
                parts = source.__getitems__([drawn])
            yield from parts

    def shapes(self) -> list[RecordBatch]:
        """16 records, whose shapes and types may be used; none if no user's code made them, whose shapes are equal."""
        if self.only_rows:
            return []
        return [part for part in islice(self.examples(), _COMPARED) if isinstance(part, RecordBatch)]

    def say_padding(self) -> None:
        """Says to which lengths records are padded, once one was."""
        collation = self._users_loader.collate_fn
        if isinstance(collation, PaddedCollation) and collation.pads:
            warnings.warn(collation.said())

    def close(self) -> None:
        """Ends the loader's processes, and deletes the keys."""
        self._chunks = iter(())
        del self.sampler.stream, self.sampler.dealing, self.randomness, self._loader
        self._seeding.key = b""

    def sample(self, device: torch.device) -> Iterator[tuple[ChunkPosition, list[RecordBatch | FailedRecord]]]:
        """The chunks of the current round.

        The generators are seeded again after each chunk, so that no step depends on what the data set or collate_fn did
        to them.
        """
        last = False
        while not last:
            parts = next(self._chunks)
            if not self.only_rows:
                reseed(device, self.randomness)
            chunk = self.sampler.pending.popleft()
            last = chunk.last
            if len(parts) > _MANY_SINGLE and not self._warned and all(getattr(part, "size", 1) == 1 for part in parts):
                self._warned = True
                warnings.warn(
                    "data: no two records of a batch have the same structure and shapes, so each is processed by "
                    "itself, which is slow; their tensors differ in shape, or their other values differ: leave out of "
                    "a batch what training_step does not use."
                )
            yield chunk, parts
