"""The statistics of audits, against closed forms, linear programming and simulation."""

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from dpexp.accounting import auditing
from dpexp.accounting.auditing import (
    POWER,
    contribution,
    epsilon_bound,
    inverse_of,
    largest_contribution,
    mu_bound,
    noise_reuse,
    noise_scale,
    p_value,
    rate_of_inclusion,
    refuted,
)  # fmt: skip
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent


def gaussian(mu, rounds=1, policy="all", q=1.0):
    query = SumQueryEvent("all", 1.0, math.sqrt(rounds) / mu)
    return Ledger("add_remove", {Round(SamplingEvent(policy, q, 1000), (query,)): rounds})


def of_gaussian(mu):
    return lambda y: float(ndtr(ndtri(y) - mu))


def test_without_delta_the_bound_is_that_of_randomized_response():
    assert epsilon_bound(1000, 1000, 1000, 0.0, 0.05) == pytest.approx(
        5.8094, abs=1e-3
    )  # log(q/(1-q)), q = 0.05^(1/1000)
    for r, c, e in ((100, 60, 0.1), (1000, 800, 1.2), (50, 50, 3.0)):
        accuracy = math.exp(e) / (1 + math.exp(e))
        assert p_value(2000, r, c, e, 0.0) == pytest.approx(sum(binom.pmf(range(c, r + 1), r, accuracy)), rel=1e-9)


def test_delta_is_charged_as_theorem_5_2_says():
    m, r, c, e, d = 300, 40, 37, 1.0, 1e-3
    accuracy = math.exp(e) / (1 + math.exp(e))
    chances = [sum(binom.pmf(range(c - i, c), r, accuracy)) / i for i in range(1, c + 1)]
    tail = sum(binom.pmf(range(c, r + 1), r, accuracy))
    assert p_value(m, r, c, e, d) == pytest.approx(tail + 2 * m * d * max(chances), rel=1e-9)


@pytest.mark.parametrize("e, d", [(0.5, 0.0), (1.0, 0.003)])
def test_a_private_mechanism_is_hardly_ever_refuted(e, d):
    """Randomized response that shows a coin as it is with probability δ: the worst there is."""
    rng, m, runs = np.random.default_rng(0), 60, 20_000
    right = (rng.random((runs, m)) < d + (1 - d) * math.exp(e) / (1 + math.exp(e))).sum(1)
    p = np.array([p_value(m, m, c, e, d) for c in range(m + 1)])
    for level in (0.01, 0.05, 0.2):
        assert (p[right] <= level).mean() <= level + 3 * math.sqrt(level / runs)
    assert d > 0 or (p[right] <= 0.2).mean() > 0.1  # and at δ = 0 nothing is given away


def largest_tail(m, r, c, lines):
    """The largest probability of at least c right guesses among all laws that theorem 9 of Mahloujifar et al. allows,
    with 1 - f the least of lines (height, slope), by linear programming."""
    i = np.arange(r + 1)
    over, under = [], []
    for j in range(r):
        a = np.where(i > j, i / m, 0.0)
        b = np.where(i >= j, (r - i) / m, 0.0)
        for height, slope in lines:
            over.append(a - slope * b)
            under.append(height)
    found = linprog(-(i >= c).astype(float), over, under, np.ones((1, r + 1)), [1.0], method="highs")
    return -found.fun


