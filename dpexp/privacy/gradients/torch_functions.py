"""Functions with indices, whose values a step that is not traced may get out of range, and uninitialized memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import is_batched, unbatched

# Their memory may still hold another record's numbers.
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


def _filled(empty: Tensor) -> Tensor:
    """An uninitialized tensor, filled with NaN, or with the largest integer."""
    if empty.is_floating_point() or empty.is_complex():
        return empty.fill_(torch.nan)
    return empty.fill_(True if empty.dtype == torch.bool else torch.iinfo(empty.dtype).max)


class OutOfRangeRefused(TorchFunctionMode):
    """While active, indices out of range raise an IndexError, and uninitialized memory is filled."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_out_of_range(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        return _filled(result) if func in _EMPTY else result


class IndexArgument(NamedTuple):
    """The argument of a call that holds indices into a table, or class labels; valid if low <= index < high."""

    position: int
    name: str
    indices: Any
    low: int
    high: int
    ignored: int | None = None  # this value is always valid
    used: Tensor | None = None  # mask of the entries that the function reads; None: all


def refuse_out_of_range(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises IndexError for invalid indices; some functions would read memory outside of their table."""
    argument = _index_argument(func, args, kwargs)
    invalid = None if argument is None else _invalid(argument, args, kwargs)
    while invalid is not None and is_batched(invalid):  # by a vmap inside training_step
        invalid = unbatched(invalid)
    if invalid is not None and bool(invalid.any()):
        raise IndexError(f"{func.__name__} was called with an index out of range.")


def table_size(func: Any, args: tuple, kwargs: dict) -> int | None:
    """The number of rows or classes that the indices of a call select from; None if it has no indices."""
    argument = _index_argument(func, args, kwargs)
    if argument is None or not isinstance(argument.indices, Tensor) or argument.indices.is_floating_point():
        return None
    return argument.high


def _index_argument(func: Any, args: tuple, kwargs: dict) -> IndexArgument | None:
    find = _INDEX_ARGUMENTS.get(func)
    return None if find is None else find(*args, **kwargs)


def _invalid(argument: IndexArgument, args: tuple, kwargs: dict) -> Tensor | None:
    """A mask of the invalid indices; None if the argument holds no integer tensor."""
    position, name, indices, low, high, ignored, used = argument
    passed: Any = args[position] if position < len(args) else kwargs.get(name)
    if not isinstance(indices, Tensor) or passed is not indices or indices.dtype not in (torch.int32, torch.int64):
        return None
    invalid = (indices < low) | (indices >= high)
    if ignored is not None:
        invalid = invalid & (indices != ignored)
    return invalid if used is None else invalid & used


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> IndexArgument:
    return IndexArgument(0, "input", input, 0, len(weight))


def _torch_embedding(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> IndexArgument:
    return IndexArgument(1, "indices", indices, 0, len(weight))


def _along_dim(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> IndexArgument | None:
    return IndexArgument(2, "index", index, 0, input.shape[dim]) if input.dim() else None


def _getitem(input: Tensor, index: Any) -> IndexArgument | None:
    if not isinstance(index, Tensor) or not input.dim():
        return None
    return IndexArgument(1, "index", index, -input.shape[0], input.shape[0])


def _one_hot(tensor: Tensor, num_classes: int = -1) -> IndexArgument | None:
    return IndexArgument(0, "tensor", tensor, 0, num_classes) if num_classes > 0 else None


def _class_labels(input: Tensor, target: Tensor, *args: Any, ignore_index: int = -100, **kwargs: Any) -> IndexArgument:
    ignored = args[2] if len(args) > 2 else ignore_index
    return IndexArgument(1, "target", target, 0, input.shape[1 if input.dim() > 1 else 0], ignored)


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
) -> IndexArgument:
    """Padded targets [N, S] are read up to their lengths; concatenated ones up to the sum of the lengths."""
    lengths = torch.as_tensor(target_lengths, device=targets.device)
    lengths = lengths[:, None] if targets.dim() == 2 else lengths.sum()
    used = torch.arange(targets.shape[-1], device=targets.device) < lengths
    return IndexArgument(1, "targets", targets, 0, log_probs.shape[-1], None, used)


_INDEX_ARGUMENTS: dict[Any, Callable[..., IndexArgument | None]] = {
    F.embedding: _embedding, F.embedding_bag: _embedding, torch.embedding: _torch_embedding,
    torch.gather: _along_dim, Tensor.gather: _along_dim,
    torch.index_select: _along_dim, Tensor.index_select: _along_dim,
    Tensor.__getitem__: _getitem, F.one_hot: _one_hot,
    F.cross_entropy: _class_labels, F.nll_loss: _class_labels, F.ctc_loss: _ctc, torch.ctc_loss: _ctc,
}  # fmt: skip
