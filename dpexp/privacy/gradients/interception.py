"""Intercepts every torch function that a trainable parameter enters, under vmap over records."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import EMBEDDING_BAGS, PACK_PADDED_SEQUENCE, is_batched, no_torch_functions, version_of
from dpexp.privacy.gradients.branches import QUESTIONS, Node, answer, sees_behind
from dpexp.privacy.gradients.derived_parameters import Derived, inner
from dpexp.privacy.gradients.index_checks import INDEXED, clamped
from dpexp.privacy.gradients.intercepted import Captured, Copied, Record, Stepped, attention, detached
from dpexp.privacy.gradients.layer_gradients import DenseGradient, outer_products
from dpexp.privacy.gradients.layer_rules import RULES, LayerCall
from dpexp.privacy.gradients.recurrent import CELLS, unrolled
from dpexp.privacy.gradients.rewritten import EXTREMES, REWRITTEN, Extreme, multi_head_attention
from dpexp.privacy.gradients.torch_functions import (
    BATCH_NORMS,
    OPERATORS,
    Refusing,
    is_torchs,
    leaves_of,
    packet,
    refuse_mixing,
)


class Capture(Refusing):
    """While active, gradients reach no parameter; during the backward pass `record` is told of each parameter's
    per-example gradients instead.

    Args:
        derived: what is computed from parameters alone.
        anchor: [B] zeros that require gradients, batched by vmap: it marks every intercepted output as one
            that belongs to a record and that gradients must flow back to.

    Attributes:
        in_range: of each call with indices, whether they were in range (0-d, of each record).
    """

    def __init__(self, derived: Derived, anchor: Tensor, record: Record) -> None:
        super().__init__()
        self._derived = derived
        self.anchor = anchor
        self.record = record
        self._copies: dict[int, Tensor] = {}
        self._met: list[tuple[Tensor, int]] = []
        self.in_range: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._intercept(func, types, args, kwargs, leaves_of((args, kwargs) if kwargs else args))
        except Exception as error:
            self.error = error
            raise

    def _intercept(self, func: Callable[..., Any], types: Any, args: tuple, kwargs: dict, given: list[Any]) -> Any:
        if (indexing := _known(func)) in INDEXED:
            safe = clamped(indexing, args, kwargs)
            if safe is not None:
                args, kwargs, in_range = safe
                self.in_range.append(in_range)
        if _is_ordinary[func] and func not in RULES and all(map(_is_data, given)):
            return func(*args, **kwargs)
        refuse_mixing(func, args, kwargs)
        if any(type(leaf) not in _PLAIN and sees_behind(leaf) for leaf in given):
            raise RuntimeError("a tensor of a class of its own would see those of all records.")
        if func in _OF_AUTOGRAD:
            found = func(inner(args[0]))
            return Node() if func == _GRAD_FN and found is not None else found
        if func in _TEXTS and is_batched(args[0]):
            raise RuntimeError("a tensor's text would show those of all records.")
        if func in QUESTIONS:
            return answer(func, args[0], self.anchor)
        if func is Tensor.__contains__:
            with self:
                return bool((args[1] == args[0]).any())  # as it does itself, unseen
        if func in _BACKWARD:
            raise RuntimeError(f"{func.__name__} inside training_step needs a backward pass of each record alone.")
        if func is Tensor.__setitem__ and _fills_where_true(*args):
            x, mask, value = args
            return func(x, ..., x.masked_fill(mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), value))
        if func in _SHAPED and kwargs.get("output_size") is None and _counts(args, kwargs):
            raise RuntimeError(f"what {func.__name__} returns may be differently shaped for each record.")
        if _generator(func, args, kwargs) not in (None, torch.default_generator):
            raise RuntimeError("a generator of one's own would draw for a record by its place among others.")
        known = _known(func)
        if known in RULES:
            call = RULES[known](*args, **kwargs)
            if call is not None and self._fits(call):
                if func in _INDEXING:
                    self.met((args, kwargs))
                return Captured.apply(self.anchor, self.with_copies(call.input), call, self.record)
        if known in CELLS and self._steps_through(args):
            with self:
                return unrolled(CELLS[known], self._steps, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                attended = multi_head_attention(*args, **kwargs)
            if attended is not None:
                return attended
        computed = any(map(self._is_computed, (*args, *kwargs.values()))) if known in _EMBEDDINGS else False
        if computed and _PADDING.intersection(_named(known, args, kwargs)):
            # vmap's own rule makes one table of all records', in which it no longer knows the padding.
            raise RuntimeError("an embedding with padding_idx, of a weight that is computed, runs record by record.")
        of_all = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and _takes_gradients(args[0])
        if (
            known in _MISTAKEN
            or (of_all and known in _MISTAKEN_OF_ALL)
            or (known is _CHUNKED and kwargs.get("options") is not None)
        ):
            raise RuntimeError(f"PyTorch's vmap gets {known.__name__} wrong.")
        if of_all and known in EXTREMES:
            return Extreme.apply(args[0], EXTREMES[known])
        if known is F.scaled_dot_product_attention:
            return attention(*self.with_copies(args), **self.with_copies(kwargs))
        watched = super().__torch_function__
        found = self._derived.once(lambda func, args, kwargs: watched(func, types, args, kwargs), func, args, kwargs)
        if found is not None:
            return found[0]
        if known in REWRITTEN:
            with self:
                result = REWRITTEN[known](self._derived.holds, *args, **kwargs)
            if result is not None:
                self.met((args, kwargs))
                return result
        return super().__torch_function__(func, types, self.with_copies(args), self.with_copies(kwargs))

    def met(self, value: Any) -> None:
        """Notes tensors that PyTorch might have kept for the backward pass, and the engine has not."""
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor):
                self._met.append((inner(leaf), version_of(inner(leaf))))

    def refuse_changes(self) -> None:
        """Raises RuntimeError: such a tensor was modified in place afterwards, which PyTorch might refuse."""
        if any(version_of(tensor) != version for tensor, version in self._met):
            raise RuntimeError("what a function was given is modified in place after it was used.")

    def _fits(self, call: LayerCall) -> bool:
        """A rule serves parameters, or what is computed from them alone, at least one of them trainable, that meet
        data."""
        given = [p for p in call.parameters.values() if p is not None]
        fits = any(map(self._derived.holds, given)) and not any(
            is_batched(p) or p.is_complex() or (p.requires_grad and not self._derived.holds(p)) for p in given
        )
        if fits:
            for p in given:
                self._derived.use(p)
        return fits

    @staticmethod
    def _is_computed(table: Any) -> bool:
        """Not one that is frozen and the same for all records, nor an index."""
        if not isinstance(table, Tensor) or not table.is_floating_point():
            return False
        return table.requires_grad or not table.is_leaf or is_batched(table)

    def _steps_through(self, args: tuple) -> bool:
        """Not packed sequences, nor weights that are not the same for all records."""
        weights, hx = args[2], args[1]
        if not isinstance(weights, list) or (isinstance(hx, Tensor) and hx.dim() != 3):
            return False
        has_biases, layers, sides = args[3], args[4], 1 + bool(args[7])
        per = 4 if has_biases else 2
        return len(weights) in (layers * sides * per, layers * sides * (per + 1)) and not any(map(is_batched, weights))

    def _steps(
        self, p: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, cell: Any, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        def on_gradient(states: Tensor, gates: Tensor, records: int) -> None:
            dtype = torch.promote_types(torch.float32, weight.dtype)
            x, g = (t.reshape(records, -1, t.shape[-1]).to(dtype) for t in (states, gates))
            if weight.requires_grad:
                self.record(weight, outer_products(x, g))
            if bias is not None and bias.requires_grad:
                self.record(bias, DenseGradient(g.sum(1)))

        h, c = self.with_copies((h, c))
        self._derived.use(weight)
        self._derived.use(bias)
        with no_torch_functions():
            return Stepped.apply(self.anchor, p, h, c, weight.detach(), detached(bias), cell, reverse, on_gradient)

    def with_copies(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not torch.is_grad_enabled() or not self._derived.holds(value):
                return value
            if id(value) not in self._copies:
                self._derived.use(value)
                self._copies[id(value)] = Copied.apply(self.anchor, value.detach(), partial(self.record, value))
            return self._copies[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(self.with_copies, value))
        if type(value) is dict:
            return {key: self.with_copies(item) for key, item in value.items()}
        return value


# Under vmap a tensor does not say by itself what it would say without.
_OF_AUTOGRAD = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_NO_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis)}
_PLAIN = {Tensor, torch.nn.Parameter, *_NO_TENSORS}
_INDEXING = {Tensor.__getitem__, torch.index_select, Tensor.index_select}
_TEXTS = {Tensor.__repr__, Tensor.__format__}
_BACKWARD = {
    Tensor.backward, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad,
    Tensor.requires_grad_, torch.autograd.grad, torch.autograd.backward,
}  # fmt: skip


# What torch.export makes calls functions of torch by these names, with the same arguments.
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


def _known(func: Any) -> Any:
    """By the name that rules have for it."""
    return _EXPORTED.get(packet(func), func)


# Found by comparing, in PyTorch 2.13, all operators that its tests know, together and one by one.
_MISTAKEN = {
    torch.index_fill,
    Tensor.index_fill,  # an index out of range, or a negative one, writes to other records
    torch.select_scatter,
    Tensor.select_scatter,
    torch.as_strided_scatter,
    Tensor.as_strided_scatter,
    torch.segment_reduce,  # writes beside its memory
    torch.linalg.lstsq,  # one matrix without full rank empties the residuals of all
    torch.quantize_per_tensor,  # the scale of the first record is taken for that of all
    torch.quantize_per_tensor_dynamic,
    torch.quantize_per_channel,
}
_MISTAKEN_OF_ALL = {torch.median, Tensor.median, torch.nanmedian, Tensor.nanmedian}  # without a dimension
_CHUNKED = getattr(F, "linear_cross_entropy", None)  # asks inside whether a gradient is wanted, which vmap hides

# vmap finds out afterwards, and only if they differ.
_SHAPED = {torch.repeat_interleave, Tensor.repeat_interleave, PACK_PADDED_SEQUENCE}

_EMBEDDINGS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}
_PADDING = {"padding_idx", "scale_grad_by_freq"}


class _Ordinary(dict[Callable[..., Any], bool]):
    """Whether a function is PyTorch's, and of no interest where no parameter enters it."""

    def __missing__(self, func: Callable[..., Any]) -> bool:
        self[func] = is_torchs(func) and not isinstance(func, OPERATORS) and func not in _SPECIAL
        return self[func]


