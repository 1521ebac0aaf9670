"""What a module returns for one record, so that what it returns for several can be made one."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALIKE = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Place:
    """Stands for a tensor, or for an object of a class, in the rest."""

    def __init__(self, kind: type, inside: Any = None) -> None:
        self.kind, self.inside = kind, inside

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Place) and self.kind is other.kind and self.inside == other.inside


def taken_apart(value: Any, known: set[int]) -> tuple[list[Tensor], Any]:
    """Its tensors, and the rest, which is equal for what can be made one: numbers, texts, and objects that hold such
    things and tensors in attributes, as caches of keys and values do.

    Args:
        known: ids of objects that are the same for all records.

    Raises:
        RuntimeError: it holds what cannot be compared.
    """
    leaves, structure = tree_flatten(value)
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if vars(leaf):
                raise RuntimeError("it returns a tensor that has attributes of its own.")
            tensors.append(leaf)
            rest.append(_Place(Tensor))
        elif type(leaf) in _ALIKE or isinstance(leaf, type):
            rest.append((type(leaf), repr(leaf), leaf))  # 0.0 and -0.0 are equal, yet not the same
        elif id(leaf) in known:
            rest.append((id(leaf), leaf))
        elif _is_plain(type(leaf)):
            more, inside = taken_apart(vars(leaf), known)
            tensors += more
            rest.append(_Place(type(leaf), inside))
        else:
            raise RuntimeError(f"it returns a {type(leaf).__name__}, which cannot be made one of those of all records.")
    return tensors, (structure, [*rest, (repr(structure), None)])  # by which keys of 1 and True differ


def shown(rest: Any) -> Hashable:
    """What makes one rest another."""
    _, places = rest
    return tuple((p.kind, p.inside and shown(p.inside)) if isinstance(p, _Place) else p[:-1] for p in places)


def put_together(rest: Any, tensors: Iterator[Tensor]) -> Any:
    structure, places = rest
    return tree_unflatten([_leaf(place, tensors) for place in places[:-1]], structure)


def _leaf(place: Any, tensors: Iterator[Tensor]) -> Any:
    if not isinstance(place, _Place):
        return place[-1]
    if place.kind is Tensor:
        return next(tensors)
    made: Any = object.__new__(place.kind)
    vars(made).update(put_together(place.inside, tensors))
    return made


def _is_plain(kind: type) -> bool:
    """Whether what an object is lies in its attributes."""
    return kind.__new__ is object.__new__ and not any(vars(base).get("__slots__") for base in kind.__mro__)
