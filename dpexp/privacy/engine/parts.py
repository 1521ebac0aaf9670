"""A parameter's numbers in another order, or some of them: its transpose, its thirds, `weight[:n]`.

A use of these is a use of the parameter at those places. It has the same norm, so that it need not be held either.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.engine.uses import OuterProducts, Use


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


class Parts(Use):
    """Uses of parts that have no place in common."""

    def __init__(self, parts: list[tuple[Part, Use]], shape: torch.Size) -> None:
        self._parts = parts
        self._shape = shape

    def squared_norms(self) -> Tensor:
        squares = torch.stack([use.squared_norms() for _, use in self._parts]).sum(0)
        allowances = [use.allowance for _, use in self._parts if use.allowance is not None]
        self.allowance = torch.stack(allowances).sum(0) if allowances else None
        return squares

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        for part, use in self._parts:
            here = total.new_zeros(part.size)
            use.add_weighted_sum(c, here)
            part.of(total).add_(here)

    def dense(self) -> Tensor:
        each = [use.dense() for _, use in self._parts]
        gradients = each[0].new_zeros(len(each[0]), *self._shape)
        for (part, _), gradient in zip(self._parts, each, strict=True):
            part.of_each(gradients).copy_(gradient)
        return gradients

    def in_float64(self, rows: Tensor) -> "Parts":
        return Parts([(part, use.in_float64(rows)) for part, use in self._parts], self._shape)


def part_of(tensor: Tensor) -> tuple[Tensor, Part] | None:
    """The tensor and the places of it that another shows, if gradients flow from there to here as they are."""
    whole, node = tensor._base, tensor.grad_fn
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


def of_parameter(parameter: Tensor, parts: list[tuple[Part, Use]]) -> list[Use]:
    """Uses of parts, no two of which are the same, as uses of the parameter."""
    found: list[Use] = []
    others = []
    taken, apart = np.zeros(parameter.numel(), dtype=bool), True  # no tensor, for a trace would be asked what it holds
    for part, use in parts:
        if part.size == parameter.shape and part.stride == parameter.stride():
            found.append(use)
        elif isinstance(use, OuterProducts) and _is_transpose(part, parameter):
            found.append(OuterProducts(use.g, use.x))
        else:
            others.append((part, use))
            here = np.lib.stride_tricks.as_strided(taken[part.offset :], part.size, part.stride)  # of a byte each
            apart = apart and (len(parts) == 1 or not here.any())
            here[...] = True
    if apart and others:
        return [*found, Parts(others, parameter.shape)]
    return [*found, *(Parts([other], parameter.shape) for other in others)]


def _is_transpose(part: Part, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and part.size == parameter.shape[::-1] and part.stride == parameter.stride()[::-1]


# Backward nodes of functions that only show numbers elsewhere. A function of the user's own never has such a name.
_VIEW = re.compile(
    r"(Alias|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unfold|"
    r"Unsqueeze|View)Backward\d"
)
