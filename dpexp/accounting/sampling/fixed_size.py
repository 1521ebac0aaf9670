"""Sampling without replacement: samples of one size.

*Formula.* Each round draws a uniformly random subset of exactly q·n records, independently of other rounds.

| Case | What happens |
|---|---|
| q·n is a whole number up to rounding errors | it is the size of each sample |
| it is another number | ConfigError, which names the nearest |
| q = 1 | every record is drawn, and sampling does not amplify |
| the training set does not hold exactly n records | refused: the bound is stated for n |
| a record is added, removed or nulled | not covered; only replacing one is |

Read next: `shuffle` (disjoint samples); `dpexp.accounting.dominating_pairs` (`FixedSizePair`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dpexp.accounting.sampling.policy import RandomNumbers, RatedPolicy, Release, Released, whole_batch
from dpexp.errors import checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class FixedSize(RatedPolicy):
    """A uniformly random subset of exactly q·n records, drawn anew each round.

    Examples:
        >>> from dpexp import FixedSize
        >>> policy, rounds = FixedSize(expected_batch_size=50, steps=100).resolve(n=1000)
        >>> policy.q, rounds
        (0.05, 100)
        >>> policy.covers
        {'replace_one': ('pld', 'rdp')}
    """

    name = "fixed_size"
    covers: ClassVar = {"replace_one": ("pld", "rdp")}
    why = "a sample of fixed size only exists when n is the same on both sides"

    def at_rate(self, n: int, records: int) -> Self:
        policy = super().at_rate(n, records)
        return replace(policy, sampling_rate=whole_batch(policy.q, records, n / records) / records)

    def check(self, n: int) -> None:
        whole_batch(self.q, n)

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        return [stream.permutation(size)[: whole_batch(self.q, size)].tolist()]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        for event, z, count, _ in rounds:
            if event.q == 1:
                yield Release(z), count
            else:
                size = math.ceil(event.q * event.n * (1 - 1e-9))  # an integer, up to rounding
                yield Release(z, size / event.n, cls.name, event.n), count
