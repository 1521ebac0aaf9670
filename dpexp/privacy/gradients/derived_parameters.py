"""Tensors that are computed from parameters alone: a standardized weight, a merged LoRA, a parameter's transpose.

Such a tensor is the same for all records. It is computed once, by ordinary autograd, and is then used as a parameter
would be, by rules or by copies. Where it only shows a parameter's numbers elsewhere (a transpose, a part), a use of it
is a use of the parameter. Otherwise its per-record gradients go back through its graph: v^i = Jᵀ g^i for a Jacobian J
that no record changes. These v^i are held: they are the very numbers that norms are of and that are summed.

A use of a part of a parameter (its transpose, its thirds, `weight[:n]`) is a use of the parameter at those places. It
has the same norm, so that it need not be held either.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpexp._torch_compat import base_of, is_batched, is_wrapped, unbatched, version_of
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient, OuterProductGradient, merged
from dpexp.privacy.gradients.torch_functions import is_torchs


class Derived:
    """The tensors that one chunk's records see the same, and that gradients flow through to parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._trainable = {id(parameter) for parameter in self._parameters}
        self._used: dict[int, tuple[Tensor, int]] = {}

    def trains(self, tensor: Any) -> bool:
        """Whether it is one of the parameters, which a step may exempt from gradients."""
        return id(tensor) in self._trainable and tensor.requires_grad

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or computed from parameters alone."""
        return self.trains(tensor) or (not is_wrapped(tensor) and tensor.requires_grad and not tensor.is_leaf)

    def use(self, tensor: Tensor | None) -> None:
        """Notes that records meet a tensor, which must stay as it is from now on."""
        if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
            self._used.setdefault(id(tensor), (tensor, version_of(tensor)))

    def once(self, run: Callable[..., Any], func: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[Any] | None:
        """What a function of parameters alone returns, in a tuple; None where data enters it, or randomness does.

        Args:
            run: (function, args, kwargs) -> what it returns.
        """
        tensors = list(_tensors((args, kwargs)))
        if not torch.is_grad_enabled() or not any(map(self.holds, tensors)) or not is_torchs(func):
            return None  # a backward pass of one's own may not be linear, or count
        if any(map(is_wrapped, tensors)):
            return None
        result = run(_PLAIN.get(func, func), args, kwargs)
        return None if any(map(_of_records, _tensors(result))) else (result,)

    def passed_on(self, uses: dict[int, list[LayerGradient]]) -> Iterator[tuple[Tensor, LayerGradient]]:
        """Turns uses of these tensors, which are removed, into uses of parameters.

        Raises:
            RuntimeError: one of them was changed in place after records had met it.
        """
        parts: dict[int, dict[Part, list[LayerGradient]]] = {}
        for tensor, version in self._used.values():
            if version_of(tensor) != version:
                raise RuntimeError("what is computed from parameters is changed in place after data has met it.")
            if id(tensor) not in uses:
                continue
            found = uses.pop(id(tensor))
            where = part_of(tensor)
            if where is not None and self.trains(where[0]):
                parts.setdefault(id(where[0]), {}).setdefault(where[1], []).extend(found)
            else:
                yield from self._back(tensor, merged(found).materialize().to(tensor.dtype))
        for parameter in self._parameters:
            shown = [(part, merged(found)) for part, found in parts.get(id(parameter), {}).items()]
            yield from ((parameter, use) for use in of_parameter(parameter, shown))

    def _back(self, tensor: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, LayerGradient]]:
        """Jᵀ g^i for g [B, *tensor.shape]."""
        reached: list[Tensor] = []

        def one(gradient: Tensor) -> list[Tensor]:
            found = torch.autograd.grad(tensor, self._parameters, gradient, retain_graph=True, allow_unused=True)
            reached[:] = [p for p, g in zip(self._parameters, found, strict=True) if g is not None]
            return [g for g in found if g is not None]

        found = torch.func.vmap(one, chunk_size=max(1, _SLICE // max(1, tensor.numel())))(gradients)
        for parameter, gradient in zip(reached, found, strict=True):
            yield parameter, DenseGradient(gradient.to(torch.promote_types(torch.float32, parameter.dtype)))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_SLICE = 2**20  # numbers of some records that go back together: up to a third faster than all at once (measured)

# In place of what PyTorch has in one piece, whose backward pass vmap would go through record by record.
_PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {torch._weight_norm: _weight_norm}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _of_records(tensor: Tensor) -> bool:
    """Whether it differs between records, and gradients flow through it."""
    return is_batched(tensor) and inner(tensor).requires_grad


def inner(tensor: Tensor) -> Tensor:
    """The tensor of all records, of which vmap shows one."""
    while is_batched(tensor):
        tensor = unbatched(tensor)
    return tensor


@dataclass(frozen=True)
class Part:
    """Places in a contiguous parameter, each at most once, as torch.as_strided has them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """These places of a contiguous tensor like the parameter."""
        return tensor.as_strided(self.size, self.stride, int(tensor.storage_offset()) + self.offset)

    def of_each(self, tensors: Tensor) -> Tensor:
        """These places of each of [B, *parameter.shape], a contiguous tensor of its own."""
        return tensors.as_strided((len(tensors), *self.size), (tensors.stride(0), *self.stride), self.offset)


