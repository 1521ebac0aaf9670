"""Per-example gradients of recurrent layers (torch.lstm, gru, rnn_tanh, rnn_relu).

torch runs such a layer as one function, which does not return the gates' gradients. Here the input's contribution to
the gates is a linear layer over all positions, with its own layer rule. The previous state's contribution is computed
step by step; the per-example gradient of its weight is Σ_t (gate gradient)_t ⊗ h_(t-1).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import version_of
from dpexp.privacy.gradients.rewritten import lstm_step

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


class Cell(Protocol):
    """One step through time.

    p and s are the input's and the previous state's contributions to the G gates, each [B, G·H].
    """

    @staticmethod
    def forward(p: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The new h and c, and the tensors that `backward` needs. May overwrite s."""

    @staticmethod
    def backward(
        dh: Tensor, dc: Tensor, saved: tuple[Tensor, ...], h: Tensor, c: Tensor, d_p: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Writes the gradient of p to d_p; returns those of s, of the previous h except through s, and of c."""


class Lstm:
    @staticmethod
    def forward(p: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        gates = s.add_(p)
        i, f, g, o = gates.chunk(4, 1)
        for gate in (i, f, o):
            gate.sigmoid_()
        g.tanh_()
        c = (f * c).addcmul_(i, g)
        tanh_c = c.tanh()
        return o * tanh_c, c, (gates, tanh_c)

    @staticmethod
    def backward(
        dh: Tensor, dc: Tensor, saved: tuple[Tensor, ...], h: Tensor, c: Tensor, d_p: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        gates, tanh_c = saved
        i, f, g, o = gates.chunk(4, 1)
        d_i, d_f, d_g, d_o = d_p.chunk(4, 1)
        _sigmoid_backward.grad_input(dh * tanh_c, o, grad_input=d_o)
        dc = dc + _tanh_backward(dh * o, tanh_c)
        _sigmoid_backward.grad_input(dc * g, i, grad_input=d_i)
        _sigmoid_backward.grad_input(dc * c, f, grad_input=d_f)
        _tanh_backward.grad_input(dc * i, g, grad_input=d_g)
        return d_p, None, dc * f


class Gru:
    @staticmethod
    def forward(p: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        size = h.shape[1]
        r, z = (p[:, : 2 * size] + s[:, : 2 * size]).sigmoid_().chunk(2, 1)
        s_n = s[:, 2 * size :]
        n = torch.addcmul(p[:, 2 * size :], r, s_n).tanh_()
        return torch.lerp(n, h, z), c, (r, z, n, s_n)

    @staticmethod
    def backward(
        dh: Tensor, dc: Tensor, saved: tuple[Tensor, ...], h: Tensor, c: Tensor, d_p: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        r, z, n, s_n = saved
        direct = dh * z
        d_n = _tanh_backward(dh - direct, n)
        d_z = _sigmoid_backward(dh * (h - n), z)
        d_r = _sigmoid_backward(d_n * s_n, r)
        torch.cat([d_r, d_z, d_n], 1, out=d_p)
        return torch.cat([d_r, d_z, d_n * r], 1), direct, dc


class RnnTanh:
    @staticmethod
    def forward(p: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        h = s.add_(p).tanh_()
        return h, c, (h,)

    @staticmethod
    def backward(
        dh: Tensor, dc: Tensor, saved: tuple[Tensor, ...], h: Tensor, c: Tensor, d_p: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        _tanh_backward.grad_input(dh, saved[0], grad_input=d_p)
        return d_p, None, dc


class RnnRelu:
    @staticmethod
    def forward(p: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        h = s.add_(p).relu_()
        return h, c, (h,)

    @staticmethod
    def backward(
        dh: Tensor, dc: Tensor, saved: tuple[Tensor, ...], h: Tensor, c: Tensor, d_p: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        torch.mul(dh, saved[0] > 0, out=d_p)
        return d_p, None, dc


CELLS: dict[Callable[..., Any], type[Cell]] = {
    torch.lstm: Lstm,
    torch.gru: Gru,
    torch.rnn_tanh: RnnTanh,
    torch.rnn_relu: RnnRelu,
}
_BY_NAME = {cell.__name__: cell for cell in CELLS.values()}
# Takes the states before each step [B, T, H] and the gradients of the gates [B, T, G·H].
OnGradient = Callable[[Tensor, Tensor], None]


_OPERATORS = torch.library.Library("dpexp", "DEF")  # one node in a graph, for any number of steps
_OPERATORS.define(
    "steps(Tensor p, Tensor h, Tensor c, Tensor weight, Tensor? bias, str cell, bool reverse) -> (Tensor, Tensor[])"
)
_OPERATORS.define(
    "steps_backward(Tensor d_outputs, Tensor dh, Tensor dc, Tensor h, Tensor c, Tensor weight, Tensor[] saved, str cell"
    ", bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_OPERATORS, "steps", "CompositeExplicitAutograd")
def _steps(
    p: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, cell: str, reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    """Every h [T, B, H]; and for each step its h, its c and the tensors that the cell saves."""
    outputs, c = _record_major(p, h.shape[1]), c.clone()  # a copy, since a cell may return c unchanged
    all_saved = []
    for t in range(len(p))[:: -1 if reverse else 1]:
        s = h @ weight.T if bias is None else torch.addmm(bias, h, weight.T)
        h, c, saved = _BY_NAME[cell].forward(p[t], s, h, c)
        outputs[t] = h
        all_saved += [h, c, *saved]
    return outputs, all_saved


@torch.library.impl(_OPERATORS, "steps_backward", "CompositeExplicitAutograd")
def _steps_backward(
    d_outputs: Tensor, dh: Tensor, dc: Tensor, h: Tensor, c: Tensor, weight: Tensor, saved: list[Tensor], cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of p, of the first h and c, and of each step's s; and the states before each step. [T, B, ...]."""
    of_cell, gates = _BY_NAME[cell], len(weight)
    d_p, previous = _record_major(d_outputs, gates), _record_major(d_outputs, h.shape[1])
    d_s = _record_major(d_outputs, gates if of_cell is Gru else 0)
    order = range(len(d_outputs))[:: -1 if reverse else 1]
    each = len(saved) // len(order)
    for step in reversed(range(len(order))):
        t = order[step]
        before = saved[(step - 1) * each :] if step else [h, c]
        dh = dh + d_outputs[t]
        previous[t] = before[0]
        of_step = tuple(saved[step * each + 2 : (step + 1) * each])
        d_state, direct, dc = of_cell.backward(dh, dc, of_step, before[0], before[1], d_p[t])
        if of_cell is Gru:
            d_s[t] = d_state
        dh = d_state @ weight if direct is None else torch.addmm(direct, d_state, weight)
    return d_p, dh, dc, d_s, previous


class Recurrence(torch.autograd.Function):
    """Runs a cell through time.

    `apply` takes `anchor`, which requires gradients, p [T, B, G·H], the first h and c [B, H], and the weight and bias
    of the previous state. It returns every h [T, B, H] and the last h and c [B, H].
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, p: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None,
        cell: type[Cell], reverse: bool, on_gradient: OnGradient,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        outputs, saved = torch.ops.dpexp.steps(p, h, c, weight, bias, cell.__name__, reverse)
        ctx.inputs, ctx.saved = (h, c, weight), saved
        ctx.versions = version_of(h), version_of(c)
        ctx.cell, ctx.reverse, ctx.on_gradient = cell, reverse, on_gradient
        last = saved[-(len(saved) // len(p)) :]
        return outputs, last[0].clone(), last[1].clone()

    @staticmethod
    def backward(ctx: Any, d_outputs: Tensor, dh: Tensor, dc: Tensor) -> tuple:  # type: ignore[override]
        h, c, weight = ctx.inputs
        if ctx.versions != (version_of(h), version_of(c)):
            raise RuntimeError(
                "the first state of a recurrent layer was modified in place after the layer had used it."
            )
        d_p, dh, dc, d_s, previous = torch.ops.dpexp.steps_backward(
            d_outputs, dh, dc, h, c, weight, ctx.saved, ctx.cell.__name__, ctx.reverse
        )
        ctx.on_gradient(previous.transpose(0, 1), (d_s if ctx.cell is Gru else d_p).transpose(0, 1))
        ctx.inputs = ctx.saved = None
        return None, d_p, dh, dc, None, None, None, None, None


def _record_major(like: Tensor, size: int) -> Tensor:
    """An empty [T, B, size] for a [T, B, ...]; in memory [B, T, size], as the layers before and after have it."""
    T, B = like.shape[:2]
    return like.new_empty(B, T, size).transpose(0, 1)


def recurrent_layer(
    cell: type[Cell],
    recurrence: Callable[..., tuple[Tensor, Tensor, Tensor]],
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A recurrent layer, with the arguments and results of torch.lstm, gru, rnn_tanh and rnn_relu.

    Args:
        recurrence: (p [T, N, G·H], h, c, weight, bias, cell, reverse) -> every h, the last h, the last c.
    """
    x = input.transpose(0, 1) if batch_first else input
    h0, c0 = hx if not isinstance(hx, Tensor) else (hx, hx)
    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        directions = []
        for reverse in (False, True) if bidirectional else (False,):
            k = len(ends)
            w_ih, w_hh, *others = weights[each * k : each * (k + 1)]
            b_ih, b_hh = others[:2] if has_biases else (None, None)
            p = F.linear(x, w_ih, b_ih)
            if each % 2:
                outputs, h, c = _projected_lstm(p, h0[k], c0[k], w_hh, b_hh, others[-1], reverse)
            else:
                outputs, h, c = recurrence(p, h0[k], c0[k], w_hh, b_hh, cell, reverse)
            directions.append(outputs)
            ends.append((h, c))
        x = torch.cat(directions, -1) if bidirectional else directions[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    x = x.contiguous() if x.shape[1] > 1 else x  # PyTorch's memory layout, which .view needs
    output = x.transpose(0, 1) if batch_first else x
    states = [torch.stack(part) for part in zip(*ends, strict=True)]
    return (output, *states) if cell is Lstm else (output, states[0])


def _projected_lstm(
    p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM whose state is a projection (Sak et al. 2014)."""
    outputs: dict[int, Tensor] = {}
    for t in range(len(p))[:: -1 if reverse else 1]:
        h, c = lstm_step(p[t], F.linear(h, w_hh, b_hh), h, c)
        h = outputs[t] = F.linear(h, w_hr)
    return torch.stack([outputs[t] for t in range(len(p))]), h, c
