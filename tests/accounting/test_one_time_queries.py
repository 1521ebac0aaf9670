"""One-time queries: Laplace and Gaussian queries composed with training rounds, against dp-accounting's
composition of the same events; and their lines in a ledger."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.integrate import quad
from test_ledger_lines import HEADER, linked

from dpexp.accounting import composition
from dpexp.accounting.accountants import delta, epsilon, guarantee
from dpexp.accounting.composition import GaussianMechanism, best_order, laplace_moments
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.dominating_pairs import gaussian_above
from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    OneTimeQueryEvent,
    Round,
    SumQueryEvent,
    read_ledger,
)
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


CLASSES = laplace(10.0, query="classes")
EVERYTHING = Ledger(
    "add_remove", {once(laplace(4.0)): 1, once(gaussian(7.0)): 1, once(CLASSES): 1, TRAINING: 1000}
)  # fmt: skip


def composed(accountant):
    """The same events, by dp-accounting."""
    for event, count in (
        (dp_accounting.LaplaceDpEvent(4.0), 1),
        (dp_accounting.GaussianDpEvent(7.0), 1),
        (dp_accounting.LaplaceDpEvent(10.0), 1),
        (dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.1)), 1000),
    ):
        accountant.compose(event, count)
    return accountant


def test_laplace_gaussian_and_training_compose_as_in_dp_accounting():
    directly = composed(pld.PLDAccountant(value_discretization_interval=1e-4))
    for d in (1e-2, 1e-5, 1e-8):
        assert epsilon(EVERYTHING, d) == pytest.approx(directly.get_epsilon(d), rel=1e-3)
    without = Ledger("add_remove", {TRAINING: 1000})
    assert epsilon(EVERYTHING, 1e-5) > 1.1 * epsilon(without, 1e-5)


def test_rdp_of_them_is_dp_accountings():
    order = best_order(guarantee(EVERYTHING, "rdp").moment, 1e-5)[1]
    directly = composed(rdp.RdpAccountant([order])).get_epsilon(1e-5)
    assert epsilon(EVERYTHING, 1e-5, "rdp") == pytest.approx(directly, rel=1e-6)
    assert rho(EVERYTHING, 8.0) == pytest.approx(composed(rdp.RdpAccountant([8.0]))._rdp[0], rel=1e-9)
    assert run_rdp(EVERYTHING)[ORDERS.index(16)] == pytest.approx(composed(rdp.RdpAccountant([16.0]))._rdp[0], rel=1e-9)


def test_moments_and_basic_and_strong_composition():
    """Abadi's moments by whole orders; sequential and strong composition with ε = 1/b, which takes nothing of δ."""
    directly = composed(rdp.RdpAccountant([float(order) for order in range(2, 34)]))._rdp
    by_hand = min(r - math.log(1e-5) / moment for moment, r in enumerate(directly, 1))
    assert epsilon(EVERYTHING, 1e-5, "moments") == pytest.approx(by_hand, rel=1e-6)
    only = Ledger("add_remove", {once(laplace(4.0)): 1, once(CLASSES): 1})
    for name in ("basic", "strong"):
        assert epsilon(only, 1e-9, name) == pytest.approx(0.35, rel=1e-9)
    both = Ledger("add_remove", {once(laplace(4.0)): 1, once(gaussian(7.0)): 1})
    assert epsilon(both, 1e-5, "basic") == pytest.approx(0.25 + GaussianMechanism(1 / 7).epsilon(0.5e-5), rel=1e-9)
    many = Ledger("add_remove", {once(laplace(100.0)): 1000})
    kairouz = composition.strong(np.array([0.01]), np.array([1000.0]), 1e-5)
    assert kairouz <= epsilon(many, 1e-5, "strong") <= 1.02 * kairouz < 10


