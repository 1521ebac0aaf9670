"""Records, each collated alone, and stacked with records of the same structure, shapes and dtypes.

A record that cannot be fetched or collated contributes nothing, and training goes on.
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
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, get_worker_info
from torch.utils.data.dataloader import default_collate

from dpexp._lightning_compat import pl
from dpexp._torch_compat import TreeSpec, register_pytree_node, tree_children, tree_flatten, tree_map, tree_unflatten
from dpexp.errors import ConfigError, RecordError, is_own, words_of
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.rows import PlacedRows


@dataclass
class FailedRecord:
    """A record that cannot be fetched or collated.

    Attributes:
        reason: the error's message as a new error, since not every error can be sent to another process.
    """

    reason: Exception

    @classmethod
    def because(cls, error: BaseException) -> "FailedRecord":
        """The failure of an error; a KeyboardInterrupt is raised again."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        message = words_of(error)
        if isinstance(error, ConfigError | RecordError) and is_own(error):
            return cls(type(error)(message))
        return cls(RuntimeError(f"{type(error).__name__}: {message}"))


@dataclass
class RecordBatch:
    """Records of the same structure, shapes and dtypes, to be processed together.

    Attributes:
        size: B.
        batch: the records' batches for training_step, stacked: tensors are [B, ...], and all other values are equal
            for all records.
    """

    size: int
    batch: Any

    def to(self, device: torch.device) -> "RecordBatch":
        return RecordBatch(self.size, pl.utilities.move_data_to_device(self.batch, device))

    def pin_memory(self) -> "RecordBatch":
        return RecordBatch(
            self.size, tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, self.batch)
        )


class Rows(Dataset):
    """A TensorDataset, whose rows are fetched and collated at once, since none can change another.

    Of a unit, rows that cannot be used are left out; it fails if it has no others.
    """

    def __init__(self, dataset: TensorDataset, units: Units | None) -> None:
        self._tensors, self._units = dataset.tensors, units
        self._usable, self._reason = None, ""
        if isinstance(dataset, PlacedRows):
            self._usable, self._reason = dataset.usable.numpy().tobytes(), dataset.reason  # read one by one, and fast

    def __getitems__(self, drawn: list[Any]) -> list[RecordBatch | FailedRecord]:
        of_records = [[i] for i in drawn] if self._units is None else drawn
        if self._usable is not None:
            of_records = [[i for i in positions if self._usable[i]] for positions in of_records]
        by_size: dict[int, list[list[int]]] = {}
        for positions in of_records:
            by_size.setdefault(len(positions), []).append(positions)
        failed = [FailedRecord(RecordError(self._reason)) for _ in by_size.pop(0, [])]
        batches = [
            RecordBatch(len(some), [tensor[torch.tensor(some)] for tensor in self._tensors])
            for some in by_size.values()
        ]
        return [*batches, *failed]


