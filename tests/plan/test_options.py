"""The objects of a plan, by the public interface."""

import math
from dataclasses import dataclass

import pytest
from torch import nn

import dpexp
from dpexp.accounting.ledger import write_ledger
from dpexp.accounting.sampling import Release, SamplingEvent, Shuffle
from dpexp.errors import between, made_from

SAMPLING = dpexp.Poisson(sampling_rate=0.1, steps=10)


class InOrder(Shuffle):
    """Batches in the order of the data, which cost what shuffled ones do."""

    def draw(self, size, stream):
        batch = round(self.q * size)
        return [list(range(k * batch, (k + 1) * batch)) for k in range(self.rounds_per_epoch)]


class Every(dpexp.Poisson):
    """All records in each round, which it says itself: Poisson's name would give it Poisson's amplification."""

    def draw(self, size, stream):
        return [list(range(size))]

    @classmethod
    def releases(cls, rounds, adjacency):
        for _, z, count, _ in rounds:
            yield Release(z), count


@dataclass(frozen=True, kw_only=True)
class Own(dpexp.Poisson):
    """A policy of one's own with a field, which is not decorated."""

    extra: int = 0


def test_a_plan_is_made_from_its_objects():
    plan = dpexp.make_plan(
        nn.Linear(3, 2), n=1000, sampling=dpexp.Poisson(expected_batch_size=100, epochs=1.5),
        target=dpexp.Target(epsilon=2.0, delta=1e-5), clipping=dpexp.Clipping(vectors="parameter"),
        noise=dpexp.Gaussian(), schedules=dpexp.Schedules(z={"step": {0: 1.0, 5: 2.0}}),
    )  # fmt: skip
    (group,) = plan.groups
    assert (plan.sampling.q, plan.rounds, len(group.vectors), group.S) == (0.1, 15, 2, 1.0)
    assert 1.99 < dpexp.epsilon(plan.ledger(), 1e-5) <= 2.0
    assert plan.at_round(5).groups[0].sigma == 2 * group.sigma


def test_a_policy_of_ones_own_is_accounted_as_the_one_that_it_is_derived_from():
    sampling = InOrder(sampling_rate=0.25, epochs=2)
    plan = dpexp.make_plan(nn.Linear(3, 2), n=8, sampling=sampling, target=dpexp.Target(noise_multiplier=1.0))
    assert type(plan.sampling) is InOrder and plan.rounds == 8 and plan.adjacency == "replace_one"
    assert plan.sampling.draw(8, None) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {type(round_.sampling.policy) for round_ in plan.ledger().rounds} == {Shuffle}


def test_a_policy_that_says_what_its_rounds_cost_is_accounted_by_that(tmp_path):
    costs = {}
    for kind in (Every, dpexp.FullBatch):
        given = {"sampling_rate": 0.01} if kind is Every else {}
        plan = dpexp.make_plan(
            nn.Linear(3, 2), n=1000, sampling=kind(steps=100, **given), target=dpexp.Target(noise_multiplier=2.0)
        )
        write_ledger(tmp_path / f"{kind.__name__}.jsonl", plan.ledger())
        ledger = dpexp.read_ledger(tmp_path / f"{kind.__name__}.jsonl")
        costs[kind] = dpexp.epsilon(plan.ledger(), 1e-5), dpexp.epsilon(ledger, 1e-5)
        assert {type(round_.sampling.policy) for round_ in ledger.rounds} == {kind}
    assert costs[Every] == costs[dpexp.FullBatch] and costs[Every][0] > 30
    for name in ("covers", "releases", "written", "drawn_with", "rounds_apart"):
        own = type("Mine", (dpexp.Poisson,), {name: getattr(dpexp.Poisson, name), "__module__": __name__})
        assert own.name == f"{__name__}.Mine"
    assert type("Mine", (dpexp.Poisson,), {"draw": None}).name == "poisson"


