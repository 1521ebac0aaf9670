"""The solved knob spends the target and no more."""

from functools import partial

import numpy as np
import pytest
from dp_accounting import pld
from test_accountants import directly, ledger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.calibration import solve
from dpexp.accounting.risk import Epsilon
from dpexp.errors import ConfigError

CALIBRATABLE = {
    "noise_multiplier": lambda z: ledger(z, 0.01, 1000),
    "sampling_rate": lambda q: ledger(4 * q / 0.01, q, 1000),
    "sampling_rate_at_fixed_noise": lambda q: ledger(1.0, q, 1000),
    "clip_norm": lambda scale: ledger(4 / scale, 0.01, 1000),
}


@pytest.mark.parametrize("knob", CALIBRATABLE)
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_every_knob(knob, target):
    """By dp-accounting for the noise."""
    start = 0.02 if knob.startswith("sampling_rate") else 1.0
    solved = solve(knob, CALIBRATABLE[knob], Epsilon(target, 1e-5), start=start)
    assert target * (1 - 1e-3) <= epsilon(CALIBRATABLE[knob](solved.value), 1e-5) <= target
    assert (solved.value, solved.cost) in solved.trace
    if knob == "noise_multiplier":
        accountant = pld.PLDAccountant(value_discretization_interval=1e-5 * max(2, target))
        cost = directly(solved.value, 0.01, 1000, 1e-5, accountant)
        assert cost == pytest.approx(target, rel=1.1e-3)
    better = solved.value * (0.99 if knob in ("sampling_rate", "noise_multiplier") else 1.01)
    assert epsilon(CALIBRATABLE[knob](better), 1e-5) > target, "the next better value would cost more"


@pytest.mark.parametrize("target, accountant", [(1e4, "pld"), (1e6, "pld"), (1e9, "rdp")])
def test_the_largest_targets_are_met(target, accountant):
    solved = solve("noise_multiplier", CALIBRATABLE["noise_multiplier"], Epsilon(target, 1e-5), accountant, start=1.0)
    assert target * (1 - 1e-3) <= solved.cost <= target and not solved.missed


@pytest.mark.parametrize("rounds, target, missed", [(1000, 2.0, False), (20, 0.5, True)])
def test_a_target_that_is_missed_by_more_than_the_precision_is_said(rounds, target, missed):
    """The cost jumps from one number of rounds to the next; of a thousand, by less than 0.1 %."""
    solved = solve("steps", lambda steps: ledger(1.0, 0.01, int(steps)), Epsilon(target, 1e-5), start=rounds)
    assert bool(solved.missed) == missed == (solved.cost < target * (1 - 1e-3))
    assert not missed or f"({solved.value + 1:.0f} would cost more than privacy.epsilon=0.5" in solved.missed
    assert epsilon(ledger(1.0, 0.01, int(solved.value) + 1), 1e-5) > target


def test_steps_is_the_last_round_that_is_affordable():
    solved = solve("steps", lambda steps: ledger(1.0, 0.01, int(steps)), Epsilon(2.0, 1e-5), start=100)
    assert solved.value == int(solved.value)
    assert epsilon(ledger(1.0, 0.01, int(solved.value)), 1e-5) <= 2.0
    assert epsilon(ledger(1.0, 0.01, int(solved.value) + 1), 1e-5) > 2.0


def test_q_comes_from_above_where_epsilon_is_not_monotone():
    """At fixed σ_g, ε rises as q falls, until samples are so rare that it falls again."""

    def at(q):
        return ledger(0.02 * q / 1e-6, q, 5)

    costs = [epsilon(at(q), 1e-5) for q in (1.0, 5e-6, 2e-6)]
    assert costs[0] < 1 < costs[1] > costs[2]
    solved = solve("sampling_rate", at, Epsilon(1.0, 1e-5), start=1e-3)
    assert solved.value > 5e-6
    assert all(epsilon(at(q), 1e-5) <= 1.0 for q in np.geomspace(solved.value, 1, 20))


@pytest.mark.parametrize(
    "knob, at, target, message",
    [
        ("noise_multiplier", lambda z: ledger(z, 1.0, 1000), 1e-9, "cannot be reached.*ε=.*noise_multiplier=1\\.049e"),
        ("sampling_rate", lambda q: ledger(0.5 * q, q, 1000), 1.0, "the best is ε=.*at sampling_rate=1;"),
        ("steps", lambda steps: ledger(0.3, 0.5, int(steps)), 1.0, "the best is ε=.*at steps=1;"),
    ],
)
def test_an_unreachable_target_says_what_is_reachable(knob, at, target, message):
    with pytest.raises(ConfigError, match=message):
        solve(knob, at, Epsilon(target, 1e-12), "rdp", start=0.1 if knob.startswith("sampling_rate") else 10)


def test_an_affordable_end_of_the_range_is_taken():
    """Every q is affordable with so much noise: the smallest allowed is asked for."""
    solved = solve(
        "sampling_rate", lambda q: ledger(1000 * q / 0.01, q, 10), Epsilon(5.0, 1e-5), start=0.01, lowest=1e-3
    )
    assert solved.value == pytest.approx(1e-3)
    closest = "no value closer below privacy.epsilon=5 at privacy.delta=1e-05 was found between 0.001 and 1"
    assert solved.missed == f" ({closest})"
    solved = solve("sampling_rate_at_fixed_noise", lambda q: ledger(1000.0, q, 10), Epsilon(5.0, 1e-5), start=0.01)
    assert solved.value == 1.0


def test_random_targets_by_each_accountant():
    """Trap 7: a search that returns more ε than was asked for. Every trace is that of the search."""
    random = np.random.default_rng(0)
    for _ in range(6):
        q, rounds = 10 ** random.uniform(-3, -0.3), int(10 ** random.uniform(0, 4))
        target, delta = 10 ** random.uniform(-1, 1.5), 10 ** random.uniform(-8, -4)
        for accountant in ("pld", "rdp"):
            at = partial(ledger, q=q, rounds=rounds)
            solved = solve("noise_multiplier", at, Epsilon(target, delta), accountant, start=1.0)
            cost = epsilon(ledger(solved.value, q, rounds), delta, accountant)
            assert target * (1 - 1e-3) <= cost <= target, (q, rounds, target, delta, accountant)
            assert (solved.value, solved.cost) in solved.trace and solved.cost == cost
