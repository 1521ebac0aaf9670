"""The solved knob spends the target and no more."""

from functools import partial

import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import composed, ledger, sampled

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.calibration import solve
from dpexp.accounting.risk import Epsilon
from dpexp.errors import ConfigError

OF = {  # knob -> the run at a value, and which way a value is dearer
    "noise_multiplier": (partial(ledger, q=0.01, rounds=1000), 0.99),
    "sampling_rate": (lambda q: ledger(4 * q / 0.01, q, 1000), 0.99),
    "sampling_rate_at_fixed_noise": (lambda q: ledger(1.0, q, 1000), 1.01),
    "clip_norm": (lambda scale: ledger(4 / scale, 0.01, 1000), 1.01),
    "steps": (lambda steps: ledger(1.0, 0.01, int(steps)), 0),
}


@pytest.mark.parametrize("knob, target", [*zip([*OF][:4], (8.0, 0.5, 8.0, 0.5), strict=True)])
def test_every_knob(knob, target):
    """By dp-accounting for the noise."""
    at, dearer = OF[knob]
    solved = solve(knob, at, Epsilon(target, 1e-5), start=0.02 if knob.startswith("sampling_rate") else 1.0)
    assert target * (1 - 1e-3) <= epsilon(at(solved.value), 1e-5) <= target
    assert (solved.value, solved.cost) in solved.trace
    if knob == "noise_multiplier":
        accountant = pld.PLDAccountant(value_discretization_interval=1e-5 * max(2, target))
        theirs = composed(accountant, (sampled(solved.value, 0.01), 1000)).get_epsilon(1e-5)
        assert theirs == pytest.approx(target, rel=1.1e-3)
    assert epsilon(at(solved.value * dearer), 1e-5) > target, "the next better value would cost more"


@pytest.mark.parametrize("target, accountant", [(1e4, "pld"), (1e6, "pld"), (1e9, "rdp")])
def test_the_largest_targets_are_met(target, accountant):
    solved = solve("noise_multiplier", OF["noise_multiplier"][0], Epsilon(target, 1e-5), accountant, start=1.0)
    assert target * (1 - 1e-3) <= solved.cost <= target and not solved.missed


@pytest.mark.parametrize("start, target, missed", [(1000, 2.0, False), (100, 2.0, False), (20, 0.5, True)])
def test_steps_is_the_last_round_that_is_affordable(start, target, missed):
    """The cost jumps from one number of rounds to the next; of a thousand, by less than 0.1 %."""
    at, _ = OF["steps"]
    solved = solve("steps", at, Epsilon(target, 1e-5), start=start)
    assert solved.value == int(solved.value)
    assert epsilon(at(solved.value), 1e-5) <= target < epsilon(at(solved.value + 1), 1e-5)
    assert bool(solved.missed) == missed == (solved.cost < target * (1 - 1e-3)), "what is missed is said"
    assert not missed or f"({solved.value + 1:.0f} would cost more than privacy.epsilon=0.5" in solved.missed


def test_q_comes_from_above_where_epsilon_is_not_monotone():
    """At fixed σ_g, ε rises as q falls, until samples are so rare that it falls again."""

    def cost(q):
        return epsilon(at(q), 1e-5)

    at = lambda q: ledger(0.02 * q / 1e-6, q, 5)  # noqa: E731
    assert cost(1.0) < 1 < cost(5e-6) > cost(2e-6)
    solved = solve("sampling_rate", at, Epsilon(1.0, 1e-5), start=1e-3)
    assert solved.value > 5e-6 and max(map(cost, np.geomspace(solved.value, 1, 20))) <= 1.0


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


@pytest.mark.parametrize(
    "knob, z_of, lowest, found, missed",
    [
        ("sampling_rate", lambda q: 1e5 * q, {"lowest": 1e-3}, 1e-3,
         " (no value closer below privacy.epsilon=5 at privacy.delta=1e-05 was found between 0.001 and 1)"),
        ("sampling_rate_at_fixed_noise", lambda q: 1000.0, {}, 1.0, None),
    ],
)  # fmt: skip
def test_an_affordable_end_of_the_range_is_taken(knob, z_of, lowest, found, missed):
    """Every q is affordable with so much noise: at fixed noise on the average, the smallest allowed is asked for."""
    solved = solve(knob, lambda q: ledger(z_of(q), q, 10), Epsilon(5.0, 1e-5), start=0.01, **lowest)
    assert solved.value == pytest.approx(found, rel=1e-6 * (found < 1)) and missed in (None, solved.missed)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.floats(-3, -0.3), st.floats(0, 4), st.floats(-1, 1.5), st.floats(-8, -4))
def test_random_targets_by_each_accountant(accountant, q, rounds, target, delta):
    """Trap 7: a search that returns more ε than was asked for. Every trace is that of the search."""
    target, delta, at = 10**target, 10**delta, partial(ledger, q=10**q, rounds=int(10**rounds))
    solved = solve("noise_multiplier", at, Epsilon(target, delta), accountant, start=1.0)
    assert target * (1 - 1e-3) <= solved.cost == epsilon(at(solved.value), delta, accountant) <= target
    assert (solved.value, solved.cost) in solved.trace
