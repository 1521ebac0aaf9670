"""Where joint clipping is separate clipping, the plan says so, and only there."""

import pytest

import dpexp
from dpexp.commands.train import joint_note

QUICK = ("privacy.epsilon=null", "privacy.noise_multiplier=2", "sampling.steps=5")


def told(*overrides):
    cfg = dpexp.compose("mechanism=joint", *QUICK, *overrides)
    plan = dpexp.plan(cfg)
    return joint_note(cfg, plan), plan


@pytest.mark.parametrize(
    "overrides, differs",
    [
        (("group=conv_fc",), "clip_norm=dimension or clip_norm=adaptive"),
        (("group=flat", "allocation=min_variance", "clip_norm.total=3"), "clip_norm=dimension or clip_norm=adaptive"),
        (("group=per_layer", "clip_norm=dimension", "allocation=dimension_adjusted"), "each group is one vector"),
        (("group=per_layer", "clip_norm=adaptive"), "each group is one vector"),
        (
            ("group=flat", "clip_rule=automatic", "mechanism.alpha=1", "clip_norm=fixed", "clip_norm.value=2"),
            "mechanism.alpha",
        ),
    ],
)
def test_it_is_said_where_bounds_and_noise_are_equal(overrides, differs):
    said, plan = told(*overrides)
    assert said.startswith("mechanism=joint equals mechanism=separate here") and differs in said
    separate = dpexp.plan(dpexp.compose("mechanism=separate", *QUICK, *[o for o in overrides if "mech" not in o]))
    for joint, other in zip(plan.groups, separate.groups, strict=True):
        for alpha in joint.alphas:
            assert alpha * joint.S == pytest.approx(other.S, rel=1e-9)
            assert alpha * joint.sigma == pytest.approx(other.sigma, rel=1e-9)


@pytest.mark.parametrize(
    "overrides",
    [
        ("group=conv_fc", "clip_norm=dimension"),
        ("group=conv_fc", "clip_norm=adaptive"),
        ("group=conv_fc", "clip_norm=fixed"),  # √2 of what separate would clip to
        ("group=conv_fc", "clip_rule=automatic"),  # γ is a length
        ("group=conv_fc", "mechanism.clip_norm=1"),
    ],
)
def test_and_not_elsewhere(overrides):
    assert told(*overrides)[0] == ""
