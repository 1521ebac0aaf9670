"""Attack risk and Gaussian DP of a ledger: against riskcal, closed forms, dp-accounting, and the definitions."""

import math
from functools import partial

import numpy as np
import pytest
from runs import ledger, losses_of
from scipy.optimize import brentq
from scipy.stats import norm

from dpexp.accounting.calibration import solve
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import PoissonPair
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.pld import ComposedLoss
from dpexp.accounting.risk import (
    TAIL,
    Epsilon,
    MaxAdvantage,
    MaxTpr,
    advantage,
    gaussian,
    gaussian_bound,
    in_words,
    largest_advantage,
    largest_tpr,
    risk,
    true_positives,
)
from dpexp.errors import ConfigError

# riskcal 1.5.1: get_advantage_from_pld(p), 1 - get_beta_from_pld(p, alpha=[0.001, 0.01]) of p =
# from_gaussian_mechanism(z, sampling_prob=q, use_connect_dots=True, value_discretization_interval=h).self_compose(
# rounds) with h = 0.03 q √(e^(1/z²) - 1), but at most 2e-3.
RISKCAL = [
    (0.8, 0.01, 500, 0.1628758, 0.00494604, 0.0322062),
    (1.0, 0.1, 30, 0.2479656, 0.01159357, 0.0589893),
    (4.753, 0.3563, 113, 0.3102861, 0.01136045, 0.0644942),
]
SOLVED = [  # riskcal 1.5.1: q, T, target, its limit, what the limit is of, z
    # find_noise_multiplier_for_advantage(advantage, q, rounds, grid_step=1e-4, advantage_tol=1e-5)
    (0.01, 1000, MaxAdvantage(0.05), 0.05, "advantage", 2.61381),
    (0.5, 10, MaxAdvantage(0.3), 0.3, "advantage", 2.04993),
    # find_noise_multiplier_for_err_rates(fpr, 1 - tpr, q, rounds, grid_step=1e-4, beta_tol=1e-6)
    (0.01, 1000, MaxTpr({0.01: 0.03}), 0.03, "TPR at FPR 0.01", 0.98162),
    (0.5, 10, MaxTpr({0.01: 0.05}), 0.05, "TPR at FPR 0.01", 2.46135),
]


@pytest.mark.parametrize("z, q, rounds, most, at_001, at_01", RISKCAL)
def test_riskcal_finds_the_same_risk(z, q, rounds, most, at_001, at_01):
    run = ledger(z, q, rounds)
    found = [largest_advantage(run), largest_tpr(run, 0.001), largest_tpr(run, 0.01)]
    assert found == pytest.approx([most, at_001, at_01], rel=2e-3)


@pytest.mark.parametrize("q, rounds, target, most, name, z", SOLVED)
def test_riskcal_solves_for_the_same_noise(q, rounds, target, most, name, z):
    solved = solve("noise_multiplier", partial(ledger, q=q, rounds=rounds), target, start=1.0)
    assert solved.value == pytest.approx(z, rel=2e-3)
    assert most * (1 - 1e-3) <= dict(solved.figures)[name] <= most
    assert name != "advantage" or solved.figures == (("advantage", solved.cost),)


@pytest.mark.parametrize("mu", [1e-3, 0.7, 6.0])
def test_the_gaussian_mechanism(mu):
    """G_μ(α) = Φ(Φ^-1(1-α) - μ) (Dong, Roth & Su 2022, equation 6): exactly, and as the sum of ten discrete losses."""

    def power(fpr):
        return norm.cdf(norm.ppf(fpr) + mu)

    found, most = risk(ledger(3 / mu, 1.0, 9)), 2 * norm.cdf(mu / 2) - 1
    assert found.mu == pytest.approx(mu, rel=1e-14)
    assert found.advantage == pytest.approx(most, rel=1e-12)
    assert found.tpr == pytest.approx({fpr: power(fpr) for fpr in found.tpr}, rel=1e-6)
    losses = ComposedLoss([PoissonPair(math.sqrt(10) / mu, 1.0, 0.5)], np.array([10.0]), GaussianMechanism(1e3))
    assert mu * (1 - 1e-6) <= gaussian_bound(losses) <= mu * (1 + 1e-3)
    assert advantage(losses) == pytest.approx(most, rel=1e-3)
    for fpr in (1e-4, 0.01, 0.3, 0.9):
        exact = power(fpr)
        assert exact * (1 - 1e-9) <= true_positives(losses, fpr) <= exact * (1 + 2e-3)


