"""ε against independent sources: dp-accounting called directly, prv-accountant, closed forms, the papers' numbers."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from absl import logging as absl_logging
from dp_accounting import NeighboringRelation, rdp
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant
from runs import composed, exact_gaussian, ledger, losses_of, round_of, sampled

from dpexp.accounting.accountants import epsilon, guarantee
from dpexp.accounting.composition import best_order, log_moments
from dpexp.accounting.coverage import NAMES, check_covered
from dpexp.accounting.ledger import ADJACENCIES, Ledger, concatenate
from dpexp.accounting.releases import Release, releases
from dpexp.accounting.sampling import POLICIES
from dpexp.errors import ConfigError

ABADI = 4.0, 0.01, 10_000  # z, q and T of Abadi et al.
GRID = [*itertools.product((0.6, 20.0), (0.0005, 0.01, 0.2, 1.0), (1, 3000))]
DELTAS = 1e-5, 1e-8


def computed(z, q, rounds, d):
    return losses_of(z, q, rounds).get_epsilon_for_delta(d)


def replaced(z, q, rounds, *of):
    return losses_of(z, q, rounds, NeighboringRelation.REPLACE_ONE).get_epsilon_for_delta(of[-1])


def without_replacement(z, q, rounds, *of):
    """Replacing a record moves a sum by 2S."""
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, round(1000 * q), dp_accounting.GaussianDpEvent(z / 2))
    accountant = rdp.RdpAccountant(list(range(2, 64)), NeighboringRelation.REPLACE_ONE)
    return composed(accountant, (event, rounds)).get_epsilon(of[-1])


def full(z, q, rounds, *of):
    """T full batches are one release at z/√T, or at z/2√T where a record is replaced."""
    return exact_gaussian(math.sqrt(rounds) * (2 if "replace_one" in of else 1) / z, of[-1])


VALUES = [  # accountant, run, δ, ε, relative tolerance
    ("pld", ABADI, 1e-5, 0.947, 1e-3), ("rdp", ABADI, 1e-5, 1.035, 9e-4), ("moments", ABADI, 1e-5, 1.2586, 7e-5),
    ("strong", ABADI, 1e-5, 14.18, 7e-4),  # Kairouz, Oh & Viswanath 2015; Abadi's 9.34 leaves factors out
    *(("pld", run, d, computed, 1e-3) for run in GRID for d in DELTAS),
    *(("pld", (z, 1.0, rounds), 1e-5, full, 1e-6) for z, rounds in [(1.0, 1), (0.5, 1), (3.0, 4), (20.0, 9)]),
    *(("pld", (4.0, 1.0, 20, "all", adjacency), 1e-5, full, 1e-9) for adjacency in ADJACENCIES),
    *(("pld", (*run, "poisson", "replace_one"), d, replaced, 1e-3)
      for run in [(1.0, 0.1, 30), (8.0, 0.5, 100)] for d in (1e-4, 1e-8)),
    ("rdp", (4.0, 0.1, 20, "fixed_size", "replace_one"), 1e-5, without_replacement, 1e-2),
]  # fmt: skip


@pytest.mark.parametrize("accountant, run, d, expected, tolerance", VALUES)
def test_values(accountant, run, d, expected, tolerance):
    expected = expected(*run, d) if callable(expected) else expected
    assert epsilon(ledger(*run), d, accountant) == pytest.approx(expected, rel=tolerance, abs=1e-9)


@pytest.mark.parametrize("run", GRID)
@pytest.mark.parametrize("d", DELTAS)
def test_rdp_is_dp_accountings_at_the_best_order(run, d):
    """Or at the whole orders beside it. dp-accounting's series for orders between whole ones is above the integral, or
    does not converge, at low orders; there it is only an upper bound for ours."""
    absl_logging.set_verbosity(absl_logging.ERROR)
    z, q, rounds = run
    order = best_order(guarantee(ledger(*run), "rdp").moment, d)[1]
    beside = [order, *({math.floor(order), math.ceil(order)} if order > 30 else ())]
    expected = composed(rdp.RdpAccountant(beside), (sampled(z, q), rounds)).get_epsilon(d)
    found = epsilon(ledger(*run), d, "rdp")
    assert found <= expected * (1 + 1e-8)
    assert found == pytest.approx(expected, rel=1e-3) or (q < 1 and order < 4)


def test_pld_against_prv_accountant():
    z, q, rounds = 2.0, 0.2, 100
    prv = PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=q)
    accountant = PRVAccountant(prvs=[prv], max_self_compositions=[rounds], eps_error=0.002, delta_error=1e-10)
    low, _, high = accountant.compute_epsilon(1e-5, [rounds])
    assert low <= epsilon(ledger(z, q, rounds), 1e-5) == pytest.approx(high, rel=0.01)


@pytest.mark.parametrize("z, q", [(0.3, 0.2), (4.0, 0.01)])
@pytest.mark.parametrize("alpha", [0.4, 1.1, 3.7, 40.2])
def test_moments_are_the_integral(z, q, alpha):
    """A_α = E_Q[(P/Q)^α]."""

    def moment(x):
        return mpmath.npdf(x, 0, z) * (1 - q + q * mpmath.exp((2 * x - 1) / (2 * z * z))) ** alpha

    edges = [min(0, alpha) - 12 * z, 0, alpha, max(1, alpha) + 12 * z]
    expected = float(mpmath.log(mpmath.quad(moment, edges)))
    assert log_moments(np.array([z]), np.array([q]), alpha)[0] == pytest.approx(expected, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("z, q, rounds, d", [(4.631321, 0.0088, 19, 2.72e-5), (2.326171, 4.2808e-4, 24, 6.0765e-7)])
def test_strong_composition_at_the_best_split_of_delta(z, q, rounds, d):
    """One of two minima; no more than sequential composition."""
    strong = guarantee(ledger(z, q, rounds), "strong")
    tried = [strong._at(d, 1 / (1 + math.exp(t))) for t in np.linspace(-12, 12, 300)]
    assert strong.epsilon(d) <= min(*tried, epsilon(ledger(z, q, rounds), d, "basic")) * (1 + 1e-6)


# At the ends of the scale


@pytest.mark.parametrize("accountant", NAMES)
def test_no_jump_where_the_moments_of_little_noise_are_closed_forms(accountant):
    below, above = (epsilon(ledger(0.02 * (1 + off), 0.01, 1000), 1e-5, accountant) for off in (-1e-9, 0))
    assert above <= below <= above * (1 + 1e-7)


@pytest.mark.parametrize(
    "run, d",
    [
        *((run, 1e-5) for run in [(1e-4, 0.5, 1000), (0.03, 1e-4, 10), (1e5, 0.5, 10**6), (1.0, 1e-9, 10**6)]),
        *(((1e-6, 0.1, 20), d) for d in (1e-5, 0.5, 1 - 1e-9)),  # Rényi's best order is as close to 1 as floats allow
    ],
)
def test_extreme_noise_is_accounted_finitely(run, d):
    names = ("pld", "rdp", "moments")[run[0] < 1e-5 :]  # `pld` takes seconds there
    values = [epsilon(ledger(*run), d, name) for name in names]
    assert all(0 <= value < math.inf for value in values) and values[0] <= values[1] * (1 + 1e-3) + 1e-9


def test_rdp_of_almost_no_noise_is_that_of_one_release():
    assert 5e11 <= epsilon(ledger(1e-6, 1.0, 1), 1e-5, "rdp") <= 1.0001 * 5e11


@pytest.mark.parametrize("z", [0.25, 0.1, 0.01])
def test_full_batches_joined_with_samples(z):
    """q = 1 among others, with little noise: bounded below by the full batches alone, and by little more above."""
    both = epsilon(concatenate([ledger(z, 1.0, 1), ledger(20.0, 1e-4, 10)]), 1e-5)
    assert 1 <= both / exact_gaussian(1 / z, 1e-5) <= 1 + 2e-3


def test_more_rounds_than_a_grid_resolves_cost_renyi_dp():
    run = ledger(20.0, 1e-6, 2**29)
    assert epsilon(run, 1e-6) == epsilon(run, 1e-6, "rdp")


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ConfigError, match="delta"):
        epsilon(ledger(1, 0.1, 1), delta)


# Policies


def test_rounds_of_one_rate_and_noise_count_together_and_no_others():
    counts = releases(
        concatenate([ledger(z, q, 2) for z, q in ((1.0, 0.1), (1 + 1e-14, 0.1), (1 + 1e-9, 0.1), (1.0, 0.2))])
    )
    assert counts == {Release(1.0, 0.1): 4, Release(1 + 1e-9, 0.1): 2, Release(1.0, 0.2): 2}


def test_an_epoch_of_shuffled_batches_costs_one_release():
    """Each record is in one batch an epoch; the costliest of the epoch's batches is what it may have been in."""

    def batch(epoch, z):
        return round_of(z, 0.25, "shuffle", epoch=epoch)

    run = Ledger("replace_one", {batch(0, 4.0): 1, batch(0, 8.0): 3, batch(4, 8.0): 4})
    assert epsilon(run, 1e-5) == pytest.approx(exact_gaussian(math.hypot(1 / 2, 1 / 4), 1e-5), rel=1e-9)
    with pytest.raises(ConfigError, match="cannot have been disjoint"):
        epsilon(Ledger("replace_one", {batch(0, 4.0): 5}), 1e-5)


