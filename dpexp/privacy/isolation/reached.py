"""What is reached from a module: all that a step may hand from one record to another."""

import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpexp.privacy.isolation.kept import Kept, KeptAttributes, KeptDict, KeptTensor, kind_of, slot

_ATOMS = {str, int, float, complex, bool, bytes, type(None), torch.device, torch.dtype, torch.Size}
# Packages of whose objects nothing is remembered but modules, and those of them whose objects hold plain data.
_CLOSED = {
    *sys.stdlib_module_names, "torch", "pytorch_lightning", "lightning_fabric", "lightning", "numpy", "pandas", "dpexp",
    "mlflow", "rich",
}  # fmt: skip
_OPEN = (
    "types",
    "argparse",
    "collections",
    "queue",
    "functools",
    "weakref",
    "torch.distributions",
    "torch.quasirandom",
    "torch.optim",
    "torch.utils.data",
    "torch.amp",
    "dpexp.training",
)
_DICTS = {dict, OrderedDict}
_OF_FUNCTIONS = (
    "__defaults__", "__kwdefaults__", "__code__", "__doc__", "__name__", "__qualname__", "__module__",
)  # fmt: skip
_of_function = attrgetter(*_OF_FUNCTIONS)
_OF_MODULES = ("_modules", "_buffers", "_parameters")


class _Unnamed:
    """Stands for the name of what is held without one."""


_GLOBAL = {id(getattr(draw, "__self__", None)) for draw in (random.random, np.random.rand)}  # see `randomness`
_OWN, _ELEMENT = _Unnamed(), _Unnamed()  # a thing's dictionary of attributes; all else


