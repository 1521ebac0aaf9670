"""Discrete Gaussian noise on integers (`noise=discrete_gaussian`), whose privacy needs no real arithmetic.

Each record's clipped vector is quantized to integers (`Lattice`), so that sums are integers, and the noise is a
discrete Gaussian, P(v) ∝ e^(-v²/2σ²), sampled exactly (Canonne, Kamath & Steinke 2020, arXiv 2004.00010). Its event in
the ledger is `DiscreteSumQueryEvent`. The paper (section 8) leaves finite precision open.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import MIN_EMIN, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from math import floor, isqrt

import torch
from torch import Tensor

from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import threads
from dpexp.privacy.noise.randomness import KeyStream

SIGMA = 2**24  # σ̃ in quantization steps, for every group and round
SIGMA2 = SIGMA**2
_MAX_ENTRY = 2**31 - 1
_HALF = 31  # bits
_MARGIN = 1 - 2.0**-40  # more than the rounding error of float64
_MIN_S2_PER_ENTRY = 2**10  # rounding shortens a vector of norm S by less than √d, which is S/32 then
_MAX_SUM = 2**62
_BITS = 31  # of a word that are compared first
_WORD = 2**_BITS
_DIGIT = 14  # bits of an exponent for which there is one table
_BATCH = 2**15  # proposals whose words stay in the cache
_MAX_SIGMA = 2**28
_GUARD = 128  # bits with which powers are multiplied


@dataclass(frozen=True)
class Lattice:
    """Quantizes a group's vectors, scaled by 1/α_j, to integer multiples of γ = σ̃·2^-24.

    *Sensitivity.* A record adds a vector u of integers that depends only on that record, and only if Σ u² <= S2, which
    is checked in integers. So adding or removing a record changes the sum by a vector of squared norm at most S2,
    exactly, and replacing it by one of norm at most 2√S2. Vectors are clipped in float64 and rounded towards zero, so
    that a record fails the check, and contributes zero, only if float64 errs by more than 2^-40. With discrete noise
    each record's gradient is computed by itself, since in a batch libraries may round it differently.

    *Overflow.* n √S2 < 2^62 is checked beforehand. If there were more records than n, or noise beyond 2^62, sums would
    wrap around: they would be the true sums modulo 2^64, which is post-processing.

    Attributes:
        grid: the quantization step γ; S2: ⌊(S/γ)²⌋, at least 1.
    """

    grid: float
    S2: int

    def rounded(self, vectors: Tensor, norms: Tensor, c: Tensor | float = 1.0) -> Tensor:
        """Clipped vectors in quantization steps, [B, d] int64.

        Args:
            vectors: [B, d] float64, already divided by α_j.
            norms: [B] float64, at least those of the vectors.
            c: [B], the clip rule's factors; what is applied is at most S/norm.
        """
        bound = self.S2**0.5 * _MARGIN
        c = torch.where(norms.isfinite(), (bound / norms).clamp(max=c / self.grid), 0)
        scaled = vectors * c[:, None]
        scaled = torch.where(scaled.isfinite(), scaled, 0).clamp(-_MAX_ENTRY, _MAX_ENTRY)
        integers = scaled.to(torch.int64)  # towards zero
        integers[torch.tensor([square > self.S2 for square in squared_norms(integers)], dtype=torch.bool)] = 0
        return integers

    def check(self, group: str, d: int, n: int) -> None:
        """Raises ConfigError: sums of n records could overflow, or the quantization is too coarse for dimension d."""
        z = SIGMA / self.S2**0.5
        if self.S2 > _MAX_ENTRY**2 or n * (isqrt(self.S2) + 1) >= _MAX_SUM:
            raise ConfigError(
                f"noise=discrete_gaussian: group {group} has σ̃/S = {z:.3g} for n = {n} records, and 64 bits could "
                "not hold their sum; choose more noise, or noise=gaussian."
            )
        if self.S2 / d < _MIN_S2_PER_ENTRY:
            most = SIGMA / (_MIN_S2_PER_ENTRY * d) ** 0.5
            raise ConfigError(
                f"noise=discrete_gaussian: group {group} has σ̃/S = {z:.3g} in dimension {d}, so that quantization "
                f"could shorten a record by more than 3 %; choose σ̃/S below {most:.3g}, or noise=gaussian."
            )


@lru_cache(maxsize=1024)
def lattice(S: float, sigma: float) -> Lattice:
    """The quantization of a group with privacy tuple (S, σ̃)."""
    return Lattice(sigma / SIGMA, max(1, floor((Fraction(S) / Fraction(sigma)) ** 2 * SIGMA2)))


def squared_norms(integers: Tensor) -> list[int]:
    """[B] exact squared norms of vectors [B, d] of integers below 2^31; high and low bits are summed separately."""
    square = integers * integers
    high, low = (square >> _HALF).sum(1), (square & (2**_HALF - 1)).sum(1)
    return [(h << _HALF) + rest for h, rest in zip(high.tolist(), low.tolist(), strict=True)]


class DiscreteGaussian:
    """Samples integers v with P(v) ∝ e^(-v²/2σ²), σ² rational and at most 2^56, in integer arithmetic.

    *Distribution.* With K = ⌊σ⌋ (at least 1), a proposal is ±(Kx + y), with x >= 0 from P(x) ∝ e^(-K²x²/2σ²), y uniform
    in 0 … K-1, and a fair sign. It is accepted with probability e^(-y(y + 2Kx)/2σ²), but -0 is rejected. Since
    K²x² + y(y + 2Kx) = (Kx + y)², accepted proposals have the distribution above (Ducas, Durmus, Lepoint & Lyubashevsky
    2013, section 6.2; Karney 2016, algorithm D). 7 of 10 proposals are accepted.

    *Exact decisions.* An event of probability p happens if U < p for a uniform U in [0, 1). U has as many binary digits
    as needed: 31 first, and if they equal those of p, more digits of U and p, so that the decision is the one of real
    numbers. x is the number of its cumulative probabilities that are at most U. The probability of acceptance is a
    product of e^(-digit·2^(14k)/2σ²) over the digits of m = y(y + 2Kx) to the base 2^14, each decided by a U of its
    own; tables hold 31 digits of them. The distribution is exactly the discrete Gaussian, so that nothing is added to
    δ. The running time depends only on the noise.
    """

    def __init__(self, sigma2: Fraction | int, stream: KeyStream) -> None:
        self.sigma2, self.stream = Fraction(sigma2), stream
        if not 0 < self.sigma2 <= _MAX_SIGMA**2:
            raise ValueError(f"σ²={sigma2} must be above 0 and at most 2^56.")
        self._scale = max(1, isqrt(floor(self.sigma2)))
        self._rate = 1 / (2 * self.sigma2)
        self._borders, self._tables = _tables(self._scale, self._rate)
        self._fair = _WORD - _WORD % self._scale  # larger words are rejected, since they would favour small y

    def draw(self, count: int) -> Tensor:
        """[count] independent samples, int64."""
        parts, missing = [torch.empty(0, dtype=torch.int64)], count
        with threads(1):  # more would wait for one another
            while missing > 0:
                values, accepted = self.decide(self._words(min(_BATCH, missing * 3 // 2 + 16)))
                parts.append(values[accepted][:missing])
                missing -= len(parts[-1])
        return torch.cat(parts)

    def _words(self, proposals: int) -> Tensor:
        """The random bits of proposals, [2 + tables, proposals] int32."""
        words = torch.empty(2 + len(self._tables), proposals, dtype=torch.int32)
        self.stream.fill(words, self.stream.nonce())
        return words

    def decide(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The proposals of random words, and which are accepted [proposals]."""
        negative = words[1] < 0
        words = words.bitwise_and(_WORD - 1)
        x = torch.zeros(words.shape[1], dtype=torch.int64)
        tied = torch.zeros_like(negative)
        for border in self._borders:
            x += words[0] >= border
            tied |= words[0] == border
        y = words[1].to(torch.int64)
        accepted = y < self._fair
        y = y.bitwise_and_(self._scale - 1) if self._scale & (self._scale - 1) == 0 else y.remainder_(self._scale)
        values = x * self._scale + y
        m = y.mul_(values + x * self._scale)
        for word, table in zip(words[2:], self._tables, strict=True):
            limit = table.index_select(0, m & (2**_DIGIT - 1))
            accepted &= word < limit
            tied |= word == limit
            m >>= _DIGIT
        accepted &= ~(negative & (values == 0))
        values = torch.where(negative, -values, values)
        for i in tied.nonzero().flatten().tolist():
            value = self.decide_one(words[:, i].tolist(), bool(negative[i]))
            values[i], accepted[i] = value or 0, value is not None
        return values, accepted

    def decide_one(self, words: list[int], negative: bool) -> int | None:
        """One proposal with as many digits as needed; None: it is rejected."""
        x, place = 0, _Uniform(words[0], self.stream)
        while not place.less(lambda bits: cumulative(self._scale**2 * self._rate, x, bits)):  # noqa: B023
            x += 1
        y = words[1] % self._scale
        value = self._scale * x + y
        if words[1] >= self._fair or (negative and value == 0):
            return None
        m, k = y * (y + 2 * self._scale * x), 0
        while m >> (_DIGIT * k):
            exponent = (m >> (_DIGIT * k) & (2**_DIGIT - 1)) * 2 ** (_DIGIT * k) * self._rate
            first = words[2 + k] if k < len(self._tables) else int(self.stream.words(1)) % _WORD
            if not _Uniform(first, self.stream).less(lambda bits: exp_digits(exponent, bits)):  # noqa: B023
                return None
            k += 1
        return -value if negative else value


