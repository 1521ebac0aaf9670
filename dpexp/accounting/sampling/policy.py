"""What a sampling policy is: how samples are drawn, for how many rounds, and what a release on such samples counts as.

A policy is one class in one file. The class that draws the samples is also the one that says for which adjacencies and
accountants they are covered, and which releases its rounds count as, so that no other sampler can be accounted than the
one that ran (arXiv 1812.06210, sections 5 and 6).

*Formula.* A record is in a sample with probability q; a job has T = steps rounds, or T = ⌈E/q⌉ for E epochs.

| Case | What happens |
|---|---|
| E/q is an integer up to rounding errors | T is that integer |
| more than 2^31 rounds | ConfigError |
| q = 1 | every record is in every sample; nothing is amplified |
| `expected_batch_size` above n | ConfigError, since q would exceed 1 |
| a user's subclass that only draws in another way | keeps its parent's name, and is accounted as its parent |
| a user's subclass that says what its rounds cost | is called module.Class in ledgers, and accounted by itself |

Read next: `poisson` (the simplest policy), `dpexp.accounting.releases` (who calls `Policy.releases`). Imports nothing
slow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from dpexp.errors import (
    ConfigError,
    Count,
    Positive,
    Rate,
    check_ranges,
    exactly_one,
    is_number,
    made_from,
    positive_integer,
)

MOST_ROUNDS = 2**31  # at a millisecond each, 25 days
# The members of a policy that decide what its rounds cost. A ledger has a policy's name and numbers only, so a class
# that overrides one of these must not have its parent's name: a reader would account its rounds as the parent's.
ACCOUNTED = {"covers", "releases", "written", "drawn_with", "rounds_apart"}
ALL_ACCOUNTANTS = ("pld", "rdp", "moments", "strong", "basic")


class RandomNumbers(Protocol):
    """What a policy draws from: `dpexp.privacy.noise.randomness.KeyStream`."""

    def words(self, count: int) -> Any:
        """A tensor [count] of uniform integers in [0, 2^63)."""

    def permutation(self, size: int) -> Any:
        """A tensor [size]: a uniformly random order of 0 to size - 1."""


@dataclass(frozen=True)
class Release:
    """One mechanism as an accountant sees it: Gaussian, unless its policy is `laplace`.

    `policy` is one of

    - `poisson`: a Poisson sample, of which a record is removed, to which one is added, or in which one is nulled; and
      with q = 1 any sample whose randomness does not count.
    - `poisson_replaced`: a Poisson sample in which a record is replaced by another.
    - `truncated_poisson`: a Poisson sample of `n` records that is cut to at most `maximum`.
    - `fixed_size`: a random subset of q·n of `n` records.
    - `random_allocation`: `steps` rounds together, of which a record is in one, drawn at random.
    - `laplace`: a query on all records with Laplace noise, which is 1/z-DP.

    Attributes:
        z: the noise over the sensitivity: σ̃ of Gaussian noise, the scale b of Laplace noise.
        q: the probability that a record is in the sample. With q = 1 sampling does not amplify privacy; only
            `random_allocation` has q = 1 and is amplified, by `steps`.
        policy: see above.
        n: the number of records, of `truncated_poisson` and `fixed_size`.
        maximum: the size of the largest sample, of `truncated_poisson`.
        steps: the number of rounds, of `random_allocation`.
    """

    z: float
    q: float = 1.0
    policy: str = "poisson"
    n: int | None = None
    maximum: int | None = None
    steps: int | None = None


class Released(NamedTuple):
    """Equal rounds of a ledger, as `Policy.releases` gets them.

    Attributes:
        event: the sampling event of each of the rounds.
        z: `Round.z` of each: noise over sensitivity, for the adjacency that is claimed.
        times: how many such rounds there are.
        correlation: pairs of a group's name and the bands c of its noise. Groups whose noise is independent over rounds
            are left out.
    """

    event: "SamplingEvent"
    z: float
    times: int
    correlation: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """How samples are drawn. A subclass is the whole of a policy; docs/extending.md shows one.

    A user gives `Poisson(expected_batch_size=256, epochs=10)`. For the published number of examples `resolve` returns
    what a plan and its ledger have: the policy with its rate q and without a length, and the number of rounds T.

    *Names.* A subclass that overrides nothing in `ACCOUNTED` keeps its parent's name and is accounted as its parent, so
    its samples must have the same distribution as the parent's. The name of any other subclass becomes module.Class,
    under which readers of the ledger import it.

    Args:
        steps: rounds T; or `epochs` E, for T = ⌈E/q⌉. If q is solved for, T follows from the q that is found.

    Attributes:
        name: the policy's name in ledgers.
        covers: for each adjacency that can be claimed, the default one first, the accountants that have a bound.
        why: why other adjacencies cannot be claimed.
        written: names of fields that are in ledgers -> their keys there.
        drawn_with: the key in ledgers for the first of the rounds that are drawn together; None: each is drawn by
            itself.
        needs_exact_n: the training set must hold exactly n records.
        is_cyclic: all samples of a job depend on one another.
        rate_can_vary: q may be solved for, and vary over rounds.
        has_schedules: z and S may vary over rounds.
        rounds_apart: a record is in at most one of so many rounds in a row.
        weight: the sample's size over that of others of its epoch; its average gradient is multiplied by it.
    """

    steps: Count | None = None
    epochs: Positive | None = None

    weight = 1.0
    name: ClassVar[str]
    covers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    why: ClassVar[str] = ""
    written: ClassVar[Mapping[str, str]] = {}
    drawn_with: ClassVar[str | None] = None
    needs_exact_n: ClassVar[bool] = True
    is_cyclic: ClassVar[bool] = False
    rate_can_vary: ClassVar[bool] = False
    has_schedules: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        costs_as_parent = hasattr(cls, "name") and not ACCOUNTED & {*vars(cls)}
        if "name" not in vars(cls) and not costs_as_parent:
            cls.name = f"{cls.__module__}.{cls.__qualname__}"

    def __post_init__(self) -> None:
        check_ranges(self, signature(type(self)), vars(self))  # also of a class of your own

    @property
    @abstractmethod
    def q(self) -> float:
        """The rate at which a record enters a sample."""

    @property
    def rounds_apart(self) -> int:
        return 1

    @property
    def rounds_per_epoch(self) -> float:
        """1/q; an int if the samples of an epoch are drawn together."""
        return 1 / self.q

    @abstractmethod
    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        """Indices of the next sample from a partition of that size, or of several that are drawn together."""

    def partition(self, size: int, stream: RandomNumbers) -> list[Sequence[int]]:
        """Partitions of the records, which are sampled in turn as long as a job runs; by default one of all records."""
        return [range(size)]

    def at_round(self, t: int, n: int) -> "Policy":
        """The policy of round t, from 0, whose sample may be smaller than the others of its epoch."""
        return self

    @classmethod
    @abstractmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        """The releases that rounds count as, with their numbers: all rounds, or those that were drawn together."""

    def at_rate(self, n: int, records: int) -> Self:
        """The policy with the rate q that its arguments mean for n examples in so many records.

        Here the policy itself: its rate does not depend on n. `RatedPolicy` makes q of `expected_batch_size`.
        """
        return self

    def resolve(self, n: int, records: int | None = None) -> tuple[Self, int]:
        """The policy with its rate, without `steps` or `epochs`, and the number of rounds T.

        Args:
            n: published number of examples.
            records: published number of records; None: each example is one.

        Raises:
            ConfigError: q or T is not given exactly once, or the values do not go with n.
        """
        exactly_one("sampling", steps=self.steps, epochs=self.epochs)
        positive_integer("data.n", n)
        policy = replace(self.at_rate(n, records or n), steps=None, epochs=None)
        policy.check(records or n)
        return policy, self.length(policy)

    def length(self, policy: "Policy") -> int:
        """The number of rounds T that this policy's steps or epochs mean for `policy`, the same one with its rate."""
        length = int(self.steps or 0) if self.epochs is None else policy.rounds(self.epochs)
        if length > MOST_ROUNDS:
            raise ConfigError(f"sampling.steps or sampling.epochs gives {length} rounds; at most 2^31 are possible.")
        return length

    def rounds(self, epochs: float) -> int:
        """⌈E/q⌉, the number of rounds of E epochs. A quotient E/q that is an integer up to rounding counts as it."""
        exact = epochs * self.rounds_per_epoch
        nearest = round(exact)
        return nearest if math.isclose(exact, nearest, rel_tol=1e-9) else math.ceil(exact)

    def check(self, n: int) -> None:  # noqa: B027  # most policies can draw from any number
        """Raises ConfigError: the policy cannot draw from n records."""

    def __str__(self) -> str:
        own = "".join(f", {name}={getattr(self, name)}" for name in self.written)
        return f"{type(self).__name__}(q={self.q:.6g}{own})"


