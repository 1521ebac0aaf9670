"""Steps of all kinds: whether they are traced, and that each record has the gradient that it has alone.

What a record contributes depends on no other, whatever the step does to PyTorch, to its batch, or to generators.
"""

import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
from reference import engine_of, relative_error, stacked, sums_apart, sums_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dpexp.privacy.gradients.step import LOOP, TRACED

N, S = 12, 0.01


class Model(nn.Module):
    """`step(self, x)` of one record's x [4, 6] is its loss."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.linear = step, nn.Linear(6, 6)
        self.outside, self.numbers = Outside(), lambda x: iter([1.0, -1.0])
        self.double()

    def forward(self, x):
        return self.step(self, x[0])


def records():
    """The first is larger than all others together, takes other branches, and has another sign."""
    x = torch.randn(N, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    x[0] = -1000 * x[0].abs() - 1000
    return x


def asking(x):
    return x[0, 0].abs().item() > 100


# Ways of a step, which are functions of m and x


def changed(change):
    """A loss of changed scores y [4, 6]."""
    return lambda m, x: (change(m.linear(x).tanh()) * x.tanh()).sum()


class Outside(nn.Module):
    """Runs record by record, since it asks NumPy."""

    def forward(self, x, numbers=()):
        if x.detach().numpy()[0, 0] < -100:
            raise ValueError
        return x * next(numbers) if numbers else x


def caught_of_outside(m, x):
    y = m.linear(x)
    try:
        m.outside(x)
    except ValueError:
        return y.square().sum()
    return y.sum()


def given_back(m, x):
    y = m.linear(x)
    return y.sum() * (1 if m.outside(y * 0) is y else -1) + (m.outside(x.abs()) is x)


class Mixing(torch.autograd.Function):
    """A rule for vmap that mixes records, of which no use is made; and a gradient of its own."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g.sign() * g.abs().sqrt()

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(0), 0


