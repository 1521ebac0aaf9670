"""The privacy filter, against dp-accounting called directly."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, rdp
from runs import composed, ledger, round_of, sampled

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, concatenate
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.errors import ConfigError

RUNS = [(1.0, 0.01, 1000), (4.753, 0.3563, 113), (10.0, 1.0, 7)]


@pytest.mark.parametrize("order", [2, 8, 64])
def test_rho_is_that_of_dp_accounting_added_up(order):
    runs = [ledger(*run) for run in RUNS]
    ours = sum(rho(run, order) for run in runs)
    theirs = composed(rdp.RdpAccountant([order]), *((sampled(z, q), rounds) for z, q, rounds in RUNS))
    assert ours == pytest.approx(float(theirs.rdp[0]), rel=1e-8)
    assert ours == pytest.approx(rho(concatenate(runs), order), rel=1e-12)


@pytest.mark.parametrize("epsilon_, delta", [(0.1, 1e-6), (8, 1e-5), (500, 1e-5)])
def test_the_limit_is_where_dp_accounting_says_the_budget_is_spent(epsilon_, delta):
    made = budget({"epsilon": epsilon_, "delta": delta})
    said, _ = rdp.compute_epsilon([made.order], [made.limit], delta)
    assert said == pytest.approx(epsilon_, rel=1e-9)


def test_what_the_filter_lets_pass_costs_no_more_by_any_bound():
    """At the limit the budget holds by privacy losses too, which are exact for Gaussian releases."""
    made = budget({"epsilon": 3, "delta": 1e-5})
    times = int(made.limit / rho(ledger(10.0, 1.0, 1), made.order))
    full = ledger(10.0, 1.0, times)
    spent = rho(full, made.order)
    assert spent <= made.limit < spent * (1 + 1.01 / times)
    assert 2.5 < epsilon(full, 1e-5) < epsilon(full, 1e-5, "rdp") <= 3
    assert made.gaussian(spent) == pytest.approx(epsilon(full, 1e-5), rel=1e-9)


def test_samples_of_fixed_size_are_taken_at_the_next_whole_order():
    run = ledger(2.0, 0.05, 40, "fixed_size", "replace_one")
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(1.0))
    theirs = composed(rdp.RdpAccountant([4, 5], NeighboringRelation.REPLACE_ONE), (event, 40)).rdp
    at_4, at_5 = np.minimum(theirs, [80, 100])  # without sampling
    assert rho(run, 4) == pytest.approx(at_4, rel=1e-9)
    assert rho(run, 4.2) == pytest.approx(min(at_5, 84), rel=1e-9)


@pytest.mark.parametrize("adjacency, times", [("replace_null", 1), ("replace_one", 4)])
def test_an_epoch_of_shuffled_batches_is_one_gaussian_release(adjacency, times):
    run = Ledger(adjacency, {round_of(3.0, 0.25, "shuffle", epoch=epoch): 4 for epoch in (0, 4)})
    assert rho(run, 5.0) == pytest.approx(2 * times * 5.0 / (2 * 9), rel=1e-12)


def test_what_has_no_renyi_bound_is_refused_by_name():
    with pytest.raises(ConfigError, match="sampling=poisson under adjacency=replace_one has no bound; choose"):
        rho(ledger(adjacency="replace_one"), 4.0)


@pytest.mark.parametrize(
    "given, message",
    [
        (8, "privacy.budget=8 is not understood; give '{epsilon: 8, delta: 1e-5}'"),
        ({"epsilon": 8, "delta": 1e-5, "alpha": 3}, "is not understood"),
        ({"epsilon": -1, "delta": 1e-5}, "privacy.budget.epsilon=-1 must be a finite number above 0"),
        ({"epsilon": 8, "delta": 1}, "privacy.budget.delta=1.0 must be at least 1e-300 and below 1"),
        ({"epsilon": 8, "delta": 1e-5, "order": 1}, "privacy.budget.order=1.0 must be above 1"),
        ({"epsilon": 8, "delta": 1e-5, "order": 2}, "allows nothing at Rényi order 2, where δ alone takes ε = 10.2"),
    ],
)
def test_mistakes_in_a_budget_are_one_sentence(given, message):
    with pytest.raises(ConfigError) as refused:
        budget(given)
    assert message in str(refused.value)
