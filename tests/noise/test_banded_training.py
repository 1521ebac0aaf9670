"""Trainings with correlated noise: what they release, what it costs, and what they keep."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of
from reference import norm_of
from runs import exact_gaussian
from test_callback import Data, Model, plan_for, trainer
from test_correlated import assert_law, toeplitz
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.accounting.releases import releases
from dpexp.errors import ConfigError
from dpexp.privacy.noise import correlated
from dpexp.privacy.plan import adaptive_clipping, clipping, groups
from dpexp.privacy.plan.options import Banded, Gaussian

C = correlated.square_root(3)
CHOICES = {"sampling": "cyclic_poisson", "noise": Banded(3, "sqrt")}


class Released(pl.Callback):
    """Keeps what the rounds release, and the plans of the rounds. Stands behind the PrivacyCallback."""

    def __init__(self, privacy):
        self.privacy, self.rounds, self.plans = privacy, [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rounds.append({name: p.grad.clone() for name, p in module.named_parameters()})
        self.plans.append(self.privacy.current_plan)

    def in_rows(self):
        """[rounds, numbers]"""
        return np.stack([torch.cat([g.flatten() for g in round_.values()]).numpy() for round_ in self.rounds])


def fit(plan, module, folder, data, stop=-1, ckpt_path=None, seed=1, save=None, callbacks=(), **options):
    folder.mkdir(exist_ok=True)
    privacy = dpexp.PrivacyCallback(plan, folder / "l.jsonl", noise_seed=seed, **options)
    released = Released(privacy)
    run = trainer(privacy, released, *callbacks, max_steps=stop)
    run.fit(module, data, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    if save:
        run.save_checkpoint(save)
    return released


def trained(folder, data=None, module=None, seed=5, stop=-1, ckpt_path=None, save=None, **choices):
    """What each round of a small model released, and the callback."""
    module = module or Model()
    plan = plan_for(module, **CHOICES | choices)
    released = fit(plan, module, folder, data or Data(), stop, ckpt_path, seed, save, max_physical_batch_size=4)
    return released.rounds, released.privacy


def test_one_band_is_dp_sgd_bit_for_bit(tmp_path):
    plain, _ = trained(tmp_path, sampling="poisson", noise=Gaussian())
    one, privacy = trained(tmp_path / "other", noise=Banded(1))
    for before, after in zip(plain, one, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    poisson, cyclic = (read_ledger(folder / "l.jsonl") for folder in (tmp_path, tmp_path / "other"))
    assert releases(poisson) == releases(cyclic) and cyclic == privacy.plan.ledger()
    assert dpexp.epsilon(poisson, 1e-5) == dpexp.epsilon(cyclic, 1e-5)


def nobody():
    """Records whose gradients are zero: what is released is noise."""
    return DataLoader(TensorDataset(torch.zeros(40, 4, dtype=torch.float64), torch.zeros(40, dtype=torch.long)), 3)


class Still(Model):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 3000))

    def training_step(self, batch, batch_idx):
        return 0 * self.net(batch[0]).sum()


def still_plan(module, steps, **choices):
    return plan_of(module, n=40, q=0.1, steps=steps, noise_multiplier=1.0, **CHOICES | choices)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"group": groups.per_layer(), "mechanism": clipping.Joint(clipping.FixedClipNorm(2.0))},
        {"clip_norm": adaptive_clipping.AdaptiveClipNorm(initial=0.5, learning_rate=1.0, budget_share=0.1)},
    ],
    ids=["flat", "joint", "adaptive"],
)
def test_what_is_released_has_the_law_that_the_ledger_tells(tmp_path, choices):
    """C times a round's releases, in units of its own σ̃, is white; so also where σ̃ follows the bounds."""
    module = Still()
    plan = still_plan(module, 9, **choices)
    released = fit(plan, module, tmp_path, nobody(), seed=3)
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert "clip_norm" in choices or ledger == plan.ledger(), "the plan is what happens"
    assert len(ledger) == 9 and {round_.queries[0].bands for round_ in ledger.rounds} == {C}
    groups = [group for now in released.plans for group in now.groups if not group.is_metric]
    sigmas = [group.sigma * group.alphas[0] / (0.1 * 40) for group in groups]
    assert len(sigmas) == 9 and len(set(sigmas)) == (9 if "clip_norm" in choices else 1)
    x = released.in_rows() / np.array(sigmas)[:, None]
    assert x.shape == (9, 15000)
    assert_law(x, C)


