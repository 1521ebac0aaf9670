"""Intercepts every torch function whose arguments include a trainable parameter, under vmap over records."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import (
    EMBEDDING_BAGS,
    PACK_PADDED_SEQUENCE,
    batched,
    has_own_dispatch,
    is_batched,
    level_of,
    no_torch_functions,
    version_of,
)
from dpexp.privacy.gradients.batched_functions import (
    BatchedLayerCall,
    BatchedRecurrence,
    PerRecordCopy,
    RecordGradient,
    attention,
    binary_cross_entropy,
    ctc_loss,
)
from dpexp.privacy.gradients.branches import CONSTANT_WRITTEN, DATA_READS, HiddenGradFn, read_value
from dpexp.privacy.gradients.derived_parameters import DerivedParameters, unbatched_fully
from dpexp.privacy.gradients.inner_gradients import CopiesNeeded, gradient, is_inner, require_gradient
from dpexp.privacy.gradients.layer_gradients import DenseGradient, outer_products
from dpexp.privacy.gradients.layer_rules import RULES, LayerCall
from dpexp.privacy.gradients.packed import PackedSequences
from dpexp.privacy.gradients.recurrent import CELLS, recurrent_layer
from dpexp.privacy.gradients.rewritten import EXTREMA, REWRITES, Extremum, multi_head_attention
from dpexp.privacy.gradients.selected import Places, Selected, selection, selects
from dpexp.privacy.gradients.torch_functions import (
    BATCH_NORMS,
    EMPTY,
    INDEXED,
    MEDIANS,
    OPERATORS,
    WRONG_UNDER_VMAP,
    MixingRefused,
    clamp_indices,
    filled,
    generator_of,
    has_padding,
    is_from_torch,
    leaves_of,
    refuse_mixing,
    without_overload,
)


class ConstantWritten(RuntimeError):
    """A record's values are written to a tensor that is the same for all records."""


