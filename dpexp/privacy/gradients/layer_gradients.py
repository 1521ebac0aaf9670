"""How one use of a parameter answers the two operations that a mechanism needs, for a chunk of B records at once.

A parameter used several times (a layer called twice, tied weights, recurrence) has several uses; `merged` makes
them one, whose norms include every cross term.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpexp.privacy.gradients.norms import UNIT, gram_norms, norms, pieces, row_norms

_SMALL = 3 * 2**16  # numbers of a record's gradient


class LayerGradient(ABC):
    """The gradients v^i of B records with respect to one parameter, through one use of it.

    Attributes:
        allowance: [B] in float64, how much of the norms is allowed for rounding; known with them. None: nothing much.
    """

    rounding_allowance: Tensor | None = None

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """[B] in float64: ‖v^i‖², or a little more, so that no rounding makes it too small (see `rounding`)."""

    @abstractmethod
    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        """Adds Σ_i c_i v^i, for c [B], to `total`, which has the parameter's shape."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """[B, *parameter.shape]."""

    @abstractmethod
    def in_float64(self, rows: Tensor) -> "LayerGradient":
        """Those of some records, from factors of float64."""

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Puts another tensor in the place of each factor of the gradients, of indices too."""
        for name, factor in vars(self).items():
            if isinstance(factor, Tensor):
                setattr(self, name, change(factor))

    def mask_out(self, rows: Tensor) -> None:
        """Sets the gradients of the records in the mask [B] to exactly zero, infinities and NaN included."""

        def zeroed(factor: Tensor) -> Tensor:
            if not factor.is_floating_point():
                return factor
            return torch.where(rows.reshape(-1, *(1,) * (factor.dim() - 1)), 0, factor)

        self.change(zeroed)


class DenseGradient(LayerGradient):
    """Gradients held as they are, [B, *shape]."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = gradients

    def squared_norms(self) -> Tensor:
        return norms(self._gradients).square()

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        total.view(-1).addmv_(self.flat().T, c)

    def materialize(self) -> Tensor:
        return self._gradients

    def in_float64(self, rows: Tensor) -> "DenseGradient":
        return DenseGradient(self._gradients[rows].double())

    def flat(self) -> Tensor:
        """[B, d]."""
        return self._gradients.reshape(len(self._gradients), -1)


class OuterProductGradient(LayerGradient):
    """v^i = Σ_t g_t^i ⊗ x_t^i over T positions, the gradient of a matrix [p, d]. x is [B, T, d], g is [B, T, p].

    Norms are ‖g‖²‖x‖² at T = 1, and Σ_ts (x_t·x_s)(g_t·g_s) otherwise, from Gram matrices.
    """

    def __init__(self, x: Tensor, g: Tensor) -> None:
        self.x = x
        self.g = g

    def squared_norms(self) -> Tensor:
        if self.x.shape[1] == 1:
            return (norms(self.x) * norms(self.g)).square()
        found, self.rounding_allowance = gram_norms(self.x, self.g)
        return found.square()

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        x, g = self.x, self.g
        if x.shape[2] < g.shape[2]:
            x = x * c[:, None, None]
        else:
            g = g * c[:, None, None]
        total.addmm_(g.flatten(0, 1).T, x.flatten(0, 1))

    def materialize(self) -> Tensor:
        return torch.bmm(self.g.transpose(1, 2), self.x)

    def in_float64(self, rows: Tensor) -> "OuterProductGradient":
        return _HighPrecisionOuterProduct(self.x[rows].double(), self.g[rows].double())


