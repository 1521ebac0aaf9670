"""The cumulant generating function of a sum of privacy losses, approximately: where to look, and how finely."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpexp.accounting.dominating_pairs import Pair
from dpexp.accounting.rdp import Array

_ULP, _LONG_ULP = 2.0**-53, float(np.finfo(np.longdouble).eps) / 2
_GONE = -46.0  # logarithm of a characteristic function that is as good as 0
_SPARSE = 1 / 64  # of all frequencies
_TURNS = 2**24  # that may be summed over
_TERMS = 512  # at a time


def log_rounding(rounds: float) -> float:
    """About the logarithm of what rounding does to a sum of tilted masses."""
    return math.log(200 * (rounds * _LONG_ULP + _ULP))


class Convolution:
    """The circular convolution of distributions on `size` points.

    Where the product of characteristic functions is below e^-46, frequencies are dropped for good. Until few are left,
    functions are found by FFT, in extended precision where the machine has it; then they are sums, 1 + Σ m (e^iφ - 1).

    Rounding, in units u of the precision. The FFT of N masses that sum to 1 errs by at most 8 (log2 N + 2) u at each
    frequency, since a radix-2 butterfly errs by less than 7u (Higham 2002, Accuracy and Stability of Numerical
    Algorithms, section 24.1); another 16u are for the logarithm, the power and the exponential. The sum of K terms, 512
    at a time, errs by at most 2 (K/512 + 520) u Σ m |e^iφ - 1|, and that by at most the root of Σ m |e^iφ - 1|².
    Characteristic functions are at most 1 in absolute value, so that the errors of all T factors (powers are products)
    at most add up. By Parseval's identity the L2 norm of all masses' errors is the root mean square of that over the
    frequencies, to which the transform back adds 8 (log2 N + 3) u times the masses' own norm.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._live = np.arange(size // 2 + 1)
        self._log = np.zeros(len(self._live), dtype=np.clongdouble)
        self._log_bound = np.zeros(len(self._live))
        self._errors = np.zeros(len(self._live))
        self._shift = 0

    def add(self, starts: Sequence[int], masses: Sequence[Array], counts: Array) -> None:
        """Several distributions, each as often as it counts.

        Args:
            starts: the first point of each; masses: at the points from there on, summing to 1.
        """
        width = max(start + len(mass) for start, mass in zip(starts, masses, strict=True)) - min(starts)
        for r, (start, mass) in enumerate(zip(starts, masses, strict=True)):
            if len(self._live) < min(_SPARSE * self._size, _TURNS / width):
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
        """Drops frequencies; says which of them stay."""
        self._log_bound += log_bound
        kept = self._log_bound > _GONE
        self._live, self._log_bound = self._live[kept], self._log_bound[kept]
        self._log, self._errors = self._log[kept], self._errors[kept]
        return kept

    def masses(self, first: int) -> tuple[Array, float]:
        """Those of the points from `first` on, and a bound on the L2 norm of their errors."""
        spectrum = np.zeros(self._size // 2 + 1, dtype=complex)
        spectrum[self._live] = np.exp(self._log)
        mass = np.maximum(irfft(spectrum, self._size), 0)
        norm = math.sqrt(float(np.square(mass).sum()))  # np.linalg.norm leaves threads spinning
        forth = math.sqrt(2 * float(np.sum(self._errors**2)) / self._size)
        back = 8 * (math.log2(self._size) + 3) * _ULP * norm
        return np.roll(mass, -((first - self._shift) % self._size)), forth + back + math.exp(_GONE)


_NEXT_TO_NOTHING = -750.0  # logarithm of a δ
_MOST_PAIRS = 64  # kinds of rounds of which losses may be looked at closely
_WIDE = 600.0  # e^600 is still a number
_RESOLVED = 2.0**-30  # of a loss
_BEYOND = 25  # e^-25 of a tilted law is next to nothing


class Tilted(NamedTuple):
    """K(θ) = Σ log E[e^(θL)]; the mean K' and the standard deviation √K'' of ΣL under the tilted law; what one round of
    each kind [R] has in K, and all of its kind in K''."""

    log: float
    mean: float
    deviation: float
    logs: Array
    variances: Array


class Window(NamedTuple):
    """Losses that matter, when they are tilted by θ.

    Attributes:
        steep: the θ at which Chernoff's bound says best what lies above `high`.
    """

    theta: float
    low: float
    high: float
    steep: float

    @property
    def width(self) -> float:
        return self.high - self.low


class Cumulants:
    """Of losses [R, M] with the logarithms of their masses, sorted, which happened `counts` [R] times.

    Args:
        coarse: by how much the logarithm of a tail's mass may change from one loss to the next.
    """

    def __init__(self, losses: Array, log_mass: Array, counts: Array, coarse: float) -> None:
        self._losses, self._log_mass, self._counts, self._coarse = losses, log_mass, counts, coarse
        self._seen: dict[float, Tilted] = {}

    @property
    def reverse(self) -> "Cumulants":
        """Of Q against P."""
        return Cumulants(-self._losses[:, ::-1], (self._log_mass - self._losses)[:, ::-1], self._counts, self._coarse)

    def truncated(self, log_tail: float) -> "Cumulants":
        """Without each round's largest and smallest losses, the mass of which is below e^log_tail."""
        mass = np.exp(self._log_mass)
        with np.errstate(divide="ignore"):
            log_above, log_below = np.log(np.cumsum(mass[:, ::-1], axis=1)[:, ::-1]), np.log(np.cumsum(mass, axis=1))
        kept = np.minimum(log_above, log_below) >= log_tail - self._coarse
        return Cumulants(self._losses, np.where(kept, self._log_mass, -np.inf), self._counts, self._coarse)

    @property
    def range(self) -> tuple[Array, Array]:
        """Smallest and largest loss of each kind of round [R]."""
        kept = np.isfinite(self._log_mass)
        smallest = np.where(kept, self._losses, np.inf).min(axis=1)
        return smallest, np.where(kept, self._losses, -np.inf).max(axis=1)

    def at(self, theta: float) -> Tilted:
        if theta not in self._seen:
            exponent = self._log_mass + theta * self._losses
            top = exponent.max(axis=1, keepdims=True)
            weight = np.exp(exponent - top)
            norm = weight.sum(axis=1)
            mean = (weight * self._losses).sum(axis=1) / norm
            variances = self._counts * (weight * (self._losses - mean[:, None]) ** 2).sum(axis=1) / norm
            logs = np.log(norm) + top[:, 0]
            total = float(self._counts @ mean)
            deviation = max(math.sqrt(float(variances.sum())), abs(total) * _RESOLVED, 1e-150)
            self._seen[theta] = Tilted(float(self._counts @ logs), total, deviation, logs, variances)
        return self._seen[theta]

    def chernoff(self, theta: float, loss: float) -> float:
        """The logarithm of Chernoff's bound on the mass above `loss`."""
        return self.at(theta).log - theta * loss

    def tilt_for_mean(self, loss: float) -> float:
        """The θ > 0 whose tilted mean is `loss`, or next to 0."""
        return self._root(lambda theta: self.at(theta).mean - loss)

    def tilt_for_delta(self, log_delta: float) -> float:
        """The θ > 0 whose tilted mean is near the ε of δ, unless tails are heavy; or next to 0."""
        return self._root(lambda theta: log_delta - self.log_delta(theta))

    def log_delta(self, theta: float) -> float:
        """Of δ at the tilted mean, were the tilted law Gaussian with standard deviation s:
        e^(K - θK') (B(θs) - B((1+θ)s)) with B(x) = e^(x²/2) Φ(-x)."""
        at = self.at(theta)
        x, s = theta * at.deviation, at.deviation
        first = math.exp(x**2 / 2 + log_ndtr(-x))
        if s > 1e-4:
            between = first - math.exp((x + s) ** 2 / 2 + log_ndtr(-x - s))
        else:
            between = s * (1 / math.sqrt(2 * math.pi) - x * first)
        return at.log - theta * at.mean + math.log(max(between, 1e-300))

    def light_log_delta(self, epsilon: float) -> float:
        """Of δ(ε), where the tail is so light that this can be told; else that of 1."""
        theta = self.tilt_for_mean(epsilon)
        return self.log_delta(theta) if self.at(theta).deviation < 2 * self.at(0.0).deviation else 0.0

    def _root(self, rising: Callable[[float], float]) -> float:
        deviation = self.at(0.0).deviation
        low, high = 1e-3 / deviation, 1 / deviation
        if rising(low) >= 0:
            return low
        while rising(high) < 0 and self.log_delta(high) > _NEXT_TO_NOTHING and high * deviation < 1e4:
            low, high = high, 2 * high
        if rising(high) <= 0:
            return high
        return math.exp(brentq(lambda t: rising(math.exp(t)), math.log(low), math.log(high), xtol=0.02))

    def window(self, theta: float, log_lost: float) -> Window:
        """Below it lies next to nothing of the tilted law. Above it lies about e^log_lost of the law itself; what lies
        there of the tilted law is next to nothing, or comes to lie below the mean when it is folded into the window."""
        at = self.at(theta)
        steps = [k / at.deviation for k in (1 / 64, 1 / 16, 1 / 4, 1, 2, 4, 8)]
        low = max((at.log - self.at(theta - step).log - _BEYOND) / step for step in steps)
        low = max(low, at.mean - _WIDE / theta)
        top = min((self.at(theta + step).log - at.log + _BEYOND) / step for step in steps)
        steeps = [theta + k / at.deviation for k in (0, 1 / 32, 1 / 8, 1 / 2, 1, 2, 4, 8, 16)]
        high, steep = min(((self.at(steep).log - log_lost) / steep, steep) for steep in steeps)
        return Window(theta, low, max(high, top - (at.mean - low) / 2), steep)

    def step(self, theta: float) -> float:
        """Of a grid that raises ε by about a ten-thousandth: it multiplies each round's E[e^(θL)] by at most
        1 + θ(1+θ)h²/8, and adds at most h²/4 to its variance."""
        at, rounds = self.at(theta), float(self._counts.sum())
        return math.sqrt(min(1.2e-3 * at.deviation**2, 8e-4 * max(at.mean, at.deviation) / (1 + theta)) / rounds)


def cumulants_of(pairs: Sequence[Pair], counts: Array) -> Cumulants:
    step = 0.1 if len(pairs) <= _MOST_PAIRS else 0.7
    points = [pair.points(step) for pair in pairs]
    shape = len(points), max(len(losses) for losses, _ in points)
    losses, log_mass = np.zeros(shape), np.full(shape, -np.inf)
    for r, (own, own_mass) in enumerate(points):
        order = np.argsort(own)
        losses[r, : len(own)], log_mass[r, : len(own)] = own[order], own_mass[order]
    return Cumulants(losses, log_mass, counts, 10 * step)
