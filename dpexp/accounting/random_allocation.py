"""Dominating pair of random allocation: each record takes part in one of t rounds, which it draws for itself.

The rounds of an epoch give x = (x_1, …, x_t). Under Q all x_i are N(0, z²); under P one of them, drawn at random, is
N(1, z²). The likelihood ratio P/Q of an epoch is the mean of those of its rounds, which are independent under Q (Chua
et al. 2024, arXiv 2412.16802; Feldman & Shenfeld 2025, arXiv 2502.08202). Adaptive rounds cost no more: given i, they
are a function of x and fresh randomness.

A pair dominates another, in both directions, if its ratio under Q is larger in the convex order (Blackwell), as after
moving mass to neighbouring ratios such that the mean stays ("connect the dots"). Sums of independent variables keep
that order. So the ratio of a round is moved to a grid, and after each of the at most 2 log2(t) additions the sum is,
too. An addition on a grid with step h adds about h²/6 to the variance of the loss. All terms are positive, so that
small masses keep their digits.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dpexp.accounting.composition import MAX_CELLS, Array
from dpexp.accounting.dominating_pairs import Cells, PairInCells, PoissonPair

_POINTS = 1800  # of a grid
_ULP = 2.0**-53
_SHIFT = 2.0**-42  # above the rounding errors of a loss after all additions, relative to 1 + |loss|
_TAIL = 70.0  # tails of mass e^-70 = 4e-31 may be merged, so that smaller δ are not amplified
_FARTHEST = 33.9  # standard deviations, where Q's mass is 1e-250; products that underflow have next to no mass of P
MIN_Z = 0.04  # below it there is too little between the masses of 1e-250 and a round's usual ones


@dataclass(frozen=True)
class _Ratio:
    """A likelihood ratio P/Q.

    Attributes:
        first, h: its logarithm, the loss, is on the grid first + h·(0, 1, …).
        mass: Q's masses there.
        zero: Q's mass where the ratio is 0.
        infinite: P's mass where it is infinite.
    """

    first: float
    h: float
    mass: Array
    zero: float
    infinite: float

    @property
    def losses(self) -> Array:
        return self.first + self.h * np.arange(len(self.mass), dtype=np.float64)

    @property
    def mass_of_p(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.exp(np.log(self.mass) + self.losses)  # where e^loss overflows, too

    def without_tails(self) -> "_Ratio":
        """The same with each tail of mass below e^-_TAIL merged: into 0 and the first point, the last and infinity."""
        losses, p = self.losses, self.mass_of_p
        low = int(np.searchsorted(np.cumsum(self.mass), math.exp(-_TAIL)))
        high = len(p) - int(np.searchsorted(np.cumsum(p[::-1]), math.exp(-_TAIL)))
        below, above = losses[:low] - losses[low], losses[high:] - losses[high - 1]
        mass = self.mass[low:high].copy()
        mass[0] += self.mass[:low] @ np.exp(below)
        mass[-1] += self.mass[high:].sum()
        zero = self.zero - float(self.mass[:low] @ np.expm1(below))
        infinite = self.infinite - float(p[high:] @ np.expm1(-above))
        return _Ratio(float(losses[low]), self.h, mass, zero, infinite)


def _one(z: float) -> _Ratio:
    """The ratio of a round. By symmetry Q's mass at a loss L is P's at -L. P's other mass is below 2 e^(-far²/2)."""
    far = min(math.sqrt(2 * _TAIL), _FARTHEST - 1 / z)
    most = (far + 1 / (2 * z)) / z
    h = 2 * most / _POINTS
    start, mass, zero = PoissonPair(z, 1.0, 0.5).discretized(h, -most, -(far**2) / 2, most)
    return _Ratio(-h * (start + len(mass) - 1), h, mass[::-1], zero, 2 * math.exp(-(far**2) / 2))