class Reached:
    """All that is reached from a module through attributes, containers, functions and classes of the user's, as it is.

    Args:
        fixed: tensors that are not looked into.
        also: what else it is reached from.

    Attributes:
        known: ids of all of it.
        kept: what may be set back.
    """

    def __init__(self, module: nn.Module, fixed: Iterable[Tensor], also: Iterable[Any] = ()) -> None:
        self.kept: list[Kept] = []
        self._empty: list[tuple[dict, Kept | None, Any, bool]] = []  # as most dictionaries of modules are
        self._bare: list[OrderedDict] = []  # without attributes
        self._bodies: list[tuple[Any, type, dict | None]] = []  # None: they have none
        self._functions: list[tuple[Any, ...]] = []
        self._module, self._fixed = module, {id(tensor) for tensor in fixed}
        self.known = {*_GLOBAL, *self._fixed}
        parameters = list(module.named_parameters())
        self._bodies += [(parameter, parameter.__class__, vars(parameter)) for _, parameter in parameters]
        ahead = [(module, None, None), *((vars(parameter), None, name) for name, parameter in parameters)]
        self._walk([*ahead, *((thing, None, "the batch's") for thing in also)])

    def is_still(self, module: nn.Module, fixed: Iterable[Tensor]) -> bool:
        """Whether to look again would find just the same."""
        same = module is self._module and self._fixed == {id(tensor) for tensor in fixed}
        if not same or self._odd_bodies() or self._odd_functions() or any(thing.__dict__ for thing in self._bare):
            return False
        try:
            if any(thing for thing, *_ in self._empty) or any(kept.differs() for kept in self.kept):
                return False
        except Exception:
            return False
        for kept in self.kept:
            if isinstance(kept, KeptTensor) and kept.thing.is_cuda:
                kept.before = kept.contents()  # of which the version says nothing of what was done past it
        return True

    def set_back(self) -> list[str]:
        """Sets back what is not kept one by one; returns the names of what had changed."""
        changed = []
        for thing, kind, attributes in self._odd_bodies():
            if thing.__class__ is not kind:
                object.__setattr__(thing, "__class__", kind)
                changed.append(f"the class of a {kind.__name__}")
            if attributes is not None and thing.__dict__ is not attributes:
                object.__setattr__(thing, "__dict__", attributes)
                changed.append(f"the attributes of a {kind.__name__}")
        for function, *before in self._odd_functions():
            for name, value in zip(_OF_FUNCTIONS, before, strict=True):
                setattr(function, name, value)
            changed.append(f"the function {function.__name__}")
        for thing in self._bare:
            if thing.__dict__:
                thing.__dict__.clear()
                changed.append(f"the attributes of a {type(thing).__name__}")
        return changed

    def filled(self) -> list[Kept]:
        """Dictionaries that were empty."""
        return [KeptDict.empty(thing, *way) for thing, *way in self._empty if thing]

    def _odd_bodies(self) -> list[tuple[Any, type, dict | None]]:
        return [
            (thing, kind, attributes)
            for thing, kind, attributes in self._bodies
            if thing.__class__ is not kind or (attributes is not None and thing.__dict__ is not attributes)
        ]

    def _odd_functions(self) -> list[tuple[Any, ...]]:
        return [known for known in self._functions if not all(map(is_, _of_function(known[0]), known[1:]))]

    def _walk(self, ahead: list[tuple[Any, Kept | None, Any]]) -> None:
        known, ways = self.known, [(thing, parent, key, False) for thing, parent, key in ahead]
        while ways:
            thing, parent, key, own = ways.pop()
            if type(thing) in weakref.ProxyTypes:
                thing = _behind(thing)
            if type(thing) in _ATOMS or id(thing) in known:
                continue
            known.add(id(thing))
            if type(thing) is OrderedDict:
                if thing.__dict__:
                    ways.append((thing.__dict__, parent, key, True))
                else:
                    self._bare.append(thing)
            elif _has_body(thing):
                self._bodies.append((thing, thing.__class__, thing.__dict__ if _has_dict[type(thing)] else None))
                if isinstance(thing, types.FunctionType):
                    self._functions.append((thing, *_of_function(thing)))
            if type(thing) in _DICTS:  # nearly all that modules hold, and nearly always empty
                if not thing:
                    self._empty.append((thing, parent, key, own or key in _OF_MODULES))
                    continue
                self.kept.append(kept := KeptDict(thing, parent, key, own or key in _OF_MODULES))
                ways += [(v, kept, name, False) for name, v in thing.items() if type(v) not in _ATOMS]
                continue
            if is_lazy(thing) or (isinstance(thing, Tensor) and thing.is_inference()):
                ways.append((vars(thing), parent, key, True))  # nothing else of it can change
                continue
            if isinstance(thing, type):
                parent = KeptAttributes(thing, None, thing.__name__) if _is_open[thing] else None
            elif isinstance(thing, types.CellType):
                parent = KeptAttributes(thing, parent, key, ("cell_contents",))
            elif kind := kind_of[type(thing)]:
                if isinstance(thing, defaultdict):
                    self.kept.append(KeptAttributes(thing, parent, key, ("default_factory",)))
                if _slots[type(thing)] and _is_open[type(thing)]:
                    self.kept.append(KeptAttributes(thing, parent, key, _slots[type(thing)]))
                parent = kind(thing, parent, key, own or key in _OF_MODULES)
            elif _slots[type(thing)] and _is_open[type(thing)]:
                parent = KeptAttributes(thing, parent, key, _slots[type(thing)])
            else:
                ways += [
                    (value, parent, key if isinstance(k, _Unnamed) else k, k is _OWN) for k, value in _inside(thing)
                ]
                continue
            if parent is not None:
                self.kept.append(parent)
                ways += [
                    (value, parent, key if isinstance(k, _Unnamed) else k, k is _OWN) for k, value in _inside(thing)
                ]


def can_be_kept(thing: Any) -> bool:
    """Whether all that a thing holds is remembered, or it holds nothing."""
    kind = type(thing)
    return (
        kind in _ATOMS
        or kind_of[kind] is not None
        or _is_open[kind]
        or isinstance(thing, nn.Module | type | types.FunctionType | types.BuiltinFunctionType | slice | range | Enum)
        or kind.__module__.partition(".")[0] in ("torch", "numpy")
    )