class _Uniform:
    """A uniform number in [0, 1), whose binary digits are drawn when they are needed."""

    def __init__(self, first: int, stream: KeyStream) -> None:
        self._value, self._bits, self._stream = first, _BITS, stream

    def less(self, digits: Callable[[int], int]) -> bool:
        """Whether it is less than p; `digits(bits)` is ⌊2^bits p⌋."""
        while self._value == (limit := digits(self._bits)):
            self._value, self._bits = self._value << 63 | int(self._stream.words(1)), self._bits + 63
        return self._value < limit


@lru_cache(maxsize=16)
def _tables(scale: int, rate: Fraction) -> tuple[list[int], list[Tensor]]:
    """31 digits of the cumulative probabilities of x, up to the first that has all of them 1, and of each exponent
    digit's probability. A probability of 1 is stored as 2^31 - 1, so that a tie decides it exactly."""
    borders = [cumulative(scale**2 * rate, 0, _BITS)]
    while borders[-1] < _WORD - 1:
        borders.append(cumulative(scale**2 * rate, len(borders), _BITS))
    largest = (scale - 1) * (scale - 1 + 2 * scale * (len(borders) - 1))
    tables: list[Tensor] = []
    while largest >> (_DIGIT * len(tables)):
        digits = powers(2 ** (_DIGIT * len(tables)) * rate, 2**_DIGIT, _BITS)
        tables.append(torch.tensor([min(limit, _WORD - 1) for limit in digits], dtype=torch.int32))
    return borders, tables


