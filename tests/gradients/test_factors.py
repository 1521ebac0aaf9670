"""Factors read off the graph of one record: norms and sums are those of each record's gradient by ordinary autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import record, stacked
from test_norms import exact
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from dpexp.privacy.gradients import layer_gradients
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.factors import products_of_windows
from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    TiedGradient,
    merge,
    outer_products,
)
from dpexp.privacy.gradients.lifted import Lifted
from dpexp.privacy.gradients.norms import full_precision, tied_norms
from dpexp.privacy.gradients.one_record import trace_one
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.plan.groups import trainable
from dpexp.privacy.private_metrics import Values

B = 5


def loss_of(module, x):
    """In which every output counts differently, so that no gradient vanishes by symmetry."""
    outputs = [y for y in tree_leaves(module(x)) if y is not None]
    weights = [torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).sin().view(y.shape) for y in outputs]
    return sum((y * weight).square().sum() for y, weight in zip(outputs, weights, strict=True))


def lifted_from_one(module, x, loss_of=loss_of):
    """The lifted graph of one record, and what it gives for all."""
    chunk = Chunk.of(TrainingStep.of(loss_of, module), stacked(x), len(tree_leaves(x)[0]))
    parameters = {**trainable(module)}
    one = trace_one(parameters, chunk, Values({}, next(iter(parameters.values()))))
    lifted = Lifted(one)
    with torch.no_grad(), full_precision(torch.device("cpu")):
        return lifted, lifted([t.detach() for t in one.inputs.tensors()], chunk.tensors)


def assert_equals_autograd(module, x, tolerance=1e-9, loss_of=loss_of):
    """Norms and weighted sums of each parameter's gradients; returns the names of those that are stored."""
    lifted, found = lifted_from_one(module, x, loss_of)
    by_record, c = [], torch.linspace(-0.5, 2, len(found.losses), dtype=torch.float64)
    for i in range(len(c)):
        module.zero_grad()
        loss = loss_of(module, record(x, i))
        loss.backward()
        assert found.losses[i].item() == pytest.approx(loss.item(), rel=1e3 * tolerance)
        by_record.append({name: p.grad for name, p in module.named_parameters()})
    for name, p in trainable(module).items():
        if name not in found.by_name:
            assert all(each[name] is None or not each[name].any() for each in by_record), name
            continue
        dense = torch.stack([each[name].double().to_dense().flatten() for each in by_record])
        size, true, gradient = dense.norm() + 1e-12, dense.norm(dim=1), found.by_name[name]
        norms, total = gradient.squared_norms().sqrt(), gradient.weighted_sum(c.to(p.dtype))
        assert (norms >= true * (1 - tolerance)).all() and (norms <= true + (2e-2 + tolerance) * size).all(), name
        assert (total.flatten() - c @ dense).norm() <= 3 * tolerance * size, name
        assert (gradient.materialize().reshape(dense.shape) - dense).norm() <= tolerance * size, name
    assert_norms_are_not_too_small(module, x, loss_of)
    return lifted.stored


def assert_norms_are_not_too_small(module, x, loss_of):
    """In float32, against what is added to a sum."""
    dtype = next(module.parameters()).dtype
    module.float()
    _, found = lifted_from_one(module, tree_map(lambda t: t.float() if t.is_floating_point() else t, x), loss_of)
    for name, p in trainable(module).items():
        for i, c in enumerate(torch.eye(len(found.losses)) if name in found.by_name else ()):
            total = found.by_name[name].weighted_sum(c)
            assert total.numel() == p.numel(), name
            assert exact(total) <= float(found.by_name[name].squared_norms()[i]) ** 0.5 * (1 + 2.0**-22), name
    module.to(dtype)


class Of(nn.Module):
    """A call of some parameters and x."""

    def __init__(self, call, *shapes):
        super().__init__()
        self.call = call
        self.w = nn.ParameterList(torch.randn(shape) / 2 for shape in shapes)

    def forward(self, x):
        return self.call(x, *self.w)


# Operators, and which parameters' gradients are stored


def standardized(weight):
    mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
    return (weight - mean) / (deviation + 1e-5)


class StraightThrough(torch.autograd.Function):
    """The forward pass rounds; the gradient takes no notice."""

    @staticmethod
    def forward(ctx, weight):
        return weight.round(decimals=1)

    @staticmethod
    def backward(ctx, g):
        return g


