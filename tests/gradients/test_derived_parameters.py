"""What is computed from parameters alone is computed once, and its gradients are those of one record at a time."""

import math
import warnings

import pytest
import torch
from plans import plan_of
from reference import clipped_sums, stacked
from test_clipped_sums import relative_error, sums_of
from test_layer_rules import Weighted, assert_equals_reference
from test_norms import exact
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dpexp.privacy.gradients import derived_parameters
from dpexp.privacy.gradients.derived_parameters import DerivedParameters, view_of_leaf
from dpexp.privacy.gradients.layer_gradients import OuterProductGradient
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping
from dpexp.privacy.plan.groups import flat, owners
from dpexp.privacy.round import PrivateRound

B = 5


def per_parameter(module):
    return {name: [name] for name in owners(module)}


class Of(nn.Module):
    """A call of some parameters and x."""

    def __init__(self, call, *shapes):
        super().__init__()
        self.call = call
        self.parameters_ = nn.ParameterList(torch.randn(shape) / 2 for shape in shapes)

    def forward(self, x):
        return self.call(x, *self.parameters_)


def standardized(weight):
    mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
    return (weight - mean) / (deviation + 1e-5)


def scaled_standardized(weight, gain):
    """As timm's ScaledStdConv2d has it."""
    flat_weight = weight.reshape(1, len(weight), -1)
    return F.batch_norm(flat_weight, None, None, weight=0.3 * gain.view(-1), training=True, eps=1e-6).view_as(weight)


def in_place_before(x, weight):
    weight = weight * 1.0
    weight[0] *= 2
    weight.tanh_()
    return F.linear(x, weight)


def filled(x, a, b):
    """Written into a tensor that was none of the parameters'."""
    weight = x.new_zeros(4, 3)
    weight[:2] = a
    weight[2:, 1] = b
    return F.linear(x, weight).tanh() * 2


