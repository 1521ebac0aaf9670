"""Functions that are rewritten in terms of others: their gradients are those of one record at a time."""

import pytest
import torch
from plans import plan_of
from reference import stacked
from test_derived_parameters import B, Of, per_parameter
from test_layer_rules import Weighted, assert_equals_reference
from torch import nn
from torch.nn import functional as F

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.layer_gradients import OuterProductGradient
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.groups import flat
from dpexp.privacy.round import PrivateRound


class Stepped(nn.Module):
    """A recurrent cell over the positions of x [N, T, d]."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, -1) if isinstance(state, tuple) else state


def gathered(x, table):
    """Rows by data, by a constant, from the end, and by a mask."""
    index = (x[..., 0] > 0).long() - 2
    return table[index] + table[torch.tensor([1, -1, 0, 2])] + table[1] + table[torch.tensor([True, False, True])][:1]


CALLS = {
    "x @ W": (lambda x, w: x @ w, (3, 5)),
    "x @ W of one position": (lambda x, w: x[:, 0] @ w, (3, 5)),
    "x @ W of one vector": (lambda x, w: x[0, 0] @ w, (3, 5)),
    "W @ x": (lambda x, w: w @ x.mT, (5, 3)),
    "W @ x of one vector": (lambda x, w: w @ x[0, 0], (5, 3)),
    "w @ x": (lambda x, w: w @ x.mT, (3,)),
    "x @ w": (lambda x, w: x @ w, (3,)),
    "x @ w of one vector": (lambda x, w: x[0, 0] @ w, (3,)),
    "w @ x of one vector": (lambda x, w: w @ x[0, 0], (3,)),
    "matrices of heads": (lambda x, w: x @ w, (4, 3, 5)),
    "several matrices": (lambda x, w: x[0] @ w, (2, 3, 5)),
    "mm": (lambda x, w: torch.mm(x[0], w).mm(w.t()), (3, 5)),
    "mv": (lambda x, w, v: torch.mv(x[0], v) + torch.mv(w, x[0, 0]), (4, 3), (3,)),
    "addmm": (lambda x, w, b: torch.addmm(b, x.view(-1, 3), w), (3, 5), (5,)),
    "addmm, scaled": (lambda x, w, b: torch.addmm(b, x.view(-1, 3), w, beta=0.5, alpha=2), (3, 5), (1, 5)),
    "addmm to data": (lambda x, w: x[0].addmm(x[0], w), (3, 3)),
    "tied": (lambda x, w: F.linear(x, w) @ w, (5, 3)),
    "einsum": (lambda x, w: torch.einsum("btd, dp -> btp", x, w), (3, 5)),
    "einsum of heads": (lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (3, 2, 4)),
    "einsum to heads": (lambda x, w: torch.einsum("hkd,bthk->btd", w, x.unflatten(-1, (3, 1))), (3, 1, 4)),
    "einsum with dots": (lambda x, w: torch.einsum("...d,pd->p...", x, w), (5, 3)),
    "einsum of all positions": (lambda x, w: torch.einsum("btd,dtp->bp", x, w), (3, 4, 5)),
    "einsum outwards": (lambda x, w: torch.einsum("btd,p->tpdb", x, w), (2,)),
    "einsum to one number": (lambda x, w: torch.einsum("btd,td->b", x, w), (4, 3)),
    "einsum with a common index": (lambda x, w: torch.einsum("btd,tdp->btp", x, w), (4, 3, 2)),
    "einsum of a diagonal": (lambda x, w: torch.einsum("btd,dd->bt", x, w), (3, 3)),
    "einsum of one for several": (lambda x, w: torch.einsum("btd,dp->btp", x[..., :1], w), (3, 2)),
    "einsum that sums data": (lambda x, w: torch.einsum("btd,dp->bp", x, w), (3, 2)),
    "einsum that sums the weight": (lambda x, w: torch.einsum("btd,dp->bt", x, w), (3, 2)),
    "einsum of three": (lambda x, w, v: torch.einsum("btd,dp,p->bt", x, w, v), (3, 2), (2,)),
    "implicit einsum": (lambda x, w: torch.einsum("btd,dp", x, w), (3, 2)),
    "rows": (gathered, (3, 4)),
    "index_select": (lambda x, w: torch.index_select(w, 0, (x[0, :, 0] > 0).long()), (3, 4)),
    "prelu": (lambda x, w: F.prelu(x, w), (4,)),
    "prelu with one": (lambda x, w: F.prelu(x, w), (1,)),
}  # fmt: skip
LAYERS = {
    "bilinear": lambda: Paired(nn.Bilinear(3, 3, 5)),
    "bilinear without bias": lambda: Paired(nn.Bilinear(3, 3, 5, bias=False)),
    "lstm cell": lambda: Stepped(nn.LSTMCell(3, 5)),
    "gru cell": lambda: Stepped(nn.GRUCell(3, 5)),
    "rnn cell": lambda: Stepped(nn.RNNCell(3, 5)),
    "relu cell without bias": lambda: Stepped(nn.RNNCell(3, 5, bias=False, nonlinearity="relu")),
    "projected lstm": lambda: nn.LSTM(3, 5, 2, batch_first=True, proj_size=2),
    "projected both ways": lambda: nn.LSTM(3, 5, 2, False, True, bidirectional=True, proj_size=2),
}


class Paired(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.flip(1))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    torch.manual_seed(0)
    call, *shapes = CALLS[name]
    for group in (flat(), per_parameter):
        assert_equals_reference(Of(call, *shapes), torch.randn(B, 4, 3), torch.float64, group=group)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    for group in (flat(), per_parameter):
        assert_equals_reference(LAYERS[name](), torch.randn(B, 4, 3), torch.float64, group=group)


LARGE = {
    "x @ W": (lambda x, w: x @ w, (60, 50)),
    "W @ x": (lambda x, w: w @ x.mT, (50, 60)),
    "addmm": (lambda x, w: torch.addmm(w[:, 0], x[0], w.t()), (50, 60)),
    "einsum": (lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), (60, 2, 25)),
    "tied": (lambda x, w: F.linear(x, w) @ w, (50, 60)),
}


@pytest.mark.parametrize("name", LARGE)
def test_no_gradient_is_held(name, monkeypatch):
    """Of matrices that are large against the number of positions."""
    if name != "addmm":  # in which a part overlaps
        monkeypatch.setattr(OuterProductGradient, "materialize", lambda use: pytest.fail("a gradient is held"))
    torch.manual_seed(0)
    call, *shapes = LARGE[name]
    assert_equals_reference(Of(call, *shapes), torch.randn(B, 3, 60), torch.float64)


@pytest.mark.parametrize(
    "call, shapes",
    [
        (lambda x, w: torch.mm(x, w), [(3, 5)]),
        (lambda x, w: torch.mv(x, w), [(3,)]),
        (lambda x, w: torch.addmm(w[0], x, w), [(3, 3)]),
        (lambda x, w: F.bilinear(x, x[0], w), [(2, 3, 3)]),
        (lambda x, w: F.bilinear(x, x[..., :2], w), [(2, 2, 3)]),
        (lambda x, w: torch.lstm_cell(x[0], [x[0, :1]] * 2, w, w), [(12, 3)]),
        (lambda x, w: torch.einsum("btd,dp->btp", x, w), [(4, 5)]),
        (lambda x, w: x @ w, [(4, 5)]),
        (lambda x, w: torch.einsum("btd->bd", x, w), [(4, 5)]),
        (lambda x, w: F.scaled_dot_product_attention(*3 * [(x @ w)[None]], torch.zeros(5)), [(3, 3)]),
        (lambda x, w: F.scaled_dot_product_attention(*3 * [x @ w], torch.zeros(4, 4), is_causal=True), [(3, 3)]),
    ],
)
def test_what_pytorch_refuses_is_refused(call, shapes):
    module, x = Weighted(Of(call, *shapes)), torch.randn(B, 4, 3)
    with pytest.raises((RuntimeError, IndexError)):
        module.loss(x[:1])
    engine = PrivateRound(plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0), module, GaussianNoise())
    engine.begin()
    with pytest.raises(ConfigError, match="training_step fails for every synthetic record"):
        engine.add_chunk(module.loss, stacked(x), B)


def test_numbers_may_be_parameters():
    assert_equals_reference(Of(lambda x, *numbers: x * sum(numbers) ** 2, *[()] * 5), torch.randn(B, 3), torch.float64)
