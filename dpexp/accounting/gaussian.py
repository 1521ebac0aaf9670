"""The Gaussian mechanism, exactly (Balle & Wang 2018, arXiv 1805.06530, theorem 8), and Gaussian DP."""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from dpexp.accounting.renyi import Array


class Gaussian:
    """Tells N(0, 1) from N(μ, 1): the Gaussian mechanism with μ = 1/z, or what is exactly or nearly that."""

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


def composed(z: Array, counts: Array) -> Gaussian:
    """Full-batch Gaussian releases are one with μ² = Σ 1/z²."""
    return Gaussian(math.sqrt(float(np.dot(counts, 1 / z**2))))


def central_limit(z: Array, q: Array, counts: Array) -> Gaussian:
    """Gaussian DP in the limit of many Poisson-sampled rounds: μ² = Σ q²(e^(1/z²) - 1) (Bu, Dong, Long & Su 2019,
    arXiv 1911.11607, section 3). An approximation, which may lie below the true ε."""
    with np.errstate(over="ignore"):
        squares = np.where(q == 1, 1 / z**2, q**2 * np.expm1(1 / z**2))
    return Gaussian(math.sqrt(float(np.dot(counts, squares))))
