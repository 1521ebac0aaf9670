"""Records that are processed together, and how."""

from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened
from dpexp.privacy.isolation.state import State


@dataclass
class Way:
    """How records of one look are processed: all together, but for some modules; or wholly one at a time. Once it works
    for records together it stays, whatever a single one may need."""

    looped: set[str] = field(default_factory=set)
    singly: bool = False
    works: bool = False


@dataclass
class Chunk:
    """Records that look alike: leaves [size, ...] and their structure.

    Attributes:
        parts: into how many it is taken apart, if records of it branch differently, before that is said to be slow.
    """

    loss_of: Callable[[Any], Tensor]
    leaves: list[Any]
    structure: Any
    size: int
    state: State
    parts: int

    def part(self, rows: list[int], of: int = 1) -> "Chunk":
        """Some of the records; `of`: how many such parts there are."""
        leaves = [leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves, size=len(rows), parts=self.parts // of)

    def copies(self) -> list[Any]:
        """The leaves, which may be written to."""
        return [leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf) for leaf in self.leaves]

    def one(self, i: int) -> Any:
        """A copy: what lies beside a record in memory is out of its reach."""
        return tree_unflatten(
            [leaf[i].clone() if isinstance(leaf, Tensor) else deepcopy(leaf) for leaf in self.leaves], self.structure
        )


def look(leaves: list[Any]) -> Hashable:
    """Equal for records that are processed in the same way."""
    return tuple((leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


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
