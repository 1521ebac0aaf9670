"""The fallback for what cannot be computed for all records together: one module's forward, record by record.

Control flow that depends on data, packed sequences, operations that vmap does not know: the module in which they
occur is run in a loop, with a copy of its parameters for each record, whose gradients are the per-record gradients.
The rest of the model is not slowed.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.engine.capture import Capture, CopyTap, OnRecords
from dpexp.privacy.isolation import CHANGED, State


def culprit(error: BaseException, root: nn.Module, looped: set[str]) -> str | None:
    """The innermost module inside `root` in whose forward the error arose; outside of those that are looped already,
    so that where a loop fails the next module outwards is blamed. None: the root itself."""
    names = {id(module): name for name, module in root.named_modules() if name}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self"))) if frame.f_code.co_name == "forward" else None
        if name in looped:
            break
        found = name or found
    return found


@contextmanager
def looping(root: nn.Module, names: set[str], capture: Capture) -> Iterator[None]:
    """Meanwhile the named modules run record by record; what one record leaves behind is set back before the next."""
    modules = [root.get_submodule(name) for name in names]
    for module in modules:
        module.forward = _loop(root, module, capture)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _loop(root: nn.Module, module: nn.Module, capture: Capture) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            leaves, structure = tree_flatten((capture.with_copies(args), capture.with_copies(kwargs)))
            state = State(root)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shapes: list[Any] = []

        def one(tensors: list[Tensor], parameters: dict[str, Tensor]) -> list[Tensor]:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            args, kwargs = tree_unflatten(given, structure)
            patched = module.__dict__.pop("forward")
            try:
                result = torch.func.functional_call(module, parameters, args, kwargs)
            finally:
                module.forward = patched  # type: ignore[method-assign]
                state.restore()
            outputs, shape = tree_flatten(result)
            shapes[:] = [shape]
            return outputs

        parameters = {name: p for name, p in module.named_parameters() if capture.trains(p)}
        with torch._C.DisableTorchFunction():
            outputs = _Looped.apply(
                capture.anchor,
                one,
                list(parameters),
                capture.record,
                *parameters.values(),
                *(leaves[k] for k in places),
            )
        return tree_unflatten(list(outputs), shapes[0])

    return forward


class _Looped(OnRecords):
    """`one` on each record: tensors and parameters -> output tensors."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, anchor: Tensor, one: Any, names: list[str], record: Any, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        B, k = info.batch_size, len(names)
        copies = [CopyTap.apply(anchor, parameter, B, record).unbind(0) for parameter in tensors[:k]]
        before = [parameter.detach().clone() for parameter in tensors[:k]]  # no mode watches here
        given = [
            [t] * B if dim is None else t.movedim(dim, 0).unbind(0)
            for t, dim in zip(tensors[k:], in_dims[4 + k :], strict=True)
        ]
        each = [
            one([g[i] for g in given], {name: copy[i] for name, copy in zip(names, copies, strict=True)})
            for i in range(B)
        ]
        for name, parameter, copy in zip(names, tensors, before, strict=False):
            if not torch.equal(parameter, copy):
                raise ConfigError(CHANGED.format(name=name))
        outputs = tuple(torch.stack(part) for part in zip(*each, strict=True))
        return outputs, (0,) * len(outputs)