class _HighPrecisionOuterProduct(OuterProductGradient):
    """Of which a few at a time are held for their norms: squares of what all but cancels would be lost in rounding
    a Gram matrix, in float64 too."""

    def squared_norms(self) -> Tensor:
        _, T, d = self.x.shape
        records = max(1, _HELD // (d * self.g.shape[2]))
        parts = zip(pieces(self.x, records), pieces(self.g, records), strict=True)
        found = torch.cat([norms(torch.bmm(g.transpose(1, 2), x)) for x, g in parts])
        return (found + 2 * T * UNIT[self.x.dtype] * norms(self.x) * norms(self.g)).square()  # as in Convolved


def outer_products(x: Tensor, g: Tensor) -> LayerGradient:
    """Σ_t g_t^i ⊗ x_t^i for x [B, T, d] and g [B, T, p]: itself, which serves norms and weighted sum alike, while it is
    smaller than x and g; else these (Bu et al. 2023, "Differentially private optimization on large model at small
    cost"). A small one may be up to twice as large: to hold it is faster (measured)."""
    products = OuterProductGradient(x, g)
    _, T, d = x.shape
    p = g.shape[2]
    most = T * (d + p) * (2 if d * p < _SMALL else 1)
    return DenseGradient(products.materialize()) if T > 1 and d * p <= most else products


class EmbeddingGradient(LayerGradient):
    """An embedding table's gradients: row index_t^i receives g_t^i. index is [B, T], g is [B, T, d].

    Norms come from a comparison of all positions, [T, T], unless the table itself is smaller.
    """

    def __init__(self, index: Tensor, g: Tensor, rows: int) -> None:
        self.index = index
        self.g = g
        self.rows = rows
        self._table: Tensor | None = None
        _, T, d = g.shape
        if rows * d < 3 * T * T:  # measured
            self._table = self.materialize()

    def squared_norms(self) -> Tensor:
        if self._table is not None:
            return DenseGradient(self._table).squared_norms()
        found, self.rounding_allowance = row_norms(self.index[:, :, None] == self.index[:, None, :], self.g)
        return found.square()

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        if self._table is not None:
            return DenseGradient(self._table).add_weighted_sum(c, total)
        total.index_add_(0, self.index.flatten(), (self.g * c[:, None, None]).flatten(0, 1))

    def materialize(self) -> Tensor:
        if self._table is not None:
            return self._table
        table = self.g.new_zeros(len(self.g), self.rows, self.g.shape[2])
        return table.scatter_add_(1, self.index[..., None].expand_as(self.g), self.g)

    def as_products(self) -> OuterProductGradient:
        chosen = self.index[..., None] == torch.arange(self.rows, device=self.index.device)
        return OuterProductGradient(self.g, chosen.to(self.g.dtype))

    def in_float64(self, rows: Tensor) -> "EmbeddingGradient":
        return _HighPrecisionEmbedding(self.index[rows], self.g[rows].double(), self.rows)


class _HighPrecisionEmbedding(EmbeddingGradient):
    """Of which the rows are held for their norms, each as often as it is written to."""

    def squared_norms(self) -> Tensor:
        same = (self.index[:, :, None] == self.index[:, None, :]).to(self.g.dtype)
        found = norms(torch.bmm(same, self.g) / same.sum(2, keepdim=True).sqrt())
        return (found + 2 * same.shape[1] ** 1.5 * UNIT[self.g.dtype] * norms(self.g)).square()


class ConvolutionGradient(LayerGradient):
    """A convolution's weight gradients, never held for all records at once.

    Norms come from Gram matrices of the unfolded input where that takes fewer multiplications, else from the
    gradients themselves, a few records at a time. The weighted sum is the gradient of the weighted chunk.

    Args:
        images: [B, N, d, *space], with the N images that one record may hold; g: [B, N, p, *space].
        weight_gradient: images [N, …] and output gradients [N, …] -> the weight's gradient summed over them.
        unfold: images -> [B, T, d·k], the inputs of each of the T output positions; None forbids Gram matrices.
        weight: [p, d, *kernel]; positions: how many terms each number of its gradient is the sum of.
    """

    def __init__(
        self,
        images: Tensor,
        g: Tensor,
        weight_gradient: Callable[[Tensor, Tensor], Tensor],
        unfold: Callable[[Tensor], Tensor] | None,
        weight: torch.Size,
        positions: int,
    ) -> None:
        self._images = images
        self._g = g
        self._weight_gradient = weight_gradient
        self._unfold = unfold
        self._weight = weight
        self._size, self._kernel, self._positions = math.prod(weight), math.prod(weight[2:]), positions

    def squared_norms(self) -> Tensor:
        if self._unfold is not None:
            x, g = self._unfold(self._images), self._g.flatten(3).transpose(2, 3).flatten(1, 2)
            found, self.rounding_allowance = gram_norms(x, g)
            return found.square()
        records = max(1, _HELD // self._size)
        parts = zip(pieces(self._images, records), pieces(self._g, records), strict=True)
        found = torch.cat([norms(self._gradients(x, g)) for x, g in parts])
        # These are not the gradients that are summed later, so that the rounding of both counts (`rounding`, 3 and 4):
        # Σ_t ‖g_t‖ ‖x_t‖ <= ‖g‖ ‖x‖ √k, since each input is part of at most k positions.
        most = norms(self._g) * norms(self._images) * self._kernel**0.5
        self.rounding_allowance = 2 * self._positions * UNIT[self._g.dtype] * most
        return (found + self.rounding_allowance).square()

    def add_weighted_sum(self, c: Tensor, total: Tensor) -> None:
        weighted = self._g * c.reshape(-1, *(1,) * (self._g.dim() - 1))
        total += self._weight_gradient(self._images.flatten(0, 1), weighted.flatten(0, 1))

    def materialize(self) -> Tensor:
        return self._gradients(self._images, self._g)

    def in_float64(self, rows: Tensor) -> "ConvolutionGradient":
        x, g = self._images[rows].double(), self._g[rows].double()
        return ConvolutionGradient(x, g, self._weight_gradient, None, self._weight, self._positions)

    def _gradients(self, images: Tensor, g: Tensor) -> Tensor:
        return torch.func.vmap(self._weight_gradient)(images, g)


def merged(uses: Sequence[LayerGradient]) -> LayerGradient:
    """A parameter's uses as one: their per-record gradients add up."""
    if len(uses) == 1:
        return uses[0]
    if all(isinstance(use, EmbeddingGradient) for use in uses):
        rows: Sequence[EmbeddingGradient] = uses  # type: ignore[assignment]
        return EmbeddingGradient(
            torch.cat([use.index for use in rows], 1), torch.cat([use.g for use in rows], 1), rows[0].rows
        )
    if all(isinstance(use, EmbeddingGradient | OuterProductGradient) for use in uses):
        products = [use.as_products() if isinstance(use, EmbeddingGradient) else use for use in uses]
        return outer_products(
            torch.cat([use.x for use in products], 1),  # type: ignore[attr-defined]
            torch.cat([use.g for use in products], 1),  # type: ignore[attr-defined]
        )
    return DenseGradient(sum(use.materialize() for use in uses))  # type: ignore[arg-type]


_HELD = 2**19  # numbers


def held(numbers: int) -> bool:
    """Whether a record's gradient is so small that it is better held than computed twice, which also saves an allowance
    for rounding. This is asked of one record: what becomes of it must not depend on how many others there are."""
    return numbers <= _HELD // 512
