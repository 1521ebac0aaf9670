"""Indices and labels out of range, which are found by value: under vmap one of them would raise for all records."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import is_batched, unbatched


def clamped(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict, Tensor] | None:
    """A call whose indices are all in range, and whether they were (0-d, of each record under vmap); None: the function
    takes no indices of a record's."""
    found = _wrong(func, args, kwargs)
    if found is None or not is_batched(found[2]):
        return None
    key, name, index, wrong = found
    safe = torch.where(wrong, 0, index)
    if key < len(args):
        args = (*args[:key], safe, *args[key + 1 :])
    else:
        kwargs = {**kwargs, name: safe}
    return args, kwargs, ~wrong.any()


def refuse_wrong(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises IndexError: indices are out of range, of which some functions read what lies beside their tables."""
    found = _wrong(func, args, kwargs) if func in INDEXED else None
    wrong = found[3] if found is not None else None
    while wrong is not None and is_batched(wrong):  # of a vmap inside the step
        wrong = unbatched(wrong)
    if wrong is not None and bool(wrong.any()):
        raise IndexError(f"an index that {func.__name__} was given is out of range.")


def _wrong(func: Any, args: tuple, kwargs: dict) -> tuple[int, str, Tensor, Tensor] | None:
    """Place, name, and indices of a call, and which of them are out of range."""
    place = _PLACES.get(func)
    found = place(*args, **kwargs) if place is not None else None
    if found is None or not isinstance(found[2], Tensor):
        return None
    key, name, _, least, size, ignored, *used = found
    index: Tensor = found[2]
    given: Any = args[key] if key < len(args) else kwargs.get(name)
    if given is not index or index.dtype not in (torch.int32, torch.int64):
        return None
    wrong = (index < least) | (index >= size)
    if ignored is not None:
        wrong = wrong & (index != ignored)
    if used:
        wrong = wrong & used[0]
    return key, name, index, wrong


# place, name, indices, the least of them, one more than the largest, one that stands for none, and which are used
Found = tuple[int, str, Any, int, int, int | None] | tuple[int, str, Any, int, int, None, Tensor] | None


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Found:
    return 0, "input", input, 0, len(weight), None


def _embedding_of_torch(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Found:
    return 1, "indices", indices, 0, len(weight), None


def _along(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Found:
    if not input.dim():
        return None
    return 2, "index", index, 0, input.shape[dim], None


def _item(input: Tensor, index: Any) -> Found:
    if not isinstance(index, Tensor) or not input.dim():
        return None
    return 1, "index", index, -input.shape[0], input.shape[0], None


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Found:
    return (0, "tensor", tensor, 0, num_classes, None) if num_classes > 0 else None


def _classes(input: Tensor, target: Tensor, *args: Any, ignore_index: int = -100, **kwargs: Any) -> Found:
    ignored = args[2] if len(args) > 2 else ignore_index
    return 1, "target", target, 0, input.shape[1 if input.dim() > 1 else 0], ignored


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
) -> Found:
    """Of labels [N, S] those before the lengths are used; of labels one after the other all."""
    lengths = torch.as_tensor(target_lengths, device=targets.device)
    lengths = lengths[:, None] if targets.dim() == 2 else lengths.sum()
    used = torch.arange(targets.shape[-1], device=targets.device) < lengths
    return 1, "targets", targets, 0, log_probs.shape[-1], None, used


_PLACES: dict[Any, Callable[..., Found]] = {
    F.embedding: _embedding, F.embedding_bag: _embedding, torch.embedding: _embedding_of_torch,
    torch.gather: _along, Tensor.gather: _along, torch.index_select: _along, Tensor.index_select: _along,
    Tensor.__getitem__: _item, F.one_hot: _one_hot,
    F.cross_entropy: _classes, F.nll_loss: _classes, F.ctc_loss: _ctc, torch.ctc_loss: _ctc,
}  # fmt: skip

INDEXED = frozenset(_PLACES)


def sizes_met(func: Any, args: tuple, kwargs: dict) -> int | None:
    """The size of the table, or the number of classes, that indices of a call are in; None: it takes none."""
    place = _PLACES.get(func)
    found = place(*args, **kwargs) if place is not None else None
    if found is None or not isinstance(found[2], Tensor) or found[2].is_floating_point():
        return None
    return found[4]