# What it costs


def test_a_small_case_in_closed_form():
    """Three rounds, two bands, one number, whole parts: a record of part 0 adds v to rounds 0 and 2, and what tells it
    is N(μ, Σ) from N(0, Σ) with Σ = σ̃² C⁻¹C⁻ᵀ, which is Gaussian DP with √(μᵀΣ⁻¹μ) = ‖Cμ‖/σ̃."""
    z, c = 1.3, correlated.square_root(2)
    plan = plan_of(
        Model(), n=10, q=0.5, steps=3, noise_multiplier=z, sampling="cyclic_poisson", noise=Banded(2, "sqrt")
    )
    worst = max(np.linalg.norm(toeplitz(c, 3) @ mu) / z for mu in ([1, 0, 1], [1, 0, -1], [0, 1, 0]))
    claimed = dpexp.epsilon(plan.ledger(), 1e-5)
    assert exact_gaussian(worst, 1e-5) <= claimed == pytest.approx(exact_gaussian(math.sqrt(2) / z, 1e-5), rel=1e-9)
    assert worst == pytest.approx(math.sqrt(1 + c[0] ** 2) / z, rel=1e-9), "the last round's column is cut off"


def test_a_resume_begins_a_new_block(tmp_path):
    trained(tmp_path, stop=5, save=tmp_path / "five.ckpt")
    trained(tmp_path, stop=7, ckpt_path=tmp_path / "five.ckpt", seed=6)
    first, _ = trained(tmp_path, ckpt_path=tmp_path / "five.ckpt", seed=7)  # two rounds are done again
    ledger = read_ledger(tmp_path / "l.jsonl")
    blocks = Counter({round_.sampling.first: count for round_, count in ledger.rounds.items()})
    assert blocks == {0: 5, 5: 2, 7: 7} and len(first) == 7
    ((release, count),) = releases(ledger).items()
    assert count == 2 + 1 + 3 and release.q == pytest.approx(0.45)


def test_a_resumes_noise_and_parts_are_its_own(tmp_path):
    """Noise of a block has the inverse's law from its own beginning on."""
    module, six = Still(), tmp_path / "six.ckpt"
    plan = still_plan(module, 12)
    runs = [
        fit(plan, module, tmp_path, nobody(), stop, ckpt_path, seed, six).in_rows()
        for seed, stop, ckpt_path in ((1, 6, None), (2, -1, six))
    ]
    x = np.concatenate(runs) / (plan.groups[0].sigma / 4)
    blocks = np.kron(np.eye(2), toeplitz(C, 6)) @ x
    assert np.cov(blocks) == pytest.approx(np.eye(12), abs=6 / math.sqrt(x.shape[1]))


def test_a_checkpoint_holds_no_past_noise(tmp_path):
    module, noises, five = Still(), [], tmp_path / "five.ckpt"

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            privacy = trainer.callbacks[0]
            noises[:] = [y.clone() for past in privacy._fit.engine._correlated._past.values() for y in past]

    privacy = fit(still_plan(module, 12), module, tmp_path, nobody(), 5, save=five, callbacks=[Keep()]).privacy
    assert len(noises) == 2 * 2 and all(y.std() > 0.5 for y in noises)
    saved = five.read_bytes()
    assert not any(y[:4].to(dtype).numpy().tobytes() in saved for y in noises for dtype in (y.dtype, torch.float32))
    assert privacy._fit is None, "nor does the callback remember it"


