"""300 random points over all policies, adjacencies and accountants, against what is known of them from elsewhere.

    PYTHONPATH=. python benchmarks/accounting_points.py [seed]

Every ε of a bound must be no lower than a lower bound: dp-accounting's optimistic estimate (`pessimistic_estimate=
False`, losses rounded down) of a pair of neighbours, or a closed form where there is one. And it must lie within 1 % of
the tightest that is known, where something is: the closed form; dp-accounting's connected dots (`pld`); its Rényi DP
with each accountant's own conversion (`rdp`, `moments`); the theorems by hand (`basic`, `strong`, `gdp`).
"""

import math
import sys
import time
from collections import defaultdict

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting import NeighboringRelation, rdp
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import norm
from truncated_grid import theirs as truncated

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import CLAIMS, NAMES, coverage
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round, SamplingEvent, SumQueryEvent

POINTS, WITHIN = 300, 0.01
RELATIONS = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "replace_null": NeighboringRelation.REPLACE_SPECIAL,
}
EACH = [(p, a, name) for p, claims in CLAIMS.items() for a, names in claims.items() for name in names]
EACH += [("laplace", "add_remove", name) for name in NAMES if "laplace" in coverage(name).noise]


def gaussian(mu: float, delta: float) -> float:
    """Balle & Wang 2018, theorem 8."""

    def excess(e: float) -> float:
        return float(norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta)

    return (
        brentq(excess, 0, mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1, xtol=1e-13) if excess(0) > 0 else 0.0
    )


def composed(z: float, q: float, rounds: int, delta: float, relation: NeighboringRelation) -> tuple[float, float]:
    """(lower bound, connected dots) of Poisson samples, z being σ̃/S."""
    log_lost = math.log(delta) - 12 - math.log(rounds)
    twice = 2 if relation == NeighboringRelation.REPLACE_ONE else 1
    h = 0.05 * twice * q * math.sqrt(math.expm1(min(50, 1 / z**2)))
    most = math.log1p(q * math.expm1(min(600, (twice / z) ** 2 / 2 + twice * math.sqrt(-2 * log_lost) / z)))
    found = []
    for optimistic, step in (
        (True, max(h / 10, most / 3e4, most * math.sqrt(rounds) / 1e6)),
        (False, max(h, most / 5e4)),
    ):
        one = pld.from_gaussian_mechanism(
            z,
            pessimistic_estimate=not optimistic,
            use_connect_dots=not optimistic,
            value_discretization_interval=step,
            log_mass_truncation_bound=log_lost,
            sampling_prob=q,
            neighboring_relation=relation,
        )
        found.append(float(one.self_compose(rounds, 1e-5 * delta).get_epsilon_for_delta(delta)))
    return found[0], found[1]


def moments(z: float, q: float, rounds: int, delta: float) -> float:
    """Abadi et al. 2016, theorem 2, from dp-accounting's Rényi DP at whole orders."""
    orders = np.arange(2, 34)
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds)
    return float(np.min((accountant.rdp * (orders - 1) - math.log(delta)) / (orders - 1)))


def renyi(z: float, q: float, rounds: int, delta: float) -> float:
    """dp-accounting's at many real orders, and at whole ones where they are dense enough."""
    orders = 1 + 0.05 * 1.08 ** np.arange(180)
    accountant = rdp.RdpAccountant(np.unique(np.where(orders < 10, orders, np.round(orders))))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds)
    return float(accountant.get_epsilon(delta))


def each(z: float, q: float, delta: float) -> float:
    """A round's ε after amplification (Balle, Barthe & Gaboardi 2018, theorem 8)."""
    return math.log1p(q * math.expm1(gaussian(1 / z, delta / q)))


def strong(z: float, q: float, rounds: int, delta: float) -> float:
    """Kairouz, Oh & Viswanath 2015, theorem 3.5, at the best of many splits."""
    best = math.inf
    for t in np.linspace(-12, 12, 400):
        share = 1 / (1 + math.exp(t))
        e = each(z, q, -math.expm1(math.log1p(-share * delta) / rounds))
        slack = -math.expm1(math.log1p(-delta) - math.log1p(-share * delta))
        drift, spread = rounds * e * math.tanh(e / 2), math.sqrt(rounds) * e
        first = drift + spread * math.sqrt(2 * math.log(math.e + spread / slack))
        best = min(best, rounds * e, first, drift + spread * math.sqrt(2 * math.log(1 / slack)))
    return best


def laplace(scale: float, rounds: int, delta: float, name: str) -> tuple[float, float | None]:
    if rounds == 1 and name == "pld":  # δ(ε) = 1 - e^((ε-ε₀)/2)
        exact = max(0.0, 1 / scale + 2 * math.log1p(-delta))
        return exact, exact
    h = 1 / scale / 2000
    found = [
        float(
            pld.from_laplace_mechanism(
                scale, value_discretization_interval=h, pessimistic_estimate=sure, use_connect_dots=sure
            )
            .self_compose(rounds, 1e-5 * delta)
            .get_epsilon_for_delta(delta)
        )
        for sure in (False, True)
    ]
    return found[0], found[1] if name == "pld" else None


