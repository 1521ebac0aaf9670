"""Sampling policies (paper, section 5)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from inspect import isabstract
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

from dpexp.accounting.ledger import SamplingEvent, rate_in_part
from dpexp.errors import ConfigError, named, positive, positive_integer

if TYPE_CHECKING:
    from dpexp.privacy.noise.randomness import KeyStream


def check_rate(q: float) -> None:
    """Raises ConfigError unless q is a number in (0, 1]."""
    if not isinstance(q, Real) or not 0 < q <= 1:
        raise ConfigError(f"sampling.sampling_rate={q!r} must lie in (0, 1].")


_event = lru_cache(typed=True)(SamplingEvent)  # rounds mostly have equal events


@dataclass(frozen=True)
class Policy(ABC):
    """How samples are drawn; q is the rate at which a record enters a sample.

    Attributes:
        name: the policy's name in events.
        weight: the sample's size over that of others of its epoch; its average gradient is multiplied by it.
        needs_exact_n: the training set must hold exactly n records.
        is_cyclic: all samples of a job depend on one another.
    """

    q: float
    weight = 1.0
    name: ClassVar[str]
    needs_exact_n: ClassVar[bool] = True
    is_cyclic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rate(self.q)

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        """The event of one sample; `epoch`: the first round of the samples that it depends on."""
        return _event(self.name, self.q, n)

    def at_round(self, t: int, n: int) -> "Policy":
        """The policy of round t, from 0, whose sample may be smaller than the others of its epoch."""
        return self

    @property
    def rounds_per_epoch(self) -> float:
        return 1 / self.q

    def rounds(self, epochs: float) -> int:
        """T = ⌈E/q⌉, where a quotient within rounding error of an integer counts as that integer."""
        rounds = positive("sampling.epochs", epochs) * self.rounds_per_epoch
        nearest = round(rounds)
        return nearest if math.isclose(rounds, nearest, rel_tol=1e-9) else math.ceil(rounds)

    def partition(self, size: int, stream: "KeyStream") -> list[Sequence[int]]:
        """Partitions of the records, which are sampled in turn as long as a job runs; by default one of all records."""
        return [range(size)]

    @abstractmethod
    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        """Indices of the next sample from a partition of that size, or of several that depend on one another."""


@dataclass(frozen=True)
class Poisson(Policy):
    """Each record enters a sample independently with probability q (paper, section 5: i.i.d. samples)."""

    name: ClassVar[str] = "poisson"
    needs_exact_n: ClassVar[bool] = False

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        return [_independent(self.q, size, stream)]


@dataclass(frozen=True)
class CyclicPoisson(Policy):
    """Poisson samples of one of b random partitions in turn (Choquette-Choo et al. 2023, arXiv 2306.08153).

    Round i samples each record of partition i mod b independently with probability q·b, so that the rounds of a record
    are at least b apart.
    """

    partitions: int = 1
    name: ClassVar[str] = "cyclic_poisson"
    needs_exact_n: ClassVar[bool] = False
    is_cyclic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rate_in_part(self.q, positive_integer("sampling.partitions", self.partitions))

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        return SamplingEvent(self.name, self.q, n, parts=self.partitions, block=epoch)

    def partition(self, size: int, stream: "KeyStream") -> list[Sequence[int]]:
        if self.partitions == 1:
            return super().partition(size, stream)
        partition_of = stream.words(size) % self.partitions
        return [partition_of.eq(part).nonzero().flatten().tolist() for part in range(self.partitions)]

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        return [_independent(rate_in_part(self.q, self.partitions), size, stream)]


@dataclass(frozen=True)
class TruncatedPoisson(Policy):
    """Poisson, but a sample above `max_batch_size` is cut to a random subset of that size (arXiv 2508.15089).

    A maximum of q·n plus six times its square root is hardly ever reached.
    """

    max_batch_size: int | None = None  # must be given
    name: ClassVar[str] = "truncated_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_integer("sampling.max_batch_size", self.max_batch_size)

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        return SamplingEvent(self.name, self.q, n, maximum=self.max_batch_size)

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        sample = _independent(self.q, size, stream)
        kept = stream.permutation(len(sample))[: self.max_batch_size]
        return [[sample[k] for k in kept]]


@dataclass(frozen=True)
class FixedSize(Policy):
    """A uniformly random subset of exactly q·n records, drawn anew each round."""

    name: ClassVar[str] = "fixed_size"

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        return [stream.permutation(size)[: whole_batch(self.q, size)].tolist()]


@dataclass(frozen=True)
class Shuffle(Policy):
    """Each epoch shuffles the records and splits them into disjoint samples of q·n; the last one has the rest."""

    name: ClassVar[str] = "shuffle"
    weight: float = 1.0

    def at_round(self, t: int, n: int) -> "Shuffle":
        if (t + 1) % self.rounds_per_epoch:
            return self
        batch = whole_batch(self.q, n)
        rest = n - (self.rounds_per_epoch - 1) * batch
        return self if rest == batch else replace(self, q=rest / n, weight=rest / batch)

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        return SamplingEvent(self.name, self.q, n, epoch=epoch)

    @property
    def rounds_per_epoch(self) -> int:
        return math.ceil(self.weight / self.q * (1 - 1e-12))

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        return self.split(stream.permutation(size).tolist())

    def split(self, order: list[int]) -> list[list[int]]:
        """An epoch's samples of records in this order."""
        batch = whole_batch(self.q / self.weight, len(order))
        return [order[k * batch : (k + 1) * batch] for k in range(self.rounds_per_epoch)]


