"""Every rule, for shapes that hypothesis draws, against one record at a time and against Opacus."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from plans import plan_of
from reference import clipped_sums, stacked
from test_clipped_sums import relative_error
from torch import nn
from torch.nn import functional as F

from dpexp.privacy.gradients import layer_gradients
from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    merge,
    outer_products,
)
from dpexp.privacy.gradients.norms import outer_product_norms
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping
from dpexp.privacy.plan.groups import per_layer
from dpexp.privacy.round import PrivateRound

SMALL = st.integers(1, 4)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Weighted(nn.Module):
    """Makes a loss in which every output counts differently, so that no gradient vanishes by symmetry."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def loss(self, x):
        y = self.layer(x)
        y = y[0] if isinstance(y, tuple) else y
        return (y * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).sin().view(y.shape)).square().sum()


def assert_equals_reference(layer, x, dtype, fast=True, group=None):
    """Clipping, per layer, of some of the records, in chunks, equals the reference."""
    module = Weighted(layer).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    norms = []
    for i in range(len(x)):
        module.zero_grad()
        module.loss(x[i : i + 1]).backward()
        norms.append(sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None) ** 0.5)
    S = max(sorted(norms)[len(norms) // 2], 1e-3)
    half = max(1, len(x) // 2)
    plan = plan_of(
        module, n=20, q=half / 20, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(S),
            group=group or per_layer(),
    )  # fmt: skip
    engine = PrivateRound(plan, module, GaussianNoise())
    engine.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if fast else "ignore")
        for part in x.split(half):
            engine.add_chunk(module.loss, stacked(part), len(part))
    reference = clipped_sums(plan, module, module.loss, x, len(x))
    if any((r != 0).any() for r in reference.values()):
        assert relative_error(engine._sums, reference) < TOLERANCE[dtype]


DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
DTYPE = st.sampled_from([*TOLERANCE])
QUICK = settings(max_examples=12, deadline=None, derandomize=True)


@QUICK
@given(
    dtype=DTYPE, lead=st.lists(SMALL, max_size=2), d=st.integers(1, 6), p=st.integers(1, 6), bias=st.booleans(),
    seed=SMALL,
)  # fmt: skip
def test_linear(dtype, lead, d, p, bias, seed):
    torch.manual_seed(seed)
    assert_equals_reference(nn.Linear(d, p, bias), torch.randn(4, *lead, d), dtype)


@QUICK
@given(
    dtype=DTYPE,
    space=st.integers(1, 3), groups=st.integers(1, 2), k=st.integers(1, 3), stride=st.integers(1, 2),
    dilation=st.integers(1, 2), padding=st.sampled_from([0, 1, "same", "valid"]),
    mode=st.sampled_from(["zeros", "reflect", "circular"]), bias=st.booleans(), width=SMALL,
)  # fmt: skip
def test_convolutions(dtype, space, groups, k, stride, dilation, padding, mode, bias, width):
    torch.manual_seed(0)
    if padding == "same":
        stride = 1
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    layer = make(2 * groups, width * groups, k, stride, padding, dilation, groups, bias, mode)
    assert_equals_reference(layer, torch.randn(4, 2 * groups, *(7, 6, 5)[:space]), dtype)


@DTYPES
@pytest.mark.parametrize("d, p, k, side", [(8, 40, 3, 5), (30, 6, 3, 6), (2, 3, 2, 12)])
def test_convolutions_by_each_method(dtype, d, p, k, side, monkeypatch):
    """Gram matrices; the gradients of a few records at a time; all gradients at once."""
    torch.manual_seed(0)
    taken = []
    monkeypatch.setattr(layer_gradients, "_MATERIALIZED_ENTRIES", 1000)
    for kind in (ConvolutionGradient, DenseGradient):
        make = kind.__init__

        def noted(self, *args, kind=kind, make=make):
            taken.append((kind, kind is ConvolutionGradient and args[3] is not None))
            make(self, *args)

        monkeypatch.setattr(kind, "__init__", noted)
    assert_equals_reference(nn.Conv2d(d, p, k, bias=False), torch.randn(4, d, side, side), dtype)
    method = {8: (ConvolutionGradient, True), 30: (ConvolutionGradient, False), 2: (DenseGradient, False)}[d]
    assert method in taken


@QUICK
@given(
    dtype=DTYPE,
    space=st.integers(1, 3), groups=st.integers(1, 2), k=st.integers(1, 3), stride=st.integers(1, 2),
    dilation=st.integers(1, 2), padding=st.integers(0, 1), width=SMALL,
)  # fmt: skip
def test_transposed_convolutions(dtype, space, groups, k, stride, dilation, padding, width):
    torch.manual_seed(0)
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[space - 1]
    layer = make(2 * groups, width * groups, k, stride, padding, stride - 1, groups, True, dilation)
    assert_equals_reference(layer, torch.randn(4, 2 * groups, *(5, 4, 3)[:space]), dtype)


@QUICK
@given(dtype=DTYPE, rows=st.integers(1, 5), d=SMALL, T=st.integers(1, 6), padding=st.booleans(), seed=SMALL)
def test_embeddings(dtype, rows, d, T, padding, seed):
    torch.manual_seed(seed)
    index = torch.randint(rows, (4, T))
    assert_equals_reference(nn.Embedding(rows, d, padding_idx=0 if padding else None), index, dtype)
    for mode in ("sum", "mean"):
        assert_equals_reference(
            nn.EmbeddingBag(rows, d, mode=mode, padding_idx=rows - 1 if padding else None), index, dtype
        )


@QUICK
@given(
    dtype=DTYPE,
    lead=st.lists(SMALL, max_size=2),
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    bias=st.booleans(),
)
def test_layer_and_rms_norm(dtype, lead, shape, bias):
    torch.manual_seed(0)
    x = torch.randn(4, *lead, *shape)
    assert_equals_reference(nn.LayerNorm(shape, bias=bias), x, dtype)
    assert_equals_reference(nn.RMSNorm(shape), x, dtype)


@QUICK
@given(dtype=DTYPE, groups=st.integers(1, 3), per=st.integers(1, 2), space=st.integers(1, 3))
def test_group_and_instance_norm(dtype, groups, per, space):
    torch.manual_seed(0)
    x = torch.randn(4, groups * per, *(5, 3, 2)[:space])
    assert_equals_reference(nn.GroupNorm(groups, groups * per), x, dtype)
    make = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[space - 1]
    assert_equals_reference(make(groups * per, affine=True), x, dtype)


@DTYPES
@pytest.mark.parametrize("kind, batch_first", [(nn.LSTM, True), (nn.LSTM, False), (nn.GRU, True), (nn.RNN, False)])
def test_recurrent_layers(dtype, kind, batch_first):
    torch.manual_seed(0)
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
    if batch_first:
        return assert_equals_reference(layer, torch.randn(4, 5, 3), dtype)
    assert_equals_reference(Sequenced(layer), torch.randn(4, 5, 3), dtype)


class Sequenced(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0]


class Attention(nn.Module):
    def __init__(self, across=False, **options):
        super().__init__()
        self.across = across
        self.options = options
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y, weights = self.attention(x, x.flip(1) if self.across else x, x, **self.options)
        return y if weights is None else torch.cat([y.flatten(), weights.flatten()])


CAUSAL = torch.ones(5, 5).triu(1).bool()
PADDING = torch.tensor([[False, False, False, False, True]])


@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False, "attn_mask": CAUSAL},
        {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True},
        {"need_weights": False, "key_padding_mask": PADDING},
        {"need_weights": True},
        {"need_weights": False, "across": True},
        {"need_weights": True, "across": True, "attn_mask": CAUSAL, "key_padding_mask": PADDING},
        {"need_weights": True, "average_attn_weights": False, "attn_mask": CAUSAL},
        {"need_weights": False, "attn_mask": CAUSAL.expand(2, 5, 5)},
    ],
)
def test_attention(options):
    torch.manual_seed(0)
    assert_equals_reference(Attention(**options), torch.randn(4, 5, 8), torch.float64)


