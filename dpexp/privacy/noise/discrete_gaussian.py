"""Noise whose privacy does not rest on real numbers (`noise=discrete_gaussian`; the paper, section 8, leaves it open).

Each record's clipped vector becomes whole multiples of a grid (`Lattice`), sums are whole numbers, and the noise is a
discrete Gaussian, P(v) ∝ e^(-v²/2σ²), drawn exactly (Canonne, Kamath & Steinke 2020, arXiv 2004.00010). What it costs
is said by `DiscreteSumQueryEvent`.
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

SIGMA = 2**24  # σ̃ in units of the grid, for every group and round
SIGMA2 = SIGMA**2
_LARGEST = 2**31 - 1  # of a coordinate
_HALF = 31  # bits
_MARGIN = 1 - 2.0**-40  # more than float64 rounds
_COARSE = 2**10  # S² for each coordinate: rounding shortens a vector of norm S by less than √d, which is S/32
_MOST = 2**62
_BITS = 31  # of a word that are compared at first
_WORD = 2**_BITS
_DIGIT = 14  # bits of an exponent that one table answers for
_AT_ONCE = 2**15  # proposals whose words stay in the cache
_LARGEST_SIGMA = 2**28  # σ
_GUARD = 128  # bits with which powers are multiplied


@dataclass(frozen=True)
class Lattice:
    """A group's vectors, scaled by 1/α_j, in units of γ = σ̃·2^-24: whole numbers with squared norms of at most S².

    *Sensitivity.* A record adds u, whole numbers that depend on it alone, to the sum, and only if Σ u² <= S2 as whole
    numbers, which is checked however u came about: one record more or less moves the sum by a vector of squared norm at
    most S2, exactly, and another in its place by one of norm at most 2√S2. It is clipped in float64 and rounded towards
    zero, so that a record does not fail, and contribute zero, but where float64 errs by more than 2^-40. With exact
    noise the engine computes each record's gradient alone, since in company libraries may round it otherwise.

    *Overflow.* n √S2 < 2^62, which is checked beforehand. Were there more records than n, or were the noise beyond
    2^62, sums would wrap around: they are the true sums modulo 2^64, a function of these, which costs nothing.

    Attributes:
        grid: γ; S2: ⌊(S/γ)²⌋, and at least 1.
    """

    grid: float
    S2: int

    def rounded(self, vectors: Tensor, norms: Tensor, c: Tensor | float = 1.0) -> Tensor:
        """[B, d] int64: clipped vectors, in units of the grid.

        Args:
            vectors: [B, d] float64, already divided by α_j; norms: [B] at least theirs, in float64; c: [B], what a clip
                rule says they are to be multiplied by, which is at most S/norm anyhow.
        """
        bound = self.S2**0.5 * _MARGIN
        c = torch.where(norms.isfinite(), (bound / norms).clamp(max=c / self.grid), 0)
        scaled = vectors * c[:, None]
        scaled = torch.where(scaled.isfinite(), scaled, 0).clamp(-_LARGEST, _LARGEST)
        whole = scaled.to(torch.int64)  # towards zero
        whole[torch.tensor([square > self.S2 for square in squares(whole)], dtype=torch.bool)] = 0
        return whole

    def check(self, group: str, d: int, n: int) -> None:
        """Refuses noise that is too little, or too much, to be exact for n records."""
        z = SIGMA / self.S2**0.5
        if self.S2 > _LARGEST**2 or n * (isqrt(self.S2) + 1) >= _MOST:
            raise ConfigError(
                f"noise=discrete_gaussian: group {group} has σ̃/S = {z:.3g} for n = {n} records, and 64 bits could "
                f"not hold their "
                "sum; choose more noise, or noise=gaussian."
            )
        if self.S2 / d < _COARSE:
            raise ConfigError(
                f"noise=discrete_gaussian: group {group} has σ̃/S = {z:.3g} for d = {d} numbers, so that the grid "
                f"could shorten a "
                f"record by more than 3 %; choose σ̃/S below {SIGMA / (_COARSE * d) ** 0.5:.3g}, or noise=gaussian."
            )


@lru_cache(maxsize=1024)
def lattice(S: float, sigma: float) -> Lattice:
    """For a group with privacy tuple (S, σ̃)."""
    return Lattice(sigma / SIGMA, max(1, floor((Fraction(S) / Fraction(sigma)) ** 2 * SIGMA2)))


def squares(whole: Tensor) -> list[int]:
    """[B]: squared norms of vectors [B, d] of whole numbers below 2^31, exactly: halves of squares are summed apart."""
    square = whole * whole
    high, low = (square >> _HALF).sum(1), (square & (2**_HALF - 1)).sum(1)
    return [(h << _HALF) + rest for h, rest in zip(high.tolist(), low.tolist(), strict=True)]


class DiscreteGaussian:
    """Draws whole numbers v with P(v) ∝ e^(-v²/2σ²), σ² rational and at most 2^56, by whole numbers alone.

    *Which law.* With K = ⌊σ⌋ (at least 1), a proposal is ±(Kx + y), with x >= 0 drawn from P(x) ∝ e^(-K²x²/2σ²), y
    uniform among 0 … K-1, and a fair sign. It is kept with probability e^(-y(y + 2Kx)/2σ²), and unless it is -0. Since
    K²x² + y(y + 2Kx) = (Kx + y)², what is kept has the law above (Ducas, Durmus, Lepoint & Lyubashevsky 2013,
    section 6.2; Karney 2016, algorithm D). Of the proposals 7 in 10 are kept.

    *How it is decided.* A probability p is met by a uniform U in [0, 1) with U < p. U has as many binary digits as are
    needed: 31 at first, and where they equal p's, more of U and more of p, so that the decision is that of real
    numbers. x is the number of its cumulative probabilities that are at most U. The probability that decides on a
    proposal is a product, over the digits of m = y(y + 2Kx) to the base 2^14, of e^(-digit·2^(14k)/2σ²), each met by a
    U of its own; tables hold 31 digits of these. There is no distance between this law and the discrete Gaussian, so
    that none is added to δ. How long it takes depends on the noise, and on nothing else.
    """

    def __init__(self, sigma2: Fraction | int, stream: KeyStream) -> None:
        self.sigma2, self.stream = Fraction(sigma2), stream
        if not 0 < self.sigma2 <= _LARGEST_SIGMA**2:
            raise ValueError(f"σ²={sigma2} must lie above 0, and be at most 2^56.")
        self._scale = max(1, isqrt(floor(self.sigma2)))
        self._rate = 1 / (2 * self.sigma2)
        self._borders, self._tables = _tables(self._scale, self._rate)
        self._fair = _WORD - _WORD % self._scale  # words from there on would favour small y

    def draw(self, count: int) -> Tensor:
        """[count] independent numbers, int64."""
        parts, missing = [torch.empty(0, dtype=torch.int64)], count
        with threads(1):  # more would wait for one another
            while missing > 0:
                values, kept = self.decided(self._words(min(_AT_ONCE, missing * 3 // 2 + 16)))
                parts.append(values[kept][:missing])
                missing -= len(parts[-1])
        return torch.cat(parts)

    def _words(self, proposals: int) -> Tensor:
        """[2 + tables, proposals], int32 of 32 random bits."""
        words = torch.empty(2 + len(self._tables), proposals, dtype=torch.int32)
        self.stream.fill(words, self.stream.nonce())
        return words

    def decided(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """What proposals are, and whether they are kept [proposals]."""
        negative = words[1] < 0
        words = words.bitwise_and(_WORD - 1)
        x = torch.zeros(words.shape[1], dtype=torch.int64)
        tied = torch.zeros_like(negative)
        for border in self._borders:
            x += words[0] >= border
            tied |= words[0] == border
        y = words[1].to(torch.int64)
        kept = y < self._fair
        y = y.bitwise_and_(self._scale - 1) if self._scale & (self._scale - 1) == 0 else y.remainder_(self._scale)
        values = x * self._scale + y
        m = y.mul_(values + x * self._scale)
        for word, table in zip(words[2:], self._tables, strict=True):
            limit = table.index_select(0, m & (2**_DIGIT - 1))
            kept &= word < limit
            tied |= word == limit
            m >>= _DIGIT
        kept &= ~(negative & (values == 0))
        values = torch.where(negative, -values, values)
        for i in tied.nonzero().flatten().tolist():
            value = self.settled(words[:, i].tolist(), bool(negative[i]))
            values[i], kept[i] = value or 0, value is not None
        return values, kept

    def settled(self, words: list[int], negative: bool) -> int | None:
        """The same of one proposal, with as many digits as it takes; None if it is not kept."""
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
    """A uniform number in [0, 1), of which more binary digits are drawn when they are needed."""

    def __init__(self, first: int, stream: KeyStream) -> None:
        self._value, self._bits, self._stream = first, _BITS, stream

    def less(self, digits: Callable[[int], int]) -> bool:
        """Whether it is less than p, of which `digits(bits)` is ⌊2^bits p⌋."""
        while self._value == (limit := digits(self._bits)):
            self._value, self._bits = self._value << 63 | int(self._stream.words(1)), self._bits + 63
        return self._value < limit


@lru_cache(maxsize=16)
def _tables(scale: int, rate: Fraction) -> tuple[list[int], list[Tensor]]:
    """31 digits of the cumulative probabilities of x, up to the first that has no other beyond it, and of each digit's
    probability. One that is 1 has 2^31 - 1, so that it is looked at closely."""
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

    `decimal` rounds e^x to the nearest (it has no more digits of x than of the result, which moves e^-x by up to x
    units). e^-x is irrational but for x = 0, so that enough digits tell its floor.
    """
    if x == 0:
        return 1 << bits
    digits = bits // 3 + 20
    while True:
        with localcontext() as context:
            context.prec, context.Emin = digits, MIN_EMIN
            power = Fraction((-Decimal(x.numerator) / Decimal(x.denominator)).exp())
        off = power * (x + 4) / 10 ** (digits - 1)
        low, high = (floor(bound * 2**bits) for bound in (power - off, power + off))
        if low == high:
            return low
        digits *= 2


def powers(x: Fraction, count: int, bits: int) -> list[int]:
    """⌊2^bits e^-dx⌋ for d = 0 … count-1.

    With E = e^-x 2^128 in [one, one + 1), each product rounded down leaves 2^128 e^-dx in [low, low + 2d + 1).
    """
    one, low, found = exp_digits(x, _GUARD), 1 << _GUARD, []
    for d in range(count):
        least, most = low >> (_GUARD - bits), (low + 2 * d + 1) >> (_GUARD - bits)
        found.append(least if least == most else exp_digits(d * x, bits))
        low = low * one >> _GUARD
    return found


@lru_cache(maxsize=1024)
def cumulative(a: Fraction, j: int, bits: int) -> int:
    """⌊2^bits Σ_{i<=j} e^(-ai²) / Σ_{i>=0} e^(-ai²)⌋ for a >= 1/8.

    Terms are summed up to the first, N, below 2^-w; what is left is less than that one, since
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
