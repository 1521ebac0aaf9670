"""From a ledger to (ε, δ). Reads nothing but the ledger.

Each round is collapsed to one Gaussian sum query first (paper, equation 1), and equal rounds are counted.

| name | what it is | applies to |
|---|---|---|
| `pld` | privacy loss distributions, the tightest | all but `fixed_size` |
| `rdp` | Rényi DP at the best real order (for `fixed_size`: whole orders, Wang, Balle & Kasiviswanathan 2018) | all but
  `truncated_poisson` |
| `moments` | Abadi et al. 2016: whole moments λ <= 32 and their conversion | `poisson`, `shuffle`, `all` |
| `strong` | Kairouz, Oh & Viswanath 2015, with amplification by sampling | `poisson`, `shuffle`, `all` |
| `basic` | sequential composition | `poisson`, `shuffle`, `all` |
| `gdp` | Gaussian DP's central limit: an approximation, which may lie below the true ε | `poisson`, `shuffle`, `all` |
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp
from scipy.optimize import brentq

from dpexp.accounting.claims import Release, releases
from dpexp.accounting.composition import Basic, Strong
from dpexp.accounting.gaussian import Gaussian, central_limit, composed
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.privacy_loss import ComposedLoss
from dpexp.accounting.renyi import Array, best_order, log_moments
from dpexp.errors import ConfigError

MOMENTS = range(1, 33)  # λ
_FIXED_SIZE_ORDERS = [*range(2, 25), *(round(2 ** (k / 4)) for k in range(19, 41)), 2**11, 2**12, 2**13]
_CERTAIN = 0.02  # a z below which sampling is not counted on: it gains next to nothing there


class Guarantee(Protocol):
    """What one accountant says of a whole ledger."""

    def epsilon(self, delta: float) -> float:
        """ε >= 0 at which the ledger is (ε, δ)-DP."""


class Renyi:
    """Rényi DP of Poisson-sampled Gaussian rounds."""

    def __init__(self, z: Array, q: Array, counts: Array) -> None:
        self._z, self._q, self._counts = z, q, counts

    def epsilon(self, delta: float) -> float:
        return best_order(self._total, delta)[0]

    def order(self, delta: float) -> float:
        """The order that gives ε."""
        return best_order(self._total, delta)[1]

    def _total(self, alpha: float) -> float:
        return float(np.dot(self._counts, log_moments(self._z, self._q, alpha)))


class Moments:
    """The moments accountant of Abadi et al. 2016, theorem 2: δ = min_λ exp(α(λ) - λε) over whole λ <= 32."""

    def __init__(self, z: Array, q: Array, counts: Array) -> None:
        self._moments = {k: float(np.dot(counts, log_moments(z, q, 1.0 + k))) for k in MOMENTS}

    def epsilon(self, delta: float) -> float:
        return self.best(delta)[0]

    def best(self, delta: float) -> tuple[float, int]:
        """ε and the λ that gives it."""
        return min(((moment - math.log(delta)) / k, k) for k, moment in self._moments.items())


class _FixedSize:
    def __init__(self, counts: Mapping[Release, int]) -> None:
        self._accountant = rdp.RdpAccountant(_FIXED_SIZE_ORDERS, NeighboringRelation.REPLACE_ONE)
        for release, count in counts.items():
            event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(release.z)
            if release.policy == "fixed_size":
                size = math.ceil(release.q * release.n - 1e-9)  # type: ignore[operator]
                event = dp_accounting.SampledWithoutReplacementDpEvent(release.n, size, event)  # type: ignore[arg-type]
            self._accountant.compose(event, count)

    def epsilon(self, delta: float) -> float:
        return float(self._accountant.get_epsilon(delta))


class _Truncated:
    def __init__(self, counts: Mapping[Release, int]) -> None:
        interval = min(_interval(release) for release in counts)
        self._accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, interval)
        for r, count in counts.items():
            event = (
                dp_accounting.TruncatedSubsampledGaussianDpEvent(r.n, r.q, r.maximum, r.z)
                if r.policy == "truncated_poisson"
                else dp_accounting.PoissonSampledDpEvent(r.q, dp_accounting.GaussianDpEvent(r.z))
            )
            self._accountant.compose(event, count)

    def epsilon(self, delta: float) -> float:
        return float(self._accountant.get_epsilon(delta))


class Tighter:
    """The smaller of two bounds: Rényi DP still holds where δ comes near a Fourier transform's rounding errors."""

    def __init__(self, composed: ComposedLoss, renyi: Renyi) -> None:
        self._composed, self._renyi = composed, renyi

    def epsilon(self, delta: float) -> float:
        return min(self._composed.epsilon(delta), self._renyi.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return self._composed.delta(epsilon)


def _interval(release: Release) -> float:
    """Of dp-accounting's grid: a fraction of the loss's standard deviation, but no more than about 500 000 points."""
    z = release.z
    spread = release.q * math.sqrt(math.expm1(min(1 / z**2, 700)))
    return max(min(1e-4, 0.05 * spread), (2 / z**2 + 20 / z) / 5e5)


def _privacy_loss(z: Array, q: Array, counts: Array) -> Guarantee:
    full = q == 1
    if full.all():
        return composed(z, counts)
    if full.any():
        gaussian = composed(z[full], counts[full])
        z, q, counts = (
            np.append(part[~full], last) for part, last in ((z, 1 / gaussian.mu), (q, 1.0), (counts, 1.0))
        )  # fmt: skip
    return Tighter(ComposedLoss(z, q, counts), Renyi(z, q, counts))


_GAUSSIAN: dict[str, Callable[[Array, Array, Array], Guarantee]] = {
    "pld": _privacy_loss,
    "rdp": Renyi,
    "moments": Moments,
    "strong": Strong,
    "basic": Basic,
    "gdp": central_limit,
}
NAMES = tuple(_GAUSSIAN)
APPROXIMATIONS = ("gdp",)


def guarantee(ledger: Ledger, accountant: str = "pld") -> Guarantee:
    """What `accountant` says of `ledger`, which must not be empty.

    Raises:
        ConfigError: an unknown accountant, or one that has no bound for the ledger's sampling and adjacency.
    """
    check_names([accountant])
    return _guarantee(tuple(releases(ledger, accountant).items()), accountant)


@lru_cache(maxsize=8)
def _guarantee(counts: tuple[tuple[Release, int], ...], accountant: str) -> Guarantee:
    policies = {release.policy for release, _ in counts}
    if "fixed_size" in policies:
        return _FixedSize(dict(counts))
    if "truncated_poisson" in policies:
        return _Truncated(dict(counts))
    z = np.array([release.z for release, _ in counts])
    q = np.array([release.q if release.z >= _CERTAIN else 1.0 for release, _ in counts])
    return _GAUSSIAN[accountant](z, q, np.array([float(count) for _, count in counts]))


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float:
    """ε such that what the ledger records is (ε, δ)-differentially private; 0 for an empty ledger.

    Args:
        accountant: one of NAMES, each an upper bound except `gdp`.

    Raises:
        ConfigError: δ outside (0, 1), an unknown accountant, or one that has no bound for this ledger.
    """
    check_delta(delta)
    check_names([accountant])
    return guarantee(ledger, accountant).epsilon(delta) if ledger.rounds else 0.0


def delta(ledger: Ledger, epsilon: float, accountant: str = "pld") -> float:
    """δ such that what the ledger records is (ε, δ)-differentially private; no more than 1e-4 (relative) above the
    accountant's smallest, and 0 if that is below 1e-300.

    Raises:
        ConfigError: as for `epsilon`, or ε < 0.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigError(f"privacy.epsilon={epsilon} must be a finite number of at least 0.")
    check_names([accountant])
    if not ledger.rounds:
        return 0.0
    said = guarantee(ledger, accountant)
    if isinstance(said, Tighter | Gaussian):
        return said.delta(epsilon)

    def excess(log_delta: float) -> float:
        return min(said.epsilon(math.exp(log_delta)), 1e300) - epsilon

    lowest, highest = math.log(1e-300), math.log1p(-1e-12)
    if excess(lowest) <= 0:
        return 0.0
    if excess(highest) > 0:
        return 1.0
    return min(1.0, math.exp(brentq(excess, lowest, highest, xtol=2e-5) + 4e-5))


def check_delta(delta: float) -> None:
    """Raises:
    ConfigError: δ is not strictly between 0 and 1.
    """
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ConfigError(f"privacy.delta={delta} must lie strictly between 0 and 1; well below 1/n is usual.")


def check_names(accountants: list[str]) -> None:
    """Raises:
    ConfigError: one of them is unknown.
    """
    for name in accountants:
        if name not in NAMES:
            raise ConfigError(f"accountant={name} is unknown; known: {', '.join(NAMES)}.")
