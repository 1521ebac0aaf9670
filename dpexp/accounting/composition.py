"""Composition of rounds: Gaussian DP, Rényi moments, and sequential and strong composition of (ε, δ).

*Gaussian DP*: Gaussian mechanisms on all records compose to one with μ² = Σ 1/z².

*Moments* A_α = E_Q[e^(αL)]. For a Gaussian round P = (1-q) N(0, z²) + q N(1, z²), Q = N(0, z²), and the privacy loss is
L = log P/Q. The Rényi divergence of order α > 1 is log A_α / (α - 1) (Mironov, Talwar & Zhang 2019, section 3, who show
that P against Q is the worse direction).

*(ε, δ)*: each round is a Gaussian mechanism that is (ε₀, δ₀)-DP, with ε₀ exact for δ₀. Poisson sampling amplifies it to
(log(1 + q(e^ε₀ - 1)), qδ₀) (Balle, Barthe & Gaboardi 2018, theorem 8). A Laplace query on all records is (1/z, 0)-DP.

| Case | What happens |
|---|---|
| q = 1 | A_α in closed form: log A_α = α(α-1)/(2z²) |
| z below 0.02 | A_α in closed form up to 1e-120 (`_apart`), since an integral would need too many points |
| A_α near 1 | A_α - 1 is summed, so that no digits are lost |
| A_α beyond the range of float64 | its logarithm is computed from the largest term |
| the best order is above 2^30 | a warning; ε of the largest order tried, which is a bound |
| the best order is next to 1, as for δ near 1 | the search ends at 1 + e^-30; ε is a bound |
| a Gaussian mechanism with δ(0) <= δ | ε = 0 |
| μ above 1e9 | ε is infinite, since float64 has no digits left |

Read next: `accountants` (which of these is called), `pld` (tighter than all of them).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr

from dpexp.accounting.releases import Release

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_WIDTH = 12.0  # standard deviations on each side of an integrand's peak; the mass beyond is below 1e-31
MAX_CELLS = 2**22  # of the arrays in memory at once
LARGEST_ORDER = 2.0**30
_APART = 0.02  # z, below which N(0, z²) and N(1, z²) have next to nothing in common


def log_moments(z: Array, q: Array, alpha: float) -> Array:
    """log A_α for rounds (z, q) [R] and one real order α, by the trapezoidal rule.

    The integrand is analytic in a strip of half-width πz², so that the rule converges geometrically: with steps of
    min(z/2, 0.55 z²) its error is below 1e-15. For smaller z see `_apart`.
    """
    result = alpha * (alpha - 1) / (2 * z**2)
    apart = (q < 1) & (z < _APART)
    result[apart] = _apart(z[apart], q[apart], alpha)
    widths = _points(z, alpha)
    sampled = np.flatnonzero((q < 1) & ~apart)
    for some in batches(sampled[np.argsort(widths[sampled])], widths):
        result[some] = _by_trapezoids(z[some], q[some], alpha)
    return result


def _apart(z: Array, q: Array, alpha: float) -> Array:
    """log A_α for z < 0.02: A_α = (1-q)^α + q^α e^(α(α-1)/2z²), up to a relative error below 1e-120,
    since 1-q and q e^L are comparable only where the density is below 1e-125."""
    log_out, log_in = (alpha - 1) * np.log1p(-q), (alpha - 1) * (np.log(q) + alpha / (2 * z**2))
    excess = (1 - q) * np.expm1(log_out) + q * np.expm1(np.minimum(log_in, 700))  # A_α - 1, with all its digits
    return np.where(log_in < 700, np.log1p(excess), np.log(q) + log_in)


def batches(order: NDArray[np.intp], widths: Array, most: int | None = None) -> Iterator[NDArray[np.intp]]:
    """Batches of rounds, in this order, whose arrays of these widths fit in memory; each of at most `most`."""
    while len(order):
        widest = np.maximum.accumulate(widths[order[:most]])
        size = max(1, int(np.count_nonzero(widest * np.arange(1, len(widest) + 1) <= MAX_CELLS)))
        yield order[:size]
        order = order[size:]


def _points(z: Array, alpha: float) -> Array:
    return np.ceil((abs(alpha) / z + 2 * _WIDTH) / np.minimum(0.5, 0.55 * z)) + 1


def _by_trapezoids(z: Array, q: Array, alpha: float) -> Array:
    z, q = z[:, None], q[:, None]
    start, end = np.minimum(0, alpha / z) - _WIDTH, np.maximum(0, alpha / z) + _WIDTH
    count = int(_points(z, alpha).max())
    step = (end - start) / (count - 1)
    u = start + step * np.arange(count)  # x = z u, with u standard normal under Q
    loss = log_mixed(q, u / z - 1 / (2 * z**2))
    log_weight = -(u**2) / 2 + np.log(step / math.sqrt(2 * math.pi))
    exponent = alpha * loss
    top = (log_weight + exponent).max(axis=1)
    # E_Q[e^L] = 1, so A_α - 1 = E_Q[e^(αL) - 1 - α(e^L - 1)]: no digits are lost where A_α is close to 1.
    with np.errstate(over="ignore", invalid="ignore"):
        excess = np.exp(log_weight) * (np.expm1(exponent) - alpha * np.expm1(loss))
        small = np.log1p(excess.sum(axis=1))
    large = top + np.log(np.exp(log_weight + exponent - top[:, None]).sum(axis=1))
    return np.where((top < 100) & np.isfinite(small), small, large)


def log_mixed(q: Array | float, y: Array) -> Array:
    """log(1 - q + q e^y)."""
    with np.errstate(divide="ignore"):
        small = np.log1p(q * np.expm1(np.minimum(y, 30)))
        return np.where((y > 30) | (q == 1), y + np.log(q + (1 - q) * np.exp(-np.maximum(y, 30))), small)


def epsilon_at(total: Callable[[float], float], alpha: float, delta: float) -> float:
    """ε from log A_α summed over the rounds (Canonne, Kamath & Steinke 2020, proposition 12)."""
    return total(alpha) / (alpha - 1) + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)


def best_order(total: Callable[[float], float], delta: float) -> tuple[float, float]:
    """The smallest ε over all real orders α > 1, and that order.

    (α-1) ε(α) is convex in α, so ε has one minimum. It is bracketed first, then found by golden-section search over
    log(α-1). The ε of any order is a bound, so that an inexact minimum is safe.
    """
    seen: dict[float, float] = {}

    def cost(t: float) -> float:
        if t not in seen:
            seen[t] = epsilon_at(total, 1 + math.exp(t), delta)
        return seen[t]

    low, middle, step = 0.5, 1.5, 1.0
    if cost(low) < cost(middle):
        low, middle, step = middle, low, -step
    high = middle + step
    while cost(high) < cost(middle):
        low, middle, step = middle, high, step * 1.6
        high = max(middle + step, -30.0)
        if high > math.log(LARGEST_ORDER):
            warnings.warn(f"the best Rényi order is above {LARGEST_ORDER:.3g}, so ε is larger than necessary.")
            break
        if high == -30:  # at order 1: δ is close to 1
            break
    golden = (math.sqrt(5) - 1) / 2
    low, high = min(low, high), max(low, high)
    while high - low > 1e-5:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    t = min(seen, key=lambda t: seen[t])
    return max(0.0, seen[t]), 1 + math.exp(t)


def laplace_moments(pure: Array, alpha: float) -> Array:
    """log E_Q[e^(αL)] of `pure`-DP Laplace queries, for α > 1 (Mironov 2017, arXiv 1702.07476, proposition 6)."""
    up, down = (alpha - 1) * pure, -alpha * pure
    large = up + np.log((alpha + (alpha - 1) * np.exp(down - up)) / (2 * alpha - 1))
    small = (alpha * np.expm1(np.minimum(up, 1)) + (alpha - 1) * np.expm1(down)) / (2 * alpha - 1)
    return np.where(up < 1, np.log1p(small), large)


class GaussianMechanism:
    """The Gaussian mechanism with μ = 1/z, or any mechanism that is μ-Gaussian DP: N(0, 1) against N(μ, 1).

    Exact (ε, δ) by Balle & Wang 2018, arXiv 1805.06530, theorem 8.
    """

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def delta(self, epsilon: float) -> float:
        """Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)."""
        mu = self.mu
        return float(max(0, ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))))

    def epsilon(self, delta: float) -> float:
        if self.mu > 1e9:  # beyond double precision
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        high = self.mu**2 / 2 + self.mu * math.sqrt(2 * math.log(1 / delta)) + 1  # Bun & Steinke 2016, proposition 1.3
        root = brentq(lambda e: self.delta(e) - delta, 0.0, high, xtol=1e-14, rtol=1e-13)
        return float(root) * (1 + 1e-12)


def composed(z: Array, counts: Array) -> GaussianMechanism:
    """The composition of Gaussian mechanisms on full batches: μ² = Σ 1/z²."""
    return GaussianMechanism(math.sqrt(float(np.dot(counts, 1 / z**2))))


class Rounds:
    """Releases with their counts, as arrays [R]: of Gaussian rounds (z, q), Poisson-sampled or on all records, and of
    Laplace queries. Other sampling does not amplify."""

    def __init__(self, found: Mapping[Release, int]) -> None:
        self.z = np.array([release.z for release in found])
        self.q = np.array([release.q if release.policy == "poisson" else 1.0 for release in found])
        self.counts = np.array([float(count) for count in found.values()])
        self.laplace: Mask = np.array([release.policy == "laplace" for release in found], dtype=bool)

    def moments(self, alpha: float) -> Array:
        """[R] numbers: log E_Q[e^(αL)] of one of each, for one real order α."""
        result = np.empty(len(self.z))
        result[self.laplace] = laplace_moments(1 / self.z[self.laplace], alpha)
        result[~self.laplace] = log_moments(self.z[~self.laplace], self.q[~self.laplace], alpha)
        return result

    def moment(self, alpha: float) -> float:
        """log A_α of all rounds."""
        return float(np.dot(self.counts, self.moments(alpha)))

    def amplified(self, delta: float) -> Array:
        """[R] numbers: each round's amplified ε at `delta`; that of a Laplace query holds at δ = 0."""
        each = np.array([
            1 / z if pure else GaussianMechanism(1 / z).epsilon(min(delta / q, 1 - 1e-12))
            for z, q, pure in zip(self.z, self.q, self.laplace, strict=True)
        ])  # fmt: skip
        return np.where(each > 700, each + np.log(self.q), np.log1p(self.q * np.expm1(np.minimum(each, 700))))


