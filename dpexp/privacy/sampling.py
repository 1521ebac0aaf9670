"""Sampling policies, and the delivery of their samples in physical chunks."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.data import Sampler

from dpexp.accounting.ledger import SamplingEvent
from dpexp.errors import ConfigError


@dataclass(frozen=True)
class Policy(ABC):
    """How samples are drawn. q is the rate at which a record enters a sample."""

    q: float
    name: ClassVar[str]
    relies_on_n: ClassVar[bool] = True  # the training set must hold exactly n records

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise ConfigError(f"sampling.q={self.q} must lie in (0, 1].")

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        """The event of one sample. `epoch` is the round in which the samples that it is disjoint with began."""
        return SamplingEvent(self.name, self.q, n)

    @property
    def rounds_per_epoch(self) -> float:
        return 1 / self.q

    def rounds(self, epochs: float) -> int:
        """T = ⌈E/q⌉, where a quotient within rounding error of a whole number counts as that number."""
        if not (math.isfinite(epochs) and epochs > 0):
            raise ConfigError(f"sampling.epochs={epochs} must be a finite number above 0.")
        rounds = epochs * self.rounds_per_epoch
        whole = round(rounds)
        return whole if math.isclose(rounds, whole, rel_tol=1e-9) else math.ceil(rounds)

    @abstractmethod
    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """Indices of the next sample, or of the next several where those depend on each other."""


@dataclass(frozen=True)
class Poisson(Policy):
    """Each record enters a sample independently with probability q (paper, section 5: i.i.d. samples)."""

    name: ClassVar[str] = "poisson"
    relies_on_n: ClassVar[bool] = False

    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        return [_independent(self.q, size, generator).tolist()]


@dataclass(frozen=True)
class TruncatedPoisson(Policy):
    """As Poisson, but of a sample larger than `maximum` a random subset of that size is kept (arXiv 2508.15089).
    A maximum of q·n plus six times its square root hardly ever binds."""

    maximum: int
    name: ClassVar[str] = "truncated_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.maximum < 1:
            raise ConfigError(f"sampling.maximum={self.maximum} must be at least 1.")

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        return SamplingEvent(self.name, self.q, n, maximum=self.maximum)

    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        sample = _independent(self.q, size, generator)
        kept = torch.randperm(len(sample), generator=generator)[: self.maximum]
        return [sample[kept].tolist()]


@dataclass(frozen=True)
class FixedSize(Policy):
    """A uniformly random subset of exactly q·n records, drawn anew each round."""

    name: ClassVar[str] = "fixed_size"

    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        return [torch.randperm(size, generator=generator)[: whole_batch(self.q, size)].tolist()]


@dataclass(frozen=True)
class Shuffle(Policy):
    """Each epoch the records are shuffled and dealt out in disjoint batches of q·n; a remainder sits the epoch out."""

    name: ClassVar[str] = "shuffle"

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        return SamplingEvent(self.name, self.q, n, epoch=epoch)

    @property
    def rounds_per_epoch(self) -> int:
        return math.floor(1 / self.q + 1e-9)

    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        order = torch.randperm(size, generator=generator)
        batch = whole_batch(self.q, size)
        return [order[k * batch : (k + 1) * batch].tolist() for k in range(self.rounds_per_epoch)]


@dataclass(frozen=True)
class All(Policy):
    """Every record, every round."""

    q: float = 1.0
    name: ClassVar[str] = "all"
    relies_on_n: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.q != 1:
            raise ConfigError(f"sampling.q={self.q} must be 1 for sampling=all.")

    def samples(self, size: int, generator: torch.Generator) -> list[list[int]]:
        return [list(range(size))]


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Poisson, TruncatedPoisson, FixedSize, Shuffle, All)
}


def make_policy(name: str, q: float, n: int, maximum: int | None = None) -> Policy:
    """Raises:
    ConfigError: an unknown policy, a value out of range, or a batch that is not whole where it must be.
    """
    if name not in POLICIES:
        raise ConfigError(f"sampling.policy={name} is unknown; known: {', '.join(POLICIES)}.")
    if (maximum is None) == (name == "truncated_poisson"):
        raise ConfigError(f"sampling.maximum={maximum}: sampling=truncated_poisson needs it, and no other takes it.")
    if maximum is not None:
        return TruncatedPoisson(q, maximum)
    policy = POLICIES[name](q)
    if isinstance(policy, FixedSize | Shuffle):
        whole_batch(q, n)
    return policy


def whole_batch(q: float, n: int) -> int:
    """q·n, which must be a whole number of records."""
    batch = round(q * n)
    if batch < 1 or not math.isclose(batch, q * n, rel_tol=1e-9):
        raise ConfigError(
            f"sampling.q={q}: q·n = {q * n:.6g} must be a whole number of records; "
            f"sampling.expected_batch_size={max(1, batch)} is the nearest."
        )
    return batch


def _independent(q: float, size: int, generator: torch.Generator) -> torch.Tensor:
    """Uniforms are float64: float32's 2^-24 steps would bias a small q."""
    uniforms = torch.rand(size, generator=generator, dtype=torch.float64)
    return torch.nonzero(uniforms < q).flatten()


@dataclass(frozen=True)
class Chunk:
    """One physical part of a sample: `size` rows, first and last of its round or not. The rows of an empty
    sample's only chunk are a stand-in that counts for nothing. `epoch`: see Policy.event."""

    size: int
    first: bool
    last: bool
    empty: bool
    epoch: int


class RoundSampler(Sampler[list[int]]):
    """A batch sampler that draws one sample a round and yields it in chunks of at most `physical_batch`.

    It is drawn in the main process, so loader workers change nothing. Every chunk yielded is also queued in
    `pending`, from which whoever consumes the loader's batches takes them in the same order, however far the
    loader reads ahead. One iteration is one epoch: the rounds up to the next multiple of 1/q.

    Args:
        policy_at: the policy of each round.
    """

    def __init__(
        self,
        policy_at: Callable[[int], Policy],
        size: int,
        rounds: int,
        physical_batch: int,
        generator: torch.Generator,
    ) -> None:
        if size < 1:
            raise ConfigError("data: the training set is empty.")
        self.policy_at = policy_at
        self.size = size
        self.rounds = rounds
        self.physical_batch = physical_batch
        self.generator = generator
        self.completed = 0
        self.pending: deque[Chunk] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        pending: deque[Chunk] = deque()
        self.pending = pending
        samples: deque[list[int]] = deque()
        began = self.completed
        for t in range(self.completed, self._epoch_end()):
            if not samples:
                samples.extend(self.policy_at(t).samples(self.size, self.generator))
                began = t
            sample = samples.popleft()
            rows = sample or [0]
            for start in range(0, len(rows), self.physical_batch):
                chunk = rows[start : start + self.physical_batch]
                last = start + self.physical_batch >= len(rows)
                pending.append(Chunk(len(chunk), start == 0, last, not sample, began))
                yield chunk

    def _epoch_end(self) -> int:
        """The round at which the epoch that is under way ends; rounds are never lost between epochs."""
        policy = self.policy_at(0)
        epoch = max(1, math.floor(self.completed / policy.rounds_per_epoch))
        while policy.rounds(epoch) <= self.completed:
            epoch += 1
        return min(policy.rounds(epoch), self.rounds)
