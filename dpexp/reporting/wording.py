"""Privacy guarantees in words."""

from collections.abc import Mapping

from dpexp.accounting.risk import FALSE_POSITIVES, TAIL, tpr_at
from dpexp.accounting.rounding import up


def in_words(risk: Mapping[str, float], unit: str = "record") -> str:
    """The limits of membership tests, in one line.

    Args:
        risk: as `Risk.figures` returns it.
        unit: the privacy unit.
    """
    rates = " and ".join(f"{up(100 * risk[tpr_at(fpr)], 3)} % at FPR {100 * fpr:g} %" for fpr in FALSE_POSITIVES)
    limit = f"TPR - FPR above {up(risk['advantage'], 4)}, or finds more members than {rates}"
    gaussian = f"; Gaussian DP with μ = {up(risk['mu'], 4)}, up to a probability of {TAIL:g}" if "mu" in risk else ""
    return f"no test for one {unit} has {limit}{gaussian}"
