"""How a sample reaches the engine: in chunks of records that have not met.

Whatever is given several records at once, such as a `collate_fn` that pads to the longest, can let one of them change
another. So each is fetched and collated alone, as a batch of one, and only those batches are stacked whose tensors have
equal shapes. Lightning and its hooks are handed one sealed `SealedSample` a round, so that what they count are rounds,
and nothing that they keep, log or save has seen a record.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from dpexp.errors import ConfigError
from dpexp.privacy.checks import StateFound
from dpexp.privacy.distributed import Processes, digest_of_records, digest_of_rows
from dpexp.privacy.noise.randomness import KeyStream, own_randomness, renew
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.batches import FailedRecord, PackedBatch, RecordBatch
from dpexp.privacy.sampling.fetching import (
    WRITES,
    Results,
    Seeding,
    fetch_one,
    fetching_loader,
    mixing,
    only_rows,
    opened,
    refuse_order,
    sampled_dataset,
)
from dpexp.privacy.sampling.policies import Policy
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.privacy.sampling.training_data import TrainingData

_LOOKED_AT = 64  # records, until one can be fetched that has a loss
_ALONE = 8  # records of a chunk, to say that each is processed alone


@dataclass
class SealedSample:
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


@dataclass(frozen=True)
class ChunkPosition:
    """One physical part of a process's part of a sample: first and last of its round or not. `epoch`: see Policy.event.
    `round`: counted from 0. `digest`: of the whole sample, where several processes have a part."""

    first: bool
    last: bool
    epoch: int
    round: int
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
        self.pending: deque[ChunkPosition] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        pending: deque[ChunkPosition] = deque()
        self.pending = pending
        if not self.turns:
            self.turns, self._first = self.policy_at(0).partition(self.size, self.stream), self.completed
        samples: deque[list[int]] = deque()
        began = self._first
        for t in range(self.completed, self.epoch_end()):
            policy, part = self.policy_at(t), self.turns[t % len(self.turns)]
            if not samples:
                samples.extend(policy.draw(len(part), self.stream))
                began = self._first if policy.is_cyclic else t
            rows, self.sampled_from[t] = [part[k] for k in samples.popleft()], part
            digest = 0 if self.processes.is_single else digest_of_rows(rows)
            for k, chunk in enumerate(chunks := self._parts(rows)):
                pending.append(ChunkPosition(k == 0, k == len(chunks) - 1, began, t, digest))
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
        if self.processes.is_single:
            return sample
        taken = self.dealing.words(len(sample)).remainder(self.processes.count).eq(self.processes.rank)
        return [sample[k] for k in taken.nonzero().flatten().tolist()]

    def epoch_end(self) -> int:
        """The round at which the epoch that is under way ends; rounds are never lost between epochs."""
        return min(self.policy_at(0).rounds(self._epoch(self.completed)), self.rounds)

    def last_place(self) -> tuple[int, int]:
        """The last round's epoch, and its place there, counted from 0."""
        before = self._epoch(self.rounds - 1) - 1
        return before, self.rounds - 1 - (self.policy_at(0).rounds(before) if before else 0)

    def _epoch(self, t: int) -> int:
        """Of a round, counted from 1."""
        policy = self.policy_at(0)
        epoch = max(1, math.floor(t / policy.rounds_per_epoch))
        while policy.rounds(epoch) <= t:
            epoch += 1
        return epoch


def _drawn(size: int, units: Units | None) -> Any:
    """A record at random, of no stream that anything else follows from."""
    stream = KeyStream()
    i = int(stream.words(1)) % size
    return i if units is None else units.draw(i, stream)


