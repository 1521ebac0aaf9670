"""Computes (ε, δ) of a ledger. Reads nothing but the ledger.

*What it does.* First each round is reduced to one Gaussian sum query (arXiv 1812.06210, equation 1), and equal rounds
are counted (`dpexp.accounting.releases`). One-time queries on all records are composed with them: Gaussian queries as
full batches, Laplace queries by their own privacy losses and moments, or as ε-DP mechanisms. Then an accountant
composes all of them:

| Accountant | ε at δ |
|---|---|
| `pld` | the smallest ε with E[(1 - e^(ε-L))⁺] <= δ for the privacy loss L of all rounds (`pld`) |
| `rdp` | min over α > 1 of log A_α/(α-1) + log(1 - 1/α) - log(δα)/(α-1), with A_α of all rounds (`composition`) |
| `moments` | min over λ <= 32 of (α(λ) - log δ)/λ |
| `strong`, `basic` | from (ε₀, δ₀) of each round (`composition`) |

*Edge cases.*

| Case | What happens |
|---|---|
| a ledger without rounds | ε = 0 and δ = 0 |
| δ below 1e-300, or not below 1 | ConfigError |
| the accountant does not cover the ledger's policy, adjacency or noise | ConfigError |
| samples of fixed size | `rdp` is a bound at integer orders, or ε without sampling (`FixedSizeRdpAccountant`) |
| every release is Gaussian and on all records | `pld` is exact (`composition.GaussianMechanism`) |
| more than 2^28 rounds, each a `poisson` or `laplace` release | `pld` is `rdp`, which is tighter there |
| the bound of `pld` exceeds the cost without sampling | ε is the latter |
| an accountant of the user's gives NaN or a number below 0 | ConfigError |

Read next: `dpexp.accounting.coverage` states what each accountant covers; `pld`; `composition`.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Protocol

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, rdp
from scipy.optimize import brentq

from dpexp.accounting.composition import (
    Array,
    BasicComposition,
    GaussianMechanism,
    Rounds,
    StrongComposition,
    best_order,
    composed,
    laplace_moments,
)
from dpexp.accounting.coverage import check_delta, coverage
from dpexp.accounting.dominating_pairs import (
    FixedSizePair,
    LaplacePair,
    Pair,
    PoissonPair,
    TruncatedPoissonPair,
    gaussian_above,
)
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.pld import ComposedLoss
from dpexp.accounting.random_allocation import MIN_Z, RandomAllocationPair
from dpexp.accounting.releases import Release, releases
from dpexp.errors import ConfigError, named

MOMENTS = range(1, 33)  # λ
INTEGER_ORDERS = [*range(2, 25), *(round(2 ** (k / 4)) for k in range(19, 41)), 2**11, 2**12, 2**13]
_MAX_PLD_ROUNDS = 2**28


class Guarantee(Protocol):
    """The privacy of a whole ledger by one accountant."""

    def epsilon(self, delta: float) -> float:
        """An ε >= 0 for which the ledger is (ε, δ)-DP."""

    def __hash__(self) -> int: ...


class RdpAccountant(Rounds):
    """Rényi DP of Poisson-sampled Gaussian rounds, and of Laplace queries on all records."""

    def epsilon(self, delta: float) -> float:
        return best_order(self.moment, delta)[0]


class MomentsAccountant(Rounds):
    """The moments accountant of Abadi et al. 2016, theorem 2: δ = min_λ exp(α(λ) - λε) over integers λ <= 32."""

    @cached_property
    def _moments(self) -> dict[int, float]:
        return {k: self.moment(1.0 + k) for k in MOMENTS}

    def epsilon(self, delta: float) -> float:
        return min((moment - math.log(delta)) / k for k, moment in self._moments.items())


class FixedSizeRdpAccountant:
    """Rényi DP of rounds with samples of fixed size, among others, at integer orders (Wang, Balle & Kasiviswanathan
    2018). That bound holds for any mechanism, and may be above that without sampling."""

    def __init__(self, found: Mapping[Release, int]) -> None:
        self._total = sum(float(count) * fixed_size_rdp(release) for release, count in found.items())
        self._unsampled = RdpAccountant(found)

    def epsilon(self, delta: float) -> float:
        sampled = max(0.0, float(rdp.compute_epsilon(INTEGER_ORDERS, self._total, delta)[0]))
        return min(sampled, self._unsampled.epsilon(delta))


@lru_cache(maxsize=4096)
def fixed_size_rdp(release: Release) -> Array:
    """Rényi DP of one release at INTEGER_ORDERS."""
    if release.policy == "laplace":
        pure = np.array([1 / release.z])
        return np.array([float(laplace_moments(pure, order)[0]) / (order - 1) for order in INTEGER_ORDERS])
    unsampled = np.array(INTEGER_ORDERS) / (2 * release.z**2)
    if release.policy != "fixed_size":
        return unsampled
    size = round(release.q * release.n)  # type: ignore[operator]
    accountant = rdp.RdpAccountant(INTEGER_ORDERS, NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(release.z)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(release.n, size, gaussian))  # type: ignore[arg-type]
    return np.minimum(accountant.rdp, unsampled)


def _pair(release: Release) -> Pair:
    match release.policy:
        case "poisson":
            return PoissonPair(release.z, release.q)
        case "poisson_replaced":
            return PoissonPair(release.z, release.q, 0.5)
        case "fixed_size":
            return FixedSizePair(release.z, release.q)
        case "laplace":
            return LaplacePair(1 / release.z)
        case "truncated_poisson":
            return TruncatedPoissonPair(release.z, release.q, release.n, release.maximum)  # type: ignore[arg-type]
        case "random_allocation":
            return RandomAllocationPair(release.z, release.steps)  # type: ignore[arg-type]
    raise ConfigError(f"accountant=pld is not stated for releases by {release.policy}.")


def _privacy_loss(found: Mapping[Release, int]) -> Guarantee:
    """Full batches are together one Gaussian release, with epochs of random allocation that have next to no noise. For
    hundreds of millions of rounds no grid is fine enough, and Rényi DP is tighter."""
    # If nulling a record lets another one into a full sample, a sum moves by up to 2S.
    z = np.array([release.z / 2 if release.policy == "truncated_poisson" else release.z for release in found])
    times = np.array([float(count) for count in found.values()])
    laplace = np.array([release.policy == "laplace" for release in found])
    full = np.array([
        release.z < MIN_Z if release.policy == "random_allocation" else release.q == 1 and release.policy != "laplace"
        for release in found
    ])  # fmt: skip
    above = np.where(laplace, 1 / gaussian_above(1 / z), z)
    unsampled = composed(above, times)
    if full.all():
        return unsampled
    if times.sum() > _MAX_PLD_ROUNDS and all(release.policy in ("poisson", "laplace") for release in found):
        return RdpAccountant(found)
    pairs = [_pair(release) for release, certain in zip(found, full, strict=True) if not certain]
    if full.any():
        pairs.append(PoissonPair(1 / composed(z[full], times[full]).mu, 1.0, 0.5))
    times = np.append(times[~full], np.ones(int(full.any())))
    return ComposedLoss(pairs, times, unsampled)


_BUILT_IN: dict[str, Callable[[Mapping[Release, int]], Guarantee]] = {
    "rdp": RdpAccountant,
    "moments": MomentsAccountant,
    "strong": StrongComposition,
    "basic": BasicComposition,
}


def guarantee(ledger: Ledger, accountant: str = "pld", use_cache: bool = True) -> Guarantee:
    """The privacy of a ledger, which must not be empty, by an accountant.

    Without `use_cache` it is recomputed: the last digits of a cached `pld` depend on earlier calls, and calibration
    must be reproducible. Raises as `epsilon`.
    """
    found = _guarantee(tuple(releases(ledger, accountant).items()), accountant)
    return found.without_cache() if not use_cache and isinstance(found, ComposedLoss) else found


@lru_cache(maxsize=8)
def _guarantee(counts: tuple[tuple[Release, int], ...], accountant: str) -> Guarantee:
    found = dict(counts)
    if accountant == "pld":
        return _privacy_loss(found)
    policies = {release.policy for release in found}
    if accountant == "rdp" and "fixed_size" in policies and policies <= {"fixed_size", "poisson", "laplace"}:
        return FixedSizeRdpAccountant(found)
    if not policies <= {"poisson", "laplace"}:
        raise ConfigError(f"accountant={accountant} is not stated for releases by {', '.join(sorted(policies))}.")
    build = _BUILT_IN.get(accountant) or named(accountant)
    return build(found)


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float:
    """ε for which the ledger's rounds are (ε, δ)-differentially private; 0 for an empty ledger.

    Examples:
        >>> import dpexp, torch
        >>> plan = dpexp.make_plan(
        ...     torch.nn.Linear(3, 1), n=10_000, sampling=dpexp.Poisson(sampling_rate=0.01, steps=1000),
        ...     target=dpexp.Target(noise_multiplier=1.0),
        ... )
        >>> round(dpexp.epsilon(plan.ledger(), delta=1e-5), 4)
        1.8285
        >>> round(dpexp.epsilon(plan.ledger(), delta=1e-5, accountant="rdp"), 4)
        2.1013

    Args:
        accountant: one of `coverage.NAMES`; or the dotted name of a class of your own with an attribute `coverage`. It
            is constructed with the counts of the distinct releases, a `dict[Release, int]` (see `releases.Release`);
            it has `epsilon(delta)`.

    Raises:
        ConfigError: δ is below 1e-300 or not below 1, the accountant is unknown, or it does not cover this ledger.
    """
    check_delta(delta)
    coverage(accountant)  # refuses an unknown one
    found = guarantee(ledger, accountant).epsilon(delta) if ledger.rounds else 0.0
    if not (isinstance(found, int | float) and found >= 0):
        raise ConfigError(f"accountant={accountant} gives ε = {found}, which is not a number of at least 0.")
    return found


def delta(ledger: Ledger, epsilon: float, accountant: str = "pld") -> float:
    """δ for which the ledger's rounds are (ε, δ)-differentially private.

    At most 1e-4 (relative) above the accountant's smallest δ; 0 if that is below 1e-300.

    Examples:
        >>> import dpexp, torch
        >>> plan = dpexp.make_plan(
        ...     torch.nn.Linear(3, 1), n=10_000, sampling=dpexp.Poisson(sampling_rate=0.01, steps=1000),
        ...     target=dpexp.Target(noise_multiplier=1.0),
        ... )
        >>> f"{dpexp.delta(plan.ledger(), epsilon=2.0):.1e}"
        '2.7e-06'

    Raises:
        ConfigError: as for `epsilon`, or ε is negative or not finite.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigError(f"privacy.epsilon={epsilon} must be a finite number of at least 0.")
    coverage(accountant)  # refuses an unknown one
    if not ledger.rounds:
        return 0.0
    found = guarantee(ledger, accountant)
    if isinstance(found, ComposedLoss | GaussianMechanism):
        return found.delta(epsilon)

    def excess(log_delta: float) -> float:
        return min(found.epsilon(math.exp(log_delta)), 1e300) - epsilon

    lowest, highest = math.log(1e-300), math.log1p(-1e-12)
    if excess(lowest) <= 0:
        return 0.0
    if excess(highest) > 0:
        return 1.0
    return min(1.0, math.exp(brentq(excess, lowest, highest, xtol=2e-5) + 4e-5))
