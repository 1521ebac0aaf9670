"""What the training set holds in memory, which a step may not read, since a record would then reach others' sums."""

import bisect
import contextlib
import gc
import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from dpexp.errors import ConfigError
from dpexp.privacy.engine.torch_functions import leaves_of


class Memory:
    """Where tensors lie in memory."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        plain = [
            tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided and not tensor.is_nested
        ]
        self._ranges: list[tuple[int, int]] = []  # first byte and the one after the last, in order and apart
        for start, end in sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in plain):
            if self._ranges and start < self._ranges[-1][1]:
                self._ranges[-1] = self._ranges[-1][0], max(end, self._ranges[-1][1])
            elif start < end:
                self._ranges.append((start, end))

    def refuse(self, held: Iterable[tuple[str, Tensor | np.ndarray]]) -> None:
        """Raises ConfigError: an array that a step holds or is given, by name, lies there."""
        for name, tensor in held:
            if isinstance(tensor, np.ndarray) or (tensor.layout == torch.strided and tensor.numel()):
                place = tensor.data_ptr() if isinstance(tensor, Tensor) else tensor.__array_interface__["data"][0]
                after = bisect.bisect_right(self._ranges, (place, math.inf))
                if after and place < self._ranges[after - 1][1]:
                    raise ConfigError(
                        f"model: training_step reads the training data itself ({name}, of shape "
                        f"{tuple(tensor.shape)}), so that a record would reach all others; let it use its batch alone, "
                        "and copies of what is public."
                    )


class TrainingData:
    """A training set, and what it holds.

    Attributes:
        memory: of its tensors and arrays.
        sets: it, and the data sets that it wraps.
    """

    def __init__(self, dataset: Any) -> None:
        tensors: list[Tensor] = []
        self.sets: list[Any] = [dataset]
        for one in _held_by(dataset):
            kind = type(one)
            if issubclass(kind, Dataset) and one is not dataset:
                self.sets.append(one)
            elif issubclass(kind, Tensor) and not issubclass(kind, nn.Parameter):
                tensors.append(one)
            elif issubclass(kind, np.ndarray) and one.dtype != object:
                with contextlib.suppress(TypeError, ValueError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of arrays that may not be written to
                    tensors.append(torch.from_numpy(one))
        self.memory = Memory(tensors)


def _held_by(dataset: Any) -> Iterator[Any]:
    """A data set and what it holds, the nearest first; no code of the objects is run."""
    seen: set[int] = set()
    todo = deque([dataset, *vars(type(dataset)).values()])
    while todo and len(seen) < _LOOKED_AT:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        kind = type(one)
        if issubclass(kind, np.ndarray):
            todo.extend(one.ravel() if one.dtype == object else ())
        elif issubclass(kind, FunctionType):
            todo.extend(one.__closure__ or ())
        elif not issubclass(kind, _NOT_ENTERED):
            todo.extend(gc.get_referents(one))


_LOOKED_AT = 2_000_000  # objects, in a second
_NOT_ENTERED = (Tensor, nn.Module, type, ModuleType, CodeType, FrameType, GeneratorType)


class DataUnread(TorchFunctionMode):
    """While active, a function that is given a part of the training data is refused, and a record that is fetched.

    Attributes:
        weighed: the last function that was given weights of classes, if any was.
    """

    def __init__(self, data: TrainingData) -> None:
        super().__init__()
        self._data = data
        self._patched = contextlib.ExitStack()
        self.weighed: str | None = None

    def __enter__(self) -> Self:
        for kind, name in itertools.product({type(one) for one in self._data.sets}, _GIVE):
            get = getattr(kind, name, None)
            if get is None:
                continue

            def refuse(dataset: Any, *key: Any, get: Any = get) -> Any:
                if any(dataset is one for one in self._data.sets):
                    raise ConfigError(
                        f"model: training_step fetches records of the training set ({type(dataset).__name__}), so that "
                        "a record would reach all others; let it use its batch alone."
                    )
                return get(dataset, *key)

            with contextlib.suppress(TypeError):  # lists and the like, whose tensors are known
                self._patched.enter_context(patch.object(kind, name, refuse))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patched.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__deepcopy__:  # of what a batch holds besides tensors
            return func(*args, **(kwargs or {}))
        kinds = (Tensor, nn.Parameter, np.ndarray, np.memmap)
        given = [leaf for leaf in leaves_of((args, kwargs or {})) if type(leaf) in kinds]
        plain = [one for one in given if isinstance(one, np.ndarray) or not is_functorch_wrapped_tensor(one)]
        self._data.memory.refuse(("an argument of " + getattr(func, "__name__", "a function"), one) for one in plain)
        place = _WEIGHTS.get(func)
        if (
            place is not None
            and (kwargs or {}).get(place[1], args[place[0]] if place[0] < len(args) else None) is not None
        ):
            self.weighed = func.__name__
        return func(*args, **(kwargs or {}))


_GIVE = ("__getitem__", "__getitems__", "__iter__")
# Where losses take weights of classes: place, name.
_WEIGHTS = {
    F.cross_entropy: (2, "weight"), F.nll_loss: (2, "weight"), F.multi_margin_loss: (4, "weight"),
    F.binary_cross_entropy_with_logits: (6, "pos_weight"),
}  # fmt: skip