@torch.library.custom_op("dpexp_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, g: 2 * g)


def quantised(t):
    scale = t.abs().max() / 7
    return (t / scale).round() * scale


def saved(m, x):
    with torch.autograd.graph.saved_tensors_hooks(quantised, lambda t: t):
        return (m.linear(x).square() * (x * m.linear.bias.exp())).sum()


def hooked(m, x):
    y = m.linear(x)
    y.register_hook(lambda g: -2 * g)
    return y.tanh().sum()


def prehooked(m, x):
    y = (m.linear(x) / 1000).exp()
    y.grad_fn.register_prehook(lambda grads: tuple(g * g.sum().sign() for g in grads))
    return (y * x).sum()


def shown(m, x):
    y = (m.linear(x) / 1000).exp()
    return (y * y.grad_fn._saved_result.sum().sign()).sum()


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return quantised(result) if func is torch.ops.aten.tanh.default else result


def dispatched(m, x):
    with Rounding():
        return (m.linear(x).tanh() * x).sum()


def negated(m, x):
    x.neg_()
    return m.linear(x).sum() * (2 if asking(x) else 1)


def logged(y):
    return y + 0 * len({"loss": y.sum().item(), "scores": y.detach().numpy()})


def caught(y):
    try:
        return y if y.sum() > 0 else 2 * y
    except Exception:
        return y


def selected(y):
    try:
        return y + y[y > 0].sum()
    except Exception:
        return y


def decomposed(m, x):
    """Where a matrix is not positive definite, it takes another, as numerical code does."""
    K = torch.eye(6).double() * (1 - 2 * (x[0, :1, None] < -100))
    try:
        L = torch.linalg.cholesky(K)
    except torch.linalg.LinAlgError:
        L = torch.linalg.cholesky(K + 9 * torch.eye(6))
    return m.linear(x * L.diagonal()).sum()


def tree(m, x):
    """Branches within branches, on a truth, a number and a list."""
    y = m.linear(x) if x.sum() > 0 else -m.linear(x)
    y = y.square() if bool((x.max() > 1).any()) else y
    y = y.tanh() if int((x[:, 0] > 0).sum()) == 1 else y
    return y.sum() * (2 if (x[:1, 1] > 1.5).tolist()[0] else 1)


def repeated(m, x):
    return m.linear(x.repeat_interleave((x[:, 0] > 0).long(), 0)).sum()


def counted(m, x):
    return m.linear(x).sum() * torch.arange(x.sum().abs() + 2).sum()


def put(y, mask, value):
    y = y.clone()
    y[mask] = value
    return y


def rooted(y):
    try:
        return y / math.sqrt(y.square().sum().item())
    except Exception:
        return y


def looked_up(m, x):
    """A table with gradients that are sparse."""
    return F.embedding((x[:, 0] > 0).long() * (2 if asking(x) else 1), m.linear.weight, sparse=True).square().sum()


def of_scripts(make):
    @make
    def scale(x):
        return (x.square() + 1).log().sum()

    return lambda m, x: scale(x) * m.linear(x).tanh().sum()


def traced_script(function):
    return torch.jit.trace(function, torch.ones(4, 6).double())


def compiled(function):
    return torch.compile(function, backend="eager")


@compiled
def shifted(bias, x):
    """A parameter is used here alone."""
    return F.gelu(x + bias)


def in_chunks(m, x):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    return F.linear_cross_entropy(x, m.linear.weight, torch.arange(4), options=options)


ASKED = "a record's data"
TRACES_COMPILED = torch.__version__ >= "2.10"
WITH_COMPILED = (TRACED,) if TRACES_COMPILED else (LOOP, "a dynamo-optimized function")
STEPS = {  # a step, its mode, words of the reason; a reason names the line
    "a rule for vmap": (changed(Mixing.apply), TRACED),
    "saved tensors": (saved, TRACED), "a hook of an activation": (hooked, TRACED),
    "a number for a logger": (changed(logged), TRACED),
    "ties": (lambda m, x: (x.sign() * m.linear.bias).max() + m.linear(x).sum() * 1e-3, TRACED),
    "NaN is not added": (lambda m, x: torch.addmm(torch.full((6,), math.nan).to(x), x, m.linear.weight.T, beta=0).sum(),
                         TRACED),
    "written": (changed(lambda y: put(y, y > 0, 0.5)), TRACED),
    "a script": (of_scripts(torch.jit.script), TRACED), "a traced script": (of_scripts(traced_script), TRACED),
    "a compiled function": (lambda m, x: shifted(m.linear.bias, x).sum(), *WITH_COMPILED),
    "a compiled layer": (changed(lambda y: y), *WITH_COMPILED),
    "a layer compiled in place": (changed(lambda y: y), TRACED),
    "a compiled layer, asked": (changed(lambda y: y * bool(y.sum() < 1e9)), LOOP, ASKED if TRACES_COMPILED else ""),
    "a hook of a node": (prehooked, TRACED), "a node's tensor": (shown, TRACED),
    "a dispatch mode": (dispatched, TRACED),
    "a branch": (changed(lambda y: y if y.sum() > 0 else 2 * y), LOOP, "a record's data (__bool__)"),
    "branches within branches": (tree, LOOP, ASKED), "a batch changed": (negated, LOOP, ASKED),
    "a number": (changed(lambda y: y * y.sum().item()), LOOP, "a product instead of .item()"),
    "NumPy": (changed(lambda y: y * float(np.abs(y.detach().numpy()).max() + 1)), LOOP, "a branch or a number"),
    "a sign of NaN": (lambda m, x: m.linear(x).sum() * math.copysign(1, (x[0, 1] * math.nan).item()), LOOP, ASKED),
    "text": (changed(lambda y: y * (2 if "-" in f"{y.detach()}" else 1)), LOOP, ""),
    "a length": (changed(lambda y: y[:, : int((y > 0).sum()) + 1].sum(1, True) * y), LOOP, "a record's data (__int__)"),
    "rows of a layer": (repeated, LOOP, "a shape depends on a record's data", "weight with a mask"),
    "a mask": (changed(lambda y: y + y[y > 0].sum()), LOOP, "a shape depends"),
    "rows": (changed(lambda y: y[y[:, 0] > 0].sum() * y), LOOP, "a shape depends"),
    "nonzero": (changed(lambda y: y[(y[:, 0] > 0).nonzero()[:, 0]].sum() * y), LOOP, "a shape depends"),
    "masked_select": (changed(lambda y: y.masked_select(y > 0).sum() * y), LOOP, "a shape depends"),
    "rows written": (changed(lambda y: put(y, y[:, 0] > 0, 2 * y[y[:, 0] > 0])), LOOP, "a shape depends"),
    "weights selected": (lambda m, x: m.linear.bias[m.linear.bias > 0].sum() * x.sum(), LOOP, "a shape depends"),
    "a range": (counted, LOOP, "reads a record's value", "torch.where(condition, a, b)"),
    "a number added up, and its class": (
        changed(lambda y: y if isinstance(1 - 2 * y.sum().item(), float) else 2 * y), TRACED),
    "an error caught": (changed(caught), LOOP, "catches an error"),
    "an error of a shape caught": (changed(selected), LOOP, "catches an error"),
    "an error of a number caught": (changed(rooted), LOOP, "catches an error"),
    "an error of NumPy caught": (caught_of_outside, LOOP, ASKED), "given back": (given_back, LOOP, ASKED),
    "iterated": (lambda m, x: (m.linear(x) * m.outside(x.abs(), m.numbers(x))).sum(), LOOP, ASKED),
    "an error caught of PyTorch": (decomposed, LOOP, "raises an error for some records"),
    "an error for some": (changed(lambda y: y + torch.linalg.inv(torch.eye(6) + y.mT @ y).sum()), LOOP, "for some"),
    "a median": (lambda m, x: (x.sign() * m.linear.bias.exp()).median() + m.linear(x).sum() * 1e-3, LOOP, "wrong"),
    "memory behind a tensor": (lambda m, x: m.linear(x.as_strided((4, 6), (6, 1), 0)).sum(), LOOP, "wrong"),
    "a sparse table": (looked_up, LOOP, ASKED),
    "Python's generator": (changed(lambda y: y + 0 * random.random()), LOOP, "Use torch's generator"),
    "NumPy's generator": (changed(lambda y: y + 0 * np.random.rand()), LOOP, "Python's or NumPy's generator"),
    "an operator of its own": (changed(doubled), LOOP, "dpexp_tests.doubled"),
}  # fmt: skip
if hasattr(nn, "LinearCrossEntropyOptions"):
    STEPS["a chunked cross-entropy"] = in_chunks, LOOP, "not one of PyTorch's operators"
NO_LINE = "generator|its own|caught|some|median|behind|text|chunked"  # steps without a line that could be told


@pytest.mark.parametrize("what", STEPS)
def test_a_step_is_traced_or_runs_one_record_at_a_time(what):
    """A record less takes its own contribution: all are as the reference has them, in chunks of any size."""
    step, mode, *words = STEPS[what]
    module, x = Model(step), records()
    if "in place" in what:
        module.linear.compile(backend="eager")
    elif "compiled layer" in what:
        module.linear = compiled(module.linear)
    engine = engine_of(module, S)
    engine.begin()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine.add_chunk(nn.Module.__call__, stacked(x[:5].clone()), 5)
    assert engine.step.mode == mode and all(word in engine.step.reason for word in words), engine.step.reason
    slow = [str(w.message) for w in told if "one at a time, which is slow: about" in str(w.message)]
    assert [one.endswith(engine.step.reason) for one in slow] == [True] * (mode == LOOP)
    assert mode == TRACED or "test_steps.py, line" in engine.step.reason or re.search(NO_LINE, what)
    expected = sums_apart(engine, nn.Module.__call__, x)
    for chunk in (5, N):
        assert relative_error(sums_of(engine, nn.Module.__call__, x, chunk), expected) < 1e-9
    if mode == TRACED:
        engine.step.mode = LOOP
        assert relative_error(sums_of(engine, nn.Module.__call__, x), expected) < 1e-9