class Interceptor(MixingRefused):
    """While active, no gradient reaches a parameter; the backward pass records per-example gradients instead.

    Args:
        anchor: [B] zeros that require gradients, batched by vmap. Every intercepted output depends on it, so that it is
            batched and receives gradients.
        record: is called in the backward pass with a parameter and its per-example gradients by one use.
        copies: use no layer rules, but a copy of the parameters per record, so that gradients can be differentiated.
        own_constants: tensors that the step creates by torch.zeros and the like are made once per record, not shared.

    Attributes:
        in_range: for each call with indices, whether all were in range (0-d, of each record).
    """

    def __init__(
        self,
        derived: DerivedParameters,
        anchor: Tensor,
        record: RecordGradient,
        copies: bool = False,
        own_constants: bool = False,
    ) -> None:
        super().__init__()
        self._derived = derived
        self.anchor = anchor
        self.record = record
        self._all_copied = copies
        self._own_constants = own_constants
        self._packed: PackedSequences | None = None
        self._strides_differ = False
        self._copies: dict[int, Tensor] = {}
        self._watched: list[tuple[Tensor, int]] = []
        self.in_range: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._intercept(func, types, args, kwargs, leaves_of((args, kwargs) if kwargs else args))
        except Exception as error:
            self.error = error
            if not self._own_constants and re.search(CONSTANT_WRITTEN, str(error)):
                raise ConstantWritten(str(error)) from error
            raise

    def _intercept(self, func: Callable[..., Any], types: Any, args: tuple, kwargs: dict, leaves: list[Any]) -> Any:
        if any(type(leaf) in (Selected, Places) for leaf in leaves) or selects(func, args, kwargs):
            with self:
                return selection(func, args, kwargs, partial(setattr, self, "error"))
        if (indexing := _public_name(func)) in INDEXED:
            safe = clamp_indices(indexing, args, kwargs)
            if safe is not None:
                args, kwargs, in_range = safe
                self.in_range.append(in_range)
        if "memory_format" in kwargs:  # of four dimensions; a tensor of all records has five. It changes no value.
            kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
            self._strides_differ = True
        if self._strides_differ and func in _OF_STRIDES:
            raise RuntimeError(f"{func.__name__} depends on the memory_format that the step asks for.")
        if func is PACK_PADDED_SEQUENCE and is_batched(args[1]):
            if self._all_copied:
                raise RuntimeError("a gradient of a packed sequence is differentiated again, one record at a time.")
            self._packed = self._packed or PackedSequences(self._recurrence, self.in_range)
        if self._packed is not None:
            with self:
                result = self._packed.run(_public_name(func), args, kwargs, leaves)
            if result is not None:
                return result
        if _is_ordinary[func] and func not in RULES and all(map(_is_data, leaves)):
            return func(*args, **kwargs)
        refuse_mixing(func, args, kwargs)
        if any(type(leaf) not in _PLAIN and has_own_dispatch(leaf) for leaf in leaves):
            raise RuntimeError("a tensor subclass with a dispatch of its own would see the tensors of all records.")
        if func == _DATA and is_batched(args[0]):
            return args[0].detach()
        if func in _OF_AUTOGRAD:
            found = func(unbatched_fully(args[0]))
            return HiddenGradFn() if func == _GRAD_FN and found is not None else found
        if func in _TEXTS and is_batched(args[0]):
            raise RuntimeError("a tensor's text would show the values of all records.")
        if func in DATA_READS:
            return read_value(func, args[0], self.anchor)
        if func is Tensor.__contains__:
            with self:
                return bool((args[1] == args[0]).any())  # as PyTorch implements it, but intercepted
        if func is Tensor.requires_grad_:
            level = None if self._derived.of_module(args[0]) else level_of(self.anchor)
            return require_gradient(args[0], kwargs.get("requires_grad", (*args, True)[1]), level)
        if func is torch.autograd.grad:
            if kwargs.get("create_graph", (*args, *[False] * 5)[4]) and not self._all_copied:
                raise CopiesNeeded("a gradient is differentiated again.")
            return gradient(level_of(self.anchor), *args, **kwargs)
        if func is torch.tensor and isinstance(data := (*args, kwargs.get("data"))[0], Tensor):
            with self:
                made = data.detach().clone().to(kwargs.get("device"), kwargs.get("dtype"))
                return made.requires_grad_() if kwargs.get("requires_grad") else made
        if func is torch.empty or (self._own_constants and func in _CONSTANTS):
            one, records = func(*args, **kwargs), len(unbatched_fully(self.anchor))
            if not (one.requires_grad or is_batched(one)):
                one = filled(one) if func is torch.empty else one
                return batched(one.expand(records, *one.shape).clone(), 0, level_of(self.anchor))
            return one
        if func in _BACKWARD:
            raise RuntimeError(f"{func.__name__} inside training_step needs a backward pass for each record.")
        if func is Tensor.__setitem__ and _fills_where_true(*args):
            x, mask, value = args
            return func(x, ..., x.masked_fill(mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), value))
        if func in _SHAPED and kwargs.get("output_size") is None and _size_depends_on_data(args, kwargs):
            raise RuntimeError(f"what {func.__name__} returns may be differently shaped for each record.")
        if generator_of(func, args, kwargs) not in (None, torch.default_generator):
            raise RuntimeError("a generator other than torch's default one draws by a record's place in the chunk.")
        known = _public_name(func)
        offsets = (*args[2:3], kwargs.get("offsets"))[0] if known is F.embedding_bag else None
        if isinstance(offsets, Tensor) and offsets.numel():
            self.in_range.append(offsets[0] == 0)
        if known in RULES and not self._all_copied:
            call = RULES[known](*args, **kwargs)
            if call is not None and self._applies(call):
                if func in _INDEXING:
                    self.watch_inputs((args, kwargs))
                return BatchedLayerCall.apply(self.anchor, self.with_copies(call.input), call, self.record)
        if known in CELLS and not self._all_copied and self._is_supported_recurrence(args):
            with self:
                return recurrent_layer(CELLS[known], self._recurrence, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                attended = multi_head_attention(*args, **kwargs)
            if attended is not None:
                return attended
        computed = any(map(self._is_computed, (*args, *kwargs.values()))) if known in _EMBEDDINGS else False
        if computed and has_padding(known, args, kwargs):
            # vmap's own rule joins the tables of all records, so that padding_idx no longer fits.
            raise RuntimeError("an embedding with padding_idx, of a weight that is computed, runs record by record.")
        of_all = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and _takes_gradients(args[0])
        if (
            known in WRONG_UNDER_VMAP
            or (of_all and known in MEDIANS)
            or (known is _CHUNKED and kwargs.get("options") is not None)
        ):
            raise RuntimeError(f"PyTorch's vmap gets {known.__name__} wrong.")
        if of_all and known in EXTREMA:
            return Extremum.apply(args[0], EXTREMA[known])
        if known is F.ctc_loss and (found := ctc_loss(*args, **kwargs)) is not None:
            self.in_range.append(found[1])
            return found[0]
        if known is F.binary_cross_entropy:
            loss, in_range = binary_cross_entropy(*self.with_copies(args), **self.with_copies(kwargs))
            self.in_range.append(in_range)
            return loss
        if known is F.scaled_dot_product_attention and not self._all_copied:
            return attention(*self.with_copies(args), **self.with_copies(kwargs))
        call_checked = super().__torch_function__
        derived = self._derived.compute(
            lambda func, args, kwargs: call_checked(func, types, args, kwargs), func, args, kwargs
        )
        if derived is not None:
            return derived[0]
        if known in REWRITES:
            with self:
                result = REWRITES[known](self._derived.contains, *args, **kwargs)
            if result is not None:
                self.watch_inputs((args, kwargs))
                return result
        return super().__torch_function__(func, types, self.with_copies(args), self.with_copies(kwargs))

    def watch_inputs(self, value: Any) -> None:
        """Watches tensors that PyTorch would have saved for the backward pass, for writes in place."""
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor):
                self._watched.append((unbatched_fully(leaf), version_of(unbatched_fully(leaf))))

    def refuse_modified_inputs(self) -> None:
        """Raises RuntimeError if a watched tensor was written to, which PyTorch might refuse as well."""
        if any(version_of(tensor) != version for tensor, version in self._watched):
            raise RuntimeError("an input of a function is modified in place after the function used it.")

    def _applies(self, call: LayerCall) -> bool:
        """Whether a rule's parameters are trainable ones, derived ones or constants, and not all constants."""
        parameters = [p for p in call.parameters.values() if p is not None]
        applies = any(map(self._derived.contains, parameters)) and not any(
            is_batched(p) or p.is_complex() or (p.requires_grad and not self._derived.contains(p)) for p in parameters
        )
        if applies:
            for p in parameters:
                self._derived.mark_used(p)
        return applies

    @staticmethod
    def _is_computed(table: Any) -> bool:
        """Whether an argument is a table that is computed, or trained; not an index, nor a frozen table."""
        if not isinstance(table, Tensor) or not table.is_floating_point():
            return False
        return table.requires_grad or not table.is_leaf or is_batched(table)

    @staticmethod
    def _is_supported_recurrence(args: tuple) -> bool:
        """Not for packed sequences, nor for weights that differ between records."""
        weights, hx = args[2], args[1]
        if not isinstance(weights, list) or (isinstance(hx, Tensor) and hx.dim() != 3):
            return False
        has_biases, layers, directions = args[3], args[4], 1 + bool(args[7])
        each = 4 if has_biases else 2
        counts = (layers * directions * each, layers * directions * (each + 1))
        return len(weights) in counts and not any(map(is_batched, weights))

    def _recurrence(
        self, p: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, cell: Any, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        trains = weight.requires_grad, bias is not None and bias.requires_grad  # the step may change that later

        def on_gradient(states: Tensor, gates: Tensor, records: int) -> None:
            if is_inner():
                return
            dtype = torch.promote_types(torch.float32, weight.dtype)
            x, g = (t.reshape(records, -1, t.shape[-1]).to(dtype) for t in (states, gates))
            if trains[0]:
                self.record(weight, outer_products(x, g))
            if bias is not None and trains[1]:
                self.record(bias, DenseGradient(g.sum(1)))

        h, c = self.with_copies((h, c))
        self._derived.mark_used(weight)
        self._derived.mark_used(bias)
        constants = weight.detach(), None if bias is None else bias.detach()
        with no_torch_functions():
            return BatchedRecurrence.apply(self.anchor, p, h, c, *constants, cell, reverse, on_gradient)

    def with_copies(self, value: Any) -> Any:
        """A nested value in which each trainable or derived parameter is replaced by one copy per record."""
        if isinstance(value, Tensor):
            if not torch.is_grad_enabled() or not self._derived.contains(value):
                return value
            if id(value) not in self._copies:
                self._derived.mark_used(value)
                self._copies[id(value)] = PerRecordCopy.apply(self.anchor, value.detach(), partial(self.record, value))
            return self._copies[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(self.with_copies, value))
        if type(value) is dict:
            return {key: self.with_copies(item) for key, item in value.items()}
        return value


# Under vmap, a tensor's own answer would be that of a tensor without gradients.
_OF_AUTOGRAD = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
_OF_STRIDES = {torch.as_strided, Tensor.as_strided, Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_NO_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis)}
_PLAIN = {Tensor, torch.nn.Parameter, *_NO_TENSORS}
_INDEXING = {Tensor.__getitem__, torch.index_select, Tensor.index_select}
_TEXTS = {Tensor.__repr__, Tensor.__format__}
_BACKWARD = {
    Tensor.backward, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad,
    torch.autograd.backward,
}  # fmt: skip


