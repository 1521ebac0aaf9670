"""In which way a record is processed does not depend on its company: what all others contribute would move with it."""

import pytest
import torch
from dpexp.privacy.engine.ways import Way
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from dpexp.privacy.stacking import Alone
from tests.test_branches import engine_of

N, S = 20, 0.01


class Model(nn.Module):
    """Two positions, whose gradients cancel but for a hundredth: norms from Gram matrices are larger than others."""

    def __init__(self, inner=None):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.zeros(256, 256)), nn.Parameter(torch.zeros(10, 1))
        self.inner = inner

    def forward(self, record):
        x, g, kind = record
        return (F.linear(x, self.weight) * g).sum() + 1e-6 * self.more(kind)

    def more(self, kind):
        return self.inner(kind).sum() if self.inner else F.embedding(kind, self.table).sum()


def records(kinds):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(1, 1, 256, generator=generator).expand(len(kinds), 2, 256).clone() for _ in range(2))
    g[:, 1] *= 0
    g[:, 1] -= 0.99 * g[:, 0]
    return x, g, torch.tensor(kinds)


def sums(module, *chunks, before=()):
    engine, _ = engine_of(module, S)
    for some in (before, chunks):
        engine.start()
        for chunk in some:
            engine.accumulate(module, chunk, len(chunk[0]))
    return engine._sums["weight"].double()


def without(chunk, row):
    return tuple(torch.cat([t[:row], t[row + 1 :]]) for t in chunk)


class Caught(Model):
    """Records of one kind catch an error of their own."""

    def more(self, kind):
        if kind.any():
            try:
                torch.linalg.cholesky(-torch.eye(2) * kind.abs().sum())
            except RuntimeError:
                return self.table.sum()
        return self.table.sum()


class Backward(Model):
    """Records of one kind need a backward pass of their own."""

    def more(self, kind):
        if kind.any():
            return torch.autograd.grad(self.table.square().sum(), self.table)[0].sum()
        return self.table.sum()


class Unique(nn.Module):
    """Runs record by record, and returns as many as are different."""

    def forward(self, kind):
        return torch.unique(kind).float()


class Found(Model):
    """What a module returns decides that a record needs a backward pass of its own."""

    def more(self, kind):
        if len(self.inner(kind)) > 1:
            return torch.autograd.grad(self.table.square().sum(), self.table)[0].sum()
        return self.table.sum()


ODD = {
    "two fail, at the ends": (Model, [[99], *[[0]] * N, [99]]),
    "one catches an error": (Caught, [[1], *[[0]] * N]),
    "one has a backward pass": (Backward, [[1], *[[0]] * N]),
    "one returns fewer": (lambda: Model(Unique()), [[1, 1], *[[0, 1]] * N]),
    "one returns more, and has a backward pass": (lambda: Found(Unique()), [[0, 1], *[[0, 0]] * N]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_moves_no_other(what, then, monkeypatch):
    """Be it in their chunk or in an earlier one: else they would move by some tenths of S each."""
    monkeypatch.setattr("dpexp.privacy.engine.clipping.LOOSE", torch.inf)  # which would make norms all but equal
    make, kinds = ODD[what]
    whole = records(kinds)
    odd = tuple(t[:1] for t in whole)
    if then:
        whole = without(whole, 0)
        assert (sums(make(), whole, before=[odd]) - sums(make(), whole)).norm() < 1e-4 * S
    moved = sums(make(), whole) - sums(make(), without(whole, 0))
    assert moved.norm() <= S * (1 + 1e-4)


@pytest.mark.filterwarnings("ignore")
def test_values_that_are_no_tensors_decide_for_those_that_hold_them_alone(monkeypatch):
    monkeypatch.setattr("dpexp.privacy.engine.clipping.LOOSE", torch.inf)

    class Told(Model):
        def forward(self, record):
            y = (F.linear(record["x"], self.weight) * record["g"]).sum()
            if record["mode"] == "a":
                y = y + torch.autograd.grad(self.table.square().sum(), self.table)[0].sum()
            return y

    x, g, _ = records([0] * N)
    items = [{"x": x[i], "g": g[i], "mode": "a" if i == 0 else "b"} for i in range(N)]
    found = []
    for some in (items, items[1:]):
        engine, _ = engine_of(module := Told(), S)
        engine.start()
        for part in Alone(lambda items: items[0])(some):
            engine.accumulate(module, part.batch, part.size)
        found.append(engine._sums["weight"].double())
    assert (found[0] - found[1]).norm() <= S * (1 + 1e-5)


def whole_numbers(*shape):
    """Whose products float32 holds as they are."""
    return torch.randint(-8, 8, (1, *shape)).float()


LAYERS = {
    "linear": (lambda: nn.Linear(256, 256, bias=False), whole_numbers(1, 256).expand(1, 2, 256)),
    "embedding": (lambda: nn.Embedding(5000, 256), torch.full((1, 2), 7)),
    "convolution": (lambda: nn.Conv2d(256, 256, 1, bias=False), whole_numbers(256, 1, 1).expand(1, 256, 1, 2)),
    "convolution of one dimension": (
        lambda: nn.Conv1d(256, 256, 1, bias=False),
        whole_numbers(256, 1).expand(1, 256, 2),
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_what_all_but_cancels_is_clipped_as_if_it_were_held(layer):
    """Together and one by one, in float32: two positions cancel but for 2^-18."""
    torch.manual_seed(0)
    make, x = LAYERS[layer]
    module, x = make(), x.repeat(N, *[1] * (x.dim() - 1))
    signs = 1024 * torch.tensor([1.0, -1 + 2**-18])
    g = whole_numbers(256)[0]
    g = g[:, None] * signs if "convolution" in layer else signs[:, None] * g
    g = g.reshape(1, *module(x[:1]).shape[1:]).repeat(N, *[1] * (x.dim() - 1 + (layer == "embedding")))

    found = []
    for singly in (False, True):
        engine, _ = engine_of(module, S)
        engine._ways.first = Way(singly=singly)
        engine.start()
        engine.accumulate(lambda one: (module(one[0]) * one[1]).sum(), (x[:, None], g), N)
        found.append(engine._sums["weight"].double())
    assert found[0].norm() <= N * S * (1 + 1e-6) and found[1].norm() > 0.999 * N * S
    assert (found[0] - found[1]).norm() < 1e-4 * N * S


class Scaled(torch.Tensor):
    """Results take the attributes of what they were computed from first."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        given = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
        first = next((t for t in given if isinstance(t, Scaled)), None)
        if isinstance(result, Scaled) and first is not None:
            result.scale = getattr(first, "scale", None)
        return result


def scaled(scale):
    tensor = torch.ones(3).as_subclass(Scaled)
    tensor.scale = scale
    return tensor


class Key:
    """Equal to all others, and of the same text."""

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return True

    def __repr__(self):
        return "Key"


@pytest.mark.parametrize("collate", [default_collate, lambda items: items[0]])
def test_records_share_no_attributes_and_no_keys(collate):
    parts = Alone(collate)([scaled(-1), scaled(1), scaled(1)])
    assert sorted(part.batch.scale for part in parts) == [-1, 1, 1]
    parts = Alone(collate)([{Key(1): torch.ones(2)}, {Key(2): torch.ones(2)}])
    assert sorted(key.value for part in parts for key in part.batch) == [1, 2]
