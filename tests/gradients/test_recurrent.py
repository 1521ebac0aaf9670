"""Recurrent layers as operators: the graph of one record, lifted by vmap, against autograd one record at a time."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from dpexp.privacy.gradients.recurrent import RecurrentLayersAsOperators

B, D, H = 5, 3, 4
TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-12}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}
KINDS = {
    "lstm": (nn.LSTM, {}), "gru": (nn.GRU, {}), "tanh": (nn.RNN, {}), "relu": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip
OPTIONS = {
    "one layer": {}, "without bias, both ways": {"bias": False, "bidirectional": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}  # fmt: skip


class Model(nn.Module):
    """Its loss: every output counts differently."""

    def __init__(self, forward=lambda m, x, *states: m.layer(x, *states), **layers):
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        outputs = tree_leaves(self._forward(self, *inputs))
        weights = [torch.linspace(0.5, 2, t.numel(), dtype=t.dtype).sin().view(t.shape) for t in outputs]
        return sum((t * w).square().sum() for t, w in zip(outputs, weights, strict=True))


def of_kind(kind, **options):
    layer, others = KINDS[kind]
    return layer(D, H, **others, **options)


def traced(module, *record):
    """(weights, record) -> loss and gradients, traced on fake tensors."""
    names, mode = [*dict(module.named_parameters())], FakeTensorMode(allow_non_fake_inputs=True)

    def gradients(weights, *record):
        loss = functional_call(module, dict(zip(names, weights, strict=True)), record)
        return loss.detach(), *torch.autograd.grad(loss, weights)

    with mode, RecurrentLayersAsOperators():
        weights = [mode.from_tensor(p.detach()).requires_grad_() for p in module.parameters()]
        return make_fx(gradients)(weights, *map(mode.from_tensor, record))


def lifted(module, *records, **options):
    graph = traced(module, *(t[0] for t in records))
    return vmap(lambda weights, *r: tuple(graph(weights, *r)), (None, *[0] * len(records)), **options)


def weights_of(module):
    return [p.detach() for p in module.parameters()]


def one_at_a_time(module, *records, before=lambda: None):
    rows = []
    for record in zip(*records, strict=True):
        before()
        loss = module(*record)
        rows.append([loss.detach(), *torch.autograd.grad(loss, [*module.parameters()])])
    return [torch.stack(part) for part in zip(*rows, strict=True)]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE[a.dtype])


def assert_equals_autograd(module, *records):
    """Also that a record's gradients are the same bits beside another one."""
    run, weights = lifted(module, *records), weights_of(module)
    found = run(weights, *records)
    assert_close(found, one_at_a_time(module, *records))
    kept = torch.arange(B) != 2
    for factor in (3, torch.nan):
        others = [torch.cat([t[:2], t[2:3] * factor + 1, t[3:]]) for t in records]
        for a, b in zip(found, run(weights, *others), strict=True):
            assert torch.equal(a[kept], b[kept]) and not torch.equal(a[2], b[2])


