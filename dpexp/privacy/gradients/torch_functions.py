"""What a TorchFunctionMode has to know of a function: whether it is torch's own, mixes records, or has indices.

Indices and labels out of range are found by value: under vmap, one of them would raise an error for all records.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import (
    OpOverload,
    OpOverloadPacket,
    is_batched,
    qualified_name,
    unbatched,
    vmap_rules_refused,
)
from dpexp.errors import ConfigError

EXCHANGES = (
    "model: training_step exchanges something with other processes ({name}), which would mix their records with its "
    "own; compute a record's loss from that record alone."
)
OPERATORS = (OpOverload, OpOverloadPacket)

# The position of the argument running_mean; that of training is 5 everywhere.
BATCH_NORMS: dict[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3} | {
    getattr(torch.ops.aten, name): 3
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
}
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_BUILTINS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_GRAD_ACCESS = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


# Their memory may still hold another record's numbers.
EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


def filled(empty: Tensor) -> Tensor:
    """An uninitialized tensor, filled with NaN, or with the largest integer."""
    if empty.is_floating_point() or empty.is_complex():
        return empty.fill_(torch.nan)
    return empty.fill_(True if empty.dtype == torch.bool else torch.iinfo(empty.dtype).max)


class MixingRefused(TorchFunctionMode):
    """While active, calls that mix records raise a ConfigError; with `indices`, indices out of range are refused, too.

    `error` is the last one that a function of torch raised, even if the caller caught it.
    """

    def __init__(self, indices: bool = False) -> None:
        super().__init__()
        self._indices = indices
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_mixing(func, args, kwargs or {})
        try:
            if self._indices:
                refuse_out_of_range(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            return filled(result) if func in EMPTY else result
        except Exception as error:
            self.error = error
            raise


def refuse_mixing(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises ConfigError if a call mixes the records of a batch, or of several processes."""
    operator = without_overload(func)
    if isinstance(operator, OpOverloadPacket) and qualified_name(operator).startswith(_COLLECTIVES):
        raise ConfigError(EXCHANGES.format(name=operator))
    position = BATCH_NORMS.get(operator)
    if position is None:
        return
    by_position = dict(enumerate(args))
    mean, training = (
        kwargs.get("running_mean", by_position.get(position)), kwargs.get("training", by_position.get(5)),
    )  # fmt: skip
    if isinstance(mean, Tensor) and training:  # without running statistics, it may standardize a weight
        raise ConfigError(
            "model: a call of batch_norm in training mode mixes the records of a batch, which no clipping of one "
            "record can bound; use group_norm, layer_norm or instance_norm, or freeze it with training=False."
        )


def without_overload(func: Any) -> Any:
    """An operator of torch.ops without its overload; other functions as they are."""
    return func.overloadpacket if isinstance(func, OpOverload) else func


def is_from_torch(func: Any) -> bool:
    """Whether a function is torch's own, so that it uses no tensor but its arguments."""
    if isinstance(func, OPERATORS):
        return str(func).startswith("aten.")
    if isinstance(func, types.FunctionType):
        return func.__code__.co_filename.startswith(_TORCH_FOLDER)
    return isinstance(func, _BUILTINS) and func not in _GRAD_ACCESS


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts."""
    cls = type(value)
    if cls is dict:
        value = [*value.values()]
    elif cls not in (list, tuple, torch.Size) and cls.__module__ != "torch.return_types":
        return [value]
    return [leaf for item in value for leaf in (leaves_of(item) if isinstance(item, list | tuple | dict) else (item,))]


@contextmanager
def custom_vmap_rules_refused() -> Iterator[None]:
    """Meanwhile an autograd function or operator with its own vmap rule, which sees all records, raises an error."""

    def refuse(interpreter: Any, rule: Any, function: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the vmap rule of {getattr(function, '__name__', function)} would see all records.")

    with vmap_rules_refused(refuse):
        yield


class IndexArgument(NamedTuple):
    """The argument of a call that holds indices into a table, or class labels; valid if low <= index < high."""

    position: int
    name: str
    indices: Any
    low: int
    high: int
    ignored: int | None = None  # this value is always valid
    used: Tensor | None = None  # mask of the entries that the function reads; None: all


def clamp_indices(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict, Tensor] | None:
    """The call with invalid indices set to 0, and whether all were valid; None if it has no per-record indices."""
    argument = _index_argument(func, args, kwargs)
    invalid = None if argument is None else _invalid(argument, args, kwargs)
    if argument is None or invalid is None or not is_batched(argument.indices):
        return None
    safe = torch.where(invalid, 0, argument.indices)
    if argument.position < len(args):
        args = (*args[: argument.position], safe, *args[argument.position + 1 :])
    else:
        kwargs = {**kwargs, argument.name: safe}
    return args, kwargs, ~invalid.any()


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

INDEXED = frozenset(_INDEX_ARGUMENTS)


# Found by comparing all operators that PyTorch 2.13's own tests list, under vmap and one record at a time.
WRONG_UNDER_VMAP = {
    torch.index_fill,
    Tensor.index_fill,  # an index that is negative or out of range writes to other records
    torch.select_scatter,
    Tensor.select_scatter,
    torch.as_strided_scatter,
    Tensor.as_strided_scatter,
    torch.segment_reduce,  # writes outside of its memory
    torch.linalg.lstsq,  # one matrix without full rank empties the residuals of all
    torch.quantize_per_tensor,  # uses the first record's scale for all
    torch.quantize_per_tensor_dynamic,
    torch.quantize_per_channel,
}
MEDIANS = {torch.median, Tensor.median, torch.nanmedian, Tensor.nanmedian}  # wrong over all dimensions


def generator_of(func: Any, args: tuple, kwargs: dict) -> torch.Generator | None:
    """The generator that is passed to a function."""
    arguments = (*args, *kwargs.values()) if isinstance(func, OPERATORS) else (kwargs.get("generator"),)
    return next((value for value in arguments if isinstance(value, torch.Generator)), None)


def has_padding(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an embedding's call sets padding_idx or scale_grad_by_freq."""
    if func is torch.embedding_bag:
        return True  # padding_idx has no value that says "none" in all of its forms
    order = {
        F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
        F.embedding_bag: ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode",
                          "sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
        torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq"),
    }.get(func, ())  # fmt: skip
    passed = dict(zip(order, args, strict=False)) | kwargs
    if func is torch.embedding and passed.get("padding_idx") == -1:
        passed["padding_idx"] = None
    options = (passed.get("padding_idx"), passed.get("scale_grad_by_freq"))
    return any(option is not None and option is not False for option in options)  # 0 is a padding_idx