@pytest.mark.parametrize("q", [3.0, 0.0, -0.5, math.nan, math.inf, 10**400])
def test_a_rate_of_ones_own_policy_is_a_rate(q):
    policy = type("Odd", (Every,), {"q": q})(sampling_rate=0.5, steps=1)
    with pytest.raises(dpexp.ConfigError, match=r"the rate q=.* must lie in \(0, 1\]"):
        SamplingEvent(policy, 10)


@pytest.mark.parametrize(
    "make, options, message",
    [
        (dpexp.Poisson, {"sampling_rate": 1.5, "steps": 1}, r"^Poisson\(sampling_rate=1\.5\) must lie in \(0, 1\]\.$"),
        (dpexp.Poisson, {"expected_batch_size": 0, "steps": 1}, r"\(expected_batch_size=0\) must be a finite"),
        (dpexp.Poisson, {"sampling_rate": 0.1, "epochs": math.inf}, r"^Poisson\(epochs=inf\) must be"),
        (dpexp.Poisson, {"sampling_rate": 0.1, "steps": 0}, r"^Poisson\(steps=0\) must be an integer of at least 1\.$"),
        (dpexp.CyclicPoisson, {"sampling_rate": 0.1, "steps": 1, "partitions": 0}, r"\(partitions=0\) must be"),
        (dpexp.Sampling, {"expected_batch_size": 256, "epochs": 10},
         r"^Sampling\(expected_batch_size=256, epochs=10\) is Poisson\(expected_batch_size=256, epochs=10\) now"),
        (dpexp.Sampling, {"policy": "random_allocation", "steps": 3}, r"is RandomAllocation\(steps=3\) now"),
        (dpexp.Noise, {"kind": "banded", "bands": 4}, r"^Noise\(bands=4\) is Banded\(bands=4\) now, from dpexp import"),
        (dpexp.Target, {"epsilon": -1}, r"^Target\(epsilon=-1\) must be"),
        (dpexp.Target, {"noise_multiplier": 0}, r"^Target\(noise_multiplier=0\) must be"),
        (dpexp.Target, {"epsilon": 1, "delta": 2}, r"privacy\.delta=2"),
        (dpexp.Target, {"max_advantage": 2}, r"^Target\(max_advantage=2\) must lie in \(0, 1\): it is"),
        (dpexp.Target, {"max_tpr_at_fpr": {}}, "such as {0.01: 0.05}"),
        (dpexp.Target, {"max_tpr_at_fpr": {"a": 0.1}}, "must hold numbers"),
        (dpexp.Target, {"max_tpr_at_fpr": {0.01: 0.01}}, r"=\{0\.01: 0\.01\} must be .* 0 < FPR < TPR < 1"),
        (dpexp.Target, {"max_tpr_at_fpr": {2: 0.5}}, r"privacy\.max_tpr_at_fpr"),
        (dpexp.Target, {"epsilon": 1, "max_advantage": 0.1}, r"privacy\.epsilon=1 and .* are 2 targets"),
        (dpexp.Banded, {"bands": 0}, r"^Banded\(bands=0\) must be an integer .* or auto"),
        (dpexp.Banded, {"coefficients": "cubic"}, r"^Banded\(coefficients='cubic'\) .* optimal, sqrt"),
        (dpexp.Banded, {"momentum": 1.0}, r"^Banded\(momentum=1\.0\) must lie in \[0, 1\)"),
        (dpexp.Schedules, {"S": {"cosine": 1}}, r"schedule\.S=.* is not understood"),
        (dpexp.Schedules, {"S": {"linear": [1, "a"]}}, "=a must be a finite number"),
        (dpexp.Schedules, {"S": {"step": {3: 1.0}}}, "from round 0"),
        (dpexp.Schedules, {"z": [1.0, 0.0]}, r"schedule\.z=0\.0 must be"),
        (dpexp.Clipping, {"vectors": "neuron"}, "vectors=neuron is unknown; choose one of layer, parameter"),
        (dpexp.Clipping, {"clip_rule": max}, "clip_rule=.* is no clip rule"),
    ],
)  # fmt: skip
def test_objects_refuse_their_own_values(make, options, message):
    with pytest.raises(dpexp.ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, "1", [1], 0, -1])
