"""Convolution of many distributions by their characteristic functions, with a bound on what rounding does to it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft

from dpexp.accounting.renyi import Array

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