@pytest.mark.parametrize("m, r", [(1, 1), (8, 8), (20, 6), (40, 30)])
@pytest.mark.parametrize("e, d", [(0.7, 0.0), (1.0, 0.02), (0.2, 0.1)])
def test_the_recursion_finds_the_largest_tail_that_the_theorem_allows(m, r, e, d):
    lines = [(d, math.exp(e)), (1 - math.exp(-e) * (1 - d), math.exp(-e)), (1.0, 0.0)]

    def inverse(y):
        return max(0.0, (y - d) / math.exp(e), 1 - d - (1 - y) * math.exp(e))

    for c in range(r // 2 + 1, r + 1):
        most = largest_tail(m, r, c, lines)
        assert not refuted(m, r, c, inverse, most * (1 - 1e-6))
        assert most > 1 - 1e-9 or refuted(m, r, c, inverse, min(1.0, most * (1 + 1e-6)))


def test_of_one_coin_no_more_is_right_than_the_total_variation_allows():
    for mu in (0.3, 1.0, 2.5):
        most = float(ndtr(mu / 2))
        assert refuted(1, 1, 1, of_gaussian(mu), most + 1e-6) and not refuted(1, 1, 1, of_gaussian(mu), most - 1e-6)
        assert mu_bound(1, 1, 1, most) == pytest.approx(mu, rel=1e-4)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_a_claims_inverse_is_that_of_its_curve_and_never_above(mu):
    inverse = inverse_of(gaussian(mu))
    for y in (1e-4, 0.01, 0.2, 0.5, 0.9, 0.999):
        exact = of_gaussian(mu)(y)
        assert exact * 0.97 - 1e-9 <= inverse(y) <= exact * (1 + 1e-9)


@pytest.mark.parametrize("policy, q, rounds, mu", [("all", 1.0, 3, 1.0), ("poisson", 0.3, 20, 2.0)])
def test_honest_scores_refute_nothing_and_others_do(policy, q, rounds, mu):
    rng, m, ledger = np.random.default_rng(1), 1000, gaussian(mu, rounds, policy, q)
    sigma = next(iter(ledger.rounds)).queries[0].sigma * math.sqrt(rounds)
    refutations = []
    for noise in (1.0, 0.5):
        for _ in range(8):
            included = rng.random(m) < 0.5
            found = included * rng.binomial(rounds, q, m) + rng.normal(0, noise * sigma, m)
            refutations.append(bool(auditing.audit(found / (q * rounds), included, ledger, (1e-5, 0.1)).exceeded))
    assert sum(refutations[:8]) == 0 and sum(refutations[8:]) == 8


def test_mu_is_found():
    rng, m = np.random.default_rng(2), 4000
    included = rng.random(m) < 0.5
    found = auditing.audit(1.2 * included + rng.normal(size=m), included, gaussian(1.2), (1e-5,))
    assert found.mu_claimed == pytest.approx(1.2, rel=1e-4)
    assert abs(found.mu_estimate - 1.2) < 3 * found.mu_error < 0.12
    assert 0 < found.mu_bound < 1.2 and 0 < found.bounds[0].found < found.bounds[0].claimed
    assert not found.exceeded and found.summary()["refuted"] == 0


def test_rates_of_alarms_that_a_claim_does_not_allow_refute_it():
    """Noise 0.7 times what was planned: by true and false alarms, if canaries are independent (Clopper & Pearson)."""
    rng, m = np.random.default_rng(3), 20_000
    included = rng.random(m) < 0.5
    for noise, beyond in ((1.0, False), (0.7, True)):
        found = auditing.audit(included + noise * rng.normal(size=m), included, gaussian(1.0), (1e-5,))
        assert found.mu_refuted == beyond and 0.8 < found.mu_bound_if_independent * noise < 1


def test_checks_refute():
    found = auditing.audit(
        np.arange(200.0), np.arange(200) % 2 == 0, gaussian(9.0), (1e-5,),
        checks=[noise_scale(np.full((4, 100), 0.5), 1e-4), noise_reuse(np.eye(3, 100), 1e-4)],
    )  # fmt: skip
    assert found.exceeded == ["the noise is at most 0.5743, and 1 was planned"]
    assert found.summary()["noise"] == 0.5 and found.summary()["refuted"] == 1


# Checks of the plan, each at a large level, so that errors of both types can be counted.


def counted(test, runs=2000):
    return sum(test() for _ in range(runs)) / runs


def within(found, expected, runs=2000):
    return abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_honest_noise_is_refuted_as_often_as_the_level_says_and_less_noise_found_with_the_power_told():
    rng, level = np.random.default_rng(4), 0.02
    detectable = noise_scale(np.ones((3, 50)), level).detectable
    assert within(counted(lambda: noise_scale(rng.normal(size=(3, 50)), level).refuted), level)
    assert within(counted(lambda: noise_scale(detectable * rng.normal(size=(3, 50)), level).refuted), POWER)


def test_noise_used_twice_is_found_and_other_noise_is_not():
    rng, level = np.random.default_rng(5), 0.05
    assert counted(lambda: noise_reuse(rng.normal(size=(6, 40)), level).refuted) <= level
    rows = rng.normal(size=(6, 40))
    rows[4] = -rows[1]
    assert noise_reuse(rows, 1e-6).refuted and noise_reuse(rows, 1e-6).found == pytest.approx(1)
    assert not noise_reuse(rows[:1], 1e-6).refuted
    assert noise_reuse(rng.normal(size=(2, 1000)), 0.05).limit < 0.1


@pytest.mark.parametrize("q", [0.5, 0.01])
def test_the_rate_of_inclusion_is_refuted_as_often_as_the_level_says(q):
    rng, level, chances = np.random.default_rng(6), 0.05, 5000
    detectable = q * rate_of_inclusion(1, chances, q, level).detectable
    assert counted(lambda: rate_of_inclusion(rng.binomial(chances, q), chances, q, level).refuted) <= level + 0.01
    assert counted(lambda: rate_of_inclusion(rng.binomial(chances, detectable), chances, q, level).refuted) >= 0.93
    assert rate_of_inclusion(0, chances, q, level).limit == 0 and rate_of_inclusion(chances, chances, q, level).refuted


def test_contributions_are_refuted_as_often_as_the_level_says():
    rng, level = np.random.default_rng(7), 0.05
    honest = lambda check: counted(lambda: check(1 + 0.1 * rng.normal(size=30)).refuted)  # noqa: E731
    assert within(honest(lambda values: contribution("all", values, 0.1, level)), level)
    assert within(honest(lambda values: largest_contribution(values, 0.1, level)), 1 - (1 - level / 30) ** 30)
    once = np.r_[np.ones(29), 2.0]
    assert largest_contribution(once, 0.1, 1e-6).refuted and contribution("all", 1.01 * once, 0.01, 1e-6).refuted
