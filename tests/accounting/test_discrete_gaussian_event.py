"""Discrete Gaussian noise: its accounting against sums of its pmf, and its lines in a ledger."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import logsumexp

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.ledger import (
    DiscreteSumQueryEvent,
    Ledger,
    LedgerWriter,
    Round,
    SamplingEvent,
    SumQueryEvent,
    concatenate,
    read_ledger,
)
from dpexp.accounting.ledger.events import SMOOTHING
from dpexp.accounting.rdp import log_moments
from dpexp.errors import ConfigError

SIGMA2 = 2**48


def ledger_of(query, q=1.0, rounds=1, n=1000, adjacency="add_remove"):
    sampling = SamplingEvent("all", 1.0, n) if q == 1 else SamplingEvent("poisson", q, n)
    return Ledger(adjacency, {Round(sampling, (query,)): rounds})


def discrete(S2, sigma2=SIGMA2, group="all"):
    return DiscreteSumQueryEvent(group, 1e-7, S2, sigma2)


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
@pytest.mark.parametrize("shifts", [(50,), (14, 48), (30, -40), (3, 47)])
@pytest.mark.parametrize("sigma2", [60**2, 45**2 + 1])
def test_delta_is_at_least_that_of_the_pmf(sigma2, shifts, q):
    """In one and two dimensions, along the axes and between them, in both directions; and not far above."""
    present, absent = outputs(sigma2, shifts, q)[::-1]
    ledger = ledger_of(discrete(50**2, sigma2), q)
    for e in (0.0, 0.05, 0.3, 1.0, 2.0):
        true = max(hockey_stick(present, absent, e), hockey_stick(absent, present, e))
        bound = delta(ledger, e)
        assert bound >= true * (1 - 1e-12)
        if sum(s * s for s in shifts) == 50**2:
            assert bound <= true * 1.1 + 1e-4, "σ² counts for 64 less"


@pytest.mark.parametrize("q", [1.0, 0.2])
def test_delta_of_two_rounds_is_at_least_that_of_the_pmf(q):
    present, absent = outputs(60**2, (48,), q)[::-1]
    twice = [np.multiply.outer(law, law) for law in (present, absent)]
    ledger = ledger_of(discrete(48**2, 60**2), q, rounds=2)
    for e in (0.0, 0.3, 1.0, 3.0):
        true = max(hockey_stick(*twice, e), hockey_stick(*twice[::-1], e))
        assert true * (1 - 1e-12) <= delta(ledger, e) <= true * 1.1 + 1e-4


@pytest.mark.parametrize("shifts", [(25,), (7, 24)])
def test_renyi_divergence_is_at_least_that_of_the_pmf(shifts):
    sigma2, q = 30**2, 0.1
    absent, present = outputs(sigma2, shifts, q)
    z = Round(SamplingEvent("poisson", q, 10), (discrete(25**2, sigma2),)).noise_multiplier
    for alpha in (1.5, 2, 8, 32):
        bound = float(log_moments(np.array([z]), np.array([q]), alpha)[0])
        weight = (absent > 0) & (present > 0)
        first, second = np.log(present[weight]), np.log(absent[weight])
        for p, q_ in ((first, second), (second, first)):
            assert logsumexp(alpha * p + (1 - alpha) * q_) <= bound * (1 + 1e-9)
    unsampled = alpha * (alpha - 1) / (2 * z**2)
    assert alpha * (alpha - 1) * 25**2 / (2 * sigma2) <= unsampled, "zCDP of Canonne, Kamath & Steinke, theorem 4"


def test_a_gaussian_randomly_rounded_is_nearly_the_discrete_one():
    """The event's proof, at t² = 0.25, where the factor shows."""
    sigma2, t2 = 4.0, 0.25
    rho = 2 * math.exp(-2 * math.pi**2 * t2) / (1 - math.exp(-6 * math.pi**2 * t2))
    k = np.arange(-40, 41)
    true = pmf(sigma2, 0, 40)

    def density(x, value):
        weights = np.exp(-((k - x) ** 2) / (2 * t2))
        at = math.exp(-((value - x) ** 2) / (2 * t2)) / weights.sum()
        return at * math.exp(-(x**2) / (2 * (sigma2 - t2))) / math.sqrt(2 * math.pi * (sigma2 - t2))

    factors = [quad(density, -20, 20, (value,), epsabs=1e-14, limit=500)[0] / true[value + 40] for value in range(7)]
    assert (1 - rho) / (1 + rho) < min(factors) and max(factors) < (1 + rho) / (1 - rho)
    assert max(abs(factor - 1) for factor in factors) > 1e-4, "which can be told"


def test_at_the_smoothing_used_no_double_tells_the_difference():
    with localcontext() as context:
        context.prec = 30
        rho = 2 * (-2 * Decimal(math.pi) ** 2 * SMOOTHING).exp() * (1 + Decimal("1e-20"))
        assert 2 * rho < Decimal("1e-547")


@pytest.mark.parametrize("accountant", NAMES)
def test_every_accountant_counts_it_as_a_gaussian_of_less_variance(accountant):
    query, twin = discrete(3600, 14400 + SMOOTHING), SumQueryEvent("all", 0.5, 1.0)
    assert query.squared_ratio == 0.25
    for q in (0.1, 1.0):
        assert epsilon(ledger_of(query, q, 30), 1e-5, accountant) == epsilon(ledger_of(twin, q, 30), 1e-5, accountant)


def test_groups_and_kinds_of_noise_compose():
    sampling = SamplingEvent("poisson", 0.1, 100)
    both = Round(sampling, (discrete(2**46, group="a"), SumQueryEvent("b", 1.0, 2.0)))
    assert both.noise_multiplier == pytest.approx(2**0.5, rel=1e-12)
    assert len(concatenate([Ledger("add_remove", {both: 3}), ledger_of(discrete(2**40))])) == 4


def test_a_ledger_has_all_its_digits(tmp_path, read_lines):
    S2 = 58051372654403
    sampling = SamplingEvent("poisson", 0.1, 100)
    writer = LedgerWriter(tmp_path / "l.jsonl", planned=[sampling])
    for _ in range(2):
        writer.sample(sampling)
        writer.query(discrete(S2, group="a"))
        writer.query(SumQueryEvent("b", 1.0, 2.0))
        writer.commit()
    writer.close()
    assert read_ledger(tmp_path / "l.jsonl") == writer.ledger
    assert list(writer.ledger.rounds.values()) == [2]
    said = read_lines(tmp_path / "l.jsonl")[1]["queries"]
    assert said[0] == {"group": "a", "grid": 1e-7, "S2": S2, "sigma2": SIGMA2}
    assert said[1] == {"group": "b", "S": 1.0, "sigma": 2.0}


@pytest.mark.parametrize(
    "facts, wrong",
    [
        ({"S2": 0}, "S2=0"), ({"S2": 2.5}, "S2=2.5"), ({"sigma2": 127}, "sigma2=127"), ({"sigma2": "1"}, "sigma2='1'"),
        ({"grid": 0.0}, "grid"), ({"grid": math.inf}, "grid"), ({"group": 3}, "name"), ({"S2": 2**200}, "between"),
    ],
)  # fmt: skip
def test_invalid_queries_are_refused(facts, wrong):
    with pytest.raises(ConfigError, match=wrong):
        DiscreteSumQueryEvent(**{"group": "all", "grid": 1.0, "S2": 1, "sigma2": 4096} | facts)
