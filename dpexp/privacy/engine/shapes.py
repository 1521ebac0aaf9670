"""Shapes that depend on data: where a mask is true, as x[mask] and mask.nonzero() ask.

Each record is asked at how many positions; records of equal counts then have results of equal shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from dpexp.privacy.engine.on_records import OnRecords

Count = Callable[[Tensor], int]


class _Positions(OnRecords):
    """[*shape] -> the k positions [k, dimensions] at which it is not zero."""

    @staticmethod
    def vmap(B: int, in_dims: Any, mask: Tensor, k: int) -> tuple[Tensor, int]:
        found = mask.movedim(in_dims[0], 0).nonzero()
        return found[:, 1:].reshape(B, k, mask.dim() - 1), 0


def _nonzero(count: Count, input: Tensor, *, as_tuple: bool = False) -> Any:
    if not _functorch.is_batchedtensor(input) or not input.dim():
        return NotImplemented
    found = _Positions.apply(input, count(input))
    return found.unbind(-1) if as_tuple else found


def _where(count: Count, condition: Tensor, *others: Any, **named: Any) -> Any:
    return NotImplemented if others or named else _nonzero(count, condition, as_tuple=True)


def _masked_select(count: Count, input: Tensor, mask: Tensor) -> Any:
    input, mask = torch.broadcast_tensors(input, mask)
    return _item(count, input, mask)


def _item(count: Count, x: Tensor, index: Any) -> Any:
    positions = _by_positions(count, index)
    return NotImplemented if positions is None else x[positions]


def _set_item(count: Count, x: Tensor, index: Any, value: Any) -> Any:
    if _is_mask(index) and index.shape == x.shape[: index.dim()] and not (isinstance(value, Tensor) and value.dim()):
        x.masked_fill_(index.reshape(*index.shape, *(1,) * (x.dim() - index.dim())), value)
        return None
    positions = _by_positions(count, index)
    if positions is None:
        return NotImplemented
    x[positions] = value
    return None


def _by_positions(count: Count, index: Any) -> tuple | None:
    """An index without masks; None if it has none."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)):
        return None
    spread = (_nonzero(count, part, as_tuple=True) if _is_mask(part) else (part,) for part in parts)
    return tuple(part for several in spread for part in several)


def _is_mask(part: Any) -> bool:
    return (
        isinstance(part, Tensor) and _functorch.is_batchedtensor(part) and part.dtype == torch.bool and part.dim() > 0
    )


SHAPES: dict[Any, Callable[..., Any]] = {
    torch.nonzero: _nonzero,
    Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    Tensor.argwhere: _nonzero,
    torch.where: _where,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
    Tensor.__getitem__: _item,
    Tensor.__setitem__: _set_item,
}