@dataclass(frozen=True, kw_only=True)
class RatedPolicy(Policy):
    """A policy whose rate q is given.

    Args:
        sampling_rate: q in (0, 1]; or `expected_batch_size` = q·n, in examples.
        steps: rounds T; or `epochs` E.

    Raises:
        ConfigError: a value is out of range.
    """

    sampling_rate: Rate | None = None
    expected_batch_size: Positive | None = None

    @property
    def q(self) -> float:
        assert self.sampling_rate is not None  # as `resolve` sees to
        return self.sampling_rate

    def at_rate(self, n: int, records: int) -> Self:
        exactly_one("sampling", sampling_rate=self.sampling_rate, expected_batch_size=self.expected_batch_size)
        if self.expected_batch_size is None:
            return self
        if self.expected_batch_size > n:
            raise ConfigError(
                f"sampling.expected_batch_size={self.expected_batch_size:g} exceeds data.n={n}, so q would exceed 1; "
                "give at most data.n."
            )
        return replace(self, sampling_rate=float(self.expected_batch_size) / n, expected_batch_size=None)


@dataclass(frozen=True)
class SamplingEvent:
    """A sample was drawn (arXiv 1812.06210, section 6).

    Attributes:
        policy: how, with its rate.
        n: the published number of records.
        first: the first round, from 0, of those that were drawn together; None: the sample was drawn by itself.
    """

    policy: Policy
    n: int
    first: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.n, 1):
            raise ConfigError(f"number of records n={self.n} must be an integer of at least 1.")
        if self.policy.drawn_with is not None and not _is_whole(self.first, 0):
            raise ConfigError(
                f"sampling {self.policy.drawn_with}={self.first} must be a whole number of at least 0 for the policy "
                f"{self.policy.name}."
            )
        if not (is_number(self.q) and 0 < self.q <= 1):
            raise ConfigError(f"the rate q={self.q} of the policy {self.policy.name} must lie in (0, 1].")
        self.policy.check(self.n)

    @property
    def q(self) -> float:
        return self.policy.q

    def facts(self) -> dict[str, Any]:
        """What a ledger says of it."""
        own = {there: getattr(self.policy, name) for name, there in self.policy.written.items()}
        together = {} if self.policy.drawn_with is None else {self.policy.drawn_with: self.first}
        return {"policy": self.policy.name, "q": float(self.q), "n": self.n, **own, **together}


