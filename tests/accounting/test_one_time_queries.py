"""One-time queries: Laplace and Gaussian queries composed with training rounds, against dp-accounting's
composition of the same events; and their lines in a ledger."""

import math
from collections import Counter

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld, rdp
from runs import composed, sampled, write_run
from test_ledger_lines import HEADER, linked

from dpexp.accounting import composition
from dpexp.accounting.accountants import delta, epsilon, guarantee
from dpexp.accounting.composition import GaussianMechanism, best_order, laplace_moments
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.dominating_pairs import gaussian_above
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round, SumQueryEvent, read_ledger
from dpexp.accounting.multiple_runs import ORDERS, rho, run_rdp
from dpexp.accounting.releases import applicable_accountants
from dpexp.accounting.risk import largest_advantage
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError

EVERYONE = sampling_event("all", 1.0, 60_000)
POISSON = sampling_event("poisson", 0.01, 60_000)
TRAINING = Round(POISSON, (SumQueryEvent("all", 0.5, 0.55),))


def laplace(scale, S=1.0, replaced=2.0, query="counts"):
    return OneTimeQueryEvent(query, "laplace", S, replaced, scale)


def gaussian(scale, S=1.0, replaced=2**0.5, query="pca"):
    return OneTimeQueryEvent(query, "gaussian", S, replaced, scale)


def once(event):
    return Round(EVERYONE, (event,))


def ledger_of(*events, adjacency="add_remove", training=0):
    return Ledger(adjacency, dict(Counter([*map(once, events), *[TRAINING] * training])))


CLASSES = laplace(10.0, query="classes")
EVERYTHING = ledger_of(laplace(4.0), gaussian(7.0), CLASSES, training=1000)
THE_SAME = [
    *((event, 1) for event in map(dp_accounting.LaplaceDpEvent, (4.0, 10.0))),
    (dp_accounting.GaussianDpEvent(7.0), 1), (sampled(1.1, 0.01), 1000),
]  # fmt: skip


def test_laplace_gaussian_and_training_compose_as_in_dp_accounting():
    directly = composed(pld.PLDAccountant(value_discretization_interval=1e-4), *THE_SAME)
    for d in (1e-2, 1e-5, 1e-8):
        assert epsilon(EVERYTHING, d) == pytest.approx(directly.get_epsilon(d), rel=1e-3)
    assert epsilon(EVERYTHING, 1e-5) > 1.1 * epsilon(ledger_of(training=1000), 1e-5)


def test_moments_of_them_are_dp_accountings():
    """Rényi DP at our best order and at those of the filter and of sweeps; Abadi's moments by whole orders."""
    orders = [best_order(guarantee(EVERYTHING, "rdp").moment, 1e-5)[1], 8.0, 16.0, *map(float, range(2, 34))]
    _, at_8, at_16, *whole = composed(rdp.RdpAccountant(orders), *THE_SAME)._rdp
    directly = composed(rdp.RdpAccountant(orders[:1]), *THE_SAME).get_epsilon(1e-5)
    assert epsilon(EVERYTHING, 1e-5, "rdp") == pytest.approx(directly, rel=1e-6)
    assert rho(EVERYTHING, 8.0) == pytest.approx(at_8, rel=1e-9)
    assert run_rdp(EVERYTHING)[ORDERS.index(16)] == pytest.approx(at_16, rel=1e-9)
    by_hand = min(r - math.log(1e-5) / moment for moment, r in enumerate(whole, 1))
    assert epsilon(EVERYTHING, 1e-5, "moments") == pytest.approx(by_hand, rel=1e-6)


SUM = 0.25 + GaussianMechanism(1 / 7).epsilon(0.5e-5)


@pytest.mark.parametrize(
    "events, name, d, expected",
    [
        *(((laplace(4.0), CLASSES), name, 1e-9, 0.35) for name in ("basic", "strong")),
        ((laplace(4.0), gaussian(7.0)), "basic", 1e-5, SUM),
        ((gaussian(7.0),) * 2, "pld", 1e-5, GaussianMechanism(math.sqrt(2) / 7).epsilon(1e-5)),
    ],
)
def test_epsilons_add_up_and_laplace_takes_nothing_of_delta(events, name, d, expected):
    run = ledger_of(*events)
    assert epsilon(run, d, name) == pytest.approx(expected, rel=1e-9)
    assert applicable_accountants(run) == applicable_accountants(EVERYTHING) == list(NAMES)


