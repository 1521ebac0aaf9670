"""Audits of honest and of sabotaged trainings, each with its time.

    PYTHONPATH=. python benchmarks/audit.py [CANARIES]

The honest table has every sampling, mechanism, kind of vectors and allocation; then come 4 000 canaries over 1, 10 and
50 rounds; then each sabotage of tests/audited.py under every sampling, and what caught it. Each line says μ found, in
units of the μ claimed, and the lower bound on ε at δ = 1e-5, in units of the ε claimed.
"""

import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests import audited
from tests.audited import ALLOCATIONS, MECHANISMS, SAMPLINGS, VECTORS, attacked

SABOTAGES = (
    audited.half_the_noise, audited.the_same_noise_each_round, audited.the_same_noise_for_each_group,
    audited.a_group_unclipped, audited.twice_the_bound, audited.each_vector_clipped_alone,
    audited.alpha_forgotten_in_the_noise, audited.twice_the_rate, audited.a_round_that_no_ledger_tells_of,
    audited.the_true_size_as_divisor, audited.no_noise_for_an_empty_sample,
)  # fmt: skip


def run(name, *arguments, **choices):
    """Prints one line, and returns the audit and what its numbers are of the claim."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = attacked(Path(folder), *arguments, **choices)
        seconds = time.perf_counter() - began
    least = found.bounds[0]
    mu, bound = found.mu_found / found.mu_claimed, max(least.found, least.if_independent) / least.claimed
    caught = [
        what
        for what, so in (
            ("ε", any(bound.found > bound.claimed for bound in found.bounds)),
            ("curve", found.p < 0.05),
            ("ε if independent", any(bound.if_independent > bound.claimed for bound in found.bounds)),
            ("curve if independent", found.p_independent < 0.05),
        )
        if so
    ]
    print(f"{name:<72} μ {mu:<7.3g} ε {bound:.2f}  {seconds:4.1f} s  {', '.join(caught) or '-'}", flush=True)
    return found, mu, bound


def honest(canaries):
    print("Honest")
    rows = []
    for sampling, mechanism, vectors, allocation in itertools.product(SAMPLINGS, MECHANISMS, VECTORS, ALLOCATIONS):
        choices = SAMPLINGS[sampling] | MECHANISMS[mechanism]
        choices |= {"vectors_by": vectors, "allocation": ALLOCATIONS[allocation], "seed": len(rows)}
        rows.append((sampling, *run(f"{sampling}, {mechanism}, {vectors}, {allocation}", canaries, **choices)))
    print(f"{len(rows)} honest audits, {sum(bool(found.exceeded) for _, found, _, _ in rows)} refuted a claim")
    for sampling in SAMPLINGS:
        mus = [mu for name, _, mu, _ in rows if name == sampling]
        bounds = [bound for name, _, _, bound in rows if name == sampling]
        print(
            f"  {sampling}: μ {np.mean(mus):.3f} ({min(mus):.2f} to {max(mus):.2f}), "
            f"ε {min(bounds):.2f} to {max(bounds):.2f}"
        )


def main():
    canaries = int(sys.argv[1]) if len(sys.argv) > 1 else audited.N
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    honest(canaries)
    print("4 000 canaries")
    for rounds in (1, 10, 50):
        run(f"all, {rounds} rounds, z = {rounds**0.5:.3g}", 4000, steps=rounds, noise_multiplier=rounds**0.5)
        poisson = {"sampling": "poisson", "q": 0.1, "noise_multiplier": 1.0}
        run(f"poisson at 0.1, {rounds} rounds, z = 1", 4000, steps=rounds, **poisson)
    print("Sabotaged")
    for sabotage, sampling in itertools.product(SABOTAGES, SAMPLINGS):
        with pytest.MonkeyPatch.context() as patch:
            sabotage(patch)
            choices = {"vectors_by": "parameter"} | MECHANISMS["joint"] | SAMPLINGS[sampling]
            run(f"{sabotage.__name__}, {sampling}", canaries, **choices)


if __name__ == "__main__":
    main()
