"""Steps of ordinary training code: records together have the gradients that each has alone, by ordinary autograd."""

import pytest
import torch
from test_factors import assert_equals_autograd, lifted_from_one
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from dpexp._transformers_compat import trained_privately

B, T, D = 5, 6, 3


def assert_gradients_equal(module, loss_of, batch):
    """Each record's gradients by the lifted graph of one are those of the record alone, in float64."""
    assert_equals_autograd(module, batch, loss_of=lambda _, one: loss_of(one))


def lifted(module, loss_of, batch):
    return lifted_from_one(module, batch, lambda _, one: loss_of(one))[1]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sequences():
    return torch.randn(B, T, D, dtype=torch.float64), torch.tensor([6, 3, 1, 4, 3])


def network():
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def fgsm(net, x, y):
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
    return F.cross_entropy(net((x + 0.1 * gradient.sign()).detach()), y)


def pgd(net, x, y):
    delta = torch.zeros_like(x)
    for _ in range(2):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x + delta), y), [delta])
        delta = delta.detach() + 0.1 * gradient
    return F.cross_entropy(net(x + delta), y)


def gradient_penalty(net, x, y):
    x.requires_grad_()
    out = net(x)
    gradient = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return F.cross_entropy(out, y) + (gradient.norm(2, 1) - 1).square().mean()


