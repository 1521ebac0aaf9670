"""The statistics of audits, against closed forms, linear programming and simulation."""

import math

import numpy as np
import pytest
from runs import ledger, round_of
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri

from dpexp.accounting import auditing
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import (
    POWER,
    contribution,
    distance,
    mu_bound,
    noise_reuse,
    noise_scale,
    rate_of_inclusion,
    refuted,
    releases,
)  # fmt: skip
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent


def gaussian(mu, rounds=1):
    return ledger(math.sqrt(rounds) / mu, 1.0, rounds, "all")


def of_gaussian(mu):
    return lambda y: float(ndtr(ndtri(y) - mu))


def largest_tail(m, r, c, lines):
    """The largest probability of at least c right guesses among all laws that theorem 9 of Mahloujifar et al. allows,
    with 1 - f the least of lines (height, slope), by linear programming."""
    i, j = np.ogrid[: r + 1, :r]
    over, under = np.where(i > j, i / m, 0.0).T, np.where(i >= j, (r - i) / m, 0.0).T
    rows = np.concatenate([over - slope * under for _, slope in lines])
    heights = np.repeat([height for height, _ in lines], r)
    return -linprog(-1.0 * (i[:, 0] >= c), rows, heights, np.ones((1, r + 1)), [1.0], method="highs").fun


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


def test_mu_is_found_and_a_larger_one_than_claimed_is_refuted():
    rng, m = np.random.default_rng(2), 4000
    included = rng.random(m) < 0.5
    scores = 1.2 * included + rng.normal(size=m)
    for claimed, beyond in ((1.2, []), (0.9, ["distance"]), (0.2, ["μ", "distance"])):
        found = auditing.audit(scores, included, gaussian(claimed, 3), (1e-5,), 1e-3, [])
        assert found.mu_claimed == pytest.approx(claimed, rel=1e-4)
        assert [said.split()[said.startswith("the")] for said in found.exceeded] == beyond
        assert 0.2 < found.mu_bound < 1.2 and found.summary()["refuted"] == bool(beyond)
    assert found.bounds[0].found == pytest.approx(epsilon(gaussian(found.mu_bound), 1e-5), rel=1e-4)


def test_checks_refute():
    checks = [noise_scale(np.full((4, 100), 0.5), 1e-4), noise_reuse(np.eye(3, 100), 1e-4)]
    found = auditing.audit(np.arange(200.0), np.arange(200) % 2 == 0, gaussian(9.0), (1e-5,), 1e-4, checks)
    assert found.exceeded == ["the noise is at most 0.5743, and 1 was planned"]
    assert found.summary()["noise"] == 0.5 and found.summary()["refuted"] == 1


GRADIENTS, METRIC = SumQueryEvent("all", 1.0, 1.0), SumQueryEvent("loss", 1.0, 9.0)
ALL = round_of(policy="all").sampling
BOTH = Ledger("add_remove", {Round(ALL, (GRADIENTS, METRIC)): 5, Round(ALL, (GRADIENTS,)): 15})


@pytest.mark.parametrize(
    "seen, said",
    [
        ({"all": 20, "loss": 5}, None), ({"all": 12, "loss": 3}, None),  # a resumed job wrote others
        ({"all": 21, "loss": 5}, "21 noisy sums of all"), ({"loss": 6}, "6 noisy sums of loss"),
    ],
)  # fmt: skip
def test_releases_that_the_ledger_lacks_are_refuted_and_others_are_not(seen, said):
    found = releases(seen, BOTH)
    assert found.refuted == (said is not None)
    assert said is None or found.message().startswith(f"{said} were released, and the ledger has ")


# Checks of the plan, each at a large level, so that errors of both types can be counted.


def assert_refuted(test, rate, runs=600):
    """The test refutes at this rate."""
    found = sum(test().refuted for _ in range(runs)) / runs
    assert abs(found - rate) < 4 * math.sqrt(rate * (1 - rate) / runs)


def test_honest_noise_is_refuted_as_often_as_the_level_says_and_less_noise_found_with_the_power_told():
    rng, level = np.random.default_rng(4), 0.02
    for scale, rate in ((1, level), (noise_scale(np.ones((3, 50)), level).detectable, POWER)):
        assert_refuted(lambda scale=scale: noise_scale(scale * rng.normal(size=(3, 50)), level), rate)


@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_the_distance_is_refuted_as_often_as_the_level_says_and_found_with_the_power_told(mu):
    rng, level, yes = np.random.default_rng(8), 0.1, np.arange(100) < 40

    def found(true=mu):
        scores = true * yes + rng.normal(size=100)
        return distance(scores[yes], scores[~yes], mu, level)

    detectable = found().detectable
    assert_refuted(found, level, 100)
    assert_refuted(lambda: found(detectable), POWER, 100)
    assert distance(np.ones(40), np.zeros(60), mu, level).refuted


def test_noise_used_twice_is_found_and_other_noise_is_not():
    rng, level = np.random.default_rng(5), 0.05
    assert sum(noise_reuse(rng.normal(size=(6, 40)), level).refuted for _ in range(600)) <= 600 * level
    rows = rng.normal(size=(6, 40))
    rows[4] = -rows[1]
    assert noise_reuse(rows, 1e-6).refuted and noise_reuse(rows, 1e-6).found == pytest.approx(1)
    assert not noise_reuse(rows[:1], 1e-6).refuted
    assert noise_reuse(rng.normal(size=(2, 1000)), 0.05).limit < 0.1


@pytest.mark.parametrize("q", [0.5, 0.01])
def test_the_rate_of_inclusion_is_refuted_as_often_as_the_level_says(q):
    rng, level, chances = np.random.default_rng(6), 0.05, 5000

    def refuted(count):
        return rate_of_inclusion(count, chances, q, level).refuted

    detectable = q * rate_of_inclusion(1, chances, q, level).detectable
    honest, more = (sum(map(refuted, rng.binomial(chances, true, 600))) / 600 for true in (q, detectable))
    assert honest <= level + 0.01 and more >= 0.93
    assert rate_of_inclusion(0, chances, q, level).limit == 0 and refuted(chances)


def test_contributions_are_refuted_as_often_as_the_level_says():
    rng, level = np.random.default_rng(7), 0.05

    def found(name="all", mean=1.0, scale=0.1, level=level, of=np.mean):
        return contribution(name, mean + 0.1 * of(rng.normal(size=30)), scale, level)

    assert_refuted(lambda: found(scale=0.1 / math.sqrt(30)), level)
    assert_refuted(lambda: found("largest", level=level / 30, of=np.max), 1 - (1 - level / 30) ** 30)
    detectable = contribution("all", 1.0, 0.1, level).detectable
    assert_refuted(lambda: found(mean=detectable, of=lambda x: x[0]), POWER)