class Halves(torch.autograd.Function):
    """The identity, whose gradient is one half everywhere."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.full(g.shape, 0.5, dtype=g.dtype)


def half_constant(x, weight):
    first, second = weight.split(2)
    return F.linear(x, first) + Halves.apply(second).sum()


def normalized_images(x, weight, scale, shift):
    """Channels are last in memory."""
    return F.group_norm(F.conv2d(x.view(-1, 4, 1, 3).permute(0, 3, 1, 2), weight), 2, scale, shift)


def filled(x, a, b):
    """Written into a tensor that was none of the parameters'."""
    weight = x.new_zeros(4, 3)
    weight[:2] = a
    weight[2:, 1] = b
    return F.linear(x, weight).tanh() * 2


def in_place_before(x, weight):
    weight = weight * 1.0
    weight[0] *= 2
    weight.tanh_()
    return F.linear(x, weight)


def thirds(x, weight, bias):
    return sum(F.linear(x, *part) for part in zip(weight.chunk(3), bias.chunk(3), strict=True))


def some_rows(x):
    return (x[..., 0] > 0).long()


CALLS = {
    "x @ W": (lambda x, w: x @ w, (3, 5)),
    "x @ W of one vector": (lambda x, w: x[0, 0] @ w, (3, 5)),
    "W @ x": (lambda x, w: w @ x.mT, (5, 3)),
    "x @ w": (lambda x, w: x @ w, (3,)),
    "matrices of heads": (lambda x, w: x @ w, (4, 3, 5)),
    "addmm, scaled": (lambda x, w, b: torch.addmm(b, x.view(-1, 3), w, beta=0.5, alpha=2), (3, 5), (1, 5)),
    "addmm, a bias for each row": (lambda x, w, b: torch.addmm(b, x.view(-1, 3), w), (3, 5), (4, 5)),
    "transposed and reshaped": (lambda x, w: F.linear(x, w.t().reshape(8, 3)), (4, 6)),
    "a constant gradient": (half_constant, (4, 3)),
    "group norm, channels last": (normalized_images, (4, 3, 1, 1), (4,), (4,)),
    "used twice": (lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), (4, 3)),
    "einsum": (lambda x, w: torch.einsum("btd, dp -> btp", x, w), (3, 5)),
    "einsum of heads": (lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (3, 2, 4)),
    "einsum with a common index": (lambda x, w: torch.einsum("btd,tdp->btp", x, w), (4, 3, 2)),
    "chunks": (thirds, (6, 3), (6,)),
    "a part": (lambda x, w: F.linear(x, w[1:, 1:]), (6, 4)),
    "expanded": (lambda x, w: F.linear(x, w.expand(4, 3)), (1, 3)),
    "joined": (lambda x, a, b: F.linear(x, torch.cat([a, b.t()])), (4, 3), (3, 2)),
    "embedding": (lambda x, w: F.embedding(some_rows(x), w), (7, 5)),
    "embedding with padding": (lambda x, w: F.embedding(some_rows(x), w, padding_idx=0), (7, 5)),
    "embedding by frequency": (lambda x, w: F.embedding(some_rows(x), w, scale_grad_by_freq=True), (7, 5)),
    "index": (lambda x, w: w[some_rows(x)], (7, 5)),
    "index from the end": (lambda x, w: w[some_rows(x) - 2], (7, 5)),
    "index_select": (lambda x, w: w.index_select(0, some_rows(x)[0]), (7, 5)),
    "constant rows": (lambda x, w: w[torch.tensor([1, -1, 0, 2])] * x[..., :1], (3, 4)),
    "a table as weight": (lambda x, w: F.linear(F.embedding(some_rows(x), w), w), (7, 5)),
    "an indexed weight": (lambda x, w: F.linear(w[some_rows(x)], w), (7, 5)),
    "convolution of 1": (lambda x, w: F.conv1d(x.mT, w), (6, 3, 2)),
    "convolution in groups": (lambda x, w: F.conv1d(x, w, groups=2, stride=2, dilation=2, padding=2), (6, 2, 2)),
    "standardized convolution": (lambda x, w, g: F.conv2d(x[:, None], standardized(w) * g), (6, 1, 2, 2), (6, 1, 1, 1)),
    "normalised": (lambda x, w: F.linear(x, F.normalize(w)), (4, 3)),
    "merged adapter": (lambda x, a, b: F.linear(x, b @ a), (2, 3), (4, 2)),
    "straight through": (lambda x, w: F.linear(x, StraightThrough.apply(w)), (4, 3)),
    "scale": (lambda x, w: x * w, (3,)),
    "decay": (lambda x, w: F.linear(x, w).square().sum() + w.square().sum(), (4, 3)),
    "in place": (in_place_before, (4, 3)),
    "filled": (filled, (2, 3), (2,)),
    "queries": (lambda x, q, w: F.scaled_dot_product_attention(F.linear(q, w)[None].expand(len(x), 4, 3), x, x),
                (4, 3), (3, 3)),
    "complex": (lambda x, w: torch.view_as_real(torch.complex(x, x) @ torch.view_as_complex(w)), (3, 4, 2)),
    "gradient within": (lambda x, w: torch.func.grad(lambda z: F.linear(z, w.exp()).tanh().sum())(x) + x, (3, 3)),
    "one for several": (lambda x, w: torch.einsum("btd,dp->btp", x[..., :1], w), (3, 2)),
}  # fmt: skip
STORED = {  # how many gradients
    "addmm, scaled": 2, "group norm, channels last": 2, "joined": 2, "standardized convolution": 2, "filled": 2,
} | dict.fromkeys((
    "x @ w", "matrices of heads", "einsum with a common index", "a part", "expanded", "chunks",
    "embedding by frequency", "normalised", "scale", "decay", "in place", "complex", "gradient within",
    "one for several", "addmm, a bias for each row", "transposed and reshaped", "a constant gradient",
), 1)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    torch.manual_seed(0)
    call, *shapes = CALLS[name]
    stored = assert_equals_autograd(Of(call, *shapes).double(), torch.randn(B, 4, 3).double())
    assert len(stored) == STORED.get(name, 0)


