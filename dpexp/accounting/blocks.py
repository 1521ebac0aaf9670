"""What rounds cost whose noise is correlated: banded C, and samples that come round (Choquette-Choo et al. 2023, arXiv
2306.08153).

In a block of rounds 0 … N-1, round t releases X_t = G_t + σ̃ y_t, where G_t sums what the sample's records add, C y = Z
with independent standard normal Z_t, and C is a lower triangular Toeplitz matrix with the bands c_0 … c_{b-1} in each
column. Each record belongs to one of b parts, drawn at random without regard to the others, and is sampled in rounds
t ≡ its part (mod b) alone, each time independently at rate qb. Then the block costs no more than ⌈N/b⌉ rounds of
Poisson samples at rate qb with independent noise, z = σ̃/(S‖c‖).

*Proof.* Whoever has the releases X up to round t has C(X/σ̃) up to round t, and the other way round. A record that is
sampled in round t and adds v there, ‖v‖ ≤ S, adds c_i v/σ̃ to row t+i of C(X/σ̃), i < b, and nothing to any other; the
rows t … t+b-1 of different rounds of its part have nothing in common. Let all else be given: what the others' samples
are, and every release before round t, from which v follows. What the others add to a row follows from these and the
rows before, so that it can be subtracted. What is left of the rows t … t+b-1 is Z, with s·(c_0 v, …, c_{b-1} v)/σ̃ added
where the record is in the data, s = 1 with probability qb: a Poisson-sampled Gaussian sum query of sensitivity S‖c‖. A
part has at most ⌈N/b⌉ rounds, and what happens in them composes adaptively. ∎

So σ̃ may depend on the round and on earlier releases: what counts is S/σ̃ in the round in which the record is. Several
groups add their squares, also where some of them have independent noise, c = (1,), and are not released in every round;
those with more bands are in every round of a block, with the same c.
A record in another's place is in the same part and in the same samples: there the query is sampled in the same way, and
moves by up to 2S‖c‖. With qb = 1 nothing is random about a part's rounds, and they are full batches. Rounds of other
jobs may lie in between (concurrent composition: Vadhan & Zhang 2023, arXiv 2207.08335; Haney et al. 2023, arXiv
2309.05901, for Rényi filters).

A resumed job knows nothing of the noise before, and begins a new block, with new parts: C is then block-diagonal.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from dpexp.accounting.ledger import Round, SumQueryEvent
from dpexp.errors import ConfigError


class Blocks:
    """The rounds of each block, of which the order is not known."""

    def __init__(self) -> None:
        self._alike: dict[int, tuple[Any, ...]] = {}
        self._rounds: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def add(self, round_: Round, z: float, count: int) -> None:
        """
        Raises:
            ConfigError: other rounds of the block have another rate, another number of parts, or other bands.
        """
        sampling = round_.sampling
        assert sampling.block is not None and sampling.parts is not None
        banded = [query for query in round_.queries if isinstance(query, SumQueryEvent) and query.bands is not None]
        about = sampling.rate, sampling.parts, sorted((query.group, query.bands) for query in banded)
        if self._alike.setdefault(sampling.block, about) != about:
            raise ConfigError(
                f"the ledger's rounds of block {sampling.block} have different rates, numbers of parts or bands, so "
                "they cannot have been of one block, which is what they are accounted as."
            )
        self._rounds[sampling.block].append((z, count))

    def participations(self) -> Iterator[tuple[float, float, int]]:
        """(z, rate, how many): a record is in one round of b, and those may be the costliest of the block."""
        for block, rounds in self._rounds.items():
            rate, parts, _ = self._alike[block]
            left = math.ceil(sum(count for _, count in rounds) / parts)
            for z, count in sorted(rounds):
                yield z, rate, min(count, left)
                left -= min(count, left)
                if not left:
                    break


def check_bands(round_: Round) -> None:
    """Raises:
    ConfigError: the round's noise is correlated with that of others in which a record may be too.
    """
    parts = round_.sampling.parts or 1
    if round_.bands > parts:
        raise ConfigError(
            f"noise with {round_.bands} bands needs samples in which a record is at most every {round_.bands} rounds; "
            f"sampling={round_.sampling.policy} with {parts} part{'s' if parts > 1 else ''} has none: choose "
            f"sampling=cyclic_poisson with at least {round_.bands} parts."
        )
