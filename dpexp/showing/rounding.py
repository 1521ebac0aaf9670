"""Numbers as people read them, never smaller than what they stand for."""

import math
from decimal import ROUND_CEILING, Context, Decimal


def up(value: float, digits: int) -> str:
    """At most so many significant digits, rounded up: a claim of ε or δ that is shown shorter must still hold."""
    if not math.isfinite(value):
        return f"{value:g}"
    # repr, not the binary fraction behind it: 1e-05 reads back as the same number.
    rounded = Decimal(repr(float(value))).normalize(Context(prec=digits, rounding=ROUND_CEILING))
    return f"{float(rounded):.{digits}g}"