class SingleCollation:
    """Collates each item alone with the user's `collate_fn`, and stacks those with the same signature."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> list[RecordBatch | FailedRecord]:
        records = self._collated(items)
        return records if get_worker_info() is None else [*map(_sendable, records)]

    def _collated(self, items: list[Any]) -> list[RecordBatch | FailedRecord]:
        records: list[RecordBatch | FailedRecord] = [item for item in items if isinstance(item, FailedRecord)]
        # default_collate stacks items with the same signature, so that they can be collated at once.
        by_signature: dict[Hashable, list[Any]] = {}
        for item in items:
            if not isinstance(item, FailedRecord):
                by_signature.setdefault(self._signature(item), []).append(item)
        one_by_one = by_signature.pop(None, [])
        for some in by_signature.values():
            try:
                records.append(RecordBatch(len(some), tree_map(lambda leaf: leaf.unsqueeze(1), default_collate(some))))
            except Exception:  # one of them cannot be collated
                one_by_one += some
        return records + self._one_by_one(one_by_one)

    def _signature(self, item: Any) -> Hashable:
        try:
            return _item_signature(item) if self._collate is default_collate else None
        except Exception:
            return None

    def _one_by_one(self, items: list[Any]) -> list[RecordBatch | FailedRecord]:
        failed: list[RecordBatch | FailedRecord] = []
        batches = []
        for item in items:
            try:
                leaves, structure = flattened(self._collate([item]))
                # Copies, since a collate_fn may reuse its memory; without a graph, which cannot be sent to a process.
                leaves = [
                    leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                    for leaf in leaves
                ]
                batches.append((tuple(map(_signature, leaves)), leaves, structure))
            except BaseException as error:
                failed.append(FailedRecord.because(error))
        return failed + _stacked(batches)


def _sendable(records: RecordBatch | FailedRecord) -> RecordBatch | FailedRecord:
    """Records that another process can be sent, so that those that cannot be pickled fail alone."""
    if isinstance(records, FailedRecord):
        return records
    try:
        leaves, structure = flattened(records.batch)
        pickle.loads(pickle.dumps(tree_unflatten([None if _is_plain(leaf) else leaf for leaf in leaves], structure)))
    except BaseException as error:
        return FailedRecord.because(error)
    return records


def _item_signature(item: Any) -> Hashable:
    """Equal for items that default_collate stacks without one changing another; None: it may not."""
    type_: Any = type(item)
    if isinstance(item, Tensor):
        return _signature(item) if _is_plain(item) and not item.requires_grad else None
    if type_ is np.ndarray:
        return type_, item.dtype, item.shape, item.strides
    if type_ in (int, float, bool):
        return type_
    parts = item.items() if type_ is dict else enumerate(item) if type_ in (tuple, list) else None
    if parts is None:
        return None
    signatures = [(_signature(key), _item_signature(part)) for key, part in parts]
    return None if any(part is None for _, part in signatures) else (type_, *signatures)


def _stacked(batches: Sequence[tuple[Hashable, list[Any], TreeSpec]]) -> list[RecordBatch | FailedRecord]:
    """Stacks batches of one record, given as (signature, leaves, structure), where signature and structure agree."""
    by_signature: dict[Hashable, list[tuple[TreeSpec, list[list[Any]]]]] = {}
    for signature, leaves, structure in batches:
        by_structure = by_signature.setdefault(signature, [])
        for known, some in by_structure:
            if _same_structure(known, structure):
                some.append(leaves)
                break
        else:
            by_structure.append((structure, [leaves]))
    records: list[RecordBatch | FailedRecord] = []
    for structure, some in (pair for pairs in by_signature.values() for pair in pairs):
        try:
            batch = tree_unflatten([_stack(part) for part in zip(*some, strict=True)], structure)
            records.append(RecordBatch(len(some), batch))
        except BaseException as error:
            records += [FailedRecord.because(error)] * len(some)
    return records


def _stack(leaves: tuple[Any, ...]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    with torch.no_grad():
        return torch.stack(leaves).requires_grad_(leaves[0].requires_grad)


def _same_structure(known: TreeSpec, structure: TreeSpec) -> bool:
    return (
        known.type is structure.type
        and _same_context(known.context, structure.context)
        and len(tree_children(known)) == len(tree_children(structure))
        and all(map(_same_structure, tree_children(known), tree_children(structure)))
    )


def _same_context(some: Any, other: Any) -> bool:
    """Compares keys by signature, since keys that claim to be equal may differ."""
    if type(some) is type(other) and type(some) in (list, tuple):
        return len(some) == len(other) and all(map(_same_context, some, other))
    return some is other or _signature(some) == _signature(other)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_plain(leaf: Any) -> bool:
    """Whether it is a dense tensor without attributes, not of a subclass."""
    return type(leaf) in (Tensor, nn.Parameter) and not leaf.__dict__ and _is_dense(leaf)


def _signature(leaf: Any) -> Hashable:
    """Equal for leaves, or keys, that differ only in a tensor's entries."""
    if isinstance(leaf, Tensor):
        if not _is_dense(leaf):
            raise ConfigError(
                "data: a training batch holds a sparse, nested or quantized tensor, which cannot be stacked; make it "
                "dense, of whatever size: records of different shapes are processed apart."
            )
        if not _is_plain(leaf):
            return id(leaf)
        return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad
    if type(leaf) is float:
        return float, struct.pack("d", leaf)  # tells 0.0 from -0.0, and NaNs apart
    if type(leaf) in (str, int, bool, bytes, type(None)):
        return type(leaf), leaf
    return id(leaf)


def flattened(batch: Any) -> tuple[list[Any], TreeSpec]:
    """The batch's leaves and structure; dictionaries such as transformers' BatchEncoding are flattened too."""
    leaves, structure = tree_flatten(batch)
    unknown = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    if not unknown:
        return leaves, structure
    for type_ in unknown:
        register_pytree_node(type_, lambda items: ([*items.values()], [*items]), partial(_dictionary, type_))
    return flattened(batch)


def _dictionary(type_: type, values: Any, keys: Any) -> Any:
    return type_(dict(zip(keys, values, strict=True)))