@dataclass(frozen=True)
class RandomAllocation(Policy):
    """In each epoch of t = k/q rounds, each record draws for itself the k in which it is (arXiv 2502.08202).

    q is rounded such that t is a whole number. Sizes vary: a permutation would make records depend on one another.
    """

    num_selected: int = 1  # k
    name: ClassVar[str] = "random_allocation"
    needs_exact_n: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        k = positive_integer("sampling.num_selected", self.num_selected)
        object.__setattr__(self, "q", k / round(k / self.q))

    def event(self, n: int, epoch: int | None = None) -> SamplingEvent:
        facts = {"num_selected": self.num_selected, "num_steps": self.rounds_per_epoch}
        return SamplingEvent(self.name, self.q, n, epoch=epoch, **facts)

    @property
    def rounds_per_epoch(self) -> int:
        return round(self.num_selected / self.q)

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        """An epoch's samples. Each record's rounds are a uniform k-subset by Floyd's algorithm (Bentley & Floyd 1987):
        the i-th is uniform up to t - k + i, or t - k + i itself if it has that one already."""
        t, k = self.rounds_per_epoch, self.num_selected
        chosen = stream.words(size * k).reshape(size, k)
        for i, last in enumerate(range(t - k, t)):
            drawn = chosen[:, i].remainder_(last + 1)
            drawn[chosen[:, :i].eq(drawn[:, None]).any(1)] = last
        rounds = chosen.flatten()
        records = rounds.argsort(stable=True).div(k, rounding_mode="floor")
        return [sample.tolist() for sample in records.split(rounds.bincount(minlength=t).tolist())]


@dataclass(frozen=True)
class FullBatch(Policy):
    """Every record, every round."""

    q: float = 1.0
    name: ClassVar[str] = "all"
    needs_exact_n: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.q != 1:
            raise ConfigError(f"sampling.sampling_rate={self.q} must be 1 for sampling=full_batch.")

    def draw(self, size: int, stream: "KeyStream") -> list[list[int]]:
        return [list(range(size))]


POLICIES: dict[str, type[Policy]] = {
    "poisson": Poisson,
    "truncated_poisson": TruncatedPoisson,
    "fixed_size": FixedSize,
    "shuffle": Shuffle,
    "full_batch": FullBatch,
    "cyclic_poisson": CyclicPoisson,
    "random_allocation": RandomAllocation,
}


def policy_class(name: str) -> type[Policy]:
    """The class of a policy: one of POLICIES, or the dotted name of your own class."""
    found = POLICIES.get(name) or (named(name, "sampling.policy=") if "." in name else None)
    if not (isinstance(found, type) and issubclass(found, Policy)) or isabstract(found):
        raise ConfigError(
            f"sampling.policy={name} is unknown; known: {', '.join(POLICIES)}, or package.Name of a Policy."
        )
    if found.name == RandomAllocation.name and found is not RandomAllocation:
        raise ConfigError(
            f"sampling.policy={name} names its event {found.name}, which is only for sampling={found.name}, where each "
            "record draws its rounds by itself; name another event."
        )
    return found


def make_policy(
    name: str, q: float, n: int, max_batch_size: int | None = None, examples: float = 1.0,
    partitions: int | None = None, num_selected: int | None = None,
) -> Policy:  # fmt: skip
    """The policy of a name.

    Args:
        n: published number of records; examples: average number of examples in a record.

    Raises:
        ConfigError: the policy is unknown, a value is out of range, or the policy does not take it.
    """
    policy = policy_class(name)
    options = {"max_batch_size": max_batch_size, "partitions": partitions, "num_selected": num_selected}
    given = {option: value for option, value in options.items() if value is not None}
    takes = {field.name for field in fields(policy)}
    for option, value in given.items():
        if option not in takes:
            raise ConfigError(f"sampling.{option}={value} is no option of sampling={name}; set it to null.")
    if issubclass(policy, FixedSize | Shuffle):
        q = whole_batch(q, n, examples) / n
    return policy(q, **given)


def whole_batch(q: float, n: int, examples: float = 1.0) -> int:
    """q·n, which must be an integer number of records."""
    batch = round(q * n)
    if batch < 1 or not math.isclose(batch, q * n, rel_tol=1e-9):
        raise ConfigError(
            f"sampling.sampling_rate={q}: q·n = {q * n:.6g} must be a whole number of records; "
            f"sampling.expected_batch_size={max(1, batch) * examples:.12g} is the nearest."
        )
    return batch


def _independent(q: float, size: int, stream: "KeyStream") -> list[int]:
    """Each index with probability q, or less by under 2^-63."""
    if q == 1:
        return list(range(size))
    return stream.words(size).lt(int(q * 2**63)).nonzero().flatten().tolist()