class ViewGradient(LayerGradient):
    """Uses of parts that have no place in common."""

    def __init__(self, parts: list[tuple[Part, LayerGradient]], shape: torch.Size) -> None:
        self._parts = parts
        self._shape = shape

    def squared_norms(self) -> Tensor:
        squares = torch.stack([use.squared_norms() for _, use in self._parts]).sum(0)
        allowances = [use.rounding_allowance for _, use in self._parts if use.rounding_allowance is not None]
        self.rounding_allowance = torch.stack(allowances).sum(0) if allowances else None
        return squares

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        for part, use in self._parts:
            here = total.new_zeros(part.size)
            use.add_weighted_sum(c, here)
            part.of(total).add_(here)

    def materialize(self) -> Tensor:
        each = [use.materialize() for _, use in self._parts]
        gradients = each[0].new_zeros(len(each[0]), *self._shape)
        for (part, _), gradient in zip(self._parts, each, strict=True):
            part.of_each(gradients).copy_(gradient)
        return gradients

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        for _, use in self._parts:
            use.change(change)

    def in_float64(self, rows: Tensor) -> "ViewGradient":
        return ViewGradient([(part, use.in_float64(rows)) for part, use in self._parts], self._shape)


def part_of(tensor: Tensor) -> tuple[Tensor, Part] | None:
    """The tensor and the places of it that another shows, if gradients flow from there to here as they are."""
    whole, node = base_of(tensor), tensor.grad_fn
    if whole is None or not (whole.is_leaf and whole.is_contiguous()) or whole.dtype != tensor.dtype:
        return None
    while node is not None and _VIEW.fullmatch(node.name()):
        node = node.next_functions[0][0]
    if id(getattr(node, "variable", None)) != id(whole):
        return None
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return None
            reach += (size - 1) * stride
    return whole, Part(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset() - whole.storage_offset()))


def of_parameter(parameter: Tensor, parts: list[tuple[Part, LayerGradient]]) -> list[LayerGradient]:
    """Uses of parts, no two of which are the same, as uses of the parameter."""
    found: list[LayerGradient] = []
    others = []
    taken, apart = np.zeros(parameter.numel(), dtype=bool), True  # no tensor, for a trace would be asked what it holds
    for part, use in parts:
        if part.size == parameter.shape and part.stride == parameter.stride():
            found.append(use)
        elif isinstance(use, OuterProductGradient) and _is_transpose(part, parameter):
            found.append(OuterProductGradient(use.g, use.x))
        else:
            others.append((part, use))
            here = np.lib.stride_tricks.as_strided(taken[part.offset :], part.size, part.stride)  # of a byte each
            apart = apart and (len(parts) == 1 or not here.any())
            here[...] = True
    if apart and others:
        return [*found, ViewGradient(others, parameter.shape)]
    return [*found, *(ViewGradient([other], parameter.shape) for other in others)]


def _is_transpose(part: Part, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and part.size == parameter.shape[::-1] and part.stride == parameter.stride()[::-1]


# Backward nodes of functions that only show numbers elsewhere. A function of the user's own never has such a name.
_VIEW = re.compile(
    r"(Alias|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unfold|"
    r"Unsqueeze|View)Backward\d"
)
