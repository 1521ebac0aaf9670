"""noise=discrete_gaussian from configuration to release: sensitivity in whole numbers, training by hand, an attack on
last bits."""

import json
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_of
from scipy.stats import chi2_contingency, kstest
from test_callback import SEED, Data, Model, N, Q, T, dataset, fit, plan_for, trainer
from test_discrete_gaussian import NoFloats
from torch import nn
from torch.nn import functional as F

import dpexp
from dpexp.accounting.ledger import DiscreteSumQueryEvent, LedgerWriter, read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.discrete_gaussian import SIGMA, SIGMA2, DiscreteGaussian, Lattice, lattice, squared_norms
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import clipping, groups
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.policies import Poisson

FLOATS = st.floats(width=64) | st.floats(-10, 10) | st.sampled_from([0.0, 5e-324, 1e308, -1e160, 2.0**-30])


def exact_square(vector):
    return sum(int(number) ** 2 for number in vector)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(FLOATS, min_size=1, max_size=40),
    st.floats(1e-6, 1e6), st.floats(0.01, 1e4),
    st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf]),
)  # fmt: skip
def test_no_vector_becomes_longer_than_the_bound(vector, S, z, error):
    """Even if its norm was computed wrongly."""
    at = lattice(S, z * S)
    squared = 2**48 * Fraction(S) ** 2 / Fraction(z * S) ** 2
    assert 0 <= squared - at.S2 < 1 or (at.S2 == 1 and squared < 1)
    row = torch.tensor([vector], dtype=torch.float64)
    norm = torch.linalg.vector_norm(row, dim=1)
    whole = at.rounded(row, norm * error if error != 1 else norm)
    assert whole.dtype == torch.int64 and exact_square(whole[0].tolist()) <= at.S2
    if error == 1 and 1e-100 < norm.item() < 1e100 and at.S2 > 1e4:
        clipped = row[0] * min(1.0, S / norm.item()) / at.grid
        assert ((whole[0] - clipped).abs() <= 1 + 1e-9 * clipped.abs()).all(), "rounded, and not set to zero"


@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=300))
def test_squares_are_exact(numbers):
    with NoFloats():
        found = squared_norms(torch.tensor([numbers, numbers], dtype=torch.int64))
    assert found == [exact_square(numbers)] * 2


def test_a_square_that_float64_would_take_for_the_bound_is_told_from_it():
    row, no_norm = torch.tensor([[2.0**27, 1.0]], dtype=torch.float64), torch.tensor([1e-9], dtype=torch.float64)
    assert float(2**54 + 1) == float(2**54)
    assert not Lattice(1.0, 2**54).rounded(row, no_norm).any()
    assert Lattice(1.0, 2**54 + 1).rounded(row, no_norm).tolist() == [[2**27, 1]]


def engine_for(module, **choices):
    defaults = {"n": 100, "q": 0.2, "steps": 2, "noise_multiplier": 1.0, "noise": "discrete_gaussian"}
    plan = plan_of(module, **defaults | choices)
    return PrivateRound(plan, module, GaussianNoise(KeyStream.known(0, "test", 0)))


def whole_sums(engine, loss_of, records, t=0):
    engine.begin(t)
    if len(records):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.add_chunk(loss_of, records, len(records))
    return {name: total.clone() for name, total in engine._sums.items()}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=2, max_size=5), st.data())
