"""Recurrent layers as operators: the graph of one record, lifted by vmap, against autograd one record at a time."""

import pytest
import torch
from test_factors import assert_equals_autograd, loss_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from dpexp.privacy.gradients.recurrent import RecurrentLayersAsOperators

B, D, H = 5, 3, 4
KINDS = {
    "lstm": (nn.LSTM, {}), "gru": (nn.GRU, {}), "tanh": (nn.RNN, {}), "relu": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip
OPTIONS = {
    "one layer": {}, "without bias, both ways": {"bias": False, "bidirectional": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}  # fmt: skip


class Model(nn.Module):
    """Gives the outputs of `forward(self, …)` of one record."""

    def __init__(self, forward=lambda m, x, *states: m.layer(x, *states), **layers):
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, inputs):
        return self._forward(self, *(t[0] for t in tree_leaves(inputs)))


def of_kind(kind, **options):
    layer, others = KINDS[kind]
    return layer(D, H, **others, **options)


def traced(module, record):
    """(weights, record) -> gradients, traced on fake tensors; a record is a batch of one."""
    names, mode = [*dict(module.named_parameters())], FakeTensorMode(allow_non_fake_inputs=True)

    def gradients(weights, record):
        loss = loss_of(lambda x: functional_call(module, dict(zip(names, weights, strict=True)), (x,)), record)
        return torch.autograd.grad(loss, weights)

    with mode, RecurrentLayersAsOperators():
        weights = [mode.from_tensor(p.detach()).requires_grad_() for p in module.parameters()]
        return make_fx(gradients)(weights, mode.from_tensor(record))


def lifted(module, records, **options):
    graph = traced(module, records[:1])
    return vmap(lambda weights, one: graph(weights, one[None]), (None, 0), **options)


def weights_of(module):
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize(
    "kind, options",
    [(kind, options) for kind in KINDS for options in OPTIONS if kind != "relu" or options == "two layers, both ways"],
)
def test_gradients_of_each_record_are_autograds(kind, options):
    """Also of one step, of which no gradient of the recurrent weight is left, from states that are given."""
    torch.manual_seed(0)
    options = OPTIONS[options]
    module = Model(layer=of_kind(kind, **options)).double()
    assert_equals_autograd(module, torch.randn(B, *((1, 7) if module.layer.batch_first else (7, 1)), D).double())
    sizes = [module.layer.num_layers * (1 + module.layer.bidirectional), 1, H]
    states = [torch.randn(B, *sizes).double() for _ in range(1 + (kind == "lstm"))]
    module._forward = lambda m, x, *states: m.layer(x, states if kind == "lstm" else states[0])
    assert_equals_autograd(module, (torch.randn(B, 1, 1, D).double(), *states))


def tied():
    first, second = nn.GRU(D, D), nn.GRU(D, D)
    second.weight_hh_l0 = first.weight_hh_l0
    return Model(lambda m, x: m.second(m.first(x)[0]), first=first, second=second)


MODULES = {
    "tied": tied,
    "called twice": lambda: Model(lambda m, x: m.layer(m.layer(x)[0]), layer=nn.LSTM(D, D)),
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
    module, x = Model(layer=nn.LSTM(D, H, 2, dropout=0.5)).double(), torch.randn(1, 6, 1, D).double()
    run = lifted(module, x, randomness="same")
    torch.manual_seed(1)
    found = run(weights_of(module), x)
    torch.manual_seed(1)
    expected = torch.autograd.grad(loss_of(module, x), [*module.parameters()])
    torch.testing.assert_close([one[0] for one in found], [*expected])


def operators(graph):
    return [node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "dpexp"]


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_the_lifted_graph_is_traced_again_and_as_large_for_every_length(kind):
    """In float32, too, its gradients are autograd's."""
    torch.manual_seed(0)
    module, x = Model(layer=of_kind(kind, num_layers=2)), torch.randn(B, 6, 1, D)
    one, run, weights = traced(module, x[:1]), lifted(module, x), weights_of(module)
    assert len(traced(module, torch.randn(1, 30, 1, D)).graph.nodes) == len(one.graph.nodes) < 300
    found = run(weights, x)
    for mode in ("real", "fake"):
        graph = make_fx(run, tracing_mode=mode)(weights, x)
        assert operators(graph) == operators(one) and len(operators(one)) == 4
        assert all(map(torch.equal, graph(weights, x), found))
    expected = torch.autograd.grad(loss_of(module, x[:1]), [*module.parameters()])
    torch.testing.assert_close([one[0] for one in found], [*expected], rtol=1e-4, atol=1e-5)


def test_the_lifted_graph_is_compiled():
    torch.manual_seed(0)
    module, x = Model(layer=nn.LSTM(D, H, bidirectional=True)), torch.randn(B, 6, 1, D)
    run, weights = lifted(module, x), weights_of(module)
    compiled = torch.compile(make_fx(run, tracing_mode="fake")(weights, x), fullgraph=True)
    torch.testing.assert_close([*compiled(weights, x)], [*run(weights, x)], rtol=1e-4, atol=1e-5)


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
