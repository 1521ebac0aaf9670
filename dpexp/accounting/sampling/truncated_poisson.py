"""Truncated Poisson sampling: independent samples of records, cut to a largest size.

*Formula.* Each record enters a sample with probability q. Of a sample above `max_batch_size` a uniformly random subset
of that size is kept.

| Case | What happens |
|---|---|
| a sample of at most `max_batch_size` records, or an empty one | it is used as it is |
| a larger sample | records leave it by chance; whether one stays depends on how many others there are |
| the training set does not hold exactly n records | refused: the bound is stated for n |
| a record is added or removed, or replaced by another | not covered; only nulling is |

Read next: `poisson`; `dpexp.accounting.dominating_pairs` (`TruncatedPoissonPair`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpexp.accounting.sampling.policy import RandomNumbers, RatedPolicy, Release, Released, each_with_rate
from dpexp.errors import Count, checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(RatedPolicy):
    """Poisson, but a sample above `max_batch_size` is cut to a random subset of that size (arXiv 2508.15089).

    A maximum of q·n plus six times its square root is hardly ever reached.

    Examples:
        >>> from dpexp import TruncatedPoisson
        >>> policy, rounds = TruncatedPoisson(expected_batch_size=50, max_batch_size=92, epochs=3).resolve(n=1000)
        >>> policy.q, policy.max_batch_size, rounds
        (0.05, 92, 60)

    Args:
        max_batch_size: the largest sample, in records.
    """

    max_batch_size: Count

    name = "truncated_poisson"
    covers: ClassVar = {"replace_null": ("pld",)}
    why = "which records are cut off depends on how many there are, so n must be the same on both sides"
    written: ClassVar = {"max_batch_size": "maximum"}
    rate_can_vary = True

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        sample = each_with_rate(self.q, size, stream)
        kept = stream.permutation(len(sample))[: self.max_batch_size]
        return [[sample[k] for k in kept]]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        for event, z, count, _ in rounds:
            yield Release(z, event.q, cls.name, event.n, event.facts()["maximum"]), count
