"""The discrete Gaussian on the whole numbers, drawn exactly: P(v) ∝ e^(-v²/2σ²) (Canonne, Kamath & Steinke 2020)."""

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import floor, isqrt

import torch
from torch import Tensor

from dpexp.privacy.exact.probabilities import cumulative, exp_digits, powers
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.noise import threads

_BITS = 31  # of a word that are compared at first
_WORD = 2**_BITS
_DIGIT = 14  # bits of an exponent that one table answers for
_AT_ONCE = 2**15  # proposals whose words stay in the cache
_LARGEST = 2**28  # σ


class DiscreteGaussian:
    """Draws whole numbers v with P(v) ∝ e^(-v²/2σ²) from a key stream, by whole numbers alone.

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

    Args:
        sigma2: σ², rational, at most 2^56.
    """

    def __init__(self, sigma2: Fraction | int, stream: KeyStream) -> None:
        self.sigma2, self.stream = Fraction(sigma2), stream
        if not 0 < self.sigma2 <= _LARGEST**2:
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