CLAIMS = {policy.name: policy.covers for policy in POLICIES.values()}


@pytest.mark.parametrize("policy, adjacency, name", [*itertools.product(CLAIMS, ADJACENCIES, NAMES)])
def test_every_claim_is_allowed_or_refused_by_name(policy, adjacency, name):
    run = ledger(4.0, 0.1, 3, policy, adjacency)
    if name in CLAIMS[policy].get(adjacency, ()):
        assert 0 < epsilon(run, 1e-5, name) < 50
    else:
        with pytest.raises(ConfigError, match=f"(?s){policy}.*choose"):
            epsilon(run, 1e-5, name)


def test_the_table_of_claims():
    """By policy and adjacency: all accountants where a round is a Gaussian query of a Poisson sample."""
    every = dict.fromkeys(("add_remove", "replace_null"), NAMES)
    poisson = every | {"replace_one": ("pld",)}
    assert {
        "poisson": poisson, "cyclic_poisson": poisson, "all": every | {"replace_one": NAMES},
        "shuffle": dict.fromkeys(("replace_one", "replace_null"), NAMES), "fixed_size": {"replace_one": ("pld", "rdp")},
        "truncated_poisson": {"replace_null": ("pld",)}, "random_allocation": {"add_remove": ("pld",)},
    } == CLAIMS  # fmt: skip
    usual = {policy: check_covered(POLICIES[policy], None) for policy in CLAIMS}
    assert usual == dict.fromkeys(CLAIMS, "add_remove") | {
        "shuffle": "replace_one", "fixed_size": "replace_one", "truncated_poisson": "replace_null",
    }  # fmt: skip
