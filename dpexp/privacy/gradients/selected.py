"""The entries of a record's tensor where a mask is true, as in loss(x[mask], y[mask]).

Their number depends on the record. They stand for a tensor in functions of single entries, in losses, sums and means;
anything else raises an error, and records are then processed one at a time.
"""

from collections.abc import Callable
from typing import Any, NoReturn

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
_DEFAULTS = {"ignore_index": _IGNORED, "label_smoothing": 0.0, "delta": 1.0, "beta": 1.0}
_OF_CLASSES = (F.cross_entropy, F.nll_loss)


def _operator(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: apply(func, (self, *args), {})


def _refused(what: str) -> Callable[..., Any]:
    return lambda self, *_: self.refuse(f"{what} of entries selected by a boolean mask depends on how many there are.")


class _OfMask:
    """What stands for a result of unknown size. What it cannot do is refused, also where the step catches the error.

    Args:
        on_error: is called with each error.
    """

    _own = ("mask", "version", "values", "on_error")

    def __init__(self, mask: Tensor, on_error: Callable[[Exception], None]) -> None:
        self.mask, self.version, self.on_error = mask, version_of(unbatched_fully(mask)), on_error

    def refuse(self, message: str) -> NoReturn:
        error = RuntimeError(message)
        self.on_error(error)
        raise error

    def check_mask(self, mask: Tensor) -> None:
        if self.mask is not mask or version_of(unbatched_fully(mask)) != self.version:
            self.refuse("entries selected by several boolean masks are combined, or a mask was written to.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._own:
            self.refuse(f"an attribute {name} of entries selected by a boolean mask is set.")
        super().__setattr__(name, value)


for _name in ("len", "iter", "getitem", "setitem", "contains", "bool", "int", "float", "index", "array", "iadd", "isub",
              "imul", "itruediv", "ipow", "iand", "ior", "copy", "deepcopy", "repr", "format"):  # fmt: skip
    setattr(_OfMask, f"__{_name}__", _refused(_name))


class Places(_OfMask):
    """torch.where(mask) or mask.nonzero(as_tuple=True)."""

    def __iter__(self) -> Any:
        raise RuntimeError(_PLACES)  # PyTorch itself asks whether an index is a sequence

    __len__ = __getitem__ = __iter__


class Selected(_OfMask):
    """x[mask] of x [*mask.shape, ...], whose other entries are 0 here and get no gradient."""

    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # of isinstance

    def __init__(self, values: Tensor, mask: Tensor, on_error: Callable[[Exception], None]) -> None:
        super().__init__(mask, on_error)
        self.values = values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return apply(func, args, kwargs or {})

    def filled(self) -> Tensor:
        """The tensor with 0 where the mask is false."""
        return self.values.masked_fill(~self.spread(), 0)

    def spread(self) -> Tensor:
        """The mask with as many dimensions as the tensor."""
        return self.mask.reshape(*self.mask.shape, *(1,) * (self.values.dim() - self.mask.dim()))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "is_floating_point"):
            return getattr(self.values, name)
        if name not in _OF_ENTRIES | {"mean", "sum"}:
            self.refuse(f"{name} of entries selected by a boolean mask depends on how many there are.")
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    __add__ = __radd__ = _operator(torch.add)
    __sub__, __rsub__ = _operator(torch.sub), _operator(torch.rsub)
    __mul__ = __rmul__ = _operator(torch.mul)
    __truediv__, __pow__, __neg__ = _operator(torch.div), _operator(torch.pow), _operator(torch.neg)
    __eq__, __ne__ = _operator(torch.eq), _operator(torch.ne)  # type: ignore[assignment]
    __gt__, __ge__, __lt__, __le__ = map(_operator, (torch.gt, torch.ge, torch.lt, torch.le))
    __hash__ = None  # type: ignore[assignment]


def selects(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call selects the entries, or the places, where a record's mask is true."""
    index = args[-1] if args and not kwargs else None
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0 and is_batched(index)
    return is_mask and (func in _SELECTIONS or (func is torch.where and len(args) == 1))


def selection(func: Callable[..., Any], args: tuple, kwargs: dict, on_error: Callable[[Exception], None]) -> Any:
    """A call that selects entries, or that has selected ones as arguments."""
    if func is torch.where and len(args) == 1 and not kwargs and type(args[0]) is not Selected:
        return Places(args[0], on_error)
    if func not in _SELECTIONS or kwargs or len(args) != 2 or type(args[0]) in (Selected, Places):
        return apply(func, args, kwargs)
    x, index = args
    if type(index) is Places:
        index.check_mask(index.mask)
    mask = index.mask if type(index) is Places else index
    shape = x.shape if func in _SELECTIONS[1:] else x.shape[: mask.dim()]
    if type(mask) is Selected or mask.shape != shape:
        raise RuntimeError("a boolean mask selects from a tensor of another shape.")
    found = Selected(x, mask, on_error)
    found.values = found.filled()
    return found


def apply(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A function of selected entries.

    Raises:
        RuntimeError: the function is neither one of single entries nor a loss, a sum or a mean.
    """
    some = [value for value in (*args, *kwargs.values()) if type(value) is Selected]
    if not some:
        raise RuntimeError(_PLACES)
    like = some[0]
    for one in some:
        one.check_mask(like.mask)
    name, mask, is_loss = getattr(func, "__name__", ""), like.mask, func in _LOSSES
    if name not in _OF_ENTRIES | {"mean", "sum"} and not is_loss:
        like.refuse(f"{name} of entries selected by a boolean mask depends on how many there are.")
    if func not in _OF_CLASSES and any(one.values.shape != like.values.shape for one in some):
        like.refuse("entries selected by a boolean mask from tensors of several shapes are combined.")

    def value_of(value: Any) -> Any:
        if type(value) is Selected:
            return value.filled() if is_loss else value.values
        if not isinstance(value, Tensor):
            return value
        if value.dim():
            like.refuse("entries selected by a boolean mask are combined with a tensor of their number.")
        # Infinite derivatives at other entries, times their gradient 0, would be NaN in the gradient of this number.
        return torch.where(like.spread(), value, value.detach()) if value.is_floating_point() else value

    values, options = [*map(value_of, args)], {key: value_of(value) for key, value in kwargs.items()}
    if is_loss:
        unset = {
            key for key, value in options.items() if value is None or (key in _DEFAULTS and value == _DEFAULTS[key])
        }
        options = {key: value for key, value in options.items() if key not in unset}
        if len(values) > 2 or options.keys() - {"reduction", "input", "target"}:
            like.refuse(f"{name} of entries selected by a boolean mask takes no options but reduction.")
        reduction: Any = options.pop("reduction", "mean")
        if func in _OF_CLASSES:
            given = dict(zip(("input", "target"), values, strict=False)) | options
            classes, target = given["input"], given["target"]
            if classes.dim() != mask.dim() + 1 or target.dim() != mask.dim():
                like.refuse(f"{name} of entries selected by a boolean mask takes scores [N, C] and labels [N].")
            each = func(classes.flatten(0, -2), target.flatten(), reduction="none").view(mask.shape)
            mask = mask & (target != _IGNORED)
        else:
            each = func(*values, **options, reduction="none")
        return Selected(each, like.mask, like.on_error) if reduction == "none" else _reduced(each, mask, reduction)
    if name in ("mean", "sum"):
        if len(values) != 1 or options:
            like.refuse(f"{name} of entries selected by a boolean mask takes no dimension.")
        return _reduced(values[0], mask, name)
    return Selected(func(*values, **options), like.mask, like.on_error)


def _reduced(each: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """The sum or mean of entries [*mask.shape, ...] where the mask is true."""
    selected = mask.reshape(*mask.shape, *(1,) * (each.dim() - mask.dim()))
    total = torch.where(selected, each, 0).sum()
    if reduction == "sum":
        return total
    return total / (mask.sum() * (each.numel() // max(mask.numel(), 1)))
