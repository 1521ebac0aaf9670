"""Discrete Gaussian noise, which older ledgers have: its accounting against sums of its pmf."""

import math

import numpy as np
import pytest

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.ledger import DiscreteSumQueryEvent, Ledger, Round, SamplingEvent, SumQueryEvent
from dpexp.accounting.ledger.events import SMOOTHING


def ledger_of(query, q=1.0, rounds=1, n=1000, adjacency="add_remove"):
    sampling = SamplingEvent("all", 1.0, n) if q == 1 else SamplingEvent("poisson", q, n)
    return Ledger(adjacency, {Round(sampling, (query,)): rounds})


def discrete(S2, sigma2):
    return DiscreteSumQueryEvent("all", 1e-7, S2, sigma2)


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
def test_delta_is_at_least_that_of_the_pmf(shifts, q):
    """In one and two dimensions, along the axes and between them, in both directions; and not far above."""
    present, absent = outputs(45**2 + 1, shifts, q)[::-1]
    ledger = ledger_of(discrete(50**2, 45**2 + 1), q)
    for e in (0.0, 0.05, 0.3, 1.0, 2.0):
        true = max(hockey_stick(present, absent, e), hockey_stick(absent, present, e))
        bound = delta(ledger, e)
        assert bound >= true * (1 - 1e-12)
        if sum(s * s for s in shifts) == 50**2:
            assert bound <= true * 1.1 + 1e-4, "σ² counts for 64 less"


@pytest.mark.parametrize("accountant", NAMES)
def test_every_accountant_counts_it_as_a_gaussian_of_less_variance(accountant):
    query, twin = discrete(3600, 14400 + SMOOTHING), SumQueryEvent("all", 0.5, 1.0)
    assert query.squared_ratio == 0.25
    for q in (0.1, 1.0):
        assert epsilon(ledger_of(query, q, 30), 1e-5, accountant) == epsilon(ledger_of(twin, q, 30), 1e-5, accountant)