def known(
    policy: str, name: str, ledger: Ledger, facts: tuple[float, float, int, int, int, int], delta: float
) -> tuple[float, float | None]:
    """A lower bound on ε, and the tightest that is known of what the accountant computes."""
    z, q, rounds, n, maximum, parts = facts
    twice = 2 if ledger.adjacency == "replace_one" else 1
    relation = RELATIONS[ledger.adjacency]
    if policy == "laplace":
        return laplace(z, rounds, delta, name)
    if policy == "truncated_poisson":
        tight, least, _ = truncated(z, q, n, maximum, rounds, delta)
        return least, tight
    if policy == "cyclic_poisson":
        q, rounds = q * parts, math.ceil(rounds / parts)
    if policy == "shuffle":
        rounds = math.ceil(rounds * q - 1e-9)
    if policy in ("shuffle", "all"):
        q, z = 1.0, z / twice
    exact = gaussian(math.sqrt(rounds) / z, delta) if q == 1 else None
    # A sample of fixed size of which the other records contribute nothing is a Poisson sample of the one that differs.
    least, tight = (exact, exact) if exact is not None else composed(z, q, rounds, delta, relation)
    if name == "pld":
        if policy == "fixed_size" and q < 1:
            at = z / twice
            once = math.log1p(q * math.expm1(gaussian(1 / at, min(delta / q, 0.999)))) if rounds == 1 else None
            return (least, once) if once is None else (once * (1 - 1e-6), once)
        return least, tight
    if name == "rdp":
        return (least, renyi(z, q, rounds, delta)) if policy != "fixed_size" else (least, None)
    if name == "moments":
        return least, moments(z, q, rounds, delta)
    if name == "basic":
        return least, rounds * each(z, q, delta / rounds)
    if name == "strong":
        return least, strong(z, q, rounds, delta)
    mu = math.sqrt(rounds / z**2) if q == 1 else q * math.sqrt(rounds * math.expm1(1 / z**2))
    return -math.inf, gaussian(mu, delta)  # an approximation


def ledger_of(policy: str, adjacency: str, facts: tuple[float, float, int, int, int, int]) -> Ledger:
    z, q, rounds, n, maximum, parts = facts
    queries = (SumQueryEvent("all", 1.0, z),)
    if policy == "laplace":
        query = OneTimeQueryEvent("counts", "laplace", 1.0, 2.0, z)
        return Ledger(adjacency, {Round(SamplingEvent("all", 1.0, n), (query,)): rounds})
    if policy == "shuffle":
        batches, found = round(1 / q), {}
        for epoch in range(math.ceil(rounds / batches)):
            count = min(batches, rounds - epoch * batches)
            found[Round(SamplingEvent(policy, q, n, epoch=epoch), queries)] = count
        return Ledger(adjacency, found)
    own = {"truncated_poisson": {"maximum": maximum}, "cyclic_poisson": {"parts": parts, "block": 0}}.get(policy, {})
    return Ledger(adjacency, {Round(SamplingEvent(policy, q, n, **own), queries): rounds})


def drawn(policy: str, random: np.random.Generator) -> tuple[float, float, int, int, int, int]:
    n, z = 10_000, math.exp(random.uniform(math.log(0.6), math.log(15)))
    rounds, parts = round(10 ** random.uniform(0, 2.7)), int(random.integers(1, 9))
    batch = int(10 ** random.uniform(1, 3))
    q = 1.0 if policy in ("all", "laplace") else batch / n
    if policy == "shuffle":
        q = 1 / int(random.choice([4, 10, 50, 100]))
    if policy == "laplace":
        z, rounds = 10 ** random.uniform(0, 2), int(random.integers(1, 40))
    if policy == "fixed_size" and random.random() < 0.4:
        rounds = 1
    maximum = math.ceil(n * q + random.uniform(1, 10) * math.sqrt(n * q))
    return z, q, rounds, n, maximum, parts


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)  # orders at which dp-accounting's series does not converge are left out
    random = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 2027)
    found: dict[tuple[str, str], list[tuple[float, float | None]]] = defaultdict(list)
    wrong, mine, began = 0, 0.0, time.perf_counter()
    for point in range(POINTS):
        if point % 50 == 0:
            print(f"{point} points, {wrong} wrong", flush=True)
        policy, adjacency, name = EACH[point % len(EACH)]
        value = 0.0
        while not 0.01 < value < 40:
            facts, delta = drawn(policy, random), 10 ** random.uniform(-9, -4)
            run, start = ledger_of(policy, adjacency, facts), time.perf_counter()
            value = epsilon(run, delta, name)
        mine += time.perf_counter() - start
        least, tight = known(policy, name, run, facts, delta)
        over = value / tight - 1 if tight else None
        below = -math.inf if name == "rdp" else -WITHIN  # dp-accounting leaves out orders at which a series fails
        if value < least * (1 - 1e-9) or (over is not None and not below <= over <= WITHIN):
            wrong += 1
            print(
                f"{policy} {adjacency} {name} {facts} δ={delta:.3g}: {value:.6g}; {least:.6g} at least, {tight} known"
            )
        found[policy, name].append((value / least - 1 if least > 0 else math.inf, over))
    print(
        "policy              accountant  points  ε over a lower bound, least  ε over the tightest known, least and most"
    )
    for (policy, name), points in found.items():
        known_ = [over for _, over in points if over is not None]
        about = f"{min(known_):+.1e} {max(known_):+.1e} ({len(known_)} points)" if known_ else "none is known"
        print(f"{policy:20}{name:12}{len(points):6}  {min(margin for margin, _ in points):+26.1e}  {about}")
    print(f"{POINTS} points, {wrong} wrong; {mine:.0f} s here, {time.perf_counter() - began:.0f} s in all")
