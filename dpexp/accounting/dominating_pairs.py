"""Dominating pairs: for each sampling policy, distributions P and Q that dominate a round on any two neighbouring data
sets.

P and Q dominate a round if their divergence E_P[(1 - α e^-L)⁺], with the privacy loss L = log P/Q, is at least that of
the round for every α > 0. Only then does the sum of the rounds' losses bound any adaptive composition (Zhu, Dong & Wang
2022, arXiv 2106.08567, theorem 10; counterexamples: Lebeda et al. 2025, arXiv 2405.20769).

A loss is discretized on a grid of step h such that P and Q each keep their mass in every cell ("connect the dots":
Doroshenko et al. 2022, arXiv 2207.04380), which can only increase δ(ε). An upper bound on the rounding errors is added
to each mass.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri_exp
from scipy.stats import binom

from dpexp.accounting.composition import Array, log_mixed

_ULP = 2.0**-53
_MAX_POINTS = 2**14  # for estimates


class Cells(NamedTuple):
    """P's mass between the edges h·(first + 0, 1, …).

    Attributes:
        mass, excess: of each cell; the latter is P's mass minus e^(lower edge) times Q's mass.
        below, beyond: P's mass below the first and above the last edge.
    """

    first: int
    mass: Array
    excess: Array
    below: float
    beyond: float

    def spread(self, h: float) -> Array:
        """The masses of the edges after discretization."""
        up = np.clip(self.excess / -math.expm1(-h), 0, self.mass)
        edges = np.append(self.mass - up, 0.0)
        edges[1:] += up
        edges[0] += self.below
        return edges


_MAX_U = 38.0  # standard deviations, beyond which normal mass is below 1e-300
_FAR = 500.0  # standard deviations between two means, for which estimates leave out what lies between


class Pair(ABC):
    """A dominating pair P against Q."""

    @property
    def reverse(self) -> "Pair":
        """Q against P."""
        return self

    @property
    def max_loss(self) -> float:
        """An upper bound on the loss."""
        return math.inf

    @abstractmethod
    def discretized(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> tuple[int, Array, float]:
        """The loss on the grid h·(start + 0, 1, …): start, masses, and the mass of the infinite loss.

        Args:
            h: the step of the grid.
            lowest: losses below it may be rounded up to it.
            log_tail: logarithm of a mass at each end whose losses may be merged.
            top: losses above it may count as infinite.
        """

    @abstractmethod
    def points(self, step: float) -> tuple[Array, Array]:
        """Losses at intervals of `step` standard deviations of the noise, and the logarithms of their masses by the
        trapezoidal rule: for estimates, not for bounds."""


class PairInCells(Pair):
    """A pair whose masses between the edges of a grid are known."""

    @abstractmethod
    def cells(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> Cells:
        """P's mass between the edges; see `discretized` for the arguments."""

    def discretized(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> tuple[int, Array, float]:
        cells = self.cells(h, lowest, log_tail, top)
        return cells.first, cells.spread(h), cells.beyond


@dataclass(frozen=True)
class LaplacePair(PairInCells):
    """A query with Laplace noise on all records, whose answer moves by ε₀ = `pure` scales of the noise in L1 norm.

    P = Lap(0, 1) against Q = Lap(ε₀, 1). The loss is ε₀ with mass 1/2, -ε₀ with mass e^-ε₀/2, and has the density
    e^((L-ε₀)/2)/4 in between.

    The pair also dominates if several coordinates move, by ε₁ + ε₂ + … = ε₀. *Proof.* For two, with
    g(u) = min(1, e^((ε₂-|u|)/2)), this is equivalent to F(ε) = g(ε-ε₁)/2 + g(ε+ε₁)/2 + ¼ ∫ g ≥ 1 for |ε| ≤ ε₁ + ε₂,
    with the integral from ε-ε₁ to ε+ε₁. F is even, does not increase for ε ≥ 0, and F(ε₁+ε₂) = 1. More follow by
    induction. ∎
    """

    pure: float  # ε₀

    @property
    def max_loss(self) -> float:
        return self.pure

    def cells(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> Cells:
        e = self.pure
        last = int(np.floor(e / h)) + 1
        first = min(int(np.floor(max(-e, lowest) / h)), last - 1)
        edges = h * np.arange(first, last + 1, dtype=np.float64)
        low, high = np.clip(edges[:-1], -e, e), np.clip(edges[1:], -e, e)
        lower = edges[:-1]
        mass = np.exp((low - e) / 2) * np.expm1((high - low) / 2) / 2
        grown = np.exp(lower - (low + e) / 2) * -np.expm1((low - high) / 2) / 2  # e^lower times Q's mass
        excess = mass - grown
        excess += 8 * (1 + np.abs(lower)) * _ULP * (mass + grown)
        mass[-1] += 0.5
        excess[-1] += -np.expm1(lower[-1] - e) / 2
        below = 0.0
        if lower[0] <= -e:
            mass[0] += np.exp(-e) / 2
            excess[0] += -np.exp(-e) * np.expm1(lower[0] + e) / 2
        else:
            below = float(np.exp((lower[0] - e) / 2) / 2)
        slack = 1 + 8 * (1 + e) * _ULP
        return Cells(first, mass * slack, excess * slack, below * slack, 0.0)

    def points(self, step: float) -> tuple[Array, Array]:
        e = self.pure
        edges = np.linspace(-e, e, min(_MAX_POINTS, 8 + int(min(e, 1e9) / step)))
        mass = np.exp((edges[:-1] - e) / 2) * np.expm1(np.diff(edges) / 2) / 2
        with np.errstate(divide="ignore"):
            inner = np.log(mass)
        return (
            np.concatenate([[-e], (edges[1:] + edges[:-1]) / 2, [e]]),
            np.concatenate([[-e - np.log(2)], inner, [-np.log(2)]]),
        )


def gaussian_above(pure: Array) -> Array:
    """A μ for which every ε-DP mechanism is μ-Gaussian DP: G_μ is convex and meets the lines of ε-DP where both errors
    are 1/(1 + e^ε), so that it lies below them (Dong, Roth & Su 2022, proposition 2.12)."""
    return -2 * ndtri_exp(-np.logaddexp(0, pure))


def pure_below(mu: float) -> float:
    """The ε for which `gaussian_above` gives μ: ε-DP implies μ-Gaussian DP."""
    return float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))