class BasicComposition(Rounds):
    """Sequential composition: ε and δ add up. Every round has the same δ."""

    def epsilon(self, delta: float) -> float:
        return float(np.dot(self.counts, self.amplified(delta / self.counts.sum())))


class StrongComposition(Rounds):
    """Strong composition (Kairouz, Oh & Viswanath 2015, arXiv 1311.0776, theorem 3.5), at the best split of δ between
    the rounds and the composition."""

    def epsilon(self, delta: float) -> float:
        return best_split(lambda share: self._at(delta, share))

    def _at(self, delta: float, share: float) -> float:
        each = self.amplified(-math.expm1(math.log1p(-share * delta) / self.counts.sum()))
        slack = -math.expm1(math.log1p(-delta) - math.log1p(-share * delta))  # 1 - (1-slack)(1-share·δ) = δ
        return strong(each, self.counts, slack)


def strong(each: Array, counts: Array, slack: float) -> float:
    """ε of rounds with ε `each` [R], `counts` [R] times, with probability `slack` that the composition fails."""
    total, squares = float(np.dot(counts, each)), float(np.dot(counts, each**2))
    drift = float(np.dot(counts, each * np.tanh(each / 2)))
    return min(
        total,
        drift + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / slack)),
        drift + math.sqrt(2 * squares * math.log(1 / slack)),
    )


def best_split(epsilon_at: Callable[[float], float]) -> float:
    """The smallest ε over the rounds' share of δ, in (0, 1); it may have a second minimum, at the end of the range."""
    bounded = partial(minimize_scalar, lambda t: epsilon_at(1 / (1 + math.exp(t))), method="bounded")
    others = {t: epsilon_at(1 / (1 + math.exp(t))) for t in range(-11, 12, 2)}
    found, t = bounded(bounds=(-12, 12)).fun, min(others, key=others.__getitem__)
    return float(found if found <= others[t] else bounded(bounds=(t - 1, t + 1)).fun)