def test_one_record_moves_the_sum_by_a_vector_within_the_bound_exactly(records, data):
    """Of each group, in every round of a schedule; the others' contributions stay what they are to the last unit."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    engine = engine_for(
        module, group=groups.per_layer(), mechanism=clipping.Joint(), clip_norm=clipping.DimensionClipNorm(0.3),
        vectors="parameter", schedules={"S": [1.0, 0.3], "z": [1.0, 3.0]},
    )  # fmt: skip
    x = torch.tensor(records)
    out = data.draw(st.integers(0, len(x) - 1))
    others = torch.cat([x[:out], x[out + 1 :]])
    for t in (0, 1):
        sums, without, alone = (
            whole_sums(engine, lambda one: module(one).square().sum(), rows, t) for rows in (x, others, x[out][None])
        )
        for group in engine.current_plan.groups:
            moved = [sums[name] - without[name] for v in group.vectors for name in v.parameters]
            assert exact_square(torch.cat([part.flatten() for part in moved]).tolist()) <= group.query().S2
        assert all(torch.equal(sums[name] - without[name], alone[name]) for name in sums)


def test_a_usual_record_uses_all_of_the_bound():
    module = nn.Linear(50, 3)
    engine = engine_for(module)
    sums = whole_sums(engine, lambda one: 100 * module(one).square().sum(), torch.randn(1, 50))
    (group,) = engine.plan.groups
    used = exact_square(torch.cat([total.flatten() for total in sums.values()]).tolist()) / group.query().S2
    assert 1 - 1e-5 < used <= 1


def test_what_is_released_are_multiples_of_the_grid_with_the_right_noise(tmp_path):
    module = nn.Sequential(nn.Linear(100, 60), nn.Linear(60, 4))
    engine = engine_for(module, mechanism=clipping.Joint(alpha=[0.25, 4.0], clip_norm=0.5))
    sums = whole_sums(engine, lambda one: module(one).square().sum(), torch.randn(5, 100))
    writer = LedgerWriter(tmp_path / "l.jsonl")
    writer.sample(engine.plan.sampling.event(100))
    released = engine.release(writer)
    assert [type(query) for round_ in writer.ledger.rounds for query in round_.queries] == [DiscreteSumQueryEvent]
    (group,) = engine.plan.groups
    noises = []
    for vector, alpha in zip(group.vectors, group.alphas, strict=True):
        for name in vector.parameters:
            assert released[name].dtype == torch.float32
            unit = alpha * group.sigma / SIGMA / 20
            noises.append((released[name].double() / unit - sums[name]).flatten() / SIGMA)
    assert kstest(torch.cat(noises).numpy(), "norm").pvalue > 1e-3


def by_hand(plan, factors):
    """The same training on the same samples and noise, summed as Python's whole numbers."""
    module = Model()
    x, y = dataset().tensors
    sampler = KeyStream.known(SEED, "sampling", 0)
    gaussian = DiscreteGaussian(2**48, KeyStream.known(SEED, "noise", 0))
    parameters = dict(module.named_parameters())
    velocity, rate = {name: torch.zeros_like(p) for name, p in parameters.items()}, 0.5
    for t in range(T):
        f_z, f_S = factors(t)
        sums = {name: [0] * p.numel() for name, p in parameters.items()}
        for i in Poisson(Q).draw(N, sampler)[0]:
            module.zero_grad()
            F.cross_entropy(module.net(x[i][None]), y[i][None]).backward()
            for group in plan.groups:
                scaled = {
                    name: parameters[name].grad.flatten() / alpha
                    for vector, alpha in zip(group.vectors, group.alphas, strict=True)
                    for name in vector.parameters
                }
                norm = torch.cat(list(scaled.values())).norm().item()
                grid, bound = group.sigma * f_S * f_z / 2**24, group.S * f_S
                for name, values in scaled.items():
                    for k, value in enumerate(values.tolist()):
                        sums[name][k] += int(value * min(1.0, bound * (1 - 2.0**-40) / norm) / grid)
        noise = iter(gaussian.draw(sum(map(len, sums.values()))).tolist())
        noisy = {name: [number + next(noise) for number in total] for name, total in sums.items()}
        for group in plan.groups:
            for vector, alpha in zip(group.vectors, group.alphas, strict=True):
                for name in vector.parameters:
                    unit = alpha * group.sigma * f_S * f_z / 2**24 / (Q * 37)
                    average = torch.tensor(noisy[name], dtype=torch.float64).view_as(parameters[name]) * unit
                    velocity[name] = 0.9 * velocity[name] + average
        with torch.no_grad():
            for name, p in parameters.items():
                p -= rate * velocity[name]
        rate *= 0.9
    return module


@pytest.mark.parametrize(
    "grouping, mechanism",
    [(groups.flat(), clipping.Joint(alpha=[0.2, 0.5])), (groups.per_layer(), clipping.Separate())],
)
def test_training_equals_dp_sgd_by_hand(tmp_path, grouping, mechanism):
    schedules = {"z": {"step": {0: 1, 5: 2}}, "S": {"step": {0: 1, 7: 0.5}}}
    plan = plan_for(Model(), group=grouping, mechanism=mechanism, noise="discrete_gaussian", schedules=schedules)
    module, run, _ = fit(tmp_path, plan=plan)
    reference = by_hand(plan, lambda t: (1 if t < 5 else 2, 1 if t < 7 else 0.5))
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name
    assert run.global_step == T
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == plan.ledger()
    assert all(isinstance(query, DiscreteSumQueryEvent) for round_ in ledger.rounds for query in round_.queries)
    gaussian = plan_for(Model(), group=grouping, mechanism=mechanism, schedules=schedules).ledger()
    assert dpexp.epsilon(ledger, 1e-5) == pytest.approx(dpexp.epsilon(gaussian, 1e-5), rel=1e-6)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    plan = plan_for(Model(), noise="discrete_gaussian")

    def run(stop, ckpt=None):
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl", max_physical_batch_size=4)
        training = trainer(privacy, max_steps=stop)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.fit(Model(), Data(), ckpt_path=ckpt, weights_only=False)
        return training

    run(5).save_checkpoint(tmp_path / "five.ckpt")
    assert run(-1, tmp_path / "five.ckpt").global_step == T
    assert read_ledger(tmp_path / "l.jsonl") == plan.ledger()


