"""Derived parameters: tensors computed from parameters alone, such as a standardized weight or a merged LoRA.

A derived parameter is the same for all records. It is computed once, by ordinary autograd, and then treated as a
parameter, by layer rules or per-record copies. Its per-example gradients g^i are passed on to the parameters as
v^i = Jᵀ g^i, where the Jacobian J is the same for all records. These v^i are materialized: the norms are those of the
very numbers that are summed.

A view of a parameter (its transpose, its thirds, `weight[:n]`) is simpler: its gradient is the parameter's gradient at
some of its entries. It has the same norm, and need not be materialized.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpexp._torch_compat import base_of, is_batched, is_wrapped, unbatched, version_of
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient, OuterProductGradient, merge
from dpexp.privacy.gradients.torch_functions import is_from_torch


class DerivedParameters:
    """Trainable parameters, and the tensors that the pass of one chunk computes from parameters alone."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._trainable = {id(parameter) for parameter in self._parameters}
        self._used: dict[int, tuple[Tensor, int]] = {}

    def is_trainable(self, tensor: Any) -> bool:
        """Whether it is one of the parameters, and the step has not exempted it from gradients."""
        return id(tensor) in self._trainable and tensor.requires_grad

    def of_module(self, tensor: Tensor) -> bool:
        """Whether it is one of the parameters, whatever the step says of its gradients."""
        return id(tensor) in self._trainable

    def contains(self, tensor: Tensor) -> bool:
        """Whether it is a trainable parameter, or computed from parameters alone."""
        return self.is_trainable(tensor) or (not is_wrapped(tensor) and tensor.requires_grad and not tensor.is_leaf)

    def mark_used(self, tensor: Tensor | None) -> None:
        """Notes that a derived parameter was combined with data, so that it must not change from now on."""
        if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
            self._used.setdefault(id(tensor), (tensor, version_of(tensor)))

    def compute(
        self, run: Callable[..., Any], func: Callable[..., Any], args: tuple, kwargs: dict
    ) -> tuple[Any] | None:
        """A function's result in a tuple, if its arguments are parameters alone; None if data or randomness enters.

        Args:
            run: (function, args, kwargs) -> result.
        """
        tensors = list(_tensors((args, kwargs)))
        if not torch.is_grad_enabled() or not any(map(self.contains, tensors)) or not is_from_torch(func):
            return None  # a user's own backward pass may not be linear, or may count its calls
        if any(map(is_wrapped, tensors)):
            return None
        result = run(_DECOMPOSED.get(func, func), args, kwargs)
        return None if any(map(_differs_between_records, _tensors(result))) else (result,)

    def to_parameters(self, uses: dict[int, list[LayerGradient]]) -> Iterator[tuple[Tensor, LayerGradient]]:
        """Removes the gradients of derived parameters from `uses`, and yields them as gradients of parameters.

        Raises:
            RuntimeError: a derived parameter was changed in place after it was combined with data.
        """
        by_view: dict[int, dict[View, list[LayerGradient]]] = {}
        for tensor, version in self._used.values():
            if version_of(tensor) != version:
                raise RuntimeError("a tensor computed from parameters is changed in place after its use with data.")
            if id(tensor) not in uses:
                continue
            gradients = uses.pop(id(tensor))
            found = view_of_leaf(tensor)
            if found is not None and self.is_trainable(found[0]):
                parameter, view = found
                by_view.setdefault(id(parameter), {}).setdefault(view, []).extend(gradients)
            else:
                yield from self._through_graph(tensor, merge(gradients).materialize().to(tensor.dtype))
        for parameter in self._parameters:
            views = [(view, merge(gradients)) for view, gradients in by_view.get(id(parameter), {}).items()]
            yield from ((parameter, gradient) for gradient in gradients_from_views(parameter, views))

    def _through_graph(self, tensor: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, LayerGradient]]:
        """Jᵀ g^i for gradients [B, *tensor.shape]."""
        behind: list[Tensor] = []

        def one(gradient: Tensor) -> list[Tensor]:
            found = torch.autograd.grad(tensor, self._parameters, gradient, retain_graph=True, allow_unused=True)
            behind[:] = [p for p, g in zip(self._parameters, found, strict=True) if g is not None]
            return [g for g in found if g is not None]

        found = torch.func.vmap(one, chunk_size=max(1, _ENTRIES_AT_ONCE // max(1, tensor.numel())))(gradients)
        for parameter, gradient in zip(behind, found, strict=True):
            yield parameter, DenseGradient(gradient.to(torch.promote_types(torch.float32, parameter.dtype)))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_ENTRIES_AT_ONCE = 2**20  # of gradients under vmap; up to a third faster than all at once (measured)

# Functions whose backward pass vmap would run record by record, composed of several.
_DECOMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {torch._weight_norm: _weight_norm}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _differs_between_records(tensor: Tensor) -> bool:
    """Whether it differs between records and gradients flow through it, as after dropout of a weight."""
    return is_batched(tensor) and unbatched_fully(tensor).requires_grad


def unbatched_fully(tensor: Tensor) -> Tensor:
    """The tensor of all records behind one that is batched by vmap."""
    while is_batched(tensor):
        tensor = unbatched(tensor)
    return tensor


@dataclass(frozen=True)
class View:
    """Entries of a contiguous parameter, each at most once, as torch.as_strided addresses them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a contiguous tensor of the parameter's shape."""
        return tensor.as_strided(self.size, self.stride, int(tensor.storage_offset()) + self.offset)

    def of_each(self, tensors: Tensor) -> Tensor:
        """The view of each of [B, *parameter.shape], a contiguous tensor with a storage of its own."""
        return tensors.as_strided((len(tensors), *self.size), (tensors.stride(0), *self.stride), self.offset)


class ViewGradient(LayerGradient):
    """A parameter's gradients, of which only some disjoint views can be nonzero."""

    def __init__(self, views: list[tuple[View, LayerGradient]], shape: torch.Size) -> None:
        self._views = views
        self._shape = shape

    def squared_norms(self) -> Tensor:
        squares = torch.stack([gradient.squared_norms() for _, gradient in self._views]).sum(0)
        allowances = [g.rounding_allowance for _, g in self._views if g.rounding_allowance is not None]
        self.rounding_allowance = torch.stack(allowances).sum(0) if allowances else None
        return squares

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        for view, gradient in self._views:
            of_view = total.new_zeros(view.size)
            gradient.add_weighted_sum(c, of_view)
            view.of(total).add_(of_view)

    def materialize(self) -> Tensor:
        each = [gradient.materialize() for _, gradient in self._views]
        gradients = each[0].new_zeros(len(each[0]), *self._shape)
        for (view, _), gradient in zip(self._views, each, strict=True):
            view.of_each(gradients).copy_(gradient)
        return gradients

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> None:
        for _, gradient in self._views:
            gradient.map_factors(change)

    def in_float64(self, rows: Tensor) -> "ViewGradient":
        return ViewGradient([(view, gradient.in_float64(rows)) for view, gradient in self._views], self._shape)


def view_of_leaf(tensor: Tensor) -> tuple[Tensor, View] | None:
    """The contiguous leaf that a tensor is a view of, and the view; None if gradients change on the way."""
    leaf, node = base_of(tensor), tensor.grad_fn
    if leaf is None or not (leaf.is_leaf and leaf.is_contiguous()) or leaf.dtype != tensor.dtype:
        return None
    while node is not None and _VIEW_NODE.fullmatch(node.name()):
        node = node.next_functions[0][0]
    if id(getattr(node, "variable", None)) != id(leaf):
        return None
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:  # an entry may occur twice
                return None
            reach += (size - 1) * stride
    return leaf, View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset() - leaf.storage_offset()))