class ScaledDotProduct(nn.Module):
    """Attention by the function itself, of [*lead, T, 8], with a mask that data, a parameter or neither makes."""

    def __init__(self, lead, mask, of, **options):
        super().__init__()
        self.lead, self.shape, self.of, self.options = lead, mask, of, options
        self.project = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        each = 1 + torch.arange(math.prod(self.lead)).view(*self.lead, 1, 1) / 10
        q = self.project(x.view(5, 8)).expand(*self.lead, 5, 8) * each
        heads = self.options.get("enable_gqa")
        k = v = q[..., ::2, :, :] if heads else q.roll(1, -1)
        if self.of is None:
            mask = None
        elif self.of == "data":
            mask = (x.view(5, 8)[:, :1] > -0.5) | torch.eye(5, dtype=torch.bool)
        elif self.of == "parameter":
            mask = self.shift.tanh()
        else:
            mask = torch.ones(5, 5).tril().bool()
        if mask is not None:
            mask = mask.reshape(5, 5).expand(self.shape)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).flatten(0, -3 if self.lead else -2)


MASKED = [
    ((), (5, 5)), ((2,), (5, 5)), ((2,), (2, 5, 5)), ((1, 2), (5, 5)), ((1, 2), (1, 1, 5, 5)), ((3, 2), (5, 5)),
    ((3, 2), (2, 5, 5)), ((3, 2), (3, 1, 5, 5)), ((2, 3, 2), (3, 1, 5, 5)), ((2, 3, 2), (2, 1, 1, 5, 5)),
]  # fmt: skip


