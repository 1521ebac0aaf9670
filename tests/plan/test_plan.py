"""Groups, bounds, mechanisms, allocations: the paper's formulas and worked numbers."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of
from torch import nn

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.sampling import Poisson
from dpexp.errors import ConfigError
from dpexp.privacy.plan.allocation import DimensionAdjusted, Explicit, MinVariance, Proportional, Weighted
from dpexp.privacy.plan.clipping import (
    DimensionClipNorm,
    FixedClipNorm,
    GroupClipping,
    Joint,
    Separate,
    UniformClipNorm,
)
from dpexp.privacy.plan.groups import Groups, Match, Vector, conv_fc, flat, per_layer


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def plan(module=None, **choices):
    defaults = {"n": 1000, "q": 0.1, "steps": 10, "noise_multiplier": 1.5}
    return plan_of(module or cnn(), **defaults | choices)


# Groups and vectors

DEEP = nn.ModuleDict(
    {"head": nn.Linear(2, 2), "body": nn.ModuleDict({"head": nn.Linear(2, 2)}), "ahead": nn.Linear(2, 2)}
)
LATE = {"parameters": ["3.*", "5.*"]}


@pytest.mark.parametrize(
    "group, module, expected",
    [
        (flat(), None, {"all": ["0", "1", "3", "5"]}),
        (per_layer(), None, {name: [name] for name in "0135"}),
        (conv_fc(), None, {"conv": ["0"], "fc": ["3", "5"], "rest": ["1"]}),
        (Groups({"late": LATE, "early": {"rest": True}}), None, {"late": ["3", "5"], "early": ["0", "1"]}),
        # a glob below anything takes what is at the top, too
        (Groups({"head": Match(parameters=["*.head.*"]), "rest": Match(rest=True)}), DEEP,
         {"head": ["head", "body.head"], "rest": ["ahead"]}),
    ],
)  # fmt: skip
def test_groups_take_parameters_by_glob_and_type(group, module, expected):
    assert {group.name: [v.name for v in group.vectors] for group in plan(module, group=group).groups} == expected


def test_a_vector_is_a_layer_or_a_parameter():
    (by_layer,), (by_parameter,) = plan().groups, plan(vectors="parameter").groups
    assert [v.d for v in by_layer.vectors] == [20, 4, 365, 18]
    assert [v.name for v in by_parameter.vectors][:2] == ["0.weight", "0.bias"]
    assert by_layer.d == by_parameter.d == 407


def test_frozen_parameters_are_not_released_and_tied_ones_once():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module[1].bias.requires_grad_(False)
    (group,) = plan(module).groups
    assert [v.parameters for v in group.vectors] == [("0.weight", "0.bias")] and group.d == 20


# Bounds

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@given(sizes=SIZES, total=st.floats(1e-3, 1e3))
def test_uniform_and_dimension_bounds_add_up_to_the_total(sizes, total):
    """With the paper's misprint S*/√(d/D) they would not."""
    groups = [f"g{i}" for i in range(len(sizes))]
    for bound in (UniformClipNorm(total), DimensionClipNorm(total)):
        assert math.sqrt(sum(S**2 for S in bound(groups, sizes))) == pytest.approx(total, rel=1e-12)


BOUNDS = FixedClipNorm({"conv": 1.0, "fc": 2.0, "rest": 3.0})


@pytest.mark.parametrize(
    "choices, S",
    [
        ({"group": conv_fc(), "clip_norm": FixedClipNorm(0.3)}, [0.3] * 3),
        ({"group": conv_fc(), "clip_norm": BOUNDS}, [1, 2, 3]),
        ({"mechanism": Joint()}, [2.0]),  # of four vectors: √K is the most that a bound may be
        ({"mechanism": Joint(UniformClipNorm(1.0)), "clip_norm": FixedClipNorm(2.0)}, [2.0]),
    ],
)
def test_bounds(choices, S):
    assert [group.S for group in plan(**choices).groups] == S


@pytest.mark.parametrize(
    "bound, alphas",
    [
        (FixedClipNorm(0.5), [0.5] * 4), (FixedClipNorm([1, 2, 3, 4]), [1, 2, 3, 4]),
        (DimensionClipNorm(2.0), [2 * math.sqrt(d / 407) for d in (20, 4, 365, 18)]),
    ],
)  # fmt: skip
def test_joint_scales_come_from_a_number_a_list_or_the_bound(bound, alphas):
    assert [*plan(mechanism=Joint(bound)).groups[0].alphas] == pytest.approx(alphas, rel=1e-12)


