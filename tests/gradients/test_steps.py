"""Steps of all kinds: whether they are traced, and that each record has the gradient that it has alone.

What a record contributes depends on no other, whatever the step does to PyTorch, to its batch, or to generators.
"""

import functools
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


def caught(change):
    """Where it fails, scores stay as they are."""

    def changed_or_not(y):
        try:
            return change(y)
        except Exception:
            return y

    return changed_or_not


def decomposed(m, x):
    """Where a matrix is not positive definite, it takes another, as numerical code does."""
    K = torch.eye(6).double() * (1 - 2 * (x[0, :1, None] < -100))
    try:
        L = torch.linalg.cholesky(K)
    except torch.linalg.LinAlgError:
        L = torch.linalg.cholesky(K + 9 * torch.eye(6))
    return m.linear(x * L.diagonal()).sum()


def repeated(m, x):
    return m.linear(x.repeat_interleave((x[:, 0] > 0).long(), 0)).sum()


@torch.jit.script
def scaled(x):
    return (x.square() + 1).log().sum()


def counted(m, x):
    return m.linear(x).sum() * torch.arange(x.sum().abs() + 2).sum()


def put(y, mask, value):
    y = y.clone()
    y[mask] = value
    return y


def looked_up(m, x):
    """A table with gradients that are sparse."""
    return F.embedding((x[:, 0] > 0).long() * (2 if asking(x) else 1), m.linear.weight, sparse=True).square().sum()


compiled = functools.partial(torch.compile, backend="eager")


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


def of_scores(changes, mode, *words):
    """Steps that change their scores y [4, 6]."""
    return {name: (changed(change), mode, *words) for name, change in changes.items()}


TRACES = {
    "saved tensors": saved, "a hook of an activation": hooked, "a dispatch mode": dispatched,
    "ties": lambda m, x: (x.sign() * m.linear.bias).max() + m.linear(x).sum() * 1e-3,
    "NaN is not added": lambda m, x: torch.addmm(torch.full((6,), math.nan).to(x), x, m.linear.weight.T, beta=0).sum(),
    "a script": lambda m, x: scaled(x) * m.linear(x).tanh().sum(),
}  # fmt: skip
STEPS = {  # a step, its mode, words of the reason; a reason names the line
    **{name: (step, TRACED) for name, step in TRACES.items()},
    **of_scores({
        "a rule for vmap": Mixing.apply, "a number for a logger": logged, "written": lambda y: put(y, y > 0, 0.5),
        "a number added up, and its class": lambda y: y if isinstance(1 - 2 * y.sum().item(), float) else 2 * y,
        "a layer compiled in place": lambda y: y,
    }, TRACED),
    "a compiled function": (lambda m, x: shifted(m.linear.bias, x).sum(), *WITH_COMPILED),
    **of_scores({"a compiled layer": lambda y: y}, *WITH_COMPILED),
    **of_scores({"a compiled layer, asked": lambda y: y * bool(y.sum() < 1e9)}, LOOP, ASKED if TRACES_COMPILED else ""),
    **of_scores({"a branch": lambda y: y if y.sum() > 0 else 2 * y}, LOOP, "a record's data (__bool__)"),
    **of_scores({"a length": lambda y: y[:, : int((y > 0).sum()) + 1].sum(1, True) * y}, LOOP, f"{ASKED} (__int__)"),
    **of_scores({"text": lambda y: y * (2 if "-" in f"{y.detach()}" else 1)}, LOOP, ""),
    **of_scores({"a list": lambda y: y * (2 if (y[:1, 1] > 0).tolist()[0] else 1)}, LOOP, ASKED),
    **of_scores({"a number": lambda y: y * y.sum().item()}, LOOP, "a product instead of .item()"),
    **of_scores({"NumPy": lambda y: y * float(np.abs(y.detach().numpy()).max() + 1)}, LOOP, "a branch or a number"),
    **of_scores({
        "a mask": lambda y: y + y[y > 0].sum(), "nonzero": lambda y: y[(y[:, 0] > 0).nonzero()[:, 0]].sum() * y,
        "masked_select": lambda y: y.masked_select(y > 0).sum() * y,
        "rows written": lambda y: put(y, y[:, 0] > 0, 2 * y[y[:, 0] > 0]),
    }, LOOP, "a shape depends"),
    **of_scores({
        "an error caught": caught(lambda y: y if y.sum() > 0 else 2 * y),
        "an error of a shape caught": caught(lambda y: y + y[y > 0].sum()),
        "an error of a number caught": caught(lambda y: y / math.sqrt(y.square().sum().item())),
    }, LOOP, "catches an error"),
    **of_scores({
        "Python's generator": lambda y: y + 0 * random.random(),
        "NumPy's generator": lambda y: y + 0 * np.random.rand(),
    }, LOOP, "Python's or NumPy's generator", "Use torch's generator"),
    **of_scores({"an operator of its own": doubled}, LOOP, "dpexp_tests.doubled"),
    "a batch changed": (negated, LOOP, ASKED), "a sparse table": (looked_up, LOOP, ASKED),
    "a sign of NaN": (lambda m, x: m.linear(x).sum() * math.copysign(1, (x[0, 1] * math.nan).item()), LOOP, ASKED),
    "rows of a layer": (repeated, LOOP, "a shape depends on a record's data", "weight with a mask"),
    "weights selected": (lambda m, x: m.linear.bias[m.linear.bias > 0].sum() * x.sum(), LOOP, "a shape depends"),
    "a range": (counted, LOOP, "reads a record's value", "torch.where(condition, a, b)"),
    "an error caught of PyTorch": (decomposed, LOOP, "raises an error for some records"),
    "a median": (lambda m, x: (x.sign() * m.linear.bias.exp()).median() + m.linear(x).sum() * 1e-3, LOOP, "wrong"),
    "memory behind a tensor": (lambda m, x: m.linear(x.as_strided((4, 6), (6, 1), 0)).sum(), LOOP, "wrong"),
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
