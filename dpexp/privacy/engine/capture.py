"""Intercepts every torch function that a trainable parameter enters, under vmap over records."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp.privacy.engine.rules import RULES, Call
from dpexp.privacy.engine.uses import Dense, Use

Record = Callable[[Tensor, Use], None]


class Capture(TorchFunctionMode):
    """While active, gradients reach no parameter; during the backward pass `record` is told of each parameter's
    per-record gradients instead.

    Args:
        anchor: [B] zeros that require gradients, batched by vmap: it marks every intercepted output as one
            that belongs to a record and that gradients must flow back to.
    """

    def __init__(self, parameters: Iterable[Tensor], anchor: Tensor, record: Record) -> None:
        super().__init__()
        self._trainable = {id(parameter) for parameter in parameters}
        self._anchor = anchor
        self._record = record
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RULES:
            call = RULES[func](*args, **kwargs)
            if call is not None and self._fits(call):
                return _Captured.apply(self._anchor, call.x, call, self._record)
        args, kwargs = self._with_copies(args), self._with_copies(kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _fits(self, call: Call) -> bool:
        """A rule serves unbatched parameters, at least one of them trainable, that meet data."""
        given = [p for p in call.parameters.values() if p is not None]
        return (
            any(id(p) in self._trainable for p in given)
            and all(id(p) in self._trainable or (p.is_leaf and not p.requires_grad) for p in given)
            and not any(torch._C._functorch.is_batchedtensor(p) for p in given)
            and id(call.x) not in self._trainable
        )

    def _with_copies(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._trainable:
                return value
            if id(value) not in self._copies:
                self._copies[id(value)] = _Copied.apply(self._anchor, value, self._record)
            return self._copies[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(self._with_copies, value))
        if type(value) is dict:
            return {key: self._with_copies(item) for key, item in value.items()}
        return value


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any
) -> Tensor:
    """One record is often a batch of one; without that dimension vmap's own rule would go record by record."""
    if attn_mask is None and query.dim() == key.dim() == value.dim() == 4 and len(query) == len(key) == 1:
        return _Attention.apply(query[0], key[0], value[0], (None, *args), kw)[None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kw)


class _OnRecords(torch.autograd.Function):
    """A function that only exists under vmap."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("a captured operation ran outside vmap over records.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


class _Captured(_OnRecords):
    """The call of a rule, on the whole chunk at once."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, anchor: Tensor, x: Tensor, call: Call, record: Record) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise RuntimeError("a vmap inside the model is not supported by the fast path.")
        x = x.expand(info.batch_size, *x.shape) if in_dims[1] is None else x.movedim(in_dims[1], 0)
        y = call.run(x, **{role: p.detach() for role, p in call.parameters.items() if p is not None})
        roles = {role: p for role, p in call.parameters.items() if p is not None and p.requires_grad}
        dtype = torch.promote_types(torch.float32, next(iter(roles.values())).dtype)
        held = [x.detach()]

        def on_gradient(g: Tensor) -> None:
            saved = held.pop()
            with torch.autocast(g.device.type, enabled=False), torch.no_grad():
                saved = saved.to(dtype) if saved.is_floating_point() else saved
                for role, use in call.uses(saved, g.reshape(y_shape).to(dtype)).items():
                    if role in roles:
                        record(roles[role], use)

        if not y.requires_grad:
            y = _Anchored.apply(anchor, y.detach())
        y_shape = y.shape
        if y._is_view() and not (y.is_contiguous() and y._base.is_contiguous() and y.numel() == y._base.numel()):
            y = y.clone()
        # A hook on a view would be lost if the view were written to, as nn.ReLU(inplace=True) does.
        (y._base if y._is_view() else y).register_hook(on_gradient)
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


class _Attention(_OnRecords):
    """Attention of [heads, positions, d] without a mask, on the whole chunk at once."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, args: tuple, kw: dict
    ) -> tuple[Tensor, int]:
        q, k, v = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((query, key, value), in_dims, strict=False)
        )
        return F.scaled_dot_product_attention(q, k, v, *args, **kw), 0


class _Copied(_OnRecords):
    """A copy of a parameter for each record, whose gradients are the per-record gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, anchor: Tensor, parameter: Tensor, record: Record) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            raise RuntimeError("a vmap inside the model is not supported by the fast path.")
        return _CopyTap.apply(anchor, parameter, info.batch_size, record), 0


class _CopyTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor, size: int, record: Record) -> Tensor:
        ctx.parameter, ctx.record = parameter, record
        return parameter.detach().expand(size, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        dtype = torch.promote_types(torch.float32, ctx.parameter.dtype)
        ctx.record(ctx.parameter, Dense(g.to(dtype)))
        return None, None, None, None
