"""Records, each collated by itself, stacked with those that look alike.

Whatever goes wrong with a record is its own: it contributes nothing, and training goes on.
"""

import pickle
import struct
from collections import UserDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import default_collate

from dpexp._torch_compat import TreeSpec, register_pytree_node, tree_children, tree_flatten, tree_map, tree_unflatten
from dpexp.errors import ConfigError, is_own, words_of


@dataclass
class FailedRecord:
    """A record that cannot be fetched or collated.

    Attributes:
        reason: made anew, since not every error can be sent from one process to another.
    """

    reason: Exception

    @classmethod
    def because(cls, error: BaseException) -> "FailedRecord":
        """
        Raises:
            KeyboardInterrupt: it is one, which is of nobody.
        """
        if isinstance(error, KeyboardInterrupt):
            raise error
        said = words_of(error)
        own = type(error) is ConfigError and is_own(error)
        return cls(ConfigError(said) if own else RuntimeError(f"{type(error).__name__}: {said}"))

    def to(self, device: torch.device) -> "FailedRecord":
        return self

    def pin_memory(self) -> "FailedRecord":
        return self


@dataclass
class RecordBatch:
    """Records that look alike, to be processed together.

    Attributes:
        size: B.
        batch: what training_step is given of each, stacked: its tensors are [B, ...], and whatever else it holds is
            equal for all of them.
    """

    size: int
    batch: Any

    def to(self, device: torch.device) -> "RecordBatch":
        return RecordBatch(self.size, move_data_to_device(self.batch, device))

    def pin_memory(self) -> "RecordBatch":
        return RecordBatch(
            self.size, tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, self.batch)
        )


class _Tensor:
    """Stands for a tensor in a batch."""


@dataclass
class PackedBatch:
    """Records on their way from a loader process, packed so that they arrive, whatever they hold.

    Attributes:
        tensors: those of the batch that any process can be sent.
        rest: the batch without them, pickled.
    """

    size: int
    tensors: list[Tensor]
    rest: bytes

    @classmethod
    def of(cls, records: "RecordBatch | FailedRecord") -> "PackedBatch | FailedRecord":
        if isinstance(records, FailedRecord):
            return records
        try:
            leaves, structure = flattened(records.batch)
            rest = tree_unflatten([_Tensor() if _is_bare(leaf) else leaf for leaf in leaves], structure)
            return cls(records.size, [leaf for leaf in leaves if _is_bare(leaf)], pickle.dumps(rest))
        except BaseException as error:
            return FailedRecord.because(error)

    def opened(self) -> "RecordBatch | FailedRecord":
        try:
            leaves, structure = flattened(pickle.loads(self.rest))
            tensors = iter(self.tensors)
            leaves = [next(tensors) if type(leaf) is _Tensor else leaf for leaf in leaves]
            return RecordBatch(self.size, tree_unflatten(leaves, structure))
        except BaseException as error:
            return FailedRecord.because(error)

    def pin_memory(self) -> "PackedBatch":
        return PackedBatch(self.size, [tensor.pin_memory() for tensor in self.tensors], self.rest)