# Mechanisms


def test_section_2s_example():
    """v_1, v_2 with norms up to 1 and 100, tolerable noise 0.01 and 1, one of them always zero: joint clipping
    reaches z = 0.01·qn, separate clipping at the same noise 0.00707·qn."""
    qn = 100
    common = {"module": nn.ModuleList([nn.Linear(3, 1), nn.Linear(2, 1)]), "steps": 1, "noise_multiplier": None}
    joint = plan(
        mechanism=Joint(FixedClipNorm([1.0, 100.0])), clip_norm=FixedClipNorm(1.0),
        allocation=Explicit({"all": 0.01 * qn}), **common,
    )  # fmt: skip
    assert joint.noise_multiplier == pytest.approx(0.01 * qn, rel=1e-12)
    (group,) = joint.groups
    assert [alpha * group.sigma / qn for alpha in group.alphas] == pytest.approx([0.01, 1.0])
    separate = plan(
        group=per_layer(), clip_norm=FixedClipNorm({"0": 1.0, "1": 100.0}),
        allocation=Explicit({"0": 0.01 * qn, "1": 1.0 * qn}), **common,
    )  # fmt: skip
    assert separate.noise_multiplier == pytest.approx(0.01 / math.sqrt(2) * qn, rel=1e-12)
    assert separate.noise_multiplier / qn == pytest.approx(0.00707, abs=1e-5)


# Allocation

ALLOCATIONS = {
    "proportional": Proportional(),
    "dimension_adjusted": DimensionAdjusted(),
    "min_variance": MinVariance(),
    "weighted": Weighted({"a": 0.2, "b": 0.5, "c": 0.3}),
}


@pytest.mark.parametrize("allocation", ALLOCATIONS.values(), ids=ALLOCATIONS)
@given(
    sizes=st.tuples(*[st.integers(1, 10**6)] * 3), bounds=st.tuples(*[st.floats(1e-3, 1e3)] * 3), z=st.floats(1e-2, 1e3)
)
def test_every_allocation_reaches_exactly_the_z_it_was_given(allocation, sizes, bounds, z):
    grouped = {name: (Vector(name, (name,), d),) for name, d in zip("abc", sizes, strict=True)}
    clipping = {name: GroupClipping((1.0,), S) for name, S in zip("abc", bounds, strict=True)}
    shares = allocation.shares(grouped, clipping)
    assert sum(shares.values()) == pytest.approx(1, rel=1e-12)
    sigmas = {name: z * clipping[name].S / math.sqrt(w) for name, w in shares.items()}
    assert sum((clipping[n].S / sigmas[n]) ** 2 for n in shares) == pytest.approx(z**-2, rel=1e-9)


@pytest.mark.parametrize("allocation, of", [(None, lambda d: 3), (DimensionAdjusted(), lambda d: 407 / d)])
def test_the_papers_two_allocations(allocation, of):
    """Section 4: σ̃_g = z √G S_g and σ̃_g = z √(D/d_g) S_g."""
    for group in plan(group=conv_fc(), clip_norm=BOUNDS, allocation=allocation).groups:
        assert group.sigma == pytest.approx(1.5 * math.sqrt(of(group.d)) * group.S)


@pytest.mark.parametrize("mechanism", [Separate(), Joint(FixedClipNorm([0.5, 2.0, 1.0, 3.0]))])
def test_min_variance_has_the_least_noise(mechanism):
    def variance(allocation):
        groups = plan(group=conv_fc(), clip_norm=FixedClipNorm(0.7), mechanism=mechanism, allocation=allocation).groups
        return sum(g.sigma**2 * sum(a**2 * v.d for a, v in zip(g.alphas, g.vectors, strict=True)) for g in groups)

    least = variance(MinVariance())
    for weights in np.random.default_rng(0).dirichlet([1, 1, 1], 50).tolist():
        assert variance(Weighted(dict(zip(("conv", "fc", "rest"), weights, strict=True)))) >= least * (1 - 1e-12)
    assert variance(Proportional()) > least


# The whole plan

