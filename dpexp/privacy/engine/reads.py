"""What a training step reads of the modules besides parameters and buffers, such as `self.hparams["beta"]`."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import nn

from dpexp.privacy.engine.chunk import PLAIN

# Parameters and buffers are inputs of a graph; most of what else a module holds for PyTorch's purposes changes no loss.
_NOT_NOTED = {*vars(nn.Module())} - {"training", "_modules", "_forward_hooks", "_forward_pre_hooks"} | {"log"}
_DEPTH, _MANY = 5, 100
_CHANGEABLE = object()
_LIBRARIES = {"torch", "pytorch_lightning", "lightning_fabric", "torchmetrics", "dpexp", "numpy", "transformers"}


class Reads:
    """The attributes that a step has read, and what they were."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[nn.Module, Any, Any]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what is read meanwhile, or is looked for, and afterwards what it is."""
        read: dict[tuple[int, str], nn.Module] = {}

        def noting(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                read[id(module), name] = module
                raise
            if (
                name[:2] != "__"
                and name not in _NOT_NOTED
                and (name in object.__getattribute__(module, "__dict__") or _is_plain(value))
            ):
                read[id(module), name] = module
            return value

        with patch.object(nn.Module, "__getattribute__", noting, create=True):
            yield
        before = {key: module for key, (module, *_) in self._seen.items()}
        for key, module in (before | read).items():
            value = _value(module, key[1])
            look = _look(value)
            is_fixed = _is_constant(value) or isinstance(look, _Same)
            self._seen[key] = module, value if is_fixed else _CHANGEABLE, look

    def changed(self) -> str | None:
        """The name of an attribute that is not what it was; None: there is none."""
        for (_, name), (module, constant, before) in self._seen.items():
            value = _value(module, name)
            if value is not constant and _look(value) != before:
                return name
        return None


def _value(module: nn.Module, name: str) -> Any:
    """An attribute; of a parameter or buffer whether there is one, since it is read by its name."""
    own = vars(module)
    if name in own:
        return own[name]
    for held in (own["_parameters"], own["_buffers"]):
        if name in held:
            return ("held", held[name] is None)
    value = getattr(type(module), name, None)
    return value if _is_plain(value) else None


@dataclass(frozen=True, eq=False)
class _Same:
    """The very same object, which is held so that no other takes its place in memory."""

    value: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _is_constant(value: Any) -> bool:
    """Of a type that cannot be changed in place."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_is_constant, value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, list, tuple, dict))


def _look(value: Any, depth: int = _DEPTH) -> Any:
    """Equal for what is the same: plain numbers and texts by value, also in containers and plain objects; else the very
    same object."""
    if isinstance(value, PLAIN) or _library(value) == "omegaconf":  # of which not every value can be asked for
        return repr(value)
    if isinstance(value, np.ndarray) and value.size <= _MANY:
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    is_container = isinstance(value, dict | list | tuple | set | frozenset | deque)
    if not is_container and _is_of_the_users(value):
        own = [getattr(value, f.name, None) for f in (fields(value) if is_dataclass(type(value)) else ())]
        value, is_container = [getattr(value, "__dict__", {}), own], True
    if not (depth and is_container and len(value) <= _MANY):
        return _Same(value)
    if isinstance(value, dict):
        return [(repr(key), _look(one, depth - 1)) for key, one in value.items()]
    return [_look(one, depth - 1) for one in value]


def _is_of_the_users(value: Any) -> bool:
    """An object of a class of the user's own, such as a configuration."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or kind.__module__ == "builtins":
        return False
    return _library(value) not in _LIBRARIES and (hasattr(value, "__dict__") or is_dataclass(kind))


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
