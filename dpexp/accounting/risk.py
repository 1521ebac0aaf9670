"""A guarantee in words people know: what whoever tests for one record can find, and the μ of Gaussian DP.

All figures are upper bounds. They are those of the accountant's whole curve δ(ε), not of one (ε, δ), which would allow
for attacks that are far better than any that exists. Every accountant here has such a curve, the looser ones a loose
one: that of `pld` is the one to read. Figures of `gdp` are approximations, as its ε is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scipy.optimize import brentq
from scipy.special import ndtri

from dpexp.accounting.accountants import epsilon, estimate, guarantee
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.coverage import check_advantage, check_bound, check_delta, check_tpr
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.tradeoff import advantage, gaussian_bound, regret, true_positives
from dpexp.errors import ConfigError

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


class PrivacyTarget(Protocol):
    """As text: how it was asked for.

    Attributes:
        name: of what is spent; most: of it.
    """

    name: str

    @property
    def limit(self) -> float: ...

    def check(self, accountant: str) -> None:
        """Raises:
        ConfigError: it makes no sense, or the accountant has no bound for it.
        """

    def cost(self, ledger: Ledger, accountant: str) -> float:
        """What the ledger spends."""

    def figures(self, cost: float) -> dict[str, float]:
        """The figures that a cost stands for."""

    @property
    def mu(self) -> float:
        """Of the Gaussian DP that spends it exactly."""


@dataclass(frozen=True)
class Epsilon:
    limit: float
    delta: float
    name = "epsilon"

    def __str__(self) -> str:
        return f"privacy.epsilon={self.limit:g} at privacy.delta={self.delta:g}"

    def check(self, accountant: str) -> None:
        check_delta(self.delta)
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ConfigError(f"privacy.epsilon={self.limit} must be a finite number above 0.")

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return epsilon(ledger, self.delta, accountant)

    def estimate(self, ledger: Ledger) -> float:
        """Nearly the cost by `pld`, but quick."""
        return estimate(ledger, self.delta)

    def figures(self, cost: float) -> dict[str, float]:
        return {"ε": cost}

    @property
    def mu(self) -> float:
        def excess(log_mu: float) -> float:
            return GaussianMechanism(math.exp(log_mu)).delta(self.limit) - self.delta

        return math.exp(brentq(excess, math.log(1e-12), math.log(1e6), xtol=1e-12))


@dataclass(frozen=True)
class MaxAdvantage:
    """The largest TPR - FPR of a test for one record."""

    limit: float
    name = "advantage"

    def __str__(self) -> str:
        return f"privacy.max_advantage={self.limit:g}"

    def check(self, accountant: str) -> None:
        check_advantage(self.limit)
        check_bound(str(self), accountant)

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return largest_advantage(ledger, accountant)

    def figures(self, cost: float) -> dict[str, float]:
        return {"advantage": cost}

    @property
    def mu(self) -> float:
        return 2 * float(ndtri((1 + self.limit) / 2))


@dataclass(frozen=True)
class MaxTpr:
    """The largest TPR at each FPR. What is spent is TPR - FPR, as a part of what it may be, where that is largest."""

    rates: Mapping[float, float]
    name = "tpr"
    limit = 1.0

    def __str__(self) -> str:
        return f"privacy.max_tpr_at_fpr={{{', '.join(f'{fpr:g}: {tpr:g}' for fpr, tpr in self.rates.items())}}}"

    def check(self, accountant: str) -> None:
        check_tpr(self.rates)
        check_bound(str(self), accountant)

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return max((largest_tpr(ledger, fpr, accountant) - fpr) / (tpr - fpr) for fpr, tpr in self.rates.items())

    def figures(self, cost: float) -> dict[str, float]:
        return {f"TPR at FPR {fpr:g}": min(fpr + cost * (tpr - fpr), 1.0) for fpr, tpr in self.rates.items()}

    @property
    def mu(self) -> float:
        return min(float(ndtri(tpr) - ndtri(fpr)) for fpr, tpr in self.rates.items())
