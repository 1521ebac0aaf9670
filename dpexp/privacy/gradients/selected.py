"""The entries of a record's tensor where a mask is true, as in loss(x[mask], y[mask]).

Their number depends on the record. They stand for a tensor in functions of single entries, in losses, sums and means;
anything else raises an error, and records are then processed one at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import is_batched, version_of
from dpexp.privacy.gradients.derived_parameters import unbatched_fully

_SELECTIONS = (Tensor.__getitem__, torch.masked_select, Tensor.masked_select)
_CONVERSIONS = {"float", "double", "half", "bfloat16", "long", "int", "to", "detach", "contiguous", "clone"}
_OF_ENTRIES = _CONVERSIONS | {
    "neg", "abs", "exp", "log", "log1p", "sqrt", "square", "sigmoid", "logsigmoid", "tanh", "relu", "clamp",
    "add", "sub", "mul", "div", "pow", "rsub", "eq", "ne", "gt", "ge", "lt", "le",
}  # fmt: skip
_LOSSES = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.cross_entropy, F.nll_loss,
}  # fmt: skip
_PLACES = "the number of places where a boolean mask is true depends on a record's data."
_IGNORED = -100
_DEFAULTS = {"ignore_index": _IGNORED, "label_smoothing": 0.0}
_OF_CLASSES = (F.cross_entropy, F.nll_loss)


def _operator(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: apply(func, args, {})


class Selected:
    """x[mask] of x [*mask.shape, ...], whose other entries are 0 here and get no gradient."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.mask, self.version = mask, version_of(unbatched_fully(mask))
        self.values = x.masked_fill(~mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return apply(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "is_floating_point"):
            return getattr(self.values, name)
        if name not in _OF_ENTRIES | {"mean", "sum"}:
            raise RuntimeError(f"{name} of entries selected by a boolean mask depends on how many there are.")
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise RuntimeError("a branch on entries selected by a boolean mask depends on how many there are.")

    __add__ = __radd__ = _operator(torch.add)
    __sub__, __rsub__ = _operator(torch.sub), _operator(torch.rsub)
    __mul__ = __rmul__ = _operator(torch.mul)
    __truediv__, __pow__, __neg__ = _operator(torch.div), _operator(torch.pow), _operator(torch.neg)
    __eq__, __ne__ = _operator(torch.eq), _operator(torch.ne)  # type: ignore[assignment]
    __gt__, __ge__, __lt__, __le__ = map(_operator, (torch.gt, torch.ge, torch.lt, torch.le))
    __hash__ = None  # type: ignore[assignment]


def selects(func: Any, args: tuple) -> bool:
    """Whether a call selects the entries, or the places, where a record's mask is true."""
    index = args[-1] if args else None
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0 and is_batched(index)
    return is_mask and (func in _SELECTIONS or (func is torch.where and len(args) == 1))


def selection(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A call that selects entries, or that has selected ones as arguments."""
    if func is torch.where and len(args) == 1:
        return Places(args[0])
    if func not in _SELECTIONS:
        return apply(func, args, kwargs)
    x, index = args
    mask = index.mask if isinstance(index, Places) else index
    if not isinstance(x, Tensor) or mask.shape != x.shape[: mask.dim()]:
        raise RuntimeError("a boolean mask selects from a tensor of another shape.")
    return Selected(x, mask)


class Places:
    """torch.where(mask) or mask.nonzero(as_tuple=True)."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __iter__(self) -> Any:
        raise RuntimeError(_PLACES)

    __len__ = __getitem__ = __iter__


def apply(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A function of selected entries.

    Raises:
        RuntimeError: the function is neither one of single entries nor a loss, a sum or a mean.
    """
    some = [value for value in (*args, *kwargs.values()) if isinstance(value, Selected)]
    if not some:
        raise RuntimeError(_PLACES)
    now = version_of(unbatched_fully(some[0].mask))
    if any(one.mask is not some[0].mask or one.version != now for one in some):
        raise RuntimeError("entries selected by several boolean masks are combined, or a mask was written to.")
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    name, mask = getattr(func, "__name__", ""), some[0].mask
    if others:
        raise RuntimeError("entries selected by a boolean mask are combined with a tensor of their number.")
    values = [value.values if isinstance(value, Selected) else value for value in args]
    options = {key: value.values if isinstance(value, Selected) else value for key, value in kwargs.items()}
    if func not in _OF_CLASSES and any(one.values.shape != some[0].values.shape for one in some):
        raise RuntimeError("entries selected by a boolean mask from tensors of several shapes are combined.")
    if func in _LOSSES:
        unset = {
            key for key, value in options.items() if value is None or (key in _DEFAULTS and value == _DEFAULTS[key])
        }
        options = {key: value for key, value in options.items() if key not in unset}
        if len(values) > 2 or options.keys() - {"reduction", "input", "target"}:
            raise RuntimeError(f"{name} of entries selected by a boolean mask takes no options but reduction.")
        reduction: Any = options.pop("reduction", "mean")
        if func in _OF_CLASSES:
            given = dict(zip(("input", "target"), values, strict=False)) | options
            classes, target = given["input"], given["target"]
            if classes.dim() != mask.dim() + 1 or target.dim() != mask.dim():
                raise RuntimeError(f"{name} of entries selected by a boolean mask takes scores [N, C] and labels [N].")
            each = func(classes.flatten(0, -2), target.flatten(), reduction="none").view(mask.shape)
            mask = mask & (target != _IGNORED)
        else:
            each = func(*values, **options, reduction="none")
        return _as_selected(each, some[0]) if reduction == "none" else _reduced(each, mask, reduction)
    if name in ("mean", "sum") and len(values) == 1 and not options:
        return _reduced(values[0], mask, name)
    if name not in _OF_ENTRIES:
        raise RuntimeError(f"{name} of entries selected by a boolean mask depends on how many there are.")
    return _as_selected(func(*values, **options), some[0])


def _as_selected(values: Tensor, like: Selected) -> Selected:
    found = Selected.__new__(Selected)
    found.mask, found.version, found.values = like.mask, like.version, values
    return found


def _reduced(each: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """The sum or mean of entries [*mask.shape, ...] where the mask is true."""
    selected = mask.reshape(*mask.shape, *(1,) * (each.dim() - mask.dim()))
    total = torch.where(selected, each, 0).sum()
    if reduction == "sum":
        return total
    return total / (mask.sum() * (each.numel() // max(mask.numel(), 1)))
