"""Records, each collated by itself, stacked with those that look alike."""

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_map, tree_unflatten
from torch.utils.data.dataloader import default_collate

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened


@dataclass
class Failed:
    """A record that cannot be fetched or collated.

    Attributes:
        reason: made anew, since not every error can be sent from one process to another.
    """

    reason: Exception

    @classmethod
    def because(cls, error: Exception) -> "Failed":
        return cls(error if type(error) is ConfigError else RuntimeError(f"{type(error).__name__}: {error}"))

    def to(self, device: torch.device) -> "Failed":
        return self

    def pin_memory(self) -> "Failed":
        return self


@dataclass
class Records:
    """Records that look alike, to be processed together.

    Attributes:
        size: B.
        batch: what training_step is given of each, stacked: its tensors are [B, ...], and whatever else it holds is
            equal for all of them.
    """

    size: int
    batch: Any

    def to(self, device: torch.device) -> "Records":
        return Records(self.size, move_data_to_device(self.batch, device))

    def pin_memory(self) -> "Records":
        return Records(
            self.size, tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, self.batch)
        )


class Alone:
    """Collates each item by itself with the user's `collate_fn`: [items] -> records, by what they look like."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> list[Records | Failed]:
        found: list[Records | Failed] = [item for item in items if isinstance(item, Failed)]
        items = [item for item in items if not isinstance(item, Failed)]
        # What default_collate does with items of one kind is known: it stacks them.
        kinds: dict[Hashable, list[Any]] = {}
        for item in items:
            kinds.setdefault(_kind(item) if self._collate is default_collate else None, []).append(item)
        others = kinds.pop(None, [])
        for some in kinds.values():
            try:
                found.append(Records(len(some), tree_map(lambda leaf: leaf.unsqueeze(1), default_collate(some))))
            except Exception:  # that of one of them
                others += some
        return found + self._each(others)

    def _each(self, items: list[Any]) -> list[Records | Failed]:
        failed: list[Records | Failed] = []
        batches = []
        for item in items:
            try:
                leaves, structure = flattened(self._collate([item]))
                # Copies, since a collate_fn may use the same memory for each.
                leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                batches.append((tuple(map(_look, leaves)), leaves, structure))
            except Exception as error:
                failed.append(Failed.because(error))
        return failed + _stacked(batches)


def _kind(item: Any) -> Hashable:
    """Equal for items that default_collate stacks without one of them changing another; None for others."""
    kind: Any = type(item)
    if isinstance(item, Tensor):
        return (kind, _look(item)) if _is_plain(item) else None
    if kind is np.ndarray:
        return kind, item.dtype, item.shape, item.strides
    if kind in (int, float, bool):
        return kind
    parts = item.items() if kind is dict else enumerate(item) if kind in (tuple, list) else None
    if parts is None:
        return None
    kinds = [(type(key), repr(key), _kind(part)) for key, part in parts]
    return None if any(part is None for *_, part in kinds) else (kind, *kinds)


def _stacked(batches: Sequence[tuple[Hashable, list[Any], TreeSpec]]) -> list[Records | Failed]:
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
    return [
        Records(len(some), tree_unflatten([_together(part) for part in zip(*some, strict=True)], structure))
        for kinds in alike.values()
        for structure, some in kinds
    ]


def _equal(known: TreeSpec, structure: TreeSpec) -> bool:
    try:
        return bool(known == structure) and repr(known) == repr(structure)  # 1 equals True, and is another key
    except Exception:  # a container of the user's that cannot be compared
        return False


def _together(part: tuple[Any, ...]) -> Any:
    return torch.stack(part) if isinstance(part[0], Tensor) else part[0]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        if not _is_plain(leaf):
            raise ConfigError(
                "data: a training batch holds a sparse, nested or quantized tensor, which cannot be stacked; make it "
                "dense, of whatever size: records of different shapes are processed apart."
            )
        return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad  # all of which shows
    if type(leaf) is float:
        return float, struct.pack("d", leaf)  # 0.0 and -0.0 are equal, yet not the same, and NaN is one of many
    if type(leaf) in (str, int, bool, bytes, type(None)):
        return type(leaf), leaf
    return id(leaf)  # like no other, whatever it says of itself
