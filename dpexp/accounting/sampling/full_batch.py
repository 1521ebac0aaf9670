"""Full batches: samples of all records.

*Formula.* q = 1. All rounds of a job are together one Gaussian release with 1/z² = Σ_t 1/z_t²
(`dpexp.accounting.composition.composed`).

| Case | What happens |
|---|---|
| E epochs | ⌈E⌉ rounds |
| the training set does not hold exactly n records | allowed: nothing depends on n but the average's denominator |
| one-time queries before training | are on full batches, too (`dpexp.accounting.ledger.events`) |

Read next: `poisson` (samples that amplify privacy).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpexp.accounting.sampling.policy import (
    ALL_ACCOUNTANTS,
    Policy,
    RandomNumbers,
    Release,
    Released,
)
from dpexp.errors import checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class FullBatch(Policy):
    """Every record, every round.

    Examples:
        >>> from dpexp import FullBatch
        >>> policy, rounds = FullBatch(steps=20).resolve(n=1000)
        >>> policy.q, rounds
        (1.0, 20)
    """

    name = "all"
    covers = dict.fromkeys(("add_remove", "replace_one", "replace_null"), ALL_ACCOUNTANTS)
    needs_exact_n = False

    @property
    def q(self) -> float:
        return 1.0

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        return [list(range(size))]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        for _, z, count, _ in rounds:
            yield Release(z), count
