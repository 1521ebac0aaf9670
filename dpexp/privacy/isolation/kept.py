"""What a step may change, with what it held before: a class for each kind of thing."""

import random
import types
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from functools import _lru_cache_wrapper, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NOTHING = object()


class Kept(ABC):
    """A thing, what it held, and the way to it.

    Args:
        key: by which its parent holds it.
        attributes: what it holds is held by names of the programmer's, not by keys that may come from a record.
    """

    __slots__ = ("attributes", "before", "key", "parent", "thing")

    def __init__(self, thing: Any, parent: "Kept | None", key: Any, attributes: bool = False) -> None:
        self.thing, self.parent, self.key, self.attributes = thing, parent, key, attributes
        self.before = self.contents()

    @abstractmethod
    def contents(self) -> Any:
        """What set_back needs."""

    @abstractmethod
    def differs(self) -> bool:
        """Whether it holds anything else than before."""

    @abstractmethod
    def set_back(self) -> list[str]:
        """Makes it hold what it held before; returns the names of what had changed.

        Raises:
            Exception: it cannot be set back.
        """

    @property
    def name(self) -> str:
        if self.parent is None:
            return "" if self.key is None else str(self.key)
        return self.parent.name_of(self.key)

    def name_of(self, key: Any) -> str:
        own = self.name
        named = self.attributes and key not in ("_modules", "_buffers", "_parameters")
        return ".".join(part for part in (own, str(key) if named else "") if part)


class KeptDict(Kept):
    __slots__ = ()

    @classmethod
    def empty(cls, thing: dict, parent: Kept | None, key: Any, attributes: bool) -> "KeptDict":
        """For one that was empty before."""
        kept = cls({}, parent, key, attributes)
        kept.thing = thing
        return kept

    @property
    def _kind(self) -> Any:
        """Whatever a subclass makes of its methods."""
        return OrderedDict if isinstance(self.thing, OrderedDict) else dict

    def contents(self) -> Any:
        return dict(self._kind.items(self.thing)) if dict.__len__(self.thing) else None

    def differs(self) -> bool:
        thing, before = self.thing, self.before or {}
        if dict.__len__(thing) != len(before):
            return True
        kind = self._kind
        same = all(map(is_, kind.keys(thing), before)) and all(map(is_, kind.values(thing), before.values()))
        return not same

    def set_back(self) -> list[str]:
        thing, before, kind = self.thing, self.before or {}, self._kind
        now = dict(kind.items(thing))
        changed = [k for k in {**before, **now} if now.get(k, _NOTHING) is not before.get(k, _NOTHING)]
        kind.clear(thing)
        for key, value in before.items():
            kind.__setitem__(thing, key, value)
        return [*dict.fromkeys(self.name_of(key) for key in changed)] or [self.name]


class KeptList(Kept):
    """A list or a deque."""

    __slots__ = ()

    @property
    def _kind(self) -> Any:
        return deque if isinstance(self.thing, deque) else list

    def contents(self) -> Any:
        return list(self._kind.__iter__(self.thing))

    def differs(self) -> bool:
        kind, before = self._kind, self.before
        return kind.__len__(self.thing) != len(before) or not all(map(is_, kind.__iter__(self.thing), before))

    def set_back(self) -> list[str]:
        kind = self._kind
        kind.clear(self.thing)
        kind.extend(self.thing, self.before)
        return [self.name]


class KeptSet(Kept):
    __slots__ = ()

    def contents(self) -> Any:
        return list(set.__iter__(self.thing))

    def differs(self) -> bool:
        return {id(value) for value in set.__iter__(self.thing)} != {id(value) for value in self.before}

    def set_back(self) -> list[str]:
        set.clear(self.thing)
        set.update(self.thing, self.before)
        return [self.name]


class KeptBytes(Kept):
    """A bytearray, or an array of the standard library's."""

    __slots__ = ()

    def contents(self) -> Any:
        return self.thing[:]

    def differs(self) -> bool:
        return bytes(self.thing) != bytes(self.before)

    def set_back(self) -> list[str]:
        self.thing[:] = self.before
        return [self.name]


class KeptNumbers(Kept):
    """An array of NumPy's."""

    __slots__ = ("_form_before",)

    def contents(self) -> Any:
        self._form_before = self._form()
        return self._numbers().copy()

    def _numbers(self) -> np.ndarray:
        """Whatever a subclass makes of its methods."""
        return np.ndarray.view(self.thing, np.ndarray)

    def _form(self) -> tuple:
        return self.thing.shape, self.thing.strides, self.thing.dtype, self.thing.flags.writeable

    def differs(self) -> bool:
        return self._form() != self._form_before or self._numbers().tobytes() != self.before.tobytes()

    def set_back(self) -> list[str]:
        if self._form() != self._form_before:
            self.thing.flags.writeable = True
            self.thing.dtype = self._form_before[2]
        if self.thing.shape != self.before.shape:
            self.thing.resize(self.before.shape, refcheck=False)
        self._numbers()[...] = self.before
        self.thing.flags.writeable = self._form_before[-1]
        return [self.name]


