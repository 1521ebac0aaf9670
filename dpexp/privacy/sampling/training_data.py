"""What the training set holds in memory, which a step may not read, since a record would then reach others' sums."""

import bisect
import contextlib
import gc
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from dpexp._torch_compat import is_wrapped, no_subclasses
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.torch_functions import leaves_of


class Memory:
    """Where tensors and arrays lie in memory."""

    def __init__(self, held: Iterable[Tensor | np.ndarray] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []  # first byte and the one after the last, in order and apart
        for start, end in sorted(place for one in held if (place := _place(one, whole=True)) is not None):
            if self._ranges and start < self._ranges[-1][1]:
                self._ranges[-1] = self._ranges[-1][0], max(end, self._ranges[-1][1])
            elif start < end:
                self._ranges.append((start, end))

    def refuse(self, held: Iterable[tuple[str, Tensor | np.ndarray]]) -> None:
        """Raises ConfigError: an array that a step holds or is given, by name, lies there."""
        for name, one in held:
            start, end = _place(one) or (0, 0)
            after = bisect.bisect_right(self._ranges, (start, math.inf))
            if start < end and after and start < self._ranges[after - 1][1]:
                raise ConfigError(
                    f"model: training_step reads the training data itself ({name}, of shape {tuple(one.shape)}), so "
                    "that a record would reach all others; let it use its batch alone, and copies of what is public."
                )


def _place(one: Tensor | np.ndarray, whole: bool = False) -> tuple[int, int] | None:
    """The first byte of a tensor or array, and the one after its last, or of all of a tensor's storage; None: it has no
    memory of its own."""
    with contextlib.suppress(Exception), no_subclasses():
        if isinstance(one, np.ndarray):
            steps = [(n - 1) * stride for n, stride in zip(one.shape, one.strides, strict=True)]
            start: int = one.__array_interface__["data"][0] + sum(step for step in steps if step < 0)
            return start, start + (sum(map(abs, steps)) + one.itemsize) * bool(one.size)
        if one.is_nested or one.layout != torch.strided:
            one = one._values() if one.layout == torch.sparse_coo else one.values()
        storage = one.untyped_storage()
        if whole:
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return one.data_ptr(), one.data_ptr() + one.numel()
    return None


class TrainingData:
    """A training set, and what it holds.

    Attributes:
        memory: of its tensors and arrays.
        sets: it, and the data sets that it wraps.
    """

    def __init__(self, dataset: Any) -> None:
        tensors: list[Tensor | np.ndarray] = []
        self.sets: list[Any] = []
        for one in _held_by(dataset):
            kind = type(one)
            if _is_data_set(kind) or one is dataset:
                self.sets.append(one)
            elif issubclass(kind, Tensor | np.ndarray) and not issubclass(kind, nn.Parameter):
                tensors.append(one)
        self.memory = Memory(tensors)


def _held_by(dataset: Any) -> Iterator[Any]:
    """A data set and what it holds, the nearest first; no code of the objects is run."""
    seen: set[int] = set()
    todo = deque([dataset])
    while todo and len(seen) < _LOOKED_AT:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        kind, held = type(one), list[Any]()
        if _is_data_set(kind) or one is dataset:
            own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch")]
            held += [value for base in own for value in vars(base).values()]
        if issubclass(kind, np.ndarray):
            held += np.ndarray.ravel(one).tolist() if one.dtype == object else []
        elif issubclass(kind, FunctionType):
            held += one.__closure__ or ()
        elif not issubclass(kind, _NOT_ENTERED):
            held += gc.get_referents(one)
        todo.extend(value for value in held if type(value) not in _PLAIN)


def _is_data_set(kind: type) -> bool:
    return issubclass(kind, Dataset) or hasattr(kind, "__getitems__")  # as those of Hugging Face


_LOOKED_AT = 2_000_000  # objects, in a second
_PLAIN = (int, float, str, bytes, bool, complex, type(None), range)
_NOT_ENTERED = (
    Tensor, nn.Module, pl.LightningDataModule, pl.Trainer, type, ModuleType, CodeType, FrameType, GeneratorType,
)  # fmt: skip


class DataUnread(TorchFunctionMode):
    """While active, a function that is given a part of the training data is refused, and what is read of a data set.

    Attributes:
        weighed: the last function that was given weights of classes, if any was.
    """

    def __init__(self, data: TrainingData) -> None:
        super().__init__()
        self._data = data
        self._patched, self._within = contextlib.ExitStack(), False
        self.weighed: str | None = None

    def __enter__(self) -> Self:
        for kind, name in itertools.product({type(one) for one in self._data.sets}, _READ):
            if hasattr(kind, name):
                with contextlib.suppress(TypeError):  # lists and the like, whose tensors are known
                    self._patched.enter_context(patch.object(kind, name, self._refusing(name, getattr(kind, name))))
        return super().__enter__()

    def _refusing(self, name: str, get: Callable[..., Any]) -> Callable[..., Any]:
        """In place of a method that gives records, or of one that may give what is plain, as their number."""

        def refuse(dataset: Any, *key: Any) -> Any:
            if self._within or not any(dataset is one for one in self._data.sets):
                return get(dataset, *key)
            read = f".{key[0]}" if name == "__getattribute__" else ""
            if read or name == "__len__":
                self._within = True
                try:
                    found = get(dataset, *key)
                finally:
                    self._within = False
                if type(found) in _PLAIN or read.startswith(".__"):
                    return found
            raise ConfigError(
                f"model: training_step reads the training set ({type(dataset).__name__}{read}), so that a record would "
                "reach all others; let it use its batch alone, and keep what is public in the module."
            )

        return refuse

    def __exit__(self, *error: Any) -> None:
        self._patched.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__deepcopy__:  # of what a batch holds besides tensors
            return func(*args, **(kwargs or {}))
        given = [leaf for leaf in leaves_of((args, kwargs or {})) if issubclass(type(leaf), Tensor | np.ndarray)]
        plain = [one for one in given if isinstance(one, np.ndarray) or not is_wrapped(one)]
        self._data.memory.refuse(("an argument of " + getattr(func, "__name__", "a function"), one) for one in plain)
        place = _WEIGHTS.get(func)
        if (
            place is not None
            and (kwargs or {}).get(place[1], args[place[0]] if place[0] < len(args) else None) is not None
        ):
            self.weighed = func.__name__
        return func(*args, **(kwargs or {}))


_READ = ("__getitem__", "__getitems__", "__iter__", "__len__", "__getattribute__")
# Where losses take weights of classes: place, name.
_WEIGHTS = {
    F.cross_entropy: (2, "weight"), F.nll_loss: (2, "weight"), F.multi_margin_loss: (4, "weight"),
    F.binary_cross_entropy_with_logits: (6, "pos_weight"),
}  # fmt: skip
