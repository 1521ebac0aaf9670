"""Recurrent layers (torch.lstm, gru, rnn_tanh, rnn_relu) as one operator through time, for tracing.

The input's contribution to the gates is a linear layer over all positions. The operator adds the previous state's, W h,
step by step; its backward pass returns the gates' gradients, so that the gradient of W is one product over all
positions. The graph of a layer has as many nodes for one position as for a thousand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp.privacy.gradients.operators import NotTraceable

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
Parts = tuple[Tensor, ...]  # of one step, each [N, H]


@dataclass(frozen=True)
class Cell:
    """One step through time.

    Attributes:
        inputs: number of parts of p, what is known of the gates without the previous state.
        kept: number of parts that a step keeps. First come the gates, p + W h, which `forward` overwrites by what
            `backward` reads; an LSTM's c comes last.
        forward: (p, h, c, kept) -> the new h and c.
        backward: (dh, dc, h, c, kept, d_p) -> gradients of the previous h, except through W h, and of the previous c.
            It writes the gradient of p to d_p.
    """

    inputs: int
    kept: int
    forward: Callable[[Parts, Tensor, Tensor, Parts], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Parts, Parts], tuple[Tensor | None, Tensor]]


def _lstm(p: Parts, h: Tensor, c: Tensor, kept: Parts) -> tuple[Tensor, Tensor]:
    i, f, g, o, tanh_c, new_c = kept
    for gate in (i, f, o):
        gate.sigmoid_()
    torch.mul(f, c, out=new_c).addcmul_(i, g.tanh_())
    return o * torch.tanh(new_c, out=tanh_c), new_c


def _lstm_backward(dh: Tensor, dc: Tensor, h: Tensor, c: Tensor, kept: Parts, d_p: Parts) -> tuple[None, Tensor]:
    (i, f, g, o, tanh_c, _), (d_i, d_f, d_g, d_o) = kept, d_p
    _sigmoid_backward(dh * tanh_c, o, grad_input=d_o)
    dc = dc + torch.ops.aten.tanh_backward(dh * o, tanh_c)
    _sigmoid_backward(dc * g, i, grad_input=d_i)
    _sigmoid_backward(dc * c, f, grad_input=d_f)
    _tanh_backward(dc * i, g, grad_input=d_g)
    return None, dc * f


def _gru(p: Parts, h: Tensor, c: Tensor, kept: Parts) -> tuple[Tensor, Tensor]:
    r, z, s_n, n = kept  # p is r, z, b_n, n; s_n = W_n h + b_n
    torch.addcmul(p[3], r.sigmoid_(), s_n, out=n).tanh_()
    return torch.lerp(n, h, z.sigmoid_()), c


def _gru_backward(dh: Tensor, dc: Tensor, h: Tensor, c: Tensor, kept: Parts, d_p: Parts) -> tuple[Tensor, Tensor]:
    (r, z, s_n, n), (d_r, d_z, d_s_n, d_n) = kept, d_p
    direct = dh * z
    _tanh_backward(dh - direct, n, grad_input=d_n)
    _sigmoid_backward(dh * (h - n), z, grad_input=d_z)
    _sigmoid_backward(d_n * s_n, r, grad_input=d_r)
    torch.mul(d_n, r, out=d_s_n)
    return direct, dc


def _elman(activation: Callable[[Tensor], Tensor], activation_backward: Callable[..., Tensor]) -> Cell:
    def backward(dh: Tensor, dc: Tensor, h: Tensor, c: Tensor, kept: Parts, d_p: Parts) -> tuple[None, Tensor]:
        activation_backward(dh, kept[0], grad_input=d_p[0])
        return None, dc

    return Cell(1, 1, lambda p, h, c, kept: (activation(kept[0]), c), backward)


_CELLS = {
    "lstm": Cell(4, 6, _lstm, _lstm_backward), "gru": Cell(4, 4, _gru, _gru_backward),
    "rnn_tanh": _elman(torch.tanh_, _tanh_backward),
    "rnn_relu": _elman(torch.relu_, partial(torch.ops.aten.threshold_backward.grad_input, threshold=0)),
}  # fmt: skip


@torch.library.custom_op("dpexp::recurrence", mutates_args=())
def _steps(p: Tensor, h: Tensor, c: Tensor, weight: Tensor, cell: str, reverse: bool) -> tuple[Tensor, Tensor]:
    """Every h [T, N, H], and what the steps keep."""
    outputs, kept = _empty_steps(p, h, c, weight, cell, reverse)
    of_p, of_kept = _by_step(p, c), _by_step(kept, c)
    terms, gates = (t[..., : len(weight)].unbind() for t in (p, kept))
    for t in range(len(p))[:: -1 if reverse else 1]:
        _add_product(terms[t], h, weight.T, out=gates[t])
        h, c = _CELLS[cell].forward(of_p[t], h, c, of_kept[t])
        outputs[t] = h
    return outputs, kept


@torch.library.custom_op("dpexp::recurrence_backward", mutates_args=())
def _steps_backward(
    d_outputs: Tensor, dh: Tensor, dc: Tensor, outputs: Tensor, kept: Tensor, h: Tensor, c: Tensor, weight: Tensor,
    cell: str, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of p, and of the first h and c."""
    d_p = _record_major(kept, _CELLS[cell].inputs * c.shape[-1])
    of_d_p, of_kept = _by_step(d_p, c), _by_step(kept, c)
    d_gates = d_p[..., : len(weight)].unbind()
    order = [*range(len(kept))[:: 1 if reverse else -1]]
    dc = dc.clone()
    for t, before in zip(order, [*order[1:], None], strict=True):
        h_before, c_before = (h, c) if before is None else (outputs[before], of_kept[before][-1])
        dh = dh + d_outputs[t]
        direct, dc = _CELLS[cell].backward(dh, dc, h_before, c_before, of_kept[t], of_d_p[t])
        dh = _add_product(direct, d_gates[t], weight)
    return d_p, dh, dc