def test_strong_composition_is_that_of_kairouz_et_al():
    kairouz = composition.strong(np.array([0.01]), np.array([1000.0]), 1e-5)
    assert kairouz <= epsilon(ledger_of(*[laplace(100.0)] * 1000), 1e-5, "strong") <= 1.02 * kairouz < 10


@pytest.mark.parametrize("pure, part", [(0.05, 0.3), (50.0, 0.9)])
def test_one_laplace_query_costs_what_the_closed_form_says(pure, part):
    """δ(ε) = 1 - e^((ε-ε₀)/2)."""
    ledger = ledger_of(laplace(1 / pure))
    true = -math.expm1((part - 1) * pure / 2)
    assert true * (1 - 1e-12) <= delta(ledger, part * pure) <= true * (1 + 1e-6)
    assert delta(ledger, pure * (1 + 1e-9)) == 0
    assert largest_advantage(ledger) == pytest.approx(-math.expm1(-pure / 2), rel=1e-6)


@pytest.mark.parametrize("adjacency, ratio", [("add_remove", 1.0), ("replace_null", 1.0), ("replace_one", 2.0)])
def test_counts_by_laplace_under_each_adjacency(adjacency, ratio):
    found = delta(ledger_of(laplace(4.0), adjacency=adjacency), 0.0)
    assert found == pytest.approx(-math.expm1(-ratio / 8), rel=1e-8)


@pytest.mark.parametrize("pure", [1e-4, 0.3, 40.0])
@pytest.mark.parametrize("alpha", [1.01, 7.3])
def test_laplace_moments_are_the_integral(pure, alpha):
    """∫ p^α q^(1-α), of two Laplace densities at distance ε₀."""

    def integrand(x):
        return mpmath.exp(-alpha * abs(x) - (1 - alpha) * abs(x - pure)) / 2

    with mpmath.workdps(30):
        true = float(mpmath.log(mpmath.quad(integrand, [-mpmath.inf, 0, pure, mpmath.inf])))
    assert laplace_moments(np.array([pure]), alpha)[0] == pytest.approx(true, rel=1e-7, abs=1e-15)


@pytest.mark.parametrize("pure", [0.01, 1.0, 10.0])
def test_pure_dp_is_gaussian_dp(pure):
    """G_μ lies below the lines of ε-DP."""
    mechanism = GaussianMechanism(float(gaussian_above(np.array([pure]))[0]))
    for e in np.linspace(0, pure, 20):
        assert mechanism.delta(e) >= (math.exp(pure) - math.exp(e)) / (1 + math.exp(pure)) - 1e-12
    assert gaussian_above(np.array([5000.0]))[0] > 90


# On disk


def test_lines_in_a_ledger(tmp_path, read_lines):
    path = tmp_path / "l.jsonl"
    ledger = write_run(path, ledger_of(gaussian(7.0), CLASSES, training=2)).ledger
    assert read_ledger(path) == ledger and (len(ledger), ledger.training_rounds) == (4, 2)
    header, first, _, second, *_ = read_lines(path)
    assert header["sampling"] == {"policy": "poisson", "n": 60_000, "q": [0.01]}
    assert first["sampling"] == {"policy": "all", "q": 1.0, "n": 60_000}
    assert [first["queries"], second["queries"]] == [
        [{"query": "pca", "noise": "gaussian", "S": 1.0, "S_replaced": math.sqrt(2), "scale": 7.0}],
        [{"query": "classes", "noise": "laplace", "S": 1.0, "S_replaced": 2.0, "scale": 10.0}],
    ]


@pytest.mark.parametrize("sampling, others", [(POISSON, ()), (EVERYONE, TRAINING.queries)])
def test_sampling_amplifies_none_and_no_sum_hides_one(sampling, others):
    with pytest.raises(ConfigError, match="'pca' must be the only query of its round, and on all records"):
        Round(sampling, (gaussian(1.0), *others))


@pytest.mark.parametrize(
    "query, wrong",
    [
        ({"query": "a", "noise": "laplace", "S": 1.0, "scale": 1.0}, "S_replaced"),
        ({"query": "a", "parts_by": "class", "queries": []}, "not understood"),
    ],
)
def test_an_invalid_line_is_refused(tmp_path, query, wrong):
    spec = {"spec": 0, "sampling": {"policy": "all", "q": 1.0, "n": 10}, "queries": [query]}
    (tmp_path / "l.jsonl").write_bytes(linked([HEADER, spec]))
    with pytest.raises(ConfigError, match=wrong):
        read_ledger(tmp_path / "l.jsonl")
