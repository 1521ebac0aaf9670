"""ε of random allocation against simulations, and against pld-accounting's bounds.

    python benchmarks/random_allocation.py [--points 200] [--oracle 60]    # an hour; without pld-accounting half of it

A simulation estimates δ at dpexp's ε, and the ε at δ, in both directions, from shifted samples (importance sampling). A
record in k of t rounds has the likelihood ratio e_k(R_1, …, R_t) / (t over k), of the ratios R_i of the rounds. For
k > 1, dpexp's bound is that of k blocks, as is pld-accounting's. Limits of a simulation hold at 1 - 1e-5 a point.
"""

import argparse
import math
import multiprocessing
import time

import numpy as np
from scipy.stats import norm

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent
from dpexp.accounting.sampling import sampling_event

_SIGMAS = float(norm.isf(1e-5))
_NORMALS = 2e7  # of a simulation


def ledger_of(z, t, k, epochs):
    query = SumQueryEvent("all", 1.0, z)
    events = [
        sampling_event("random_allocation", k / t, 10**6, epoch=e, num_selected=k, num_steps=t) for e in range(epochs)
    ]
    return Ledger("add_remove", {Round(event, (query,)): 1 for event in events})


def points(count):
    rng = np.random.default_rng(44)
    while count:
        drawn = np.exp(rng.uniform(np.log([0.4, 2, 1]), np.log([6, 300, 30])))
        z, t, epochs = (float(f"{x:.3g}") for x in drawn)
        t, epochs, k = round(t), round(epochs), int(rng.choice([1, 1, 1, 2, 3]))
        delta = float(rng.choice([1e-3, 1e-4, 1e-5]))
        if k < t and t * epochs <= 1500 and epochs * k / z**2 < 40:
            yield z, t, k, epochs, delta
            count -= 1


def log_ratio(x, z, k):
    """log P/Q of outputs x [N, t] of an epoch."""
    ratios = np.exp(x / z**2 - 0.5 / z**2)
    if k == 1:
        return np.log(ratios.mean(axis=1))
    sums = [np.ones(len(x))] + [np.zeros(len(x)) for _ in range(k)]
    for column in ratios.T:
        for j in range(k, 0, -1):
            sums[j] += column * sums[j - 1]
    return np.log(sums[k]) - math.log(math.comb(x.shape[1], k))


def simulated(rng, z, t, k, epochs, samples, removed, own, all_):
    """Losses [N] and weights [N]: the record's rounds are shifted by `own`, all rounds by `all_`."""
    losses, log_weight = np.zeros(samples), np.zeros(samples)
    for _ in range(epochs):
        x = z * rng.standard_normal((samples, t))
        shift = np.full(t, all_)
        shift[:k] += own * removed
        log_weight -= (2 * x @ shift + shift @ shift) / (2 * z**2)
        x += shift
        x[:, :k] += removed
        losses += log_ratio(x, z, k) * (1 if removed else -1)
    return losses, np.exp(log_weight)


def estimate(rng, z, t, k, epochs, delta, at):
    """δ's lower limit at ε = `at`, ε at δ, and its relative standard error; of the worse direction by ε."""
    found = []
    for removed in (1, 0):
        sign, step = (1 if removed else -1), z / math.sqrt(t * epochs)
        tilts = [(a * z, sign * b * step) for a in (0, 0.5, 1) for b in (0, 1, 2.5) if removed or not a]

        def terms(samples, tilt, removed=removed):
            losses, weight = simulated(rng, z, t, k, epochs, samples, removed, *tilt)
            return losses, weight, weight * np.maximum(-np.expm1(at - losses), 0)

        def spread(tilt, terms=terms):
            each = terms(1000, tilt)[2]
            return each.std() / max(each.mean(), 1e-300) if each.any() else math.inf

        tilt = min(tilts, key=spread)
        losses, weight, each = terms(max(15_000, int(_NORMALS / (t * epochs))), tilt)
        mean, error = each.mean(), each.std() / math.sqrt(len(each))
        low, high = 0.0, 60.0
        for _ in range(40):
            middle = (low + high) / 2
            if (weight * np.maximum(-np.expm1(middle - losses), 0)).mean() > delta:
                low = middle
            else:
                high = middle
        slope = (weight * np.exp(np.minimum(high - losses, 0)) * (losses > high)).mean()  # -dδ/dε
        found.append((high, mean - _SIGMAS * error, error / max(slope, 1e-300) / max(high, 1e-300)))
    return max(limit for _, limit, _ in found), *max(found)[::2]


def _oracle(queue, z, t, k, epochs, delta):
    from PLD_accounting import gaussian_allocation_epsilon_range

    queue.put(gaussian_allocation_epsilon_range(delta=delta, sigma=z, num_steps=t, num_selected=k, num_epochs=epochs))


def oracle(seconds, *point):
    """pld-accounting's lower and upper bound, or None if it takes longer."""
    queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=_oracle, args=(queue, *point))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return tuple(reversed(queue.get(timeout=1))) if process.exitcode == 0 else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--oracle", type=float, default=0, help="seconds for pld-accounting a point; 0: without it")
    options = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    print("| z | t | k | epochs | δ | ε | seconds | simulated ε | its error | below its limit | pld-accounting |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for z, t, k, epochs, delta in points(options.points):
        start = time.perf_counter()
        found = epsilon(ledger_of(z, t, k, epochs), delta)
        seconds = time.perf_counter() - start
        limit, simulated_epsilon, error = estimate(rng, z, t, k, epochs, delta, found)
        bounds = oracle(options.oracle, z, t, k, epochs, delta) if options.oracle else None
        rows.append((k, found / simulated_epsilon - 1, error, limit > delta, seconds, found, bounds))
        between = f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""
        print(
            f"| {z:g} | {t} | {k} | {epochs} | {delta:g} | {found:.4f} | {seconds:.2f} | {simulated_epsilon:.4f} | "
            f"{error:.1%} | {'BELOW' if limit > delta else ''} | {between} |", flush=True,
        )  # fmt: skip
    compared = [(found, bounds) for *_, found, bounds in rows if bounds]
    print(f"\n{len(rows)} points; below the simulation's limit: {sum(row[3] for row in rows)}")
    for name, some in (("k = 1", [r for r in rows if r[0] == 1]), ("k > 1", [r for r in rows if r[0] > 1])):
        exact = [excess for _, excess, error, *_ in some if error < 0.003]
        if exact:
            print(f"{name}: ε over the simulated one, of {len(exact)} whose error is below 0.3 %: "
                  f"mean {np.mean(exact):+.2%}, worst {max(exact):+.2%}, least {min(exact):+.2%}")  # fmt: skip
    print(f"seconds a point: mean {np.mean([r[4] for r in rows]):.2f}, worst {max(r[4] for r in rows):.2f}")
    if compared:
        print(f"pld-accounting, {len(compared)} points: below its lower bound "
              f"{sum(found < low * (1 - 1e-6) for found, (low, _) in compared)}, above its upper bound "
              f"{sum(found > high for found, (_, high) in compared)}")  # fmt: skip


if __name__ == "__main__":
    main()
