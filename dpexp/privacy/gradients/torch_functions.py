"""Which functions a TorchFunctionMode intercepts belong to torch, and which mix records and are refused."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import OpOverload, OpOverloadPacket, qualified_name, vmap_rules_refused
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.index_checks import refuse_out_of_range

EXCHANGES = (
    "model: training_step exchanges something with other processes ({name}), which would mix their records with its "
    "own; compute a record's loss from that record alone."
)
OPERATORS = (OpOverload, OpOverloadPacket)

# The position of the argument running_mean; that of training is 5 everywhere.
BATCH_NORMS: dict[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3} | {
    getattr(torch.ops.aten, name): 3
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
}
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_BUILTINS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_GRAD_ACCESS = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


class MixingRefused(TorchFunctionMode):
    """While active, calls that mix records raise a ConfigError.

    Args:
        indices: also refuse indices out of range.

    Attributes:
        error: the last one that a function of torch raised, even if the caller caught it.
    """

    def __init__(self, indices: bool = False) -> None:
        super().__init__()
        self._indices = indices
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_mixing(func, args, kwargs or {})
        try:
            if self._indices:
                refuse_out_of_range(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def refuse_mixing(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises ConfigError if a call mixes the records of a batch, or of several processes."""
    operator = without_overload(func)
    if isinstance(operator, OpOverloadPacket) and qualified_name(operator).startswith(_COLLECTIVES):
        raise ConfigError(EXCHANGES.format(name=operator))
    position = BATCH_NORMS.get(operator)
    if position is None:
        return
    by_position = dict(enumerate(args))
    mean, training = (
        kwargs.get("running_mean", by_position.get(position)), kwargs.get("training", by_position.get(5)),
    )  # fmt: skip
    if isinstance(mean, Tensor) and training:  # without running statistics, it may standardize a weight
        raise ConfigError(
            "model: a call of batch_norm in training mode mixes the records of a batch, which no clipping of one "
            "record can bound; use group_norm, layer_norm or instance_norm, or freeze it with training=False."
        )


def without_overload(func: Any) -> Any:
    """An operator of torch.ops without its overload; other functions as they are."""
    return func.overloadpacket if isinstance(func, OpOverload) else func


def is_from_torch(func: Any) -> bool:
    """Whether a function is torch's own, so that it uses no tensor but its arguments."""
    if isinstance(func, OPERATORS):
        return str(func).startswith("aten.")
    if isinstance(func, types.FunctionType):
        return func.__code__.co_filename.startswith(_TORCH_FOLDER)
    return isinstance(func, _BUILTINS) and func not in _GRAD_ACCESS


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts."""
    cls = type(value)
    if cls is dict:
        value = [*value.values()]
    elif cls not in (list, tuple, torch.Size) and cls.__module__ != "torch.return_types":
        return [value]
    return [leaf for item in value for leaf in (leaves_of(item) if isinstance(item, list | tuple | dict) else (item,))]


@contextmanager
def custom_vmap_rules_refused() -> Iterator[None]:
    """Meanwhile an autograd function or operator with its own vmap rule, which sees all records, raises an error."""

    def refuse(interpreter: Any, rule: Any, function: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the vmap rule of {getattr(function, '__name__', function)} would see all records.")

    with vmap_rules_refused(refuse):
        yield
