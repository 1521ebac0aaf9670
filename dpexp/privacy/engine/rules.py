"""Per-record gradients of a parameter, from one operation's saved input and output gradient.

`Use` is the contract: how one use of a parameter answers the two operations. A rule turns a call of a torch
function into the `Use`s of its parameters; `rule` registers one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Use(ABC):
    """The gradients of B records with respect to one parameter, through one use of it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[B, *parameter.shape]."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """[B]: ‖v^i‖²."""

    @abstractmethod
    def weighted_sum(self, c: Tensor) -> Tensor:
        """Σ_i c_i v^i in the parameter's shape, for c [B]."""

    @abstractmethod
    def zero(self, records: Tensor) -> None:
        """Sets the gradients of the records in the mask [B] to exactly zero, infinities and NaN included."""


class Dense(Use):
    """Gradients held as they are, [B, *shape]."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = gradients

    def dense(self) -> Tensor:
        return self._gradients

    def squared_norms(self) -> Tensor:
        return self._flat().square().sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        return (c @ self._flat()).reshape(self._gradients.shape[1:])

    def zero(self, records: Tensor) -> None:
        self._gradients = _zeroed(self._gradients, records)

    def _flat(self) -> Tensor:
        return self._gradients.reshape(len(self._gradients), -1)


class OuterProducts(Use):
    """v^i = Σ_t g_t^i ⊗ x_t^i over T positions: a matrix that acts on x. x is [B, T, d], g is [B, T, p]."""

    def __init__(self, x: Tensor, g: Tensor) -> None:
        self._x = x
        self._g = g
        self._gradients: Tensor | None = None

    def dense(self) -> Tensor:
        if self._gradients is None:
            self._gradients = torch.bmm(self._g.transpose(1, 2), self._x)
        return self._gradients

    def squared_norms(self) -> Tensor:
        positions, d, p = self._x.shape[1], self._x.shape[2], self._g.shape[2]
        if positions == 1:
            return self._x.square().sum((1, 2)) * self._g.square().sum((1, 2))
        if 2 * positions**2 < d * p:
            gram_x = torch.bmm(self._x, self._x.transpose(1, 2))
            gram_g = torch.bmm(self._g, self._g.transpose(1, 2))
            return (gram_x * gram_g).sum((1, 2)).clamp(min=0)
        return self.dense().square().sum((1, 2))

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self._gradients is not None:
            return Dense(self._gradients).weighted_sum(c)
        weighted = self._g * c[:, None, None]
        return weighted.flatten(0, 1).T @ self._x.flatten(0, 1)

    def zero(self, records: Tensor) -> None:
        self._x = _zeroed(self._x, records)
        self._g = _zeroed(self._g, records)
        self._gradients = None


class Rows(Use):
    """An embedding table's gradients: row index_t^i receives g_t^i. index is [B, T], g is [B, T, d]."""

    def __init__(self, index: Tensor, g: Tensor, rows: int) -> None:
        self._index = index
        self._g = g
        self._rows = rows

    def dense(self) -> Tensor:
        table = self._g.new_zeros(len(self._g), self._rows, self._g.shape[2])
        return table.scatter_add_(1, self._index[..., None].expand_as(self._g), self._g)

    def squared_norms(self) -> Tensor:
        same_row = self._index[:, :, None] == self._index[:, None, :]
        gram = torch.bmm(self._g, self._g.transpose(1, 2))
        return torch.where(same_row, gram, 0).sum((1, 2)).clamp(min=0)

    def weighted_sum(self, c: Tensor) -> Tensor:
        table = self._g.new_zeros(self._rows, self._g.shape[2])
        return table.index_add_(0, self._index.flatten(), (self._g * c[:, None, None]).flatten(0, 1))

    def zero(self, records: Tensor) -> None:
        self._g = _zeroed(self._g, records)


@dataclass(frozen=True)
class Call:
    """One call of a torch function in which parameters meet data.

    Attributes:
        x: the data input; inside the model of one record.
        parameters: by role, such as weight and bias; None where absent.
        run: x [B, ...] and the detached parameters -> output [B, ...].
        uses: x [B, ...] and output gradient [B, ...] -> the `Use` of each role.
    """

    x: Tensor
    parameters: dict[str, Tensor | None]
    run: Callable[..., Tensor]
    uses: Callable[[Tensor, Tensor], dict[str, Use]]


Rule = Callable[..., Call | None]
RULES: dict[Callable[..., Any], Rule] = {}


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Registers a rule for torch functions. It takes their arguments and returns a `Call`, or None to decline."""

    def register(function_rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function_rule))
        return function_rule

    return register


@rule(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    def uses(x: Tensor, g: Tensor) -> dict[str, Use]:
        x, g = _positions(x), _positions(g)
        return {"weight": OuterProducts(x, g), "bias": Dense(g.sum(1))}

    return Call(input, {"weight": weight, "bias": bias}, F.linear, uses)


@rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    if max_norm is not None or scale_grad_by_freq:
        return None

    def uses(x: Tensor, g: Tensor) -> dict[str, Use]:
        index, g = x.reshape(len(x), -1), _positions(g)
        if padding_idx is not None:
            g = torch.where((index == padding_idx % len(weight))[..., None], 0, g)
        return {"weight": Rows(index, g, len(weight))}

    return Call(input, {"weight": weight}, lambda x, weight: F.embedding(x, weight), uses)


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Call | None:
    space = weight.dim() - 2
    stride, dilation = _tuple(stride, space), _tuple(dilation, space)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(r % 2 for r in reach):
            return None
        padding = tuple(r // 2 for r in reach)
    padding = (0,) * space if isinstance(padding, str) else _tuple(padding, space)
    geometry = (stride, padding, dilation, False, (0,) * space, groups)

    def images(x: Tensor) -> Tensor:
        """[B, N, C, *space], with the N images that one record may hold."""
        return x[:, None] if x.dim() == space + 2 else x

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.convolution(images(x).flatten(0, 1), weight, bias, *geometry)
        return y.unflatten(0, images(x).shape[:2]).reshape(*x.shape[: x.dim() - space - 1], *y.shape[1:])

    def uses(x: Tensor, g: Tensor) -> dict[str, Use]:
        empty = weight.detach().to(x.dtype)

        def of_one(x: Tensor, g: Tensor) -> Tensor:
            return torch.ops.aten.convolution_backward(g, x, empty, None, *geometry, (False, True, False))[1]

        x, g = images(x), images(g)
        sums = g.sum((1, *range(3, g.dim())))
        return {"weight": Dense(torch.func.vmap(of_one)(x, g)), "bias": Dense(sums)}

    return Call(input, {"weight": weight, "bias": bias}, run, uses)


def _positions(x: Tensor) -> Tensor:
    """[B, ..., d] -> [B, T, d]."""
    return x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])


def _tuple(value: int | tuple[int, ...], length: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * length if len(values) == 1 else values


def _zeroed(x: Tensor, records: Tensor) -> Tensor:
    return torch.where(records.reshape(-1, *(1,) * (x.dim() - 1)), 0, x)