@dataclass(frozen=True)
class PoissonPair(PairInCells):
    """P = (1-q) N(0, z²) + q N(a, z²) against Q = (1-q) N(0, z²) + q N(a-1, z²), in units of the sensitivity.

    a = 1: a record of a Poisson sample is removed, or replaced with null. a = 0: a record is added (Zhu, Dong & Wang
    2022, theorem 11). a = 1/2: a record is replaced with another, with sensitivity 2S; with q = 1, the Gaussian
    mechanism; no other contributions x, y have a larger divergence. *Proof.* It is
    sup_A (1-q)(1-α) N_0(A) + q (N_x(A) - α N_y(A)). By Neyman-Pearson, among A with N_0(A) = c a half-space orthogonal
    to x has the largest N_x(A), which grows with ‖x‖, and one orthogonal to y the smallest N_y(A). If x = -y are of the
    largest norm, one half-space attains both for every c. ∎
    """

    z: float
    q: float
    a: float = 1.0

    @property
    def reverse(self) -> "PoissonPair":
        return PoissonPair(self.z, self.q, 1 - self.a)

    @property
    def max_loss(self) -> float:
        return -math.log1p(-self.q) if self.a == 0 else math.inf

    def cells(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> Cells:
        z, q, a = self.z, self.q, self.a
        far, farther = (-z * float(ndtri_exp(min(t, -1.0))) for t in (log_tail, log_tail - math.log(q)))
        least, most = self._loss(np.array([min(-far, a - 1 - farther), max(far, a + farther)]) / z)
        first = math.floor(max(least, lowest) / h)
        edges = h * np.arange(first, max(math.ceil(min(most, top) / h), first + 1) + 1, dtype=np.float64)
        x = self._inverse(edges)
        off = self._rounding(edges, x) / z
        normal = {mean: _between((x - mean) / z, off) for mean in {0.0, a, a - 1}}
        (both, both_lost), (p, p_lost), (other, other_lost) = normal[0.0], normal[a], normal[a - 1]
        below = (1 - q) * (ndtr(x[0] / z) + both_lost[0]) + q * (ndtr((x[0] - a) / z) + p_lost[0])
        beyond = (1 - q) * (ndtr(-x[-1] / z) + both_lost[-1]) + q * (ndtr((a - x[-1]) / z) + p_lost[-1])
        both_lost, p_lost, other_lost = (lost[:-1] + lost[1:] for lost in (both_lost, p_lost, other_lost))
        lower = edges[:-1]
        gained, grown = _growth(lower, (1 - q) * both), _grown(lower, other)
        excess = q * (p - grown) - gained
        excess += q * (p_lost + _grown(lower, other_lost)) + np.abs(_growth(lower, (1 - q) * both_lost))
        excess += 8 * (1 + np.abs(lower)) * _ULP * (q * (p + grown) + np.abs(gained))
        mass = ((1 - q) * (both + both_lost) + q * (p + p_lost)) * (1 + 8 * _ULP)
        return Cells(first, mass, excess, float(below), float(beyond))

    def points(self, step: float) -> tuple[Array, Array]:
        means = sorted({(self.a - 1) / self.z, 0.0, self.a / self.z})
        gaps = [(low + _MAX_U, high - _MAX_U) for low, high in pairwise(means) if high - low > _FAR]
        edges = [means[0] - _MAX_U, *chain(*gaps), means[-1] + _MAX_U]
        u = np.concatenate([np.arange(*ends, step) for ends in zip(edges[::2], edges[1::2], strict=True)])
        p, q = self._mixed(u, self.a), self._mixed(u, self.a - 1)
        return p - q, p - u**2 / 2 + math.log(step / math.sqrt(2 * math.pi))

    def _loss(self, u: Array) -> Array:
        """The loss at x = z u."""
        return self._mixed(u, self.a) - self._mixed(u, self.a - 1)

    def _mixed(self, u: Array, mean: float) -> Array:
        """log of (1-q) N(0, z²) + q N(mean, z²) over N(0, z²)."""
        return log_mixed(self.q, (mean * u - mean**2 / (2 * self.z)) / self.z) if mean else np.zeros_like(u)

    def _inverse(self, losses: Array) -> Array:
        """The x at which the loss has these values; ±∞ for values that it never has."""
        z, q = self.z, self.q
        if self.a == 0.5:  # sinh(x/2z² - L/2) = sinh(L/2) e^(1/8z²) (1-q)/q
            with np.errstate(divide="ignore"):
                log_sinh = np.abs(losses) / 2 + np.log(-np.expm1(-np.abs(losses)) / 2)
                log_sinh += 1 / (8 * z**2) + np.log1p(-q) - math.log(q)
            arsinh = np.where(log_sinh < 300, np.arcsinh(np.exp(np.minimum(log_sinh, 300))), log_sinh + math.log(2))
            return 2 * z**2 * (losses / 2 + np.copysign(arsinh, losses))
        sign = 1 if self.a == 1 else -1
        losses = sign * losses
        with np.errstate(divide="ignore"):
            log_ratio = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30)) / q, -1))
        if losses.max() >= 30:
            large = losses + np.log1p(-(1 - q) * np.exp(-np.maximum(losses, 30))) - math.log(q)
            log_ratio = np.where(losses < 30, log_ratio, large)
        return sign * (z**2 * log_ratio + 0.5)

    def _rounding(self, losses: Array, x: Array) -> Array:
        """Bounds on the rounding errors of `_inverse`, if each operation's is less than two units in the last place."""
        z, q = self.z, self.q
        size = np.where(np.isfinite(x), np.abs(x), 0)
        if q == 1:
            return 8 * _ULP * size
        if self.a == 0.5:
            with np.errstate(divide="ignore"):
                terms = np.abs(losses) + np.abs(np.log(-np.expm1(-np.abs(losses))))
            terms = np.minimum(terms, 750) + 1 / (8 * z**2) - math.log1p(-q) - math.log(q)
            return 4 * (4 + terms) * _ULP * size
        sign = 1 if self.a == 1 else -1
        steep = np.abs(np.expm1(np.minimum((0.5 - sign * x) / z**2, 36)))
        return 8 * _ULP * (size + 1 + z**2 * (1 + np.abs(losses)) * steep)