@lru_cache(maxsize=4096)
def exp_digits(x: Fraction, bits: int) -> int:
    """⌊2^bits e^-x⌋ for a rational x >= 0.

    `decimal` rounds e^-x to the nearest; x has as many digits as the result, which changes e^-x by up to x units. e^-x
    is irrational but for x = 0, so that enough digits determine the floor.
    """
    if x == 0:
        return 1 << bits
    digits = bits // 3 + 20
    while True:
        with localcontext() as context:
            context.prec, context.Emin = digits, MIN_EMIN
            power = Fraction((-Decimal(x.numerator) / Decimal(x.denominator)).exp())
        error = power * (x + 4) / 10 ** (digits - 1)
        low, high = (floor(bound * 2**bits) for bound in (power - error, power + error))
        if low == high:
            return low
        digits *= 2


def powers(x: Fraction, count: int, bits: int) -> list[int]:
    """⌊2^bits e^-dx⌋ for d = 0 … count-1.

    With 2^128 e^-x in [one, one + 1), products that are rounded down give 2^128 e^-dx in [low, low + 2d + 1).
    """
    one, low, digits = exp_digits(x, _GUARD), 1 << _GUARD, []
    for d in range(count):
        least, most = low >> (_GUARD - bits), (low + 2 * d + 1) >> (_GUARD - bits)
        digits.append(least if least == most else exp_digits(d * x, bits))
        low = low * one >> _GUARD
    return digits


@lru_cache(maxsize=1024)
def cumulative(a: Fraction, j: int, bits: int) -> int:
    """⌊2^bits Σ_{i<=j} e^(-ai²) / Σ_{i>=0} e^(-ai²)⌋ for a >= 1/8.

    Terms are summed up to the first, N, below 2^-w; the remainder is less than that term, since
    Σ_{i>N} e^(-ai²) < e^(-aN²) Σ_{k>=1} e^(-2aNk), and 2aN > log 2.
    """
    w = bits + 64
    while True:
        terms = [exp_digits(a * i * i, w) for i in range(j + 1)]
        total, count = sum(terms), j + 1
        while terms[-1]:
            terms.append(exp_digits(a * len(terms) ** 2, w))
        low, all_low = total, sum(terms)
        least = (low << bits) // (all_low + len(terms) + 1)
        most = min(((low + count) << bits) // all_low, 2**bits - 1)
        if least == most:
            return least
        w *= 2