class StraightThrough(torch.autograd.Function):
    """The forward pass rounds; the gradient takes no notice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight):
        return weight.round(decimals=1)

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g


class Tripled(StraightThrough):
    """A view by its numbers, with a gradient of its own."""

    @staticmethod
    def forward(weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, g):
        return 3 * g


def adapted(x, whole, a, b):
    return F.linear(x, whole.detach() + 0.5 * (b @ a))


def thirds(x, weight, bias):
    return sum(F.linear(x, *part) for part in zip(weight.chunk(3), bias.chunk(3), strict=True))


def attended(queries, x):
    return F.scaled_dot_product_attention(queries[None, None].expand(len(x), 4, 4, 3), x, x)


CALLS = {
    "standardized convolution": (lambda x, w, g: F.conv2d(x, standardized(w) * g), (6, 3, 2, 2), (6, 1, 1, 1)),
    "scaled and standardized": (lambda x, w, g: F.conv2d(x, scaled_standardized(w, g)), (6, 3, 2, 2), (6,)),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, standardized(w)), (3, 6, 2, 2)),
    "normalised": (lambda x, w: F.linear(x, F.normalize(w)), (4, 3)),
    "scaled": (lambda x, w, s: F.linear(x, w * s.exp()) * s, (4, 3), (1,)),
    "merged adapter": (adapted, (4, 3), (2, 3), (4, 2)),
    "chunks": (thirds, (6, 3), (6,)),
    "one part": (lambda x, w: F.linear(x, w[1:, 1:]), (6, 4)),
    "every other": (lambda x, w: F.linear(x, w[::2]) * w[1::2, 0], (4, 3)),
    "parts that overlap": (lambda x, w: F.linear(x, w[:3]) + F.linear(x.tanh(), w[1:]), (4, 3)),
    "a part and the whole": (lambda x, w: F.linear(F.linear(x, w[:3]), w), (4, 3)),
    "a part of a part": (lambda x, w: F.linear(x, w.view(2, 2, 3)[1][:, :]), (4, 3)),
    "a diagonal": (lambda x, w: F.linear(x, torch.diag(w.diagonal())), (3, 3)),
    "expanded": (lambda x, w: F.linear(x, w.expand(4, 3)), (1, 3)),
    "transpose": (lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), (4, 3)),
    "transpose alone": (lambda x, w: F.linear(x, w.T.contiguous()), (3, 4)),
    "transpose of a part": (lambda x, w: F.linear(x, w[:, :2].t()), (3, 4)),
    "joined": (lambda x, a, b: F.linear(x, torch.cat([a, b.t()])), (4, 3), (3, 2)),
    "token": (lambda x, t: torch.cat([t.expand(len(x), -1, -1, -1), x], 1), (1, 2, 3, 3)),
    "positions": (lambda x, p: x + p[None, :, : x.shape[2], None], (4, 7)),
    "twice": (lambda x, w: (u := w.exp(), F.linear(F.linear(x, u).tanh(), u.t()) * u.sum() + u[0])[1], (4, 3)),
    "used and unused": (lambda x, w: (w.exp().sum(), F.linear(x, w.sin()))[1], (4, 3)),
    "never used": (lambda x, w, v: (v.exp(), F.linear(x, w))[1], (4, 3), (2,)),
    "decayed": (lambda x, w: F.linear(x, w).square().sum() + w.square().sum(), (4, 3)),
    "without gradients": (lambda x, w: F.linear(x, w / largest(w)), (4, 3)),
    "in place before": (in_place_before, (4, 3)),
    "filled": (filled, (2, 3), (2,)),
    "straight through": (lambda x, w: F.linear(x, StraightThrough.apply(w)), (4, 3)),
    "a gradient of its own": (lambda x, w: F.linear(x, Tripled.apply(w)), (4, 3)),
    "complex": (lambda x, w: torch.view_as_real(x * torch.view_as_complex(w)), (3, 2)),
    "complex matrix": (lambda x, w: torch.view_as_real(torch.complex(x, x) @ torch.view_as_complex(w)), (3, 4, 2)),
    "queries": (lambda x, q, w: attended(F.linear(q, w), x), (4, 3), (3, 3)),
    "normed queries": (lambda x, q, w: attended(F.layer_norm(q, (3,), w), x), (4, 3), (3,)),
    "a truth of parameters": (lambda x, w: F.linear(x, w.exp() if w.sum() > 0 else w.sin()), (4, 3)),
    "computed table": (lambda x, w: F.embedding((x > 0).long(), w.tanh(), padding_idx=0), (2, 3)),
    "computed norm": (lambda x, w, b: F.layer_norm(x, (3,), 1 + w, b.tanh()), (3,), (3,)),
    "a constant that takes gradients": (lambda x, w: F.linear(x, w) * (2 * torch.ones(4, requires_grad=True)), (4, 3)),
    "bias alone": (lambda x, b: F.linear(x, torch.eye(3, dtype=x.dtype), b.exp()), (3,)),
}  # fmt: skip


def largest(weight):
    with torch.no_grad():
        return weight.abs().max()


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    assert_call_equals_reference(name)


def assert_call_equals_reference(name):
    torch.manual_seed(0)
    call, *shapes = CALLS[name]
    x = torch.randn(B, 3, 4, 4) if "convolution" in name or "standardized" in name else torch.randn(B, 4, 3, 3)
    for group in (flat(), per_parameter):
        assert_equals_reference(Of(call, *shapes), x, torch.float64, "truth" not in name, group)


def test_a_number_of_a_weight_is_asked_for_in_every_round():
    """The step is no graph, in which the first answer would stay."""
    call, *shapes = CALLS["a truth of parameters"]
    module, x = Weighted(Of(call, *shapes)).double(), torch.randn(B, 4, 3).double()
    plan = plan_of(module, n=20, q=0.3, steps=2, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    engine = PrivateRound(plan, module, GaussianNoise())
    for sign in (1, -1):
        module.layer.parameters_[0].data = sign * torch.rand(4, 3).double()
        sums = sums_of(engine, module.loss, x, B, B)
        assert relative_error(sums, clipped_sums(plan, module, module.loss, x, B)) < 1e-9
    assert engine.mode == "vmap" and "the value of a weight or buffer" in engine.reason


@pytest.mark.parametrize("name", ["standardized convolution", "scaled", "twice"])
def test_some_records_after_others(name, monkeypatch):
    monkeypatch.setattr(derived_parameters, "_ENTRIES_AT_ONCE", 1)
    assert_call_equals_reference(name)


def parametrised(layer, **parametrizations_of):
    for name, parametrisation in parametrizations_of.items():
        nn.utils.parametrize.register_parametrization(layer, name, parametrisation)
    return layer


class Squashed(nn.Module):
    def forward(self, weight):
        return 2 * weight.tanh()


class Scaling(nn.Linear):
    """Hands a computed weight to a module that asks NumPy about the data."""

    def __init__(self, d, p):
        super().__init__(d, p)
        self.outside = Outside()

    def forward(self, x):
        return self.outside(x, self.weight.exp())


class Outside(nn.Module):
    def forward(self, x, weight):
        return F.linear(x, weight) * (2 if x.detach().numpy().sum() > 0 else 1)


LAYERS = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Conv1d(4, 2, 2), dim=None),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="cayley"),
    "normed convolution": lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 2)),
    "lstm": lambda: parametrised(nn.LSTM(3, 5, batch_first=True), weight_hh_l0=Squashed(), bias_hh_l0=Squashed()),
    "gru": lambda: parametrised(nn.GRU(3, 5, 2, batch_first=True, bidirectional=True), weight_ih_l1=Squashed()),
    "attention": lambda: Attending(nn.MultiheadAttention(6, 2, batch_first=True)),
    "norm": lambda: parametrised(nn.GroupNorm(2, 4), weight=Squashed()),
    "table": lambda: parametrised(nn.Embedding(5, 3, padding_idx=1), weight=Squashed()),
    "cached": lambda: Cached(),
}  # fmt: skip


class Attending(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = parametrised(attention, in_proj_weight=Squashed())

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Cached(nn.Module):
    """Used twice within one computation."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        with nn.utils.parametrize.cached():
            return self.layer(self.layer(x).tanh())


