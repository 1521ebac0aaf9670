"""Numerics of privacy loss distributions: convolution with error bounds, and approximate cumulants for tilts and grids.

The cumulant generating function only decides where the composed loss is computed, and how finely; the bounds of
`dpexp.accounting.pld` hold whatever it says.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpexp.accounting.composition import Array
from dpexp.accounting.dominating_pairs import Pair

_ULP, _LONG_ULP = 2.0**-53, float(np.finfo(np.longdouble).eps) / 2
_LOG_ZERO = -46.0  # logarithm below which a characteristic function counts as 0
_SPARSE = 1 / 64  # of all frequencies
_MAX_TERMS = 2**24  # of all direct sums together
_TERMS = 512  # summed at a time


def log_rounding(rounds: float) -> float:
    """The approximate logarithm of the rounding error of a sum of tilted masses."""
    return math.log(200 * (rounds * _LONG_ULP + _ULP))


class Convolution:
    """The circular convolution of distributions on `size` points.

    Frequencies at which the product of characteristic functions falls below e^-46 are dropped. While many are left,
    characteristic functions are computed by FFT, in extended precision if the machine has it; once few are left, as
    direct sums 1 + Σ m (e^iφ - 1).

    *Rounding errors*, in units u of the precision. The FFT of N masses that sum to 1 has an error of at most
    8 (log2 N + 2) u at each frequency, since a radix-2 butterfly has an error below 7u (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, section 24.1). The logarithm, power and exponential add at most 16u. A direct sum
    of K terms, 512 at a time, has an error of at most 2 (K/512 + 520) u Σ m |e^iφ - 1|, and Σ m |e^iφ - 1| is at most
    the root of Σ m |e^iφ - 1|². Characteristic functions are at most 1 in absolute value, so that the errors of all T
    factors (powers are products) at most add up. By Parseval's identity, the L2 norm of the errors of all masses is the
    root mean square of these errors over the frequencies. The inverse transform adds at most 8 (log2 N + 3) u times the
    norm of the masses.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._live = np.arange(size // 2 + 1)
        self._log = np.zeros(len(self._live), dtype=np.clongdouble)
        self._log_bound = np.zeros(len(self._live))
        self._errors = np.zeros(len(self._live))
        self._shift = 0

    def add(self, starts: Sequence[int], masses: Sequence[Array], counts: Array) -> None:
        """Convolves with several distributions, `counts` times each.

        Args:
            starts: the first point of each distribution.
            masses: at the points from there on, summing to 1.
        """
        width = max(start + len(mass) for start, mass in zip(starts, masses, strict=True)) - min(starts)
        for r, (start, mass) in enumerate(zip(starts, masses, strict=True)):
            if len(self._live) < min(_SPARSE * self._size, _MAX_TERMS / width):
                self._sum(starts[r:], masses[r:], counts[r:])
                return
            self._transform(start, mass, float(counts[r]))

    def _transform(self, start: int, mass: Array, count: float) -> None:
        row = np.bincount((start + np.arange(len(mass))) % self._size, mass, minlength=self._size)
        factor = rfft(row.astype(np.longdouble))[self._live]
        error = 8 * (math.log2(self._size) + 4) * _LONG_ULP
        kept = self._keep(count * np.log(np.abs(factor).astype(np.float64) + error))
        factor = factor[kept]
        self._log += count * np.log(np.where(factor == 0, error, factor))
        self._errors += count * error

    def _sum(self, starts: Sequence[int], masses: Sequence[Array], counts: Array) -> None:
        offset = min(starts)
        width = max(start + len(mass) for start, mass in zip(starts, masses, strict=True)) - offset
        rows = np.zeros((len(masses), width))
        for row, start, mass in zip(rows, starts, masses, strict=True):
            row[start - offset : start - offset + len(mass)] = mass
        middle = round(float((rows @ np.arange(width)).mean()))
        self._shift += int(counts.sum()) * (offset + middle)
        total = np.zeros((len(rows), 2 * len(self._live)))
        for first in range(0, width, _TERMS):
            part = rows[:, first : first + _TERMS]
            turns = np.outer(np.arange(first, first + part.shape[1]) - middle, self._live) % self._size
            half = np.pi / self._size * np.where(2 * turns > self._size, turns - self._size, turns)
            sine = np.sin(half)
            total -= part @ np.hstack([2 * sine**2, 2 * sine * np.cos(half)])
        real, imaginary = np.hsplit(total, 2)
        error = 2 * (width / _TERMS + _TERMS + 8) * _ULP * np.sqrt(-2 * real) + 1e-300
        more = 2 * real + real**2 + imaginary**2  # |1 + …|² - 1
        log_size = np.log1p(np.maximum(more, -0.5)) / 2
        log_size = np.where(more < -0.5, np.log(np.hypot(1 + real, imaginary) + 1e-300), log_size)
        angle = np.arctan2(imaginary, 1 + real)
        kept = self._keep(counts @ np.logaddexp(log_size, np.log(error)))
        self._log += counts @ (log_size + 1j * angle)[:, kept]
        self._errors += counts @ error[:, kept]

    def _keep(self, log_bound: Array) -> NDArray[np.bool_]:
        """Drops frequencies, and returns a mask of those that stay."""
        self._log_bound += log_bound
        kept = self._log_bound > _LOG_ZERO
        self._live, self._log_bound = self._live[kept], self._log_bound[kept]
        self._log, self._errors = self._log[kept], self._errors[kept]
        return kept

    def masses(self, first: int) -> tuple[Array, float]:
        """The masses of the points from `first` on, and a bound on the L2 norm of their errors."""
        spectrum = np.zeros(self._size // 2 + 1, dtype=complex)
        spectrum[self._live] = np.exp(self._log)
        mass = np.maximum(irfft(spectrum, self._size), 0)
        norm = math.sqrt(float(np.square(mass).sum()))  # np.linalg.norm leaves threads spinning
        forward = math.sqrt(2 * float(np.sum(self._errors**2)) / self._size)
        inverse = 8 * (math.log2(self._size) + 3) * _ULP * norm
        return np.roll(mass, -((first - self._shift) % self._size)), forward + inverse + math.exp(_LOG_ZERO)


_MIN_LOG_DELTA = -750.0
_MAX_FINE_PAIRS = 64  # different rounds, above which cumulants use a coarser step
_MAX_EXPONENT = 600.0  # e^600 is finite
_RESOLUTION = 2.0**-30  # relative, of a loss
_OMITTED_NATS = 25  # windows omit about e^-25 of a tilted distribution


class Tilted(NamedTuple):
    """K(θ) = Σ log E[e^(θL)], and the mean K' and standard deviation √K'' of ΣL under the tilted distribution.

    `logs` [R] has the contribution to K of one round of each pair, and `variances` [R] that of all its rounds to K''.
    """

    log: float
    mean: float
    deviation: float
    logs: Array
    variances: Array


class Window(NamedTuple):
    """The range of losses that contribute after tilting by θ.

    Attributes:
        steep: the θ of the tightest Chernoff bound on the mass above `high`.
    """

    theta: float
    low: float
    high: float
    steep: float

    @property
    def width(self) -> float:
        return self.high - self.low


class Cumulants:
    """The cumulant generating function of a sum of discretized losses.

    Args:
        losses, log_mass: sorted losses [R, M] of each pair, and the logarithms of their masses.
        counts: [R], the number of rounds of each pair.
        coarse: by how much the logarithm of a tail's mass may change from one loss to the next.
    """

    def __init__(self, losses: Array, log_mass: Array, counts: Array, coarse: float) -> None:
        self._losses, self._log_mass, self._counts, self._coarse = losses, log_mass, counts, coarse
        self._cache: dict[float, Tilted] = {}

    @property
    def reverse(self) -> "Cumulants":
        """The cumulants of Q against P."""
        return Cumulants(-self._losses[:, ::-1], (self._log_mass - self._losses)[:, ::-1], self._counts, self._coarse)

    def truncated(self, log_tail: float) -> "Cumulants":
        """Without each round's largest and smallest losses, whose mass is below e^log_tail."""
        mass = np.exp(self._log_mass)
        with np.errstate(divide="ignore"):
            log_above, log_below = np.log(np.cumsum(mass[:, ::-1], axis=1)[:, ::-1]), np.log(np.cumsum(mass, axis=1))
        kept = np.minimum(log_above, log_below) >= log_tail - self._coarse
        return Cumulants(self._losses, np.where(kept, self._log_mass, -np.inf), self._counts, self._coarse)

    @property
    def range(self) -> tuple[Array, Array]:
        """The smallest and largest losses [R] of each pair."""
        kept = np.isfinite(self._log_mass)
        smallest = np.where(kept, self._losses, np.inf).min(axis=1)
        return smallest, np.where(kept, self._losses, -np.inf).max(axis=1)

    def at(self, theta: float) -> Tilted:
        if theta not in self._cache:
            exponent = self._log_mass + theta * self._losses
            top = exponent.max(axis=1, keepdims=True)
            weight = np.exp(exponent - top)
            norm = weight.sum(axis=1)
            mean = (weight * self._losses).sum(axis=1) / norm
            variances = self._counts * (weight * (self._losses - mean[:, None]) ** 2).sum(axis=1) / norm
            logs = np.log(norm) + top[:, 0]
            total = float(self._counts @ mean)
            deviation = max(math.sqrt(float(variances.sum())), abs(total) * _RESOLUTION, 1e-150)
            self._cache[theta] = Tilted(float(self._counts @ logs), total, deviation, logs, variances)
        return self._cache[theta]

    def chernoff(self, theta: float, loss: float) -> float:
        """The logarithm of Chernoff's bound on the mass above `loss`."""
        return self.at(theta).log - theta * loss

    def tilt_for_mean(self, loss: float) -> float:
        """The θ > 0 whose tilted mean is `loss`, or a θ close to 0."""
        return self._root(lambda theta: self.at(theta).mean - loss)

    def tilt_for_delta(self, log_delta: float) -> float:
        """The θ > 0 whose tilted mean is near the ε at δ, unless tails are heavy; or a θ close to 0."""
        return self._root(lambda theta: log_delta - self.log_delta(theta))

    def log_delta(self, theta: float) -> float:
        """log δ at the tilted mean, if the tilted distribution were Gaussian with standard deviation s:
        δ = e^(K - θK') (B(θs) - B((1+θ)s)) with B(x) = e^(x²/2) Φ(-x)."""
        at = self.at(theta)
        x, s = theta * at.deviation, at.deviation
        first = _mills(x)
        between = first - _mills(x + s) if s > 1e-4 else s * (1 / math.sqrt(2 * math.pi) - x * first)
        return at.log - theta * at.mean + math.log(max(between, 1e-300))

    def light_log_delta(self, epsilon: float) -> float:
        """An estimate of log δ(ε) if the tail is light, otherwise 0."""
        theta = self.tilt_for_mean(epsilon)
        return self.log_delta(theta) if self.at(theta).deviation < 2 * self.at(0.0).deviation else 0.0

    def _root(self, rising: Callable[[float], float]) -> float:
        deviation = self.at(0.0).deviation
        low, high = 1e-3 / deviation, 1 / deviation
        if rising(low) >= 0:
            return low
        while rising(high) < 0 and self.log_delta(high) > _MIN_LOG_DELTA and high * deviation < 1e4:
            low, high = high, 2 * high
        if rising(high) <= 0:
            return high
        return math.exp(brentq(lambda t: rising(math.exp(t)), math.log(low), math.log(high), xtol=0.02))

    def window(self, theta: float, log_lost: float) -> Window:
        """The window for a tilt. Below it, the tilted mass is negligible. Above it lies about e^log_lost of the
        untilted mass; the tilted mass there is negligible, or wraps around to below the mean."""
        at = self.at(theta)
        steps = [k / at.deviation for k in (1 / 64, 1 / 16, 1 / 4, 1, 2, 4, 8)]
        low = max((at.log - self.at(theta - step).log - _OMITTED_NATS) / step for step in steps)
        low = max(low, at.mean - _MAX_EXPONENT / theta)
        top = min((self.at(theta + step).log - at.log + _OMITTED_NATS) / step for step in steps)
        steeps = [theta + k / at.deviation for k in (0, 1 / 32, 1 / 8, 1 / 2, 1, 2, 4, 8, 16)]
        high, steep = min(((self.at(steep).log - log_lost) / steep, steep) for steep in steeps)
        return Window(theta, low, max(high, top - (at.mean - low) / 2), steep)

    def step(self, theta: float) -> float:
        """The step h of a grid that increases ε by a factor of about 1e-4: it multiplies each round's E[e^(θL)] by at
        most 1 + θ(1+θ)h²/8, and adds at most h²/4 to its variance."""
        at, rounds = self.at(theta), float(self._counts.sum())
        return math.sqrt(min(1.2e-3 * at.deviation**2, 8e-4 * max(at.mean, at.deviation) / (1 + theta)) / rounds)


def _mills(x: float) -> float:
    """e^(x²/2) Φ(-x), with a relative error of at most 1e-8."""
    return math.exp(x**2 / 2 + log_ndtr(-x)) if x < 1e4 else 1 / (x * math.sqrt(2 * math.pi))


def cumulants_of(pairs: Sequence[Pair], counts: Array) -> Cumulants:
    """The cumulants of rounds with dominating pairs, which happened `counts` [R] times."""
    step = 0.1 if len(pairs) <= _MAX_FINE_PAIRS else 0.7
    points = [pair.points(step) for pair in pairs]
    shape = len(points), max(len(losses) for losses, _ in points)
    losses, log_mass = np.zeros(shape), np.full(shape, -np.inf)
    for r, (own, own_mass) in enumerate(points):
        order = np.argsort(own)
        losses[r, : len(own)], log_mass[r, : len(own)] = own[order], own_mass[order]
    return Cumulants(losses, log_mass, counts, 10 * step)
