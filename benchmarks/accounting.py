"""How long accounting takes, beside dp-accounting in the same run.

    python benchmarks/accounting.py

A ledger of a million equal rounds is read and accounted; a thousand distinct rounds are accounted; σ is solved for.
"""

import tempfile
import time
from pathlib import Path

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting import pld, rdp

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.calibration import solve
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent, read_ledger, write_ledger
from dpexp.accounting.risk import Epsilon

DELTA = 1e-5


def round_of(z: float, q: float) -> Round:
    return Round(SamplingEvent("poisson", q, 60_000), (SumQueryEvent("all", 1.0, z),))


def say(what: str, seconds: float, value: float) -> None:
    print(f"{what:66} {seconds:9.3f} s   {value:.5f}", flush=True)


def million(path: Path) -> None:
    write_ledger(path, Ledger("add_remove", {round_of(2.0, 0.001): 10**6}))


def by_dp_accounting(accountant: pld.PLDAccountant | rdp.RdpAccountant, rounds: list[tuple[float, float]]) -> float:
    for z, q in rounds:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)))
    return float(accountant.get_epsilon(DELTA))


def solved(name: str, q: float, rounds: int, target: float) -> float:
    return solve(
        "noise_multiplier", lambda z: Ledger("add_remove", {round_of(z, q): rounds}), Epsilon(target, DELTA), name,
        start=1.0
    ).value  # fmt: skip


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        million(path)
        for name in ("pld", "rdp"):
            start = time.perf_counter()
            cost = epsilon(read_ledger(path), DELTA, name)
            say(f"1 000 000 equal rounds, read and accounted by {name}, ε:", time.perf_counter() - start, cost)

    pairs = list(zip(np.linspace(0.8, 4, 1000).tolist(), np.linspace(0.001, 0.1, 1000).tolist(), strict=True))
    distinct = Ledger("add_remove", {round_of(z, q): 1 for z, q in pairs})
    for name, theirs in (("rdp", rdp.RdpAccountant()), ("pld", pld.PLDAccountant())):
        start = time.perf_counter()
        cost = epsilon(distinct, DELTA, name)
        say(f"1 000 distinct rounds by {name}, ε:", time.perf_counter() - start, cost)
        start = time.perf_counter()
        cost = by_dp_accounting(theirs, pairs)
        say(f"    by dp-accounting's {name}:", time.perf_counter() - start, cost)

    for name in ("pld", "rdp"):
        for rounds, target in ((1000, 8.0), (10_000, 0.5)):
            start = time.perf_counter()
            z = solved(name, 0.01, rounds, target)
            say(f"σ for ε = {target:g}, q = 0.01, {rounds} rounds, by {name}, σ:", time.perf_counter() - start, z)
