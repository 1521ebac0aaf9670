"""Bounds that follow a quantile of the norms (Andrew et al. 2021)."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of, trainer
from reference import clipped_sums, cross_entropy, record, stacked
from test_callback import Data, Model, plan_for
from torch import nn

import dpexp
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SumQueryEvent, read_ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.sampling import event_of, sampling_event
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm, AdaptiveState, indicator
from dpexp.privacy.plan.clipping import Joint, Separate, UniformClipNorm
from dpexp.privacy.plan.groups import Groups, Match, per_layer, value_key
from dpexp.privacy.private_metrics import UNCLIPPED
from dpexp.privacy.round import RoundEngine

Q, N, B = 0.1, 100, 9
SAMPLING = sampling_event("poisson", Q, N)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data():
    torch.manual_seed(2)
    return torch.randn(B, 3, dtype=torch.float64), torch.randint(0, 2, (B,))


def norms_by_hand(net):
    """[B] of each layer, one record at a time."""
    found = {"0": [], "2": []}
    for i in range(B):
        gradients = torch.autograd.grad(cross_entropy(net, record(data(), i)), list(net.parameters()))
        for norms, own in zip(found.values(), (gradients[:2], gradients[2:]), strict=True):
            norms.append(math.hypot(*(float(gradient.norm()) for gradient in own)))
    return {name: np.array(norms) for name, norms in found.items()}


def plan(net, **choices):
    return plan_of(net, **{"n": N, "q": Q, "steps": 1, "noise_multiplier": 1e-7} | choices)


def carried_out(plan, net, path, batch=None):
    """The releases of the plan's rounds on the same sample, the bounds followed and the weights unchanged."""
    bounds = AdaptiveState(plan.adaptive)
    engine = RoundEngine(plan, net, GaussianNoise(KeyStream.known(0, "noise", 0)), adaptive_state=bounds)
    ledger = LedgerWriter(path, plan.adjacency, plan.sampling_events())
    batch = batch or data()
    for t in range(plan.rounds):
        ledger.sample(event_of(plan.at_round(t).sampling, N, 0))
        engine.begin(t)
        engine.add_chunk(cross_entropy, stacked(batch), len(batch[0]))
        engine.raise_if_none_contributed()
        now, released = engine.current_plan, engine.release(ledger)
        yield now, released, bounds.update(released[value_key(UNCLIPPED)])
    ledger.close()


def choices(kind, bound):
    """The plan's options, and the name of what adapts for the layers 0 and 2."""
    joint, apart = {"mechanism": Joint(bound)}, {"group": per_layer()}
    return {
        "separate": (apart | {"clip_norm": bound}, "clip_norm/0", "clip_norm/2"),
        "joint": (joint, "alpha/0", "alpha/2"),
        "by group": (
            apart | {"mechanism": {"0": Separate(), "2": Joint(bound)}, "clip_norm": {"0": bound, "2": None}},
            "clip_norm/0", "alpha/2",
        ),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["separate", "joint", "by group"])
def test_bounds_move_as_the_paper_says_and_sums_are_clipped_to_those_of_their_round(kind, tmp_path):
    """By hand, from norms of one record at a time; almost without noise."""
    net, gamma = model(), {"0": 0.25, "2": 0.75} if kind == "separate" else {"0": 0.6, "2": 0.6}
    quantile = gamma if kind == "separate" else 0.6
    bound = AdaptiveClipNorm(initial=0.3, target_quantile=quantile, learning_rate=0.5, budget_share=0.1)
    options, *metrics = choices(kind, bound)
    made, norms = plan(net, steps=6, **options), norms_by_hand(net)
    expected = {"0": 0.3, "2": 0.3}
    rounds = [*carried_out(made, net, tmp_path / "ledger")]
    for now, _, found in rounds:
        shown = dict(AdaptiveState(made.adaptive).clip_norms(now))
        for metric, (name, S) in zip(metrics, expected.items(), strict=True):
            assert shown[metric] == pytest.approx(S, rel=1e-5)
            fraction = float((norms[name] <= S).sum() - B / 2) / (Q * N) + 0.5
            assert found[name] == pytest.approx(fraction, abs=1e-5)
            expected[name] = S * math.exp(-0.5 * (fraction - gamma[name]))
    now, released, _ = rounds[-1]
    of_gradients = SimpleNamespace(groups=now.groups[:-1])
    for name, total in clipped_sums(of_gradients, net, lambda one: cross_entropy(net, one), data(), B).items():
        torch.testing.assert_close(released[name] * Q * N, total, atol=1e-5, rtol=0)