@pytest.mark.parametrize("z", [0.019, 0.021, 0.5])
@pytest.mark.parametrize("q", [0.01, 0.5])
def test_one_sampled_round_in_closed_form(z, q):
    """(1-q)N(0, 1) + qN(1/z, 1) against N(0, 1): δ(0) = q(2Φ(1/2z) - 1), and 1 is never said of it."""
    exact = q * (2 * norm.cdf(0.5 / z) - 1)
    assert exact <= largest_advantage(ledger(z, q, 1)) <= exact * (1 + 1e-3)
    exact = (1 - q) * 0.01 + q * norm.sf(norm.isf(0.01) - 1 / z)
    assert exact * (1 - 1e-9) <= largest_tpr(ledger(z, q, 1), 0.01) <= exact + 0.01


@pytest.mark.parametrize(
    "policy, adjacency, most",
    [
        *(("poisson", adjacency, 1 - 0.9**8) for adjacency in ("add_remove", "replace_one")),
        ("fixed_size", "replace_one", 1 - 0.9**8), ("truncated_poisson", "replace_null", 1 - 0.9**8),
        ("shuffle", "replace_one", 1.0), ("random_allocation", "add_remove", 1.0),
    ],
)  # fmt: skip
def test_without_noise_every_sampled_record_is_found(policy, adjacency, most):
    maximum = {"maximum": 300} if policy == "truncated_poisson" else {}
    found = risk(ledger(1e-3, 0.1, 8, policy, adjacency, **maximum))
    assert most <= found.advantage == pytest.approx(most, rel=1e-9)
    assert found.tpr[0.01] == pytest.approx(min(1, most + 0.01), rel=1e-9)


def test_mu_by_its_definition():
    """By solving for it at each ε, of dp-accounting's δ."""
    run = 4.753, 0.3563, 113
    found = risk(ledger(*run))
    epsilons = np.linspace(0, 12 * found.mu, 400).tolist()
    deltas = losses_of(*run).get_delta_for_epsilon(epsilons)
    needed = [
        brentq(lambda mu, e=e, d=d: GaussianMechanism(mu).delta(e) - d + TAIL, 1e-6, 50, xtol=1e-9)
        for e, d in zip(epsilons, deltas, strict=True)
        if d > 1.1 * TAIL
    ]
    assert found.mu == pytest.approx(max(needed), rel=3e-3)


def test_next_to_no_noise_and_next_to_no_release():
    nothing = risk(Ledger("add_remove", {}))
    assert (nothing.mu, nothing.advantage, nothing.tpr) == (0, 0, {0.001: 0.001, 0.01: 0.01})
    bare = risk(ledger(0.5, 0.5, 300))
    assert bare.mu == pytest.approx(math.sqrt(300) / 0.5) and bare.advantage == pytest.approx(1)
    little = risk(ledger(3000.0, 0.01, 1))
    assert 0 < little.mu < 1 / 3000 and little.tpr[0.01] == pytest.approx(0.01, rel=1e-2)
    assert "mu" not in risk(ledger(1.0, 0.01, 1000), "basic").figures()


def test_a_target_out_of_range_is_refused():
    with pytest.raises(
        ConfigError, match=r"privacy\.max_advantage=0\.05 cannot be reached.*the best is advantage=0\.0"
    ):
        solve("noise_multiplier", partial(ledger, q=0.1, rounds=10), MaxAdvantage(0.05), "moments", start=1.0)


def test_words_have_no_symbols():
    found = {"advantage": 0.30911, "tpr_at_fpr_0.001": 0.01136, "tpr_at_fpr_0.01": 0.06431, "mu": 0.83}
    assert in_words(found) == (
        "an attacker who knows all other data finds a record that was in the data at most 31 percentage points more "
        "often than by guessing: at most 1.14 % at 0.1 % false alarms, at most 6.44 % at 1 % false alarms"
    )
    assert gaussian(found) == "; Gaussian DP with μ = 0.83, up to a probability of 1e-10" and gaussian({}) == ""


@pytest.mark.parametrize(
    "limit, delta, mu",
    [(1e13, 1e-5, math.sqrt(2e13)), (1e300, 1e-5, math.sqrt(2e300)), (1e-300, 1e-15, 1e-15 * math.sqrt(2 * math.pi))],
)
def test_a_target_at_the_ends_of_the_scale_has_a_mu(limit, delta, mu):
    assert Epsilon(limit, delta).mu == pytest.approx(mu, rel=1e-3)