SMALL = st.integers(1, 4)
QUICK = settings(max_examples=8, deadline=None, derandomize=True)


@QUICK
@given(lead=st.lists(SMALL, max_size=2), d=st.integers(1, 6), p=st.integers(1, 6), bias=st.booleans(), seed=SMALL)
def test_linear(lead, d, p, bias, seed):
    torch.manual_seed(seed)
    stored = assert_equals_autograd(nn.Linear(d, p, bias).double(), torch.randn(3, *lead, d).double())
    assert "weight" not in stored


@settings(QUICK, max_examples=20)
@given(
    space=st.integers(1, 3), transposed=st.booleans(), groups=st.integers(1, 2), k=st.integers(1, 3),
    stride=st.integers(1, 2), dilation=st.integers(1, 2), padding=st.sampled_from([0, 1, "same", "valid"]),
    mode=st.sampled_from(["zeros", "reflect", "circular"]), bias=st.booleans(), width=SMALL,
)  # fmt: skip
def test_convolutions(space, transposed, groups, k, stride, dilation, padding, mode, bias, width):
    torch.manual_seed(0)
    channels = 2 * groups, width * groups, k
    if transposed:
        make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[space - 1]
        layer = make(*channels, stride, int(padding == 1), stride - 1, groups, bias, dilation)
    else:
        make, stride = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1], 1 if padding == "same" else stride
        layer = make(*channels, stride, padding, dilation, groups, bias, mode)
    stored = assert_equals_autograd(layer.double(), torch.randn(3, 2 * groups, *(7, 6, 5)[:space]).double())
    assert "weight" not in stored


@QUICK
@given(rows=st.integers(1, 5), d=SMALL, T=st.integers(1, 6), padding=st.booleans(), seed=SMALL)
def test_embeddings(rows, d, T, padding, seed):
    torch.manual_seed(seed)
    index = torch.randint(rows, (3, T))
    layer = nn.Embedding(rows, d, padding_idx=0 if padding else None, sparse=seed == 1)
    assert assert_equals_autograd(layer.double(), index) == []
    for mode in ("sum", "mean")[seed % 2 :]:
        bag = nn.EmbeddingBag(rows, d, mode=mode, padding_idx=rows - 1 if padding else None)
        assert_equals_autograd(bag.double(), index)


UNLIKE = {"stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)}


@pytest.mark.parametrize(
    "d, p, side, unlike_sides", [(8, 40, 5, {}), (8, 40, 6, UNLIKE), (30, 6, 6, {}), (2, 3, 12, {})]
)
def test_convolutions_by_each_method(d, p, side, unlike_sides, monkeypatch):
    """Gram matrices; the gradients of a few records at a time; all gradients at once."""
    torch.manual_seed(0)
    monkeypatch.setattr(layer_gradients, "_MATERIALIZED_ENTRIES", 1000)
    layer, x = nn.Conv2d(d, p, 3, bias=False, **unlike_sides).double(), torch.randn(B, d, side, side).double()
    found = lifted_from_one(layer, x)[1].by_name["weight"]
    assert isinstance(found, DenseGradient if d == 2 else ConvolutionGradient)
    assert d == 2 or (found._unfold is not None) == (d == 8)
    assert_equals_autograd(layer, x)


def test_no_gradient_is_stored_of_matrices_that_are_large_against_the_number_of_positions(monkeypatch):
    monkeypatch.setattr(OuterProductGradient, "materialize", lambda use: pytest.fail("a gradient is stored"))
    torch.manual_seed(0)
    for call, *shapes in (
        (lambda x, w, v: F.linear(x @ w, v), (60, 50), (40, 50)),
        (lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (60, 2, 25)),
        (lambda x, w: F.linear(x, w) @ w, (50, 60)),
    ):
        module = Of(call, *shapes)
        lifted, found = lifted_from_one(module, torch.randn(B, 3, 60))
        assert lifted.stored == [] and all(type(g) is OuterProductGradient for g in found.by_name.values())


# The methods of a use, and sharing


def uses_and_gradients(T, d, p):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, T, size, generator=generator, dtype=torch.float64) for size in (d, p))
    return x, g, torch.einsum("btp,btd->bpd", g, x)


