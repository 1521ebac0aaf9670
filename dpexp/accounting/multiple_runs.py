"""What it costs to choose the best of several private trials (Papernot & Steinke 2022, arXiv 2110.03620).

The number of trials is drawn at random: K ~ a truncated negative binomial distribution with a given mean and shape η
(η = 1: geometric; η = 0: logarithmic), or Poisson (η = ∞). Each trial draws its configuration uniformly at random.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting import rdp
from scipy.optimize import brentq, minimize_scalar

from dpexp._accounting_compat import repeated_and_selected
from dpexp.accounting.accountants import WHOLE_ORDERS, fixed_size_rdp
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.coverage import check_covered
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rdp import LARGEST_ORDER, Array, epsilon_at, moments_of
from dpexp.accounting.releases import MIN_AMPLIFIED_Z, releases
from dpexp.errors import ConfigError

_KEYS = ("epsilon", "delta", "order")


@dataclass(frozen=True)
class Budget:
    """(ε, δ) for everything that is released on a data set, met at Rényi order α (`order`)."""

    epsilon: float
    delta: float
    order: float

    @cached_property
    def limit(self) -> float:
        """B: what the rounds' ρ at `order` may add up to."""
        return self.epsilon - _conversion(self.order, self.delta)

    def holds(self, spent: float) -> bool:
        """Whether rounds whose ρ add up to `spent` are within it, whatever rounding has made of the sum."""
        return spent * (1 + 1e-9) <= self.limit

    def gaussian(self, rho: float) -> float:
        """ε at δ of the one Gaussian release that costs ρ at `order`: what ρ is worth, as a number that people know."""
        return GaussianMechanism(math.sqrt(2 * rho / self.order)).epsilon(self.delta) if rho > 0 else 0.0

    def __str__(self) -> str:
        return f"ε = {self.epsilon:g} at δ = {self.delta:g}"


def budget(given: Any) -> Budget:
    """Reads `privacy.budget`. Without an order it is the one that is best for Gaussian releases that spend all of it,
    to two decimals: a function of ε and δ, and so of no result.

    Raises:
        ConfigError: it is not understood, out of range, or allows nothing at its order.
    """
    if not isinstance(given, Mapping) or not {"epsilon", "delta"} <= {*given} <= {*_KEYS}:
        raise ConfigError(
            f"privacy.budget={given} is not understood; give '{{epsilon: 8, delta: 1e-5}}', and if need be an order."
        )
    for key, value in given.items():
        if not (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0):
            raise ConfigError(f"privacy.budget.{key}={value} must be a finite number above 0.")
    epsilon, delta = float(given["epsilon"]), float(given["delta"])
    if delta >= 1:
        raise ConfigError(f"privacy.budget.delta={delta} must lie strictly between 0 and 1; well below 1/n is usual.")
    order = float(given["order"]) if "order" in given else _best_for_gaussians(epsilon, delta)
    if not 1 < order <= LARGEST_ORDER:
        raise ConfigError(f"privacy.budget.order={order} must be above 1, and at most 2^30.")
    made = Budget(epsilon, delta, order)
    if made.limit <= 0:
        raise ConfigError(
            f"privacy.budget={{epsilon: {epsilon:g}, delta: {delta:g}}} allows nothing at Rényi order {order:g}, where "
            f"δ alone takes ε = {_conversion(order, delta):.3g}; choose a higher order or a larger ε."
        )
    return made


def rho(ledger: Ledger, order: float) -> float:
    """Rényi ε of order α (`order`) of all that a ledger records, added up over its rounds; 0 for an empty ledger.

    Rounds of `fixed_size` are bounded at whole orders, and taken at the next one: Rényi ε grows with the order.

    Raises:
        ConfigError: its sampling has no Rényi bound under its adjacency.
    """
    check_filterable(ledger)
    counts = releases(ledger, "rdp")
    total = 0.0
    z: list[float] = []
    q: list[float] = []
    times: list[float] = []
    laplace: list[bool] = []
    for release, count in counts.items():
        if release.policy == "fixed_size" and order <= WHOLE_ORDERS[-1]:
            whole = int(np.searchsorted(WHOLE_ORDERS, order))
            total += count * min(float(fixed_size_rdp(release)[whole]), order / (2 * release.z**2))
            continue
        laplace.append(release.policy == "laplace")
        sampled = release.policy == "poisson" and release.z >= MIN_AMPLIFIED_Z
        z.append(release.z)
        q.append(release.q if sampled else 1.0)
        times.append(count)
    if z:
        moments = moments_of(np.array(z), np.array(q), order, np.array(laplace))
        total += float(np.dot(times, np.maximum(moments, 0))) / (order - 1)
    return total


def check_filterable(ledger: Ledger) -> None:
    """Raises:
    ConfigError: the ledger has rounds for which no Rényi bound is known.
    """
    for policy in sorted({round_.sampling.policy for round_ in ledger.rounds}):
        check_rule(policy, ledger.adjacency)


