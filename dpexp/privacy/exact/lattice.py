"""A group's vectors as whole multiples of a grid."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor, isqrt

import torch
from torch import Tensor

from dpexp.errors import ConfigError

SIGMA = 2**24  # σ̃ in units of the grid, for every group and round
SIGMA2 = SIGMA**2
_LARGEST = 2**31 - 1  # of a coordinate
_HALF = 31  # bits
_MARGIN = 1 - 2.0**-40  # more than float64 rounds
_COARSE = 2**10  # S² for each coordinate: rounding shortens a vector of norm S by less than √d, which is S/32
_MOST = 2**62


@dataclass(frozen=True)
class Lattice:
    """A group's vectors, scaled by 1/α_j, in units of γ = σ̃·2^-24: whole numbers with squared norms of at most S².

    *Sensitivity.* A record adds u, a vector of whole numbers that depends on this record alone, to the sum, and only if
    Σ u² <= S2 as whole numbers: one record more or less moves the sum by a vector of squared norm at most S2, exactly,
    and another in its place by one of norm at most 2√S2. However u came about, floating point included, it is checked
    afterwards, and a record that fails contributes zero. It is clipped in float64 and rounded towards zero, which makes
    no norm larger, so that records do not fail but where float64 errs by more than 2^-40.

    That u depends on this record alone is the engine's part: with exact noise it computes each record's gradient alone,
    since in company libraries may round it otherwise.

    *Overflow.* n √S2 < 2^62, which is checked beforehand. Were there more records than n, or were the noise beyond
    2^62, sums would wrap around: they are the true sums modulo 2^64, a function of these, which costs nothing.

    Attributes:
        grid: γ; S2: ⌊(S/γ)²⌋, and at least 1.
    """

    grid: float
    S2: int

    def rounded(self, vectors: Tensor, norms: Tensor, c: Tensor | float = 1.0) -> Tensor:
        """[B, d] int64: clipped vectors, in units of the grid.

        Args:
            vectors: [B, d] float64, already divided by α_j; norms: [B] at least theirs, in float64; c: [B], what a clip
                rule says they are to be multiplied by, which is at most S/norm anyhow.
        """
        bound = self.S2**0.5 * _MARGIN
        c = torch.where(norms.isfinite(), (bound / norms).clamp(max=c / self.grid), 0)
        scaled = vectors * c[:, None]
        scaled = torch.where(scaled.isfinite(), scaled, 0).clamp(-_LARGEST, _LARGEST)
        whole = scaled.to(torch.int64)  # towards zero
        whole[torch.tensor([square > self.S2 for square in squares(whole)], dtype=torch.bool)] = 0
        return whole

    def check(self, group: str, d: int, n: int) -> None:
        """
        Raises:
            ConfigError: the group's noise is too little, or too much, to be exact for n records.
        """
        z = SIGMA / self.S2**0.5
        if self.S2 > _LARGEST**2 or n * (isqrt(self.S2) + 1) >= _MOST:
            raise ConfigError(
                f"noise=exact: group {group} has σ̃/S = {z:.3g} for n = {n} records, so that whole numbers of 64 bits "
                "could not hold their sum; choose more noise, or noise=gaussian."
            )
        if self.S2 / d < _COARSE:
            raise ConfigError(
                f"noise=exact: group {group} has σ̃/S = {z:.3g} for d = {d} numbers, so that the grid could shorten a "
                f"record by more than 3 %; choose σ̃/S below {SIGMA / (_COARSE * d) ** 0.5:.3g}, or noise=gaussian."
            )


@lru_cache(maxsize=1024)
def lattice(S: float, sigma: float) -> Lattice:
    """For a group with privacy tuple (S, σ̃)."""
    return Lattice(sigma / SIGMA, max(1, floor((Fraction(S) / Fraction(sigma)) ** 2 * SIGMA2)))


def squares(whole: Tensor) -> list[int]:
    """[B]: squared norms of vectors [B, d] of whole numbers below 2^31, exactly: each half of a square is summed by
    itself."""
    square = whole * whole
    high, low = (square >> _HALF).sum(1), (square & (2**_HALF - 1)).sum(1)
    return [(h << _HALF) + rest for h, rest in zip(high.tolist(), low.tolist(), strict=True)]
