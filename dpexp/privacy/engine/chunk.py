"""Records that are processed together."""

from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened

LossOf = Callable[[Any], Tensor]
PLAIN = (str, int, float, bool, bytes, type(None))


@dataclass
class Chunk:
    """Records of equal shapes.

    Attributes:
        loss_of: the loss of one record, as a scalar.
        leaves: of their batch: tensors [size, ...], and what is the same for all of them.
        structure: of their batch.
    """

    loss_of: LossOf
    leaves: list[Any]
    structure: Any
    size: int

    @classmethod
    def of(cls, loss_of: LossOf, batch: Any, size: int) -> "Chunk":
        """
        Raises:
            ConfigError: the batch cannot be split into records.
        """
        leaves, structure = flattened(batch)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != size):
                raise ConfigError(
                    f"data: a training batch holds a tensor of shape {tuple(leaf.shape)}; its first dimension must run "
                    "over the records."
                )
        return cls(loss_of, leaves, structure, size)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def key(self) -> Hashable:
        """Equal for records of equal shapes, types and structure, which hold the same besides tensors; equal to no
        other where what they hold cannot be compared."""
        try:
            return (repr(self.structure), *map(_look, self.leaves))
        except Exception:  # of a key's own, say
            return object()

    def having(self, tensors: list[Any]) -> "Chunk":
        """The same with other tensors [size, ...]."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves, size=len(tensors[0]) if tensors else self.size)

    def rows(self, index: Tensor) -> "Chunk":
        """Copies of some records, by number."""
        some = [laid_out(leaf.detach()[index], leaf).requires_grad_(leaf.requires_grad) for leaf in self.tensors]
        return self.having(some)

    def row(self, i: int) -> "Chunk":
        """One record, as a chunk."""
        return replace(self.having([leaf[i : i + 1] for leaf in self.tensors]), size=1)

    def one(self, i: int) -> Any:
        """A copy of one record's batch."""
        some = [copied(leaf[i] if isinstance(leaf, Tensor) else leaf) for leaf in self.leaves]
        return tree_unflatten(some, self.structure)


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape[1:], leaf.stride()[1:], leaf.requires_grad
    return (type(leaf), repr(leaf)) if type(leaf) in PLAIN else object()


def laid_out(made: Tensor, like: Tensor) -> Tensor:
    """Records [B, ...], each in memory as those of another tensor are, where that is possible."""
    if made.stride()[1:] == like.stride()[1:]:
        return made
    try:
        laid = made.new_empty_strided(made.shape, (max(made[0].numel(), 1), *like.stride()[1:]))
        return laid.copy_(made) if 0 not in laid.stride()[1:] else made
    except RuntimeError:
        return made


def copied(leaf: Any) -> Any:
    """Of a tensor its numbers, without what it was computed from."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return deepcopy(leaf)
