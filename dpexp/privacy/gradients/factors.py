"""Reads the factors of per-example gradients off the graph of one record.

Autograd computes the gradient of a matrix by `mm`, Σ_t g_t ⊗ x_t over positions, that of a convolution by
`convolution_backward`, and that of an embedding by adding rows to a table. Such an operator's inputs, of all records,
give norms and weighted sums without the gradients themselves. What is not recognized is stored for each record.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpexp._torch_compat import TO_COPY, UNSAFE_INDEX_PUT, UNSAFE_VIEW, inputs_of
from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    LayerGradient,
    RowsGradient,
    merge,
    outer_products,
    worth_storing,
)
from dpexp.privacy.gradients.products import in_full, product

aten = torch.ops.aten


@dataclass
class Use:
    """One of the terms that a parameter's gradient is the sum of.

    Attributes:
        factors: nodes of the graph of one record.
        gradient: the factors of B records, [B, ...] -> the term's `LayerGradient`.
    """

    factors: list[fx.Node]
    gradient: Callable[..., LayerGradient]

    @classmethod
    def stored(cls, node: fx.Node) -> "Use":
        return cls([node], DenseGradient)


def uses_of(node: fx.Node, of_records: set[fx.Node]) -> list[Use]:
    """The terms of the gradient `node`; `of_records`: nodes that depend on the record."""
    uses = [_use(leaf, views, shape_of(node), of_records) for leaf, views in _terms(node, [])]
    return [Use.stored(node)] if None in uses else uses  # type: ignore[return-value]


def shape_of(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def _terms(node: fx.Node, views: list[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Its summands, each with the views and casts that follow it, the last one first."""
    args = inputs_of(node)
    if node.target is aten.add.Tensor and not node.kwargs:
        summands = [a for a in args if isinstance(a, fx.Node) and shape_of(a) == shape_of(node)]
        if len(summands) == 2:
            return [term for a in summands for term in _terms(a, views)]
    if node.target in _VIEWS:
        return _terms(args[0], [*views, node])
    return [(node, views)]


_CASTS = {aten.clone.default, TO_COPY}
_VIEWS = _CASTS | {
    aten.t.default, aten.view.default, UNSAFE_VIEW, aten.reshape.default, aten.transpose.int,
    aten.permute.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default,
}  # fmt: skip


def _is_transposed(matrix: torch.Size, views: list[fx.Node], shape: torch.Size) -> bool | None:
    """Whether views turn a matrix into its transpose; False: they keep the order of its entries; None: neither."""
    t = torch.empty(matrix, device="meta")
    try:
        for node in reversed(views):
            t = t if node.target in _CASTS else node.target(t, *node.args[1:])  # type: ignore[operator]
    except RuntimeError:
        return None
    if t.shape != shape:
        return None
    if t.is_contiguous():
        return False
    return True if t.dim() == 2 and t.T.is_contiguous() and t.T.shape == matrix[-2:] else None


def _use(leaf: fx.Node, views: list[fx.Node], shape: torch.Size, of_records: set[fx.Node]) -> Use | None:
    if leaf.target in (aten.cat.default, aten.slice_backward.default) and not views:
        return _blocks_of_rows(leaf, shape, of_records)
    read = _READERS.get(leaf.target)
    found = None if read is None else read(leaf, views, shape)
    return found if found is None or not of_records.isdisjoint(found.factors) else None


