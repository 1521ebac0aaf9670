"""Lifts the graph of one record over the records of a chunk, by torch.func.vmap."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dpexp._torch_compat import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    batch_dim,
    batched,
    is_batched,
    level_of,
    unbatched,
    vmap_quiet,
)
from dpexp.privacy.gradients.compiled import computed_once
from dpexp.privacy.gradients.factors import shape_of, uses_of
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient, merge
from dpexp.privacy.gradients.one_record import OneRecord
from dpexp.privacy.gradients.operators import NotTraceable, dependents
from dpexp.privacy.gradients.per_example import ChunkGradients
from dpexp.privacy.gradients.products import full_type

aten = torch.ops.aten


class Lifted:
    """The per-example gradients of a chunk, by the graph of one record.

    Attributes:
        stored: names of the parameters whose gradients are stored for each record.
        unchecked_index: an operator with an index of records whose range is not known; None: there is none.
        smallest_range: the smallest number of rows or classes that the records' indices select from; None: no indices.
    """

    def __init__(self, one: OneRecord) -> None:
        self._values = one.values
        graph, num_state = fx.Graph(), len(one.inputs.names())
        returned: Any = graph.graph_copy(one.graph.graph, {})
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        of_records = dependents(graph, inputs[num_state:])
        _draw_for_each(graph, of_records)
        _check_rules(of_records)
        self.smallest_range, in_range = _check_ranges(graph, of_records)
        self.unchecked_index = _unchecked_index(graph, of_records)
        loss, *others = returned
        self._uses = {
            name: uses_of(node, of_records) for name, node in zip(one.used, others[: len(one.used)], strict=True)
        }
        self.stored = [name for name, uses in self._uses.items() if any(use.gradient is DenseGradient for use in uses)]
        factors = {node: None for uses in self._uses.values() for use in uses for node in use.factors}
        self._outputs = [loss, *in_range, *others[len(one.used) :], *factors]
        self._has_ranges = bool(in_range)
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = LIFTED.get(node.target, node.target)
        self._used = dict(zip(one.used, others, strict=False))
        self._run, self._run_dense = (
            _module(one, graph, outputs) for outputs in (self._outputs, [*self._outputs, *self._used.values()])
        )
        self._num_state = num_state

    def __call__(self, state: Sequence[Tensor], records: Sequence[Tensor]) -> ChunkGradients:
        """
        Args:
            state: parameters and buffers.
            records: tensors [B, ...].
        """
        return self._gradients(dict(zip(self._outputs, self._over(self._run, state, records), strict=True)))

    def with_dense(
        self, state: Sequence[Tensor], records: Sequence[Tensor]
    ) -> tuple[ChunkGradients, dict[str, Tensor]]:
        """The same, and from the same random numbers the stored gradients [B, ...] by name, which no factors give."""
        outputs = [*self._outputs, *self._used.values()]
        found = dict(zip(outputs, self._over(self._run_dense, state, records), strict=True))
        return self._gradients(found), {name: found[node] for name, node in self._used.items()}

    def _over(self, run: Any, state: Sequence[Tensor], records: Sequence[Tensor]) -> Sequence[Tensor]:
        in_dims = (*[None] * self._num_state, *[0] * len(records))
        with vmap_quiet():
            lifted = torch.func.vmap(lambda *inputs: tuple(run(*inputs)), in_dims, randomness="different")
            return lifted(*state, *records)

    def _gradients(self, found: dict[fx.Node, Tensor]) -> ChunkGradients:
        loss, *rest = self._outputs
        losses, start = computed_once(found[loss]), int(self._has_ranges)  # the first mark ends the backward pass
        in_range = found[rest[0]] if self._has_ranges else torch.ones_like(losses, dtype=torch.bool)
        gradients: dict[str, LayerGradient] = {
            name: merge([use.gradient(*(_cast(found[f], self._used[name]) for f in use.factors)) for use in uses])
            for name, uses in self._uses.items()
        }
        for key, node in zip(self._values, rest[start:], strict=False):
            gradients[key] = DenseGradient(found[node])
        return ChunkGradients(gradients, losses, in_range)


def _module(one: OneRecord, graph: fx.Graph, outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph that computes these outputs."""
    some, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    some.graph_copy(graph, copies)
    some.output([copies[node] for node in outputs])
    some.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(one.graph, some)


# Random operators that ignore their first argument's entries, and draw once if all records share it.
_OVERWRITING = {
    aten.normal_functional, aten.uniform, aten.exponential, aten.random, aten.geometric, aten.cauchy, aten.log_normal,
    aten.bernoulli,
}  # fmt: skip


def _draw_for_each(graph: fx.Graph, of_records: set[fx.Node]) -> None:
    """Gives random operators a first argument that differs between records, so that vmap draws for each."""
    *_, record = (node for node in graph.nodes if node.op == "placeholder")
    for node in [*graph.nodes]:
        ignores = getattr(node.target, "overloadpacket", None) in _OVERWRITING
        if ignores and node.target is not aten.bernoulli.default and node.args[0] not in of_records:
            like = node.args[0].meta["val"]
            with graph.inserting_before(node):
                own = graph.call_function(
                    aten.new_zeros.default, (record, [*like.shape]), {"dtype": like.dtype, "device": like.device}
                )
            own.meta = dict(node.args[0].meta)
            of_records.add(own)
            node.args = (own, *node.args[1:])


