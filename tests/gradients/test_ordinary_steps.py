"""Steps of ordinary training code: records together have the gradients that each has alone, by ordinary autograd."""

import pytest
import torch
from test_factors import Of, assert_equals_autograd, lifted_from_one
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from dpexp._transformers_compat import trained_privately

B, D = 5, 3


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def numbers(*shape):
    return torch.randn(B, *shape, dtype=torch.float64)


class LastState(nn.GRU):
    def forward(self, x):
        return super().forward(x[None])[1][0]


# Gradients that the step takes itself


def pgd(net, batch):
    x, y = batch
    delta = torch.zeros_like(x)
    for _ in range(2):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x + delta), y), [delta])
        delta = delta.detach() + 0.1 * gradient
    return F.cross_entropy(net(x + delta), y)


def gradient_penalty(net, batch):
    x, y = batch
    out = net(x.requires_grad_())
    gradient = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return F.cross_entropy(out, y) + (gradient.norm(2, 1) - 1).square().mean()


def through_a_recurrent_layer(net, batch):
    x = batch[0][:, None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net.gru(x)[0].square().sum(), x)
    return net.gru(x.detach() + gradient)[1].sum()


def exempt_for_a_while(net, batch):
    net[0].requires_grad_(False)
    frozen = net(batch[0]).square().sum()
    net[0].requires_grad_(True)
    return frozen + net(batch[0]).sum()


STEPS = [pgd, gradient_penalty, through_a_recurrent_layer, exempt_for_a_while]


@pytest.mark.parametrize(
    "step, recurrent", [*((step, False) for step in STEPS), (pgd, True), (exempt_for_a_while, True)]
)
def test_gradients_that_the_step_takes(step, recurrent):
    net = network()
    if recurrent:
        net[0] = LastState(D, 5).double()
    if step is through_a_recurrent_layer:
        net.gru = nn.GRU(D, 4, batch_first=True).double()
    assert_equals_autograd(net, (numbers(D), torch.tensor([0, 1, 1, 0, 1])), loss_of=step)
    assert all(p.requires_grad for p in net.parameters())


# Idioms


def in_parts(x, weight):
    parts = weight.new_zeros(3, len(x), 2)
    for k in range(3):
        parts[k] = F.linear(x * k, weight)
    return parts


def shuffled(x, weight):
    order = torch.tensor([2, 0, 1])
    filled = torch.full((len(x), D, 1), 0.5, dtype=x.dtype)
    filled[torch.arange(len(x))[:, None], order] = x[:, :, None]
    return F.linear(filled[..., 0], weight).sin()


def as_new(x, weight):
    return F.linear(torch.tensor(data=x, dtype=x.dtype) + torch.tensor(x), weight).sin()


def one_hot(x, weight):
    chosen = torch.zeros(len(x), 2, dtype=x.dtype).scatter_(1, x.argmax(1, keepdim=True) % 2, 1.0)
    return F.linear(x, weight) * chosen


def of_data(x, weight):
    return F.linear(x, weight) * (x.data > 0).double().sum()


def channels_last(x, weight):
    image = x.view(len(x), 1, D, 1).to(memory_format=torch.channels_last)
    return F.linear(image.contiguous(memory_format=torch.channels_last).flatten(1), weight)


def one_bag(x, weight):
    return F.embedding_bag(torch.tensor([1, 0, 1]), weight, torch.tensor([0]), mode="sum", sparse=True) * x


@pytest.mark.parametrize("call", [in_parts, shuffled, as_new, one_hot, of_data, channels_last, one_bag])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_idioms_of_training_steps(call):
    assert_equals_autograd(Of(call, (2, D)).double(), numbers(D))


# Random numbers


def test_uninitialized_memory_holds_no_record():
    net, x = network(), numbers(D)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        _, found = lifted_from_one(net, x, lambda net, x: net(x).sum() + torch.empty(1, 9, dtype=torch.float64).sum())
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found.losses, net(x).sum(1))


def of_distributions(net, x):
    mean, scale = net(x).chunk(2, -1)
    q = Normal(mean, scale.exp())
    return q.rsample().square().sum() + kl_divergence(q, Normal(torch.zeros_like(mean), 1.0)).sum()


DRAWS = {name: lambda t, name=name: getattr(t, name)() for name in (
    "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_",
)} | {
    "geometric_": lambda t: t.geometric_(0.01), "bernoulli_": lambda t: t.bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(torch.full((30,), 0.5)), "normal": lambda t: torch.normal(t, 1.0),
    "rand": lambda t: torch.rand(30), "dropout": lambda t: F.dropout(t + 1), "randperm": lambda t: torch.randperm(30),
    "a distribution": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAWS)
