"""The Gaussian mechanism, Gaussian DP, and sequential and strong composition of (ε, δ).

In both compositions each round is a Gaussian mechanism that is (ε₀, δ₀)-DP, with ε₀ exact for δ₀. Poisson sampling
amplifies it to (log(1 + q(e^ε₀ - 1)), qδ₀) (Balle, Barthe & Gaboardi 2018, theorem 8). A Laplace query on all records
is (1/z, 0)-DP.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr

from dpexp.accounting.rdp import Array, Mask


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


def central_limit(z: Array, q: Array, counts: Array) -> GaussianMechanism:
    """Gaussian DP in the limit of many Poisson-sampled rounds: μ² = Σ q²(e^(1/z²) - 1).

    An approximation, whose ε may lie below the true one (Bu, Dong, Long & Su 2019, arXiv 1911.11607, section 3).
    """
    with np.errstate(over="ignore"):
        squares = np.where(q == 1, 1 / z**2, q**2 * np.expm1(1 / z**2))
    return GaussianMechanism(math.sqrt(float(np.dot(counts, squares))))


def amplified(z: Array, q: Array, delta: float, laplace: Mask | None = None) -> Array:
    """Each round's amplified ε [R] at `delta`; for rounds of `laplace` [R] it holds at δ = 0."""
    pure = np.zeros(len(z), dtype=bool) if laplace is None else laplace
    each = np.array([
        1 / z_r if pure_r else GaussianMechanism(1 / z_r).epsilon(min(delta / q_r, 1 - 1e-12))
        for z_r, q_r, pure_r in zip(z, q, pure, strict=True)
    ])  # fmt: skip
    return np.where(each > 700, each + np.log(q), np.log1p(q * np.expm1(np.minimum(each, 700))))


class BasicComposition:
    """Sequential composition: ε and δ add up. Every round has the same δ."""

    def __init__(self, z: Array, q: Array, counts: Array, laplace: Mask | None = None) -> None:
        self._z, self._q, self._counts, self._laplace = z, q, counts, laplace

    def epsilon(self, delta: float) -> float:
        each = amplified(self._z, self._q, delta / self._counts.sum(), self._laplace)
        return float(np.dot(self._counts, each))


class StrongComposition:
    """Strong composition (Kairouz, Oh & Viswanath 2015, arXiv 1311.0776, theorem 3.5), at the best split of δ between
    the rounds and the composition."""

    def __init__(self, z: Array, q: Array, counts: Array, laplace: Mask | None = None) -> None:
        self._z, self._q, self._counts, self._laplace = z, q, counts, laplace

    def epsilon(self, delta: float) -> float:
        return best_split(lambda share: self._at(delta, share))

    def _at(self, delta: float, share: float) -> float:
        rounds = self._counts.sum()
        each = amplified(self._z, self._q, -math.expm1(math.log1p(-share * delta) / rounds), self._laplace)
        slack = -math.expm1(math.log1p(-delta) - math.log1p(-share * delta))  # 1 - (1-slack)(1-share·δ) = δ
        return strong(each, self._counts, slack)


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
    """The smallest ε over the rounds' share of δ, in (0, 1)."""
    found = minimize_scalar(lambda t: epsilon_at(1 / (1 + math.exp(t))), bounds=(-12, 12), method="bounded")
    return float(found.fun)