def gradients_from_views(parameter: Tensor, views: list[tuple[View, LayerGradient]]) -> list[LayerGradient]:
    """The gradients of distinct views as gradients of the parameter."""
    found: list[LayerGradient] = []
    others = []
    taken, disjoint = np.zeros(parameter.numel(), dtype=bool), True  # in NumPy, since a trace must not read a tensor
    for view, gradient in views:
        if view.size == parameter.shape and view.stride == parameter.stride():
            found.append(gradient)
        elif isinstance(gradient, OuterProductGradient) and _is_transpose(view, parameter):
            found.append(OuterProductGradient(gradient.g, gradient.x))
        else:
            others.append((view, gradient))
            of_view = np.lib.stride_tricks.as_strided(taken[view.offset :], view.size, view.stride)  # a byte per entry
            disjoint = disjoint and (len(views) == 1 or not of_view.any())
            of_view[...] = True
    if disjoint and others:
        return [*found, ViewGradient(others, parameter.shape)]
    return [*found, *(ViewGradient([other], parameter.shape) for other in others)]


def _is_transpose(view: View, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and view.size == parameter.shape[::-1] and view.stride == parameter.stride()[::-1]


# Backward nodes of functions that return views. A user's own function never has such a name.
_VIEW_NODE = re.compile(
    r"(Alias|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|T|Transpose|Unbind|Unfold|"
    r"Unsqueeze|View)Backward\d"
)
