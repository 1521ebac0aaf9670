"""Privacy loss distributions of Poisson-sampled Gaussian rounds, composed in the Fourier domain.

With P = (1-q) N(0, z²) + q N(1, z²) and Q = N(0, z²), removing a record compares P with Q, adding one Q with P. Each
privacy loss is put on a grid of step h so that the mass which P, and the mass which Q, has in a cell stay what they
are ("connect the dots": Doroshenko et al. 2022, arXiv 2207.04380), which can only raise δ(ε). A composition's
characteristic function is the product of the rounds' (Koskela et al. 2020, arXiv 1906.03049).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri

from dpexp.accounting.renyi import log_moments

Array = NDArray[np.float64]

_TAIL = 1e-16  # of each round's and of the composed distribution; counted as certain harm
_FINEST, _COARSEST = 2**15, 2**21  # points of the composed grid
_ROUNDING = 2.0**-48  # of a round's Fourier transform; measured 2^-51


class PrivacyLoss:
    """A discrete privacy loss distribution.

    Args:
        losses: increasing; mass: of each; infinite: mass of the infinite loss.
    """

    def __init__(self, losses: Array, mass: Array, infinite: float) -> None:
        harmful = losses > 0
        self._losses = losses[harmful]
        mass = np.maximum(mass[harmful], 0)
        self._upper = infinite + np.cumsum(mass[::-1])[::-1]
        self._lower = np.cumsum((mass * np.exp(-self._losses))[::-1])[::-1]
        self._infinite = infinite

    def delta(self, epsilon: float) -> float:
        """δ(ε) = E[(1 - e^(ε-L))⁺], for ε >= 0."""
        j = int(np.searchsorted(self._losses, epsilon, side="right"))
        if j == len(self._losses):
            return min(1.0, self._infinite)
        return float(min(1.0, max(self._upper[j] - self._scaled(epsilon, self._lower[j]), 0)))

    def epsilon(self, delta: float) -> float:
        """The smallest ε >= 0 with δ(ε) <= delta; infinite if none is known."""
        if self._infinite > delta:
            return math.inf
        beyond = np.append(self._upper[1:], self._infinite), np.append(self._lower[1:], 0.0)
        at_losses = beyond[0] - self._scaled(self._losses, beyond[1])  # falls
        over = np.flatnonzero(at_losses > delta)
        j = int(over[-1]) + 1 if len(over) else 0
        if j == len(self._losses) or self._upper[j] - delta <= self._lower[j]:
            return 0.0
        if self._lower[j] < 1e-290:  # of which too few digits are left
            return float(self._losses[j])
        return math.log((self._upper[j] - delta) / self._lower[j])

    @staticmethod
    def _scaled(epsilon: Any, lower: Any) -> Any:
        """e^ε·lower, also where e^ε overflows."""
        with np.errstate(divide="ignore"):
            return np.exp(epsilon + np.log(lower))


class ComposedLoss:
    """The privacy losses of removing and of adding a record, for rounds (z, q) [R] that happened `counts` [R] times."""

    def __init__(self, z: Array, q: Array, counts: Array) -> None:
        self._directions = [_composed(z, q, counts, sign) for sign in (1, -1)]

    def delta(self, epsilon: float) -> float:
        return max(direction.delta(epsilon) for direction in self._directions)

    def epsilon(self, delta: float) -> float:
        return max(direction.epsilon(delta) for direction in self._directions)


def _composed(z: Array, q: Array, counts: Array, sign: int) -> PrivacyLoss:
    """sign: 1 for the loss of P against Q (a record removed), -1 for that of Q against P (added)."""
    total = float(counts.sum())
    low, high = _range(z, q, counts, sign)
    variance = float(np.dot(counts, _variances(z, q, sign)))
    # A round's variance grows by at most h²/4, which is then under 0.03 % of it on average.
    h = min(0.03 * math.sqrt(variance / total), (high - low) / _FINEST)
    h = max(h, (high - low) / _COARSEST)
    first, last = math.floor(low / h), math.ceil(high / h)
    size = next_fast_len(last - first + 1, real=True)
    transform, infinite = np.ones(size // 2 + 1, dtype=complex), _TAIL + _ROUNDING * total
    for z_r, q_r, count in zip(z, q, counts, strict=True):
        start, mass, beyond = discretized(z_r, q_r, h, sign, _TAIL / total)
        folded = np.bincount((start + np.arange(len(mass))) % size, mass, minlength=size)
        transform *= rfft(folded) ** count
        infinite += count * beyond
    mass = np.roll(irfft(transform, size), -(first % size))
    return PrivacyLoss(h * (first + np.arange(size)), mass, min(infinite, 1.0))


def _range(z: Array, q: Array, counts: Array, sign: int) -> tuple[float, float]:
    """Between which values the composed loss lies but for a mass of _TAIL on each side, by Chernoff's bound."""
    nats = -math.log(_TAIL)
    variance = max(float(np.dot(counts, _variances(z, q, sign))), 1e-300)
    affordable = 1e4 * float(np.min(z * np.minimum(0.5, 0.55 * z)))  # for `log_moments`

    def reach(way: int) -> float:
        """The smallest bound over θ, halved from a Gaussian's best on until that no longer helps."""
        best, theta = math.inf, min(4 * math.sqrt(2 * nats / variance), affordable)
        while True:
            order = 1 + way * theta if sign > 0 else -way * theta
            bound = (float(np.dot(counts, log_moments(z, q, order))) + nats) / theta
            if bound >= best:
                return best
            best, theta = bound, theta / 2

    return -reach(-1), reach(1)