_is_ordinary = _Ordinary()


def _is_data(leaf: Any) -> bool:
    """Whether an argument is a record's, or the same for all and no gradient flows through it."""
    if type(leaf) is Tensor:
        return is_batched(leaf) or not leaf.requires_grad
    return type(leaf) in _NO_TENSORS


def _fills_where_true(x: Tensor, index: Any, value: Any) -> bool:
    """Whether x[index] = value sets one number where a mask is true, for which vmap has no rule."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0
    return is_mask and index.shape == x.shape[: index.dim()] and not (isinstance(value, Tensor) and value.dim())


def _counts(args: tuple, kwargs: dict) -> bool:
    """Whether a record says how often its rows are repeated, or how long it is: the first argument if there is but one,
    else one of the others."""
    others = (*args[1:], *kwargs.values()) or args
    return any(isinstance(value, Tensor) and is_batched(value) for value in others)


def _takes_gradients(tensor: Tensor) -> bool:
    """Of each record."""
    return is_batched(tensor) and inner(tensor).requires_grad and tensor.dim() > 0


def _generator(func: Any, args: tuple, kwargs: dict) -> torch.Generator | None:
    """That a function is given to draw from."""
    given = (*args, *kwargs.values()) if isinstance(func, OPERATORS) else (kwargs.get("generator"),)
    return next((value for value in given if isinstance(value, torch.Generator)), None)


_SPECIAL: set[Any] = {
    *BATCH_NORMS, *_OF_AUTOGRAD, *_TEXTS, *QUESTIONS, Tensor.__contains__, Tensor.__setitem__, *_BACKWARD, *CELLS,
    *REWRITTEN, F.multi_head_attention_forward, F.scaled_dot_product_attention, *_EMBEDDINGS, *_MISTAKEN,
    *_MISTAKEN_OF_ALL, *EXTREMES, _CHUNKED, *_SHAPED,
}  # fmt: skip


def _named(func: Any, args: tuple, kwargs: dict) -> set[str]:
    """The names of arguments that were given, and are neither None nor False."""
    order = {
        F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
        F.embedding_bag: ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode",
                          "sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
        torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq"),
    }.get(func, ())  # fmt: skip
    given = dict(zip(order, args, strict=False)) | kwargs
    without = func is torch.embedding and given.get("padding_idx") == -1
    named = {name for name in _PADDING if given.get(name) is not None and given[name] is not False}
    named -= {"padding_idx"} if without else set()
    return named | ({"padding_idx"} if func is torch.embedding_bag else set())
