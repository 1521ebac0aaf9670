"""Attack risk and Gaussian DP of a ledger: against riskcal, closed forms, dp-accounting, and the definitions."""

import math
from functools import partial

import numpy as np
import pytest
from dp_accounting import pld
from jobs import result_of, store_of
from scipy.optimize import brentq
from scipy.stats import norm
from test_accountants import ledger, of

from dpexp.accounting.calibration import solve
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import PoissonPair
from dpexp.accounting.ledger import Ledger, read_ledger
from dpexp.accounting.pld import ComposedLoss
from dpexp.accounting.risk import (
    FIGURES,
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
from dpexp.accounting.rounding import up
from dpexp.commands.account import account
from dpexp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("bare")
# riskcal 1.5.1: get_advantage_from_pld(p), 1 - get_beta_from_pld(p, alpha=[0.001, 0.01]) of p =
# from_gaussian_mechanism(z, sampling_prob=q, use_connect_dots=True, value_discretization_interval=h).self_compose(
# rounds) with h = 0.03 q √(e^(1/z²) - 1), but at most 2e-3.
RISKCAL = [
    (0.8, 0.01, 500, 0.1628758, 0.00494604, 0.0322062),
    (1.0, 0.1, 30, 0.2479656, 0.01159357, 0.0589893),
    (4.753, 0.3563, 113, 0.3102861, 0.01136045, 0.0644942),
]
# riskcal 1.5.1: find_noise_multiplier_for_advantage(advantage, q, rounds, grid_step=1e-4, advantage_tol=1e-5)
NOISE_FOR_ADVANTAGE = [(0.01, 1000, 0.05, 2.61381), (0.5, 10, 0.3, 2.04993)]
# and find_noise_multiplier_for_err_rates(fpr, 1 - tpr, q, rounds, grid_step=1e-4, beta_tol=1e-6)
NOISE_FOR_TPR = [(0.01, 1000, 0.01, 0.03, 0.98162), (0.5, 10, 0.01, 0.05, 2.46135)]


def test_riskcal_finds_the_same_risk():
    for z, q, rounds, most, *rates in RISKCAL:
        run = ledger(z, q, rounds)
        assert largest_advantage(run) == pytest.approx(most, rel=2e-3), (z, q, rounds)
        found = [largest_tpr(run, 0.001), largest_tpr(run, 0.01)]
        assert found == pytest.approx(rates, rel=2e-3), (z, q, rounds)


def test_riskcal_solves_for_the_same_noise():
    for q, rounds, most, z in NOISE_FOR_ADVANTAGE:
        solved = solve("noise_multiplier", partial(ledger, q=q, rounds=rounds), MaxAdvantage(most), start=1.0)
        assert solved.value == pytest.approx(z, rel=2e-3)
        assert solved.figures == (("advantage", solved.cost),) and most * (1 - 1e-3) <= solved.cost <= most
    for q, rounds, fpr, tpr, z in NOISE_FOR_TPR:
        solved = solve("noise_multiplier", partial(ledger, q=q, rounds=rounds), MaxTpr({fpr: tpr}), start=1.0)
        assert solved.value == pytest.approx(z, rel=2e-3)
        assert tpr * (1 - 1e-3) <= dict(solved.figures)[f"TPR at FPR {fpr}"] <= tpr


@pytest.mark.parametrize("mu", [1e-3, 0.7, 6.0])
def test_the_gaussian_mechanism(mu):
    """G_μ(α) = Φ(Φ^-1(1-α) - μ) (Dong, Roth & Su 2022, equation 6): exactly, and as the sum of ten discrete losses."""
    rounds = 9
    found = risk(ledger(math.sqrt(rounds) / mu, 1.0, rounds))
    assert found.mu == pytest.approx(mu, rel=1e-14)
    assert found.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-12)
    for fpr, tpr in found.tpr.items():
        assert tpr == pytest.approx(norm.cdf(norm.ppf(fpr) + mu), rel=1e-6)
    losses = ComposedLoss([PoissonPair(math.sqrt(10) / mu, 1.0, 0.5)], np.array([10.0]), GaussianMechanism(1e3))
    assert mu * (1 - 1e-6) <= gaussian_bound(losses) <= mu * (1 + 1e-3)
    assert advantage(losses) == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-3)
    for fpr in (1e-4, 0.01, 0.3, 0.9):
        exact = norm.cdf(norm.ppf(fpr) + mu)
        assert exact * (1 - 1e-9) <= true_positives(losses, fpr) <= min(exact * (1 + 2e-3), exact + 2e-3)


@pytest.mark.parametrize("z", [0.019, 0.021, 0.5])
def test_one_sampled_round_in_closed_form(z):
    """(1-q)N(0, 1) + qN(1/z, 1) against N(0, 1): δ(0) = q(2Φ(1/2z) - 1), and 1 is never said of it."""
    for q in (0.01, 0.5):
        exact = q * (2 * norm.cdf(0.5 / z) - 1)
        assert exact <= largest_advantage(ledger(z, q, 1)) <= exact * (1 + 1e-3)
        exact = brentq(lambda t: norm.sf(t) - 0.01, -10, 10)
        exact = (1 - q) * 0.01 + q * norm.sf(exact - 1 / z)
        assert exact * (1 - 1e-9) <= largest_tpr(ledger(z, q, 1), 0.01) <= exact + 0.01


