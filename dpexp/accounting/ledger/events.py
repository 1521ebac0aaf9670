"""What a ledger consists of (McMahan et al. 2018, section 6): sampling events and sum query events, in rounds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpexp.accounting.ledger.numbers import LARGEST_Z, is_number, is_whole
from dpexp.accounting.ledger.one_off import PartsEvent, QueryEvent
from dpexp.accounting.ledger.units import unit
from dpexp.errors import ConfigError

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
            f"sampling.parts={parts} at q={q:.6g}: each record of a part would be sampled at rate {rate:.6g}, which "
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
    def squared_ratio(self) -> float:
        """(S/σ̃)² ‖c‖²: of what a record adds to Z (see `dpexp.accounting.blocks`)."""
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


Query = SumQueryEvent | DiscreteSumQueryEvent | QueryEvent | PartsEvent


@dataclass(frozen=True)
class Round:
    """One sampling event and the sum queries that were answered on its sample; or, of all records, one query that is
    answered once."""

    sampling: SamplingEvent
    queries: tuple[Query, ...]

    def __post_init__(self) -> None:
        if self.one_off is not None and (len(self.queries) > 1 or self.sampling.policy != "all"):
            raise ConfigError(
                f"query {self.one_off.query!r} must be alone in its round, and of all records; it is one of "
                f"{len(self.queries)} on a sample by {self.sampling.policy}."
            )

    @property
    def one_off(self) -> QueryEvent | PartsEvent | None:
        return next((query for query in self.queries if isinstance(query, QueryEvent | PartsEvent)), None)

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
        exposed: why what the rounds cost does not cover what their run shows, if it does not.
        record: what is added, removed or replaced, as in the header; None: one example.
    """

    adjacency: str
    rounds: Mapping[Round, int]
    truncated: bool = False
    exposed: str | None = field(default=None, compare=False)
    record: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return sum(self.rounds.values())

    @property
    def unit(self) -> str:
        """Whose data is added, removed or replaced, in words."""
        return unit(self.record)

    @property
    def trained(self) -> int:
        """How many of them are rounds of training, and no queries that were answered once."""
        return sum(count for round_, count in self.rounds.items() if round_.one_off is None)


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
    exposed = next((ledger.exposed for ledger in ledgers if ledger.exposed is not None), None)
    return Ledger(adjacencies[0], dict(rounds), any(ledger.truncated for ledger in ledgers), exposed, ledgers[0].record)
