"""Queries of all records that are answered once, such as before training: by the Laplace or the Gaussian mechanism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.accounting.ledger.numbers import LARGEST_Z, is_number
from dpexp.errors import ConfigError

LAWS = ("gaussian", "laplace")


@dataclass(frozen=True)
class QueryEvent:
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
        """Sensitivity over scale: of `gaussian` its μ = 1/z, of `laplace` its ε."""
        return (self.S_replaced if adjacency == "replace_one" else self.S) / self.scale


@dataclass(frozen=True)
class PartsEvent:
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
    queries: tuple[QueryEvent, ...]

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


def parts(query: str, parts_by: str, queries: Sequence[dict[str, Any]]) -> PartsEvent:
    """The same from what a line of a ledger says."""
    return PartsEvent(query, parts_by, tuple(QueryEvent(**part) for part in queries))
