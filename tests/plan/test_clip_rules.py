"""Clip rules: what they say, one record at a time; and that no record contributes more than S, whatever they say."""

import math
from dataclasses import dataclass, field, make_dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import plan_of
from reference import engine_of, factor, relative_error, sums_apart, sums_of
from torch import nn

from dpexp.accounting.coverage import SENSITIVITY
from dpexp.accounting.releases import releases
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.layer_gradients import DenseGradient, OuterProductGradient
from dpexp.privacy.gradients.norms import LARGEST, UNIT, norms
from dpexp.privacy.mechanism import GroupMechanism, clip_factors
from dpexp.privacy.plan import clipping, groups
from dpexp.privacy.plan.clipping import Abadi, Automatic, Global, Psac, unbounded_clip_factors


def rule(name, call):
    """A rule: a frozen dataclass with a name, which is called with a norm x and S."""
    return make_dataclass(name, [("name", str, name)], namespace={"__call__": call}, frozen=True)()


def saying(number):
    """A rule that always says the same."""
    return rule(f"says {number}", lambda self, x, S: torch.full_like(x, number))


def number(S):
    return torch.tensor(S, dtype=torch.float64)


RULES = [Abadi(), Automatic(), Psac(), Global(1.0)]
WRONG = [saying(number) for number in (1e30, math.inf, math.nan, -1.0, 1.0)]
EXTREME = [Automatic(1e-300), Psac(1e-300), Psac(1e300), Global(1e-300), Global(1e300)]
JOINT = clipping.Joint(clipping.FixedClipNorm([0.1, 0.3]))
named = pytest.mark.parametrize("clip", RULES, ids=lambda clip: clip.name)


def squares(module, one):
    return module(one).square().sum()


def own_plan(module, **choices):
    return plan_of(module, **{"n": 20, "q": 0.3, "steps": 1, "noise_multiplier": 1.0} | choices)


# What the rules say


def test_the_papers_formulas():
    x = torch.tensor([0.0, 0.25, 1.0, 4.0, math.inf], dtype=torch.float64)
    for clip, found in {
        Abadi(): [1, 1, 1, 0.5, 0],
        Automatic(): [200, 2 / 0.26, 2 / 1.01, 2 / 4.01, 0],
        Psac(): [2, 2 / (0.25 + 0.1 / 0.35), 2 / (1 + 0.1 / 1.1), 2 / (4 + 0.1 / 4.1), 0],
        Global(1.5): [2 / 3, 2 / 3, 2 / 3, 0, 0],
        Global(0.25): [4, 4, 0, 0, 0],
    }.items():
        assert unbounded_clip_factors(clip, x, number(2.0)).tolist() == pytest.approx(found), clip
        assert [factor(clip, float(norm), 2.0) for norm in x[:-1]] == pytest.approx(found[:-1]), clip


@given(st.floats(1e-3, 0.99))
def test_psac_is_largest_inside_where_automatic_is_at_zero(r):
    x = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    assert abs(x[unbounded_clip_factors(Psac(r), x, number(1.0)).argmax()] - (math.sqrt(r) - r)) < 2e-4
    assert unbounded_clip_factors(Automatic(r), x, number(1.0)).argmax() == 0