# What one record adds


def test_one_record_more_moves_every_release_by_at_most_s(tmp_path):
    """With next to no noise. It is in rounds three apart, and in none of the others."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator, dtype=torch.float64), torch.randint(3, (40,), generator=generator)

    class Fixed(Model):
        """Whose weights do not move, so that all that differs is the record."""

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def sums(count):
        data = DataLoader(TensorDataset(50 * x[:count], y[:count]), 3)
        options = {"noise_multiplier": 1e-7, "q": 1 / 3, "n": 40, "steps": 9}
        return trained(tmp_path / str(count), data, Fixed(), seed=9, **options)

    (with_it, privacy), (without, _) = sums(40), sums(39)
    S = privacy.plan.groups[0].S
    moved = [norm_of(more, less) * 40 / 3 for more, less in zip(with_it, without, strict=True)]
    assert max(moved) <= S * (1 + 1e-3) + 1e-5
    turns = [t for t in range(9) if moved[t] > S / 100]
    assert len(turns) == 3 and [b - a for a, b in itertools.pairwise(turns)] == [3, 3]


# Bands by themselves


def error(plan, noise):
    return plan.noise_multiplier * correlated.error(plan.bands, plan.rounds, noise.momentum)


@pytest.mark.parametrize("epsilon, batch, least, most", [(3, 512, 8, 16), (3, 4096, 1, 2)])
def test_auto_takes_the_bands_of_the_least_error(epsilon, batch, least, most):
    """About ε√T/k for k epochs (McKenna 2024, arXiv 2405.15913): 9, 25 and 3."""
    facts = {"n": 50_000, "expected_batch_size": batch, "epochs": 10, "epsilon": epsilon, "delta": 1e-5}
    found = plan_of(Model(), **facts, sampling="cyclic_poisson", noise=Banded())
    b = len(found.bands)
    assert least <= b <= most and found.sampling.partitions == b
    assert epsilon * 0.999 <= dpexp.epsilon(found.ledger(), 1e-5) <= epsilon
    others = [plan_of(Model(), **facts, sampling="cyclic_poisson", noise=Banded(k)) for k in (b // 2 or 1, 2 * b)]
    assert error(found, Banded()) <= min(error(other, Banded()) for other in others)


def test_values_have_independent_noise_and_their_share():
    plan = plan_for(
        Model(), **CHOICES, private_metrics={"train_loss": {"clip_norm": 0.5, "budget_share": 0.3, "every_n_rounds": 2}}
    )
    gradients, loss = plan.groups
    assert gradients.bands == C and loss.bands == (1.0,) and plan.bands == C
    costs = releases(plan.ledger())
    assert sum(costs.values()) == 4
    assert min(release.z for release in costs) == pytest.approx(plan.noise_multiplier, rel=1e-9)


# Refusals


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"sampling": "poisson"}, "noise.bands=3 needs samples .* choose sampling=cyclic_poisson"),
        ({"sampling": "full_batch", "q": 1.0}, "sampling=full_batch does not"),
        ({"partitions": 2}, "noise.bands=3 must be at most sampling.partitions=2"),
        ({"noise": Banded(9)}, "choose at most 6 partitions"),
        ({"noise": Banded()}, "noise.bands=auto compares the noise that a target needs"),
        ({"schedules": {"z": {"linear": [1, 2]}}}, "schedule.z=.* is not supported with sampling=cyclic_poisson"),
        ({"schedules": {"S": {"linear": [1, 2]}}}, "schedule.S=.* is not supported"),
        ({"calibrate": "sampling_rate", "epsilon": 1.0, "delta": 1e-5}, "needs a q that can take any value"),
    ],
)
def test_what_cannot_be_had_is_refused(choices, message):
    with pytest.raises(ConfigError, match=message):
        plan_for(Model(), **CHOICES | choices)