class RoundLoader:
    """What Lightning takes for the training loader: one sealed sample a round. An iteration is one epoch.

    Args:
        loader: the user's, of which data set, collation and workers are kept.
        stream: of samples; randomness: of the loader processes' random numbers; dealing: of which process takes which
            record.

    Attributes:
        digest: of the records, where several processes have a part.
        training_data: what the training set holds in memory.
        of_examples: a record is one example, which a batch may mix with others.
        only_rows: nothing of the user's runs to fetch records (see `fetching.only_rows`).

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
        units = plan.privacy_unit.units(dataset)
        size = len(dataset if units is None else units)  # type: ignore[arg-type]
        counted = plan.privacy_unit.count_key
        kind = plan.privacy_unit.plural
        if plan.sampling.needs_exact_n and size != plan.n:
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
        self.digest = 0 if processes.is_single else digest_of_records(dataset, units)
        self.sampler = RoundSampler(
            lambda t: plan.at_round(t).sampling, size, plan.rounds, physical_batch, stream, units, processes, dealing
        )
        self._seeding, self.randomness = Seeding(loader.worker_init_fn), randomness
        self._users_loader, self._units, self.only_rows = loader, units, only_rows(loader)
        self.training_data, self.of_examples = TrainingData(dataset), plan.privacy_unit.to_header() is None
        self._loader = fetching_loader(loader, self.sampler, self._seeding, randomness, units)
        self._checks = Results()
        if not only_rows(loader):
            refuse_order(dataset, loader.collate_fn, units, lambda: _drawn(size, units))
        dry = Seeding(loader.worker_init_fn)
        dry.key = KeyStream().key
        with own_randomness(torch.device("cpu"), KeyStream()):
            for parts in fetching_loader(loader, None, dry, KeyStream(), units):
                self._checks.without(parts)
        self._chunks: Iterator[list[RecordBatch | FailedRecord | PackedBatch]] = iter(())
        self._said_alone = False

    def __iter__(self) -> Iterator[SealedSample]:
        """Draws nothing before it is asked for the first: Lightning begins an iteration just to see whether it can."""
        self._seeding.key = self.randomness.words(4).numpy().tobytes()
        self._chunks = iter(self._loader)
        for t in range(self.sampler.completed, self.sampler.epoch_end()):
            yield SealedSample(torch.tensor(t))

    def examples(self) -> Iterator[RecordBatch | FailedRecord]:
        """Some records, of which shapes, types and structure may be used."""
        tried = min(_LOOKED_AT, self.sampler.size)
        for i in (k * self.sampler.size // tried for k in range(tried)):
            drawn = i if self._units is None else self._units.draw(i, KeyStream())
            with own_randomness(torch.device("cpu"), KeyStream()):
                parts = fetch_one(self._users_loader, self._units, drawn)
            yield from parts

    def mixing(self) -> str | None:
        """The collate_fn, if it makes of a record another one among others (see `fetching.mixing`)."""
        return None if self.only_rows else mixing(self._users_loader, lambda: _drawn(self.sampler.size, None))

    def close(self) -> None:
        """Ends the loader's processes, and drops the keys, so that they are nowhere."""
        self._chunks = iter(())
        del self.sampler.stream, self.sampler.dealing, self.randomness, self._loader
        self._seeding.key = b""

    def sample(
        self, device: torch.device, watched: Callable[[], dict[tuple[str, int], Any]] = dict
    ) -> Iterator[tuple[ChunkPosition, list[RecordBatch | FailedRecord]]]:
        """The chunks of the round under way. What the data set, or a collate_fn, did to this process's random number
        generators reaches no step on the device: they go on from other secret states.

        Args:
            watched: versions of what the step reads besides records, which fetching must not change.

        Raises:
            StateFound: a record that was checked changed, or something that is watched.
        """
        last = False
        while not last:
            if self.only_rows:
                parts: Any = next(self._chunks)
            else:
                before = watched()
                parts = opened(self._checks.without(next(self._chunks), self.sampler.completed + 1))
                after = watched()
                for name, tensor in before:
                    if after.get((name, tensor)) != before[name, tensor]:
                        raise StateFound(WRITES.format(name=name), self.sampler.completed)
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
