"""Discrete Gaussian noise, which older ledgers have: its accounting against sums of its pmf."""

import math

import numpy as np
import pytest
from test_ledger_lines import HEADER, linked

from dpexp.accounting.accountants import delta
from dpexp.accounting.ledger import ledger_so_far


def pmf(sigma2, shift, far):
    k = np.arange(-far, far + 1)
    mass = np.exp(-((k - shift) ** 2) / (2 * sigma2))
    return mass / mass.sum()


def outputs(sigma2, shifts, q):
    """What is released if the record is absent, and if it is in the sample at rate q and moves the sum by `shifts`: one
    axis for each coordinate."""
    far = int(10 * math.sqrt(sigma2))
    absent, moved = (
        np.array(1.0) if not shifts else [pmf(sigma2, shift, far) for shift in each]
        for each in ([0] * len(shifts), shifts)
    )
    absent, moved = (np.multiply.outer(*law) if len(law) == 2 else law[0] for law in (absent, moved))
    return absent.ravel(), ((1 - q) * absent + q * moved).ravel()


def hockey_stick(first, second, e):
    return np.maximum(first - math.exp(e) * second, 0).sum()


@pytest.mark.parametrize("q", [1.0, 0.2])
@pytest.mark.parametrize("shifts", [(50,), (14, 48), (3, 47)])
def test_delta_is_at_least_that_of_the_pmf(tmp_path, shifts, q):
    """In one and two dimensions, along the axes and between them, in both directions; and not far above."""
    present, absent = outputs(45**2 + 1, shifts, q)[::-1]
    query = {"group": "all", "grid": 1e-7, "S2": 50**2, "sigma2": 45**2 + 1}
    sampling = {"policy": "all" if q == 1 else "poisson", "q": q, "n": 1000}
    (tmp_path / "l.jsonl").write_bytes(linked([HEADER, {"spec": 0, "sampling": sampling, "queries": [query]}, 0]))
    ledger = ledger_so_far(tmp_path / "l.jsonl")
    for e in (0.0, 0.05, 0.3, 1.0, 2.0):
        true = max(hockey_stick(present, absent, e), hockey_stick(absent, present, e))
        bound = delta(ledger, e)
        assert bound >= true * (1 - 1e-12)
        if sum(s * s for s in shifts) == 50**2:
            assert bound <= true * 1.1 + 1e-4, "σ² counts for 64 less"