def test_each_record_has_random_numbers_of_its_own(kind):
    """Equal records, other draws."""

    def loss_of(net, x):
        drawn = DRAWS[kind](torch.zeros(30, dtype=torch.float64)) * torch.linspace(0.5, 2, 30).sin()
        return net(x).sum() * drawn.sum()

    same = torch.ones(B, D, dtype=torch.float64)
    found = lifted_from_one(network(), same, of_distributions if kind == "a distribution" else loss_of)[1]
    assert len(found.losses.unique()) == B


# Indices, labels and probabilities out of range


def looked_up(function, *dim):
    """Of a table [6, 4], or [4, 6] if its columns are selected from."""

    def loss_of(net, batch):
        table = torch.linspace(-1, 2, 24, dtype=torch.float64).view((4, 6) if dim == (1,) else (6, 4))
        return net(batch[1]).sum() * function(table, batch[0][0]).sin().sum()

    return loss_of


def labelled(loss):
    """Labels of 6 classes."""
    return lambda net, batch: loss(net(batch[1]).repeat(1, 3), batch[0][:, 0])


def filled(table, index):
    return torch.zeros(4, 6, dtype=table.dtype).scatter(1, index.expand(4, -1), table)


LOWEST = dict.fromkeys(("an index", "an index of columns", "index_put"), -6)  # else 0
IGNORED = {"labels": -100, "labels of pixels": -100, "labels with another ignored": 9}
RANGES = {  # losses of indices and labels up to 5
    "embedding": looked_up(lambda table, i: F.embedding(i, table)),
    "index_select": looked_up(lambda table, i: table.index_select(0, i)),
    "gather of columns": looked_up(lambda table, i: table.gather(1, i.expand(4, -1)), 1),
    "an index": looked_up(lambda table, i: table[i]),
    "an index of columns": looked_up(lambda table, i: table[:, i], 1),
    "index_put": looked_up(lambda table, i: table.index_put((i,), torch.zeros((), dtype=table.dtype))),
    "index_add": looked_up(lambda table, i: table.index_add(0, i, table[: len(i)])),
    "scatter": looked_up(filled, 1),
    "scatter_add": looked_up(lambda table, i: table.scatter_add(1, i.expand(4, -1), table), 1),
    "labels": labelled(F.cross_entropy),
    "labels with another ignored": labelled(lambda s, y: F.cross_entropy(s, y, ignore_index=9)),
    "labels of pixels": labelled(lambda s, y: F.cross_entropy(s[..., None, None], y[..., None, None])),
    "probabilities": labelled(lambda s, y: F.binary_cross_entropy(s[:, 0].sigmoid(), y.to(s.dtype) / 5)),
}


@pytest.mark.parametrize("kind", RANGES)
def test_an_index_out_of_range_concerns_its_record_alone(kind):
    loss_of, low = RANGES[kind], LOWEST.get(kind, 0)
    index = torch.zeros(5, 2, dtype=torch.long)
    index[:, 0] = torch.tensor([low, 5, low - 1, 6, IGNORED.get(kind, -100)])
    net, x = network(), numbers(D)
    found = lifted_from_one(net, (index, x), loss_of)[1]
    assert found.in_range.tolist() == [True, True, False, False, kind in IGNORED]
    assert_equals_autograd(net, (index[:2], x[:2]), loss_of=loss_of)
    alone = torch.stack([loss_of(net, (index[i : i + 1], x[i : i + 1])) for i in range(2)])
    torch.testing.assert_close(found.losses[:2], alone, rtol=1e-4, atol=1e-6)


def test_experts_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=20, num_key_value_heads=1, head_dim=4, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    module, ids = transformers.MixtralForCausalLM(config).double(), torch.randint(20, (B, 6))
    module.set_experts_implementation("eager")  # the default takes no float64

    def loss_of(module, ids):
        return module(input_ids=ids, labels=ids).loss

    losses = [loss_of(module, ids[i : i + 1]).item() for i in range(B)]
    with pytest.warns(UserWarning, match="use_cache=False"), trained_privately(module):
        assert [loss_of(module, ids[i : i + 1]).item() for i in range(B)] == pytest.approx(losses, rel=1e-9)
        assert_equals_autograd(module, ids, loss_of=loss_of)
    assert module.config.use_cache
