"""All uses of PyTorch's private interface, under descriptive names."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction as no_torch_functions  # the public one leaves function modes on
from torch._C import DisableTorchFunctionSubclass as no_subclasses
from torch._C import _functorch
from torch._decomp import get_decompositions as decompositions_of
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # base class of all
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "BatchNorm", "FakeTensor", "FakeTensorMode", "InstanceNorm", "OpOverload", "SpectralNorm",
    "TreeSpec", "decompositions_of", "no_subclasses", "no_torch_functions", "proxy_tensor", "register_pytree_node",
    "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
]  # fmt: skip

_warn_of_fallbacks: Callable[[bool], None] = getattr(_functorch, "_set_vmap_fallback_warning_enabled", lambda on: None)

# Tensors under vmap, for which torch.func has no public functions.
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
unbatched: Callable[[Tensor], Tensor] = _functorch.get_unwrapped  # [..., B, ...]
batch_dim: Callable[[Tensor], int] = _functorch.maybe_get_bdim
level_of: Callable[[Tensor], int] = _functorch.maybe_get_level
current_level: Callable[[], Any] = _functorch.maybe_current_level
batched: Callable[[Tensor, Any, int], Tensor] = _functorch._add_batch_dim  # (tensor, dimension, level)

add_each: Callable[[list[Tensor], list[Tensor]], object] = torch._foreach_add_  # in place, in one launch

UNSAFE_VIEW, TO_COPY = torch.ops.aten._unsafe_view.default, torch.ops.aten._to_copy.default
UNSAFE_INDEX_PUT = torch.ops.aten._unsafe_index_put.default
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CHECKS_ERRORS = torch.ops.aten._linalg_check_errors.default

tree_children: Callable[[TreeSpec], list[TreeSpec]] = getattr(TreeSpec, "children", lambda spec: spec.children_specs)
operator_function: Callable[[OpOverload], Callable[..., Any]] = attrgetter("_op")  # calls it without dispatch in Python


def arguments_of(operator: Any) -> list[Any]:
    """The arguments in an operator's schema; empty for a Python function."""
    schema = getattr(operator, "_schema", None)
    return [] if schema is None else schema.arguments


def inputs_of(node: torch.fx.Node) -> Any:
    """The positional arguments of a node: a tuple whose types the node's operator knows."""
    return node.args


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(layer: nn.Module) -> bool:
    return bool(layer._backward_hooks or layer._backward_pre_hooks)


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile was applied to it."""
    return layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")


def forward_pre_hooks(layer: nn.Module) -> Iterable[Any]:
    return layer._forward_pre_hooks.values()


def own_tensors(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layer's own parameters and buffers, by name."""
    return layer._parameters, layer._buffers


def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Replaces a module's parameters by other tensors in the block."""
    return _reparametrize_module(module, tensors, tie_weights=True)


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Meanwhile distributions do not check their arguments, which would be a branch on a record's values."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` true, so that libraries do not branch on data, and make_fx faster: without
    metadata of results, which takes four times as long as the trace itself, and with lazy code generation."""
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(proxy_tensor, "extract_val", _fake_values),
        patch.object(_lazy_graph_module, "_use_lazy_graph_module_flag", True),
    ):
        yield


def _fake_values(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The fake tensors of a result, as `node.meta["val"]`; of others, nothing is kept."""
    if isinstance(value, list | tuple):
        return [*map(_fake_values, value)]
    return value if isinstance(value, FakeTensor) else None


@contextmanager
def vmap_quiet() -> Iterator[None]:
    """Meanwhile vmap does not print that an operator without a rule runs record by record."""
    _warn_of_fallbacks(False)
    try:
        yield
    finally:
        _warn_of_fallbacks(True)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Meanwhile mkldnn is not used: its recurrent layers are one operator each, which has no vmap rule."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """Compiles by inductor, without guards on inputs."""
    import torch._inductor  # here, since the import takes a second

    return torch._inductor.compile(graph, [*inputs], options=options)


@contextmanager
def without_process_group(refuse: Callable[[], Any]) -> Iterator[None]:
    """Hides the default process group in the block; its collectives call `refuse`."""
    world = dist.distributed_c10d._world
    before, world.default_pg = world.default_pg, None
    try:
        with patch.object(dist.distributed_c10d, "_get_default_group", refuse):
            yield
    finally:
        world.default_pg = before