INPUTS = {"table": lambda: torch.randint(5, (B, 4)), "attention": lambda: torch.randn(B, 4, 6),
          "normed convolution": lambda: torch.randn(B, 4, 5, 5)}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    traced = name != "orthogonal"  # which solves, so that there may be an error
    assert_equals_reference(layer, INPUTS.get(name, lambda: torch.randn(B, 4, 3))(), torch.float64, traced)


def test_a_computed_weight_where_records_are_processed_one_at_a_time():
    torch.manual_seed(0)
    layer, x = Scaling(3, 4), torch.randn(B, 3)
    assert_equals_reference(layer, x, torch.float64, fast=False)
    with pytest.raises(UserWarning, match="processed one at a time"):
        assert_equals_reference(layer, x, torch.float64)


def test_what_is_changed_after_data_has_met_it_is_computed_record_by_record():
    def call(x, weight):
        weight = weight * 1.5
        y = F.linear(x, weight)
        weight.mul_(2)
        return y + F.linear(x, weight)

    torch.manual_seed(0)
    layer, x = Of(call, (4, 3)), torch.randn(B, 3)
    assert_equals_reference(layer, x, torch.float64, fast=False)
    with pytest.raises(UserWarning, match="changed in place after its use with data"):
        assert_equals_reference(layer, x, torch.float64)


@pytest.mark.parametrize("of", ["data", "a parameter"])
def test_gradients_within_the_model(of):
    def call(x, weight):
        penalised = lambda z: F.linear(z, weight.exp()).tanh().sum() if of == "data" else (x * z.exp()).tanh().sum()  # noqa: E731
        return torch.func.grad(penalised)(x if of == "data" else weight) + x @ weight.t() @ weight

    torch.manual_seed(0)
    assert_equals_reference(Of(call, (3, 3) if of == "data" else (B, 3)), torch.randn(B, 3), torch.float64, fast=False)


