"""pld at 200 random points against dp-accounting's: z from 0.5 to 20, q from 1e-5 to 1, T to 10^6, δ down to 1e-12.

    PYTHONPATH=. python benchmarks/accounting_grid.py [seed]

Points that cost less than ε = 0.001 or more than 50 are drawn again. Where the two differ by more than a thousandth,
dp-accounting is asked again on a grid four times finer, and then its rounds are composed in extended precision: which
of these agrees with pld to a thousandth says what the difference came from.
"""

import math
import sys
import time

import numpy as np
from dp_accounting import pld

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent
from tests.extended import extended

POINTS, AGREE = 200, 1e-3


def ours(z: float, q: float, rounds: int, delta: float) -> float:
    event = SamplingEvent("poisson", q, 60_000)
    return epsilon(Ledger("add_remove", {Round(event, (SumQueryEvent("all", 1.0, z),)): rounds}), delta)


def one_round(z: float, q: float, rounds: int, delta: float, h: float) -> pld.privacy_loss_distribution:
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=q,
        value_discretization_interval=h,
        log_mass_truncation_bound=math.log(delta) - 12 - math.log(rounds),
    )


def interval(z: float, q: float) -> float:
    """A twentieth of the loss's standard deviation, but no more than about 300 000 points."""
    most = math.log1p(q * math.expm1(min(600, 1 / (2 * z**2) + 10 / z)))
    return max(0.05 * q * math.sqrt(math.expm1(1 / z**2)), most / 3e5)


def theirs(z: float, q: float, rounds: int, delta: float, h: float) -> float:
    composed = one_round(z, q, rounds, delta, h).self_compose(rounds, tail_mass_truncation=1e-5 * delta)
    return float(composed.get_epsilon_for_delta(delta))


def reason(z: float, q: float, rounds: int, delta: float, h: float, found: float) -> str:
    def agrees(value: float) -> bool:
        return abs(value / found - 1) <= AGREE

    finer = theirs(z, q, rounds, delta, h / 4)
    if agrees(finer):
        return f"its grid: {finer:.6g} on one four times finer"
    width = max(4 * found, 14 * h / 0.05 * math.sqrt(rounds), 3e5 * h)
    for step in (h, h / 4):
        exact = extended(one_round(z, q, rounds, delta, step), rounds, delta, width)
        if agrees(exact):
            grid = "" if step == h else ", on a grid four times finer"
            return f"its rounding: {exact:.6g} by its rounds in extended precision{grid}"
    return f"UNEXPLAINED: {finer:.6g} on a grid four times finer, {exact:.6g} in extended precision"


if __name__ == "__main__":
    random = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 2026)
    differences, mine, his = [], 0.0, 0.0
    while len(differences) < POINTS:
        z, q = math.exp(random.uniform(math.log(0.5), math.log(20))), 10 ** random.uniform(-5, 0)
        rounds, delta = round(10 ** random.uniform(0, 6)), 10 ** random.uniform(-12, -3)
        start = time.perf_counter()
        found = ours(z, q, rounds, delta)
        if not 1e-3 < found < 50:
            continue
        mine += time.perf_counter() - start
        start, h = time.perf_counter(), interval(z, q)
        expected = theirs(z, q, rounds, delta, h)
        his += time.perf_counter() - start
        differences.append(found / expected - 1)
        if abs(differences[-1]) > AGREE:
            why = reason(z, q, rounds, delta, h, found)
            print(
                f"z={z:.4g} q={q:.4g} T={rounds} δ={delta:.3g}: {found:.6g} here, {expected:.6g} there; {why}",
                flush=True,
            )
    within = sorted(abs(d) for d in differences if abs(d) <= AGREE)
    print(f"{len(within)} of {POINTS} within {AGREE:g}, the worst of them by {within[-1]:.2g}")
    print(f"worst relative difference of all: {max(differences, key=abs):+.3g}")
    print(f"{mine / POINTS:.2f} s a point here, {his / POINTS:.2f} s there")