@pytest.mark.parametrize(
    "make, name, section",
    [
        (dpexp.Shuffle, "sampling_rate", "sampling"), (dpexp.Shuffle, "weight", "sampling"),
        (dpexp.Poisson, "epochs", "sampling"), (InOrder, "steps", "sampling"), (Own, "epochs", "sampling"),
        (dpexp.TruncatedPoisson, "max_batch_size", "sampling"),
        (dpexp.Target, "epsilon", "privacy"), (dpexp.Microbatch, "size", "privacy_unit"),
        (dpexp.User, "max_examples", "privacy_unit"), (dpexp.LocalTraining, "lr", "privacy_unit.local_training"),
        (dpexp.Global, "threshold", "clip_rule"), (dpexp.UniformClipNorm, "total", "alpha"),
        (dpexp.AdaptiveClipNorm, "budget_share", "clip_norm.by_group.conv"),
        (dpexp.AdaptiveClipNorm, "learning_rate", "alpha"),
    ],
)  # fmt: skip
def test_no_argument_is_out_of_its_range_and_it_is_named_as_it_was_given(make, name, section, value):
    with pytest.raises(dpexp.ConfigError) as in_python:
        make(**{name: value})
    with pytest.raises(dpexp.ConfigError) as in_yaml, made_from(section):
        make(**{name: value})
    assert str(in_python.value).startswith(f"{make.__name__}({name}={value!r}) must ")
    assert str(in_yaml.value).startswith(f"{section}.{name}={value} must ")


def test_none_is_in_the_range_of_what_may_be_left_out_alone():
    assert dpexp.Target(epsilon=None) == dpexp.Target()
    with pytest.raises(dpexp.ConfigError, match=r"Microbatch\(size=None\) must be an integer of at least 1"):
        dpexp.Microbatch(None)


def test_the_ends_of_an_interval_are_in_it_as_written():
    for ends, inside in {"()": [0.5], "(]": [0.5, 1], "[)": [0, 0.5], "[]": [0, 0.5, 1]}.items():
        allowed = between(0, 1, ends)
        assert [value for value in (-1, 0, 0.5, 1, 2) if allowed.has(value)] == inside
        assert allowed.wanted == f"must lie in {ends[0]}0, 1{ends[1]}"


# Those that every user makes, of many arguments
MADE = (
    dpexp.Poisson, dpexp.Target, dpexp.Banded, dpexp.Schedules, dpexp.Clipping, dpexp.Private, dpexp.PrivacyCallback
)  # fmt: skip


@pytest.mark.parametrize(
    "make, given, line",
    [
        *((public, {"unheard_of": 1}, rf"'unheard_of'; write {public.__name__}\(") for public in MADE),
        (dpexp.Poisson, {"batch_size": 256}, r"'batch_size'; write Poisson\(.*, expected_batch_size=…\)"),
        (dpexp.Target, {"target_epsilon": 3.0}, r"write Target\(epsilon=…, .*\), or some of it\.$"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_line_to_write(make, given, line):
    with pytest.raises(TypeError, match=f"unexpected keyword .*{line}"):
        make(**given)


def test_a_missing_argument_is_answered_with_the_line_to_write():
    with pytest.raises(TypeError, match=r"'ledger'; write Private\(model=…, optimizer=…, plan=…, ledger=…, .*\)"):
        dpexp.Private(1, 2, 3)


def test_a_type_error_inside_a_constructor_stays_as_it_is():
    with pytest.raises(TypeError) as raised:
        dpexp.Target(epsilon=1, delta="a")
    assert "write" not in str(raised.value)
