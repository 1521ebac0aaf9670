"""Records the attributes and variables that a training step reads, and detects when they change."""

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

# Parameters and buffers are inputs of a graph; most other attributes that PyTorch gives a module change no loss.
_IGNORED = {*vars(nn.Module())} - {"training", "_modules", "_forward_hooks", "_forward_pre_hooks"} | {"log"}
_MAX_DEPTH, _MAX_ENTRIES = 5, 100  # of containers whose entries are compared
_ADVANCE = 1_000_000  # of counters
_MAX_UNRELATED = 3  # changes of a value without a change of the step, after which it is no longer compared
_MUTABLE = object()
_LIBRARIES = {
    "torch", "pytorch_lightning", "lightning_fabric", "lightning", "torchmetrics", "dpexp", "numpy", "transformers",
    "logging",
}  # fmt: skip
_LIBRARY_PATHS = tuple(
    f"{path}{os.sep}"
    for path in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(dpexp.__file__).parent)
)


class Reads:
    """Attributes of modules and variables outside them that a step reads, with their values at the last trace.

    A variable is given as (owner, name): the owner is a module, class, Python module, dict of globals, or
    `_ClosureVariable`.

    Attributes:
        counters: variables whose numbers the step changed during the last recording.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # owner, value if it is immutable, signature
        self.counters: list[tuple[Any, str]] = []
        self._changed: list[tuple[int, str]] = []
        self._unrelated: Counter[tuple[int, str]] = Counter()  # changes without a change of the step

    @contextmanager
    def variables_recorded(self, found: Callable[[Any, str], None] = lambda owner, name: None) -> Iterator[None]:
        """Records the variables that functions outside libraries name: globals, attributes of classes and Python
        modules, and variables of enclosing functions. Calls `found` with each (owner, name) before the function
        runs."""
        called, inner = dict[int, CodeType](), set[int]()  # by identity, since not all can be hashed

        def on_call(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event != "call" or id(code) in called:
                return
            called[id(code)] = code
            if not _is_library_file(code.co_filename):
                variables = [*_global_variables(frame)]
                for name in code.co_freevars if id(code) not in inner else ():
                    if not isinstance(
                        value := frame.f_locals.get(name), (Tensor, nn.Module, *PLAIN_TYPES, *_DEFINITIONS)
                    ):
                        variables.append((_ClosureVariable(value), name))
                for owner, name in variables:
                    found(owner, name)
                    self._record(owner, name)
                inner.update(id(one) for one in code.co_consts if isinstance(one, CodeType))

        tracer = sys.gettrace()
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(tracer)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records which attributes of modules are read, or tried, and at the end the values of all variables."""
        read: dict[tuple[int, str], nn.Module] = {}
        numbers = {(id(owner), name): (owner, value_of(owner, name)) for owner, name in self.variables()}

        def getattribute(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                read[id(module), name] = module
                raise
            if (
                name[:2] != "__"
                and name not in _IGNORED
                and (name in object.__getattribute__(module, "__dict__") or _is_plain(value))
            ):
                read[id(module), name] = module
                numbers.setdefault((id(module), name), (module, value))
            return value

        with patch.object(nn.Module, "__getattribute__", getattribute, create=True):
            yield
        for (_, name), owner in read.items():
            self._record(owner, name)
        self.record_values()
        self.counters = [
            (owner, name)
            for (_, name), (owner, was) in numbers.items()
            if type(was) in (int, float) and type(now := value_of(owner, name)) in (int, float) and now != was
        ]

    def record_values(self) -> None:
        """Records the present values of all variables."""
        for (_, name), (owner, *_) in [*self._values.items()]:
            self._record(owner, name)

    def _record(self, owner: Any, name: str) -> None:
        value = value_of(owner, name)
        signature = _signature(value)
        is_immutable = _is_immutable(value) or isinstance(signature, _Identity)
        key = id(value if isinstance(owner, _ClosureVariable) else owner), name
        self._values[key] = owner, value if is_immutable else _MUTABLE, signature

    def variables(self) -> list[tuple[Any, str]]:
        """The variables outside modules."""
        return [(owner, name) for (_, name), (owner, *_) in self._values.items() if not isinstance(owner, nn.Module)]

    def signatures(self) -> dict[tuple[str, int], Any]:
        """A signature of each value by (name, key), equal while the value is the same."""
        return {
            (name, key): None if (value := value_of(owner, name)) is constant else _signature(value)
            for (key, name), (owner, constant, _) in self._values.items()
        }

    def changed(self) -> str | None:
        """The name of a variable whose value has changed; None: there is none."""
        self._changed = []
        for key, (owner, constant, before) in self._values.items():
            value = value_of(owner, key[1])
            if self._unrelated[key] < _MAX_UNRELATED and value is not constant and _signature(value) != before:
                self._changed.append(key)
        return self._changed[0][1] if self._changed else None

    def note_step_unaffected(self) -> None:
        """Notes that the changes that `changed` found did not change the step; after the third they are ignored."""
        self._unrelated.update(self._changed)


@contextmanager
def counters_advanced(variables: list[tuple[Any, str]]) -> Iterator[None]:
    """Adds a million to numeric variables in the block."""
    numbers = [(owner, name, value_of(owner, name)) for owner, name in variables]
    for owner, name, value in numbers:
        set_value(owner, name, value + _ADVANCE)
    try:
        yield
    finally:
        for owner, name, value in numbers:
            set_value(owner, name, value)


_DEFINITIONS = (type, ModuleType, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property)


@dataclass
class _ClosureVariable:
    """The owner of a closure's variable, whose value may change in place."""

    value: Any


def _global_variables(frame: FrameType) -> Iterator[tuple[Any, str]]:
    """The globals, and attributes of global classes and modules, that a function's code names."""
    names, variables = frame.f_code.co_names, frame.f_globals
    for name in names:
        value = variables.get(name, type)
        if isinstance(value, type | ModuleType):
            if not _is_library_file(str(getattr(sys.modules.get(_module_name(value)), "__file__", ""))):
                yield from ((value, of) for of in names if not isinstance(vars(value).get(of, type), _DEFINITIONS))
        elif not isinstance(value, _DEFINITIONS):
            yield variables, name


def _module_name(value: Any) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


@cache
def _is_library_file(file: str) -> bool:
    return not file or file.startswith(("<frozen", "<eval_with_key", "<string>", *_LIBRARY_PATHS))


def value_of(owner: Any, name: str) -> Any:
    """The value of a variable; of a parameter or buffer only whether it is None."""
    if isinstance(owner, _ClosureVariable):
        return owner.value
    if not isinstance(owner, nn.Module):
        return (owner if isinstance(owner, dict) else vars(owner)).get(name)
    module, own = owner, vars(owner)
    if name in own:
        return own[name]
    for tensors in (own["_parameters"], own["_buffers"]):
        if name in tensors:
            return ("held", tensors[name] is None)
    value = getattr(type(module), name, None)
    return value if _is_plain(value) else None


def set_value(owner: Any, name: str, value: Any) -> None:
    """Sets a variable, unless it has this value already."""
    if value_of(owner, name) is value:
        return
    if isinstance(owner, dict):
        owner[name] = value
    elif not isinstance(owner, _ClosureVariable):
        setattr(owner, name, value)


@dataclass(frozen=True, eq=False)
class _Identity:
    """Compares by identity; keeps the object alive, so that no other gets its id."""

    value: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def _is_compared_by_identity(value: Any) -> bool:
    return isinstance(value, nn.Module | FunctionType) and type(value).__eq__ is object.__eq__


def _is_immutable(value: Any) -> bool:
    """Whether its type cannot be changed in place."""
    return isinstance(value, PLAIN_TYPES) or (type(value) is tuple and all(map(_is_immutable, value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN_TYPES, list, tuple, dict))


def _signature(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Compares numbers and strings by value, also in containers and plain objects, and other objects by identity."""
    if isinstance(value, dict) and all(map(_is_compared_by_identity, value.values())):  # layers and hooks
        return tuple(value.items())
    if isinstance(value, PLAIN_TYPES) or _library(value) == "omegaconf":  # where reading a value may fail
        return repr(value)
    if isinstance(value, np.ndarray) and value.size <= _MAX_ENTRIES:
        return value.dtype, value.shape, value.tobytes()
    entries = _entries(value) if depth else None
    return _Identity(value) if entries is None else [(name, _signature(one, depth - 1)) for name, one in entries]


def _entries(value: Any) -> list[tuple[str, Any]] | None:
    """(name, entry) of a container or plain object; None: it is neither, or too large."""
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) > _MAX_ENTRIES:
            return None
        return [(repr(key), one) for key, one in value.items()] if isinstance(value, dict) else [("", x) for x in value]
    if is_user_object(value):
        own = fields(value) if is_dataclass(type(value)) else ()
        found = getattr(value, "__dict__", {}) | {field.name: getattr(value, field.name, None) for field in own}
        return [*found.items()] if len(found) <= _MAX_ENTRIES else None
    return None


def is_user_object(value: Any) -> bool:
    """Whether it is an object of a user's class, such as a configuration."""
    if isinstance(value, nn.Module | type) or is_library_class(type(value)):
        return False
    return hasattr(value, "__dict__") or is_dataclass(type(value))


def is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {"builtins", *_LIBRARIES}


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
