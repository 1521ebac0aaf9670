"""ε against independent sources: dp-accounting called directly, prv-accountant, closed forms, the papers' numbers."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from absl import logging as absl_logging
from dp_accounting import NeighboringRelation, pld, rdp
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from dpexp.accounting.accountants import delta, epsilon, guarantee
from dpexp.accounting.composition import best_order, log_moments
from dpexp.accounting.coverage import NAMES, check_covered
from dpexp.accounting.ledger import ADJACENCIES, Ledger, Round, SumQueryEvent, concatenate
from dpexp.accounting.releases import Release, releases
from dpexp.accounting.sampling import POLICIES, sampling_event
from dpexp.errors import ConfigError

ABADI = {"z": 4, "q": 0.01, "rounds": 10_000}


def ledger(z, q, rounds, S=1.0):
    return Ledger("add_remove", {Round(sampling_event("poisson", q, 1000), (SumQueryEvent("all", S, z * S),)): rounds})


def exact_gaussian(mu, d):
    """Balle & Wang 2018, theorem 8."""

    def excess(e):
        first, second = norm.logcdf(mu / 2 - e / mu), e + norm.logcdf(-mu / 2 - e / mu)
        return first + math.log(-math.expm1(second - first)) - math.log(d)

    return brentq(excess, 1e-9 * mu, mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / d)), xtol=1e-13)


def directly(z, q, rounds, delta, accountant):
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds)
    return accountant.get_epsilon(delta)


def test_the_numbers_of_abadi_et_al():
    """q = 0.01, σ = 4, δ = 1e-5, T = 10 000."""
    run = ledger(**ABADI)
    assert epsilon(run, 1e-5, "rdp") == pytest.approx(1.035, abs=1e-3)
    assert epsilon(run, 1e-5, "pld") == pytest.approx(0.947, abs=1e-3)
    assert epsilon(run, 1e-5, "moments") == pytest.approx(1.2586, abs=1e-4)


@pytest.mark.parametrize("accountant", NAMES)
def test_no_jump_where_the_moments_of_little_noise_are_closed_forms(accountant):
    below, above = (epsilon(ledger(0.02 * (1 + off), 0.01, 1000), 1e-5, accountant) for off in (-1e-9, 0))
    assert above <= below <= above * (1 + 1e-7)


@pytest.mark.parametrize("z, q, rounds, d", [(4.631321, 0.0088, 19, 2.72e-5), (2.326171, 4.2808e-4, 24, 6.0765e-7)])
def test_strong_composition_at_the_best_split_of_delta(z, q, rounds, d):
    """One of two minima; no more than sequential composition."""
    strong = guarantee(ledger(z, q, rounds), "strong")
    found = strong.epsilon(d)
    assert found <= min(strong._at(d, 1 / (1 + math.exp(t))) for t in np.linspace(-12, 12, 300)) * (1 + 1e-6)
    assert found <= epsilon(ledger(z, q, rounds), d, "basic") * (1 + 1e-6)


def test_strong_composition_of_abadi_et_al():
    """The paper's 9.34 leaves factors out (Kairouz, Oh & Viswanath 2015, with the exact ε of a release)."""
    assert epsilon(ledger(**ABADI), 1e-5, "strong") == pytest.approx(14.18, abs=0.01)


@pytest.mark.parametrize("z, q", [(0.3, 0.2), (4.0, 0.01)])
@pytest.mark.parametrize("alpha", [0.4, 1.1, 3.7, 40.2])
def test_moments_are_the_integral(z, q, alpha):
    """A_α = E_Q[(P/Q)^α], by adaptive quadrature."""

    def integrand(x):
        y = (2 * x - 1) / (2 * z * z)
        return math.exp(-x * x / (2 * z * z) + alpha * np.logaddexp(math.log1p(-q), math.log(q) + y) - shift)

    shift = max(0.0, float(log_moments(np.array([z]), np.array([q]), alpha)[0]))
    edges = [min(0, alpha) - 12 * z, max(1, alpha) + 12 * z]
    integral = quad(integrand, *edges, points=[0, alpha], limit=400, epsabs=0, epsrel=1e-12)[0]
    expected = math.log(integral / (z * math.sqrt(2 * math.pi))) + shift
    assert log_moments(np.array([z]), np.array([q]), alpha)[0] == pytest.approx(expected, rel=1e-8, abs=1e-12)


GRID = list(itertools.product((0.0005, 0.01, 0.2, 1.0), (0.6, 1.0, 20.0)))
ROUNDS, DELTAS = (1, 3000), (1e-5, 1e-8)


