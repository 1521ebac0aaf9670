"""Watches what a training step reads besides records, parameters and buffers: attributes and variables."""

import os
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn

import dpexp
from dpexp.privacy.gradients.chunk import PLAIN_TYPES

# Parameters and buffers are inputs of a graph; most of what else a module holds for PyTorch's purposes changes no loss.
_NOT_NOTED = {*vars(nn.Module())} - {"training", "_modules", "_forward_hooks", "_forward_pre_hooks"} | {"log"}
_DEPTH, _MANY = 5, 100  # of containers: nested how deep, of how many entries
_LATER = 1_000_000
_IDLE = 3  # changes of a value that leave the step as it is, after which it is watched no more
_CHANGEABLE = object()
_LIBRARIES = {
    "torch", "pytorch_lightning", "lightning_fabric", "torchmetrics", "dpexp", "numpy", "transformers", "logging",
}  # fmt: skip
_LIBRARY_PATHS = tuple(
    f"{path}{os.sep}"
    for path in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(dpexp.__file__).parent)
)


class Reads:
    """The attributes and variables outside the modules that a step reads, and their values when it was last traced."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self.counters: list[tuple[Any, str]] = []  # numbers that the step changed when it was last noted
        self._moved: list[tuple[int, str]] = []
        self._idle: Counter[tuple[int, str]] = Counter()  # how often each has changed and the step has not

    @contextmanager
    def variables_recorded(self, found: Callable[[Any, str], None] = lambda owner, name: None) -> Iterator[None]:
        """Notes what the code of functions that run meanwhile, and are not a library's, names: global variables,
        attributes of classes and Python modules, and variables of the functions around them.

        Args:
            found: is told of each (where it is, name) before the function runs.
        """
        called, inner = dict[int, CodeType](), set[int]()  # by identity, since not all can be hashed

        def noting(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event != "call" or id(code) in called:
                return
            called[id(code)] = code
            if not _is_library_file(code.co_filename):
                variables = [*_global_variables(frame)]
                for name in code.co_freevars if id(code) not in inner else ():
                    if not isinstance(value := frame.f_locals.get(name), (Tensor, nn.Module, *PLAIN_TYPES, *_FIXED)):
                        variables.append((_ClosureVariable(value), name))
                for owner, name in variables:
                    found(owner, name)
                    self._note(owner, name)
                inner.update(id(one) for one in code.co_consts if isinstance(one, CodeType))

        tracer = sys.gettrace()
        sys.settrace(noting)
        try:
            yield
        finally:
            sys.settrace(tracer)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Notes which attributes are read meanwhile, or looked for, and afterwards what all that was noted is."""
        read: dict[tuple[int, str], nn.Module] = {}
        numbers = {(id(owner), name): (owner, value_of(owner, name)) for owner, name in self.variables()}

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
                numbers.setdefault((id(module), name), (module, value))
            return value

        with patch.object(nn.Module, "__getattribute__", noting, create=True):
            yield
        for (_, name), owner in read.items():
            self._note(owner, name)
        self.record_values()
        self.counters = [
            (owner, name)
            for (_, name), (owner, was) in numbers.items()
            if type(was) in (int, float) and type(now := value_of(owner, name)) in (int, float) and now != was
        ]

    def record_values(self) -> None:
        """Notes the present values of all that is watched."""
        for (_, name), (owner, *_) in [*self._seen.items()]:
            self._note(owner, name)

    def _note(self, owner: Any, name: str) -> None:
        value = value_of(owner, name)
        look = _signature(value)
        is_fixed = _is_constant(value) or isinstance(look, _Identity)
        key = id(value if isinstance(owner, _ClosureVariable) else owner), name
        self._seen[key] = owner, value if is_fixed else _CHANGEABLE, look

    def variables(self) -> list[tuple[Any, str]]:
        """(where it is, name) of those outside the modules."""
        return [(owner, name) for (_, name), (owner, *_) in self._seen.items() if not isinstance(owner, nn.Module)]

    def signatures(self) -> dict[tuple[str, int], Any]:
        """Of each value that is watched, by (name, key): equal while the value is the same."""
        return {
            (name, key): None if (value := value_of(owner, name)) is constant else _signature(value)
            for (key, name), (owner, constant, _) in self._seen.items()
        }

    def changed(self) -> str | None:
        """The name of an attribute or variable that is not what it was; None: there is none."""
        self._moved = []
        for key, (owner, constant, before) in self._seen.items():
            value = value_of(owner, key[1])
            if self._idle[key] < _IDLE and value is not constant and _signature(value) != before:
                self._moved.append(key)
        return self._moved[0][1] if self._moved else None

    def note_step_unaffected(self) -> None:
        """What `changed` found has not changed the step; at the third time it is watched no more."""
        self._idle.update(self._moved)


