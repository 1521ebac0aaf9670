"""Per-example gradients of one parameter: squared norms and weighted sums, mostly without storing B gradients.

A parameter that is used several times (a layer called twice, tied weights, recurrence) has several `LayerGradient`s.
`merge` makes one of them, whose norms include every cross term.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dpexp.privacy.gradients.norms import (
    embedding_norms,
    norms,
    outer_product_norms,
    row_chunks,
    squared_norms,
    tied_norms,
)
from dpexp.privacy.gradients.products import ADDING, UNIT, full_type, in_full, least_exact, product


class LayerGradient(ABC):
    """The gradients v^i of B records with respect to one parameter.

    Their norms are found in two steps, so that those of all vectors of a chunk are finished together.
    """

    @abstractmethod
    def vectors(self) -> list[Tensor]:
        """Vectors [B, d], stored or factors, whose norms `squares` takes."""

    @abstractmethod
    def squares(self, *squared: Tensor) -> Tensor:
        """[B] in float64: ‖v^i‖², slightly enlarged where rounding could make it too small (see `norms`).

        Args:
            squared: [B] in float64, the squared norms of each of `vectors`.
        """

    def squared_norms(self) -> Tensor:
        """[B] in float64: see `squares`."""
        return self.squares(*squared_norms(self.vectors()))

    @abstractmethod
    def weighted_sum(self, c: Tensor) -> Tensor:
        """Σ_i c_i v^i, for c [B]; it has the parameter's shape."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """[B, *parameter.shape]."""

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces each stored factor of the gradients, indices included, by `change(factor)`."""
        for name, factor in vars(self).items():
            if isinstance(factor, Tensor):
                setattr(self, name, change(factor))

    def mask_out(self, records: Tensor) -> None:
        """Sets the gradients of the records in the mask [B] to exactly zero, infinities and NaN included."""

        def zeroed(factor: Tensor) -> Tensor:
            if not factor.is_floating_point():
                return factor
            return torch.where(records.reshape(-1, *(1,) * (factor.dim() - 1)), 0, factor)

        self.map_factors(zeroed)


class DenseGradient(LayerGradient):
    """Stored gradients, [B, *shape]."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = in_full(gradients)

    def vectors(self) -> list[Tensor]:
        return [self.flat()]

    def squares(self, *squared: Tensor) -> Tensor:
        return squared[0]

    def weighted_sum(self, c: Tensor) -> Tensor:
        return torch.mv(self.flat().T, c).view(self._gradients.shape[1:])

    def materialize(self) -> Tensor:
        return self._gradients

    def flat(self) -> Tensor:
        """[B, d]."""
        return self._gradients.reshape(len(self._gradients), -1)


class OuterProductGradient(LayerGradient):
    """v^i = Σ_t g_t^i ⊗ x_t^i over T positions, the gradient of a matrix [p, d]. x is [B, T, d], g is [B, T, p].

    The squared norm is ‖g‖²‖x‖² at T = 1, and Σ_ts (x_t·x_s)(g_t·g_s) otherwise, from Gram matrices ("ghost norm").
    """

    def __init__(self, x: Tensor, g: Tensor) -> None:
        self.x = x
        self.g = g

    def vectors(self) -> list[Tensor]:
        return [self.x.flatten(1), self.g.flatten(1)]

    def squares(self, *squared: Tensor) -> Tensor:
        x_squared, g_squared = squared
        if self.x.shape[1] <= 1:
            both, dtype = x_squared * g_squared, least_exact(self.x, self.g)
            return both * (1 + 2.1 * ADDING[dtype]) if dtype == torch.bfloat16 else both
        return outer_product_norms(self.x, self.g, x_squared, g_squared).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        x, g = self.x, self.g
        if x.shape[2] < g.shape[2]:
            x = x * c[:, None, None]
        else:
            g = g * c[:, None, None]
        return product(g.flatten(0, 1).T, x.flatten(0, 1))

    def materialize(self) -> Tensor:
        return product(self.g.transpose(1, 2), self.x)


_SMALL = 3 * 2**16  # entries of one record's gradient


def outer_products(x: Tensor, g: Tensor) -> LayerGradient:
    """Σ_t g_t^i ⊗ x_t^i for x [B, T, d] and g [B, T, p]: materialized if that takes less memory than x and g.

    Source: Bu et al. 2023, "Differentially private optimization on large model at small cost". Small gradients may take
    up to twice as much memory, since they are faster materialized (measured).
    """
    products = OuterProductGradient(x, g)
    _, T, d = x.shape
    p = g.shape[2]
    limit = T * (d + p) * (2 if d * p < _SMALL else 1)
    return DenseGradient(products.materialize()) if T > 1 and d * p <= limit else products


