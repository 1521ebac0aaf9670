"""What the engine runs in place of a function that was intercepted: on the whole chunk, out of vmap's sight."""

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
    current_level,
    is_batched,
    level_of,
    no_torch_functions,
    outside_vmap,
    unbatched,
    version_of,
)
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.layer_rules import LayerCall
from dpexp.privacy.gradients.recurrent import Steps

Record = Callable[[Tensor, LayerGradient], None]
OfOne = Callable[[LayerGradient], None]


class OnRecords(ABC):
    """A function that exists under vmap only. Like a torch.autograd.Function with nothing but a rule for vmap, which
    takes seven times as long to be called (measured), since what it does outside must be thought of as well."""

    @staticmethod
    @abstractmethod
    def vmap(B: int, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        """The outputs for all B records, and along which dimensions these lie.

        Args:
            in_dims: along which dimension of each argument they lie; None: it is the same for all.
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
            raise RuntimeError("a transform of torch.func inside the model is not supported by the fast path.")
        with outside_vmap():
            outputs, out_dims = cls.vmap(B, in_dims, *inner)
        if isinstance(outputs, Tensor):
            return batched(outputs, out_dims, level)
        return tuple(batched(output, dim, level) for output, dim in zip(outputs, out_dims, strict=True))


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any
) -> Tensor:
    """vmap's own rule would go record by record."""
    if not any(isinstance(t, Tensor) and is_batched(t) for t in (query, key, value, attn_mask)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kw)
    causal = kw.get("is_causal", len(args) > 1 and args[1])
    if attn_mask is not None and (causal or attn_mask.dim() < 2):
        raise RuntimeError("a causal attention with a mask, or a mask of one dimension, is for PyTorch to judge.")
    return _Attention.apply(query, key, value, attn_mask, args, kw)


class Captured(OnRecords):
    """The call of a rule, on the whole chunk at once."""

    @staticmethod
    def vmap(B: int, in_dims: Any, anchor: Tensor, x: Tensor, call: LayerCall, record: Record) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise RuntimeError("a vmap inside the model is not supported by the fast path.")
        x = x.expand(B, *x.shape) if in_dims[1] is None else x.movedim(in_dims[1], 0)
        y = call.forward(x, **{role: p.detach() for role, p in call.parameters.items() if p is not None})
        if not torch.is_grad_enabled():
            return y, 0
        roles = {role: p for role, p in call.parameters.items() if p is not None and p.requires_grad}
        dtype = torch.promote_types(torch.float32, next(iter(roles.values())).dtype)
        held, version = [x.detach()], version_of(x)
        if x.is_floating_point():
            held = [held[0].to(y.dtype)]  # under autocast, what autograd would have kept

        def on_gradient(g: Tensor) -> None:
            saved = held.pop()
            if version_of(saved) != version:
                raise RuntimeError("an input of a layer was modified in place after the layer had used it.")
            with no_torch_functions(), torch.autocast(g.device.type, enabled=False), torch.no_grad():
                saved = saved.to(dtype) if saved.is_floating_point() else saved
                for role, use in call.gradients(saved, g.reshape(y_shape).to(dtype)).items():
                    if role in roles:
                        record(roles[role], use)

        if not y.requires_grad:
            y = _Anchored.apply(anchor, y.detach())
        y_shape = y.shape
        base = base_of(y)
        if base is not None and not (y.is_contiguous() and base.is_contiguous() and y.numel() == base.numel()):
            y, base = y.clone(), None
        # A hook on a view would be lost if the view were written to, as nn.ReLU(inplace=True) does.
        (y if base is None else base).register_hook(on_gradient)
        return y, 0


class _Anchored(torch.autograd.Function):
    """Makes an output one that gradients flow back to."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return None, None


class _Attention(OnRecords):
    """Attention of [..., heads, positions, d], with or without a mask, on the whole chunk at once."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, args: tuple, kw: dict
    ) -> tuple[Tensor, int]:
        q, k, v = (
            t.expand(B, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((query, key, value), in_dims, strict=False)
        )
        lead = q.shape[1:-3]  # what a record has of batches of its own; the kernels know one dimension before the heads
        heads = q.shape[-3:-2] if q.dim() > 3 else ()
        if mask is not None:
            mask = mask[None] if in_dims[3] is None else mask.movedim(in_dims[3], 0)
            mask = mask.reshape(len(mask), *(1,) * (q.dim() - mask.dim()), *mask.shape[1:])
            mask = _joined(mask.expand(B, *lead, *mask.shape[1 + len(lead) :]), heads) if lead else _joined(mask, heads)
        mixed = F.scaled_dot_product_attention(
            _joined(q, heads), _joined(k, heads), _joined(v, heads), mask, *args, **kw
        )
        return mixed.reshape(B, *lead, *heads, *mixed.shape[-2:]), 0


def _joined(t: Tensor, heads: tuple[int, ...]) -> Tensor:
    """[B, ..., heads, positions, d] -> [B·..., heads, positions, d]; one head where there is none."""
    return t.flatten(0, -4) if heads else t[:, None]


class Stepped(OnRecords):
    """A recurrent cell's steps through time, on the whole chunk at once."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, anchor: Tensor, p: Tensor, h: Tensor, c: Tensor,
        weight: Tensor, bias: Tensor | None, cell: Any, reverse: bool, on_gradient: Any,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:  # fmt: skip
        p, h, c = (
            t.expand(B, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((p, h, c), in_dims[1:4], strict=True)
        )
        p = p.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [B, T, N, G·H] -> [T, B·N, G·H]
        h, c = h.flatten(0, 1).to(p.dtype), c.flatten(0, 1).to(p.dtype)
        with torch.autocast(p.device.type, enabled=False):
            every, h, c = Steps.apply(
                anchor, p, h, c, weight.to(p.dtype), bias if bias is None else bias.to(p.dtype), cell, reverse,
                lambda states, gates: on_gradient(states, gates, B),
            )  # fmt: skip
        return (every.unflatten(1, (B, -1)), h.unflatten(0, (B, -1)), c.unflatten(0, (B, -1))), (1, 0, 0)


def detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


class Copied(OnRecords):
    """A copy for each record of a parameter, or of what is computed from parameters alone, whose gradients are the
    per-record gradients."""

    @staticmethod
    def vmap(B: int, in_dims: Any, anchor: Tensor, values: Tensor, record: OfOne) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise RuntimeError("a vmap inside the model is not supported by the fast path.")
        return CopyTap.apply(anchor, values, B, record), 0


class CopyTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, size: int, record: OfOne) -> Tensor:
        ctx.dtype, ctx.record = torch.promote_types(torch.float32, values.dtype), record
        return values.detach().expand(size, *values.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        ctx.record(DenseGradient(g.to(ctx.dtype)))
        return None, None, None, None
