"""The training set's memory, which a step must not hold, since a record would then affect the gradients of others."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from dpexp._torch_compat import no_subclasses
from dpexp.errors import ConfigError


class Memory:
    """The storages of tensors and arrays."""

    def __init__(self, arrays: Iterable[Tensor | np.ndarray] = ()) -> None:
        self._storages = np.array([_storage(one) for one in arrays], dtype=np.uint64).reshape(-1, 2)

    def refuse(self, arrays: Iterable[tuple[str, Tensor | np.ndarray]]) -> None:
        """Raises ConfigError: one of a step's arrays, (name, array), shares memory with these."""
        starts, ends = self._storages.T
        for name, one in arrays:
            start, end = _storage(one)
            if ((starts < end) & (ends > start)).any():
                raise ConfigError(
                    f"model: training_step reads the training data itself ({name}, of shape {tuple(one.shape)}), so "
                    "that a record would affect all others; let it use only its batch, and copies of public values."
                )


def _storage(one: Any) -> tuple[int, int]:
    """The first byte of an array's storage, and the byte after the last; equal if it has none."""
    while isinstance(one, np.ndarray) and isinstance(one.base, np.ndarray | Tensor):
        one = one.base
    if isinstance(one, np.ndarray):
        return one.ctypes.data, one.ctypes.data + one.nbytes
    with suppress(Exception), no_subclasses():  # sparse and fake tensors have no storage
        storage = one.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return 0, 0


def tensors_of(dataset: Any) -> Iterator[Tensor | np.ndarray]:
    """The tensors and arrays in attributes of a data set and of those that it wraps, or in containers there."""
    sets = [dataset]
    for data in sets:
        for part in _entries([data, *getattr(data, "__dict__", {}).values()], 3):
            if issubclass(type(part), Tensor | np.ndarray):  # asks nothing of the part, which may be a proxy
                yield part
            elif issubclass(type(part), Dataset) and not any(part is known for known in sets):
                sets.append(part)


def _entries(container: Any, depth: int) -> Iterator[Any]:
    """The entries of a list, tuple or dict, and theirs."""
    for part in container.values() if isinstance(container, dict) else container:
        yield part
        if depth > 1 and issubclass(type(part), list | tuple | dict):
            yield from _entries(part, depth - 1)