class EmbeddingGradient(LayerGradient):
    """An embedding table's gradients: row index_t^i receives g_t^i. index is [B, T], g is [B, T, d].

    Norms come from a comparison of all pairs of positions, [T, T], unless the table itself is smaller.
    """

    def __init__(self, index: Tensor, g: Tensor, num_rows: int) -> None:
        self.index = index
        self.g = g
        self.num_rows = num_rows
        self._table: Tensor | None = None
        _, T, d = g.shape
        if num_rows * d < 3 * T * T:  # measured
            self._table = self.materialize()

    def vectors(self) -> list[Tensor]:
        return [] if self._table is None else [self._table.flatten(1)]

    def squares(self, *squared: Tensor) -> Tensor:
        if self._table is not None:
            return squared[0]
        return embedding_norms(self.index[:, :, None] == self.index[:, None, :], self.g).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self._table is not None:
            return DenseGradient(self._table).weighted_sum(c)
        rows = (self.g * c[:, None, None]).flatten(0, 1)
        return rows.new_zeros(self.num_rows, rows.shape[1]).index_add_(0, self.index.flatten(), rows)

    def materialize(self) -> Tensor:
        if self._table is not None:
            return self._table
        g = in_full(self.g)
        table = g.new_zeros(len(g), self.num_rows, g.shape[2])
        return table.scatter_add_(1, self.index[..., None].expand_as(g), g)


class TiedGradient(LayerGradient):
    """v^i = E^i + O^i, the gradients of a table [V, d] as an embedding and as the matrix of the head.

    ‖E + O‖² is the sum of both squares and of twice the inner product of E and O (`norms.tied_norms`): no position's
    row is made a one-hot vector, and no gradient is stored.
    """

    def __init__(self, table: EmbeddingGradient, product: OuterProductGradient) -> None:
        self._table, self._product = table, product

    def vectors(self) -> list[Tensor]:
        return [*self._table.vectors(), *self._product.vectors()]

    def squares(self, *squared: Tensor) -> Tensor:
        count, table, product = len(self._table.vectors()), self._table, self._product
        E_squared, O_squared = table.squares(*squared[:count]), product.squares(*squared[count:])
        return tied_norms(table.index, table.g, product.x, product.g, E_squared + O_squared).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self._product.weighted_sum(c).add_(self._table.weighted_sum(c))

    def materialize(self) -> Tensor:
        return self._product.materialize() + self._table.materialize()

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> None:
        self._table.map_factors(change)
        self._product.map_factors(change)


