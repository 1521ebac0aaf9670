"""Bounds that follow a quantile of the norms (Andrew et al. 2021)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of, trainer
from torch import nn
from torch.nn import functional as F

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


def loss_of(net, one):
    return F.cross_entropy(net(one[0][None]), one[1][None])


def norms_by_hand(net, x, y):
    """[B] of each layer, one record at a time."""
    found = {"0": [], "2": []}
    for one in zip(x, y, strict=True):
        gradients = torch.autograd.grad(loss_of(net, one), list(net.parameters()))
        for name, (weight, bias) in (("0", gradients[:2]), ("2", gradients[2:])):
            found[name].append(math.hypot(float(weight.norm()), float(bias.norm())))
    return {name: np.array(norms) for name, norms in found.items()}


def carried_out(plan, net, path, rounds):
    """The releases of rounds on the same sample, the bounds followed and the weights unchanged."""
    bounds = AdaptiveState(plan.adaptive)
    engine = RoundEngine(plan, net, GaussianNoise(KeyStream.known(0, "noise", 0)), adaptive_state=bounds)
    ledger = LedgerWriter(path, plan.adjacency, plan.sampling_events(), False, None, None)
    for t in range(rounds):
        ledger.sample(event_of(plan.at_round(t).sampling, N, 0))
        engine.begin(t)
        engine.add_chunk(loss_of, data(), B)
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
def test_bounds_move_as_the_paper_says(kind, tmp_path):
    """By hand, from norms of one record at a time; almost without noise."""
    net = model()
    gamma = {"0": 0.25, "2": 0.75} if kind == "separate" else {"0": 0.6, "2": 0.6}
    bound = AdaptiveClipNorm(
        initial=0.3, target_quantile=gamma if kind == "separate" else 0.6, learning_rate=0.5, budget_share=0.1
    )
    options, *metrics = choices(kind, bound)
    plan = plan_of(net, n=N, q=Q, steps=6, noise_multiplier=1e-7, **options)
    norms = norms_by_hand(net, *data())
    expected = {"0": 0.3, "2": 0.3}
    for now, _, found in carried_out(plan, net, tmp_path / "ledger", 6):
        shown = dict(AdaptiveState(plan.adaptive).clip_norms(now))
        for metric, (name, S) in zip(metrics, expected.items(), strict=True):
            assert shown[metric] == pytest.approx(S, rel=1e-5)
            fraction = float((norms[name] <= S).sum() - B / 2) / (Q * N) + 0.5
            assert found[name] == pytest.approx(fraction, abs=1e-5)
            expected[name] = S * math.exp(-0.5 * (fraction - gamma[name]))


def test_two_adaptive_norms_have_their_own_rates_and_shares():
    rules = {"0": AdaptiveClipNorm(budget_share=0.1, learning_rate=0.1), "2": AdaptiveClipNorm(budget_share=0.2)}
    plan = plan_of(model(), n=N, q=Q, steps=1, noise_multiplier=1.0, group=per_layer(), clip_norm=rules)
    assert [member.learning_rate for member in plan.adaptive.members] == [0.1, 0.2]
    assert [group.share for group in plan.groups] == pytest.approx([0.35, 0.35, 0.3])


@pytest.mark.parametrize("kind", ["separate", "joint", "by group"])
def test_sums_are_clipped_to_the_bounds_of_their_round(kind, tmp_path):
    net = model()
    options, *_ = choices(kind, AdaptiveClipNorm(initial=0.3, learning_rate=1.0, budget_share=0.1))
    plan = plan_of(net, n=N, q=Q, steps=3, noise_multiplier=1e-7, **options)
    *_, (now, released, _) = carried_out(plan, net, tmp_path / "ledger", 3)
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for one in zip(*data(), strict=True):
        gradients = dict(zip(sums, torch.autograd.grad(loss_of(net, one), list(net.parameters())), strict=True))
        for group in now.groups[:-1]:
            scaled = [
                gradients[name].flatten() / alpha
                for vector, alpha in zip(group.vectors, group.alphas, strict=True)
                for name in vector.parameters
            ]
            c = min(1.0, group.S / float(torch.cat(scaled).norm()))
            for vector in group.vectors:
                for name in vector.parameters:
                    sums[name] += c * gradients[name]
    for name, total in sums.items():
        torch.testing.assert_close(released[name] * Q * N, total, atol=1e-5, rtol=0)


def test_vectors_of_one_name_in_two_groups_have_scales_of_their_own():
    net = model()
    group = Groups({"weights": Match(parameters=["*weight"]), "biases": Match(parameters=["*bias"])})
    plan = plan_of(net, n=N, q=Q, steps=1, noise_multiplier=1.0, group=group, mechanism=Joint(AdaptiveClipNorm()))
    bounds = AdaptiveState(plan.adaptive)
    bounds.multipliers = [1.0, 2.0, 3.0, 4.0]
    now = bounds.plan_of_round(plan)
    assert [group.alphas for group in now.groups[:2]] == [(1.0, 2.0), (3.0, 4.0)]
    assert [name for name, _ in bounds.clip_norms(now)] == [
        "alpha/weights/0", "alpha/weights/2", "alpha/biases/0", "alpha/biases/2"
    ]  # fmt: skip
    assert list(bounds.update(torch.zeros(4))) == ["weights/0", "weights/2", "biases/0", "biases/2"]


def test_the_median_is_found_and_all_rounds_cost_the_same(tmp_path):
    net = model()
    plan = plan_of(
        net, n=N, q=0.09, steps=400, noise_multiplier=0.5, clip_norm=AdaptiveClipNorm(initial=50, budget_share=0.3)
    )
    S = [now.groups[0].S for now, _, _ in carried_out(plan, net, tmp_path / "ledger", 400)]
    gradients = norms_by_hand(net, *data())
    whole = np.sort(np.hypot(gradients["0"], gradients["2"]))
    assert S[0] == 50 and whole[2] < np.median(S[200:]) < whole[6]
    ledger = read_ledger(tmp_path / "ledger")
    assert len(ledger.rounds) > 300, "S differs from round to round"
    assert len(releases(ledger)) == 1
    assert epsilon(ledger, 1e-4) == pytest.approx(epsilon(plan.ledger(), 1e-4), rel=1e-9)
    fixed = plan_of(net, n=N, q=0.09, steps=400, noise_multiplier=0.5)
    assert epsilon(ledger, 1e-4) == pytest.approx(epsilon(fixed.ledger(), 1e-4), rel=1e-6)


@given(st.lists(st.floats(2.0**-60, 2.0**60), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_rounds_whose_ratios_differ_by_rounding_are_of_one_kind_and_cost_no_less(bounds, ratio):
    rounds = {Round(SAMPLING, (SumQueryEvent("all", S, S * ratio),)): 1 for S in bounds}
    (found,) = releases(Ledger("add_remove", rounds)).items()
    assert found[1] == len(rounds) and found[0].z == min(round_.z("add_remove") for round_ in rounds)


def test_rounds_that_differ_are_not_taken_together():
    rounds = {Round(SAMPLING, (SumQueryEvent("all", 1.0, z),)): k + 1 for k, z in enumerate((1.0, 1 + 1e-9, 2.0))}
    assert sorted(releases(Ledger("add_remove", rounds)).values()) == [1, 2, 3]


def test_the_last_digits_of_a_norm_decide_over_little():
    """They vary with how many records are processed together, for all of them at once."""
    norms = torch.linspace(0.8, 1.2, 20001, dtype=torch.float64)  # in units of their bound
    found = [indicator(norms[None] * f) for f in (1.0, 1 + 1e-7)]
    assert float((found[0] - found[1]).abs().max()) < 1e-4
    assert found[0][0, 0] == 1 and found[0][0, -1] == 0


def test_a_record_moves_the_counts_by_half_a_unit_each(tmp_path):
    """But for one whose gradient is not finite, or that has no loss: it adds nothing at all."""
    net = model()

    def counts(x, y, name, initial=1e3):
        bound = AdaptiveClipNorm(initial=initial, budget_share=0.1)
        plan = plan_of(net, n=N, q=Q, steps=1, noise_multiplier=1e-7, group=per_layer(), clip_norm=bound)
        engine = RoundEngine(plan, net, GaussianNoise())
        ledger = LedgerWriter(tmp_path / name, plan.adjacency, plan.sampling_events(), False, None, None)
        ledger.sample(event_of(plan.sampling, N, 0))
        engine.begin()
        engine.add_chunk(loss_of, (x, y), len(x))
        return engine.release(ledger)[value_key(UNCLIPPED)] * Q * N

    def are(found, each):
        torch.testing.assert_close(found, torch.full((2,), each, dtype=torch.float64), atol=1e-5, rtol=0)

    x, y = data()
    are(counts(x, y, "a"), B / 2)
    are(counts(x, y, "b", initial=1e-9), -B / 2)
    odd = torch.full((1, 3), math.inf, dtype=torch.float64)
    are(counts(torch.cat([x, odd]), torch.cat([y, y[:1]]), "c"), B / 2)
    with pytest.warns(UserWarning, match="contribute nothing"):
        are(counts(torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([7])]), "d"), B / 2)


def test_bounds_go_on_where_a_checkpoint_left_them(tmp_path):
    from torch.utils.data import DataLoader, TensorDataset

    from dpexp.training.classifier import Classifier

    def fit(steps, resume=None):
        module = Classifier(nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, 0.1))
        plan = plan_of(module, n=20, q=0.5, steps=6, noise_multiplier=1.0, clip_norm=AdaptiveClipNorm())
        callback = dpexp.PrivacyCallback(plan, tmp_path / "ledger")
        run = trainer(callback, max_steps=steps)
        run.fit(module, DataLoader(TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))), ckpt_path=resume)
        run.save_checkpoint(tmp_path / "checkpoint")
        return callback

    before = fit(3)
    after = fit(6, resume=tmp_path / "checkpoint")
    history = after.estimates.history["clip_norm/all"]
    assert [t for t, _, _ in history] == [1, 2, 3, 4, 5, 6]
    assert history[3][1] == pytest.approx(before.adaptive_state.multipliers[0], rel=1e-12)
    assert [query.S for query, _ in (r.queries for r in read_ledger(tmp_path / "ledger").rounds)] == [
        S for _, S, _ in history
    ]


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
        plan_of(nn.Linear(3, 2), n=N, q=Q, steps=1, noise_multiplier=1.0, **options)