def _mm(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    """[p, T] @ [T, d]."""
    g, x = inputs_of(leaf)
    turned = _is_transposed(shape_of(leaf), views, shape)
    if turned is None:
        return None
    if turned:
        return Use([x, g], lambda x, g: outer_products(g.transpose(1, 2), x))
    return Use([g, x], lambda g, x: outer_products(x, g.transpose(1, 2)))


def _bmm(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    """[1, p, T] @ [1, T, d]."""
    g, x = inputs_of(leaf)
    if shape_of(leaf)[0] != 1:
        return None
    return _products_of_batches(g, x, _is_transposed(shape_of(leaf), views, shape))


def _sum(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    """The sum over n of [n, p, T] @ [n, T, d]."""
    of, dims = inputs_of(leaf)[:2]
    if not (isinstance(of, fx.Node) and of.target is aten.bmm.default and [*dims] == [0]):
        return None
    g, x = inputs_of(of)
    return _products_of_batches(g, x, _is_transposed(shape_of(leaf)[-2:], views, shape))


def _products_of_batches(g: Any, x: Any, turned: bool | None) -> Use | None:
    if turned is None:
        return None

    def gradient(g: Tensor, x: Tensor) -> LayerGradient:
        rows, columns = x.flatten(1, 2), g.transpose(2, 3).flatten(1, 2)
        return outer_products(columns, rows) if turned else outer_products(rows, columns)

    return Use([g, x], gradient)


def _embedding(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    g, index, rows, padding, scale_by_frequency = inputs_of(leaf)
    if views or scale_by_frequency:
        return None

    def gradient(g: Tensor, index: Tensor) -> LayerGradient:
        index, g = index.reshape(len(index), -1), g.reshape(len(g), -1, g.shape[-1])
        g = g if padding < 0 else torch.where((index == padding)[..., None], 0, g)
        return EmbeddingGradient(index, g, rows)

    return Use([g, index], gradient)


def _added_rows(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    """Rows that are added to a table of zeros, as by the backward pass of table[index]."""
    if leaf.target is aten.index_add.default:
        table, dim, index, g = inputs_of(leaf)[:4]
        fits = dim == 0 and not leaf.kwargs
    else:
        table, (index, *others), g, *accumulate = inputs_of(leaf)
        fits = not others and accumulate[:1] == [True]
    zeros = _is_zero(table)
    if views or not fits or not zeros or len(shape) != 2 or index.meta["val"].dtype == torch.bool:
        return None

    def gradient(g: Tensor, index: Tensor) -> LayerGradient:
        index = torch.where(index < 0, index + shape[0], index)
        return EmbeddingGradient(index.reshape(len(index), -1), g.reshape(len(g), -1, shape[1]), shape[0])

    return Use([g, index], gradient)


def _is_zero(node: fx.Node) -> bool:
    full = node.target is aten.full.default and inputs_of(node)[1] == 0
    return full or node.target in (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def _convolution(leaf: fx.Node, views: list[fx.Node], shape: torch.Size) -> Use | None:
    backward, k = inputs_of(leaf)
    if backward.target is not aten.convolution_backward.default or k != 1:
        return None
    g, x, weight, _, *geometry, _ = inputs_of(backward)
    if any(node.target not in _CASTS for node in views) or shape_of(weight) != shape:
        return None
    return Use([g, x], lambda g, x: _convolution_gradient(g, x, shape, tuple(geometry)))


def _convolution_gradient(g: Tensor, x: Tensor, shape: torch.Size, geometry: tuple) -> LayerGradient:
    """
    Args:
        g: [B, N, p, *space].
        x: [B, N, d, *space], with the N images that one record may have.
        geometry: stride, padding, dilation, transposed, output_padding, groups.
    """
    *_, transposed, _, groups = geometry
    space = len(shape) - 2

    def weight_gradient(x: Tensor, g: Tensor) -> Tensor:
        x, g = in_full(x), in_full(g)
        weight = x.new_empty(()).expand(shape)
        return aten.convolution_backward(g, x, weight, None, *geometry, (False, True, False))[1]

    def gradients(x: Tensor, g: Tensor) -> Tensor:
        # A convolution of B groups, as vmap makes of it, is slow on a GPU.
        by_products = x.device.type == "cuda"
        return products_of_windows(x, g, shape, geometry) if by_products else torch.func.vmap(weight_gradient)(x, g)

    positions, p, d = g.shape[1] * math.prod(g.shape[3:]), shape[0], math.prod(shape[1:])
    gram = space == 2 and groups == 1 and not transposed and positions * (d + p) < d * p
    if gram or (positions < 64 and not worth_storing(math.prod(shape))):
        terms = math.prod(x.shape[1:2] + x.shape[3:]) if transposed else positions
        unfold = partial(windows, positions=g.shape[3:], kernel=shape[2:], geometry=geometry) if gram else None
        return ConvolutionGradient(x, g, weight_gradient, gradients, unfold, shape, terms)
    return DenseGradient(gradients(x, g))


def windows(x: Tensor, positions: torch.Size, kernel: torch.Size, geometry: tuple) -> Tensor:
    """[B, N, d, *space] -> [B, T, k·d], the inputs of each of T output positions, with channels last.

    F.unfold would copy single entries, into a layout in which products are slow (measured: 2 to 20 times as long).
    """
    space = len(kernel)
    stride, padding, dilation = ((*v,) * space if len(v) == 1 else (*v,) for v in geometry[:3])
    around = [amount for one in reversed(padding) for amount in (one, one)]
    found = nn.functional.pad(x.flatten(0, 1).movedim(1, -1), (0, 0, *around)).contiguous()
    for i in range(space):
        found = found.unfold(1 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
        found = found.narrow(1 + i, 0, positions[i])  # a transposed convolution may have more
    return found.movedim(1 + space, -1).reshape(len(x), -1, math.prod(kernel) * x.shape[2])


def products_of_windows(x: Tensor, g: Tensor, shape: torch.Size, geometry: tuple) -> Tensor:
    """[B, *shape]: the weight gradients of a convolution, as products of its inputs' windows and of g.

    In a transposed convolution the output's gradient has the windows. For the arguments see `_convolution_gradient`.
    """
    *_, transposed, _, groups = geometry
    x, g = (g, x) if transposed else (x, g)
    columns = windows(x, g.shape[3:], shape[2:], geometry)
    B, T, k = len(x), columns.shape[1], math.prod(shape[2:])
    columns = columns.view(B, T, k, groups, -1).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)  # [B·groups, T, k·d]
    rows = g.flatten(3).transpose(1, 2).reshape(B * groups, -1, T)  # [B·groups, p, T]
    found = product(rows, columns)
    return found.view(B, shape[0], *shape[2:], shape[1]).movedim(-1, 2).contiguous()


def _blocks_of_rows(leaf: fx.Node, shape: torch.Size, of_records: set[fx.Node]) -> Use | None:
    """Gradients of parts of a parameter, as of a packed weight, whose parts are used by themselves."""
    if leaf.target is aten.cat.default:
        parts, *dim = inputs_of(leaf)
        ends = [*accumulate(shape_of(part)[0] for part in parts)]
        blocks = [*zip([0, *ends], ends, parts, strict=False)]
    else:
        part, _, *dim, start, end, step = inputs_of(leaf)
        blocks = [(start, min(end, shape[0]), part)] if step == 1 and 0 <= start < end else []
    uses = [(a, b, uses_of(part, of_records)) for a, b, part in blocks if not _is_zero(part)]
    if dim not in ([], [0]) or not uses or any(use.gradient is DenseGradient for *_, of in uses for use in of):
        return None

    def gradient(*found: Tensor) -> LayerGradient:
        factors = iter(found)
        merged = [
            (start, end, merge([use.gradient(*islice(factors, len(use.factors))) for use in of]))
            for start, end, of in uses
        ]
        return RowsGradient(merged, shape)

    return Use([factor for *_, of in uses for use in of for factor in use.factors], gradient)


_READERS: dict[Any, Callable[[fx.Node, list[fx.Node], torch.Size], Use | None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.sum.dim_IntList: _sum,
    aten.embedding_dense_backward.default: _embedding,
    aten.index_put.default: _added_rows,
    UNSAFE_INDEX_PUT: _added_rows,
    aten.index_add.default: _added_rows,
    operator.getitem: _convolution,
}