def second_derivative(net, x, y):
    x.requires_grad_()
    first = torch.autograd.grad(net(x)[:, 0].sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
    return (second[:, 0] + first[:, 1] * y).square().mean()


@pytest.mark.parametrize("step", [fgsm, pgd, gradient_penalty, second_derivative])
def test_gradients_that_the_step_takes(step):
    net = network()
    batch = torch.randn(B, D, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    assert_gradients_equal(net, lambda batch: step(net, *batch), batch)


def test_gradients_that_the_step_takes_through_a_recurrent_layer():
    layer = nn.GRU(D, 4, batch_first=True).double()

    def loss_of(batch):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
        return layer(x.detach() + gradient)[1].sum()

    assert_gradients_equal(layer, loss_of, sequences()[:1])


class LastState(nn.GRU):
    def forward(self, x):
        return super().forward(x[None])[1]


@pytest.mark.parametrize("first", [lambda: nn.Linear(D, 5), lambda: LastState(D, 5)])
def test_a_parameter_that_is_exempt_for_a_while(first):
    net = nn.Sequential(first(), nn.Linear(5, 2)).double()

    def loss_of(batch):
        net[0].requires_grad_(False)
        frozen = net(batch[0]).square().sum()
        net[0].requires_grad_(True)
        return frozen + net(batch[0]).sum()

    assert_gradients_equal(net, loss_of, (torch.randn(B, D, dtype=torch.float64),))
    assert all(p.requires_grad for p in net.parameters())


def test_uninitialized_memory_holds_no_record():
    net, x = network(), torch.randn(B, D, dtype=torch.float64)

    def loss_of(batch):
        return net(batch[0] + torch.empty(1, D, dtype=torch.float64)).sum()

    torch.testing.assert_close(lifted(net, loss_of, (x,)).losses, net(x).sum(1))


def test_distributions_draw_for_each_record():
    net = nn.Linear(D, 2).double()

    def loss_of(batch):
        mean, scale = net(batch[0]).chunk(2, -1)
        q = Normal(mean, scale.exp())
        return q.rsample().square().sum() + kl_divergence(q, Normal(torch.zeros_like(mean), 1.0)).sum()

    losses = lifted(net, loss_of, (torch.ones(B, D, dtype=torch.float64),)).losses
    assert len(losses.unique()) == B  # equal records, other draws


@pytest.mark.parametrize(
    "draw",
    [
        "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_",
        lambda t: t.geometric_(0.01), lambda t: t.bernoulli_(0.5),
        lambda t: t.bernoulli_(torch.full((30,), 0.5)), lambda t: torch.normal(t, 1.0), lambda t: torch.rand(30),
        lambda t: F.dropout(t + 1), lambda t: torch.randperm(30),
    ],
)  # fmt: skip
def test_each_record_has_random_numbers_of_its_own(draw):
    net = nn.Linear(D, 2).double()
    drawn = draw if callable(draw) else lambda t: getattr(t, draw)()

    def loss_of(batch):
        numbers = drawn(torch.zeros(30, dtype=torch.float64)) * torch.linspace(0.5, 2, 30).sin()
        return net(batch[0]).sum() * numbers.sum()

    losses = lifted(net, loss_of, (torch.ones(B, D, dtype=torch.float64),)).losses
    assert len(losses.unique()) == B


def in_place(net, x):
    total = torch.zeros(len(x), dtype=x.dtype)
    total += net(x).sum(1)
    return total.mean()


def in_parts(net, x):
    parts = net[0].weight.new_zeros(3, len(x), 2)
    for k in range(3):
        parts[k] = net(x * k)
    return (parts**2).sum()


def shuffled(net, x):
    order = torch.tensor([2, 0, 1])
    filled = torch.full((len(x), D, 1), 0.5, dtype=x.dtype)
    filled[torch.arange(len(x))[:, None], order] = x[:, :, None]
    return net(filled[..., 0]).sin().sum()


def as_new(net, x):
    return net(torch.tensor(data=x, dtype=x.dtype)).sin().sum() + net(torch.tensor(x)).sum()


def one_hot(net, x):
    chosen = torch.zeros(len(x), 2, dtype=x.dtype).scatter_(1, x.argmax(1, keepdim=True) % 2, 1.0)
    return (net(x) * chosen).sin().sum()


def of_data(net, x):
    return (net(x) * (x.data > 0).double().sum()).sin().sum()


def channels_last(net, x):
    image = x.view(len(x), 1, D, 1).to(memory_format=torch.channels_last)
    return net(image.contiguous(memory_format=torch.channels_last).flatten(1)).sin().sum()


def one_bag(net, x):
    table = nn.functional.embedding_bag(torch.tensor([3, 1, 3]), net[2], torch.tensor([0]), mode="sum", sparse=True)
    return (table * net(x)).sum()


@pytest.mark.parametrize("step", [in_place, in_parts, shuffled, as_new, one_hot, of_data, channels_last, one_bag])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_idioms_of_training_steps(step):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.table = nn.Linear(D, 2).double(), nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

        def __getitem__(self, k):
            return self.first if k == 0 else self.table

        def forward(self, x):
            return self.first(x).tanh()

    net = Net()
    assert_gradients_equal(net, lambda batch: step(net, batch[0]), (torch.randn(B, D, dtype=torch.float64),))


def test_a_probability_out_of_range_concerns_its_record_alone():
    net = nn.Linear(D, 1).double()
    x, y = torch.randn(B, D, dtype=torch.float64), torch.tensor([0.0, 1.0, 0.5, 2.0, torch.nan], dtype=torch.float64)
    loss_of = lambda batch: F.binary_cross_entropy(net(batch[0])[:, 0].sigmoid(), batch[1], reduction="sum")  # noqa: E731
    assert_gradients_equal(net, loss_of, (torch.cat([x[:3], x[:2]]), torch.cat([y[:3], y[:2]])))
    found = lifted(net, loss_of, (x, y))
    assert found.in_range.tolist() == [True, True, True, False, False] and found.losses.isfinite().all()


@pytest.mark.parametrize("name", ["Mixtral"])
def test_experts_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20, num_key_value_heads=1, head_dim=4, **sizes, **experts
    )
    module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    module.set_experts_implementation("eager")  # the default takes no float64
    ids = torch.randint(20, (B, T))

    def loss_of(batch):
        return module(input_ids=batch[0], labels=batch[0]).loss

    losses = [loss_of((ids[i : i + 1],)).item() for i in range(B)]
    with pytest.warns(UserWarning, match="use_cache=False"), trained_privately(module):
        assert [loss_of((ids[i : i + 1],)).item() for i in range(B)] == pytest.approx(losses, rel=1e-9)
        assert_gradients_equal(module, loss_of, (ids,))
    assert module.config.use_cache
