"""Multi-head attention in terms of functions that have rules: linear layers and scaled dot products."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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
        None if it is called for anything else.
    """
    rare = bias_k is not None or add_zero_attn or any(others.get(name) is not None for name in ("static_k", "static_v"))
    if rare or in_proj_weight is None or others.get("use_separate_proj_weight") or query.dim() != 3:
        return None
    _T, N, E = query.shape
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