@pytest.mark.parametrize("q", sorted({q for q, _ in GRID}))
def test_pld_over_a_grid_against_dp_accounting(q):
    """dp-accounting's default interval of 1e-4 is too coarse where a round's loss varies by less."""
    points = 0
    for z in (z for other, z in GRID if other == q):
        spread = q * math.sqrt(math.expm1(1 / z**2))
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(
            z, sampling_prob=q, value_discretization_interval=max(2e-6, min(2e-3, 0.03 * spread))
        )
        for rounds in ROUNDS:
            composed = one.self_compose(rounds)
            for d in DELTAS:
                expected = composed.get_epsilon_for_delta(d)
                found = epsilon(ledger(z, q, rounds), d)
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-9), (z, rounds, d)
                points += 1
    assert points == 12


def test_rdp_over_a_grid_against_dp_accounting():
    """At our best order, or the whole orders beside it. dp-accounting's series for orders between whole ones is
    above the integral, or does not converge, at low orders; there it is only an upper bound for ours."""
    absl_logging.set_verbosity(absl_logging.ERROR)
    tight = 0
    for (q, z), rounds, d in itertools.product(GRID, ROUNDS, DELTAS):
        run = ledger(z, q, rounds)
        order = best_order(guarantee(run, "rdp").moment, d)[1]
        beside = [order, *({math.floor(order), math.ceil(order)} if order > 30 else ())]
        expected = directly(z, q, rounds, d, rdp.RdpAccountant(beside))
        assert epsilon(run, d, "rdp") <= expected * (1 + 1e-8)
        if q == 1 or order >= 4:
            assert epsilon(run, d, "rdp") == pytest.approx(expected, rel=1e-3)
            tight += 1
    assert tight >= 20


@pytest.mark.parametrize("d", [1e-5, 0.5, 1 - 1e-9])
def test_rdp_of_almost_no_noise_is_a_bound_at_each_delta(d):
    """The best order then lies as close to 1 as floats allow."""
    z, q = 1e-6, 0.1
    assert 1 / (2 * z**2) <= epsilon(ledger(z, 1.0, 1), 1e-5, "rdp") <= 1.0001 / (2 * z**2)
    assert 0 <= epsilon(ledger(z, q, 20), d, "rdp") < math.inf


def test_pld_against_prv_accountant():
    z, q, rounds = 2.0, 0.2, 100
    prv = PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=q)
    accountant = PRVAccountant(prvs=[prv], max_self_compositions=[rounds], eps_error=0.002, delta_error=1e-10)
    low, _, high = accountant.compute_epsilon(1e-5, [rounds])
    ours = epsilon(ledger(z, q, rounds), 1e-5)
    assert ours == pytest.approx(high, rel=0.01) and low <= ours


@pytest.mark.parametrize("z, rounds", [(1.0, 1), (0.5, 1), (3.0, 4), (20.0, 9)])
def test_full_batches_are_the_analytic_gaussian_mechanism(z, rounds):
    """T releases are one at z/√T."""
    exact = exact_gaussian(math.sqrt(rounds) / z, 1e-5)
    assert epsilon(ledger(z, 1.0, rounds), 1e-5, "pld") == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ConfigError, match="delta"):
        epsilon(ledger(1, 0.1, 1), delta)


def of(policy, adjacency, z=4.0, q=0.1, n=1000, rounds=20, **facts):
    event = sampling_event(policy, q, n, **facts)
    return Ledger(adjacency, {Round(event, (SumQueryEvent("all", 1.0, z),)): rounds})


def test_replacing_a_record_moves_a_sum_by_twice_the_bound():
    assert epsilon(of("all", "replace_one", z=4.0, q=1.0), 1e-5) == pytest.approx(
        epsilon(of("all", "add_remove", z=2.0, q=1.0), 1e-5), rel=1e-9
    )
    assert epsilon(of("all", "replace_null", z=4.0, q=1.0), 1e-5) == epsilon(of("all", "add_remove", q=1.0), 1e-5)


def test_fixed_size_is_sampling_without_replacement():
    accountant = rdp.RdpAccountant(list(range(2, 64)), NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(4.0 / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, gaussian), 20)
    ours = epsilon(of("fixed_size", "replace_one"), 1e-5, "rdp")
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-2)


def test_an_epoch_of_shuffled_batches_costs_one_release():
    """Each record is in one batch an epoch; the costliest of the epoch's batches is what it may have been in."""
    queries = {z: (SumQueryEvent("all", 1.0, z),) for z in (4.0, 8.0)}

    def batch(epoch, z):
        return Round(sampling_event("shuffle", 0.25, 1000, epoch=epoch), queries[z])

    run = Ledger("replace_one", {batch(0, 4.0): 1, batch(0, 8.0): 3, batch(4, 8.0): 4})
    assert epsilon(run, 1e-5) == pytest.approx(exact_gaussian(math.sqrt(1 / 2**2 + 1 / 4**2), 1e-5), rel=1e-9)
    with pytest.raises(ConfigError, match="cannot have been disjoint"):
        epsilon(Ledger("replace_one", {batch(0, 4.0): 5}), 1e-5)


