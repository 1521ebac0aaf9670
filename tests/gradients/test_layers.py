"""Layers as they come: norms and sums are those of each record's gradient, by ordinary autograd."""

import math

import pytest
import torch
from test_factors import B, Of, assert_equals_autograd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class Attention(nn.Module):
    def __init__(self, across=False, **options):
        super().__init__()
        self.across, self.options = across, options
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x.flip(1) if self.across else x, x, **self.options)


class ScaledDotProduct(nn.Module):
    """Attention by the function itself, of [*lead, T, 8], with a mask that data, a parameter or neither makes."""

    def __init__(self, lead, mask, of, **options):
        super().__init__()
        self.lead, self.shape, self.of, self.options = lead, mask, of, options
        self.project, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        each = 1 + torch.arange(math.prod(self.lead)).view(*self.lead, 1, 1) / 10
        q = self.project(x.view(5, 8)).expand(*self.lead, 5, 8) * each
        k = v = q[..., ::2, :, :] if self.options.get("enable_gqa") else q.roll(1, -1)
        mask = {
            "data": lambda: (x.view(5, 8)[:, :1] > -0.5) | torch.eye(5, dtype=torch.bool),
            "parameter": lambda: self.shift.tanh(),
            "constant": lambda: torch.ones(5, 5).tril().bool(),
            None: lambda: None,
        }[self.of]()
        mask = mask if mask is None else mask.reshape(5, 5).expand(self.shape)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).flatten(0, -3 if self.lead else -2)


class Squashed(nn.Module):
    def forward(self, weight):
        return 2 * weight.tanh()


def parametrised(layer, name):
    nn.utils.parametrize.register_parametrization(layer, name, Squashed())
    return layer


class Stepped(nn.Module):
    """A recurrent cell over the positions of x [N, T, d]."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


CAUSAL = torch.ones(5, 5).triu(1).bool()
PADDING = torch.tensor([[False, False, False, False, True]])
LAYERS = {  # with an input of [B, 5, 8]
    "layer norm": lambda: nn.LayerNorm([5, 8]),
    "root mean square norm": lambda: nn.RMSNorm(8),
    "group norm": lambda: nn.GroupNorm(5, 5),
    "instance norm": lambda: nn.InstanceNorm1d(5, affine=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 3)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Conv1d(5, 2, 2), dim=None),
    "normed table": lambda: nn.Sequential(parametrised(nn.Linear(8, 4), "weight"), nn.Tanh(), nn.Linear(4, 2)),
    "gru": lambda: parametrised(nn.GRU(8, 3, 2, batch_first=True, bidirectional=True), "weight_ih_l1"),
    "lstm cell": lambda: Stepped(nn.LSTMCell(8, 3)),
    "bilinear": lambda: Of(lambda x, w: F.bilinear(x, x.flip(1), w), (3, 8, 8)),
    "causal": lambda: Attention(need_weights=False, attn_mask=CAUSAL, is_causal=True),
    "padded": lambda: Attention(need_weights=False, key_padding_mask=PADDING),
    "with weights": lambda: Attention(need_weights=True),
    "across": lambda: Attention(True, need_weights=True, attn_mask=CAUSAL, key_padding_mask=PADDING),
    "a mask a head": lambda: Attention(need_weights=False, attn_mask=CAUSAL.expand(2, 5, 5)),
    "scaled": lambda: ScaledDotProduct((1, 2), (), None, scale=0.1),
    "shared heads": lambda: ScaledDotProduct((3, 4), (), None, enable_gqa=True),
    **{
        f"masked by {of}, {lead}, {mask}": lambda lead=lead, mask=mask, of=of: ScaledDotProduct(lead, mask, of)
        for lead, mask, of in (
            ((), (5, 5), "data"), ((2,), (5, 5), "parameter"), ((2,), (2, 5, 5), "constant"),
            ((1, 2), (1, 1, 5, 5), "data"), ((1, 2), (5, 5), "constant"), ((3, 2), (5, 5), "data"),
            ((3, 2), (2, 5, 5), "parameter"), ((3, 2), (3, 1, 5, 5), "data"), ((3, 2), (3, 1, 5, 5), "constant"),
            ((2, 3, 2), (2, 1, 1, 5, 5), "data"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    assert_equals_autograd(LAYERS[name]().double(), torch.randn(B, 5, 8).double())
