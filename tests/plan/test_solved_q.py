"""σ_g of the averages, and the q that is solved for while it is held (paper, section 4)."""

import math

import numpy as np
import pytest
from dp_accounting import pld
from plans import plan_of
from runs import composed, sampled
from torch import nn

from dpexp import Microbatch
from dpexp.accounting.accountants import epsilon
from dpexp.errors import ConfigError
from dpexp.privacy.plan.allocation import Explicit
from dpexp.privacy.plan.clipping import FixedClipNorm, Joint
from dpexp.privacy.plan.groups import per_layer

MODEL = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
SIGMAS = {"0": 0.01, "1": 0.03}  # of the average
NORMS = FixedClipNorm({"0": 0.5, "1": 2.0})
TARGET = {"epsilon": 2.0, "delta": 1e-5, "calibrate": "sampling_rate"}


def plan(**choices):
    return plan_of(MODEL, **{"n": 2000, "group": per_layer(), "clip_norm": NORMS} | choices)


def of_average(**choices):
    return plan(allocation=Explicit(sigma_of_average=SIGMAS), **choices)


def by_dp_accounting(made):
    accountant = pld.PLDAccountant(value_discretization_interval=3e-5)
    return composed(accountant, (sampled(made.noise_multiplier, made.sampling.q), made.rounds)).get_epsilon(1e-5)


def averages(made):
    return {group.name: group.sigma / (made.sampling.q * made.n) for group in made.groups if not group.is_metric}


@pytest.mark.parametrize(
    "choices",
    [
        {"q": 0.1},
        {"expected_batch_size": 130},
        {"q": 0.1, "privacy_unit": Microbatch(size=5)},
        {"q": 0.1, "mechanism": Joint(alpha=FixedClipNorm(0.7)), "clip_norm": FixedClipNorm(0.6)},
        {"q": 0.1, "private_metrics": {"loss": {"clip_norm": 3.0, "budget_share": 0.3}}},
        {"q": 0.1, "sampling": "fixed_size"},
    ],
    ids=["rate", "batch", "microbatch", "joint", "metric", "fixed_size"],
)
def test_the_noise_on_the_sum_is_qn_times_that_on_the_average(choices):
    made = of_average(steps=10, **choices)
    assert averages(made) == pytest.approx(SIGMAS, rel=1e-12)
    assert made.n == (400 if "privacy_unit" in choices else 2000), "in records of the privacy unit"
    on_sum = {name: made.sampling.q * made.n * sigma for name, sigma in SIGMAS.items()}
    same = plan(steps=10, allocation=Explicit(sigma=on_sum), **choices)
    assert same.noise_multiplier == pytest.approx(made.noise_multiplier, rel=1e-12)


@pytest.mark.parametrize("of", ["sigma", "sigma_of_average"])
def test_one_number_is_for_all_groups(of):
    one, each = (
        plan(q=0.1, steps=3, allocation=Explicit(**{of: given})) for given in (0.02, dict.fromkeys("01", 0.02))
    )
    assert one == each


def test_q_is_solved_from_the_noise_on_the_average_alone():
    """By dp-accounting for the cost."""
    made = of_average(steps=40, **TARGET)
    assert averages(made) == pytest.approx(SIGMAS, rel=1e-12)
    assert 0 < made.sampling.q < 0.9 and made.rounds == 40 and made.calibration.value == made.sampling.q
    assert 2.0 * (1 - 2e-3) <= by_dp_accounting(made) <= 2.0


def test_every_spelling_of_the_same_noise_on_the_average_has_the_same_q():
    """σ_g itself, whatever q is given; and σ̃_g or z at a reference q."""
    asked = TARGET | {"steps": 40, "accountant": "rdp"}
    reference = of_average(q=0.3, steps=40)
    on_sum = {name: 0.3 * 2000 * sigma for name, sigma in SIGMAS.items()}
    q = of_average(**asked).sampling.q
    for spelled in (
        {"q": 0.9, "allocation": Explicit(sigma_of_average=SIGMAS)},
        {"expected_batch_size": 3, "allocation": Explicit(sigma_of_average=SIGMAS)},
        {"q": 0.3, "allocation": Explicit(sigma=on_sum)},
        {"q": 0.3, "noise_multiplier": reference.noise_multiplier},
    ):
        assert plan(**spelled, **asked).sampling.q == pytest.approx(q, rel=1e-9)


def test_the_rounds_of_so_many_epochs_follow_the_solved_q():
    """At fixed σ_g, ε falls as q rises, from q to 1; and a smaller q costs more than the target."""
    epochs = 7.5
    made = of_average(epochs=epochs, **TARGET)
    q = made.sampling.q
    assert made.rounds == math.ceil(epochs / q - 1e-6) and 1 / 2000 < q < 1
    assert averages(made) == pytest.approx(SIGMAS, rel=1e-12)
    assert by_dp_accounting(made) <= 2.0
    rates = [0.99 * q, *np.geomspace(q, 1, 4).tolist()]
    dearer, *costs = (epsilon(of_average(epochs=epochs, q=rate).ledger(), 1e-5) for rate in rates)
    assert dearer > 2.0 >= costs[0] and costs == sorted(costs, reverse=True)


def test_the_rounds_follow_q_at_a_fixed_z_too_and_schedules_follow_the_rounds():
    asked = TARGET | {"calibrate": "sampling_rate_at_fixed_noise", "noise_multiplier": 1.2}
    made = plan(q=0.001, epochs=5, schedules={"z": {"linear": [2, 1]}}, **asked)
    assert made.rounds == math.ceil(5 / made.sampling.q - 1e-6) < 5000
    assert made.schedule.z[-1] == (round(31 * made.rounds / 32), 1.0)
    assert 1.9 < epsilon(made.ledger(), 1e-5) <= 2.0 and made.noise_multiplier == pytest.approx(1.2)


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"q": 0.1, "steps": 3}, r"exactly one of allocation\.sigma or allocation\.sigma_of_average must be given"),
        ({"steps": 3, "sigma_of_average": 0.1}, r"exactly one of sampling\.sampling_rate or .* got neither"),
        (
            {"q": 0.1, "expected_batch_size": 9, "steps": 3, "sigma_of_average": 0.1, **TARGET},
            r"exactly one of .* got sampling\.sampling_rate=0\.1 and sampling\.expected_batch_size=9",
        ),
        ({"steps": 3, "sigma": 0.1, **TARGET}, r"exactly one of sampling\.sampling_rate or .* got neither"),
        ({"q": 0.1, "steps": 3, "sigma_of_average": {"a": 1}}, "allocation.sigma_of_average names the groups a; the"),
        ({"q": 0.1, "steps": 3, "sigma_of_average": -1}, "allocation.sigma_of_average=-1 must be a finite number"),
        (
            {"epochs": 3, "sigma_of_average": 1.0, "schedules": {"z": [1.0] * 3}} | TARGET,
            "calibrate=sampling_rate cannot stretch a schedule that lists rounds",
        ),
    ],
)
def test_what_does_not_determine_a_plan_is_refused(choices, message):
    sigmas = {name: choices.pop(name) for name in ("sigma", "sigma_of_average") if name in choices}
    with pytest.raises(ConfigError, match=message):
        plan(allocation=Explicit(**sigmas), **choices)