@dataclass(frozen=True)
class FixedSizePair(Pair):
    """A record of a sample of fixed size is replaced, with sensitivity 2S.

    For α >= 1 the divergence is that of (1-q)Q + qP against Q, with P = N(1, z²) and Q = N(0, z²) (Balle, Barthe &
    Gaboardi 2018, arXiv 1807.01647, theorem 9); by symmetry D_α = 1 - α + α D_1/α for α < 1 (Zhu, Dong & Wang 2022,
    proposition 30). So losses above 0 are those of a removed record, losses below 0 those of an added record, and the
    remaining mass has the loss 0.
    """

    z: float
    q: float

    def discretized(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> tuple[int, Array, float]:
        removed = PoissonPair(self.z, self.q, 1.0).cells(h, -h, log_tail, max(top, h))
        added = PoissonPair(self.z, self.q, 0.0).cells(h, min(lowest, -h), log_tail, max(top, h))
        above, below = slice(-removed.first, None), slice(None, -added.first)
        masses = Cells(
            added.first,
            np.concatenate([added.mass[below], removed.mass[above]]),
            np.concatenate([added.excess[below], removed.excess[above]]),
            added.below,
            removed.beyond,
        ).spread(h)
        masses[-added.first] += (1 - self.q) * (2 * ndtr(0.5 / self.z) - 1) + 4 * _ULP
        return added.first, masses, removed.beyond

    def points(self, step: float) -> tuple[Array, Array]:
        (removed, log_p), (added, log_q) = (PoissonPair(self.z, self.q, a).points(step) for a in (1.0, 0.0))
        losses = np.concatenate([removed[removed > 0], added[added < 0], [0.0]])
        log_mass = np.concatenate([log_p[removed > 0], log_q[added < 0]])
        return losses, np.append(log_mass, math.log(1 - np.exp(log_mass).sum()))


@dataclass(frozen=True)
class TruncatedPoissonPair(Pair):
    """A record of a Poisson sample, truncated to at most `maximum` of n records, is replaced with null.

    With probability p the other records already fill the sample. Nulling the record may then let another one in, which
    is at worst a replacement, at the rate at which records are in full samples. Otherwise it is as without truncation
    (Ganesh 2025, arXiv 2508.15089, in the form of dp-accounting, which counts a replacement as one by the opposite
    contribution, with sensitivity 4S).
    """

    z: float
    q: float
    n: int
    maximum: int
    a: float = 1.0

    @property
    def reverse(self) -> "TruncatedPoissonPair":
        return TruncatedPoissonPair(self.z, self.q, self.n, self.maximum, 1 - self.a)

    @property
    def max_loss(self) -> float:
        return max(pair.max_loss for _, pair in self._parts())

    def _parts(self) -> list[tuple[float, PoissonPair]]:
        others = binom(self.n - 1, self.q)
        parts = [(float(others.cdf(self.maximum - 1)), PoissonPair(self.z, self.q, self.a))]
        full = float(others.sf(self.maximum - 1))
        if full > 0:
            rate = float(binom.sf(self.maximum, self.n, self.q)) * self.maximum / full / self.n
            parts.append((full, PoissonPair(self.z / 4, rate, 0.5)))
        return [part for part in parts if part[0] > 0]

    def discretized(self, h: float, lowest: float, log_tail: float, top: float = math.inf) -> tuple[int, Array, float]:
        parts = [(p, *pair.discretized(h, lowest, log_tail, top)) for p, pair in self._parts()]
        first = min(start for _, start, _, _ in parts)
        masses = np.zeros(max(start + len(mass) for _, start, mass, _ in parts) - first)
        for p, start, mass, _ in parts:
            masses[start - first : start - first + len(mass)] += p * mass
        return first, masses, sum(p * infinite for p, _, _, infinite in parts)

    def points(self, step: float) -> tuple[Array, Array]:
        parts = [(p, *pair.points(step)) for p, pair in self._parts()]
        return (
            np.concatenate([losses for _, losses, _ in parts]),
            np.concatenate([math.log(p) + log_mass for p, _, log_mass in parts]),
        )


def _between(u: Array, off: Array) -> tuple[Array, Array]:
    """Standard normal mass between neighbouring u, and bounds on the rounding errors at each u, which may be `off`.

    The error of `ndtr` was measured as less than 8 + 4u² units in the last place. A tail grows by at most a factor of
    e^(d(|u|+1)) if u moves by d."""
    size = np.minimum(np.abs(u), _MAX_U + 2)
    tail = ndtr(-np.abs(u))
    moved = off * (size + 1)
    grown = moved * (1 + moved) if moved.max() < 1 else np.expm1(np.minimum(moved, 40))
    lost = tail * ((8 + 4 * size**2) * _ULP + grown)
    mass = np.abs(np.diff(tail))
    first = int(np.searchsorted(u, 0))
    if 0 < first < len(u):
        mass[first - 1] = 1 - tail[first - 1] - tail[first]
    return mass, lost


def _grown(losses: Array, mass: Array) -> Array:
    """e^losses · mass, also where e^losses overflows."""
    return np.exp(losses) * mass if losses[-1] < 300 else _each(losses, np.exp, mass)


def _growth(losses: Array, mass: Array) -> Array:
    """(e^losses - 1) · mass."""
    return np.expm1(losses) * mass if losses[-1] < 300 else _each(losses, np.expm1, mass)


def _each(losses: Array, power: np.ufunc, mass: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(losses < 300, power(np.minimum(losses, 300)) * mass, np.exp(losses + np.log(mass)))
