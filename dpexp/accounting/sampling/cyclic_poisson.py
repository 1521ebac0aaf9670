"""Cyclic Poisson sampling: independent samples of one of several partitions in turn.

*Formula.* The records are divided into b partitions at random. Round i draws each record of partition i mod b with
probability q·b. A block of N rounds counts as its ⌈N/b⌉ most expensive rounds of Poisson sampling at rate q·b.

| Case | What happens |
|---|---|
| b = 1 | Poisson sampling |
| q·b above 1 | ConfigError, which names the largest b |
| noise with more bands than b | refused (`dpexp.accounting.releases`): correlated rounds may share a record |
| a job is resumed | a new block begins, with new partitions and new noise; each block counts by itself |
| rounds of a block differ in q, b or bands | the ledger is refused |
| a partition or a sample without records | a round as any other, whose noise is released |

Read next: `poisson`; `dpexp.privacy.noise.correlated`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpexp.accounting.sampling.poisson import Poisson
from dpexp.accounting.sampling.policy import RandomNumbers, Release, Released, each_with_rate, poisson_release
from dpexp.errors import ConfigError, Count, checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Poisson):
    """Poisson samples of one of b random partitions in turn (Choquette-Choo et al. 2023, arXiv 2306.08153).

    Round i samples each record of partition i mod b independently with probability q·b, so that the rounds of a record
    are at least b apart.

    Examples:
        >>> from dpexp import CyclicPoisson
        >>> policy, rounds = CyclicPoisson(expected_batch_size=50, partitions=4, epochs=3).resolve(n=1000)
        >>> policy.q, rounds, policy.rounds_apart
        (0.05, 60, 4)

    Args:
        partitions: b; None: as many as the noise has bands.
    """

    partitions: Count | None = None

    name = "cyclic_poisson"
    written: ClassVar = {"partitions": "parts"}
    drawn_with = "block"
    is_cyclic = True
    rate_can_vary = False
    has_schedules = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partitions is not None and self.sampling_rate is not None:
            rate_in_part(self.sampling_rate, self.partitions)

    @property
    def rounds_apart(self) -> int:
        return self.partitions or 1

    def partition(self, size: int, stream: RandomNumbers) -> list[Sequence[int]]:
        if self.rounds_apart == 1:
            return [range(size)]
        partition_of = stream.words(size) % self.rounds_apart
        return [partition_of.eq(part).nonzero().flatten().tolist() for part in range(self.rounds_apart)]

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        return [each_with_rate(rate_in_part(self.q, self.rounds_apart), size, stream)]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        """The worst-case rounds in which a record can be, of a block. Their noise may be correlated (banded matrix
        factorization).

        With b partitions and at most b bands c, a block of N rounds costs no more than ⌈N/b⌉ rounds of Poisson sampling
        at rate qb with independent noise and z = σ̃/(S‖c‖) ([correlated noise](../mathematics.md#correlated-noise),
        after Choquette-Choo et al. 2023). A resumed job does not know the earlier noise: it begins a new block.

        *Proof.* Releases X and C(X/σ̃) determine each other, round by round. A record that adds v in round t adds
        c_i v/σ̃ to row t + i, i < b, alone; these rows are disjoint for the rounds of its partition. Given the others'
        samples and all earlier releases, the rows are Z, plus (c_0 v, …, c_{b-1} v)/σ̃ with probability qb: a
        Poisson-sampled Gaussian query of sensitivity S‖c‖. They compose adaptively. ∎
        """
        event = rounds[0].event
        if len({(one.event.q, one.event.policy.rounds_apart, one.correlation) for one in rounds}) > 1:
            raise ConfigError(
                f"the ledger's rounds of block {event.first} have different rates, numbers of partitions or bands, so "
                "they cannot have been of one block, as which they are accounted."
            )
        parts = event.policy.rounds_apart
        left = math.ceil(sum(one.times for one in rounds) / parts)
        for z, count in sorted((one.z, one.times) for one in rounds):
            if left:
                yield poisson_release(z, rate_in_part(event.q, parts), adjacency), min(count, left)
            left -= min(count, left)


def rate_in_part(q: float, parts: int) -> float:
    """q·parts, the rate at which the records of the round's partition are sampled; 1 if it is 1 up to rounding.

    Raises:
        ConfigError: the rate is above 1.
    """
    rate = q * parts
    if rate > 1 + 1e-9:
        raise ConfigError(
            f"sampling.partitions={parts} at q={q:.6g}: each record of a partition would be sampled at rate "
            f"{rate:.6g}, which must be at most 1; choose at most {max(1, math.floor((1 + 1e-9) / q))} partitions."
        )
    return 1.0 if rate > 1 - 1e-9 else rate
