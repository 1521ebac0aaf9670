"""Chunks of records that are processed together, and synthetic records.

A step is traced and tested on synthetic records before it sees data. They are random, or drawn around one public
record; from private records they take shapes, types and structure alone.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpexp._torch_compat import tree_unflatten
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.sampling.batches import flattened

PLAIN_TYPES = (str, int, float, bool, bytes, type(None))


@dataclass
class Chunk:
    """Records of equal shapes, as one batch.

    Attributes:
        step: computes the loss of one record.
        leaves: of the batch: tensors [size, ...], and other objects that all records share.
        structure: of the batch, as a pytree.
        size: number of records.
    """

    step: TrainingStep
    leaves: list[Any]
    structure: Any
    size: int

    @classmethod
    def of(cls, step: TrainingStep, batch: Any, size: int) -> "Chunk":
        """The chunk of a batch; raises ConfigError if it cannot be split into records."""
        leaves, structure = flattened(batch)
        leaves = [_contiguous(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != size):
                raise ConfigError(
                    f"data: a training batch holds a tensor of shape {tuple(leaf.shape)}; its first dimension must run "
                    "over the records."
                )
        return cls(step, leaves, structure, size)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def key(self) -> Hashable:
        """Equal for chunks of equal shapes, dtypes, structure and non-tensor leaves; unique if leaves cannot be
        compared."""
        try:
            return (repr(self.structure), *map(_signature, self.leaves))
        except Exception:  # raised by the __repr__ of a dict's key
            return object()

    def with_tensors(self, tensors: list[Any]) -> "Chunk":
        """The same chunk with other tensors [size, ...]."""
        new = iter(tensors)
        leaves = [next(new) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves, size=len(tensors[0]) if tensors else self.size)

    def rows(self, index: Tensor) -> "Chunk":
        """Copies of the records with these indices."""
        return self.with_tensors([leaf.detach()[index].requires_grad_(leaf.requires_grad) for leaf in self.tensors])

    def split(self, size: int) -> "list[Chunk]":
        """Chunks of at most `size` records, which share memory with this one."""
        each = zip(*(leaf.split(size) for leaf in self.tensors), strict=True)
        return [self.with_tensors([*some]) for some in each]

    def padded(self, rows: int) -> "Chunk":
        """This chunk, with copies of its first record appended up to `rows` records."""
        if rows == self.size:
            return self
        index = torch.arange(rows, device=self.tensors[0].device)
        return self.rows(torch.where(index < self.size, index, 0))

    def row(self, i: int) -> "Chunk":
        """A chunk of one record, copied: a step may read the memory around a tensor."""
        return replace(self.with_tensors([copied(leaf[i : i + 1]) for leaf in self.tensors]), size=1)

    def batch_of(self, i: int) -> Any:
        """The batch of one record, copied."""
        some = [copied(leaf[i] if isinstance(leaf, Tensor) else leaf) for leaf in self.leaves]
        return tree_unflatten(some, self.structure)


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape[1:], leaf.requires_grad
    return (type(leaf), repr(leaf)) if type(leaf) in PLAIN_TYPES else object()


def _contiguous(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_contiguous() else leaf.detach().contiguous().requires_grad_(leaf.requires_grad)


def copied(leaf: Any) -> Any:
    """A copy; of a tensor, without its autograd graph."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return deepcopy(leaf)


@dataclass
class SyntheticRecords:
    """Draws synthetic records.

    Args:
        floats, integers: how entries are drawn: `normal`, `uniform`, `ones`, `same` (as in the public record); and
            `random`, `ones`, `zeros`.
        below: exclusive upper limit of random integers.
        public: leaves [1, ...] of a public record of the same structure, whose entries are used.
    """

    floats: str = "normal"
    integers: str = "random"
    below: int = 2
    public: list[Any] | None = None

    def records(self, chunk: Chunk, size: int, seed: int) -> Chunk:
        """`size` distinct records of the shapes and types of a chunk's."""
        generator = torch.Generator().manual_seed(seed)
        leaves = [
            self._draw(leaf, size, generator, self.public[k] if self.public else None)
            if isinstance(leaf, Tensor)
            else leaf
            for k, leaf in enumerate(chunk.leaves)
        ]
        return replace(chunk, leaves=leaves, size=size)

    def _draw(self, like: Tensor, size: int, generator: torch.Generator, public: Tensor | None) -> Tensor:
        shape = (size, *like.shape[1:])
        if public is not None and public.numel():
            entries = public.detach().cpu().reshape(-1)
            if public.shape[1:] == like.shape[1:]:
                drawn = public.detach().cpu().expand(shape).clone()
            else:
                drawn = entries[torch.randint(len(entries), shape, generator=generator)]
            if drawn.is_floating_point() and self.floats == "normal":
                spread = entries.double().std(correction=0).nan_to_num(0).clamp(max=1e6).to(drawn.dtype)
                drawn = drawn + 0.1 * spread * torch.randn(shape, generator=generator).to(drawn.dtype)
        elif like.is_floating_point() or like.is_complex():
            draw: Callable[..., Tensor] = torch.rand if self.floats == "uniform" else torch.randn
            drawn = torch.ones(shape) if self.floats == "ones" else draw(shape, generator=generator)
        elif like.dtype == torch.bool or self.integers == "ones":
            drawn = torch.ones(shape)
        elif self.integers == "zeros":
            drawn = torch.zeros(shape)
        else:
            drawn = torch.randint(max(1, self.below), shape, generator=generator)
        return drawn.to(like.device, like.dtype).requires_grad_(like.requires_grad)


class NoLoss(ConfigError):
    """No synthetic record has a finite loss."""


NO_LOSS = (
    "model: training_step's loss, or its gradient, is NaN or infinite for every synthetic record, and for the first "
    "record of the validation set, if there is one; correct the loss, or give a validation set, whose records are "
    "public, with finite losses."
)


def synthetic_options(below: int, public: list[Any] | None) -> list[SyntheticRecords]:
    """Ways to draw synthetic records, in order of preference."""
    floats, integers = ("normal", "uniform", "ones"), ("random", "ones", "zeros")
    around = [SyntheticRecords(how, below=below, public=public) for how in ("normal", "same") if public is not None]
    return around + [SyntheticRecords(a, b, below) for b, a in itertools.product(integers, floats)]


def choose(options: Sequence[SyntheticRecords], is_finite: Callable[[SyntheticRecords], bool]) -> SyntheticRecords:
    """Returns the first of `options` whose records have finite losses and gradients.

    Raises:
        NoLoss: none has. ConfigError: from `is_finite`. The first other error, if every option raises one.
    """
    errors: list[Exception] = []
    for synthetic in options:
        try:
            if is_finite(synthetic):
                return synthetic
        except ConfigError:
            raise
        except Exception as error:  # an operator refuses such records
            errors.append(error)
    raise errors[0] if len(errors) == len(options) else NoLoss(NO_LOSS)


def public_leaves(public: Any, chunk: Chunk) -> list[Any] | None:
    """The leaves of a batch of one public record, if it has the structure and types of the records; else None."""
    if public is None:
        return None
    leaves, structure = flattened(public)
    if structure != chunk.structure or len(leaves) != len(chunk.leaves):
        return None
    fits = all(
        isinstance(a, Tensor) and a.dtype == b.dtype and a.dim() + 1 == b.dim() if isinstance(b, Tensor) else True
        for a, b in zip(leaves, chunk.leaves, strict=True)
    )
    return [a[None] if isinstance(a, Tensor) else a for a in leaves] if fits else None