@contextmanager
def counters_advanced(variables: list[tuple[Any, str]]) -> Iterator[None]:
    """Raises numbers, such as counters, by a million meanwhile."""
    numbers = [(owner, name, value_of(owner, name)) for owner, name in variables]
    for owner, name, value in numbers:
        set_value(owner, name, value + _LATER)
    try:
        yield
    finally:
        for owner, name, value in numbers:
            set_value(owner, name, value)


_FIXED = (type, ModuleType, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property)


@dataclass
class _ClosureVariable:
    """The value of a closure's variable, which may be changed in place."""

    value: Any


def _global_variables(frame: FrameType) -> Iterator[tuple[Any, str]]:
    """(where it is, name) of those that a function's code names."""
    names, variables = frame.f_code.co_names, frame.f_globals
    for name in names:
        value = variables.get(name, type)
        if isinstance(value, type | ModuleType):
            if not _is_library_file(str(getattr(sys.modules.get(_module_name(value)), "__file__", ""))):
                yield from ((value, of) for of in names if not isinstance(vars(value).get(of, type), _FIXED))
        elif not isinstance(value, _FIXED):
            yield variables, name


def _module_name(value: Any) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


@cache
def _is_library_file(file: str) -> bool:
    return not file or file.startswith(("<frozen", "<eval_with_key", "<string>", *_LIBRARY_PATHS))


def value_of(owner: Any, name: str) -> Any:
    """An attribute or variable; of a parameter or buffer whether there is one, since it is read by its name."""
    if isinstance(owner, _ClosureVariable):
        return owner.value
    if not isinstance(owner, nn.Module):
        return (owner if isinstance(owner, dict) else vars(owner)).get(name)
    module, own = owner, vars(owner)
    if name in own:
        return own[name]
    for held in (own["_parameters"], own["_buffers"]):
        if name in held:
            return ("held", held[name] is None)
    value = getattr(type(module), name, None)
    return value if _is_plain(value) else None


def set_value(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute or variable, unless it is the value already."""
    if value_of(owner, name) is value:
        return
    if isinstance(owner, dict):
        owner[name] = value
    elif not isinstance(owner, _ClosureVariable):
        setattr(owner, name, value)


@dataclass(frozen=True, eq=False)
class _Identity:
    """The very same object, which is held so that no other takes its place in memory."""

    value: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def _is_itself(value: Any) -> bool:
    """Equal to nothing else, and looked at no further."""
    return isinstance(value, nn.Module | FunctionType) and type(value).__eq__ is object.__eq__


def _is_constant(value: Any) -> bool:
    """Of a type that cannot be changed in place."""
    return isinstance(value, PLAIN_TYPES) or (type(value) is tuple and all(map(_is_constant, value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN_TYPES, list, tuple, dict))


def _signature(value: Any, depth: int = _DEPTH) -> Any:
    """Equal for what is the same: plain numbers and texts by value, also in containers and plain objects; else the very
    same object."""
    if isinstance(value, dict) and all(map(_is_itself, value.values())):  # layers and hooks
        return tuple(value.items())
    if isinstance(value, PLAIN_TYPES) or _library(value) == "omegaconf":  # of which not every value can be asked for
        return repr(value)
    if isinstance(value, np.ndarray) and value.size <= _MANY:
        return value.dtype, value.shape, value.tobytes()
    entries = _entries(value) if depth else None
    return _Identity(value) if entries is None else [(name, _signature(one, depth - 1)) for name, one in entries]


def _entries(value: Any) -> list[tuple[str, Any]] | None:
    """(name, entry) of a container or a plain object; None: it is none, or a large one."""
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) > _MANY:
            return None
        return [(repr(key), one) for key, one in value.items()] if isinstance(value, dict) else [("", x) for x in value]
    if is_user_object(value):
        own = fields(value) if is_dataclass(type(value)) else ()
        found = getattr(value, "__dict__", {}) | {field.name: getattr(value, field.name, None) for field in own}
        return [*found.items()] if len(found) <= _MANY else None
    return None


def is_user_object(value: Any) -> bool:
    """An object of a class of the user's own, such as a configuration."""
    if isinstance(value, nn.Module | type) or is_library_class(type(value)):
        return False
    return hasattr(value, "__dict__") or is_dataclass(type(value))


def is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {"builtins", *_LIBRARIES}


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