def own_fields(policy: type[Policy]) -> set[str]:
    """The names of a policy's arguments."""
    return {field.name for field in fields(policy) if field.init}


def at_q(policy: Policy, q: float) -> Policy:
    """The policy at another rate q.

    Raises:
        ConfigError: its rate is not given, as of full batches.
    """
    if not isinstance(policy, RatedPolicy):
        raise ConfigError(f"sampling: the rate of {policy} cannot be chosen; choose sampling=poisson.")
    with made_from("sampling"):
        return replace(policy, sampling_rate=q, expected_batch_size=None)


def whole_batch(q: float, n: int, examples: float = 1.0) -> int:
    """q·n, which must be an integer number of records; `examples`: the average number in a record."""
    batch = round(q * n)
    if batch < 1 or not math.isclose(batch, q * n, rel_tol=1e-9):
        raise ConfigError(
            f"sampling.sampling_rate={q}: q·n = {q * n:.6g} must be a whole number of records; "
            f"sampling.expected_batch_size={max(1, batch) * examples:.12g} is the nearest."
        )
    return batch


def each_with_rate(q: float, size: int, stream: RandomNumbers) -> list[int]:
    """Each index with probability q, or less by under 2^-63."""
    if q == 1:
        return list(range(size))
    found: list[int] = stream.words(size).lt(int(q * 2**63)).nonzero().flatten().tolist()
    return found


def poisson_release(z: float, q: float, adjacency: str) -> Release:
    """The release of a round in which each record is with probability q, independently of the others."""
    return Release(z, q, "poisson_replaced" if q < 1 and adjacency == "replace_one" else "poisson")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53