TARGET = {"epsilon": 0.5, "delta": 1e-5}


@pytest.mark.parametrize("knob", ["sampling_rate", "sampling_rate_at_fixed_noise", "steps", "clip_norm"])
def test_other_knobs_are_solved_from_the_noise_given(knob):
    common = {"group": conv_fc(), "noise_multiplier": 3.0, "clip_norm": FixedClipNorm(0.5)}
    asked, made = plan(**common), plan(**common, **TARGET, calibrate=knob)
    cost = epsilon(made.ledger(), 1e-5)
    assert cost <= 0.5 and (cost >= 0.5 * (1 - 1e-3) or knob == "steps")
    assert made.calibration.value != 1 and made.calibration.cost == pytest.approx(cost, rel=1e-12)
    qn_asked, qn = (p.sampling.q * p.n if knob == "sampling_rate" else 1 for p in (asked, made))
    held = [group.sigma / qn_asked for group in asked.groups]
    assert [group.sigma / qn for group in made.groups] == pytest.approx(held, rel=1e-12), (
        "the paper's §4 holds the averages' noise"
    )
    assert (made.rounds != asked.rounds) == (knob == "steps")
    assert (made.sampling.q != asked.sampling.q) == knob.startswith("sampling_rate")
    assert (made.groups[0].S != asked.groups[0].S) == (knob == "clip_norm")


def test_explicit_noise_may_be_the_start_for_another_knob():
    made = plan(allocation=Explicit({"all": 3.0}), noise_multiplier=None, **TARGET, calibrate="steps")
    assert made.groups[0].sigma == 3.0 and epsilon(made.ledger(), 1e-5) <= 0.5


def test_rounds_from_epochs_lose_no_step():
    """Trap 4: int(1/q) steps an epoch would lose one for 312 of these lengths."""
    lost = [n for n in range(1, 5000) if int(1 / (1 / n)) != n]
    assert len(lost) == 312 and lost[:3] == [93, 99, 105]
    for n in (*range(1, 5), *lost, 4999):
        assert [Poisson(sampling_rate=1 / n).rounds(epochs) for epochs in (1, 3)] == [n, 3 * n]
    assert Poisson(sampling_rate=512 / 1437).rounds(40) == math.ceil(40 * 1437 / 512) == 113
    assert Poisson(sampling_rate=1 / 3).rounds(0.5) == 2


JOINT = {"mechanism": Joint(UniformClipNorm(1))}
SOLVED = {"noise_multiplier": None}
BY_TYPE = {"norms": Match(layers=["GroupNorm"]), "rest": Match(rest=True)}