@named
@pytest.mark.parametrize("mechanism, grouping", [(JOINT, groups.flat()), (None, groups.per_layer())])
def test_sums_are_those_of_one_record_at_a_time(clip, mechanism, grouping):
    """Of records whose norms are on both sides of S."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    x = torch.randn(6, 4, dtype=torch.float64) * torch.logspace(-2, 1, 6)[:, None]
    engine = engine_of(module, mechanism=mechanism, group=grouping, clip_rule=clip)
    sums, (observed,) = sums_of(engine, squares, x), engine.observations
    for group in engine.plan.groups:
        norms = observed[f"norm/{group.name}"]
        assert (norms < group.S).any() and (norms > group.S).any()
    assert relative_error(sums, sums_apart(engine, squares, x)) < 1e-9


# No record contributes more than S

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(
    [0.0, 5e-324, 2.0**-149, 1e-45, 1e-30, 1e30, 2.0**90, 1.2e27, 3e38, 1e300, math.inf, math.nan, -math.inf]
)


@pytest.mark.parametrize("clip", RULES + WRONG + EXTREME, ids=repr)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(NUMBERS, min_size=1, max_size=6), st.sampled_from([1e-6, 0.3, 1.0, 1 / 3, 7e4, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
@example([5e-324], 0.3, torch.float32)
@example([5e-324], 0.3, torch.float64)
@example([1.0], 1.0, torch.float32)
@example([1.0], 1.0, torch.float64)
def test_no_vector_contributes_more_than_s(clip, numbers, S, dtype):
    """As computed, to the last bit; and what is not finite contributes zero."""
    v = torch.tensor([numbers], dtype=torch.float64).to(dtype)
    use = DenseGradient(v.clone())
    found = use.squared_norms().sqrt()
    c = clip_factors(clip, found, number(S), dtype)
    total = torch.zeros(len(numbers), dtype=dtype)
    if found.isfinite().all():  # else the engine replaces the record
        total = use.weighted_sum(c)
    assert found.isfinite().all() or c.item() == 0
    assert total.isfinite().all()
    square = sum(Fraction(number) ** 2 for number in total.tolist())
    # A coordinate that falls among the subnormals may be rounded up by half the smallest number.
    tiny = len(numbers) ** 0.5 * torch.finfo(dtype).smallest_normal * UNIT[dtype]
    assert square <= Fraction(S) ** 2 * (1 + Fraction(tiny) / Fraction(S)) ** 2
    if not v.isfinite().all():
        assert not total.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.floats(1e-9, 1e9), st.floats(1e-6, 1e6))
def test_what_rounds_after_a_factor_is_computed_is_taken_from_s(dtype, x, S):
    """c·g and c·g·x may each be larger by u."""
    (c,) = clip_factors(saying(math.inf), torch.tensor([x], dtype=torch.float64), number(S), dtype).tolist()
    assert Fraction(c) * Fraction(x) * (1 + Fraction(UNIT[dtype])) ** 2 <= Fraction(S)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rules_are_bounded_by_no_more_than_rounding(clip, dtype):
    """What is added is c, but for 1e-6 of it."""
    x = torch.logspace(-8, 8, 400, dtype=torch.float64)
    expected = [factor(clip, float(norm), 0.7) for norm in x]
    found = clip_factors(clip, x, number(0.7), dtype).double().tolist()
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_short_vector_of_large_factors_does_not_overflow():
    """c is above 1, and x is so large that c·x could be infinite, though c ‖v‖ is small."""
    x, g = torch.full((1, 1, 2), 2.0**89), torch.full((1, 1, 3), 2.0**-135)
    for clip in (Global(1e-12), Automatic(1e-12), saying(1e38)):
        use = OuterProductGradient(x, g)
        total = use.weighted_sum(clip_factors(clip, use.squared_norms().sqrt(), number(1.0), torch.float32))
        assert total.isfinite().all() and 0 < total.norm() <= 1
    assert LARGEST[torch.float32] == 2.0**90


def test_a_record_longer_than_z_by_its_norms_margin_is_dropped():
    """Norms are at least the true ones, so that a rule may drop what is as long as Z, but keeps nothing longer."""
    S, clip = 0.5, Global(3.0)
    v = torch.tensor([[1.5], [1.5 * (1 + 2.0**-50)], [1.5 * (1 - 2.0**-50)]], dtype=torch.float64)
    assert (clip_factors(clip, norms(v), number(S), torch.float64) > 0).tolist() == [False, False, True]


@dataclass(frozen=True)
class Remembering:
    """Clips to the longest norm so far."""

    name: str = "remembering"
    seen: dict = field(default_factory=dict, hash=False, compare=False)

    def __call__(self, x, S):
        self.seen["longest"] = torch.maximum(x, self.seen.get("longest", x)).max()
        return S / self.seen["longest"]


def test_a_rule_sees_one_norm_at_a_time_and_remembers_none():
    rule, norms = Remembering(), torch.tensor([1.0, 2.0, 1e6], dtype=torch.float64)
    for scale in (1e6, 1.0):
        found = unbounded_clip_factors(rule, scale * norms, number(1.0))
        assert found.tolist() == pytest.approx((1 / scale / norms).tolist()) and not rule.seen


# The plan


@named
def test_a_rule_changes_nothing_that_is_accounted(clip):
    module = nn.Linear(4, 3)
    plans = [own_plan(module, clip_rule=rule, group=groups.per_layer(), steps=5) for rule in (clip, None)]
    assert plans[0].ledger() == plans[1].ledger()
    assert (plans[0].clip_rules == "") is (clip == Abadi()) and plans[1].clip_rules == ""


def test_z_goes_with_s():
    """From group to group, and from round to round."""
    plan = own_plan(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), clip_rule=Global(2.0), group=groups.per_layer(),
        clip_norm=clipping.FixedClipNorm({"0": 1.0, "1": 10.0}), steps=2, schedules={"S": [1.0, 0.1]},
    )  # fmt: skip
    x = torch.tensor([0.15, 1.5, 15.0], dtype=torch.float64)
    kept = [
        clip_factors(group.clip_rule, x, number(group.S), torch.float64).bool().tolist()
        for t in (0, 1)
        for group in plan.at_round(t).groups
    ]
    assert kept == [[True, True, False], [True, True, True], [True, False, False], [True, True, False]]


@pytest.mark.parametrize("make, value", [(Automatic, -1.0), (Psac, math.nan), (Global, "large")])
def test_bad_values_are_refused(make, value):
    with pytest.raises(ConfigError, match=r"\((gamma|r|threshold)=.*\) must be a finite number above 0"):
        make(value)


def test_a_rule_that_writes_to_its_norm_is_bounded_all_the_same():
    norms = torch.tensor([1e-3, 1.0, 1e6], dtype=torch.float64)
    c = clip_factors(rule("writing", lambda self, x, S: x.mul_(0) + 1e6), norms, number(0.01), torch.float64)
    assert norms.tolist() == [1e-3, 1.0, 1e6] and (c * norms <= 0.01).all()


NO_RULE = "is no clip rule; give a frozen dataclass with a name"
THAWED = make_dataclass("Thawed", [("name", str, "thawed")], namespace={"__call__": max})  # which training could change


@pytest.mark.parametrize(
    "given, said",
    [
        *((one, NO_RULE) for one in (lambda x, S: S / x, Abadi, THAWED(), clipping.FixedClipNorm(1.0))),
        (rule("asking", lambda self, x, S: 1.0 if x <= S else S / x), "must accept a norm"),
        (rule("answering", lambda self, x, S: torch.stack([x, x])), "one real number"),
    ],
)
def test_what_is_no_rule_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        own_plan(nn.Linear(2, 2), clip_rule=given)


@named
def test_the_last_digits_of_a_norm_decide_over_little(clip):
    """They vary with how many records are processed together, for all of them at once."""
    x = torch.cat([torch.logspace(-3, 3, 20001, dtype=torch.float64), torch.linspace(0.4, 0.6, 20001).double()])
    found, moved = (unbounded_clip_factors(clip, x * f, number(0.5)) for f in (1.0, 1 + 1e-7))
    assert float(((moved - found).abs() * x).max()) < 1e-4 * 0.5


@pytest.mark.parametrize("adjacency, changed", [("add_remove", []), ("replace_null", [0.0]), ("replace_one", [-9.0])])
def test_a_sum_moves_by_its_sensitivity_and_that_is_what_is_accounted(adjacency, changed):
    """σ̃ over it is the z of a round in which all are sampled."""
    module, moved = nn.Linear(1, 1, bias=False), SENSITIVITY[adjacency]
    plan = own_plan(module, n=2, q=1.0, sampling="full_batch", noise_multiplier=1.5, adjacency=adjacency)
    (group,), mechanism = plan.groups, GroupMechanism(plan.groups[0])

    def total(gradients):
        found = mechanism.norms({"weight": DenseGradient(torch.tensor(gradients)[:, None])})
        return float(mechanism.sums(found, number(group.S), {"weight": torch.empty(1, 1)})["weight"])

    assert abs(total([9.0, 5.0]) - total([*changed, 5.0])) == pytest.approx(group.S * moved, rel=1e-6)
    (release,) = releases(plan.ledger())
    assert release.z == pytest.approx(group.sigma / (group.S * moved))
