"""The contents of a ledger (arXiv 1812.06210, section 6): sampling events and query events, grouped in rounds.

    Ledger                     distinct rounds, and how often each happened
      Round                    what one round released of one sample
        SamplingEvent          how the sample was drawn (`dpexp.accounting.sampling.policy`)
        SumQueryEvent, …       one for each group that was released: its S and σ̃, and the bands c of its noise
      Round
        SamplingEvent          all records
        OneTimeQueryEvent      a query that is answered once, such as before training

An event is a frozen dataclass of public numbers: nothing in it depends on the sample that was drawn, nor on data.

*Formula.* A round of sum queries is accounted as one Gaussian query with the noise multiplier z of `Round.z`:

    z = (Σ_g (s S_g/σ̃_g)² ‖c_g‖²)^(-1/2)   (arXiv 1812.06210, equation 1),

where s is 1, or 2 if a record is replaced by another (`SENSITIVITY`). A one-time query has both sensitivities itself;
one with Laplace noise is accounted as the ε-DP mechanism that it is.

| Case | What happens |
|---|---|
| the sample was empty | the round counts as any other: its noise was released |
| a group is not released in a round | the round has no query event of it, and a larger z |
| a ratio S/σ̃ below 1e-8 or above 1e8 (`LARGEST_RATIO`) | ConfigError |
| a one-time query beside another query, or on a sample | ConfigError |
| no rounds | the ledger is false, and costs ε = 0 |

Read next: `dpexp.accounting.releases` (rounds as an accountant sees them), `dpexp.accounting.accountants`. The
docstring of `dpexp.accounting.ledger` describes the file.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from dpexp.accounting.coverage import SENSITIVITY
from dpexp.accounting.sampling.policy import SamplingEvent
from dpexp.errors import ConfigError

LARGEST_RATIO = 1e8  # of a sensitivity to its noise, and of the noise to the sensitivity


def is_number(value: object) -> bool:
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{kind} {name!r} must be a name.")


def _check_positive(owner: str, **values: object) -> None:
    for name, value in values.items():
        if not (is_number(value) and value > 0):  # type: ignore[operator]
            raise ConfigError(f"{owner}: {name}={value} must be a finite number above 0.")


def _check_ratio(owner: str, name: str, S: float, scale: float) -> None:
    if not scale / LARGEST_RATIO <= S <= scale * LARGEST_RATIO:
        raise ConfigError(
            f"{owner}: {name}={S}/{scale} must lie between 1e-8 and 1e8, beyond which accounting loses its digits."
        )


def neighbours(adjacency: str, unit: str = "record") -> str:
    """The relation of adjacent data sets, in words."""
    return {
        "add_remove": f"for adding or removing one {unit}",
        "replace_one": f"for replacing one {unit} by another",
        "replace_null": f"for replacing one {unit} by the null {unit}",
    }[adjacency]


def unit(record: Mapping[str, Any] | None) -> str:
    """The privacy unit in words. Only ledgers of the same unit may be composed."""
    if record is None:
        return "record"
    if record["kind"] == "user":
        by = record.get("by")
        return "user" if by in (None, "user_of") else f"user ({by})"
    return f"unit of {record['k']} examples"


ADJACENCIES = ("add_remove", "replace_one", "replace_null")


@dataclass(frozen=True)
class SumQueryEvent:
    """A Gaussian sum query with the privacy tuple (S, σ̃) (arXiv 1812.06210, sections 2 and 6).

    Vectors of L2 norm at most S were summed, and noise of standard deviation σ̃ was added to the sum. (Under joint
    clipping both are in units of the scales α_j.)

    Examples:
        >>> from dpexp.accounting.ledger.events import SumQueryEvent
        >>> query = SumQueryEvent("conv", S=0.5, sigma=1.0)
        >>> query.squared_ratio("add_remove"), query.squared_ratio("replace_one")
        (0.25, 1.0)

    Attributes:
        group: the name of the group of vectors.
        S: the clipping norm.
        sigma: σ̃.
        bands: the coefficients c of correlated noise: σ̃ y_t was added, with y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0 and
            independent Z_t ~ N(0, I). None: independent noise, c = (1,).
    """

    group: str
    S: float
    sigma: float
    bands: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        owner = f"group {self.group!r}"
        _check_name("group", self.group)
        _check_positive(owner, S=self.S, sigma=self.sigma)
        _check_ratio(owner, "S/sigma", self.S, self.sigma)
        if self.bands is not None:
            numbers = isinstance(self.bands, tuple) and all(map(is_number, self.bands))
            has_norm = numbers and 1 / LARGEST_RATIO <= math.hypot(*self.bands) <= LARGEST_RATIO
            if not (has_norm and self.bands and self.bands[0] != 0):
                raise ConfigError(
                    f"{owner}: bands={self.bands!r} must be numbers with a norm between 1e-8 and 1e8, and the first "
                    "must not be 0."
                )

    @property
    def name(self) -> str:
        return self.group

    @property
    def noise(self) -> str:
        return "gaussian" if self.bands is None else "banded gaussian"

    def squared_ratio(self, adjacency: str) -> float:
        """(S/σ̃)² ‖c‖²: the squared norm of what a record adds to the standard normal Z of all rounds.

        A record that is replaced moves it twice as far, so that the square is four times as large.
        """
        squared_norm = math.fsum(c**2 for c in self.bands or (1.0,))
        return SENSITIVITY[adjacency] ** 2 * (self.S / self.sigma) ** 2 * squared_norm

    def noisier(self, factor: float) -> Self:
        """The same query with so much more noise."""
        return replace(self, sigma=factor * self.sigma)


LAWS = ("gaussian", "laplace")


@dataclass(frozen=True)
class OneTimeQueryEvent:
    """A query on all records, answered once with noise on each coordinate, such as before training.

    Examples:
        >>> from dpexp.accounting.ledger.events import OneTimeQueryEvent
        >>> query = OneTimeQueryEvent("histogram", "laplace", S=1.0, S_replaced=2.0, scale=10.0)
        >>> query.squared_ratio("add_remove")  # of ε = S/scale = 0.1
        0.010000000000000002

    Attributes:
        query: its name.
        noise: `gaussian`, of standard deviation `scale`; or `laplace`, with density e^(-|x|/scale)/(2 scale).
        S: the sensitivity, in L2 norm (`gaussian`) or L1 norm (`laplace`), if a record is added, removed or nulled.
        S_replaced: the sensitivity if a record is replaced with another; at most 2S.
    """

    bands: ClassVar[None] = None
    query: str
    noise: str
    S: float
    S_replaced: float
    scale: float

    def __post_init__(self) -> None:
        owner = f"query {self.query!r}"
        _check_name("query", self.query)
        if self.noise not in LAWS:
            raise ConfigError(f"{owner}: noise={self.noise!r} is unknown; known: {', '.join(LAWS)}.")
        _check_positive(owner, S=self.S, S_replaced=self.S_replaced, scale=self.scale)
        if self.S_replaced > 2 * self.S:
            raise ConfigError(f"{owner}: S_replaced={self.S_replaced} is above 2S={2 * self.S}.")
        _check_ratio(owner, "S/scale", self.S, self.scale)
        _check_ratio(owner, "S_replaced/scale", self.S_replaced, self.scale)

    def __str__(self) -> str:
        symbol = "σ" if self.noise == "gaussian" else "Laplace noise b"
        return f"{self.query}: S = {self.S:.4g}, {symbol} = {self.scale:.4g}"

    @property
    def name(self) -> str:
        return self.query

    def squared_ratio(self, adjacency: str) -> float:
        """(sensitivity/scale)².

        Its root is the μ of Gaussian DP for Gaussian noise, and the ε of pure DP for Laplace noise.
        """
        return ((self.S_replaced if adjacency == "replace_one" else self.S) / self.scale) ** 2

    def noisier(self, factor: float) -> Self:
        """The same query with so much more noise."""
        return replace(self, scale=factor * self.scale)


Query = SumQueryEvent | OneTimeQueryEvent


@dataclass(frozen=True)
class Round:
    """What one round released: one sampling event, and the queries on its sample.

    The queries are sum queries; or the only one is a query on all records that is answered once.

    Examples:
        >>> from dpexp import Poisson
        >>> from dpexp.accounting.ledger.events import Round, SumQueryEvent
        >>> from dpexp.accounting.sampling import event_of
        >>> queries = SumQueryEvent("conv", S=0.6, sigma=1.0), SumQueryEvent("fc", S=0.8, sigma=1.0)
        >>> Round(event_of(Poisson(sampling_rate=0.01), n=1000), queries).z("add_remove")
        1.0
    """

    sampling: SamplingEvent
    queries: tuple[Query, ...]

    def __post_init__(self) -> None:
        once = next((query for query in self.queries if isinstance(query, OneTimeQueryEvent)), None)
        if once is not None and (len(self.queries) > 1 or self.sampling.policy.name != "all"):
            raise ConfigError(
                f"query {once.name!r} must be the only query of its round, and on all records; the round has "
                f"{len(self.queries)} queries on a sample by {self.sampling.policy.name}."
            )

    def facts(self) -> dict[str, Any]:
        """What a ledger says of it."""
        queries = [{name: value for name, value in vars(query).items() if value is not None} for query in self.queries]
        return {"sampling": self.sampling.facts(), "queries": queries}

    @property
    def bands(self) -> int:
        """The largest number of bands of any of its queries."""
        return max(len(query.bands or (1.0,)) for query in self.queries)

    @property
    def correlation(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """The coefficients of noise that is correlated over rounds, by group; sorted."""
        return tuple(sorted((query.name, query.bands) for query in self.queries if query.bands is not None))

    def z(self, adjacency: str) -> float:
        """Noise over sensitivity of the round as one query: the formula above.

        *Why:* scaled by its noise, the sums of all groups are one standard normal vector, whose mean a record moves by
        at most the root of the sum of `squared_ratio`.
        """
        return 1 / math.sqrt(sum(query.squared_ratio(adjacency) for query in self.queries))


@dataclass(frozen=True)
class Part:
    """The records of a data set with low <= hash < high, where a public `rule` gives each record one hash in [0, 1)."""

    rule: str
    low: float
    high: float

    def __post_init__(self) -> None:
        are_numbers = is_number(self.low) and is_number(self.high)
        if not (isinstance(self.rule, str) and are_numbers and 0 <= self.low < self.high <= 1):
            raise ConfigError(f"data.part: low={self.low} and high={self.high} must be numbers, 0 <= low < high <= 1.")

    def __str__(self) -> str:
        return f"part [{self.low}, {self.high}) by {self.rule}"


@dataclass(frozen=True)
class Ledger:
    """Distinct rounds and how often each happened.

    Examples:
        >>> from dpexp import Ledger, Poisson
        >>> from dpexp.accounting.ledger.events import Round, SumQueryEvent
        >>> from dpexp.accounting.sampling import event_of
        >>> round_ = Round(event_of(Poisson(sampling_rate=0.01), n=1000), (SumQueryEvent("all", S=1.0, sigma=1.1),))
        >>> len(Ledger("add_remove", {round_: 300}))
        300

    Attributes:
        adjacency: one of `ADJACENCIES`.
        rounds: how often each distinct round happened.
        incomplete: the file has no closing line at its end, or lines are missing: rounds may be missing.
        not_private_reason: why (ε, δ) of the rounds does not cover all that the run shows; None: it does.
        record: the privacy unit, as in the header; None: one example.
        lost: why lines are known to be missing; then the ledger is `incomplete` too. None: none are known to be.
        unverified: the reason why the file may have been cut or restored although it reads as complete, such as that no
            ledger.end.json is next to it. None: the ledger is incomplete, or was not read from a file.
        part: the only records that the rounds used; None: all of the data set.
    """

    adjacency: str
    rounds: Mapping[Round, int]
    incomplete: bool = False
    not_private_reason: str | None = field(default=None, compare=False)
    record: Mapping[str, Any] | None = None
    lost: str | None = field(default=None, compare=False)
    unverified: str | None = field(default=None, compare=False)
    part: Part | None = None

    def __len__(self) -> int:
        """The number of rounds; a ledger with none is false."""
        return sum(self.rounds.values())

    @property
    def unit(self) -> str:
        """The privacy unit in words."""
        return unit(self.record)

    @property
    def training(self) -> dict[Round, int]:
        """The distinct rounds of training, and how often each happened: all but the queries that are answered once."""
        return {round_: k for round_, k in self.rounds.items() if not isinstance(round_.queries[0], OneTimeQueryEvent)}

    @property
    def training_rounds(self) -> int:
        """The number of training rounds."""
        return sum(self.training.values())


def check_same(ledgers: Sequence[Ledger], subject: str, verb: str) -> None:
    """Refuses ledgers of different adjacencies or privacy units."""
    for name, kinds in (
        ("adjacencies", {ledger.adjacency for ledger in ledgers}),
        ("privacy units", {ledger.unit for ledger in ledgers}),
    ):
        if len(kinds) > 1:
            raise ConfigError(f"{subject} for different {name} ({', '.join(sorted(kinds))}) cannot be {verb}.")


def concatenate(ledgers: Sequence[Ledger]) -> Ledger:
    """One ledger with the rounds of several runs on the same data.

    Rounds whose samples were drawn together, such as an epoch of a shuffle, have the number of their first round in
    common. Each run counts from 0, so these numbers are moved: otherwise epochs of different runs, whose samples are
    unrelated, would be accounted as one epoch. `unverified` is left out, since it speaks of the end of one file.

    Examples:
        >>> from dpexp import Ledger
        >>> from dpexp.accounting.ledger.events import concatenate
        >>> len(concatenate([Ledger("add_remove", {}), Ledger("add_remove", {})]))
        0

    Raises:
        ConfigError: the ledgers have different adjacencies or privacy units.
    """
    check_same(ledgers, "ledgers", "composed")
    rounds: Counter[Round] = Counter()
    offset = 0
    for ledger in ledgers:
        for round_, count in ledger.rounds.items():
            first = round_.sampling.first
            if first is not None:
                round_ = replace(round_, sampling=replace(round_.sampling, first=first + offset))
            rounds[round_] += count
        offset = 1 + max((round_.sampling.first or 0 for round_ in rounds), default=0)
    return Ledger(
        ledgers[0].adjacency,
        dict(rounds),
        any(ledger.incomplete for ledger in ledgers),
        next((ledger.not_private_reason for ledger in ledgers if ledger.not_private_reason is not None), None),
        ledgers[0].record,
        next((ledger.lost for ledger in ledgers if ledger.lost is not None), None),
        part=ledgers[0].part if len({ledger.part for ledger in ledgers}) == 1 else None,
    )
