"""Shuffling: disjoint samples of an epoch.

*Formula.* A random order of all n records is cut into ⌈1/q⌉ samples of q·n records; the last one has the rest. A record
is in one of them, so an epoch costs as much as its round with the smallest z would on all records.

| Case | What happens |
|---|---|
| q·n does not divide n | the last sample is smaller; its average gradient is multiplied by its `weight` below 1 |
| a ledger has only some of an epoch's rounds, as a job that ended does | they count as the whole epoch |
| rounds of an epoch make up more than all records | the ledger is refused |
| the training set does not hold exactly n records | refused: batch sizes must be public |
| a record is added or removed | not covered; replacing or nulling one is |

Read next: `random_allocation` (the rounds of an epoch with amplification).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dpexp.accounting.sampling.fixed_size import FixedSize
from dpexp.accounting.sampling.policy import ALL_ACCOUNTANTS, RandomNumbers, Release, Released, whole_batch
from dpexp.errors import ConfigError, Rate, checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class Shuffle(FixedSize):
    """Each epoch shuffles the records and splits them into disjoint samples of q·n; the last one has the rest.

    A record is in one sample of an epoch. Which one is not counted as random, so that an epoch costs as much as its
    most expensive round without sampling.

    Examples:
        >>> from dpexp import Shuffle
        >>> policy, rounds = Shuffle(expected_batch_size=300, epochs=2).resolve(n=1000)
        >>> rounds  # of 300, 300, 300 and 100 records, twice
        8
        >>> policy.at_round(3, n=1000).q
        0.1
    """

    weight: Rate = field(default=1.0, compare=False, repr=False)  # below 1 of an epoch's last sample, by `at_round`

    name = "shuffle"
    covers: ClassVar = {"replace_one": ALL_ACCOUNTANTS, "replace_null": ALL_ACCOUNTANTS}
    why = "the sizes of disjoint batches are public only if n is the same on both sides"
    drawn_with = "epoch"

    @property
    def rounds_per_epoch(self) -> int:
        return math.ceil(self.weight / self.q * (1 - 1e-12))

    def at_round(self, t: int, n: int) -> "Shuffle":
        if (t + 1) % self.rounds_per_epoch:
            return self
        batch = whole_batch(self.q, n)
        rest = n - (self.rounds_per_epoch - 1) * batch
        return self if rest == batch else replace(self, sampling_rate=rest / n, weight=rest / batch)

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        return self.split(stream.permutation(size).tolist())

    def split(self, order: list[int]) -> list[list[int]]:
        """An epoch's samples of records in this order."""
        batch = whole_batch(self.q / self.weight, len(order))
        return [order[k * batch : (k + 1) * batch] for k in range(self.rounds_per_epoch)]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        part = 0.0
        for event, _, count, _ in rounds:
            part += count * event.q
        if part > 1 + 1e-9:
            raise ConfigError(
                f"the ledger's batches of epoch {rounds[0].event.first} make up {part:.3g} of the records, so they "
                "cannot have been disjoint."
            )
        yield Release(min(one.z for one in rounds)), 1
