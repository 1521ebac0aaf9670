"""The binary digits of probabilities, as many as are asked for, and every one of them right."""

from decimal import MIN_EMIN, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from math import floor

_GUARD = 128  # bits with which powers are multiplied


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
