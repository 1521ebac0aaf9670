"""A privacy filter: how much may still be released on a data set when each run is planned by looking at those before.

Composition by privacy losses takes the runs' parameters as fixed in advance. Where they are chosen adaptively, what
holds is fully adaptive composition of Rényi DP (Feldman & Zrnic 2021, "Individual Privacy Accounting via a Rényi
Filter", arXiv 2008.11193, theorem 3.1): fix an order α and a limit B; if the t-th release is (α, ρ_t)-Rényi DP for a
ρ_t that may depend on all results before, and Σ ρ_t ≤ B however they come out, then all of them together are
(α, B)-Rényi DP. Their filter goes on for as long as the sum stays within B.

Here a release is a round, so that runs may also overlap, end early or be given up for what they showed. A budget (ε, δ)
is met at one order that is fixed with it: (α, B)-Rényi DP is (ε, δ)-DP for

    ε = B + log(1 - 1/α) - log(δα)/(α - 1)

(Canonne, Kamath & Steinke 2020, arXiv 2004.00010, proposition 12). To take the best order afterwards, as the accountant
`rdp` does, is not covered: which order is the best would depend on the results.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from dpexp.accounting.accountants import WHOLE_ORDERS, renyi_of_fixed_size
from dpexp.accounting.claims import CERTAIN, check_claim, releases
from dpexp.accounting.gaussian import Gaussian
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.moments import moments_of
from dpexp.accounting.renyi import LARGEST_ORDER, epsilon_at
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
        return Gaussian(math.sqrt(2 * rho / self.order)).epsilon(self.delta) if rho > 0 else 0.0

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
            total += count * min(float(renyi_of_fixed_size(release)[whole]), order / (2 * release.z**2))
            continue
        laplace.append(release.policy == "laplace")
        sampled = release.policy == "poisson" and release.z >= CERTAIN
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
        check_claim(policy, adjacency, "rdp")
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