def test_two_adaptive_norms_have_their_own_rates_and_shares():
    rules = {"0": AdaptiveClipNorm(budget_share=0.1, learning_rate=0.1), "2": AdaptiveClipNorm(budget_share=0.2)}
    made = plan(model(), group=per_layer(), clip_norm=rules)
    assert [member.learning_rate for member in made.adaptive.members] == [0.1, 0.2]
    assert [group.share for group in made.groups] == pytest.approx([0.35, 0.35, 0.3])


def test_vectors_of_one_name_in_two_groups_have_scales_of_their_own():
    net = model()
    group = Groups({"weights": Match(parameters=["*weight"]), "biases": Match(parameters=["*bias"])})
    made = plan(net, group=group, mechanism=Joint(AdaptiveClipNorm()))
    bounds = AdaptiveState(made.adaptive)
    bounds.multipliers = [1.0, 2.0, 3.0, 4.0]
    now = bounds.plan_of_round(made)
    assert [group.alphas for group in now.groups[:2]] == [(1.0, 2.0), (3.0, 4.0)]
    assert [name for name, _ in bounds.clip_norms(now)] == [
        "alpha/weights/0", "alpha/weights/2", "alpha/biases/0", "alpha/biases/2"
    ]  # fmt: skip
    assert list(bounds.update(torch.zeros(4))) == ["weights/0", "weights/2", "biases/0", "biases/2"]


def test_the_median_is_found_and_all_rounds_cost_the_same(tmp_path):
    net, common = model(), {"q": 0.09, "steps": 240, "noise_multiplier": 0.5}
    made = plan(net, clip_norm=AdaptiveClipNorm(initial=50, budget_share=0.3), **common)
    S = [now.groups[0].S for now, _, _ in carried_out(made, net, tmp_path / "ledger")]
    whole = np.sort(np.hypot(*norms_by_hand(net).values()))
    assert S[0] == 50 and whole[2] < np.median(S[120:]) < whole[6]
    ledger = read_ledger(tmp_path / "ledger")
    assert len(ledger.rounds) > 180, "S differs from round to round"
    assert len(releases(ledger)) == 1
    found, planned, fixed = (epsilon(one, 1e-4) for one in (ledger, made.ledger(), plan(net, **common).ledger()))
    assert found == pytest.approx(planned, rel=1e-9) and found == pytest.approx(fixed, rel=1e-6)


