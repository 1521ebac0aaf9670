"""Records that are processed together."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened


@dataclass
class Chunk:
    """Records of equal shapes: leaves [size, ...] and their structure."""

    loss_of: Callable[[Any], Tensor]
    leaves: list[Any]
    structure: Any
    size: int

    def row(self, i: int) -> list[Any]:
        """The leaves [1, ...] of one record."""
        return [leaf[i : i + 1] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def one(self, i: int) -> Any:
        """A copy of one record's batch."""
        some = [copied(leaf[i] if isinstance(leaf, Tensor) else leaf) for leaf in self.leaves]
        return tree_unflatten(some, self.structure)


def copied(leaf: Any) -> Any:
    """Of a tensor its numbers, without what it was computed from."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return deepcopy(leaf)


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