# Models made by torch.export call these operators, with the arguments of the public functions.
_EXPORTED: dict[Any, Any] = {
    **{
        getattr(torch.ops.aten, function.__name__): function
        for function in (
            F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
            F.layer_norm, F.group_norm, F.rms_norm, F.scaled_dot_product_attention, *CELLS,
            torch.embedding, torch.embedding_bag, torch.select_scatter, torch.index_fill, torch.matmul,
            torch.mm, torch.addmm,
        )
    },
} | dict.fromkeys(EMBEDDING_BAGS, torch.embedding_bag)  # fmt: skip


def _public_name(func: Any) -> Any:
    """The public function that an operator implements; other functions as they are."""
    return _EXPORTED.get(without_overload(func), func)


_CHUNKED = getattr(F, "linear_cross_entropy", None)  # reads requires_grad inside, which vmap hides

# vmap notices only after the call, and only if the shapes differ.
_SHAPED = {torch.repeat_interleave, Tensor.repeat_interleave, PACK_PADDED_SEQUENCE}

_EMBEDDINGS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}


class _Ordinary(dict[Callable[..., Any], bool]):
    """Whether a function is PyTorch's and needs no treatment unless a parameter is among its arguments."""

    def __missing__(self, func: Callable[..., Any]) -> bool:
        self[func] = is_from_torch(func) and not isinstance(func, OPERATORS) and func not in _SPECIAL
        return self[func]


