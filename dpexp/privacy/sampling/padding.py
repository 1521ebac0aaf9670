"""Pads each record to one of a few lengths, so that records of different lengths can be processed together.

A `collate_fn` that pads to the longest record of its batch lets others decide on a record's padding. Here it gets the
record and a longer copy of it: the copy is of the next length of a public list, and decides on the padding.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp._torch_compat import tree_unflatten
from dpexp.privacy.sampling.batches import flattened


def lengths_for(module: nn.Module) -> tuple[int, ...]:
    """Lengths 8, 16, 32, … up to the positions of the module's model of transformers; empty: it has none."""
    configs = [part.config for part in module.modules() if hasattr(getattr(part, "config", None), "model_type")]
    most = min((n for c in configs if isinstance(n := getattr(c, "max_position_embeddings", None), int)), default=0)
    usual = (1 << k for k in range(3, most.bit_length()))
    return (*(length for length in usual if length < most), most) if most > 0 else ()


class PaddedCollation:
    """A `collate_fn` for one record, which pads it to the next of `lengths`; longer ones keep their length.

    A record is left as it is if `collate` does not pad it: if it refuses records of different lengths, or changes
    anything else about the record.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], lengths: Sequence[int]) -> None:
        self.collate, self._lengths = collate, sorted(lengths)
        self.pads = False  # it has padded a record
        self.__name__ = getattr(collate, "__name__", type(collate).__name__)

    def __call__(self, items: list[Any]) -> Any:
        alone = self.collate(items)
        if len(items) != 1:
            return alone
        longer = self._lengthened(items[0])
        if longer is None:
            return alone
        try:
            padded = _row(self.collate(copy.deepcopy([items[0], longer])), alone, 0)
            _check_equal(padded, _row(self.collate(copy.deepcopy([longer, items[0]])), alone, 1))
        except Exception:
            return alone
        self.pads = True
        return padded

    def said(self) -> str:
        """A line that says which lengths records have."""
        lengths = ", ".join(map(str, self._lengths))
        return (
            f"data: each record is padded by {self.__name__} to the next of the lengths {lengths}, so that records are "
            "processed together; data.pad_to (pad_to=…) sets other public lengths."
        )

    def _lengthened(self, item: Any) -> Any:
        """A copy of a record whose sequences have the next lengths; None: they have these already."""
        parts = dict(item) if isinstance(item, dict) else dict(enumerate(item)) if type(item) in (tuple, list) else None
        if parts is None or not parts:
            return None
        longer = {key: self._sequence(part) for key, part in parts.items()}
        if all(_length(longer[key]) == _length(part) for key, part in parts.items()):
            return None
        return type(item)(longer) if isinstance(item, dict) else type(item)(longer.values())

    def _sequence(self, part: Any) -> Any:
        length = _length(part)
        at = bisect_left(self._lengths, length)
        if length == 0 or at == len(self._lengths):
            return part
        more = self._lengths[at] - length
        if isinstance(part, Tensor):
            return torch.cat([part, part[-1:].expand(more, *part.shape[1:])])
        if isinstance(part, np.ndarray):
            return np.concatenate([part, part[-1:].repeat(more, 0)])
        return part + part[-1:] * more


def _length(part: Any) -> int:
    """The length of a sequence; 0 for anything else."""
    if isinstance(part, Tensor | np.ndarray):
        return len(part) if part.ndim else 0
    return len(part) if type(part) is list else 0


def _row(batch: Any, alone: Any, k: int) -> Any:
    """Record k of a batch of two.

    Raises:
        ValueError: it is not the record of a batch of one, padded at one end.
    """
    (leaves, structure), (own, _) = flattened(batch), flattened(alone)
    return tree_unflatten([_part(leaf, one, k) for leaf, one in zip(leaves, own, strict=True)], structure)


def _part(leaf: Any, one: Any, k: int) -> Any:
    if not isinstance(one, Tensor) or not one.dim():
        if type(leaf) is not type(one) or leaf != one:
            raise ValueError("a value of a batch depends on its records.")
        return one
    (records,) = (d for d in range(one.dim()) if one.shape[d] == 1 and leaf.shape[d] == 2)
    part = leaf.narrow(records, k, 1)
    inner = [slice(0, n) for n in one.shape], [slice(m - n, m) for n, m in zip(one.shape, part.shape, strict=True)]
    if not any(torch.equal(part[tuple(places)], one) for places in inner):
        raise ValueError("a record's values depend on its padding.")
    return part


def _check_equal(batch: Any, other: Any) -> None:
    """Raises ValueError if a record depends on its place in the batch, as where a collate_fn sorts by length."""
    for leaf, same in zip(flattened(batch)[0], flattened(other)[0], strict=True):
        if isinstance(leaf, Tensor) and not torch.equal(leaf, same):
            raise ValueError("a record's values depend on its place in the batch.")
