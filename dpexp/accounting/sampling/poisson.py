"""Independent samples of records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpexp.accounting.sampling.policy import (
    ALL_ACCOUNTANTS,
    RandomNumbers,
    RatedPolicy,
    Release,
    Released,
    each_with_rate,
    poisson_release,
)
from dpexp.errors import checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class Poisson(RatedPolicy):
    """Each record enters a sample independently with probability q (paper, section 5: i.i.d. samples).

    Removing a record from such a sample and nulling it are the same pair of distributions.

    >>> from dpexp import Poisson
    >>> policy, rounds = Poisson(expected_batch_size=50, epochs=3).resolve(n=1000)
    >>> policy.q, rounds
    (0.05, 60)
    >>> policy.covers["add_remove"]
    ('pld', 'rdp', 'moments', 'strong', 'basic')
    """

    name = "poisson"
    covers: ClassVar = {"add_remove": ALL_ACCOUNTANTS, "replace_null": ALL_ACCOUNTANTS, "replace_one": ("pld",)}
    needs_exact_n = False
    rate_can_vary = True

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        return [each_with_rate(self.q, size, stream)]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        for event, z, count, _ in rounds:
            yield poisson_release(z, event.q, adjacency), count
