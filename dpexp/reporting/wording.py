"""What a guarantee means to whoever is in the data, in a sentence."""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal

from dpexp.accounting.risk import FALSE_POSITIVES, tpr_at


def up(value: float, digits: int) -> str:
    """At most so many significant digits, rounded up: a claim of ε or δ that is shown shorter must still hold."""
    if not math.isfinite(value):
        return f"{value:g}"
    # repr, not the binary fraction behind it: 1e-05 reads back as the same number.
    rounded = Decimal(repr(float(value))).normalize(Context(prec=digits, rounding=ROUND_CEILING))
    return f"{float(rounded):.{digits}g}"


def in_words(risk: Mapping[str, float], unit: str = "record") -> str:
    """One line.

    Args:
        risk: figures by name, as `Risk.figures` has them.
        unit: whose data is tested for.
    """
    rates = " and ".join(f"{found(risk, fpr)} at FPR {100 * fpr:g} %" for fpr in FALSE_POSITIVES)
    most = f"TPR - FPR above {up(risk['advantage'], 4)}, or finds more members than {rates}"
    line = f"no test for one {unit} has {most}"
    return line + (f"; {gaussian(risk)}" if "mu" in risk else "")


def found(risk: Mapping[str, float], fpr: float) -> str:
    """The most members that a test finds."""
    return f"{up(100 * risk[tpr_at(fpr)], 3)} %"


def gaussian(risk: Mapping[str, float]) -> str:
    """The Gaussian DP that allows for as much."""
    return f"Gaussian DP with μ = {up(risk['mu'], 4)} (regret {up(risk['regret'], 2)})"
