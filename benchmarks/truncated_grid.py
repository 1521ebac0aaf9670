"""pld of truncated_poisson against dp-accounting's, for maxima from 1 to 10 standard deviations above the mean sample.

    PYTHONPATH=. python benchmarks/truncated_grid.py [seed]

n goes from 10³ to 10⁶ and T from 1 to 10⁵; q, z and δ are drawn at random, again where ε is below 0.01 or above 50.
dp-accounting connects the dots on a grid of a twentieth of the loss's standard deviation (its pessimistic estimate),
and rounds losses down (its optimistic one, on a grid twenty times finer, or as 100 000 points allow). Every ε
must lie within 2 % of the first and no lower than the second, nor than 0.1 % below dp-accounting's ε of plain Poisson
samples. Where it does not, dp-accounting is asked again on grids that are 5 and 20 times finer.
"""

import math
import sys
import time

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import binom

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent

SIZES, ROUNDS, DEVIATIONS = (1_000, 30_000, 1_000_000), (1, 30, 1_000, 100_000), range(1, 11)
NULL, REPLACED = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
WITHIN = 0.02


def ours(z: float, q: float, n: int, maximum: int, rounds: int, delta: float) -> float:
    event = SamplingEvent("truncated_poisson", q, n, maximum)
    return epsilon(Ledger("replace_null", {Round(event, (SumQueryEvent("all", 1.0, z),)): rounds}), delta)


def one_round(
    z: float, q: float, n: int, maximum: int, h: float, log_lost: float, optimistic: bool
) -> pld.PrivacyLossDistribution:
    """As `from_truncated_subsampled_gaussian_mechanism` mixes it, which has no optimistic estimate."""

    def gaussian(deviation: float, rate: float, relation: NeighboringRelation) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            deviation,
            pessimistic_estimate=not optimistic,
            use_connect_dots=not optimistic,
            value_discretization_interval=h,
            log_mass_truncation_bound=log_lost,
            sampling_prob=rate,
            neighboring_relation=relation,
        )

    full = float(binom.sf(maximum - 1, n - 1, q))
    plain = gaussian(z, q, NULL)
    if full == 0:
        return plain
    rate = float(binom.sf(maximum, n, q)) * maximum / full / n
    return gaussian(z / 2, rate, REPLACED).compute_mixture(plain, full)


def theirs(
    z: float, q: float, n: int, maximum: int, rounds: int, delta: float, finer: float = 1
) -> tuple[float, float, float]:
    """ε by the pessimistic and by the optimistic estimate, and of plain Poisson samples."""
    log_lost = math.log(delta) - 12 - math.log(rounds)
    h = 0.05 * q * math.sqrt(math.expm1(1 / z**2))
    most = math.log1p(q * math.expm1(min(600, 8 / z**2 + 4 * math.sqrt(-2 * log_lost) / z)))
    found = []
    for optimistic, bound, step in (
        (False, maximum, max(h, most / 1e5) / finer),
        (True, maximum, max(h / 20, most / 1e5, most * math.sqrt(rounds) / 3e6)),
        (False, n, max(h, most / 1e5) / finer),
    ):
        composed = one_round(z, q, n, bound, step, log_lost, optimistic).self_compose(rounds, 1e-5 * delta)
        found.append(float(composed.get_epsilon_for_delta(delta)))
    return found[0], found[1], found[2]


if __name__ == "__main__":
    random = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 2026)
    apart: dict[int, list[float]] = {k: [] for k in DEVIATIONS}
    wrong, margins, mine, his = 0, [], 0.0, 0.0
    for n in SIZES:
        for rounds in ROUNDS:
            for k in DEVIATIONS:
                while True:
                    q, delta = math.exp(random.uniform(math.log(20 / n), math.log(0.2))), 10 ** random.uniform(-9, -4)
                    z = math.exp(random.uniform(math.log(0.5), math.log(10)))
                    maximum = math.ceil(n * q + k * math.sqrt(n * q * (1 - q)))
                    start = time.perf_counter()
                    found = ours(z, q, n, maximum, rounds, delta)
                    mine += (took := time.perf_counter() - start)
                    if 0.01 < found < 50:
                        break
                start = time.perf_counter()
                for finer in (1, 5, 20):
                    expected, least, plain = theirs(z, q, n, maximum, rounds, delta, finer)
                    if abs(found / expected - 1) <= WITHIN and found >= plain * (1 - 1e-3):
                        break  # else its grid may be too coarse
                his += time.perf_counter() - start
                apart[k].append(found / expected - 1)
                margins.append(found / least - 1 if least > 0 else math.inf)
                if abs(apart[k][-1]) > WITHIN or found < max(least, plain * (1 - 1e-3)):
                    wrong += 1
                    print(
                        f"n={n} q={q:.4g} maximum={maximum} (+{k}) z={z:.4g} T={rounds} δ={delta:.3g}: {found:.6g} in "
                        f"{took:.2g} s here; {expected:.6g} there, at least {least:.6g}, Poisson {plain:.6g}",
                        flush=True,
                    )
            print(f"n={n} T={rounds}: {sum(map(len, apart.values()))} points, {wrong} wrong", flush=True)
    print("maximum: mean + k standard deviations; points; ε here over ε there, least and most")
    for k, differences in apart.items():
        print(f"{k:2d}  {len(differences)}  {1 + min(differences):.5f}  {1 + max(differences):.5f}")
    points = sum(map(len, apart.values()))
    print(f"{points} points, {wrong} wrong; the closest is {min(margins):+.2g} above its optimistic estimate, of which")
    print(f"{sum(margin < 0.02 for margin in margins)} are within 2 %; {mine:.0f} s here, {his:.0f} s there")