@pytest.mark.parametrize(
    "policy, adjacency, facts, most",
    [
        ("poisson", "add_remove", {}, 1 - 0.9**8),
        ("poisson", "replace_one", {}, 1 - 0.9**8),
        ("fixed_size", "replace_one", {}, 1 - 0.9**8),
        ("truncated_poisson", "replace_null", {"maximum": 300}, 1 - 0.9**8),
        ("shuffle", "replace_one", {"epoch": 0}, 1.0),
        ("random_allocation", "add_remove", {"epoch": 0, "num_selected": 1, "num_steps": 10}, 1.0),
    ],
)
def test_without_noise_every_sampled_record_is_found(policy, adjacency, facts, most):
    found = risk(of(policy, adjacency, z=1e-3, rounds=8, **facts))
    assert found.advantage == pytest.approx(most, rel=1e-9) and found.advantage >= most
    assert found.tpr[0.01] == pytest.approx(min(1, most + 0.01), rel=1e-9)


def directly(z, q, rounds):
    """δ(ε) by dp-accounting."""
    h = min(2e-3, 0.02 * q * math.sqrt(math.expm1(1 / z**2)))
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=h)
    return one.self_compose(rounds).get_delta_for_epsilon


@pytest.mark.parametrize("z, q, rounds", [(4.753, 0.3563, 113)])
def test_mu_by_its_definition(z, q, rounds):
    """By solving for it at each ε, of dp-accounting's δ."""
    found = risk(ledger(z, q, rounds))
    delta_at = directly(z, q, rounds)
    epsilons = np.linspace(0, 12 * found.mu, 400)
    deltas = np.array(delta_at(epsilons.tolist()))
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


@pytest.mark.parametrize(
    "target, accountant, message",
    [
        (MaxAdvantage(0.05), "moments", r"privacy\.max_advantage=0\.05 cannot be reached.*the best is advantage=0\.0"),
    ],
)
def test_targets_out_of_range_are_refused(target, accountant, message):
    with pytest.raises(ConfigError, match=message):
        solve("noise_multiplier", lambda z: ledger(z, 0.1, 10), target, accountant, start=1.0)


def test_words_have_no_symbols():
    found = {"advantage": 0.30911, "tpr_at_fpr_0.001": 0.01136, "tpr_at_fpr_0.01": 0.06431, "mu": 0.83}
    assert in_words(found) == (
        "an attacker who knows all other data finds a record that was in the data at most 31 percentage points more "
        "often than by guessing: at most 1.14 % at 0.1 % false alarms, at most 6.44 % at 1 % false alarms"
    )
    assert gaussian(found) == "; Gaussian DP with μ = 0.83, up to a probability of 1e-10" and gaussian({}) == ""


def test_a_job_shows_it_everywhere(dpexp_job, capsys):
    """With its privacy unit."""
    output = dpexp_job(
        "model=logistic", "privacy_unit=user", "sampling.epochs=null", "sampling.steps=5",
        "privacy.max_tpr_at_fpr={0.01: 0.05}", "trainer.num_evaluations=0",
    )  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    expected = risk(read_ledger(output / "ledger.jsonl")).figures()
    assert set(expected) == set(FIGURES) and 0.0499 < expected["tpr_at_fpr_0.01"] <= 0.05
    result = result_of(output)
    assert result["risk"] == expected and result["epsilon"]["pld"] > 0
    assert (result["unit"], result["n"]) == ("user", 200)
    words = in_words(expected, "user")
    client = store_of(output.parents[2])
    (run,) = client.search_runs(["1"])
    assert {name: run.data.metrics[f"with {name}"] for name in FIGURES} == {
        name: float(up(value, 5)) for name, value in expected.items()
    }
    assert run.data.tags["dpexp.privacy_unit"] == "user"
    assert run.data.metrics["tried tpr"] <= 1.01 and "epsilon" in run.data.metrics
    assert "which costs TPR at FPR 0.01 = 0.0" in printed and f"In words: {words}" in printed
    changed = up(math.exp(result["epsilon"]["pld"]), 3)
    assert f"One user changes the probability of any result at most {changed}-fold, plus 0.0001." in printed
    assert printed.count("noise_multiplier = ") == 1 and "z = " not in printed and "The step is" not in printed
    card = (output / "card.md").read_text()
    assert "for adding or removing one user" in card
    assert f"In words: {words}" in card and f"μ = {up(expected['mu'], 4)}" in card
    account([run.info.run_id])
    assert f"by pld: {words}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "limit, delta, mu",
    [(1e13, 1e-5, math.sqrt(2e13)), (1e300, 1e-5, math.sqrt(2e300)), (1e-300, 1e-15, 1e-15 * math.sqrt(2 * math.pi))],
)
def test_a_target_at_the_ends_of_the_scale_has_a_mu(limit, delta, mu):
    assert Epsilon(limit, delta).mu == pytest.approx(mu, rel=1e-3)