class ConvolutionGradient(LayerGradient):
    """A convolution's weight gradients, never stored for all records at once.

    Norms come from Gram matrices of the unfolded input where that takes fewer multiplications, else from the gradients
    themselves, a few records at a time. The weighted sum is the gradient of the weighted chunk.

    Args:
        images: [B, N, d, *space], with the N images that one record may have.
        g: [B, N, p, *space].
        weight_gradient: images [N, …] and output gradients [N, …] -> the weight's gradient summed over them.
        gradients: `images` and `g` of some records -> the weight's gradient of each.
        unfold: images -> [B, T, d·k], the inputs of each of the T output positions; None: no Gram matrices.
        weight: shape [p, d, *kernel].
        positions: number of terms that each entry of the weight's gradient sums.
    """

    def __init__(
        self,
        images: Tensor,
        g: Tensor,
        weight_gradient: Callable[[Tensor, Tensor], Tensor],
        gradients: Callable[[Tensor, Tensor], Tensor],
        unfold: Callable[[Tensor], Tensor] | None,
        weight: torch.Size,
        positions: int,
    ) -> None:
        self._images = images
        self._g = g
        self._weight_gradient, self._gradients = weight_gradient, gradients
        self._unfold = unfold
        self._size, self._kernel, self._positions = math.prod(weight), math.prod(weight[2:]), positions

    def vectors(self) -> list[Tensor]:
        if self._unfold is not None:
            self._unfolded = self._unfold(self._images)
            return [self._unfolded.flatten(1), self._g.flatten(1)]
        return [self._images.flatten(1), self._g.flatten(1)]

    def squares(self, *squared: Tensor) -> Tensor:
        x_squared, g_squared = squared
        if self._unfold is not None:
            g = self._g.flatten(3).transpose(2, 3).flatten(1, 2)
            return outer_product_norms(self._unfolded, g, x_squared, g_squared).square()
        records = max(1, (_MATERIALIZED_ENTRIES if self._g.device.type == "cpu" else _ON_GPU) // self._size)
        chunks = zip(row_chunks(self._images, records), row_chunks(self._g, records), strict=True)
        found = torch.cat([norms(self._gradients(x, g)) for x, g in chunks])
        # The gradients that are summed later are computed otherwise, so that the rounding of both counts (`norms`, 3
        # and 4): Σ_t ‖g_t‖ ‖x_t‖ <= ‖g‖ ‖x‖ √k, since each input is part of at most k positions.
        length = (x_squared * g_squared * self._kernel).sqrt()
        return (found + 2 * self._positions * UNIT[full_type(self._g.dtype)] * length).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        weighted = self._g * c.reshape(-1, *(1,) * (self._g.dim() - 1))
        return self._weight_gradient(self._images.flatten(0, 1), weighted.flatten(0, 1))

    def materialize(self) -> Tensor:
        return self._gradients(self._images, self._g)


class RowsGradient(LayerGradient):
    """Gradients of disjoint blocks of a parameter's rows, as of a weight that is split; other rows have none.

    Args:
        blocks: (first row, row after the last, gradients of these rows).
        shape: of the parameter.
    """

    def __init__(self, blocks: list[tuple[int, int, LayerGradient]], shape: torch.Size) -> None:
        self.blocks, self._shape = sorted(blocks, key=lambda block: block[0]), shape

    @property
    def disjoint(self) -> bool:
        return all(end <= start for (_, end, _), (start, _, _) in pairwise(self.blocks))

    def vectors(self) -> list[Tensor]:
        return [vector for *_, gradient in self.blocks for vector in gradient.vectors()]

    def squares(self, *squared: Tensor) -> Tensor:
        given = iter(squared)
        each = [gradient.squares(*(next(given) for _ in gradient.vectors())) for *_, gradient in self.blocks]
        return torch.stack(each).sum(0)

    def weighted_sum(self, c: Tensor) -> Tensor:
        each = [(start, end, gradient.weighted_sum(c)) for start, end, gradient in self.blocks]
        total = each[0][2].new_zeros(self._shape)
        for start, end, one in each:
            total[start:end] = one.view(end - start, *self._shape[1:])
        return total

    def materialize(self) -> Tensor:
        each = [gradient.materialize() for *_, gradient in self.blocks]
        found = each[0].new_zeros(len(each[0]), *self._shape)
        for (start, end, _), one in zip(self.blocks, each, strict=True):
            rows = found[:, start:end]
            rows += one.view(rows.shape)
        return found

    def map_factors(self, change: Callable[[Tensor], Tensor]) -> None:
        for *_, gradient in self.blocks:
            gradient.map_factors(change)


def merge(gradients: Sequence[LayerGradient]) -> LayerGradient:
    """The sum of a parameter's gradients by several uses."""
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(gradient, EmbeddingGradient) for gradient in gradients):
        tables: Sequence[EmbeddingGradient] = gradients  # type: ignore[assignment]
        index, g = torch.cat([table.index for table in tables], 1), torch.cat([table.g for table in tables], 1)
        return EmbeddingGradient(index, g, tables[0].num_rows)
    if all(isinstance(gradient, RowsGradient) for gradient in gradients):
        together = RowsGradient([block for g in gradients for block in g.blocks], gradients[0]._shape)  # type: ignore[attr-defined]
        if together.disjoint:
            return together
    products = [gradient for gradient in gradients if isinstance(gradient, OuterProductGradient)]
    sizes = {(product.x.shape[2], product.g.shape[2]) for product in products}
    if len(sizes) == 1:  # not so if a matrix is reshaped before one of its uses
        product = outer_products(torch.cat([one.x for one in products], 1), torch.cat([one.g for one in products], 1))
        others = [gradient for gradient in gradients if not isinstance(gradient, OuterProductGradient)]
        if not others:
            return product
        table = merge(others)
        both = isinstance(product, OuterProductGradient) and isinstance(table, EmbeddingGradient)
        if both and sizes == {(table.g.shape[2], table.num_rows)}:  # type: ignore[attr-defined]
            return TiedGradient(table, product)  # type: ignore[arg-type]
    return DenseGradient(sum(gradient.materialize().flatten(1) for gradient in gradients))  # type: ignore[arg-type]


_MATERIALIZED_ENTRIES, _ON_GPU = 2**19, 2**27  # of all gradients that are stored at once for their norms


def worth_storing(entries: int) -> bool:
    """Whether one record's gradient is so small that it is stored, not computed twice with an allowance for rounding.

    This depends on one record alone: its contribution must not depend on how many others there are.
    """
    return entries <= _MATERIALIZED_ENTRIES // 512
