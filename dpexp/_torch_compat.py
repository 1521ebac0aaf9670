"""PyTorch's private interface, as far as dpexp uses it: here and nowhere else, under names that say what it does."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction as no_torch_functions  # the public one leaves modes on
from torch._C import DisableTorchFunctionSubclass as no_subclasses
from torch._C import _disabled_torch_dispatch_impl, _functorch
from torch._functorch import autograd_function
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as outside_vmap
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # all of them
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "BatchNorm", "InstanceNorm", "OpOverload", "OpOverloadPacket", "SpectralNorm", "TorchDispatchMode", "TreeSpec",
    "no_subclasses", "no_torch_functions", "outside_vmap", "proxy_tensor", "register_pytree_node", "tree_flatten",
    "tree_leaves", "tree_map", "tree_unflatten",
]  # fmt: skip

# vmap, which torch.func has no public way to look into.
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
unbatched: Callable[[Tensor], Tensor] = _functorch.get_unwrapped  # [..., B, ...], with the dimension that follows
batch_dim: Callable[[Tensor], int] = _functorch.maybe_get_bdim
level_of: Callable[[Tensor], int] = _functorch.maybe_get_level
current_level: Callable[[], Any] = _functorch.maybe_current_level
batched: Callable[[Tensor, Any, int], Tensor] = _functorch._add_batch_dim  # (tensor, dimension, level)

PACK_PADDED_SEQUENCE = torch._VF._pack_padded_sequence  # by which alone a function mode sees the public one
CHECKS_ERRORS = torch.ops.aten._linalg_check_errors.default
EMBEDDING_BAGS = (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only)  # of torch.export

tree_children: Callable[[TreeSpec], list[TreeSpec]] = getattr(TreeSpec, "children", lambda spec: spec.children_specs)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that another is a view of."""
    return tensor._base


def storage_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def has_own_dispatch(value: Any) -> bool:
    """Whether it is a tensor of a class that changes what operators do."""
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not _disabled_torch_dispatch_impl


def arguments_of(operator: Any) -> list[Any]:
    """Of an operator, as its schema has them; none of a Python function."""
    schema = getattr(operator, "_schema", None)
    return [] if schema is None else schema.arguments


def qualified_name(operator: OpOverloadPacket) -> str:
    return operator._qualified_op_name


def operator_function(operator: OpOverload) -> Callable[..., Any]:
    """What calls it without looking it up."""
    return operator._op


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(layer: nn.Module) -> bool:
    return bool(layer._backward_hooks or layer._backward_pre_hooks)


def forward_pre_hooks(layer: nn.Module) -> Iterable[Any]:
    return layer._forward_pre_hooks.values()


def own_tensors(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layer's own parameters and buffers, by name."""
    return layer._parameters, layer._buffers


def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Meanwhile a module has other tensors in the place of its parameters."""
    return _reparametrize_module(module, tensors, tie_weights=True)


@contextmanager
def checkpointing_disabled(met: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile torch.utils.checkpoint.checkpoint keeps what a function computes, unless it is reentrant, which makes
    another thing of gradients.

    Args:
        met: is told what such a function is given.
    """
    generator = checkpoint._checkpoint_without_reentrant_generator

    def keep(function: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Before and after the function is called."""
        if preserve and context_fn is checkpoint.noop_context_fn:
            yield
            met((args, kwargs))
        else:
            yield from generator(function, preserve, context_fn, *args, **kwargs)

    with patch.object(checkpoint, "_checkpoint_without_reentrant_generator", keep):
        yield


def vmap_rules_refused(refuse: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Meanwhile `refuse(interpreter, rule, function, …)` is called where an autograd function has a vmap rule."""
    return patch.object(autograd_function, "custom_function_call_vmap_helper", refuse)


@contextmanager
def quick_tracing() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true meanwhile: libraries then ask their data nothing, and go their general
    way. What make_fx notes of each result, at four times the price of the trace itself (measured), is left out, and
    code is made when the graph is done.
    """
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(proxy_tensor, "extract_val", lambda *args, **kwargs: None),
        patch.object(_lazy_graph_module, "_use_lazy_graph_module_flag", True),
    ):
        yield


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """By inductor, without guards on what it is called with."""
    import torch._inductor  # which takes a second

    return torch._inductor.compile(graph, [*inputs], options=options)


@contextmanager
def without_process_group(refuse: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile code that asks finds no other processes; collectives of the default group call `refuse`."""
    world = dist.distributed_c10d._world
    before, world.default_pg = world.default_pg, None
    try:
        with patch.object(dist.distributed_c10d, "_get_default_group", refuse):
            yield
    finally:
        world.default_pg = before