def _behind(proxy: Any) -> Any:
    """What a weakref.proxy stands for; None where that is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def _has_body(thing: Any) -> bool:
    """Whether its class and its dictionary of attributes might be exchanged."""
    if isinstance(thing, type):
        return False
    return isinstance(thing, nn.Module | types.FunctionType) or _is_open[type(thing)]


def _inside(thing: Any) -> Iterable[tuple[Any, Any]]:
    """(name, value) of what a thing holds, as far as it is worth going."""
    kind = type(thing)
    if isinstance(thing, dict):
        return [*dict.items(thing), *_own(thing), *_in_slots(thing)]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        container: Any = next(base for base in (list, tuple, set, frozenset, deque) if isinstance(thing, base))
        values = container.__iter__(thing)  # whatever a subclass makes of it
        return [*((_ELEMENT, value) for value in values if type(value) not in _ATOMS), *_own(thing), *_in_slots(thing)]
    if isinstance(thing, Tensor):
        return _own(thing)
    if isinstance(thing, np.ndarray):
        return [*_own(thing), *((_ELEMENT, value) for value in (thing.flat if thing.dtype == object else ()))]
    if isinstance(thing, nn.Module):
        return [*_own(thing), (_ELEMENT, kind)] if _is_open[kind] else _own(thing)
    if isinstance(thing, type):
        return [*vars(thing).items(), *((_ELEMENT, other) for other in (*thing.__bases__, kind))]
    if isinstance(thing, weakref.ref):
        return [(_ELEMENT, thing())]
    if isinstance(thing, types.BuiltinFunctionType):
        return [(_ELEMENT, thing.__self__)]
    if isinstance(thing, types.MethodType):
        return [(_ELEMENT, thing.__self__), (_ELEMENT, thing.__func__)]
    if isinstance(thing, types.FunctionType):
        if not _is_open_package(thing.__module__):
            return ()
        parts = (thing.__defaults__, thing.__kwdefaults__, *(thing.__closure__ or ()), vars(thing))
        return [(_ELEMENT, part) for part in parts if part is not None]
    if isinstance(thing, property | staticmethod | classmethod):
        functions = (thing.fget, thing.fset) if isinstance(thing, property) else (thing.__func__,)
        return [(_ELEMENT, function) for function in functions]
    if isinstance(thing, types.CellType):
        held_there = slot(thing, "cell_contents")
        return [(_ELEMENT, held_there)]
    if not _is_open[kind]:
        return ()
    found = [*_own(thing), (_ELEMENT, kind)]
    if isinstance(thing, functools.partial):
        found += [(_ELEMENT, thing.func), (_ELEMENT, thing.args), (_ELEMENT, thing.keywords)]
    return found + _in_slots(thing)


def _in_slots(thing: Any) -> list[tuple[Any, Any]]:
    return [(name, slot(thing, name)) for name in _slots[type(thing)]] if _is_open[type(thing)] else []


def _own(thing: Any) -> list[tuple[Any, Any]]:
    return [(_OWN, thing.__dict__)] if _has_dict[type(thing)] else []


class _HasDict(dict[type, bool]):
    """Whether objects of a type have a dictionary of attributes, and show it: not one that a property makes up."""

    def __missing__(self, kind: type) -> bool:
        found = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
        self[kind] = isinstance(found, types.GetSetDescriptorType | types.MemberDescriptorType)
        return self[kind]


class _Openness(dict[type, bool]):
    """Whether objects of a type are looked into."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = _is_open_package(kind.__module__)
        return self[kind]


def _is_open_package(name: Any) -> bool:
    return isinstance(name, str) and (name.partition(".")[0] not in _CLOSED or name.startswith(_OPEN))


class _Slots(dict[type, tuple[str, ...]]):
    """The names of a type's slots."""

    def __missing__(self, kind: type) -> tuple[str, ...]:
        found = []
        for base in kind.__mro__:
            declared = vars(base).get("__slots__", ())
            for name in (declared,) if isinstance(declared, str) else declared:
                private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
        self[kind] = tuple(name for name in found if name not in ("__dict__", "__weakref__"))
        return self[kind]


_is_open, _slots, _has_dict = _Openness(), _Slots(), _HasDict()