def _variances(z: Array, q: Array, sign: int) -> Array:
    """Of each round's loss, from its cumulants' second differences."""
    t = 0.01 * np.minimum(1, np.min(z))
    at = (1, 1 + t, 1 - t) if sign > 0 else (0, t, -t)
    middle, right, left = (log_moments(z, q, float(a)) for a in at)
    return np.maximum((right + left - 2 * middle) / t**2, 1e-30)


def discretized(z: float, q: float, h: float, sign: int, tail: float) -> tuple[int, Array, float]:
    """One round's loss on the grid h·(start + 0, 1, …): start, masses, and the mass of the infinite loss."""
    far = -z * float(ndtri(tail))
    low_x, high_x = -far, 1 + far
    first, last = math.floor(_loss(z, q, low_x) / h), math.ceil(_loss(z, q, high_x) / h)
    edges = h * np.arange(first, last + 1, dtype=np.float64)
    x = _where(z, q, edges)
    under_q = _between(x / z)
    under_p = (1 - q) * under_q + q * _between((x - 1) / z)
    if sign > 0:
        numerator, other, near = under_p, under_q, edges[:-1]
        beyond = (1 - q) * ndtr(-x[-1] / z) + q * ndtr(-(x[-1] - 1) / z)
        below = (1 - q) * ndtr(x[0] / z) + q * ndtr((x[0] - 1) / z)
    else:
        numerator, other, near = under_q[::-1], under_p[::-1], -edges[:0:-1]
        beyond, below = ndtr(x[0] / z), ndtr(-x[-1] / z)
        first = -last
    mass = np.zeros(len(edges))
    with np.errstate(divide="ignore"):
        upper = (numerator - np.exp(near + np.log(other))) / -math.expm1(-h)
    upper = np.clip(upper, 0, numerator)
    mass[1:] += upper
    mass[:-1] += numerator - upper
    mass[0] += below
    return first, mass, float(beyond)


def _loss(z: float, q: float, x: float) -> float:
    y = (2 * x - 1) / (2 * z**2)
    if q == 1:
        return y
    return math.log1p(q * math.expm1(y)) if y < 30 else y + math.log(q + (1 - q) * math.exp(-y))


def _where(z: float, q: float, losses: Array) -> Array:
    """The x at which the loss has these values; -∞ where it never falls so low."""
    if q == 1:
        return z**2 * losses + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.expm1(np.minimum(losses, 30)) / q
        y = np.where(
            losses < 30, np.log1p(np.maximum(ratio, -1)), losses + np.log1p(-(1 - q) * np.exp(-losses)) - math.log(q)
        )
    return z**2 * y + 0.5


def _between(u: Array) -> Array:
    """Standard normal mass between neighbouring u, without cancellation in the upper tail."""
    flipped = u[:-1] > 0
    return np.where(flipped, ndtr(-u[:-1]) - ndtr(-u[1:]), ndtr(u[1:]) - ndtr(u[:-1]))