def assert_is(use, gradients):
    assert torch.allclose(use.squared_norms(), gradients.square().sum((1, 2)), rtol=1e-9)
    c = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    total = use.weighted_sum(c).reshape(gradients.shape[1:])
    assert torch.allclose(total, torch.einsum("b,bpd->pd", c, gradients), rtol=1e-9)


CONVOLUTIONS = [
    nn.Conv1d(3, 4, 3, stride=2, padding=1),
    nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    nn.Conv2d(6, 12, 3, groups=6),
    nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0)),
    nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(4, 6, 3, stride=2, dilation=2, groups=2),
    nn.ConvTranspose3d(2, 3, (2, 3, 2)),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=repr)
def test_products_of_windows_are_the_gradients_of_each_convolution(layer):
    """As a GPU computes them, against autograd, one record of two images at a time."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, layer.in_channels, *[7, 6, 5][: len(layer.kernel_size)]).double()
    g = torch.randn_like(torch.stack([layer.double()(images) for images in x]))
    geometry = (layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)
    found = products_of_windows(x, g, layer.weight.shape, geometry)
    for i in range(3):
        (true,) = torch.autograd.grad(layer(x[i]), layer.weight, g[i])
        torch.testing.assert_close(found[i], true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T, d, p", [(1, 5, 4), (2, 30, 40), (70, 30, 40), (9, 3, 2)])
def test_outer_products_by_each_method(T, d, p):
    x, g, gradients = uses_and_gradients(T, d, p)
    use = outer_products(x, g)
    assert isinstance(use, DenseGradient) == (T > 1 and 2 * T * (d + p) >= d * p)
    assert_is(use, gradients)
    assert_is(OuterProductGradient(x, g), gradients)


@pytest.mark.parametrize("d, V, by_positions", [(4, 7, False), (30, 700, True)])
def test_shared_parameters_keep_their_cross_terms(d, V, by_positions):
    """Two linear uses; an embedding's two; an embedding tied to a linear layer; a scale used twice."""
    x, g, gradients = uses_and_gradients(3, d, V)
    index = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
    rows = torch.randn(3, 5, d, dtype=torch.float64)
    head, table = OuterProductGradient(x, g), EmbeddingGradient(index, rows, V)
    tied = merge([table, head])
    assert isinstance(tied, TiedGradient) == by_positions
    assert_is(tied, table.materialize() + gradients)
    assert_is(merge([head, OuterProductGradient(2 * x, g)]), 3 * gradients)
    assert_is(merge([table, EmbeddingGradient(index, -3 * rows, V)]), -2 * table.materialize())
    assert_is(merge([DenseGradient(gradients), head]), 2 * gradients)


@pytest.mark.parametrize("left", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**20])
def test_a_tied_table_whose_uses_cancel_has_a_norm_that_is_not_too_small(left, scale):
    """The head gives each position's row what the embedding takes from it, up to a part that is `left`."""
    torch.manual_seed(0)
    B, S, V, d = 20, 24, 900, 60
    index = torch.randint(40, (B, S))  # rows repeat
    x, a = torch.randn(B, S, d), scale * torch.randn(B, S, 1)
    o = torch.zeros(B, S, V).scatter_(2, index[..., None], a) + left * scale * torch.randn(B, S, V)
    e = -a * x + left * scale * torch.randn(B, S, d)
    tied = merge([OuterProductGradient(x, o), EmbeddingGradient(index, e, V)])
    assert isinstance(tied, TiedGradient)
    head = torch.bmm(o.double().mT, x.double())
    table = torch.zeros_like(head).scatter_add_(1, index[..., None].expand(-1, -1, d), e.double())
    true, found = (head + table).norm(dim=(1, 2)), tied.squared_norms().sqrt()
    assert (tied_norms(index, e, x, o, table.square().sum((1, 2)) + head.square().sum((1, 2))) >= true).all()
    off = 0.02 * x.double().norm(dim=(1, 2)) * o.double().norm(dim=(1, 2))
    assert (true <= found).all() and (found <= 1.01 * true + off + 1e-15).all()
    for i, c in enumerate(torch.eye(B)):
        assert tied.weighted_sum(c).double().norm() <= found[i]
