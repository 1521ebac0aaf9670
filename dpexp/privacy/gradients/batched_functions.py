"""Replacements of intercepted functions that run on the whole chunk at once, outside of vmap."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import (
    base_of,
    batch_dim,
    batched,
    ctc_of_tensors,
    current_level,
    is_batched,
    level_of,
    no_torch_functions,
    outside_vmap,
    unbatched,
    version_of,
)
from dpexp.privacy.gradients.inner_gradients import is_inner
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.layer_rules import LayerCall
from dpexp.privacy.gradients.recurrent import Recurrence

RecordGradient = Callable[[Tensor, LayerGradient], None]  # takes a parameter and its gradients by one use


class BatchedFunction(ABC):
    """A function that only exists under vmap over records.

    It does what a torch.autograd.Function with a vmap rule and nothing else does, whose call takes seven times as long
    (measured).
    """

    @staticmethod
    @abstractmethod
    def vmap(B: int, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        """The outputs for all B records, and the batch dimension of each.

        Args:
            in_dims: the batch dimension of each argument; None: it is the same for all records.
        """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        level: Any = current_level()
        inner: list[Any] = list(args)
        in_dims: list[Any] = [None] * len(args)
        B = None
        for k, arg in enumerate(args):
            if isinstance(arg, Tensor) and is_batched(arg) and level_of(arg) == level:
                inner[k], in_dims[k] = unbatched(arg), batch_dim(arg)
                B = inner[k].shape[in_dims[k]]
        if B is None:
            raise RuntimeError("a transform of torch.func inside the model runs one record at a time.")
        with outside_vmap():
            outputs, out_dims = cls.vmap(B, in_dims, *inner)
        if isinstance(outputs, Tensor):
            return batched(outputs, out_dims, level)
        return tuple(batched(output, dim, level) for output, dim in zip(outputs, out_dims, strict=True))


def _batch_first(t: Tensor, B: int, dim: int | None) -> Tensor:
    return t.expand(B, *t.shape) if dim is None else t.movedim(dim, 0)


def _check_batched(anchor_dim: int | None) -> None:
    if anchor_dim is None:
        raise RuntimeError("a vmap inside the model runs one record at a time.")


class BatchedLayerCall(BatchedFunction):
    """Runs a `LayerCall` on the whole chunk; the backward pass records its parameters' per-example gradients."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, anchor: Tensor, x: Tensor, call: LayerCall, record: RecordGradient
    ) -> tuple[Tensor, int]:
        _check_batched(in_dims[0])
        x = _batch_first(x, B, in_dims[1])
        y = call.forward(x, **{role: p.detach() for role, p in call.parameters.items() if p is not None})
        if not torch.is_grad_enabled():
            return y, 0
        roles = {role: p for role, p in call.parameters.items() if p is not None and p.requires_grad}
        dtype = torch.promote_types(torch.float32, next(iter(roles.values())).dtype)
        saved, version = [x.detach()], version_of(x)
        if x.is_floating_point():
            saved = [saved[0].to(y.dtype)]  # under autocast, what autograd would have saved

        def on_gradient(g: Tensor) -> None:
            if is_inner():
                return
            x = saved.pop()
            if version_of(x) != version:
                raise RuntimeError("an input of a layer was modified in place after the layer had used it.")
            with no_torch_functions(), torch.autocast(g.device.type, enabled=False), torch.no_grad():
                x = x.to(dtype) if x.is_floating_point() else x
                for role, gradient in call.gradients(x, g.reshape(y_shape).to(dtype)).items():
                    if role in roles:
                        record(roles[role], gradient)

        if not y.requires_grad:
            y = _RequiresGradient.apply(anchor, y.detach())
        y_shape = y.shape
        base = base_of(y)
        if base is not None and not (y.is_contiguous() and base.is_contiguous() and y.numel() == base.numel()):
            y, base = y.clone(), None
        # A hook on a view would be lost if the view were written to, as nn.ReLU(inplace=True) does.
        (y if base is None else base).register_hook(on_gradient)
        return y, 0


class _RequiresGradient(torch.autograd.Function):
    """Returns y as a tensor that requires gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return None, None


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any
) -> Tensor:
    """F.scaled_dot_product_attention on the whole chunk; vmap's own rule would run it record by record."""
    if not any(isinstance(t, Tensor) and is_batched(t) for t in (query, key, value, attn_mask)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kw)
    causal = kw.get("is_causal", len(args) > 1 and args[1])
    if attn_mask is not None and (causal or attn_mask.dim() < 2):
        raise RuntimeError("attention that is causal and masked, or whose mask is a vector, runs one record at a time.")
    return _Attention.apply(query, key, value, attn_mask, args, kw)


