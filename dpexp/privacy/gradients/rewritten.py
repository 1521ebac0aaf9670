"""Functions of data and parameters, rewritten in terms of functions that have layer rules."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IsParameter = Callable[[Any], bool]  # whether a tensor is a trainable or derived parameter
Rewrite = Callable[..., Tensor | tuple[Tensor, ...] | None]  # takes IsParameter and the arguments; None: not covered


def matmul(is_parameter: IsParameter, input: Tensor, other: Tensor) -> Tensor | None:
    """input @ other, where one is a parameter of one or two dimensions."""
    if is_parameter(other) == is_parameter(input) or not input.dim() or not other.dim():
        return None
    if is_parameter(input):
        product = matmul(is_parameter, _transposed(other), _transposed(input))
        return product if product is None or min(input.dim(), other.dim()) == 1 else product.mT
    if other.dim() == 1:
        return F.linear(input, other[None]).squeeze(-1)
    return F.linear(input, other.mT) if other.dim() == 2 else None


def _transposed(t: Tensor) -> Tensor:
    return t if t.dim() == 1 else t.mT


def mm(is_parameter: IsParameter, input: Tensor, mat2: Tensor) -> Tensor | None:
    return matmul(is_parameter, input, mat2) if input.dim() == mat2.dim() == 2 else None


def mv(is_parameter: IsParameter, input: Tensor, vec: Tensor) -> Tensor | None:
    return matmul(is_parameter, input, vec) if (input.dim(), vec.dim()) == (2, 1) else None


def addmm(
    is_parameter: IsParameter, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    product = mm(is_parameter, mat1, mat2)
    if product is None:
        return None
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return product  # as PyTorch does, even where `input` is NaN or infinite
    return (input if beta == 1 else beta * input) + product


def einsum(is_parameter: IsParameter, equation: Any, *operands: Any) -> Tensor | None:
    """An einsum of data and a parameter that sums over all of their common indices."""
    both = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or "->" not in equation or len(both) != 2:
        return None
    if is_parameter(both[0]) == is_parameter(both[1]):
        return None
    terms, output = equation.replace(" ", "").split("->")
    terms_and_tensors = zip(terms.split(","), both, strict=True)
    (of_x, x), (of_weight, weight) = sorted(terms_and_tensors, key=lambda pair: is_parameter(pair[1]))
    ellipsis = "0123456789"[: x.dim() - len(of_x.replace("...", ""))]
    of_x, output = of_x.replace("...", ellipsis), output.replace("...", ellipsis)
    if "." in of_weight:
        return None
    sizes = dict(zip(of_x, x.shape, strict=True)) | dict(zip(of_weight, weight.shape, strict=True))
    only_x, summed = [k for k in of_x if k not in of_weight], [k for k in of_x if k in of_weight]
    only_weight = [k for k in of_weight if k not in of_x]
    if (
        any(len(set(indices)) != len(indices) for indices in (of_x, of_weight))  # a diagonal
        or tuple(sizes[k] for k in of_x) != x.shape  # a broadcast dimension of size 1
        or sorted(output) != sorted(only_x + only_weight)
    ):
        return None

    size = lambda indices: math.prod(sizes[k] for k in indices)  # noqa: E731
    rows = x.permute([of_x.index(k) for k in only_x + summed]).reshape(size(only_x), size(summed))
    matrix = weight.permute([of_weight.index(k) for k in only_weight + summed]).reshape(size(only_weight), size(summed))
    y = F.linear(rows, matrix).reshape([sizes[k] for k in only_x + only_weight])
    return y.permute([(only_x + only_weight).index(k) for k in output])


def bilinear(
    is_parameter: IsParameter, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    """A linear layer whose input is the outer product of both inputs."""
    if input1.shape[:-1] != input2.shape[:-1] or weight.shape[1:] != (*input1.shape[-1:], *input2.shape[-1:]):
        return None
    return F.linear((input1[..., None] * input2[..., None, :]).flatten(-2), weight.flatten(1), bias)


def recurrent_cell(step: Callable[..., Any]) -> Rewrite:
    """A recurrent cell whose `step` takes the input's and the state's contributions to the gates, and the state."""

    def rewrite(
        is_parameter: IsParameter, input: Tensor, hx: Tensor | Sequence[Tensor],
        w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        states = (hx,) if isinstance(hx, Tensor) else hx
        if input.dim() != 2 or any(state.shape != (len(input), w_hh.shape[1]) for state in states):
            return None
        return step(F.linear(input, w_ih, b_ih), F.linear(states[0], w_hh, b_hh), *states)

    return rewrite


def lstm_step(x: Tensor, s: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + s).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(x: Tensor, s: Tensor, h: Tensor) -> Tensor:
    (x_r, x_z, x_n), (s_r, s_z, s_n) = x.chunk(3, -1), s.chunk(3, -1)
    n = (x_n + (x_r + s_r).sigmoid() * s_n).tanh()
    return n + (x_z + s_z).sigmoid() * (h - n)


REWRITES: dict[Callable[..., Any], Rewrite] = {
    torch.matmul: matmul, Tensor.matmul: matmul, Tensor.__matmul__: matmul, torch.linalg.matmul: matmul,
    torch.mm: mm, Tensor.mm: mm, torch.mv: mv, Tensor.mv: mv,
    torch.addmm: addmm, Tensor.addmm: addmm,
    torch.einsum: einsum,
    torch.bilinear: bilinear,
    torch.lstm_cell: recurrent_cell(lstm_step), torch.gru_cell: recurrent_cell(gru_step),
    torch.rnn_tanh_cell: recurrent_cell(lambda x, s, h: (x + s).tanh()),
    torch.rnn_relu_cell: recurrent_cell(lambda x, s, h: (x + s).relu()),
}  # fmt: skip


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    average_attn_weights: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """`F.multi_head_attention_forward` for query [T, N, E], key and value [S, N, E], with one projection weight.

    Returns:
        None for other options, and for calls that PyTorch refuses.
    """
    unsupported = (
        bias_k is not None or add_zero_attn or any(others.get(name) is not None for name in ("static_k", "static_v"))
    )
    if unsupported or in_proj_weight is None or others.get("use_separate_proj_weight") or query.dim() != 3:
        return None
    (T, N, E), S = query.shape, len(key)
    mask_fits = attn_mask is None or attn_mask.shape in ((T, S), (N * num_heads, T, S))
    if (
        not mask_fits
        or (is_causal and attn_mask is None)
        or not (key_padding_mask is None or key_padding_mask.shape == (N, S))
    ):
        return None
    heads = (num_heads, E // num_heads)

    def projected(x: Tensor) -> Tensor:
        """All three projections, since a part of a parameter has no layer rule."""
        return F.linear(x, in_proj_weight, in_proj_bias).unflatten(-1, (3, *heads)).permute(2, 1, 3, 0, 4)

    from_query = projected(query)
    from_key = from_query if key is query else projected(key)
    from_value = from_key if value is key else from_query if value is query else projected(value)
    q, k, v = from_query[0], from_key[1], from_value[2]
    mask = _additive(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (N, num_heads))
    padding = _additive(key_padding_mask, q.dtype)
    if padding is not None:
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    dropout_p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(heads[1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        causal = is_causal and padding is None
        mixed = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout_p, is_causal=causal)
    return F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), weights


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask to add to the scores; a boolean one is true where to ignore, unlike in scaled dot products."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


class Extremum(torch.autograd.Function):
    """amax or amin over all dimensions, with the gradient of `x.max()` or `x.min()`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, amax_or_amin: Any) -> Tensor:
        return amax_or_amin(x, [*range(x.dim())])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, extremum = ctx.saved_tensors
        equal = (x == extremum) | (x.isnan() & extremum.isnan())
        return g / equal.sum() * equal, None


EXTREMA = {torch.max: torch.amax, Tensor.max: torch.amax, torch.min: torch.amin, Tensor.min: torch.amin}