class SingleCollation:
    """Collates each item by itself with the user's `collate_fn`: [items] -> records, by what they look like."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> list[RecordBatch | FailedRecord | PackedBatch]:
        found = self._stacked(items)
        return [*map(PackedBatch.of, found)] if get_worker_info() is not None else [*found]

    def _stacked(self, items: list[Any]) -> list[RecordBatch | FailedRecord]:
        found: list[RecordBatch | FailedRecord] = [item for item in items if isinstance(item, FailedRecord)]
        items = [item for item in items if not isinstance(item, FailedRecord)]
        # What default_collate does with items of one kind is known: it stacks them.
        kinds: dict[Hashable, list[Any]] = {}
        for item in items:
            kinds.setdefault(self._kind(item), []).append(item)
        others = kinds.pop(None, [])
        for some in kinds.values():
            try:
                found.append(RecordBatch(len(some), tree_map(lambda leaf: leaf.unsqueeze(1), default_collate(some))))
            except Exception:  # of one of them
                others += some
        return found + self._each(others)

    def _kind(self, item: Any) -> Hashable:
        try:
            return _kind(item) if self._collate is default_collate else None
        except Exception:
            return None

    def _each(self, items: list[Any]) -> list[RecordBatch | FailedRecord]:
        failed: list[RecordBatch | FailedRecord] = []
        batches = []
        for item in items:
            try:
                leaves, structure = flattened(self._collate([item]))
                # Copies, since a collate_fn may use the same memory for each.
                leaves = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                batches.append((tuple(map(_look, leaves)), leaves, structure))
            except BaseException as error:
                failed.append(FailedRecord.because(error))
        return failed + _stacked(batches)


def _kind(item: Any) -> Hashable:
    """Equal for items that default_collate stacks without one of them changing another; None for others."""
    kind: Any = type(item)
    if isinstance(item, Tensor):
        return _look(item) if _is_bare(item) and not item.requires_grad else None
    if kind is np.ndarray:
        return kind, item.dtype, item.shape, item.strides
    if kind in (int, float, bool):
        return kind
    parts = item.items() if kind is dict else enumerate(item) if kind in (tuple, list) else None
    if parts is None:
        return None
    kinds = [(_look(key), _kind(part)) for key, part in parts]
    return None if any(part is None for _, part in kinds) else (kind, *kinds)


def _stacked(batches: Sequence[tuple[Hashable, list[Any], TreeSpec]]) -> list[RecordBatch | FailedRecord]:
    """Batches of one, stacked where all their tensors are of equal shapes and all else in them is equal."""
    alike: dict[Hashable, list[tuple[TreeSpec, list[list[Any]]]]] = {}
    for look, leaves, structure in batches:
        kinds = alike.setdefault(look, [])
        for known, some in kinds:
            if _equal(known, structure):
                some.append(leaves)
                break
        else:
            kinds.append((structure, [leaves]))
    found: list[RecordBatch | FailedRecord] = []
    for kinds in alike.values():
        for structure, some in kinds:
            try:
                batch = tree_unflatten([_together(part) for part in zip(*some, strict=True)], structure)
                found.append(RecordBatch(len(some), batch))
            except BaseException as error:
                found += [FailedRecord.because(error)] * len(some)
    return found


def _equal(known: TreeSpec, structure: TreeSpec) -> bool:
    return (
        known.type is structure.type
        and _is_same(known.context, structure.context)
        and len(tree_children(known)) == len(tree_children(structure))
        and all(map(_equal, tree_children(known), tree_children(structure)))
    )


def _is_same(some: Any, other: Any) -> bool:
    """Keys that print alike, and say that they are equal, may be different ones all the same."""
    if type(some) is type(other) and type(some) in (list, tuple):
        return len(some) == len(other) and all(map(_is_same, some, other))
    return some is other or _look(some) == _look(other)


def _copy(tensor: Tensor) -> Tensor:
    """Without what it was computed from, which cannot be sent to another process."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _together(part: tuple[Any, ...]) -> Any:
    if not isinstance(part[0], Tensor):
        return part[0]
    with torch.no_grad():
        return torch.stack(part).requires_grad_(part[0].requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_bare(leaf: Any) -> bool:
    """Whether it is a tensor that carries nothing besides numbers."""
    return type(leaf) in (Tensor, nn.Parameter) and not leaf.__dict__ and _is_plain(leaf)


def _look(leaf: Any) -> Hashable:
    """Equal for leaves, or keys, that are the same but for a tensor's numbers."""
    if isinstance(leaf, Tensor):
        if not _is_plain(leaf):
            raise ConfigError(
                "data: a training batch holds a sparse, nested or quantized tensor, which cannot be stacked; make it "
                "dense, of whatever size: records of different shapes are processed apart."
            )
        if not _is_bare(leaf):
            return id(leaf)
        return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad  # all of which shows
    if type(leaf) is float:
        return float, struct.pack("d", leaf)  # 0.0 and -0.0 are equal, yet not the same, and NaN is one of many
    if type(leaf) in (str, int, bool, bytes, type(None)):
        return type(leaf), leaf
    return id(leaf)  # like no other, whatever it says of itself


def flattened(batch: Any) -> tuple[list[Any], TreeSpec]:
    """Its leaves and structure. Dictionaries that torch does not know for such, as transformers' BatchEncoding, are."""
    leaves, structure = tree_flatten(batch)
    unknown = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    if not unknown:
        return leaves, structure
    for kind in unknown:
        register_pytree_node(kind, lambda named: ([*named.values()], [*named]), partial(_named, kind))
    return flattened(batch)


def _named(kind: type, values: Any, names: Any) -> Any:
    return kind(dict(zip(names, values, strict=True)))
