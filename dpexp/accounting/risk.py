"""A guarantee in words people know: what whoever tests for one record can find, and the μ of Gaussian DP.

All figures are upper bounds. They are those of the accountant's whole curve δ(ε), not of one (ε, δ), which would allow
for attacks that are far better than any that exists. Every accountant here has such a curve, the looser ones a loose
one: that of `pld` is the one to read. Figures of `gdp` are approximations, as its ε is.
"""

import math
from dataclasses import dataclass

from dpexp.accounting.accountants import guarantee
from dpexp.accounting.claims import releases
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.tradeoff import advantage, gaussian_bound, regret, true_positives

FALSE_POSITIVES = (0.001, 0.01)
FIGURES = ("mu", "regret", "advantage", *(f"tpr_at_fpr_{fpr:g}" for fpr in FALSE_POSITIVES))


@dataclass(frozen=True)
class Risk:
    """What a ledger costs whoever is in the data.

    Attributes:
        advantage: no test for one record has a TPR - FPR that is larger.
        tpr: the largest TPR at each of FALSE_POSITIVES.
        mu: of the Gaussian DP that allows for no less, but for a probability of 1e-10 (see `gaussian_bound`); infinite
            where the accountant shows none.
        regret: how far the curve of that Gaussian DP is from the guarantee's (see `regret`): where it is next to 0, μ
            says all there is to say (Gomez et al. 2025, arXiv 2503.10945).
    """

    advantage: float
    tpr: dict[float, float]
    mu: float
    regret: float

    def figures(self) -> dict[str, float]:
        """By name, as FIGURES has them; without μ where it is infinite."""
        values = (self.mu, self.regret, self.advantage, *self.tpr.values())
        kept = slice(0 if math.isfinite(self.mu) else 2, None)
        return dict(zip(FIGURES[kept], values[kept], strict=True))


def tpr_at(fpr: float) -> str:
    """The name of that figure."""
    return f"tpr_at_fpr_{fpr:g}"


def risk(ledger: Ledger, accountant: str = "pld") -> Risk:
    """
    Raises:
        ConfigError: as for `accountants.epsilon`.
    """
    if not ledger.rounds:
        return Risk(0.0, {fpr: fpr for fpr in FALSE_POSITIVES}, 0.0, 0.0)
    tpr = {fpr: largest_tpr(ledger, fpr, accountant) for fpr in FALSE_POSITIVES}
    said = guarantee(ledger, accountant, anew=True)
    mu = gaussian_bound(said)
    return Risk(largest_advantage(ledger, accountant), tpr, mu, regret(said, mu))


def largest_advantage(ledger: Ledger, accountant: str = "pld") -> float:
    """Of TPR over FPR, for any test."""
    if not ledger.rounds:
        return 0.0
    return min(advantage(guarantee(ledger, accountant, anew=True)), _met(ledger, accountant))


def largest_tpr(ledger: Ledger, fpr: float, accountant: str = "pld") -> float:
    """The TPR of any test with that FPR."""
    if not ledger.rounds:
        return fpr
    return min(true_positives(guarantee(ledger, accountant, anew=True), fpr), fpr + _met(ledger, accountant))


def _met(ledger: Ledger, accountant: str) -> float:
    """How likely a record is in any of the samples: 1 - Π(1 - q). While it is in none, what is released is the same
    with and without it, or with another in its place, so that no advantage is larger, however little noise there is."""
    never = math.fsum(
        count * math.log1p(-release.q) if release.q < 1 else -math.inf
        for release, count in releases(ledger, accountant).items()
    )
    return min(1.0, -math.expm1(never) * (1 + 1e-12))
