"""What a ledger consists of (McMahan et al. 2018, section 6): sampling events and sum query events, in rounds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dpexp.errors import ConfigError

LARGEST_Z = 1e8


def is_number(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


_COUNTS = {"microbatch": "k", "user": "most"}


def checked(record: Any) -> dict[str, Any] | None:
    """What a header says.

    Raises:
        ConfigError: it is not understood.
    """
    if record is None:
        return None
    kind = record.get("kind") if isinstance(record, dict) else None
    count = record.get(_COUNTS[kind]) if isinstance(kind, str) and kind in _COUNTS else None
    if count is None or not is_whole(count) or count < 1:
        raise ConfigError(f"the header's record {record!r} is not understood.")
    return dict(record)


def unit(record: Mapping[str, Any] | None) -> str:
    """In words. Only ledgers of the same unit may be composed: what a user's data may change is more than what an
    example may, and units of 8 are others than units of 4."""
    if record is None:
        return "record"
    if record["kind"] == "user":
        by = record.get("by")
        return "user" if by in (None, "user_of") else f"user ({by})"
    return f"unit of {record['k']} examples"


POLICIES = ("poisson", "truncated_poisson", "fixed_size", "shuffle", "all", "cyclic_poisson")
ADJACENCIES = ("add_remove", "replace_one", "replace_null")


@dataclass(frozen=True)
class SamplingEvent:
    """A sample was drawn (paper, section 6).

    Attributes:
        policy: `poisson` (each record independently at rate q), `truncated_poisson` (the same, then a random subset
            of at most `maximum`), `fixed_size` (q·n of n, without replacement), `shuffle` (a batch of a partition of
            the records into 1/q equal ones), `all`, or `cyclic_poisson` (each record is in one of `parts` parts, drawn
            at random, whose turn it is every so many rounds; then each of its records independently at rate q·parts).
        q: the rate at which a record is included.
        n: the number of records, published.
        maximum: of `truncated_poisson` alone.
        epoch: of `shuffle` alone; samples of the same epoch are disjoint.
        parts, block: of `cyclic_poisson` alone; rounds of the same block are of the same parts, one after the other.
    """

    policy: str
    q: float
    n: int
    maximum: int | None = None
    epoch: int | None = None
    parts: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"sampling policy {self.policy!r} is unknown; known: {', '.join(POLICIES)}.")
        if not (is_number(self.q) and 0 < self.q <= 1):
            raise ConfigError(f"sampling rate q={self.q} must lie in (0, 1].")
        if not (is_whole(self.n) and self.n >= 1):
            raise ConfigError(f"number of records n={self.n} must be a whole number of at least 1.")
        if self.policy == "all" and self.q != 1:
            raise ConfigError(f"sampling policy all includes every record, so q={self.q} must be 1.")
        if self.policy in ("fixed_size", "shuffle"):
            batch = self.q * self.n
            if round(batch) < 1 or not math.isclose(batch, round(batch), rel_tol=1e-9):
                raise ConfigError(f"sampling policy {self.policy}: q·n={batch} must be a whole number of records.")
        for name, (owner, least) in _OWN.items():
            value = getattr(self, name)
            if (value is not None) != (self.policy == owner):
                raise ConfigError(f"sampling policy {self.policy}: {name}={value}, which is for {owner} alone.")
            if value is not None and not (is_whole(value) and value >= least):
                raise ConfigError(f"sampling {name}={value} must be a whole number of at least {least}.")
        if self.parts is not None:
            rate_in_part(self.q, self.parts)

    @property
    def rate(self) -> float:
        """At which a record is included in a round that it can be in."""
        return self.q if self.parts is None else rate_in_part(self.q, self.parts)


# What some policies have, and the least that it may be.
_OWN = {
    "maximum": ("truncated_poisson", 1), "epoch": ("shuffle", 0), "parts": ("cyclic_poisson", 1),
    "block": ("cyclic_poisson", 0),
}  # fmt: skip


def rate_in_part(q: float, parts: int) -> float:
    """q·b, at which each record of the part whose turn it is is sampled; 1 if it is that but for rounding.

    Raises:
        ConfigError: it is above 1.
    """
    rate = q * parts
    if rate > 1 + 1e-9:
        raise ConfigError(
            f"sampling.partitions={parts} at q={q:.6g}: each record of a part would be sampled at rate {rate:.6g}, "
            f"which "
            f"must be at most 1; choose at most {max(1, math.floor((1 + 1e-9) / q))} parts."
        )
    return 1.0 if rate > 1 - 1e-9 else rate


@dataclass(frozen=True)
class SumQueryEvent:
    """A Gaussian sum query with privacy tuple (S, σ̃): vectors of L2 norm at most S were summed and noise of
    standard deviation σ̃ was added to the sum (paper, sections 2 and 6).

    Attributes:
        bands: c of correlated noise: σ̃ y_t was added, with y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0 and Z_t of standard
            deviation 1. None: independent noise, c = (1,).
    """

    group: str
    S: float
    sigma: float
    bands: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            raise ConfigError(f"group {self.group!r} must be a name.")
        for name, value in (("S", self.S), ("sigma", self.sigma)):
            if not (is_number(value) and value > 0):
                raise ConfigError(f"group {self.group!r}: {name}={value} must be a finite number above 0.")
        if not self.sigma / LARGEST_Z <= self.S <= self.sigma * LARGEST_Z:
            raise ConfigError(
                f"group {self.group!r}: S/sigma={self.S}/{self.sigma} must lie between 1e-8 and 1e8, beyond which "
                "accounting loses its digits."
            )
        if self.bands is not None:
            made = isinstance(self.bands, tuple) and all(map(is_number, self.bands))
            if not (made and self.bands and self.bands[0] != 0 and 1e-8 <= math.hypot(*self.bands) <= 1e8):
                raise ConfigError(
                    f"group {self.group!r}: bands={self.bands!r} must be numbers, the first of which is not 0, of a "
                    "norm between 1e-8 and 1e8."
                )

    @property
    def noise(self) -> str:
        return "gaussian" if self.bands is None else "banded gaussian"

    @property
    def squared_ratio(self) -> float:
        """(S/σ̃)² ‖c‖²: of what a record adds to Z (see `dpexp.accounting.releases`)."""
        return (self.S / self.sigma) ** 2 * math.fsum(c**2 for c in self.bands or (1.0,))


SMOOTHING = 64  # t²


@dataclass(frozen=True)
class DiscreteSumQueryEvent:
    """A sum query on whole numbers: vectors of whole numbers with squared L2 norm at most S² were summed, and to each
    coordinate of the sum a discrete Gaussian was added, N with P(N = k) ∝ e^(-k²/2σ²) (Canonne, Kamath & Steinke 2020,
    arXiv 2004.00010).

    It costs no more than the Gaussian sum query with the same S² and σ² - t², for any t² < σ², whatever the sampling,
    the adjacency, the number d of coordinates and the accountant, but for a factor of e^(±dη) on all probabilities
    with η = 2 artanh ρ and ρ = 2e^(-2π²t²) / (1 - e^(-6π²t²)). Here t² = 64, for which η < 10^-547: no ε or δ in
    double precision could tell.

    *Proof.* Let u, of whole numbers, be the sum. A Gaussian sum query would release X = u + N(0, σ² - t²); whoever has
    it may draw Y from P(Y = k | X) = e^(-(k-X)²/2t²) / Z(X), which does not depend on u and so costs nothing. By
    Poisson's summation Z(X) = Σ_k e^(-(k-X)²/2t²) = √(2π) t (1 + 2 Σ_{m>=1} e^(-2π²t²m²) cos 2πmX), which is √(2π) t
    within a factor of 1 ± ρ. Were it just that, P(Y = k) would be ∝ ∫ e^(-(x-u)²/2(σ²-t²)) e^(-(k-x)²/2t²) dx, hence
    ∝ e^(-(k-u)²/2σ²), and Y - u the discrete Gaussian. So it is within a factor of (1 ± ρ)/(1 ∓ ρ), and coordinates,
    being independent, multiply. The bound is one on probabilities for given sums: mixing over samples leaves it as it
    is, and rounds multiply, however later ones depend on earlier ones. If all rounds together release M numbers,
    what is (ε, δ)-DP with the Gaussian is (ε + 2Mη, e^(Mη) δ)-DP with the discrete one.

    Attributes:
        grid: the unit of these whole numbers in the group's scaled vectors, to read S and σ̃ by.
        S2, sigma2: S² and σ², in units of grid².
    """

    group: str
    grid: float
    S2: int
    sigma2: int
    noise: ClassVar[str] = "discrete gaussian"

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            raise ConfigError(f"group {self.group!r} must be a name.")
        if not (is_number(self.grid) and self.grid > 0):
            raise ConfigError(f"group {self.group!r}: grid={self.grid} must be a finite number above 0.")
        for name, value, least in (("S2", self.S2, 1), ("sigma2", self.sigma2, 2 * SMOOTHING)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"group {self.group!r}: {name}={value!r} must be a whole number of at least {least}.")
        if max(self.S2, self.sigma2) > min(self.S2, self.sigma2) * int(LARGEST_Z) ** 2:
            raise ConfigError(
                f"group {self.group!r}: S2/sigma2={self.S2}/{self.sigma2} must lie between 1e-16 and 1e16, beyond "
                "which accounting loses its digits."
            )

    @property
    def squared_ratio(self) -> float:
        """(S/σ̃)² of the Gaussian sum query that costs as much."""
        return self.S2 / (self.sigma2 - SMOOTHING)


LAWS = ("gaussian", "laplace")


@dataclass(frozen=True)
class OneTimeQueryEvent:
    """A query of all records was answered with noise on each coordinate.

    Attributes:
        query: its name.
        noise: `gaussian`, of standard deviation `scale`; or `laplace`, with density e^(-|x|/scale)/(2 scale).
        S: how far the answer moves, in L2 norm (`gaussian`) or L1 norm (`laplace`), when a record is added, removed, or
            nulled, which then contributes zero.
        S_replaced: the same when another record takes its place; at most 2S.
    """

    query: str
    noise: str
    S: float
    S_replaced: float
    scale: float

    def __post_init__(self) -> None:
        if not isinstance(self.query, str):
            raise ConfigError(f"query {self.query!r} must be a name.")
        if self.noise not in LAWS:
            raise ConfigError(f"query {self.query!r}: noise={self.noise!r} is unknown; known: {', '.join(LAWS)}.")
        for name in ("S", "S_replaced", "scale"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0):
                raise ConfigError(f"query {self.query!r}: {name}={value} must be a finite number above 0.")
        if self.S_replaced > 2 * self.S:
            raise ConfigError(f"query {self.query!r}: S_replaced={self.S_replaced} is above 2S={2 * self.S}.")
        if not all(self.scale / LARGEST_Z <= S <= self.scale * LARGEST_Z for S in (self.S, self.S_replaced)):
            raise ConfigError(
                f"query {self.query!r}: S/scale={self.S}/{self.scale} must lie between 1e-8 and 1e8, beyond which "
                "accounting loses its digits."
            )

    def ratio(self, adjacency: str) -> float:
        """Sensitivity over scale: of `gaussian` its μ = 1/z, of `laplace` its ε.

        Raises:
            ConfigError: the adjacency is unknown.
        """
        if adjacency not in ADJACENCIES:
            raise ConfigError(f"adjacency={adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
        return (self.S_replaced if adjacency == "replace_one" else self.S) / self.scale


@dataclass(frozen=True)
class ParallelQueryEvent:
    """Queries of disjoint parts of the records were answered, one of each part: parallel composition.

    Whoever writes this event has split the records by a function of one record, so that no record is in two parts, and
    none that is added or removed moves another. Then one part alone changes, and all of them together cost what the
    worst does (McSherry 2009, theorem 4). A record that is replaced may leave one part for another, and both change:
    together they are one query whose L2 sensitivities over scale add up in squares (`gaussian`), or whose L1
    sensitivities over scale add up (`laplace`).

    Attributes:
        query: the name of all together; parts_by: what a record's part is a function of.
        queries: all with noise of one law, without which there is no worst. Queries that nobody can tell to be of
            disjoint parts are events of their own, and cost their sum.
    """

    query: str
    parts_by: str
    queries: tuple[OneTimeQueryEvent, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.query, str):
            raise ConfigError(f"query {self.query!r} must be a name.")
        if not isinstance(self.parts_by, str):
            raise ConfigError(f"parts_by={self.parts_by!r} must say what a record's part is a function of.")
        if not self.queries or len({query.noise for query in self.queries}) != 1:
            raise ConfigError(
                f"query {self.query!r}: queries of disjoint parts must all have Laplace noise, or all Gaussian; "
                "of others no one is the worst, so give each kind an event of its own."
            )

    @property
    def noise(self) -> str:
        return self.queries[0].noise

    def ratio(self, adjacency: str) -> float:
        """As of the one query that costs as much."""
        worst = max(query.ratio(adjacency) for query in self.queries)
        if adjacency != "replace_one" or len(self.queries) == 1:
            return worst
        two = sorted(query.ratio("add_remove") for query in self.queries)[-2:]
        return max(worst, sum(two) if self.noise == "laplace" else math.hypot(*two))


def parts(query: str, parts_by: str, queries: Sequence[dict[str, Any]]) -> ParallelQueryEvent:
    """The same from what a line of a ledger says."""
    return ParallelQueryEvent(query, parts_by, tuple(OneTimeQueryEvent(**part) for part in queries))


Query = SumQueryEvent | DiscreteSumQueryEvent | OneTimeQueryEvent | ParallelQueryEvent


@dataclass(frozen=True)
class Round:
    """One sampling event and the sum queries that were answered on its sample; or, of all records, one query that is
    answered once."""

    sampling: SamplingEvent
    queries: tuple[Query, ...]

    def __post_init__(self) -> None:
        if self.one_time_query is not None and (len(self.queries) > 1 or self.sampling.policy != "all"):
            raise ConfigError(
                f"query {self.one_time_query.query!r} must be alone in its round, and of all records; it is one of "
                f"{len(self.queries)} on a sample by {self.sampling.policy}."
            )

    @property
    def one_time_query(self) -> OneTimeQueryEvent | ParallelQueryEvent | None:
        return next(
            (query for query in self.queries if isinstance(query, OneTimeQueryEvent | ParallelQueryEvent)), None
        )

    @property
    def bands(self) -> int:
        """b, of whichever query has the most."""
        return max(len(query.bands or (1.0,)) if isinstance(query, SumQueryEvent) else 1 for query in self.queries)

    @property
    def noise_multiplier(self) -> float:
        """z = (Σ_g (S_g/σ̃_g)²‖c_g‖²)^(-1/2): a round of sum queries as one Gaussian sum query (paper, equation 1)."""
        return 1 / math.sqrt(sum(query.squared_ratio for query in self.queries))  # type: ignore[union-attr, misc]


@dataclass(frozen=True)
class Ledger:
    """Distinct rounds with how often each happened.

    Attributes:
        truncated: the file ends early, so that rounds may be missing.
        lost: why lines are known to be missing, if they are; then it is `truncated` too.
        untold: what nothing tells about its end, of a ledger that was read and seems whole.
        exposed: why what the rounds cost does not cover what their run shows, if it does not.
        record: what is added, removed or replaced, as in the header; None: one example.
    """

    adjacency: str
    rounds: Mapping[Round, int]
    incomplete: bool = False
    not_private_reason: str | None = field(default=None, compare=False)
    record: Mapping[str, Any] | None = None
    lost: str | None = field(default=None, compare=False)
    untold: str | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return sum(self.rounds.values())

    @property
    def unit(self) -> str:
        """Whose data is added, removed or replaced, in words."""
        return unit(self.record)

    @property
    def training_rounds(self) -> int:
        """How many of them are rounds of training, and no queries that were answered once."""
        return sum(count for round_, count in self.rounds.items() if round_.one_time_query is None)


def joined(ledgers: Sequence[Ledger]) -> Ledger:
    """What several runs on the same data cost together: their rounds, one run after the other.

    Raises:
        ConfigError: they are stated for different adjacencies, or privacy units.
    """
    adjacencies = sorted({ledger.adjacency for ledger in ledgers})
    if len(adjacencies) != 1:
        raise ConfigError(f"ledgers for different adjacencies ({', '.join(adjacencies)}) cannot be composed.")
    units = sorted({ledger.unit for ledger in ledgers})
    if len(units) != 1:
        raise ConfigError(f"ledgers about different privacy units ({', '.join(units)}) cannot be composed.")
    rounds: Counter[Round] = Counter()
    begun = 0
    for ledger in ledgers:
        for round_, count in ledger.rounds.items():
            for name in ("epoch", "block"):  # of different runs have nothing in common
                number = getattr(round_.sampling, name)
                if number is not None:
                    round_ = replace(round_, sampling=replace(round_.sampling, **{name: number + begun}))
            rounds[round_] += count
        begun = 1 + max((r.sampling.epoch or r.sampling.block or 0 for r in rounds), default=0)
    exposed = next((ledger.not_private_reason for ledger in ledgers if ledger.not_private_reason is not None), None)
    lost = next((ledger.lost for ledger in ledgers if ledger.lost is not None), None)
    truncated = any(ledger.incomplete for ledger in ledgers)
    return Ledger(adjacencies[0], dict(rounds), truncated, exposed, ledgers[0].record, lost)