@_steps.register_fake
def _empty_steps(p, h, c, weight, cell, reverse):
    return _record_major(p, h.shape[-1]), p.new_empty(*p.shape[:-1], _CELLS[cell].kept * c.shape[-1])


@_steps_backward.register_fake
def _(d_outputs, dh, dc, outputs, kept, h, c, weight, cell, reverse):
    d_p = _record_major(kept, _CELLS[cell].inputs * c.shape[-1])
    return d_p, h.new_empty(h.shape), c.new_empty(c.shape)


def _record_major(like: Tensor, size: int) -> Tensor:
    """An empty [T, ..., size] for a [T, ..., _]; in memory [..., T, size], as the layers before and after have it."""
    return like.new_empty(*like.shape[1:-1], len(like), size).movedim(-2, 0)


def _by_step(steps: Tensor, like: Tensor) -> list[Parts]:
    return [*zip(*(part.unbind() for part in steps.split(like.shape[-1], -1)), strict=True)]


def _add_product(base: Tensor | None, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(a, b, out=out) if base is None else torch.addmm(base, a, b, out=out)


def _over_records(operator: Any, weight: int) -> None:
    """Gives an operator a rule for vmap: the records become one batch. `weight`: the position of that argument."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple[Parts, tuple[int, ...]]:
        if in_dims[weight] is not None:
            raise NotTraceable("the weights of a recurrent layer depend on the record")
        given = [*args]
        for k, (t, dim) in enumerate(zip(args, in_dims, strict=True)):
            if isinstance(t, Tensor) and k != weight:
                each = t.expand(info.batch_size, *t.shape).movedim(0, -3) if dim is None else t.movedim(dim, -3)
                given[k] = each.flatten(-3, -2)
        found = operator(*given)
        found = [t.unflatten(-2, (info.batch_size, t.shape[-2] // info.batch_size)) for t in found]
        return tuple(found), tuple(t.dim() - 3 for t in found)

    operator.register_vmap(rule)


_over_records(_steps, weight=3)
_over_records(_steps_backward, weight=7)


class _Recurrence(torch.autograd.Function):
    """A cell through time: every h [T, N, H], and the last h and c [N, H]."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, h: Tensor, c: Tensor, weight: Tensor, cell: str, reverse: bool) -> Any:
        outputs, kept = _steps(p, h, c, weight, cell, reverse)
        ctx.save_for_backward(outputs, kept, h, c, weight)
        ctx.cell, ctx.reverse, last = cell, reverse, 0 if reverse else -1
        return outputs, outputs[last].clone(), kept[last][..., -c.shape[-1] :].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        outputs, _, h, *_, weight = ctx.saved_tensors
        d_p, dh, dc = _steps_backward(*gradients, *ctx.saved_tensors, ctx.cell, ctx.reverse)
        before = torch.cat([outputs[1:], h[None]] if ctx.reverse else [h[None], outputs[:-1]])
        d_weight = d_p[..., : len(weight)].flatten(0, 1).T @ before.flatten(0, 1)
        return d_p, dh, dc, d_weight, None, None


_FUNCTIONS: dict[Any, str] = {getattr(place, name): name for place in (torch, torch.ops.aten) for name in _CELLS}


class RecurrentLayersAsOperators(TorchFunctionMode):
    """While it is active, recurrent layers of sequences that are not packed run as operators."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        cell = _FUNCTIONS.get(getattr(func, "overloadpacket", func))
        if cell is None or not _is_known(cell, args[1]):
            return func(*args, **(kwargs or {}))
        return _layer(cell, *args, **(kwargs or {}))


def _is_known(cell: str, second: Any) -> bool:
    """Whether the operator covers a call: the sequence is not packed, and `proj_size` is 0. `second`: the states."""
    h, c = second if cell == "lstm" and not isinstance(second, Tensor) else (second, second)
    return h.dim() > 1 and h.shape[-1] == c.shape[-1]


def _layer(
    cell: str, input: Tensor, hx: Any, weights: list[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Parts:  # fmt: skip
    """A recurrent layer, with the arguments and results of torch.lstm, gru, rnn_tanh and rnn_relu."""
    x = input.transpose(0, 1) if batch_first else input
    h0, c0 = hx if cell == "lstm" else (hx, torch.zeros_like(hx))
    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    ends: list[list[Tensor]] = []
    for layer in range(num_layers):
        directions = []
        for reverse in (False, True) if bidirectional else (False,):
            k = len(ends)
            w_ih, w_hh, *biases = weights[each * k : each * (k + 1)]
            p = _inputs(cell, x, w_ih, *biases)
            outputs, *end = _Recurrence.apply(p, *(t.to(p.dtype) for t in (h0[k], c0[k], w_hh)), cell, reverse)
            directions.append(outputs)
            ends.append(end)
        x = torch.cat(directions, -1) if bidirectional else directions[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    x = x.clone(memory_format=torch.contiguous_format)  # PyTorch's layout; and the step may write to it
    states = [torch.stack(part) for part in zip(*ends, strict=True)][: 2 if cell == "lstm" else 1]
    return (x.transpose(0, 1) if batch_first else x, *states)


def _inputs(cell: str, x: Tensor, w_ih: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Tensor:
    """p [T, N, ...]. A GRU's has b_n in addition, since its gate r multiplies W_n h + b_n."""
    if cell != "gru":
        return F.linear(x, w_ih, None if b_ih is None or b_hh is None else b_ih + b_hh)
    sizes = [len(w_ih) // 3 * k for k in (2, 1)]
    b_rz, b_n = x.new_zeros(len(w_ih)).split(sizes) if b_hh is None else b_hh.split(sizes)
    bias = None if b_ih is None else b_ih + F.pad(b_rz, (0, sizes[1]))
    rz, n = F.linear(x, w_ih, bias).split(sizes, -1)
    return torch.cat([rz, b_n.to(n.dtype).expand_as(n), n], -1)