CLAIMS = {policy.name: policy.covers for policy in POLICIES.values()}
FACTS = {
    "truncated_poisson": {"maximum": 120}, "shuffle": {"epoch": 0}, "cyclic_poisson": {"parts": 2, "block": 0},
    "random_allocation": {"epoch": 0, "num_selected": 1, "num_steps": 10},
}  # fmt: skip


def test_every_claim_is_allowed_or_refused_by_name():
    for policy, adjacency, name in itertools.product(CLAIMS, ADJACENCIES, NAMES):
        run = of(policy, adjacency, q=1.0 if policy == "all" else 0.1, rounds=3, **FACTS.get(policy, {}))
        if name in CLAIMS[policy].get(adjacency, ()):
            assert 0 < epsilon(run, 1e-5, name) < 50
        else:
            with pytest.raises(ConfigError, match=f"(?s){policy}.*choose"):
                epsilon(run, 1e-5, name)


def test_the_table_of_claims():
    """Design, section 6."""
    assert "pld" in CLAIMS["poisson"]["add_remove"] and CLAIMS["poisson"]["replace_one"] == ("pld",)
    assert CLAIMS["truncated_poisson"] == {"replace_null": ("pld",)}
    assert CLAIMS["fixed_size"] == {"replace_one": ("pld", "rdp")}
    assert set(CLAIMS["shuffle"]) == {"replace_one", "replace_null"}
    assert {policy: check_covered(POLICIES[policy], None) for policy in CLAIMS} == {
        "poisson": "add_remove", "cyclic_poisson": "add_remove", "all": "add_remove", "shuffle": "replace_one",
        "fixed_size": "replace_one", "truncated_poisson": "replace_null", "random_allocation": "add_remove",
    }  # fmt: skip
    assert CLAIMS["cyclic_poisson"] == CLAIMS["poisson"]


@pytest.mark.parametrize("name", NAMES)
def test_delta_is_the_inverse_of_epsilon(name):
    run = ledger(2.0, 0.05, 300)
    e = epsilon(run, 1e-6, name)
    assert delta(run, e, name) == pytest.approx(1e-6, rel=1e-3)
    assert epsilon(run, delta(run, e, name), name) <= e * (1 + 1e-6)


def test_rounds_of_one_rate_and_noise_count_together_and_no_others():
    counts = releases(concatenate([ledger(z, q, 2) for z, q in ((1.0, 0.1), (1 + 1e-14, 0.1), (1.0, 0.2))]))
    assert counts == {Release(1.0, 0.1): 4, Release(1.0, 0.2): 2}


def test_many_distinct_rounds_against_dp_accounting():
    rounds = {}
    accountants = {
        "pld": pld.PLDAccountant(value_discretization_interval=5e-5),
        "rdp": rdp.RdpAccountant([k / 4 for k in range(40, 240)]),
    }
    for k in range(4):
        z, q = 1.5 + 0.1 * k, 0.01 + 0.001 * k
        rounds |= ledger(z, q, 1 + k % 3).rounds
        for accountant in accountants.values():
            directly(z, q, 1 + k % 3, 1e-5, accountant)
    run = Ledger("add_remove", rounds)
    for name, accountant in accountants.items():
        assert epsilon(run, 1e-5, name) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_extreme_noise_is_accounted_finitely():
    for z, q, rounds in [(1e-4, 0.5, 1000), (0.03, 1e-4, 10), (1e5, 0.5, 10**6), (1.0, 1e-9, 10**6)]:
        values = [epsilon(ledger(z, q, rounds), 1e-5, name) for name in ("pld", "rdp", "moments")]
        assert all(0 <= value < math.inf for value in values) and values[0] <= values[1] * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize("z", [0.25, 0.1, 0.01])
def test_full_batches_joined_with_samples(z):
    """q = 1 among others, with little noise: bounded below by the full batches alone, and by little more above."""
    exact = exact_gaussian(1 / z, 1e-5)
    both = epsilon(concatenate([ledger(z, 1.0, 1), ledger(20.0, 1e-4, 10)]), 1e-5)
    assert exact <= both <= exact * (1 + 2e-3)


def test_more_rounds_than_a_grid_resolves_cost_renyi_dp():
    run = ledger(20.0, 1e-6, 2**29)
    assert epsilon(run, 1e-6) == epsilon(run, 1e-6, "rdp")