def _cast(factor: Tensor, gradient: fx.Node) -> Tensor:
    """A factor in the type in which gradients are summed, at least float32, or in bfloat16 if that is float32."""
    dtype = full_type(gradient.meta["val"].dtype)
    kept = not factor.is_floating_point() or (factor.dtype, dtype) == (torch.bfloat16, torch.float32)
    return factor if kept else factor.to(dtype)


# ---- operators that vmap gets wrong ----------------------------------------------------------------------------------

# Found by comparing all operators that PyTorch 2.13's own tests list, under vmap and one record at a time.
_WRONG = {
    "index_fill", "index_fill_",  # an index that is negative or out of range writes to other records
    "select_scatter", "as_strided_scatter", "as_strided",
    "segment_reduce",  # writes outside of its memory
    "linalg_lstsq",  # one matrix without full rank empties the residuals of all
    "quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel",  # the first record's scale for all
}  # fmt: skip
_WRONG_OVER_ALL = {aten.median.default, aten.nanmedian.default}


def _check_rules(of_records: set[fx.Node]) -> None:
    """Raises NotTraceable: vmap is wrong for an operator."""
    for node in of_records:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in _WRONG or node.target in _WRONG_OVER_ALL:
            raise NotTraceable(f"PyTorch's vmap gets {name} wrong")


# ---- indices and labels out of range ---------------------------------------------------------------------------------

Ranges = list[tuple[fx.Node, int, int, int | None]]  # (indices, low, high, a value that is always valid)


def _of_table(table: fx.Node, dim: int, index: fx.Node) -> Ranges:
    return [(index, 0, shape_of(table)[dim] if shape_of(table) else 1, None)]


def _of_image(x: fx.Node, dims: int, index: fx.Node) -> Ranges:
    return [(index, 0, math.prod(shape_of(x)[-dims:]), None)]


def _of_dimensions(x: fx.Node, indices: Sequence[fx.Node | None], *_: Any) -> Ranges:
    return [
        (index, -size, size, None)
        for index, size in zip(indices, shape_of(x), strict=False)
        if index is not None and index.meta["val"].dtype != torch.bool
    ]


_RANGES: dict[Any, Callable[..., Ranges]] = {
    aten.embedding.default: lambda table, index, *_: _of_table(table, 0, index),
    aten.gather.default: lambda x, dim, index, **_: _of_table(x, dim, index),
    aten.index_select.default: _of_table,
    aten.index.Tensor: _of_dimensions,
    aten.index_put.default: _of_dimensions,
    aten.index_add.default: lambda x, dim, index, *_, **__: _of_table(x, dim, index),
    aten.scatter.src: lambda x, dim, index, *_: _of_table(x, dim, index),
    aten.scatter.value: lambda x, dim, index, *_: _of_table(x, dim, index),
    aten.scatter_add.default: lambda x, dim, index, *_: _of_table(x, dim, index),
    aten.take.default: lambda x, index: [(index, -math.prod(shape_of(x)), math.prod(shape_of(x)), None)],
    # Compiled, the place of the largest value is negative where all of a padded window are -inf, and the backward pass
    # would write to the record before.
    aten.max_pool2d_with_indices_backward.default: lambda g, x, k, s, p, d, c, index: _of_image(x, 2, index),
    aten.max_pool3d_with_indices_backward.default: lambda g, x, k, s, p, d, c, index: _of_image(x, 3, index),
    aten.adaptive_max_pool2d_backward.default: lambda g, x, index: _of_image(x, 2, index),
    aten.adaptive_max_pool3d_backward.default: lambda g, x, index: _of_image(x, 3, index),
    aten.fractional_max_pool2d_backward.default: lambda g, x, k, size, index: _of_image(x, 2, index),
    aten.fractional_max_pool3d_backward.default: lambda g, x, k, size, index: _of_image(x, 3, index),
    aten.binary_cross_entropy.default: lambda x, y, *_: [(x, 0, 1, None), (y, 0, 1, None)],
    aten.nll_loss_forward.default: lambda x, y, w, reduction, ignored: [(y, 0, shape_of(x)[-1], ignored)],
    aten.nll_loss2d_forward.default: lambda x, y, w, reduction, ignored: [(y, 0, shape_of(x)[1], ignored)],
}


