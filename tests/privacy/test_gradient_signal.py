"""Signal and noise of a group, from its releases alone."""

import math

import numpy as np
import pytest
import torch
from jobs import result_of, store_of
from plans import plan_of
from test_correlated import toeplitz
from torch import nn

import dpexp
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise, Noisy
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.clipping import Joint
from dpexp.privacy.plan.options import Noise
from dpexp.privacy.private_metrics import GradientSignal, signal_curve
from dpexp.reporting.run_figures import signal_and_noise

LENGTH = 3.0


def history(length, d=500, sd=0.2, rounds=2000):
    """Releases of a vector of that length with noise."""
    draw = np.random.default_rng(1)
    signal = np.full(d, length / math.sqrt(d))
    return [(t + 1, float(np.sum((signal + sd * draw.normal(size=d)) ** 2)), d, sd) for t in range(rounds)]


@pytest.mark.parametrize("length", [0.0, 0.3, LENGTH])
def test_the_signal_is_found_within_its_band_at_the_stated_rate(length):
    found = signal_curve(history(length))
    assert len(found.rounds) == 20 and found.rounds[-1] == 2000
    assert found.noise == pytest.approx(np.full(20, 500 * 0.2**2))
    errors = (found.signal - length**2) / found.sd
    assert abs(errors.mean()) < 3 / math.sqrt(20) and 0.6 < errors.std() < 1.5
    assert found.sd[0] == pytest.approx(math.sqrt((2 * 500 * 0.2**4 + 4 * 0.2**2 * length**2) / 100), rel=0.02)


@pytest.mark.parametrize("length", [0.0, LENGTH])
def test_of_correlated_noise_too(length):
    """As it is added: larger than σ̃, and alike in rounds that follow one another. The band is no narrower than the
    errors are, and where there is no signal, no wider."""
    d, rounds = 500, 2000
    plan = plan_of(
        nn.Linear(d, 1, bias=False), n=100, q=0.1, steps=rounds, noise_multiplier=2.0, sampling="cyclic_poisson",
        noise=Noise("banded", 8),
    )  # fmt: skip
    noise, signals = CorrelatedNoise(GaussianNoise(KeyStream.known(2, "noise", 0))), GradientSignal()
    (group,) = plan.groups
    for t in range(rounds):
        total = torch.full((1, d), 10 * length / math.sqrt(d), dtype=torch.float64)
        noise.add_to([Noisy("weight", total, group.sigma, group.bands)], divisor=10.0)
        signals.add(plan, t + 1, {"weight": total})
    found = signal_curve(signals.history["all"])
    inverse = np.linalg.inv(toeplitz(group.bands, 300))
    assert found.noise[-1] == pytest.approx(d * 0.2**2 * (inverse @ inverse.T)[-1, -1], rel=1e-6)
    assert found.noise[0] < found.noise[1], "it grows over the first rounds"
    errors = (found.signal - length**2) / found.sd
    assert abs(errors.mean()) < 3 / math.sqrt(20) and errors.std() < 1.5
    if not length:
        assert errors.std() > 0.6
        naive = found.signal.std() / math.sqrt(2 * found.noise[-1] ** 2 / d / 100)
        assert naive > 1.2, "as if rounds were independent, it would be too narrow"


def test_each_vector_counts_in_units_of_its_scale():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plan = plan_of(
        model, n=100, q=0.1, steps=4, noise_multiplier=1.0, mechanism=Joint(alpha=(1.0, 10.0)),
        private_metrics={"loss": {"clip_norm": 1, "budget_share": 0.1}},
    )  # fmt: skip
    (group,) = [group for group in plan.groups if not group.is_metric]
    released = {name: torch.randn(p.shape, generator=torch.manual_seed(2)) for name, p in model.named_parameters()}
    signals = GradientSignal()
    signals.add(plan, 1, {**released, ".value loss": torch.ones(1)})
    ((at, square, d, sd),) = signals.history[group.name]
    lengths = {name: float(v.double().square().sum()) for name, v in released.items()}
    expected = lengths["0.weight"] + lengths["0.bias"] + (lengths["1.weight"] + lengths["1.bias"]) / 100
    assert square == pytest.approx(expected) and list(signals.history) == [group.name]
    assert (at, d, sd) == (1, 26, pytest.approx(group.sigma / 10))


@pytest.mark.parametrize("length", [0.0, LENGTH])
def test_what_cannot_be_told_from_noise_is_not_drawn(length):
    figure = signal_and_noise(GradientSignal({"conv": history(length), "fc": history(LENGTH)[:3]}))
    signal = next(line for line in figure.axes[0].lines if line.get_label() == "signal")
    drawn = np.isfinite(signal.get_ydata())
    assert drawn.all() if length else drawn.sum() <= 3
    assert [axes.get_ylabel() for axes in figure.axes] == ["conv", "fc"]


def test_a_run_draws_them(dpexp_job, tmp_path):
    output = dpexp_job(
        "model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "privacy.noise_multiplier=1.0"
    )
    assert (output / "signal.png").read_bytes().startswith(b"\x89PNG")
    run = result_of(output)["mlflow_run_id"]
    client = store_of(tmp_path)
    assert "signal.png" in {item.path for item in client.list_artifacts(run)}


def test_a_checkpoint_keeps_them(tmp_path):
    plan = plan_of(nn.Linear(3, 2), n=100, q=0.1, steps=4, noise_multiplier=1.0)
    before, after = (dpexp.PrivacyCallback(plan, tmp_path / "ledger.jsonl") for _ in range(2))
    before.signals.history = {"all": [(1, 2.0, 3, 0.5)]}
    after.load_state_dict(before.state_dict())
    assert after.signals.history == {"all": [(1, 2.0, 3, 0.5)]}
