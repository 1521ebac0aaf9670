"""What a training step reads of the modules besides parameters and buffers, such as `self.hparams["beta"]`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import nn

from dpexp.privacy.engine.chunk import PLAIN

# Parameters and buffers are inputs of a graph; what a module holds for PyTorch's own purposes changes no loss.
_NOT_NOTED = {*vars(nn.Module())} - {"training", "_modules"}
_DEPTH, _MANY = 3, 100


class Reads:
    """The attributes that a step has read, and what they were."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what is read meanwhile, and afterwards what it is."""
        read: dict[tuple[int, str], nn.Module] = {}

        def noting(module: nn.Module, name: str) -> Any:
            if name not in _NOT_NOTED and name in object.__getattribute__(module, "__dict__"):
                read[id(module), name] = module
            return object.__getattribute__(module, name)

        with patch.object(nn.Module, "__getattribute__", noting, create=True):
            yield
        before = {key: module for key, (module, _) in self._seen.items()}
        self._seen = {key: (module, _look(vars(module).get(key[1]))) for key, module in (before | read).items()}

    def changed(self) -> str | None:
        """The name of an attribute that is not what it was; None: there is none."""
        for (_, name), (module, before) in self._seen.items():
            if _look(vars(module).get(name)) != before:
                return name
        return None


def _look(value: Any, depth: int = _DEPTH) -> Any:
    """Equal for what is the same: plain numbers and texts by value, also in containers and dataclasses; else the very
    same object."""
    if isinstance(value, PLAIN):
        return repr(value)
    if depth and isinstance(value, list | tuple | set | frozenset) and len(value) <= _MANY:
        return [_look(one, depth - 1) for one in value]
    if depth and isinstance(value, Mapping) and len(value) <= _MANY:
        with suppress(Exception):  # as of a configuration's missing values
            return [(repr(key), _look(one, depth - 1)) for key, one in value.items()]
    if depth and (is_dataclass(type(value)) or isinstance(value, SimpleNamespace)):
        return [(key, _look(one, depth - 1)) for key, one in getattr(value, "__dict__", {}).items()]
    return id(value)