def _check_ranges(graph: fx.Graph, of_records: set[fx.Node]) -> tuple[int | None, list[fx.Node]]:
    """Replaces indices out of range by 0; returns the smallest range, and a node that says whether there were none.

    An operator would otherwise refuse all records of a chunk, or read memory outside of its table.
    """
    ranges: dict[fx.Node, set[tuple[int, int, int | None]]] = defaultdict(set)
    for node in graph.nodes:
        for index, low, high, ignored in (
            _RANGES[node.target](*node.args, **node.kwargs) if node.target in _RANGES else ()
        ):
            if index in of_records:
                ranges[index].add((low, high, ignored))
    valid: list[fx.Node] = []
    *_, last = (node for node in graph.nodes if node.op == "placeholder")

    def call(function: Any, *args: Any) -> fx.Node:
        of_records.add(node := graph.call_function(function, args))
        return node

    for index, limits_of_index in ranges.items():
        users = [*index.users]
        with graph.inserting_before((last if index.op == "placeholder" else index).next):
            fits = None
            upper = aten.le.Scalar if index.meta["val"].is_floating_point() else aten.lt.Scalar
            for low, high, ignored in sorted(limits_of_index, key=str):
                one = call(aten.logical_and.default, call(aten.ge.Scalar, index, low), call(upper, index, high))
                one = (
                    one if ignored is None else call(aten.logical_or.default, one, call(aten.eq.Scalar, index, ignored))
                )
                fits = one if fits is None else call(aten.logical_and.default, fits, one)
            safe = call(_CHECKED, fits, index, 0)
            valid.append(call(aten.all.default, fits))
        safe.meta = dict(index.meta)
        for user in users:
            user.replace_input_with(index, safe)
    while len(valid) > 1:
        valid[:2] = [call(aten.logical_and.default, valid[0], valid[1])]
    sizes = [high for limits in ranges.values() for _, high, _ in limits if high > 1]
    return min(sizes, default=None), valid


_CHECKED = aten.where.ScalarOther  # what gives indices in range


def _unchecked_index(graph: fx.Graph, of_records: set[fx.Node]) -> str | None:
    """The name of an operator with an index that depends on a record and was not checked. Its compiled code may write
    to another record, or end the process."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        for name, value in zip(names, node.args, strict=False):
            is_index = name in ("index", "indices") and isinstance(value, fx.Node) and value in of_records
            if is_index and value.target is not _CHECKED and node.target not in _RANGES:
                return str(node.target)
    return None


# ---- operators whose first dimension is a batch ----------------------------------------------------------------------


class Joined:
    """Runs an operator on all records at once by joining their batches, for which vmap has no rule or a slow one.

    Args:
        joined: the arguments whose first dimension is joined; if others differ between records, vmap's rule is used.
        spread: whether those that are the same for all records are copied for each; else vmap's rule is used.
        count: the position of an argument that counts the joined dimension.
    """

    def __init__(self, op: Any, joined: tuple, spread: bool = False, count: int | None = None) -> None:
        self._op, self._joined, self._spread, self._count = op, {*joined}, spread, count
        self.__name__ = f"joined_{op.__name__.replace('.', '_')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        tensors = {k: a for k, a in given.items() if isinstance(a, Tensor)}
        differ = {k: a for k, a in tensors.items() if is_batched(a)}
        fits = differ and differ.keys() <= self._joined and (self._spread or differ.keys() == self._joined)
        of_rows = self._op is aten.addmm.default and args[0].dim() > 1  # a bias for each row
        sums = self._op is _GROUP_NORM_BACKWARD and [*args[-1]] != [True, False, False]  # over all that is joined
        if not fits or of_rows or sums:
            return self._op(*args, **kwargs)
        one = next(iter(differ.values()))
        level, rows, count = level_of(one), unbatched(one).shape[batch_dim(one)], len(args[min(self._joined, key=str)])
        for k in tensors.keys() & self._joined:
            shared = k not in differ
            a = given[k][None] if shared else unbatched(given[k]).movedim(batch_dim(given[k]), 0)
            if k == "attn_mask":
                a = a.reshape(len(a), *(1,) * (5 - a.dim()), *a.shape[1:])
                if shared and a.shape[1] == 1:  # it is broadcast
                    given[k] = a[0]
                    continue
                a = a.expand(len(a), count, *a.shape[2:])
            joined = a.expand(rows, *a.shape[1:]).flatten(0, 1)
            given[k] = joined if self._count is None else joined.contiguous()
        if self._count is not None:
            given[self._count] *= rows
        found = self._op(*(given[k] for k in range(len(args))), **{k: given[k] for k in kwargs})
        each = found if isinstance(found, tuple) else (found,)
        split = tuple(None if t is None else batched(t.unflatten(0, (rows, -1)), 0, level) for t in each)
        return split if isinstance(found, tuple) else split[0]


_GROUP_NORM_BACKWARD = aten.native_group_norm_backward.default
# A view of memory that vmap has put in another order is a copy.
LIFTED: dict[Any, Any] = {aten.view.default: torch.reshape} | {
    op: Joined(op, *how)
    for op, *how in (
        (CPU_ATTENTION, (0, 1, 2, "attn_mask"), True),
        (CPU_ATTENTION_BACKWARD, (*range(6), "attn_mask"), True),
        (aten.addmm.default, (1,)),
        (aten.native_group_norm.default, (0,), False, 3),
        (_GROUP_NORM_BACKWARD, (0, 1, 2, 3), False, 5),  # of the input alone
    )
}