def check_rule(policy: str, adjacency: str) -> None:
    """Raises:
    ConfigError: no Rényi bound is known for the sampling policy under the adjacency.
    """
    try:
        check_covered(policy, adjacency, "rdp")
    except ConfigError as error:
        raise ConfigError(
            f"privacy.budget adds up Rényi DP, of which sampling={policy} under adjacency={adjacency} has no bound; "
            "choose sampling=poisson with adjacency=add_remove, or account for the runs without a budget."
        ) from error


def _conversion(order: float, delta: float) -> float:
    return epsilon_at(lambda _: 0.0, order, delta)


def _best_for_gaussians(epsilon: float, delta: float) -> float:
    """Releases with ρ(α) = α/(2z²) use up B(α) the latest where B(α)/α is largest, of which there is one maximum."""

    def negative(t: float) -> float:
        order = 1 + math.exp(t)
        return (_conversion(order, delta) - epsilon) / order

    found = minimize_scalar(negative, bounds=(-10.0, math.log(1e6)), method="bounded", options={"xatol": 1e-10})
    return max(1.01, round(1 + math.exp(found.x), 2))


ORDERS = [1 + k / 10 for k in range(1, 100)] + list(range(11, 129)) + [2**k for k in range(8, 15)]


def check_repetitions(mean: float, shape: float) -> None:
    """Raises:
    ConfigError: no such distribution.
    """
    if not (math.isfinite(mean) and mean >= 1):
        raise ConfigError(f"hydra.sweeper.mean={mean} must be a finite number of at least 1.")
    if not (0 <= shape <= 20 or shape == math.inf):
        raise ConfigError(f"hydra.sweeper.shape={shape} must lie between 0 and 20 (1: geometric), or be inf: Poisson.")


def draw_repetitions(mean: float, shape: float, random: np.random.Generator) -> int:
    """K. Poisson's may be 0, which the guarantee needs too."""
    check_repetitions(mean, shape)
    if math.isinf(shape):
        return int(random.poisson(mean))
    if mean == 1:
        return 1
    gamma = brentq(lambda g: _mean(g, shape) - mean, 1e-12, 1 - 1e-12)
    u, k, total = random.random(), 1, 0.0
    mass = -(1 - gamma) / math.log(gamma) if shape == 0 else (1 - gamma) * shape / math.expm1(-shape * math.log(gamma))
    while True:
        total += mass
        if u < total or mass < 1e-300:
            return k
        mass *= (1 - gamma) * (k + shape) / (k + 1)
        k += 1


def _mean(gamma: float, shape: float) -> float:
    """Papernot & Steinke 2022, definition 1."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def run_rdp(ledger: Ledger) -> Array:
    """Rényi DP of one trial at ORDERS.

    Raises:
        ConfigError: the claim cannot be made, or the trial's sampling has no Rényi bound here.
    """
    counts = releases(ledger, "rdp")
    for release in counts:
        if release.policy not in ("poisson", "laplace"):
            raise ConfigError(f"sampling={release.policy} has no bound for private selection; choose sampling=poisson.")
    z, q = np.array([release.z for release in counts]), np.array([release.q for release in counts])
    times = np.array(list(counts.values()), dtype=float)
    laplace = np.array([release.policy == "laplace" for release in counts])
    return np.array([float(times @ moments_of(z, q, order, laplace)) / (order - 1) for order in ORDERS])


def worst_case_rdp(ledgers: Iterable[Ledger]) -> Array:
    """Rényi DP at ORDERS that holds whichever trial is run: at each order that of the dearest.

    Raises:
        ConfigError: as for `run_rdp`, or the ledgers are stated for different adjacencies or privacy units.
    """
    trials = {(ledger.adjacency, frozenset(ledger.rounds.items()), ledger.unit): ledger for ledger in ledgers}
    adjacencies = sorted({ledger.adjacency for ledger in trials.values()})
    units = sorted({ledger.unit for ledger in trials.values()})
    if len(units) > 1:
        raise ConfigError(f"trials about different privacy units ({', '.join(units)}) cannot be selected among.")
    if len(adjacencies) > 1:
        raise ConfigError(f"trials for different adjacencies ({', '.join(adjacencies)}) cannot be selected among.")
    return np.max([run_rdp(ledger) for ledger in trials.values()], axis=0)


def selection_epsilon(curve: Array, delta: float, mean: float, shape: float) -> float:
    """ε at `delta` of releasing only the best of K trials (theorems 2 and 6).

    Args:
        curve: Rényi DP at ORDERS of the mechanism that is repeated: draw a configuration from the whole grid, and run
            that trial.
    """
    check_repetitions(mean, shape)
    repeated = repeated_and_selected(ORDERS, curve, mean, shape)
    return max(0.0, float(rdp.compute_epsilon(ORDERS, repeated, delta)[0]))