@pytest.mark.parametrize(
    "options, T, dtype",
    [*itertools.product(OPTIONS, [1, 7], [torch.float64]), ("two layers, both ways", 7, torch.float32)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_record_are_autograds(kind, options, T, dtype):
    torch.manual_seed(0)
    options = OPTIONS[options]
    module = Model(layer=of_kind(kind, **options)).to(dtype)
    shape = (1, T) if options.get("batch_first") else (T, 1)
    if T == 1:  # of which no gradient of the recurrent weight is left
        directions = module.layer.num_layers * (1 + module.layer.bidirectional)
        sizes = (H, H) if kind == "lstm" else (H,)
        states = [torch.randn(B, directions, 1, size, dtype=dtype) for size in sizes]
        module._forward = lambda m, x, *s: m.layer(x, s if len(s) == 2 else s[0])
        assert_equals_autograd(module, torch.randn(B, *shape, D, dtype=dtype), *states)
    else:
        assert_equals_autograd(module, torch.randn(B, *shape, D, dtype=dtype))


def tied():
    first, second = nn.GRU(D, D), nn.GRU(D, D)
    second.weight_hh_l0 = first.weight_hh_l0
    return Model(lambda m, x: m.second(m.first(x)[0]), first=first, second=second)


MODULES = {
    "tied": tied,
    "called twice": lambda: Model(lambda m, x: m.layer(m.layer(x)[0]), layer=nn.LSTM(D, D, bidirectional=False)),
    "state of a call": lambda: Model(lambda m, x: m.layer(x, m.layer(x)[1]), layer=nn.LSTM(D, H)),
    "first state used": lambda: Model(lambda m, x: m.layer(x)[1], layer=nn.GRU(D, H, 2, bidirectional=True)),
    "without a batch": lambda: Model(lambda m, x: m.layer(x[:, 0]), layer=nn.LSTM(D, H, 2)),
    "two sequences a record": lambda: Model(lambda m, x: m.layer(torch.cat([x, x.cos()], 1)), layer=nn.GRU(D, H)),
    "a trained first state": lambda: Model(
        lambda m, x: m.layer(x, m.start(torch.ones(1, 1, 1).to(x))), layer=nn.RNN(D, H), start=nn.Linear(1, H)
    ),
    "written to": lambda: Model(lambda m, x: [t.mul_(2) for t in m.layer(x)], layer=nn.GRU(D, H)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_other_uses_of_layers(name):
    torch.manual_seed(0)
    assert_equals_autograd(MODULES[name]().double(), torch.randn(B, 6, 1, D).double())


def test_dropout_draws_as_pytorch_does():
    torch.manual_seed(0)
    module, x = Model(layer=nn.LSTM(D, H, 2, dropout=0.5)).double(), torch.randn(B, 6, 1, D).double()
    draws = lambda: torch.manual_seed(1)  # noqa: E731
    run = lifted(module, x, randomness="same")
    draws()
    assert_close(run(weights_of(module), x), one_at_a_time(module, x, before=draws))


def operators(graph):
    return [node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "dpexp"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_lifted_graph_is_traced_again_and_as_large_for_every_length(kind):
    torch.manual_seed(0)
    module, x = Model(layer=of_kind(kind, num_layers=2)), torch.randn(B, 6, 1, D)
    one, run, weights = traced(module, x[0]), lifted(module, x), weights_of(module)
    assert len(traced(module, torch.randn(30, 1, D)).graph.nodes) == len(one.graph.nodes) < 300
    for mode in ("real", "fake"):
        graph = make_fx(run, tracing_mode=mode)(weights, x)
        assert operators(graph) == operators(one) and len(operators(one)) == 4
        assert all(map(torch.equal, graph(weights, x), run(weights, x)))


def test_the_lifted_graph_is_compiled():
    torch.manual_seed(0)
    module, x = Model(layer=nn.LSTM(D, H, bidirectional=True)), torch.randn(B, 6, 1, D)
    run, weights = lifted(module, x), weights_of(module)
    compiled = torch.compile(make_fx(run, tracing_mode="fake")(weights, x), fullgraph=True)
    assert_close(compiled(weights, x), run(weights, x))


def test_the_operators_promise_what_they_do():
    """Shapes, strides and dtypes of fake tensors; no output is an input."""
    p, h, c, weight = torch.randn(6, 2, 4 * H), torch.randn(2, H), torch.randn(2, H), torch.randn(4 * H, H)
    checks = ("test_schema", "test_faketensor")
    inputs = p, h, c, weight, "lstm", True
    assert {*torch.library.opcheck(torch.ops.dpexp.recurrence, inputs, test_utils=checks).values()} == {"SUCCESS"}
    outputs, kept = torch.ops.dpexp.recurrence(*inputs)
    inputs = torch.randn_like(outputs), h, c, outputs, kept, h, c, weight, "lstm", True
    found = torch.library.opcheck(torch.ops.dpexp.recurrence_backward, inputs, test_utils=checks)
    assert {*found.values()} == {"SUCCESS"}


def test_a_second_derivative_is_refused():
    """It would be wrong, silently, if the operator passed it on."""
    layer, x = nn.GRU(D, H), torch.randn(6, 1, D, requires_grad=True)
    with RecurrentLayersAsOperators():
        (g,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        g.square().sum().backward()
