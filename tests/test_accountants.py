"""ε against independent sources: dp-accounting called directly, closed forms, the papers' numbers."""

import math

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.calibration import solve_noise_multiplier
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent
from dpexp.errors import ConfigError


def ledger(z, q, rounds, S=1.0):
    return Ledger("add_remove", {Round(SamplingEvent("poisson", q, 1000), (SumQueryEvent("all", S, z * S),)): rounds})


def directly(z, q, rounds, delta, accountant):
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds)
    return accountant.get_epsilon(delta)


def test_the_numbers_of_abadi_et_al_by_todays_accountants():
    """q = 0.01, σ = 4, δ = 1e-5, T = 10 000."""
    assert epsilon(ledger(4, 0.01, 10_000), 1e-5, "rdp") == pytest.approx(1.035, abs=1e-3)
    assert epsilon(ledger(4, 0.01, 10_000), 1e-5, "pld") == pytest.approx(0.947, abs=1e-3)


@pytest.mark.parametrize("z, q, rounds, delta", [(0.7, 0.01, 1000, 1e-5), (4.8, 0.36, 113, 1e-4), (30, 0.5, 20, 1e-6)])
def test_agreement_with_dp_accounting_called_directly(z, q, rounds, delta):
    ours = epsilon(ledger(z, q, rounds), delta, "pld")
    assert ours == pytest.approx(directly(z, q, rounds, delta, pld.PLDAccountant()), rel=1e-3)
    ours = epsilon(ledger(z, q, rounds), delta, "rdp")
    assert ours <= directly(z, q, rounds, delta, rdp.RdpAccountant()) * (1 + 1e-9), "more orders can only help"
    assert ours == pytest.approx(directly(z, q, rounds, delta, rdp.RdpAccountant()), rel=2e-2)


def test_the_order_grid_does_not_stop_short():
    """Trap 7: at q = 1 the optimal order is 1 + sqrt(2 ln(1/δ) z²/T), here about 480, far above 63."""
    z, rounds, delta = 100.0, 1, 1e-5
    rho = rounds / (2 * z**2)
    simple = rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun & Steinke 2016, proposition 1.3
    assert epsilon(ledger(z, 1.0, rounds), delta, "rdp") <= simple
    short = rdp.RdpAccountant(list(range(2, 64)))
    assert directly(z, 1.0, rounds, delta, short) > 1.5 * epsilon(ledger(z, 1.0, rounds), delta, "rdp")


@pytest.mark.parametrize("z, rounds", [(1.0, 1), (3.0, 4), (20.0, 9)])
def test_full_batches_are_the_analytic_gaussian_mechanism(z, rounds):
    """Balle & Wang 2018, theorem 8, with T releases being one at z/√T."""
    delta, s = 1e-5, math.sqrt(rounds) / z

    def excess(e):
        return norm.cdf(s / 2 - e / s) - math.exp(e) * norm.cdf(-s / 2 - e / s) - delta

    exact = brentq(excess, 1e-6, 50)
    assert epsilon(ledger(z, 1.0, rounds), delta, "pld") == pytest.approx(exact, rel=2e-3)
    assert epsilon(ledger(z, 1.0, rounds), delta, "pld") >= exact * (1 - 1e-9)


def test_only_ratios_matter():
    assert epsilon(ledger(2.0, 0.1, 10, S=7.0), 1e-5) == pytest.approx(epsilon(ledger(2.0, 0.1, 10), 1e-5), rel=1e-9)


def test_unequal_rounds_compose():
    first, second = ledger(2.0, 0.1, 10), ledger(3.0, 0.2, 20)
    joined = Ledger("add_remove", {**first.rounds, **second.rounds})
    accountant = pld.PLDAccountant()
    directly(2.0, 0.1, 10, 1e-5, accountant)
    assert epsilon(joined, 1e-5) == pytest.approx(directly(3.0, 0.2, 20, 1e-5, accountant), rel=1e-3)


def test_nothing_released_costs_nothing():
    assert epsilon(Ledger("add_remove", {}), 1e-5) == 0


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ConfigError, match="delta"):
        epsilon(ledger(1, 0.1, 1), delta)


@settings(max_examples=8, deadline=None)
@given(target=st.floats(0.1, 20), q=st.floats(0.001, 0.5), rounds=st.integers(1, 3000))
def test_the_solved_noise_never_exceeds_the_target(target, q, rounds):
    """Trap 7: an ε search that returns more than was asked for."""
    z = solve_noise_multiplier(lambda z: ledger(z, q, rounds), target, 1e-5, "rdp")
    assert target * (1 - 2e-3) <= epsilon(ledger(z, q, rounds), 1e-5, "rdp") <= target


def test_the_solved_noise_by_pld():
    z = solve_noise_multiplier(lambda z: ledger(z, 0.01, 1000), 2.0, 1e-5, "pld")
    assert 2.0 * (1 - 2e-3) <= directly(z, 0.01, 1000, 1e-5, pld.PLDAccountant()) <= 2.0


def test_an_unreachable_target_says_what_is_reachable():
    with pytest.raises(ConfigError, match=r"cannot be reached.*costs ε="):
        solve_noise_multiplier(lambda z: ledger(z, 1.0, 1000), 1e-9, 1e-12, "rdp")
