"""Multi-head attention in terms of functions that have rules: linear layers and scaled dot products."""

from typing import Any

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
    **others: Any,
) -> tuple[Tensor, None] | None:
    """`F.multi_head_attention_forward` for self-attention on [T, N, E] that returns no attention weights.

    Returns:
        None if it is called for anything else.
    """
    simple = bias_k is None and not add_zero_attn and not need_weights and not others.get("use_separate_proj_weight")
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    simple = simple and all(mask.is_floating_point() for mask in masks)  # true means "ignore" here, "attend" there
    if in_proj_weight is None or not simple or not (query is key and key is value) or query.dim() != 3:
        return None
    _T, N, E = query.shape
    projected = F.linear(query, in_proj_weight, in_proj_bias).unflatten(-1, (3, num_heads, E // num_heads))
    q, k, v = projected.permute(2, 1, 3, 0, 4).unbind(0)
    mask = attn_mask.unflatten(0, (N, num_heads)) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        mask = padding if mask is None else mask + padding
    causal = is_causal and key_padding_mask is None
    mixed = F.scaled_dot_product_attention(
        q, k, v, None if causal else mask, dropout_p if training else 0.0, is_causal=causal
    )
    return F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None
