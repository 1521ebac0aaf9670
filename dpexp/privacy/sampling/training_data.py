"""The training set's memory, which a step must not read, since a record would then affect the gradients of others."""

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
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from dpexp._lightning_compat import pl
from dpexp._torch_compat import is_wrapped, no_subclasses
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.torch_functions import leaves_of


class Memory:
    """The memory of tensors and arrays."""

    def __init__(self, arrays: Iterable[Tensor | np.ndarray] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []  # (first byte, byte after the last), ordered and disjoint
        for start, end in sorted(span for one in arrays if (span := _span(one, of_storage=True)) is not None):
            if self._ranges and start < self._ranges[-1][1]:
                self._ranges[-1] = self._ranges[-1][0], max(end, self._ranges[-1][1])
            elif start < end:
                self._ranges.append((start, end))

    def refuse(self, arrays: Iterable[tuple[str, Tensor | np.ndarray]]) -> None:
        """Raises ConfigError: one of a step's arrays, (name, array), lies in this memory."""
        for name, one in arrays:
            start, end = _span(one) or (0, 0)
            after = bisect.bisect_right(self._ranges, (start, math.inf))
            if start < end and after and start < self._ranges[after - 1][1]:
                raise ConfigError(
                    f"model: training_step reads the training data itself ({name}, of shape {tuple(one.shape)}), so "
                    "that a record would affect all others; let it use only its batch, and copies of public values."
                )


def _span(one: Tensor | np.ndarray, of_storage: bool = False) -> tuple[int, int] | None:
    """(first byte, byte after the last) of an array, or of a tensor's storage; None: it has no memory."""
    with contextlib.suppress(Exception), no_subclasses():
        if isinstance(one, np.ndarray):
            steps = [(n - 1) * stride for n, stride in zip(one.shape, one.strides, strict=True)]
            start: int = one.__array_interface__["data"][0] + sum(step for step in steps if step < 0)
            return start, start + (sum(map(abs, steps)) + one.itemsize) * bool(one.size)
        if one.is_nested or one.layout != torch.strided:
            one = one._values() if one.layout == torch.sparse_coo else one.values()
        storage = one.untyped_storage()
        if of_storage:
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return one.data_ptr(), one.data_ptr() + one.numel()
    return None


class TrainingData:
    """The tensors and arrays of a training set.

    Attributes:
        memory: where they are.
        sets: the data set, and the data sets that it wraps.
    """

    def __init__(self, dataset: Any) -> None:
        tensors: list[Tensor | np.ndarray] = []
        self.sets: list[Any] = []
        for one in _objects_of(dataset):
            type_ = type(one)
            if _is_data_set(type_) or one is dataset:
                self.sets.append(one)
            elif issubclass(type_, Tensor | np.ndarray) and not issubclass(type_, nn.Parameter):
                tensors.append(one)
        self.memory = Memory(tensors)


def _objects_of(dataset: Any) -> Iterator[Any]:
    """A data set and all objects that it refers to, breadth first; runs none of their code."""
    seen: set[int] = set()
    todo = deque([dataset])
    while todo and len(seen) < _MAX_OBJECTS:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        type_, referents = type(one), list[Any]()
        if _is_data_set(type_) or one is dataset:
            own = [base for base in type_.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch")]
            referents += [value for base in own for value in vars(base).values()]
        if issubclass(type_, np.ndarray):
            referents += np.ndarray.ravel(one).tolist() if one.dtype == object else []
        elif issubclass(type_, FunctionType):
            referents += one.__closure__ or ()
        elif not issubclass(type_, _NOT_ENTERED):
            referents += gc.get_referents(one)
        todo.extend(value for value in referents if type(value) not in _PLAIN)


def _is_data_set(type_: type) -> bool:
    return issubclass(type_, Dataset) or hasattr(type_, "__getitems__")  # such as Hugging Face's


_MAX_OBJECTS = 2_000_000  # about a second
_PLAIN = (int, float, str, bytes, bool, complex, type(None), range)
_NOT_ENTERED = (
    Tensor, nn.Module, pl.LightningDataModule, pl.Trainer, type, ModuleType, CodeType, FrameType, GeneratorType,
)  # fmt: skip


class DataUnread(TorchFunctionMode):
    """While active, refuses functions of the training data's tensors, and access to its data sets.

    Attributes:
        weighed: the last function that got class weights, if any did.
    """

    def __init__(self, data: TrainingData) -> None:
        super().__init__()
        self._data = data
        self._patched, self._within = contextlib.ExitStack(), False
        self.weighed: str | None = None

    def __enter__(self) -> Self:
        for type_, name in itertools.product({type(one) for one in self._data.sets}, _READ):
            if hasattr(type_, name):
                with contextlib.suppress(TypeError):  # a built-in type, such as a list, whose tensors are in `memory`
                    self._patched.enter_context(patch.object(type_, name, self._refusing(name, getattr(type_, name))))
        return super().__enter__()

    def _refusing(self, name: str, get: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a method that gives records, or that may give only plain values, such as their number."""

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
                "affect all others; let it use only its batch, and keep public values in the module."
            )

        return refuse

    def __exit__(self, *error: Any) -> None:
        self._patched.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__deepcopy__:  # of a batch's values that are no tensors
            return func(*args, **kwargs)
        arrays = [leaf for leaf in leaves_of((args, kwargs)) if issubclass(type(leaf), Tensor | np.ndarray)]
        plain = [one for one in arrays if isinstance(one, np.ndarray) or not is_wrapped(one)]
        self._data.memory.refuse(("an argument of " + getattr(func, "__name__", "a function"), one) for one in plain)
        position, keyword = _WEIGHTS.get(func, (math.inf, ""))
        if kwargs.get(keyword, args[int(position)] if position < len(args) else None) is not None:
            self.weighed = func.__name__
        return func(*args, **kwargs)


_READ = ("__getitem__", "__getitems__", "__iter__", "__len__", "__getattribute__")
# The class weights' argument of losses: position, keyword.
_WEIGHTS = {
    F.cross_entropy: (2, "weight"), F.nll_loss: (2, "weight"), F.multi_margin_loss: (4, "weight"),
    F.binary_cross_entropy_with_logits: (6, "pos_weight"),
}  # fmt: skip
