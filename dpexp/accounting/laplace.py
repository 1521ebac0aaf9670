"""The Laplace mechanism: what tells two answers apart whose L1 distance is ε₀ scales of the noise.

P = Lap(0, 1) against Q = Lap(ε₀, 1) dominates it also where several coordinates move, by ε₁ + ε₂ + … = ε₀. For one
coordinate, the divergence is h(ε) = max(0, 1 - e^ε, 1 - e^((ε-ε₀)/2)). For two it is E[h₂(ε - L₁)], which is at most
h₁₂: with g(u) = min(1, e^((ε₂-|u|)/2)) that comes to

    F(ε) = ½ g(ε-ε₁) + ½ g(ε+ε₁) + ¼ ∫_{ε-ε₁}^{ε+ε₁} g >= 1    for |ε| <= ε₁ + ε₂.

F is even and F(ε₁+ε₂) = 1. For ε >= 0 it does not rise: where ε - ε₁ >= -ε₂, no term of its derivative is above 0, and
below that they add up to 0. More coordinates follow one by one.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from dpexp.accounting.pairs import Cells
from dpexp.accounting.renyi import Array

_ULP = 2.0**-53
_FINE = 2**14  # points, at most, for estimates


@dataclass(frozen=True)
class Laplace:
    """P against Q. The loss is ε₀ with mass 1/2, -ε₀ with mass e^-ε₀/2, and L with density e^((L-ε₀)/2)/4 between."""

    pure: float  # ε₀

    @property
    def reverse(self) -> "Laplace":
        return self

    @property
    def most(self) -> float:
        return self.pure

    def discretized(self, h: float, lowest: float, log_tail: float, top: float = np.inf) -> tuple[int, Array, float]:
        cells = self.cells(h, lowest)
        return cells.first, cells.spread(h), 0.0

    def cells(self, h: float, lowest: float) -> Cells:
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
        edges = np.linspace(-e, e, min(_FINE, 8 + int(min(e, 1e9) / step)))
        mass = np.exp((edges[:-1] - e) / 2) * np.expm1(np.diff(edges) / 2) / 2
        with np.errstate(divide="ignore"):
            inner = np.log(mass)
        return (
            np.concatenate([[-e], (edges[1:] + edges[:-1]) / 2, [e]]),
            np.concatenate([[-e - np.log(2)], inner, [-np.log(2)]]),
        )


def laplace_moments(pure: Array, alpha: float) -> Array:
    """log E_Q[e^(αL)] of the Laplace mechanism, of an order α > 1 (Mironov 2017, arXiv 1702.07476, proposition 6)."""
    up, down = (alpha - 1) * pure, -alpha * pure
    large = up + np.log((alpha + (alpha - 1) * np.exp(down - up)) / (2 * alpha - 1))
    small = (alpha * np.expm1(np.minimum(up, 1)) + (alpha - 1) * np.expm1(down)) / (2 * alpha - 1)
    return np.where(up < 1, np.log1p(small), large)


def gaussian_above(pure: Array) -> Array:
    """The μ of Gaussian DP that whatever is ε-DP has: that curve lies below the lines of ε-DP, since it is convex and
    meets them where both errors are 1/(1 + e^ε) (Dong, Roth & Su 2022, proposition 2.12)."""
    return -2 * ndtri_exp(-np.logaddexp(0, pure))


def pure_below(mu: float) -> float:
    """The ε for which ε-DP is μ-Gaussian DP by that bound."""
    return float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))
