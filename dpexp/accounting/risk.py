"""Privacy as attack risk and as Gaussian DP, and the privacy targets of calibration.

All figures are upper bounds, but for those of `gdp`. They follow from the accountant's whole curve δ(ε), not from one
(ε, δ), which would allow for far better attacks than exist. Calibrating to an attack risk needs less noise than
calibrating to an (ε, δ) that implies it (Kulynych et al. 2024, arXiv 2407.02191).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.special import ndtri

from dpexp.accounting.accountants import epsilon, estimate, guarantee
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.coverage import check_advantage, check_bound, check_delta, check_tpr
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.rounding import up
from dpexp.accounting.tradeoff import advantage, gaussian_bound, true_positives
from dpexp.errors import ConfigError

FALSE_POSITIVES = (0.001, 0.01)


def tpr_at(fpr: float) -> str:
    """The name of the figure for the TPR at an FPR."""
    return f"tpr_at_fpr_{fpr:g}"


FIGURES = ("mu", "advantage", *map(tpr_at, FALSE_POSITIVES))


@dataclass(frozen=True)
class Risk:
    """The risk of a record in the data of a ledger's runs: bounds on any test for one record.

    Attributes:
        advantage: the largest TPR - FPR of any test.
        tpr: the largest TPR at each FPR of FALSE_POSITIVES.
        mu: the smallest μ for which the ledger is μ-Gaussian DP, up to a probability of 1e-10 (see `gaussian_bound`);
            infinite if the accountant shows none.
    """

    advantage: float
    tpr: dict[float, float]
    mu: float

    def figures(self) -> dict[str, float]:
        """The figures by the names of FIGURES; without μ if it is infinite."""
        values = (self.mu, self.advantage, *self.tpr.values())
        return {name: value for name, value in zip(FIGURES, values, strict=True) if math.isfinite(value)}


def risk(ledger: Ledger, accountant: str = "pld") -> Risk:
    """The risk of a ledger by an accountant.

    Raises:
        ConfigError: as for `accountants.epsilon`.
    """
    if not ledger.rounds:
        return Risk(0.0, {fpr: fpr for fpr in FALSE_POSITIVES}, 0.0)
    tpr = {fpr: largest_tpr(ledger, fpr, accountant) for fpr in FALSE_POSITIVES}
    mu = gaussian_bound(guarantee(ledger, accountant, use_cache=False))
    return Risk(largest_advantage(ledger, accountant), tpr, mu)


def largest_advantage(ledger: Ledger, accountant: str = "pld") -> float:
    """An upper bound on TPR - FPR of any test for one record."""
    if not ledger.rounds:
        return 0.0
    return min(advantage(guarantee(ledger, accountant, use_cache=False)), _ever_sampled(ledger, accountant))


def largest_tpr(ledger: Ledger, fpr: float, accountant: str = "pld") -> float:
    """An upper bound on the TPR of any test for one record with this FPR."""
    if not ledger.rounds:
        return fpr
    found = guarantee(ledger, accountant, use_cache=False)
    return min(true_positives(found, fpr), fpr + _ever_sampled(ledger, accountant))


def _ever_sampled(ledger: Ledger, accountant: str) -> float:
    """The probability that a record is in any sample, 1 - Π(1 - q). It bounds the advantage, since releases do not
    depend on a record that is in no sample."""
    never = math.fsum(
        count * math.log1p(-release.q) if release.q < 1 else -math.inf
        for release, count in releases(ledger, accountant).items()
    )
    return min(1.0, -math.expm1(never) * (1 + 1e-12))


@dataclass(frozen=True)
class Epsilon:
    """ε at δ.

    Each target has a text, its configuration; the name and `limit` of its cost; `check`, which refuses an invalid
    target or an accountant without a bound for it; the `cost` of a ledger, and a cost as `figures` to show; and the μ
    of Gaussian DP whose cost is the limit.
    """

    limit: float
    delta: float
    name = "epsilon"

    def __str__(self) -> str:
        return f"privacy.epsilon={up(self.limit, 6)} at privacy.delta={up(self.delta, 6)}"

    def check(self, accountant: str) -> None:
        check_delta(self.delta)
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ConfigError(f"privacy.epsilon={self.limit} must be a finite number above 0.")

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return epsilon(ledger, self.delta, accountant)

    def estimate(self, ledger: Ledger) -> float:
        """A quick approximation of the cost by `pld`."""
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
    """The largest TPR - FPR of any test for one record."""

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
    """The largest TPR at each FPR. The cost is the largest of (TPR - FPR) / (allowed TPR - FPR)."""

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


PrivacyTarget = Epsilon | MaxAdvantage | MaxTpr
