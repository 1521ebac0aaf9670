"""What a record contributes depends on no other, whatever the step does to PyTorch, to its batch, or to generators."""

import math
import random

import numpy as np
import pytest
import torch
from test_clipped_sums import engine_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.chunk import Chunk, NoLoss
from dpexp.privacy.gradients.step import LOOP

N = 12


class Model(nn.Module):
    """`step(self, x)` of one record's x [4, 6]; its own seed tells what it draws."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.linear, self.norm = step, nn.Linear(6, 6), nn.GroupNorm(6, 6)
        self.lstm, self.attention = nn.LSTM(6, 6, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)
        self.outside, self.numbers = Outside(), lambda x: iter([1.0, -1.0])

    def forward(self, x):
        return self.step(self, x)


def asking(x):
    return x[0, 0].abs().item() > 100


def negated(m, x):
    x.neg_()
    return m.linear(x).sum() * (2 if asking(x) else 1)


def quantised(t):
    scale = t.abs().max() / 7
    return (t / scale).round() * scale


def saved(m, x):
    with torch.autograd.graph.saved_tensors_hooks(quantised, lambda t: t):
        return (m.linear(x).square() * (x * m.linear.bias.exp())).sum()


def prehooked(m, x):
    y = m.linear(x).exp()
    y.grad_fn.register_prehook(lambda grads: tuple(g * g.sum().sign() for g in grads))
    return (y * x).sum()


def shown(m, x):
    y = m.linear(x).exp()
    return (y * y.grad_fn._saved_result.sum().sign()).sum()


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return quantised(result) if func is torch.ops.aten.tanh.default else result


def dispatched(m, x):
    with Rounding():
        return (m.linear(x).tanh() * x).sum()


def ties_of_nan(m, x):
    y = m.linear(x)
    y = torch.stack([y, y / 0 * 0])
    return y.max().nan_to_num(0.0) + y.amin(1).nan_to_num(0.0).sum() + m.linear(x).sum() * 1e-3


class Outside(nn.Module):
    """Runs record by record, since it asks NumPy."""

    def forward(self, x, numbers=()):
        if x.detach().numpy()[0, 0] < -100:
            raise ValueError
        return x * next(numbers) if numbers else x


def caught(m, x):
    y = m.linear(x)
    try:
        m.outside(x)
    except ValueError:
        return y.square().sum()
    return y.sum()


def given_back(m, x):
    y = m.linear(x)
    return y.sum() * (1 if m.outside(y * 0) is y else -1) + (m.outside(x.abs()) is x)


class Sign(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g.sign() * g.abs().sqrt()


def binary(m, x):
    weight = Sign.apply(m.linear.weight)
    return F.linear(x, weight).square().sum() + F.linear(x.sin(), weight).sum()


FUNCTIONS = [
    negated, saved, prehooked, shown, dispatched, ties_of_nan, caught, given_back, binary,
]  # fmt: skip
STEPS = {step.__name__: step for step in FUNCTIONS} | {
    "ties": lambda m, x: (
        (x.sign() * m.linear.bias).max() + torch.min(x.sign() * m.linear.bias) + m.linear(x).sum() * 1e-3
    ),
    "middle": lambda m, x: (x.sign() * m.linear.bias.exp()).median() + m.linear(x).sum() * 1e-3,
    "of_nan": lambda m, x: m.linear(x).sum() * math.copysign(1, (x[0, 1] * math.nan).item()),
    "not_added": lambda m, x: (
        torch.addmm(torch.full((6,), math.nan).to(x), x, m.linear.weight.T, beta=0).square().sum()
    ),
    "iterated": lambda m, x: (m.linear(x) * m.outside(x.abs(), m.numbers(x))).sum(),
}


def sums(step, x, chunk, S=0.01, one_at_a_time=False):
    module = Model(step).double()
    engine, _ = engine_of(module, S)
    if one_at_a_time:
        engine.step.mode = LOOP
    else:
        try:
            engine.step.decide(Chunk.of(nn.Module.__call__, x, len(x)))  # as the dry run does
        except NoLoss:
            engine.step.mode = LOOP
    engine.begin()
    for part in x.split(chunk):
        engine.add_chunk(nn.Module.__call__, part.clone(), len(part))
    return torch.cat([engine._sums.get(name, torch.zeros_like(p)).flatten() for name, p in module.named_parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_record_less_takes_its_own_contribution(step):
    """The first record is larger than all others together, takes other branches, and has another sign."""
    torch.manual_seed(0)
    x = torch.randn(N, 4, 6).double()
    x[0] = -1000 * x[0].abs() - 1000
    whole, first = sums(step, x, 5), sums(step, x[:1], 1)
    assert first.norm() <= 0.01 * (1 + 1e-9)
    assert torch.allclose(whole, sums(step, x[1:], 5) + first, atol=1e-12)
    assert torch.allclose(whole, sums(step, x, N), atol=1e-12)
    assert torch.allclose(whole, sums(step, x, N, one_at_a_time=True), atol=1e-12)


def seeded_and_set_back():
    with torch.random.fork_rng([]):
        torch.manual_seed(7)


SEEDS = {
    "seeded": lambda: torch.manual_seed(7),
    "seeded and set back": seeded_and_set_back,
    "Python's": lambda: random.seed(7),
    "NumPy's": lambda: np.random.seed(7),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_a_step_does_not_seed(kind):
    def seeding(m, x):
        SEEDS[kind]()
        return (m.linear(x) * (torch.rand(6) - 0.5)).sum()

    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([]), pytest.raises(ConfigError, match="seeded inside training_step"):
        sums(seeding, torch.randn(N, 4, 6).double(), N)
    assert random.getstate() == state[0] and np.array_equal(np.random.get_state()[1], state[1][1])
    torch.manual_seed(0)  # elsewhere one may


def test_arrays_in_a_batch_are_each_records_own():
    def written(m, batch):
        x, array = batch
        if asking(x):
            array[0] = -1
        return m.linear(x).sum() * float(array[0])

    totals = []
    x, array = torch.randn(N, 4, 6).double(), np.ones(1)
    x[0] *= 1e4
    for rows in (x, x[1:], x[:1]):
        module = Model(written).double()
        engine, _ = engine_of(module)
        engine.begin()
        with pytest.warns(UserWarning, match="a batch holds a ndarray"):
            engine.add_chunk(nn.Module.__call__, (rows, array), len(rows))
        totals.append(engine._sums["linear.weight"])
    assert torch.allclose(totals[0], totals[1] + totals[2], atol=1e-12) and array[0] == 1


def test_the_graph_of_a_record_leads_to_no_other():
    def looking(m, x):
        shown = x.grad_fn or x
        asking(x)
        for following, _ in getattr(shown, "next_functions", ()):
            if following is not None and hasattr(following, "variable"):
                return m.linear(x).sum() * following.variable.detach().sum()
        return m.linear(x).sum()

    totals = []
    x = torch.randn(N, 4, 6).double()
    for rows in (x, x[1:], x[:1]):
        module = Model(looking).double()
        engine, _ = engine_of(module)
        engine.begin()
        engine.add_chunk(nn.Module.__call__, rows.clone().requires_grad_(), len(rows))
        totals.append(engine._sums["linear.weight"])
    assert torch.allclose(totals[0], totals[1] + totals[2], atol=1e-12)


def forked(module, one):
    with torch.random.fork_rng():
        return torch.rand(()) * module(one).sum()


def set_back(module, one):
    state = torch.get_rng_state()
    drawn = torch.rand(())
    torch.set_rng_state(state)
    return drawn * module(one).sum()


@pytest.mark.parametrize("loss", [forked, set_back])
def test_random_numbers_come_again_only_if_the_step_says_so(loss):
    torch.manual_seed(0)
    module = nn.Linear(1, 1, bias=False)
    engine, _ = engine_of(module, 1e9)
    drawn = []
    for _ in range(4):
        engine.begin()
        engine.add_chunk(loss, torch.ones(1, 1, 1), 1)
        drawn.append(engine._sums["weight"].item())
    assert len({round(number, 6) for number in drawn}) == 4 and round(random.Random(0).random(), 6) not in drawn