@pytest.mark.parametrize(
    "choices, wrong",
    [
        ({"noise": "laplace"}, "noise=laplace is unknown; choose gaussian, discrete_gaussian or banded"),
        ({"noise_multiplier": 1e-3}, "could not hold their sum"),
        ({"noise_multiplier": 1e6}, r"choose σ̃/S below 1.85e\+05"),
        ({"noise_multiplier": 100.0, "schedules": {"z": [1, 1e6]}, "steps": 2}, "shorten a record"),
        ({"n": 2**40}, "could not hold their sum"),
    ],
)
def test_what_cannot_be_exact_is_refused(choices, wrong):
    with pytest.raises(ConfigError, match=wrong):
        engine_for(nn.Linear(3, 2), **choices)


def test_a_target_is_calibrated_for_the_event_that_will_be_written():
    found = [
        plan_of(nn.Linear(9, 9), n=1000, q=0.1, steps=50, epsilon=2.0, delta=1e-5, noise=noise)
        for noise in ("gaussian", "discrete_gaussian")
    ]
    assert found[0].noise_multiplier == pytest.approx(found[1].noise_multiplier, rel=1e-3)
    assert 1.99 < dpexp.epsilon(found[1].ledger(), 1e-5) <= 2.0


def test_a_job_is_told_to_by_its_configuration(dpexp_job, read_lines):
    output = dpexp_job(
        "noise=discrete_gaussian", "model=logistic", "tracking=none", "trainer.num_evaluations=0", "sampling.steps=2",
        "sampling.expected_batch_size=5", "group=per_layer",
    )  # fmt: skip
    spec = read_lines(output / "ledger.jsonl")[1]
    assert [sorted(query) for query in spec["queries"]] == [["S2", "grid", "group", "sigma2"]]
    result = json.loads((output / "result.json").read_text())
    assert 2.9 < result["epsilon"]["pld"] <= 3


# The attack (Mironov 2012; for normal noise Jin et al. 2022, arXiv 2112.05307): which last bits can there be?


def naive(f, count, generator):
    """f + N(0, 1) by Box and Muller in float32, as it is often written."""
    u, v = torch.rand(2, count, generator=generator)
    return f + torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * math.pi * v)


def careful(f, count, generator):
    total = torch.full((count,), f)
    GaussianNoise(KeyStream.known(int(f), "test", 0)).add_to([(total, 1.0)])
    return total


def impossible(y):
    """Results that naive noise about 1 can never give: those in (-1, 1) that are no multiples of 2^-24."""
    return int(((y.abs() < 1) & (y * 2**24 != (y * 2**24).round())).sum())


def test_the_attack_tells_naive_noise_about_0_from_that_about_1():
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    about_0, about_1 = (impossible(naive(f, count, generator)) for f in (0.0, 1.0))
    assert about_0 > count / 4 and about_1 == 0, "whatever ε, δ is above 1/4"
    assert all(impossible(careful(f, count, generator)) > 0 for f in (0.0, 1.0)), "63 bits, rounded once"


class Released(nn.Module):
    """A record's gradient is itself, d times."""

    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, x):
        return (self.w * x).sum()


def test_the_attack_finds_nothing_in_exact_noise(tmp_path):
    """Every multiple of the grid can come of any data, and no others; no last bit is likelier with one than another."""
    d, bits = 20_000, []
    for f in (0.0, 1.0):
        module = Released(d)
        engine = engine_for(module, q=1.0, sampling="full_batch", n=1)
        whole_sums(engine, module, torch.tensor([f], dtype=torch.float64))
        writer = LedgerWriter(tmp_path / f"{f}.jsonl")
        writer.sample(engine.plan.sampling.event(1))
        units = (engine.release(writer)["w"] / engine.plan.groups[0].lattice.grid).numpy()
        assert (units == np.round(units)).all()
        assert abs(units.mean() - f * SIGMA / math.sqrt(d)) < 5 * SIGMA / math.sqrt(d)
        bits.append(np.bincount(units.astype(np.int64) & 63, minlength=64))
    assert chi2_contingency(bits).pvalue > 1e-3
    assert SIGMA2 == SIGMA**2
