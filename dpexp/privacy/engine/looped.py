"""The fallback for what cannot be computed for all records together: one module's forward, record by record.

Control flow that depends on data, packed sequences, operations that vmap does not know: the module in which they
occur is run in a loop, with a copy of its parameters for each record, whose gradients are the per-record gradients.
The rest of the model is not slowed.
"""

import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchmetrics import Metric

from dpexp.errors import ConfigError
from dpexp.privacy.engine.branches import Asked, Differ
from dpexp.privacy.engine.capture import Capture
from dpexp.privacy.engine.captured import CopyTap
from dpexp.privacy.engine.on_records import OnRecords
from dpexp.privacy.engine.returned import put_together, shown, taken_apart
from dpexp.privacy.isolation.guard import Guard
from dpexp.privacy.isolation.reached import can_be_kept
from dpexp.privacy.isolation.state import CHANGED, State
from dpexp.privacy.isolation.surroundings import Surroundings

# By models of transformers from each batch of labels, where it is not given; by recurrent layers from their weights.
DEDUCED = "config.problem_type", "_flat_weights", "_flat_weight_refs"


def culprit(error: BaseException, root: nn.Module, looped: Set[str]) -> str | None:
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
def looping(root: nn.Module, names: Set[str], capture: Capture, around: Surroundings) -> Iterator[None]:
    """Meanwhile the named modules run record by record.

    Where one record could reach the next, or the module's caller, other than by what is returned, because an attribute
    or an argument is changed, the module that contains it must be looped. What is returned besides numbers of tensors,
    such as their shapes, is taken for the answer to a question: records that differ in it are processed apart.
    """
    modules = [root.get_submodule(name) for name in names]
    for module in modules:
        module.forward = _loop(root, module, capture, around)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _loop(root: nn.Module, module: nn.Module, capture: Capture, around: Surroundings) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return each(args, kwargs)
        except Exception as error:
            capture.ends(error)  # of one record, whoever may catch it for all
            raise

    def each(args: tuple, kwargs: dict) -> Any:
        with capture.paused():
            leaves, structure = tree_flatten((capture.with_copies(args), capture.with_copies(kwargs)))
            places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
            for other in others:
                if not can_be_kept(other):
                    raise RuntimeError(f"it is given a {type(other).__name__}, which may carry data to other records.")
            state = State(root, around)
            inside = State(_Others(others))
            parameters = {name: p for name, p in module.named_parameters() if capture.trains(p)}
            returned: list[Any] = []

            def one(tensors: list[Tensor], parameters: dict[str, Tensor]) -> tuple[list[Tensor], Any]:
                given = list(leaves)
                for place, tensor in zip(places, tensors, strict=True):
                    given[place] = tensor
                args, kwargs = tree_unflatten(given, structure)
                patched = module.__dict__.pop("forward")
                versions = [tensor._version for tensor in tensors]
                try:
                    with Guard(state) as guard:
                        result = torch.func.functional_call(module, parameters, args, kwargs)
                finally:
                    capture.own_error = capture.own_error or guard.error
                    module.forward = patched  # type: ignore[method-assign]
                    changed = [*inside.restore(), *state.restore()]
                if not isinstance(module, Metric) and _beyond_torchs_own(changed):
                    raise RuntimeError(f"it changes {changed[0]}, which others may read.")
                after, shape = tree_flatten((args, kwargs))
                if shape != structure or not all(map(is_, after, given)):
                    raise RuntimeError("it changes what it is given.")
                if versions != [tensor._version for tensor in tensors]:
                    raise RuntimeError("it changes its input in place.")
                outputs, rest = taken_apart(result, state.known)
                as_given = [next((k for k, tensor in enumerate(tensors) if tensor is o), None) for o in outputs]
                return outputs, [rest, as_given, [(o.shape, o.dtype) for o in outputs]]

            def agree(rests: list[Any]) -> None:
                parts: list[list[int]] = []
                for row, rest in enumerate(rests):
                    alike = next((part for part in parts if rests[part[0]] == rest), None)
                    if alike is None:
                        parts.append([row])
                    else:
                        alike.append(row)
                if len(parts) > 1 and capture.chance is None:
                    raise Asked
                if len(parts) > 1 and capture.chance.began_to_draw():  # type: ignore[union-attr]
                    raise RuntimeError("it returns different things for records that draw random numbers.")
                if len(parts) > 1:
                    raise Differ("what a module returns", parts)
                rest, as_given, forms = returned[:] = rests[0]
                capture.answered((shown(rest), *as_given, *forms))

            outputs = _Looped.apply(
                capture.anchor,
                one,
                agree,
                list(parameters),
                capture.record,
                *parameters.values(),
                *(leaves[k] for k in places),
            )
            capture.met(leaves)
            if capture.chance is not None:
                capture.chance.unseen()
            rest, as_given, _ = returned
            outputs = [o if k is None else leaves[places[k]] for o, k in zip(outputs, as_given, strict=True)]
            return put_together(rest, iter(outputs))

    return forward


class _Others(nn.Module):
    """Holds arguments that are no tensors, so that a change of theirs is seen."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _beyond_torchs_own(changed: list[str]) -> bool:
    """Recurrent layers rebuild lists of their weights whenever these are replaced, as they are here."""
    return any(not name.endswith(DEDUCED) for name in changed)


class _Looped(OnRecords):
    """`one` on each record: tensors and parameters -> output tensors, and what else is to `agree`."""

    @staticmethod
    def vmap(
        B: int, in_dims: Any, anchor: Tensor, one: Any, agree: Any, names: list[str], record: Any, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        k = len(names)
        copies = [CopyTap.apply(anchor, p, B, partial(record, p)).unbind(0) for p in tensors[:k]]
        before = [parameter.detach().clone() for parameter in tensors[:k]]  # the copies' `.data` is not watched
        given = [
            [t.clone() for _ in range(B)] if dim is None else [one.clone() for one in t.movedim(dim, 0).unbind(0)]
            for t, dim in zip(tensors[k:], in_dims[5 + k :], strict=True)
        ]
        each = [
            one([g[i] for g in given], {name: copy[i] for name, copy in zip(names, copies, strict=True)})
            for i in range(B)
        ]
        for name, parameter, copy in zip(names, tensors, before, strict=False):
            if not torch.equal(parameter, copy):
                raise ConfigError(CHANGED.format(name=f"the parameter {name}"))
        agree([rest for _, rest in each])
        outputs = tuple(torch.stack(part) for part in zip(*(outputs for outputs, _ in each), strict=True))
        return outputs, (0,) * len(outputs)
