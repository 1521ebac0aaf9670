"""Gradients that a training step computes itself, as adversarial examples, gradient penalties and PINNs need them.

Under vmap a record's tensor is a view of the whole chunk's tensor, whose gradients are those of all records, each with
respect to its own values: `torch.autograd.grad` is called once for the chunk. A gradient that is differentiated again
(`create_graph=True`) depends on the parameters in ways that no layer rule describes; then each record gets its own copy
of the parameters (see `Interceptor`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp._torch_compat import batch_dim, batched, is_batched, level_of, no_torch_functions, outside_vmap, unbatched

_running = False  # a hook that records per-example gradients must not, while it is


class CopiesNeeded(RuntimeError):
    """A gradient is differentiated again, so that parameters must be copied for each record."""


def is_inner() -> bool:
    """Whether the backward pass that runs now is one of the training step's own."""
    return _running


def require_gradient(tensor: Tensor, requires: bool, level: int | None) -> Tensor:
    """Tensor.requires_grad_ of a record's tensor; at level None, of a parameter."""
    of_chunk = tensor if level is None else _of_chunk(tensor, level, "requires_grad_")
    with no_torch_functions(), outside_vmap():
        of_chunk.requires_grad_(requires)
    return tensor


def gradient(
    level: int, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """torch.autograd.grad of records' tensors.

    Raises:
        RuntimeError: a tensor is not a record's.
    """
    outputs, inputs = ([one] if isinstance(one, Tensor) else [*one] for one in (outputs, inputs))
    weights: Sequence[Any] = (
        [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs or [None] * len(outputs)
    )
    if is_grads_batched or materialize_grads:
        raise RuntimeError("torch.autograd.grad of several gradients at once runs one record at a time.")
    for output, weight in zip(outputs, weights, strict=True):
        if output.dim() if weight is None else weight.shape != output.shape:
            raise RuntimeError("torch.autograd.grad needs grad_outputs of the shapes of outputs that are not scalar.")
    ofs = [_of_chunk(tensor, level, "torch.autograd.grad") for tensor in (*outputs, *inputs)]
    global _running
    with no_torch_functions():
        seeds = [_seed(output, weight, level) for output, weight in zip(outputs, weights, strict=True)]
        with outside_vmap():
            _running = True
            try:
                found = torch.autograd.grad(
                    ofs[: len(outputs)], ofs[len(outputs) :], seeds, retain_graph, create_graph,
                    allow_unused=allow_unused,
                )  # fmt: skip
            finally:
                _running = False
    return tuple(
        None if one is None else batched(one, batch_dim(tensor), level)
        for one, tensor in zip(found, inputs, strict=True)
    )


def _of_chunk(tensor: Tensor, level: int, name: str) -> Tensor:
    """The tensor of all records of which a record's tensor is a part."""
    if not is_batched(tensor) or level_of(tensor) != level or is_batched(unbatched(tensor)):
        raise RuntimeError(f"{name} of a tensor that is not a record's runs one record at a time.")
    return unbatched(tensor)


def _seed(output: Tensor, weight: Tensor | None, level: int) -> Tensor:
    """The gradient to begin with, of the shape of all records' outputs."""
    if weight is None:
        return torch.ones_like(unbatched(output))
    spread = weight + torch.zeros_like(output)
    return unbatched(spread).movedim(batch_dim(spread), batch_dim(output))