def _mean(one: _Ratio, other: _Ratio, weight: float) -> _Ratio:
    """The weighted mean of two ratios that are independent under Q; `weight` is that of `one`."""
    x = np.append(one.losses + math.log(weight), -math.inf)
    y = np.append(other.losses + math.log1p(-weight), -math.inf)
    of_x, of_y = np.append(one.mass, one.zero), np.append(other.mass, other.zero)
    first = float(np.logaddexp(x[0], y[0]))
    h = (float(np.logaddexp(x[-2], y[-2])) - first) / (_POINTS - 2)
    first -= h / 2
    mass, terms = np.zeros(_POINTS + 1), np.zeros(_POINTS + 1)  # of the ratio 0, and of the grid's
    for rows in np.array_split(np.arange(len(x)), math.ceil(len(x) * len(y) / MAX_CELLS)):
        place = (np.logaddexp(x[rows, None], y) - first) / h
        cell = np.clip(np.floor(place), -1, _POINTS - 2)
        up = np.where(cell < 0, np.exp(np.minimum(h * place, 0)), np.expm1(h * (place - cell)) / math.expm1(h))
        each, index = of_x[rows, None] * of_y, cell.astype(np.intp).ravel() + 1
        for target, moved in ((index, each * (1 - up)), (index + 1, each * up)):
            mass += np.bincount(target, moved.ravel(), len(mass))
            terms += np.bincount(target, minlength=len(mass))
    mass *= 1 + (terms + 32) * _ULP  # above the rounding errors of sums of so many terms
    infinite = weight * one.infinite + (1 - weight) * other.infinite
    return _Ratio(first, h, mass[1:], float(mass[0]), infinite)


@lru_cache(maxsize=512)
def _ratio(z: float, steps: int) -> _Ratio:
    """The ratio of an epoch of `steps` rounds."""
    one = found = _one(z)
    count = 1
    for bit in bin(steps)[3:]:
        found, count = _mean(found, found, 0.5).without_tails(), 2 * count
        if bit == "1":
            found, count = _mean(found, one, count / (count + 1)).without_tails(), count + 1
    return found


@dataclass(frozen=True)
class RandomAllocationPair(PairInCells):
    """A record that takes part in one of `steps` rounds, which it draws at random, is removed.

    Each round has the noise multiplier z. The pair is of all rounds of an epoch together.
    """

    z: float
    steps: int
    is_removed: bool = True  # otherwise it is added

    @property
    def reverse(self) -> "RandomAllocationPair":
        return replace(self, is_removed=not self.is_removed)

    def _loss(self) -> tuple[Array, Array, float]:
        """Losses, their masses, and that of the infinite loss."""
        ratio = _ratio(self.z, self.steps)
        if self.is_removed:
            return ratio.losses, ratio.mass_of_p, ratio.infinite
        return -ratio.losses[::-1], ratio.mass[::-1], ratio.zero

    def cells(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> Cells:
        losses, mass, infinite = self._loss()
        losses = losses + _SHIFT * (1 + np.abs(losses))
        mass = mass * (1 + (len(mass) + 32) * _ULP)
        first = math.floor(max(losses[0], lowest) / h)
        size = max(math.ceil(min(losses[-1], top) / h) - first, 1)
        cell = np.floor(losses / h).astype(np.int64) - first
        inside = (cell >= 0) & (cell < size)
        kept, cell_of = mass[inside], cell[inside]
        above = -np.expm1(h * (first + cell_of) - losses[inside])
        mass_in, excess = (np.bincount(cell_of, each, size).astype(float) for each in (kept, kept * above))
        return Cells(
            first,
            mass_in,
            excess,
            float(mass[cell < 0].sum()),
            infinite + float(mass[cell >= size].sum()),
        )

    def points(self, step: float) -> tuple[Array, Array]:
        losses, mass, _ = self._loss()
        with np.errstate(divide="ignore"):
            return losses, np.log(mass)
