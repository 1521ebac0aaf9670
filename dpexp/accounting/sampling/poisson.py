"""Poisson sampling: independent samples of records.

*Formula.* Each record enters each sample with probability q, independently of all else. A round counts as one
Poisson-sampled Gaussian release (`policy.poisson_release`).

| Case | What happens |
|---|---|
| empty sample | a round as any other, whose noise is released |
| q = 1 | every record is drawn, and sampling does not amplify |
| q is not a multiple of 2^-63 | the rate is smaller by less than 2^-63, never larger |
| the training set does not hold exactly n records | allowed: each record is drawn with probability q all the same |
| a record is replaced by another | accountant `pld` alone |

Read next: `truncated_poisson`, `cyclic_poisson`; `dpexp.accounting.dominating_pairs` (`PoissonPair`).
"""

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
    """Each record enters a sample independently with probability q (arXiv 1812.06210, section 5: i.i.d. samples).

    Removing a record from such a sample and nulling it are the same pair of distributions.

    Examples:
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