class KeptTensor(Kept):
    """A tensor that is no parameter. On a GPU only its version is asked for: a look at its numbers would wait."""

    __slots__ = ("form", "version")

    def contents(self) -> Any:
        tensor = self.thing
        self.version = tensor._version
        self.form = _form(tensor)
        return tensor.detach().clone() if self.form is not None else None

    def differs(self) -> bool:
        tensor, before = self.thing, self.before
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return bool(tensor._version != self.version)
        if _form(tensor) != self.form or tensor._version != self.version or _has_gradient(tensor):
            return True
        return not (before is None or tensor.is_cuda or identical(tensor, before))

    def set_back(self) -> list[str]:
        tensor, before = self.thing, self.before
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return [self.name]
        if _has_gradient(tensor):
            tensor.grad = None
            if not self.differs():
                return []
        with torch.no_grad():
            if before is None or self.form is None:
                tensor.zero_()
                raise RuntimeError
            if _form(tensor) == self.form:
                tensor.copy_(before)
            else:
                tensor.requires_grad_(self.form[-1])
                tensor.data = before.clone()
        return [self.name]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def _form(tensor: Tensor) -> tuple | None:
    """What a tensor is besides its numbers; None where it is of a kind that cannot be set back."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if wrapped or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        return None
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.data_ptr(), tensor.requires_grad


def identical(a: Tensor, b: Tensor) -> bool:
    """To the last bit: 0.0 is not -0.0, and NaN is NaN. The wider the integers compared, the faster (measured)."""
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().flatten() for t in (a, b))
    sizes = [size for t in (a, b) for size in (t.nbytes, t.storage_offset() * t.element_size())]
    whole = next(kind for kind in _INTEGERS if not any(size % kind.itemsize for size in sizes))
    return torch.equal(a.view(whole), b.view(whole))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


_IMMUTABLE = 1 << 8  # a flag of types


class KeptAttributes(Kept):
    """Attributes of what has no dictionary that could be written to: slots, classes, cells of closures."""

    __slots__ = ("names",)

    def __init__(self, thing: Any, parent: Kept | None, key: Any, names: tuple[str, ...] | None = None) -> None:
        self.names = names
        super().__init__(thing, parent, key, attributes=True)

    def contents(self) -> Any:
        if isinstance(self.thing, type):
            names = () if self.thing.__flags__ & _IMMUTABLE else ("__bases__", "__name__", "__qualname__")
            return {**vars(self.thing), **{name: getattr(self.thing, name) for name in names}}
        found = ((name, slot(self.thing, name)) for name in self.names or ())
        return {name: value for name, value in found if value is not _NOTHING}

    def differs(self) -> bool:
        now, before = self.contents(), self.before
        return now.keys() != before.keys() or not all(map(is_, now.values(), before.values()))

    def set_back(self) -> list[str]:
        now, before = self.contents(), self.before
        changed = [k for k in {**before, **now} if now.get(k, _NOTHING) is not before.get(k, _NOTHING)]
        kind: Any = type if isinstance(self.thing, type) else object
        for name in changed:
            if name in before:
                kind.__setattr__(self.thing, name, before[name])
            else:
                kind.__delattr__(self.thing, name)
        return [self.name_of(name) for name in changed]


def slot(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name)
    except Exception:  # it is empty, and the thing's own __getattr__ may say so in its own way
        return _NOTHING


class KeptCache(Kept):
    """A functools.lru_cache: empty for each record, since what fills it need not be told from what it held."""

    __slots__ = ()

    def contents(self) -> Any:
        self.thing.cache_clear()

    def differs(self) -> bool:
        hits, misses, _, size = self.thing.cache_info()
        return bool(hits or misses or size)

    def set_back(self) -> list[str]:
        self.thing.cache_clear()
        return [self.name]


class KeptGenerator(Kept):
    """A random number generator of the module's own."""

    __slots__ = ()

    def contents(self) -> Any:
        thing = self.thing
        if isinstance(thing, torch.Generator):
            return thing.get_state()
        return thing.getstate() if isinstance(thing, random.Random) else _bits(thing).state

    def differs(self) -> bool:
        now = self.contents()
        if isinstance(now, Tensor):
            return not torch.equal(now, self.before)
        return now != self.before if isinstance(now, tuple) else repr(now) != repr(self.before)

    def set_back(self) -> list[str]:
        thing, before = self.thing, self.before
        if isinstance(thing, torch.Generator):
            thing.set_state(before)
        elif isinstance(thing, random.Random):
            thing.setstate(before)
        else:
            _bits(thing).state = before
        return [self.name]


def _bits(generator: Any) -> Any:
    """What NumPy's generators draw from."""
    generator = getattr(generator, "_bit_generator", generator)  # of the older kind
    return getattr(generator, "bit_generator", generator)


class KeptPartial(Kept):
    """A functools.partial."""

    __slots__ = ()

    def contents(self) -> Any:
        return self.thing.__reduce__()[2]

    def differs(self) -> bool:
        return not all(map(is_, self.contents()[:3], self.before[:3]))

    def set_back(self) -> list[str]:
        self.thing.__setstate__(self.before)
        return [self.name]


_KINDS: tuple[tuple[type | tuple[type, ...], type[Kept] | None], ...] = (
    (random.SystemRandom, None),
    (dict, KeptDict),
    ((list, deque), KeptList),
    (set, KeptSet),
    ((bytearray, array), KeptBytes),
    (np.ndarray, KeptNumbers),
    (Tensor, KeptTensor),
    (_lru_cache_wrapper, KeptCache),
    (
        (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
        KeptGenerator,
    ),
    (types.CellType, KeptAttributes),
    (partial, KeptPartial),
)


class _Kinds(dict[type, type[Kept] | None]):
    """How a thing of a type is kept; None for what holds nothing itself."""

    def __missing__(self, kind: type) -> type[Kept] | None:
        self[kind] = next((kept for types_, kept in _KINDS if issubclass(kind, types_)), None)
        return self[kind]


kind_of = _Kinds()
