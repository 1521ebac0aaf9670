"""How numbers are shown: a shortened claim must still hold."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def up(value: float, digits: int, rounding: str = ROUND_CEILING) -> str:
    """An upper bound, such as ε or δ, rounded up to `digits` significant digits."""
    if not math.isfinite(value):
        return f"{value:g}"
    # repr, not the binary fraction: 1e-05 stays 1e-05
    rounded = Decimal(repr(float(value))).normalize(Context(prec=digits, rounding=rounding))
    return f"{float(rounded):.{digits}g}"


def down(value: float, digits: int) -> str:
    """A lower bound, such as the ε that an audit found or what is left of a budget, rounded down."""
    return up(value, digits, ROUND_FLOOR)


def counted(count: int, noun: str) -> str:
    """A number of things in words.

    Example:
        >>> counted(1, "run"), counted(3, "run")
        ('1 run', '3 runs')
    """
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
