"""Norms estimated by random projections (DP-SGD-JL, Bu et al. 2021, arXiv 2102.03013) beside exact ones: ε.

    python benchmarks/jl.py

A record's norm is estimated from its products with r normal vectors, M = (Σ_j ⟨v, p_j⟩²/r)^½, one forward derivative
each, and c = min(1, S/M). Since M = ‖v‖ψ with rψ² ~ χ²_r, its contribution is bounded by S/ψ and not by S. Given the
vectors p_j, which do not depend on the data, a round is a Gaussian release of sensitivity S/ψ; so its δ(ε) is at most
the mean over ψ of what noise multiplier zψ costs, and its privacy loss a mixture of theirs. ψ is taken from below, in
DETAIL strips; below TAIL of its probability all counts as lost, and where zψ is below LEAST, a record that was sampled.
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from report import head, row
from scipy.stats import chi2

from dpexp import Poisson, Target, make_plan
from dpexp.training.models import mlp

N, Q, ROUNDS, EPSILON, DELTA = 1437, 512 / 1437, 113, 3.0, 1e-4
EXACT = 10**9  # so many projections that estimates are exact
PROJECTIONS = (3, 10, 30, 100, 1000)
TAIL, DETAIL, STEP, LEAST, MOST = 1e-9, 600, 1e-3, 0.15, 20.0


def epsilon_of_estimates(z: float, r: float, rounds: int = ROUNDS) -> float:
    """ε at DELTA, for adding or removing a record, by dp-accounting's privacy loss distributions."""
    # Strips of ψ whose probabilities grow from TAIL to 1/2, and shrink to TAIL again.
    edges = np.geomspace(TAIL, 0.5, DETAIL // 2)
    edges = np.concatenate([edges, 1 - edges[-2::-1], [1.0]])
    psi, weights = np.sqrt(chi2.ppf(edges[:-1], r) / r), np.diff(edges)
    found = [_one(z * p) for p in psi]
    mixed = pld.PrivacyLossDistribution(*(_mixture(pmfs, weights) for pmfs in zip(*found, strict=True)))
    return float(mixed.self_compose(rounds).get_epsilon_for_delta(DELTA))


def _one(z: float) -> tuple[pld_pmf.PLDPmf, pld_pmf.PLDPmf]:
    """For removing and for adding a record."""
    if z >= LEAST:
        found = pld.from_gaussian_mechanism(z, value_discretization_interval=STEP, sampling_prob=Q)
        return found._pmf_remove, found._pmf_add
    left = math.ceil(math.log1p(-Q) / STEP), math.ceil(-math.log1p(-Q) / STEP)  # it was not sampled
    return (
        pld_pmf.DensePLDPmf(STEP, left[0], np.array([1 - Q]), Q, pessimistic_estimate=True),
        pld_pmf.DensePLDPmf(STEP, left[1], np.array([1.0]), 0.0, pessimistic_estimate=True),
    )


def _mixture(pmfs: list, weights: np.ndarray) -> pld_pmf.DensePLDPmf:
    pmfs = [pmf.to_dense_pmf() for pmf in pmfs]
    low = min(pmf._lower_loss for pmf in pmfs)
    probabilities = np.zeros(max(pmf._lower_loss + len(pmf._probs) for pmf in pmfs) - low)
    for pmf, weight in zip(pmfs, weights, strict=True):
        start = pmf._lower_loss - low
        probabilities[start : start + len(pmf._probs)] += weight * pmf._probs
    lost = TAIL + sum(weight * pmf._infinity_mass for pmf, weight in zip(pmfs, weights, strict=True))
    return pld_pmf.DensePLDPmf(STEP, low, probabilities, lost, pessimistic_estimate=True)


def main() -> None:
    sampling = Poisson(sampling_rate=Q, steps=ROUNDS)
    plan = make_plan(mlp((1, 8, 8), 10), n=N, sampling=sampling, target=Target(epsilon=EPSILON, delta=DELTA))
    z = plan.noise_multiplier
    print(f"{ROUNDS} rounds at q = {Q:.4f}, z = {z:.4f}; exact norms: ε = {EPSILON:g} at δ = {DELTA:g}")
    print(head("r", "ε"))
    for r in (*PROJECTIONS, EXACT):
        spent = epsilon_of_estimates(z, r)
        print(row(r, f"{spent:.3f}" if spent < MOST else f"above {MOST:g}"), flush=True)


if __name__ == "__main__":
    main()