@given(st.lists(st.floats(2.0**-60, 2.0**60), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_rounds_whose_ratios_differ_by_rounding_are_of_one_kind_and_cost_no_less(bounds, ratio):
    rounds = {Round(SAMPLING, (SumQueryEvent("all", S, S * ratio),)): 1 for S in bounds}
    (found,) = releases(Ledger("add_remove", rounds)).items()
    assert found[1] == len(rounds) and found[0].z == min(round_.z("add_remove") for round_ in rounds)


def test_the_last_digits_of_a_norm_decide_over_little():
    """They vary with how many records are processed together, for all of them at once."""
    norms = torch.linspace(0.8, 1.2, 20001, dtype=torch.float64)  # in units of their bound
    found = [indicator(norms[None] * f) for f in (1.0, 1 + 1e-7)]
    assert float((found[0] - found[1]).abs().max()) < 1e-4
    assert found[0][0, 0] == 1 and found[0][0, -1] == 0


X, Y = data()


@pytest.mark.parametrize(
    "initial, x, y, each",
    [
        (1e3, X, Y, B / 2), (1e-9, X, Y, -B / 2),
        # But for one whose gradient is not finite, or that has no loss: it adds nothing at all.
        (1e3, torch.cat([X, math.inf * X[:1]]), torch.cat([Y, Y[:1]]), B / 2),
        (1e3, torch.cat([X, X[:1]]), torch.cat([Y, torch.tensor([7])]), B / 2),
    ],
)  # fmt: skip
def test_a_record_moves_the_counts_by_half_a_unit_each(tmp_path, recwarn, initial, x, y, each):
    net, bound = model(), AdaptiveClipNorm(initial=initial, budget_share=0.1)
    made = plan(net, group=per_layer(), clip_norm=bound)
    ((_, released, _),) = carried_out(made, net, tmp_path / "ledger", (x, y))
    assert 7 not in y or any("contribute nothing" in str(warning.message) for warning in recwarn)
    found = released[value_key(UNCLIPPED)] * Q * N
    torch.testing.assert_close(found, torch.full((2,), each, dtype=torch.float64), atol=1e-5, rtol=0)


def test_bounds_go_on_where_a_checkpoint_left_them(tmp_path):
    def fit(steps, resume=None):
        module = Model()
        plan = plan_for(module, steps=6, clip_norm=AdaptiveClipNorm())
        callback = dpexp.PrivacyCallback(plan, tmp_path / "ledger")
        run = trainer(callback, max_steps=steps)
        run.fit(module, Data(), ckpt_path=resume, weights_only=False if resume else None)
        run.save_checkpoint(tmp_path / "checkpoint")
        return callback

    before = fit(3)
    after = fit(6, resume=tmp_path / "checkpoint")
    rounds, S, _ = zip(*after.estimates.history["clip_norm/all"], strict=True)
    assert rounds == (1, 2, 3, 4, 5, 6)
    assert S[3] == pytest.approx(before.progress.adaptive.multipliers[0], rel=1e-12)
    assert tuple(round_.queries[0].S for round_ in read_ledger(tmp_path / "ledger").rounds) == S


@pytest.mark.parametrize(
    "options, said",
    [
        ({"clip_norm": AdaptiveClipNorm(target_quantile=1.5)}, r"clip_norm.target_quantile=1.5"),
        (
            {"clip_norm": AdaptiveClipNorm(target_quantile={"other": 0.5})},
            r"clip_norm.target_quantile names the groups other",
        ),
        ({"clip_norm": AdaptiveClipNorm(initial=0)}, r"clip_norm.initial=0"),
        ({"clip_norm": AdaptiveClipNorm(initial={"other": 1})}, r"clip_norm.initial names the groups other"),
        ({"clip_norm": AdaptiveClipNorm(budget_share=1.0)}, r"leave 0 of the budget"),
        ({"clip_norm": AdaptiveClipNorm(), "mechanism": Joint(UniformClipNorm(1.0))}, r"choose alpha=adaptive"),
        ({"mechanism": Joint(AdaptiveClipNorm(initial=0))}, r"alpha.initial=0"),
        (
            {"clip_norm": AdaptiveClipNorm(), "private_metrics": {UNCLIPPED: {"clip_norm": 1, "budget_share": 0.1}}},
            r"fraction_within_clip_norm is the name of what adaptive clipping norms release",
        ),
        ({"clip_norm": AdaptiveClipNorm(), "schedules": {"S": 0.5}}, r"schedule.S"),
    ],
)
def test_mistakes_are_sentences(options, said):
    with pytest.raises(dpexp.ConfigError, match=said):
        plan(nn.Linear(3, 2), **options)
