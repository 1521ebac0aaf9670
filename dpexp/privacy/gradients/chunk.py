"""Records that are processed together: a chunk of a sample; or such as are made up, or made from a public one, on which
a step is traced and tried before it sees data. Of private records only shapes, types and structure are used for these.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import tree_unflatten
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.index_checks import sizes_met
from dpexp.privacy.sampling.batches import flattened

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

    def split(self, size: int) -> "list[Chunk]":
        """In parts of at most so many records, which share memory with it."""
        each = zip(*(leaf.split(size) for leaf in self.tensors), strict=True)
        return [self.having([*some]) for some in each]

    def padded(self, rows: int) -> "Chunk":
        """With copies of the first record behind the others."""
        more = rows - self.size
        if not more:
            return self
        longer = [torch.cat([leaf.detach(), leaf.detach()[:1].expand(more, *leaf.shape[1:])]) for leaf in self.tensors]
        return self.having(
            [
                laid_out(new, leaf).requires_grad_(leaf.requires_grad)
                for new, leaf in zip(longer, self.tensors, strict=True)
            ]
        )

    def row(self, i: int) -> "Chunk":
        """A copy of one record, as a chunk: a function may look at the memory behind it."""
        return replace(self.having([copied(leaf[i : i + 1]) for leaf in self.tensors]), size=1)

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
    reach = sum((n - 1) * step for n, step in zip(like.shape[1:], like.stride()[1:], strict=True))
    if made.stride()[1:] == like.stride()[1:] or reach >= like[:1].numel():  # one record's numbers are among others'
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


@dataclass
class MadeUp:
    """Makes records up.

    Args:
        floats, integers: how their entries are drawn.
        below: integers are drawn below it.
        public: leaves [1, ...] of a public record of the same structure, whose entries are used, if any.
    """

    floats: str = "normal"
    integers: str = "random"
    below: int = 2
    public: list[Any] | None = None

    def records(self, chunk: Chunk, size: int, seed: int) -> Chunk:
        """`size` records that look like those of a chunk, all different."""
        generator = torch.Generator().manual_seed(seed)
        leaves = [
            self._made_up(leaf, size, generator, self.public[k] if self.public else None)
            if isinstance(leaf, Tensor)
            else leaf
            for k, leaf in enumerate(chunk.leaves)
        ]
        return replace(chunk, leaves=leaves, size=size)

    def _made_up(self, like: Tensor, size: int, generator: torch.Generator, public: Tensor | None) -> Tensor:
        shape = (size, *like.shape[1:])
        if public is not None and public.numel():
            entries = public.detach().cpu().reshape(-1)
            if public.shape[1:] == like.shape[1:]:
                made = public.detach().cpu().expand(shape).clone()
            else:
                made = entries[torch.randint(len(entries), shape, generator=generator)]
            if made.is_floating_point() and self.floats == "normal":
                spread = entries.double().std(correction=0).nan_to_num(0).clamp(max=1e6).to(made.dtype)
                made = made + 0.1 * spread * torch.randn(shape, generator=generator).to(made.dtype)
        elif like.is_floating_point() or like.is_complex():
            draw: Callable[..., Tensor] = torch.rand if self.floats == "uniform" else torch.randn
            made = torch.ones(shape) if self.floats == "ones" else draw(shape, generator=generator)
        elif like.dtype == torch.bool or self.integers == "ones":
            made = torch.ones(shape)
        elif self.integers == "zeros":
            made = torch.zeros(shape)
        else:
            made = torch.randint(max(1, self.below), shape, generator=generator)
        return laid_out(made.to(like.device, like.dtype), like).requires_grad_(like.requires_grad)


class NoLoss(ConfigError):
    """No record that was made up has a loss."""


NO_LOSS = (
    "model: training_step's loss, or its gradient, is NaN or infinite for every record that was made up, and for the "
    "first record of the validation set, if there is one; mend the loss, or give a validation set, whose records are "
    "public, that it takes."
)


def tries(below: int, public: list[Any] | None) -> Iterator[MadeUp]:
    """Ways to make records up, the best first."""
    if public is not None:
        yield from (MadeUp(floats, below=below, public=public) for floats in ("normal", "same"))
    floats, integers = ("normal", "uniform", "ones"), ("random", "ones", "zeros")
    yield from (MadeUp(a, b, below) for b, a in itertools.product(integers, floats))


def smallest_table(chunk: Chunk) -> int:
    """The size of the smallest table, or number of classes, that indices meet while one made-up record of zeros is
    processed; 2 if they meet none."""
    seen = _TablesSeen()
    try:
        with seen, torch.no_grad():
            chunk.loss_of(MadeUp(integers="zeros").records(chunk, 1, 0).one(0))
    except Exception:
        pass  # what is wrong with it is said when records are tried
    return min((size for size in seen.sizes if size > 1), default=2)


class _TablesSeen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            size = sizes_met(func, args, kwargs or {})
        except Exception:  # of arguments that are wrong
            size = None
        if size is not None:
            self.sizes.append(size)
        return func(*args, **(kwargs or {}))


def public_leaves(public: Any, chunk: Chunk) -> list[Any] | None:
    """The leaves of a batch of one public record, if it is of the same structure and types as the records."""
    if public is None:
        return None
    found, structure = flattened(public)
    if structure != chunk.structure or len(found) != len(chunk.leaves):
        return None
    alike = all(
        isinstance(a, Tensor) and a.dtype == b.dtype and a.dim() + 1 == b.dim() if isinstance(b, Tensor) else True
        for a, b in zip(found, chunk.leaves, strict=True)
    )
    return [a[None] if isinstance(a, Tensor) else a for a in found] if alike else None
