"""The privacy filter, against dp-accounting called directly."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.privacy_accountant import NeighboringRelation

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent, concatenate
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError


def ledger(z, q, rounds, policy="poisson", n=1000, adjacency="add_remove", **more):
    sampling = sampling_event(policy, q, n, **more)
    return Ledger(adjacency, {Round(sampling, (SumQueryEvent("all", 1.0, z),)): rounds})


def theirs(order, *runs):
    accountant = rdp.RdpAccountant([order])
    for z, q, rounds in runs:
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return accountant


RUNS = [(1.0, 0.01, 1000), (4.753, 0.3563, 113), (10.0, 1.0, 7)]


@pytest.mark.parametrize("order", [2, 8, 64])
def test_rho_is_that_of_dp_accounting_added_up(order):
    ours = sum(rho(ledger(*run), order) for run in RUNS)
    assert ours == pytest.approx(float(theirs(order, *RUNS).rdp[0]), rel=1e-8)
    assert ours == pytest.approx(rho(concatenate([ledger(*run) for run in RUNS]), order), rel=1e-12)


@pytest.mark.parametrize("epsilon_, delta", [(0.1, 1e-6), (8, 1e-5), (500, 1e-5)])
def test_the_limit_is_where_dp_accounting_says_the_budget_is_spent(epsilon_, delta):
    made = budget({"epsilon": epsilon_, "delta": delta})
    said, _ = rdp.compute_epsilon([made.order], [made.limit], delta)
    assert said == pytest.approx(epsilon_, rel=1e-9)


def test_what_the_filter_lets_pass_costs_no_more_by_any_bound():
    """At the limit the budget holds by privacy losses too, which are exact for Gaussian releases."""
    made = budget({"epsilon": 3, "delta": 1e-5})
    run = ledger(10.0, 1.0, 1)
    times = int(made.limit / rho(run, made.order))
    full = Ledger("add_remove", {next(iter(run.rounds)): times})
    assert rho(full, made.order) <= made.limit < rho(full, made.order) * (1 + 1.01 / times)
    assert 2.5 < epsilon(full, 1e-5) < epsilon(full, 1e-5, "rdp") <= 3
    assert made.gaussian(rho(full, made.order)) == pytest.approx(epsilon(full, 1e-5), rel=1e-9)


def test_samples_of_fixed_size_are_taken_at_the_next_whole_order():
    run = ledger(2.0, 0.05, 40, "fixed_size", adjacency="replace_one")
    accountant = rdp.RdpAccountant([4, 5], NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 40))
    unsampled = 40 * np.array([4, 5]) / 2
    at_4, at_5 = np.minimum(accountant.rdp, unsampled)
    assert rho(run, 4) == pytest.approx(at_4, rel=1e-9)
    assert rho(run, 4.2) == pytest.approx(min(at_5, 40 * 4.2 / 2), rel=1e-9)


def test_an_epoch_of_shuffled_batches_is_one_gaussian_release():
    rounds = {
        Round(sampling_event("shuffle", 0.25, 1000, epoch=e), (SumQueryEvent("all", 1.0, 3.0),)): 4 for e in (0, 4)
    }
    assert rho(Ledger("replace_null", rounds), 5.0) == pytest.approx(2 * 5.0 / (2 * 9), rel=1e-12)
    assert rho(Ledger("replace_one", rounds), 5.0) == pytest.approx(4 * 2 * 5.0 / (2 * 9), rel=1e-12)


def test_what_has_no_renyi_bound_is_refused_by_name():
    with pytest.raises(ConfigError, match="sampling=poisson under adjacency=replace_one has no bound; choose"):
        rho(ledger(1.0, 0.1, 3, adjacency="replace_one"), 4.0)


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