@pytest.mark.parametrize(
    "choices, message",
    [
        *((JOINT | {"clip_norm": FixedClipNorm(S)}, r"clip_norm") for S in (2.0001, 0.0, -1.0)),
        (JOINT | {"group": conv_fc(), "clip_norm": FixedClipNorm([1.1, 1.0, 1.0])}, r"clip_norm=1.1 of group conv"),
        ({"mechanism": Joint(FixedClipNorm([1, 2]))}, "alpha.value lists 2 numbers for 4"),
        ({"mechanism": Joint(FixedClipNorm([1, -2, 3, 4]))}, r"alpha\.value\[1\]=-2"),
        ({"mechanism": Joint(FixedClipNorm(0.0))}, r"alpha\.value=0"),
        ({"clip_norm": FixedClipNorm({1: 2.0})}, "clip_norm.value names the groups 1; the model has all"),
        ({"clip_norm": FixedClipNorm(math.inf)}, "clip_norm.value=inf"),
        *(({"group": conv_fc(), "allocation": Weighted(weights)}, message) for weights, message in [
            (dict.fromkeys(("conv", "fc", "rest"), 0.3), r"add up to 0\.9; they must add up to 1"),
            ({"conv": 1.0}, "names the groups conv"),
        ]),
        ({"allocation": Weighted([1, 2])}, r"allocation.weights=\[1, 2\] must be {group: number} .*: all"),
        ({"allocation": Explicit({"all": 1.0})}, "allocation=explicit fixes the noise"),
        *((SOLVED | {"allocation": Explicit(sigma)} | choices, message) for sigma, choices, message in [
            ({"all": 1.0}, {"calibrate": "steps"}, "calibrate=steps solves for a target, and none is given"),
            ([1.0, 2.0], {}, r"allocation.sigma lists 2 numbers for 1: all"),
            ({1: 2}, {}, "allocation.sigma names the groups 1; the model"),
        ]),
        *(({"group": Groups(groups)}, message) for groups, message in [
            ({"biases": Match(parameters=["*.bias"])} | BY_TYPE, r"parameter 1\.bias falls in both biases and norms"),
            ({"late": LATE, "early": {"layers": ["Module"]}}, "falls in both"),
            ({"fc": Match(layers=["Linear"])}, r"parameter 0\.weight falls in no group"),
            ({"rnn": Match(layers=["LSTM"]), "rest": Match(rest=True)}, r"rnn .*matches none"),
            (["a"], r"group.groups=\['a'\] must be {name: {parameters:"),
            ({"a": 3}, r"group.groups.a=3 must be {parameters:"),
            ({"a": {"parameter": "*"}}, r"group.groups.a={'parameter': '\*'} must be {parameters:"),
        ]),
        ({"q": "0.2"}, r"Poisson\(sampling_rate='0.2'\) must lie in"),
        ({"q": None, "expected_batch_size": 2000}, "exceeds data.n=1000"),
        ({"n": 0}, r"data\.n=0"),
        ({"sampling": "shuffle", "adjacency": "add_remove"}, "choose adjacency=replace_one or replace_null"),
        ({"schedules": {"z": [1.0]}}, r"schedule\.z lists 1 numbers for 10 rounds"),
        ({"schedules": {"q": {"linear": [1, 100]}}}, r"sampling\.sampling_rate=.* must lie in"),
        ({"sampling": "shuffle", "schedules": {"q": {"step": {0: 1, 2: 0.5}}}}, "q cannot vary"),
        (SOLVED | {"epsilon": 1.0}, "privacy.delta must be given"),
        (SOLVED | TARGET | {"adjacency": "replace_one", "accountant": "rdp"}, "choose accountant=pld"),
        ({"calibrate": "lr"}, "calibrate=lr is unknown; choose one of noise_multiplier, sampling_rate"),
        (SOLVED | {"calibrate": "sampling_rate", "epsilon": 1.0}, "give both"),
        (TARGET | {"calibrate": "sampling_rate", "sampling": "shuffle"}, "choose sampling=poisson"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(choices, message):
    with pytest.raises(ConfigError, match=message):
        plan(**choices)


@pytest.mark.parametrize(
    "layer, message",
    [
        (nn.BatchNorm2d(2), r"layer 1 \(BatchNorm2d\) mixes .* use GroupNorm"),
        (nn.SyncBatchNorm(2), r"layer 1 \(SyncBatchNorm\)"),
        (nn.InstanceNorm2d(2, track_running_stats=True), "track_running_stats=False"),
        (nn.LazyLinear(3), "no sizes yet"),
    ],
)
def test_layers_that_mix_records_are_refused_by_name(layer, message):
    """Trap 10."""
    with pytest.raises(ConfigError, match=message):
        plan(nn.Sequential(nn.Conv2d(1, 2, 3), layer))


def test_a_frozen_batchnorm_is_fine():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())
    assert plan(module).groups[0].d == 12


def test_what_is_left_of_a_plan_are_its_last_rounds():
    made = plan_of(
        nn.Linear(3, 1), n=100, q=0.1, steps=25, noise_multiplier=1.0, schedules={"z": {"step": {0: 2.0, 10: 1.0}}}
    )
    for since in (0, 4, 10, 24, 25):
        left = {round(round_.z("add_remove"), 9): count for round_, count in made.ledger(since).rounds.items()}
        assert left == Counter(([2.0] * 10 + [1.0] * 15)[since:])


def test_a_plan_is_shown_in_a_few_short_lines():
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    plan = plan_of(module, n=300, q=0.1, steps=6, epsilon=2.0, delta=1e-5, group=per_layer())
    first, *others = repr(plan).split("\n")
    assert first.startswith("PrivacyPlan: 6 rounds of Poisson(q=0.1), n = 300, z = 1.") and first.endswith("groups: 20")
    assert others[0].startswith("  0: 6 numbers, S = 0.2236, σ̃ = ") and len(others) == 8
    assert max(map(len, (first, *others))) < 100