@pytest.mark.parametrize(
    "name, bad", [("scaled and standardized", math.nan), ("merged adapter", math.inf), ("transpose", 1e30)]
)
def test_a_non_finite_record_contributes_nothing(name, bad):
    torch.manual_seed(0)
    call, *shapes = CALLS[name]
    module = Weighted(Of(call, *shapes)).double()
    x = (torch.randn(B, 3, 4, 4) if "standardized" in name else torch.randn(B, 4, 3, 3)).double()
    x[2].view(-1)[0] = bad
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    sums = dict(sums_of(PrivateRound(plan, module, GaussianNoise()), module.loss, x, B, B))
    others = [i for i in range(B) if i != 2]
    without = clipped_sums(plan, module, module.loss, x[others], B - 1)
    if math.isfinite(bad):
        assert math.hypot(*(float((sums[n] - without[n]).norm()) for n in sums)) <= 0.1 * (1 + 1e-9)
    else:
        assert relative_error(sums, without) < 1e-9


@pytest.mark.parametrize("of", ["parameter", "computed"])
def test_each_record_draws_its_own_weight(of):
    """Dropout of a weight, whose gradient is zero just where it was dropped."""
    torch.manual_seed(0)

    def call(x, weight):
        return F.linear(x, F.dropout(weight.exp() if of == "computed" else weight, 0.5))

    module = Of(call, (1, 40))
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(1e9))
    engine = PrivateRound(plan, module, GaussianNoise(), observe=True)
    x = torch.ones(B, 40)
    engine.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add_chunk(lambda one: module(one).sum(), stacked(x), B)
    scale = 2 * (module.parameters_[0].exp() if of == "computed" else 1)
    drawn = engine._sums["parameters_.0"] / scale  # how many records kept each number
    assert torch.allclose(drawn, drawn.round(), atol=1e-5) and len(drawn.round().unique()) > 3


def test_views_are_uses_of_the_parameter_that_hold_no_gradient(monkeypatch):
    """A transpose and the thirds of a weight, too large to hold a gradient for each record."""
    monkeypatch.setattr(OuterProductGradient, "materialize", lambda use: pytest.fail("a gradient is held"))
    monkeypatch.setattr(DerivedParameters, "_through_graph", lambda *_: pytest.fail("gradients go through a graph"))
    torch.manual_seed(0)
    call = lambda x, w, v: sum(F.linear(F.linear(x, part), v.t()) for part in w.chunk(3))  # noqa: E731
    assert_equals_reference(Of(call, (60, 30), (20, 40)), torch.randn(B, 2, 30), torch.float64)


def test_which_tensors_are_parts():
    p = nn.Parameter(torch.randn(4, 6))
    shown = [p.t(), p[1:, ::2], p.view(2, 12)[0], p.diagonal(), p.unflatten(1, (2, 3)).movedim(2, 0), p.expand(1, 4, 6),
             p.split(2)[1], next(iter(p)), p.view_as(p), p[None], p.unfold(1, 2, 2)]  # fmt: skip
    for view in shown:
        whole, part = view_of_leaf(view)
        assert whole is p and torch.equal(part.of(p.detach()), view)
    hidden = [p * 1, p.expand(2, 4, 6), p.unfold(1, 2, 1), Tripled.apply(p), p.t().contiguous(), (p * 1).t(),
              p.detach(), torch.view_as_complex(p.view(4, 3, 2))]  # fmt: skip
    assert [view_of_leaf(tensor) for tensor in hidden] == [None] * len(hidden)
    channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    assert view_of_leaf(channels_last[0]) is None


@pytest.mark.parametrize("name", CALLS)
def test_no_record_contributes_more_than_its_bound(name):
    """In float32, of one record whose gradient is far larger than S."""
    call, *shapes = CALLS[name]
    S, module = 0.3, Weighted(Of(call, *shapes))
    engine = PrivateRound(
        plan_of(module, n=20, q=0.05, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(S)),
        module,
        GaussianNoise(),
    )
    for seed in range(4):
        torch.manual_seed(seed)
        module.load_state_dict(Weighted(Of(call, *shapes)).state_dict())
        x = torch.randn(1, 3, 4, 4) if "convolution" in name or "standardized" in name else torch.randn(1, 4, 3, 3)
        sums = sums_of(engine, lambda one: 1e4 * module.loss(one), x, 1, 1)
        reached = math.hypot(*map(exact, sums.values()))
        assert 0.999 * S < reached <= S
