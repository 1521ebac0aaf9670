"""The privacy of several runs: on disjoint parts of a data set, by a Rényi filter over all of them, and of private
selection among trials.

*Rényi filter* (Feldman & Zrnic 2021, arXiv 2008.11193, theorem 3.1): fix an order α and a limit B. If round t is
(α, ρ_t)-Rényi DP, where ρ_t may depend on all earlier results, and Σ ρ_t ≤ B always, then all rounds together are
(α, B)-Rényi DP. The rounds need not be planned together, so that runs may overlap, end early or be abandoned because
of their results; a run is admitted before its first round, with all that it plans. A budget (ε, δ) is converted to B
at one order that is fixed with it; the best order afterwards would depend on the results.

*Private selection* (Papernot & Steinke 2022, arXiv 2110.03620): releasing only the best of K trials. K is drawn from a
truncated negative binomial distribution with a given mean and shape η (η = 1: geometric; η = 0: logarithmic), or from a
Poisson distribution (η = ∞). Each trial draws its configuration uniformly at random.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting import rdp
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import logser, nbinom

from dpexp._accounting_compat import repeated_and_selected
from dpexp.accounting.accountants import INTEGER_ORDERS, fixed_size_rdp
from dpexp.accounting.composition import LARGEST_ORDER, Array, GaussianMechanism, Rounds, epsilon_at
from dpexp.accounting.coverage import check_covered, check_delta
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.ledger.events import check_same
from dpexp.accounting.releases import releases
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling.policy import Policy
from dpexp.errors import ConfigError, positive


def runs_of_one_record(ledgers: Sequence[Ledger]) -> list[list[int]]:
    """The largest sets of ledgers, by index, that may have used one record. All together cost what the worst set does.

    For adding or removing a record with hash h, all runs cost what those cost whose ranges hold h: any other run's
    result has the same distribution with and without the record, given all results before it, so it is post-processing.
    A record has one hash by a rule. The ranges that hold it all hold the largest of their lower ends. Of several rules,
    only the one of most ledgers counts: parts by others count as all records, and so do parts under other adjacencies
    than `add_remove`, since a replaced record may change its hash.

    Raises:
        ConfigError: the ledgers have different adjacencies or privacy units.
    """
    check_same(ledgers, "ledgers", "composed")
    parts = [ledger.part if ledger.adjacency == "add_remove" else None for ledger in ledgers]
    common = Counter(part.rule for part in parts if part).most_common(1)
    parts = [part if part and part.rule == common[0][0] else None for part in parts]
    hashes = sorted({part.low for part in parts if part}) or [0.0]
    sets = [[k for k, p in enumerate(parts) if p is None or p.low <= of < p.high] for of in hashes]
    return [one for k, one in enumerate(sets) if one not in sets[:k] and not any({*one} < {*more} for more in sets)]


@dataclass(frozen=True)
class Budget:
    """A budget of (ε, δ) for all releases on a data set, kept by Rényi DP of order α (`order`)."""

    epsilon: float
    delta: float
    order: float

    @cached_property
    def limit(self) -> float:
        """B, the largest sum of the rounds' Rényi ε at `order`."""
        return self.epsilon - _conversion(self.order, self.delta)

    def holds(self, used: float) -> bool:
        """Whether rounds whose ρ add up to `used` are within the budget, even after rounding errors."""
        return used * (1 + 1e-9) <= self.limit

    def gaussian(self, rho: float) -> float:
        """ε at δ of a Gaussian mechanism with Rényi ε = ρ at `order`, to show ρ as an ε."""
        return GaussianMechanism(math.sqrt(2 * rho / self.order)).epsilon(self.delta) if rho > 0 else 0.0

    def __str__(self) -> str:
        return f"ε = {up(self.epsilon, 6)} at δ = {up(self.delta, 6)}"


def budget(config: Any) -> Budget:
    """The budget of `privacy.budget`: {epsilon, delta} and optionally an order.

    By default, the order is the best one for Gaussian mechanisms that use the whole budget, to two decimals. It depends
    only on ε and δ, not on results.

    Raises:
        ConfigError: the budget has other keys, is out of range, or allows nothing at its order.
    """
    if not isinstance(config, Mapping) or not {"epsilon", "delta"} <= {*config} <= {"epsilon", "delta", "order"}:
        raise ConfigError(
            f"privacy.budget={config} is not understood; give '{{epsilon: 8, delta: 1e-5}}', and optionally an order."
        )
    for key, value in config.items():
        positive(f"privacy.budget.{key}", value)
    epsilon, delta = float(config["epsilon"]), float(config["delta"])
    check_delta(delta, "privacy.budget.delta")
    order = float(config["order"]) if "order" in config else _best_for_gaussians(epsilon, delta)
    if not 1 < order <= LARGEST_ORDER:
        raise ConfigError(f"privacy.budget.order={order} must be above 1, and at most 2^30.")
    found = Budget(epsilon, delta, order)
    if found.limit <= 0:
        raise ConfigError(
            f"privacy.budget={config} allows nothing at Rényi order {order:g}, where δ alone takes ε = "
            f"{up(_conversion(order, delta), 3)}; choose a higher order or a larger ε."
        )
    return found