def test_all_accountants_take_queries_that_are_answered_once():
    only = Ledger("add_remove", {once(gaussian(7.0)): 2})
    assert applicable_accountants(EVERYTHING) == applicable_accountants(only) == list(NAMES)
    assert epsilon(only, 1e-5) == pytest.approx(GaussianMechanism(math.sqrt(2) / 7).epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("pure, part", [(0.05, 0.3), (50.0, 0.9)])
def test_one_laplace_query_costs_what_the_closed_form_says(pure, part):
    """δ(ε) = 1 - e^((ε-ε₀)/2)."""
    ledger = Ledger("add_remove", {once(laplace(1 / pure)): 1})
    true = -math.expm1((part - 1) * pure / 2)
    assert true * (1 - 1e-12) <= delta(ledger, part * pure) <= true * (1 + 1e-6)
    assert delta(ledger, pure * (1 + 1e-9)) == 0
    assert largest_advantage(ledger) == pytest.approx(-math.expm1(-pure / 2), rel=1e-6)


@pytest.mark.parametrize("pure", [1e-4, 0.3, 40.0])
@pytest.mark.parametrize("alpha", [1.01, 7.3])
def test_laplace_moments_are_the_integral(pure, alpha):
    """With the loss of two densities at distance ε₀, outside of which it is constant."""
    shift = max(0.0, (alpha - 1) * pure)

    def between(loss):
        return math.exp((loss - pure) / 2 + (alpha - 1) * loss - shift) / 4

    inner = quad(between, -pure, pure, epsabs=0, epsrel=1e-12)[0]
    true = 0.5 * math.exp((alpha - 1) * pure - shift) + 0.5 * math.exp(-alpha * pure - shift) + inner
    assert laplace_moments(np.array([pure]), alpha)[0] == pytest.approx(math.log(true) + shift, rel=1e-7, abs=1e-15)


def test_pure_dp_is_gaussian_dp():
    """G_μ lies below the lines of ε-DP."""
    for pure in (0.01, 1.0, 10.0):
        mu = float(gaussian_above(np.array([pure]))[0])
        for e in np.linspace(0, pure, 20):
            assert GaussianMechanism(mu).delta(e) >= (math.exp(pure) - math.exp(e)) / (1 + math.exp(pure)) - 1e-12
    assert gaussian_above(np.array([5000.0]))[0] > 90


# Neighbours


@pytest.mark.parametrize("adjacency, ratio", [("add_remove", 1.0), ("replace_null", 1.0), ("replace_one", 2.0)])
def test_counts_by_laplace_under_each_adjacency(adjacency, ratio):
    ledger = Ledger(adjacency, {once(laplace(4.0)): 1})
    assert delta(ledger, 0.0) == pytest.approx(-math.expm1(-ratio / 8), rel=1e-8)


# On disk


def written(path, *events, rounds=2, **options):
    writer = LedgerWriter(path, planned=[POISSON], **options)
    for event in events:
        writer.sample(EVERYONE)
        writer.query(event)
        writer.commit()
    for _ in range(rounds):
        writer.sample(POISSON)
        writer.query(TRAINING.queries[0])
        writer.commit()
    writer.close()
    return writer.ledger


def test_lines_in_a_ledger(tmp_path, read_lines):
    ledger = written(tmp_path / "l.jsonl", gaussian(7.0), CLASSES)
    assert read_ledger(tmp_path / "l.jsonl") == ledger
    assert (len(ledger), ledger.training_rounds) == (4, 2)
    header, first, _, second, *_ = read_lines(tmp_path / "l.jsonl")
    assert header["sampling"] == {"policy": "poisson", "n": 60_000, "q": [0.01]}
    pca = {"query": "pca", "noise": "gaussian", "S": 1.0, "S_replaced": math.sqrt(2), "scale": 7.0}
    assert first["queries"] == [pca] and first["sampling"] == {"policy": "all", "q": 1.0, "n": 60_000}
    classes = {"query": "classes", "noise": "laplace", "S": 1.0, "S_replaced": 2.0, "scale": 10.0}
    assert second["queries"] == [classes]


@pytest.mark.parametrize("sampling, others", [(POISSON, ()), (EVERYONE, (SumQueryEvent("all", 1.0, 1.0),))])
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
    path = tmp_path / "l.jsonl"
    path.write_bytes(linked([HEADER, spec]))
    with pytest.raises(ConfigError, match=wrong):
        read_ledger(path)


@pytest.mark.parametrize("first, second", [(0.5, 1.5), (2.0, 0.01)])
def test_coordinates_that_move_together_cost_no_more_than_one_that_moves_as_far(first, second):
    """E[h₂(ε - L₁)] against h₁₂, by quadrature."""

    def h(pure, e):
        return max(0.0, -math.expm1(e) if e < 700 else 0.0, -math.expm1((e - pure) / 2))

    for e in np.linspace(-first - second, first + second, 41):
        atoms = 0.5 * h(second, e - first) + 0.5 * math.exp(-first) * h(second, e + first)
        kinks = [k for k in (e - second, e + second) if -first < k < first]
        inner = quad(lambda l: h(second, e - l) * math.exp((l - first) / 2) / 4, -first, first, points=kinks or None)[0]  # noqa: B023, E741
        assert atoms + inner <= h(first + second, e) + 1e-10
