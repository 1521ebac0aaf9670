"""Functions in which data meets a parameter, in terms of those that have rules."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Holds = Callable[[Any], bool]  # whether a tensor is a parameter, or computed from parameters alone
Rewriting = Callable[..., Tensor | tuple[Tensor, ...] | None]  # of holds and a function's arguments; None declines


def product(holds: Holds, input: Tensor, other: Tensor) -> Tensor | None:
    """input @ other, of which one is a parameter of one or two dimensions."""
    if holds(other) == holds(input) or not input.dim() or not other.dim():
        return None
    if holds(input):
        turned = product(holds, _turned(other), _turned(input))
        return turned if turned is None or min(input.dim(), other.dim()) == 1 else turned.mT
    if other.dim() == 1:
        return F.linear(input, other[None]).squeeze(-1)
    return F.linear(input, other.mT) if other.dim() == 2 else None


def _turned(t: Tensor) -> Tensor:
    return t if t.dim() == 1 else t.mT


def matrices(holds: Holds, input: Tensor, mat2: Tensor) -> Tensor | None:
    return product(holds, input, mat2) if input.dim() == mat2.dim() == 2 else None


def matrix_and_vector(holds: Holds, input: Tensor, vec: Tensor) -> Tensor | None:
    return product(holds, input, vec) if (input.dim(), vec.dim()) == (2, 1) else None


def sum_and_product(
    holds: Holds, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    found = matrices(holds, mat1, mat2)
    if found is None:
        return None
    found = found if alpha == 1 else alpha * found
    if beta == 0:
        return found  # what is not finite is ignored then, too
    return (input if beta == 1 else beta * input) + found


def einsum(holds: Holds, equation: Any, *operands: Any) -> Tensor | None:
    """Of data and a parameter that share no index but those summed over."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or "->" not in equation or len(given) != 2 or holds(given[0]) == holds(given[1]):
        return None
    terms, output = equation.replace(" ", "").split("->")
    (of_x, x), (of_weight, weight) = sorted(zip(terms.split(","), given, strict=True), key=lambda term: holds(term[1]))
    dots = "0123456789"[: x.dim() - len(of_x.replace("...", ""))]
    of_x, output = of_x.replace("...", dots), output.replace("...", dots)
    if "." in of_weight:
        return None
    sizes = dict(zip(of_x, x.shape, strict=True)) | dict(zip(of_weight, weight.shape, strict=True))
    kept, summed = [k for k in of_x if k not in of_weight], [k for k in of_x if k in of_weight]
    made = [k for k in of_weight if k not in of_x]
    if (
        any(len(set(of)) != len(of) for of in (of_x, of_weight))  # a diagonal
        or tuple(sizes[k] for k in of_x) != x.shape  # one number for several
        or sorted(output) != sorted(kept + made)
    ):
        return None

    size = lambda of: math.prod(sizes[k] for k in of)  # noqa: E731
    rows = x.permute([of_x.index(k) for k in kept + summed]).reshape(size(kept), size(summed))
    matrix = weight.permute([of_weight.index(k) for k in made + summed]).reshape(size(made), size(summed))
    y = F.linear(rows, matrix).reshape([sizes[k] for k in kept + made])
    return y.permute([(kept + made).index(k) for k in output])


def bilinear(holds: Holds, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Linear in the products of each number of one input with each of the other."""
    if input1.shape[:-1] != input2.shape[:-1] or weight.shape[1:] != (*input1.shape[-1:], *input2.shape[-1:]):
        return None
    return F.linear((input1[..., None] * input2[..., None, :]).flatten(-2), weight.flatten(1), bias)


def cell(step: Callable[..., Any]) -> Rewriting:
    """A recurrent layer's single step, of the gates that input and state make, and the state."""

    def rewriting(
        holds: Holds, input: Tensor, hx: Tensor | Sequence[Tensor],
        w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        states = (hx,) if isinstance(hx, Tensor) else hx
        if input.dim() != 2 or any(state.shape != (len(input), w_hh.shape[1]) for state in states):
            return None
        return step(F.linear(input, w_ih, b_ih), F.linear(states[0], w_hh, b_hh), *states)

    return rewriting


def lstm_step(of_x: Tensor, of_h: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (of_x + of_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(of_x: Tensor, of_h: Tensor, h: Tensor) -> Tensor:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return n + (x_z + h_z).sigmoid() * (h - n)


REWRITTEN: dict[Callable[..., Any], Rewriting] = {
    torch.matmul: product, Tensor.matmul: product, Tensor.__matmul__: product, torch.linalg.matmul: product,
    torch.mm: matrices, Tensor.mm: matrices, torch.mv: matrix_and_vector, Tensor.mv: matrix_and_vector,
    torch.addmm: sum_and_product, Tensor.addmm: sum_and_product,
    torch.einsum: einsum,
    torch.bilinear: bilinear,
    torch.lstm_cell: cell(lstm_step), torch.gru_cell: cell(gru_step),
    torch.rnn_tanh_cell: cell(lambda of_x, of_h, h: (of_x + of_h).tanh()),
    torch.rnn_relu_cell: cell(lambda of_x, of_h, h: (of_x + of_h).relu()),
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
    """`F.multi_head_attention_forward` for query [T, N, E], key and value [S, N, E], whose heads one weight makes.

    Returns:
        None if it is called for anything else, or as PyTorch refuses.
    """
    rare = bias_k is not None or add_zero_attn or any(others.get(name) is not None for name in ("static_k", "static_v"))
    if rare or in_proj_weight is None or others.get("use_separate_proj_weight") or query.dim() != 3:
        return None
    (T, N, E), S = query.shape, len(key)
    shaped = attn_mask is None or attn_mask.shape in ((T, S), (N * num_heads, T, S))
    if (
        not shaped
        or (is_causal and attn_mask is None)
        or not (key_padding_mask is None or key_padding_mask.shape == (N, S))
    ):
        return None
    heads = (num_heads, E // num_heads)

    def projected(x: Tensor) -> Tensor:
        """What is not needed of it is computed as well: a part of a parameter has no rule."""
        return F.linear(x, in_proj_weight, in_proj_bias).unflatten(-1, (3, *heads)).permute(2, 1, 3, 0, 4)

    of_query = projected(query)
    of_key = of_query if key is query else projected(key)
    of_value = of_key if value is key else of_query if value is query else projected(value)
    q, k, v = of_query[0], of_key[1], of_value[2]
    mask = _added(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (N, num_heads))
    padding = _added(key_padding_mask, q.dtype)
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


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As what is added to scores: true means "ignore" here, and "attend" in scaled dot products."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


class Extreme(torch.autograd.Function):
    """amax or amin over all dimensions, with the gradient that `x.max()` has."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, of_all: Any) -> Tensor:
        return of_all(x, [*range(x.dim())])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, extreme = ctx.saved_tensors
        equal = (x == extreme) | (x.isnan() & extreme.isnan())
        return g / equal.sum() * equal, None


EXTREMES = {torch.max: torch.amax, Tensor.max: torch.amax, torch.min: torch.amin, Tensor.min: torch.amin}