_is_ordinary = _Ordinary()


def _is_data(leaf: Any) -> bool:
    """Whether an argument is a record's, or the same for all records without requiring gradients."""
    if type(leaf) is Tensor:
        return is_batched(leaf) or not leaf.requires_grad
    return type(leaf) in _NO_TENSORS


def _fills_where_true(x: Tensor, index: Any, value: Any) -> bool:
    """Whether x[index] = value writes one number where a mask is true, for which vmap has no rule."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0
    return is_mask and index.shape == x.shape[: index.dim()] and not (isinstance(value, Tensor) and value.dim())


def _size_depends_on_data(args: tuple, kwargs: dict) -> bool:
    """Whether the counts or lengths of a call are a record's: all arguments but the first, or the only one."""
    others = (*args[1:], *kwargs.values()) or args
    return any(isinstance(value, Tensor) and is_batched(value) for value in others)


def _takes_gradients(tensor: Tensor) -> bool:
    """Whether it is a record's tensor with dimensions, and gradients flow through it."""
    return is_batched(tensor) and unbatched_fully(tensor).requires_grad and tensor.dim() > 0


_CONSTANTS = {
    torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like, Tensor.new_zeros,
    Tensor.new_ones, Tensor.new_full,
}  # fmt: skip
_SPECIAL: set[Any] = {
    _DATA, *_OF_STRIDES, *BATCH_NORMS, *_OF_AUTOGRAD, *_TEXTS, *DATA_READS, Tensor.__contains__, Tensor.__setitem__,
    *_BACKWARD, *CELLS, Tensor.requires_grad_, torch.autograd.grad, *EMPTY, *_CONSTANTS, torch.tensor, F.ctc_loss,
    F.binary_cross_entropy, *REWRITES, F.multi_head_attention_forward, F.scaled_dot_product_attention, *_EMBEDDINGS,
    *WRONG_UNDER_VMAP, *MEDIANS, *EXTREMA, _CHUNKED, *_SHAPED,
}  # fmt: skip