def rho(ledger: Ledger, order: float) -> float:
    """Rényi ε of order α (`order`) of a ledger, summed over its rounds; 0 for an empty ledger.

    Rounds of `fixed_size` are bounded at integer orders, and counted at the next one: Rényi ε grows with the order.

    Raises:
        ConfigError: no Rényi bound is stated for its sampling under its adjacency.
    """
    for policy in {type(round_.sampling.policy) for round_ in ledger.rounds}:
        check_rdp_covered(policy, ledger.adjacency)
    found, total = releases(ledger, "rdp"), 0.0
    for release in [release for release in found if release.policy == "fixed_size" and order <= INTEGER_ORDERS[-1]]:
        index = int(np.searchsorted(INTEGER_ORDERS, order))
        total += found.pop(release) * min(float(fixed_size_rdp(release)[index]), order / (2 * release.z**2))
    rounds = Rounds(found)
    return total + float(np.dot(rounds.counts, np.maximum(rounds.moments(order), 0))) / (order - 1)


def check_rdp_covered(policy: type[Policy], adjacency: str) -> None:
    """Refuses a sampling policy without a Rényi bound under the adjacency."""
    try:
        check_covered(policy, adjacency, "rdp")
    except ConfigError as error:
        raise ConfigError(
            f"privacy.budget adds up Rényi DP, for which sampling={policy.name} under adjacency={adjacency} has no "
            "bound; choose sampling=poisson with adjacency=add_remove, or account for the runs without a budget."
        ) from error


def _conversion(order: float, delta: float) -> float:
    return epsilon_at(lambda _: 0.0, order, delta)


def _best_for_gaussians(epsilon: float, delta: float) -> float:
    """The order that maximizes B(α)/α, which allows for the most Gaussian mechanisms with ρ(α) = α/(2z²)."""

    def negative(t: float) -> float:
        order = 1 + math.exp(t)
        return (_conversion(order, delta) - epsilon) / order

    found = minimize_scalar(negative, bounds=(-10.0, math.log(1e6)), method="bounded", options={"xatol": 1e-10})
    return max(1.01, round(1 + math.exp(found.x), 2))


ORDERS = [1 + k / 10 for k in range(1, 100)] + list(range(11, 129)) + [2**k for k in range(8, 15)]


def check_repetitions(mean: float, shape: float) -> None:
    """Refuses parameters of no distribution of the number of trials."""
    if not (math.isfinite(mean) and mean >= 1):
        raise ConfigError(f"hydra.sweeper.mean={mean} must be a finite number of at least 1.")
    if not (0 <= shape <= 20 or shape == math.inf):
        raise ConfigError(f"hydra.sweeper.shape={shape} must lie between 0 and 20 (1: geometric), or be inf: Poisson.")


def draw_repetitions(mean: float, shape: float, random: np.random.Generator) -> int:
    """Draws K, the number of trials. It may be 0 for a Poisson distribution, which the guarantee requires."""
    check_repetitions(mean, shape)
    if math.isinf(shape):
        return int(random.poisson(mean))
    if mean == 1:
        return 1
    gamma = brentq(lambda g: _mean(g, shape) - mean, 1e-12, 1 - 1e-12)
    law = logser(1 - gamma) if shape == 0 else nbinom(shape, gamma)  # given that it is not 0
    return int(law.isf((1 - random.random()) * law.sf(0)))


def _mean(gamma: float, shape: float) -> float:
    """Papernot & Steinke 2022, definition 1."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def run_rdp(ledger: Ledger) -> Array:
    """Rényi ε of one trial at ORDERS.

    Raises:
        ConfigError: the accountant `rdp` does not cover the ledger, or has no bound for its sampling here.
    """
    counts = releases(ledger, "rdp")
    for release in counts:
        if release.policy not in ("poisson", "laplace"):
            raise ConfigError(f"sampling={release.policy} has no bound for private selection; choose sampling=poisson.")
    rounds = Rounds(counts)
    return np.array([rounds.moment(order) / (order - 1) for order in ORDERS])


def worst_case_rdp(ledgers: Iterable[Ledger]) -> Array:
    """Rényi ε at ORDERS of the worst-case trial: the largest at each order.

    Raises:
        ConfigError: as for `run_rdp`, or the ledgers have different adjacencies or privacy units.
    """
    ledgers = list(ledgers)
    check_same(ledgers, "trials", "selected among")
    trials = {frozenset(ledger.rounds.items()): ledger for ledger in ledgers}
    return np.max([run_rdp(ledger) for ledger in trials.values()], axis=0)


def selection_epsilon(curve: Array, delta: float, mean: float, shape: float) -> float:
    """ε at `delta` of releasing only the best of K trials (Papernot & Steinke 2022, theorems 2 and 6), of which each
    has Rényi ε `curve` at ORDERS. K has a distribution of this mean and shape."""
    check_repetitions(mean, shape)
    repeated = repeated_and_selected(ORDERS, curve, mean, shape)
    return max(0.0, float(rdp.compute_epsilon(ORDERS, repeated, delta)[0]))
