"""Records that are processed together, and how."""

from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened
from dpexp.privacy.isolation.state import State


@dataclass
class Chunk:
    """Records that look alike: leaves [size, ...] and their structure.

    Attributes:
        parts: into how many it is taken apart, if records of it branch differently, before that is said to be slow.
        look: equal for records of which code that has not asked for their numbers can tell no difference.
    """

    loss_of: Callable[[Any], Tensor]
    leaves: list[Any]
    structure: Any
    size: int
    state: State
    parts: int
    look: Hashable

    def part(self, rows: list[int], of: int = 1) -> "Chunk":
        """Some of the records; `of`: how many such parts there are."""
        leaves = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves, size=len(rows), parts=self.parts // of)

    def copies(self) -> list[Any]:
        """The leaves, which may be written to."""
        return [copied(leaf) for leaf in self.leaves]

    def one(self, i: int) -> Any:
        """A copy: what lies beside a record in memory is out of its reach."""
        some = [copied(leaf[i] if isinstance(leaf, Tensor) else leaf) for leaf in self.leaves]
        return tree_unflatten(some, self.structure)


def copied(leaf: Any) -> Any:
    """Of a tensor its numbers: from its graph others' could be had."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return deepcopy(leaf)


def look(leaves: list[Any], structure: Any) -> Hashable:
    """See Chunk; like no other where a leaf says what it is by itself."""
    try:
        return (repr(structure), *map(_look, leaves))
    except Exception:  # of a key's own, say
        return object()


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape[1:], leaf.stride()[1:], leaf.requires_grad
    return (type(leaf), repr(leaf)) if type(leaf) in PLAIN else object()


PLAIN = (str, int, float, bool, bytes, type(None))


def records(batch: Any, size: int) -> tuple[list[Any], Any]:
    """A batch's leaves, of which the tensors have the records along their first dimension, and its structure."""
    leaves, structure = flattened(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != size):
            raise ConfigError(
                f"data: a training batch holds a tensor of shape {tuple(leaf.shape)}; its first dimension must run "
                "over the records."
            )
    return leaves, structure
