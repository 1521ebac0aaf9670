"""What may be spent: ε at δ; or in words people know, the most that a test for one record may find (Kulynych et al.
2024, arXiv 2407.02191: less noise reaches such a target than by way of an (ε, δ) that implies it)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scipy.optimize import brentq
from scipy.special import ndtri

from dpexp.accounting.accountants import epsilon, estimate
from dpexp.accounting.claims import check_advantage, check_bound, check_delta, check_tpr
from dpexp.accounting.gaussian import Gaussian
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.risk import largest_advantage, largest_tpr
from dpexp.errors import ConfigError


class Target(Protocol):
    """As text: how it was asked for.

    Attributes:
        name: of what is spent; most: of it.
    """

    name: str

    @property
    def most(self) -> float: ...

    def check(self, accountant: str) -> None:
        """Raises:
        ConfigError: it makes no sense, or the accountant has no bound for it.
        """

    def cost(self, ledger: Ledger, accountant: str) -> float:
        """What the ledger spends."""

    def spent(self, cost: float) -> dict[str, float]:
        """The figures that a cost stands for."""

    @property
    def mu(self) -> float:
        """Of the Gaussian DP that spends it exactly."""


@dataclass(frozen=True)
class Epsilon:
    most: float
    delta: float
    name = "epsilon"

    def __str__(self) -> str:
        return f"privacy.epsilon={self.most:g} at privacy.delta={self.delta:g}"

    def check(self, accountant: str) -> None:
        check_delta(self.delta)
        if not (math.isfinite(self.most) and self.most > 0):
            raise ConfigError(f"privacy.epsilon={self.most} must be a finite number above 0.")

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return epsilon(ledger, self.delta, accountant)

    def rough(self, ledger: Ledger) -> float:
        """Nearly the cost by `pld`, but quick."""
        return estimate(ledger, self.delta)

    def spent(self, cost: float) -> dict[str, float]:
        return {"ε": cost}

    @property
    def mu(self) -> float:
        def excess(log_mu: float) -> float:
            return Gaussian(math.exp(log_mu)).delta(self.most) - self.delta

        return math.exp(brentq(excess, math.log(1e-12), math.log(1e6), xtol=1e-12))


@dataclass(frozen=True)
class Advantage:
    """The largest TPR - FPR of a test for one record."""

    most: float
    name = "advantage"

    def __str__(self) -> str:
        return f"privacy.advantage={self.most:g}"

    def check(self, accountant: str) -> None:
        check_advantage(self.most)
        check_bound(str(self), accountant)

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return largest_advantage(ledger, accountant)

    def spent(self, cost: float) -> dict[str, float]:
        return {"advantage": cost}

    @property
    def mu(self) -> float:
        return 2 * float(ndtri((1 + self.most) / 2))


@dataclass(frozen=True)
class Tpr:
    """The largest TPR at each FPR. What is spent is TPR - FPR, as a part of what it may be, where that is largest."""

    rates: Mapping[float, float]
    name = "tpr"
    most = 1.0

    def __str__(self) -> str:
        return f"privacy.tpr={{{', '.join(f'{fpr:g}: {tpr:g}' for fpr, tpr in self.rates.items())}}}"

    def check(self, accountant: str) -> None:
        check_tpr(self.rates)
        check_bound(str(self), accountant)

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return max((largest_tpr(ledger, fpr, accountant) - fpr) / (tpr - fpr) for fpr, tpr in self.rates.items())

    def spent(self, cost: float) -> dict[str, float]:
        return {f"TPR at FPR {fpr:g}": min(fpr + cost * (tpr - fpr), 1.0) for fpr, tpr in self.rates.items()}

    @property
    def mu(self) -> float:
        return min(float(ndtri(tpr) - ndtri(fpr)) for fpr, tpr in self.rates.items())