class _Attention(BatchedFunction):
    """Attention of [..., heads, positions, d] for all records."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, args: tuple, kw: dict
    ) -> tuple[Tensor, int]:
        q, k, v = (_batch_first(t, B, dim) for t, dim in zip((query, key, value), in_dims, strict=False))
        lead = q.shape[1:-3]  # a record's own batch dimensions; the kernels take one dimension before the heads
        heads = q.shape[-3:-2] if q.dim() > 3 else ()
        if mask is not None:
            mask = mask[None] if in_dims[3] is None else mask.movedim(in_dims[3], 0)
            mask = mask.reshape(len(mask), *(1,) * (q.dim() - mask.dim()), *mask.shape[1:])
            mask = _join_batch(mask.expand(B, *lead, *mask.shape[1 + len(lead) :]) if lead else mask, heads)
        q, k, v = (_join_batch(t, heads) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, *args, **kw)
        return mixed.reshape(B, *lead, *heads, *mixed.shape[-2:]), 0


def _join_batch(t: Tensor, heads: tuple[int, ...]) -> Tensor:
    """[B, ..., heads, positions, d] -> [B·..., heads, positions, d], with one head if there is no such dimension."""
    return t.flatten(0, -4) if heads else t[:, None]


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """F.ctc_loss of log_probs [T, N, C] and padded targets [N, S], and whether all lengths were in range.

    Returns:
        None for other shapes, such as concatenated targets.
    """
    if log_probs.dim() != 3 or targets.dim() != 2:
        return None
    lengths = [torch.as_tensor(of, device=log_probs.device) for of in (input_lengths, target_lengths)]
    mosts = log_probs.shape[0], targets.shape[1]
    in_range = torch.stack([((of >= 0) & (of <= most)).all() for of, most in zip(lengths, mosts, strict=True)]).all()
    lengths = [of.clamp(0, most) for of, most in zip(lengths, mosts, strict=True)]
    losses = _CtcLoss.apply(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean(), in_range
    return losses.sum() if reduction == "sum" else losses, in_range


def binary_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """F.binary_cross_entropy, and whether all entries were in [0, 1], without which it raises an error."""
    valid = [(of >= 0) & (of <= 1) for of in (input, target)]
    input, target = (torch.where(ok, of, 0.5) for ok, of in zip(valid, (input, target), strict=True))
    return F.binary_cross_entropy(input, target, *args, **kwargs), valid[0].all() & valid[1].all()


class _CtcLoss(BatchedFunction):
    """The CTC losses [N] of all records."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
        blank: int, zero_infinity: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        own = (log_probs, targets, input_lengths, target_lengths)
        scores, *others = (_batch_first(t, B, dim) for t, dim in zip(own, in_dims, strict=False))
        of_all = [t.flatten(0, 1) for t in others]  # [B·N, ...]
        losses, _ = ctc_of_tensors(scores.transpose(1, 2).flatten(0, 1).transpose(0, 1), *of_all, blank, zero_infinity)
        return losses.unflatten(0, (B, -1)), 0


class BatchedRecurrence(BatchedFunction):
    """A recurrent cell's steps through time, for all records."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, anchor: Tensor, p: Tensor, h: Tensor, c: Tensor,
        weight: Tensor, bias: Tensor | None, cell: Any, reverse: bool, on_gradient: Any,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:  # fmt: skip
        p, h, c = (_batch_first(t, B, dim) for t, dim in zip((p, h, c), in_dims[1:4], strict=True))
        p = p.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [B, T, N, G·H] -> [T, B·N, G·H]
        h, c = h.flatten(0, 1).to(p.dtype), c.flatten(0, 1).to(p.dtype)
        with torch.autocast(p.device.type, enabled=False):
            outputs, h, c = Recurrence.apply(
                anchor, p, h, c, weight.to(p.dtype), bias if bias is None else bias.to(p.dtype), cell, reverse,
                lambda states, gates: on_gradient(states, gates, B),
            )  # fmt: skip
        return (outputs.unflatten(1, (B, -1)), h.unflatten(0, (B, -1)), c.unflatten(0, (B, -1))), (1, 0, 0)


class PerRecordCopy(BatchedFunction):
    """One copy per record of a parameter or derived parameter; the copies' gradients are the per-example gradients."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, anchor: Tensor, values: Tensor, record: Callable[[LayerGradient], None]
    ) -> tuple[Tensor, int]:
        _check_batched(in_dims[0])
        return _ExpandedCopy.apply(anchor, values, B, record), 0


class _ExpandedCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, size: int, record: Callable[[LayerGradient], None]) -> Tensor:
        ctx.dtype, ctx.record = torch.promote_types(torch.float32, values.dtype), record
        return values.detach().expand(size, *values.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        ctx.record(DenseGradient(g.to(ctx.dtype)))
        return None, None, None, None