@pytest.mark.parametrize(
    "lead, mask, of, dtype",
    [(*one, ("data", "parameter", "constant")[(i + k) % 3], [*TOLERANCE][(i // 3 + k) % 2])
     for i, one in enumerate(MASKED) for k in range(1 + (i % 3 == 0))],
)  # fmt: skip
def test_masked_attention(dtype, lead, mask, of):
    torch.manual_seed(0)
    assert_equals_reference(ScaledDotProduct(lead, mask, of), torch.randn(4, 5, 8), dtype)


class Telling(nn.Linear):
    """Branches on the text of a record."""

    def forward(self, x):
        return super().forward(x) * (3 if "-" in self.text(x[0, :1]) else 1)


@pytest.mark.parametrize("text", [str, repr, "{}".format, lambda x: f"{x!s:>40}", "%s".__mod__])
def test_the_text_of_a_record_is_its_own(text):
    torch.manual_seed(0)
    layer = Telling(3, 2)
    layer.text = text
    assert_equals_reference(
        layer, torch.rand(6, 3) - torch.tensor([0, 0, 0, 0, 0, 1.0])[:, None], torch.float64, fast=False
    )


@DTYPES
@pytest.mark.parametrize(
    "lead, options", [((2,), {"is_causal": True}), ((1, 2), {"scale": 0.1}), ((3, 4), {"enable_gqa": True})]
)
def test_attention_as_it_is_called(dtype, lead, options):
    torch.manual_seed(0)
    assert_equals_reference(ScaledDotProduct(lead, (), None, **options), torch.randn(4, 5, 8), dtype)


@DTYPES
def test_a_users_own_rule(dtype):
    """A scale as a torch function of its own, registered in a few lines."""
    from dpexp.privacy.gradients.layer_rules import RULES, LayerCall, layer_rule

    @layer_rule(torch.ops.aten.prelu.default, torch.prelu)
    def prelu(input, weight):
        def uses_of(x, g):
            return {"weight": DenseGradient((g * x.clamp(max=0)).flatten(1).sum(1, keepdim=True))}

        return LayerCall(input, {"weight": weight}, torch.prelu, uses_of)

    try:
        torch.manual_seed(0)
        assert_equals_reference(nn.PReLU(), torch.randn(4, 5), dtype)
    finally:
        for function in (torch.ops.aten.prelu.default, torch.prelu):
            del RULES[function]


# The methods of a use, and sharing


def uses_and_gradients(T, d, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(3, T, size, generator=generator, dtype=torch.float64) for size in (d, p))
    return x, g, torch.einsum("btp,btd->bpd", g, x)


@pytest.mark.parametrize("T, d, p", [(1, 5, 4), (2, 30, 40), (70, 30, 40), (9, 3, 2)])
def test_outer_products_by_each_method(T, d, p):
    x, g, gradients = uses_and_gradients(T, d, p)
    use = outer_products(x, g)
    assert torch.allclose(use.squared_norms(), gradients.square().sum((1, 2)), rtol=1e-9)
    assert isinstance(use, DenseGradient) == (T > 1 and 2 * T * (d + p) >= d * p)
    assert torch.allclose(outer_product_norms(x, g)[0].square(), gradients.square().sum((1, 2)), rtol=1e-9)
    total, c = torch.ones(p, d, dtype=torch.float64), torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    use.add_weighted_sum(c, total)
    assert torch.allclose(total, 1 + torch.einsum("b,bpd->pd", c, gradients), rtol=1e-9)


@pytest.mark.parametrize("closeness", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("T, d, p", [(2, 2304, 256), (64, 300, 700), (130, 64, 512)])
def test_cancelling_terms_do_not_shrink_the_norm(T, d, p, closeness):
    """Half of the positions all but take back what the other half gives; float32 must not see less than there is."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(20, T // 2, size, generator=generator) for size in (d, p))
    x = torch.cat([x, x + closeness * torch.randn(x.shape, generator=generator)], 1)
    g = torch.cat([g, -g + closeness * torch.randn(g.shape, generator=generator)], 1)
    true = torch.bmm(g.double().transpose(1, 2), x.double()).square().sum((1, 2))
    assert (outer_product_norms(x, g)[0].square() >= true).all()


def test_shared_parameters_keep_their_cross_terms():
    """Two linear uses; an embedding's two; an embedding tied to a linear layer; a scale used twice."""
    x, g, gradients = uses_and_gradients(3, 4, 7)
    index = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))
    rows = torch.randn(3, 5, 4, dtype=torch.float64)
    table = EmbeddingGradient(index, rows, 7)
    for together, total in (
        ([OuterProductGradient(x, g), OuterProductGradient(2 * x, g)], 3 * gradients),
        ([table, EmbeddingGradient(index, -3 * rows, 7)], -2 * table.materialize()),
        ([table, OuterProductGradient(x, g)], table.materialize() + gradients),
        ([DenseGradient(gradients), OuterProductGradient(x, g)], 2 * gradients),
    ):
        use = merge(together)
        assert torch.allclose(use.squared_norms(), total.square().sum((1, 2)), rtol=1e-9)
        summed = torch.zeros(7, 4, dtype=torch.float64)
        use.add_weighted_sum(torch.ones(3, dtype=torch.float64), summed)
        assert torch.allclose(summed, total.sum(0), rtol=1e-9)


# Opacus as a second, independent reference

LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), lambda: torch.randn(4, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1), lambda: torch.randn(4, 2, 6)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), lambda: torch.randn(4, 4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), lambda: torch.randn(4, 2, 4, 4, 4)),
    "embedding": (lambda: nn.Embedding(6, 3), lambda: torch.randint(6, (4, 5))),
    "layer_norm": (lambda: nn.LayerNorm(6), lambda: torch.randn(4, 3, 6)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), lambda: torch.randn(4, 4, 5)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), lambda: torch.randn(4, 3, 5, 5)),
    "rms_norm": (lambda: nn.RMSNorm(6), lambda: torch.randn(4, 3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_per_record_gradients_are_those_of_opacus(name):
    torch.manual_seed(0)
    build, data = LAYERS[name]
    layer, x = build(), data()
    module = Weighted(layer)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(1e9))
    ours = {}
    engine = PrivateRound(plan, module, GaussianNoise())
    for i in range(len(x)):
        engine.begin()
        engine.add_chunk(module.loss, x[None, i : i + 1], 1)
        ours[i] = dict(engine._sums)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GradSampleModule(layer, loss_reduction="sum")
        y = theirs(x)
        scale = torch.linspace(0.5, 2, y[0].numel()).sin().view(1, *y.shape[1:])
        (y * scale).square().sum().backward()
    for parameter, p in layer.named_parameters():
        for i in range(len(x)):
            assert torch.allclose(p.grad_sample[i], ours[i][f"layer.{parameter}"], rtol=1e-4, atol=1e-5), parameter
