"""A mechanism, clipping norm and clip rule for each group (McMahan, Andrew et al., section 1)."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import plan_of
from reference import engine_of, sums_of
from test_clip_rules import RULES, WRONG
from torch import nn

from dpexp.errors import ConfigError
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.clipping import (
    Abadi,
    Automatic,
    DimensionClipNorm,
    FixedClipNorm,
    Joint,
    Separate,
    UniformClipNorm,
)
from dpexp.privacy.plan.groups import Groups, Match
from dpexp.privacy.private_metrics import UNCLIPPED

GROUP = Groups({"first": Match(parameters=["0.*"]), "last": Match(parameters=["2.*"])})
CLIP_NORMS = [None, FixedClipNorm(0.1), UniformClipNorm(0.3), DimensionClipNorm(1.0), AdaptiveClipNorm(0.2)]
MECHANISMS = [
    Separate(),
    *(Joint(alpha) for alpha in (FixedClipNorm(0.3), DimensionClipNorm(0.5), AdaptiveClipNorm(0.1))),
]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def by_group(options):
    return st.fixed_dictionaries({"first": st.sampled_from(options), "last": st.sampled_from(options)})


def squares(module, one):
    return module(one).square().sum()


RECORDS = st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=5)


# To shrink takes minutes.
@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(by_group(MECHANISMS), by_group(CLIP_NORMS), by_group(RULES + WRONG), RECORDS, st.data())
def test_a_record_moves_each_groups_sum_by_at_most_its_own_s(mechanism, clip_norm, clip_rule, records, data):
    """In every round of a schedule, whatever the record and the rule."""
    adapting = {group for group, norm in clip_norm.items() if isinstance(norm, AdaptiveClipNorm)}
    clip_norm |= {group: None for group in adapting if isinstance(mechanism[group], Joint)}
    adaptive = "AdaptiveClipNorm" in repr((mechanism, clip_norm))
    engine = engine_of(
        model(), group=GROUP, mechanism=mechanism, clip_norm=clip_norm, clip_rule=clip_rule, vectors="parameter",
        rounds=2, schedules=None if adaptive else {"S": [1.0, 0.3]},
    )  # fmt: skip
    x = torch.tensor(records, dtype=torch.float64)
    out = data.draw(st.integers(0, len(x) - 1))
    for t in (0, 1):
        all_records, all_counts = sums_of(engine, squares, x, t=t), engine._sums
        others, other_counts = sums_of(engine, squares, torch.cat([x[:out], x[out + 1 :]]), t=t), engine._sums
        for group in engine.plan.at_round(t).groups:
            if group.name == UNCLIPPED:
                ((counts,),) = (vector.parameters for vector in group.vectors)
                assert float((all_counts[counts] - other_counts[counts]).norm()) <= group.S * (1 + 1e-9)
                continue
            moved = [
                (all_records[name] - others[name]).square().sum() / alpha**2
                for vector, alpha in zip(group.vectors, group.alphas, strict=True)
                for name in vector.parameters
            ]
            assert math.sqrt(sum(moved)) <= group.S * (1 + 1e-9)
            assert group.clip_rule == clip_rule[group.name]


@pytest.mark.parametrize("mechanism", [Separate(), Joint(DimensionClipNorm(0.5)), Joint(AdaptiveClipNorm())])
@pytest.mark.parametrize("clip_norm", [None, UniformClipNorm(0.7), FixedClipNorm([0.3, 0.4])])
def test_one_option_for_all_groups_is_that_option_for_each(mechanism, clip_norm):
    options = {"mechanism": mechanism, "clip_norm": clip_norm, "clip_rule": Automatic()}
    each = {name: dict.fromkeys(("first", "last"), option) for name, option in options.items()}
    common = {"n": 100, "q": 0.1, "steps": 9, "noise_multiplier": 1.0, "group": GROUP}
    assert plan_of(model(), **common, **options) == plan_of(model(), **common, **each)


ROOTS = {"joint": math.sqrt(2), "separate": math.sqrt(0.5)}  # what a group's bound is by default, of two vectors


@pytest.mark.parametrize("first", ROOTS)
@pytest.mark.parametrize("last", ROOTS)
def test_a_groups_default_is_that_of_its_mechanism(first, last):
    own = {"joint": Joint(), "separate": Separate()}
    mechanism = {"first": own[first], "last": own[last]}
    plan = plan_of(
        model(), n=100, q=0.1, steps=9, noise_multiplier=1.0, group=GROUP, mechanism=mechanism, vectors="parameter"
    )
    assert [group.S for group in plan.groups] == pytest.approx([ROOTS[first], ROOTS[last]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mechanism": {"first": Separate(), "last": "joint"}}, "mechanism=joint of the group last is none; give"),
        ({"clip_norm": {"first": None, "last": 0.5}}, "clip_norm=0.5 of the group last is none; give"),
        ({"mechanism": {1: Joint()}}, "mechanism names the groups 1; the model has first, last"),
        ({"mechanism": {"first": Joint()}}, "mechanism names the groups first; the model has first, last"),
        ({"clip_rule": {"first": Abadi(), "other": Abadi()}}, "clip_rule names the groups first, other"),
        ({"clip_rule": {"first": Abadi(), "last": 2}}, "clip_rule=2 is no clip rule"),
        ({"mechanism": Joint(), "clip_norm": UniformClipNorm(1.0)}, "say these as well: alpha=fixed, uniform"),
        ({"mechanism": Joint(0.5)}, "mechanism.alpha=0.5 gives no scales; choose alpha=fixed"),
    ],
)
def test_what_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(model(), n=100, q=0.1, steps=9, noise_multiplier=1.0, group=GROUP, **options)
