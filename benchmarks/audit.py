"""Audits of honest and of sabotaged trainings.

    PYTHONPATH=.:tests python benchmarks/audit.py honest      # every sampling, mechanism, vectors and allocation
    PYTHONPATH=.:tests python benchmarks/audit.py sabotaged   # each sabotage of tests/audited.py under every sampling
    PYTHONPATH=.:tests python benchmarks/audit.py power [N]   # N audits for each error of the noise and of the rate

The first two print a line an audit: the μ found and its bound in units of the μ claimed, and what was refuted. The
last prints how often an error is found, and draws it (docs/audit_power.png).
"""

import itertools
import logging
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests import audited
from tests.audited import ALLOCATIONS, MECHANISMS, SAMPLINGS, VECTORS, attacked, check

SABOTAGES = (
    audited.half_the_noise, audited.the_same_noise_each_round, audited.the_same_noise_for_each_group,
    audited.a_group_unclipped, audited.twice_the_bound, audited.each_vector_clipped_alone,
    audited.alpha_forgotten_in_the_noise, audited.some_records_twice, audited.less_noise, audited.a_larger_rate,
    audited.a_tenth_of_the_rounds_not_in_the_ledger, audited.samples_of_an_epoch_that_overlap,
    audited.records_that_draw_once_more, audited.some_records_that_draw_twice,
)  # fmt: skip

NOISE, RATE = (1.0, 0.995, 0.99, 0.985, 0.98, 0.95), (1.02, 1.04, 1.05, 1.06, 1.1)
SMALL = {"canaries": 1000, "sampling": "poisson", "q": 0.1, "steps": 80, "noise_multiplier": 2.0}


def run(name, **choices):
    """Prints one line, and returns the audit."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = attacked(Path(folder), **choices)
        seconds = time.perf_counter() - began
    refuted = [one.name for one in found.checks if one.refuted]
    if found.mu_bound > found.mu_claimed:
        refuted.append("μ")
    print(
        f"{name:<64} μ {check(found.checks, 'distance of scores').found / found.mu_claimed:<6.3g} at least "
        f"{found.mu_bound / found.mu_claimed:.2f} {seconds:4.1f} s  {', '.join(refuted) or '-'}",
        flush=True,
    )
    return found


def honest():
    found = []
    for sampling, mechanism, vectors, allocation in itertools.product(SAMPLINGS, MECHANISMS, VECTORS, ALLOCATIONS):
        choices = SAMPLINGS[sampling] | MECHANISMS[mechanism]
        choices |= {"vectors": vectors, "allocation": ALLOCATIONS[allocation], "seed": len(found)}
        found.append(run(f"{sampling}, {mechanism}, {vectors}, {allocation}", **choices))
    print(f"{len(found)} honest audits, {sum(bool(one.exceeded) for one in found)} refuted a claim")


def sabotaged():
    for sabotage, sampling in itertools.product(SABOTAGES, SAMPLINGS):
        with pytest.MonkeyPatch.context() as patch:
            sabotage(patch)
            choices = {"vectors": "parameter"} | MECHANISMS["joint"] | SAMPLINGS[sampling]
            run(f"{sabotage.__name__}, {sampling}", **choices)


def one_audit(name, sabotage, factor, seed):
    """Whether anything is refuted, and the check of that name."""
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if factor != 1:
            sabotage(patch, factor)
        found = attacked(Path(folder), seed=seed, **SMALL)
    return bool(found.exceeded), check(found.checks, name)


def power(audits):
    shares = {}
    kinds = ("noise", audited.less_noise, NOISE), ("rate of inclusion", audited.a_larger_rate, RATE)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name, sabotage, factor in [(name, sabotage, one) for name, sabotage, all_ in kinds for one in all_]:
            seeds = range(audits * (2 if factor == 1 else 1))
            found = [*pool.map(partial(one_audit, name, sabotage, factor), seeds)]
            refuted, last = sum(one for one, _ in found), found[0][1]
            shares[name, factor] = refuted / len(found)
            print(
                f"{name} × {factor:<6} refuted in {refuted} of {len(found)} audits; found {last.found:.4f}, told to be "
                f"found from {last.detectable:.4f}", flush=True,
            )  # fmt: skip
    draw(shares)


def draw(shares):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("noise", "rate of inclusion"), strict=True):
        factors = sorted({factor for of, factor in shares if of == name} | {1.0})
        axes.plot(factors, [shares.get((name, factor), shares["noise", 1.0]) for factor in factors], "o-")
        axes.axhline(0.95, color="0.8", zorder=0)
        axes.set(xlabel=f"true {name}, in units of the plan", ylim=(-0.03, 1.03))
    figure.axes[0].set_ylabel("share of audits that refute")
    figure.savefig("docs/audit_power.png", dpi=150)


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    match sys.argv[1:]:
        case ["power", *audits]:
            power(int(audits[0]) if audits else 200)
        case ["sabotaged"]:
            sabotaged()
        case _:
            honest()
