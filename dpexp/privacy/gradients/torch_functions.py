"""Functions of torch as a function mode sees them: which are torch's own, and which a private step must not call."""

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
from dpexp.privacy.gradients.index_checks import refuse_wrong

EXCHANGES = (
    "model: training_step exchanges something with other processes ({name}), which would mix their records with its "
    "own; compute a record's loss from that record alone."
)
OPERATORS = (OpOverload, OpOverloadPacket)

# The place of running_mean; that of training is 5.
BATCH_NORMS: dict[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3} | {
    getattr(torch.ops.aten, name): 3
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
}
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
_HELD = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
_FOLDER = f"{Path(torch.__file__).parent}/"


class Refusing(TorchFunctionMode):
    """While active, calls that mix records are refused.

    Args:
        indices: those out of range are refused, too.

    Attributes:
        error: the last one that a function of torch raised, whoever may have caught it.
    """

    def __init__(self, indices: bool = False) -> None:
        super().__init__()
        self._indices = indices
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_mixing(func, args, kwargs or {})
        try:
            if self._indices:
                refuse_wrong(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def refuse_mixing(func: Any, args: tuple, kwargs: dict) -> None:
    """Raises ConfigError: the call mixes records, of a batch or of processes."""
    operator = packet(func)
    if isinstance(operator, OpOverloadPacket) and qualified_name(operator).startswith(_COLLECTIVES):
        raise ConfigError(EXCHANGES.format(name=operator))
    place = BATCH_NORMS.get(operator)
    if place is None:
        return
    given = dict(enumerate(args))
    mean, training = kwargs.get("running_mean", given.get(place)), kwargs.get("training", given.get(5))
    if isinstance(mean, Tensor) and training:  # without running statistics a call may be about weights alone
        raise ConfigError(
            "model: a call of batch_norm in training mode mixes the records of a batch, which no clipping of one "
            "record can bound; use group_norm, layer_norm or instance_norm, or freeze it with training=False."
        )


def packet(func: Any) -> Any:
    """An operator whatever its overload, as in torch.ops.aten; other functions as they are."""
    return func.overloadpacket if isinstance(func, OpOverload) else func


def is_torchs(func: Any) -> bool:
    """Whether a function can only have got hold of what it was given."""
    if isinstance(func, OPERATORS):
        return str(func).startswith("aten.")
    if isinstance(func, types.FunctionType):
        return func.__code__.co_filename.startswith(_FOLDER)
    return isinstance(func, _OF_C) and func not in _HELD


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts."""
    kind = type(value)
    if kind is dict:
        value = [*value.values()]
    elif kind not in (list, tuple, torch.Size) and kind.__module__ != "torch.return_types":
        return [value]
    return [leaf for item in value for leaf in (leaves_of(item) if isinstance(item, list | tuple | dict) else (item,))]


@contextmanager
def no_vmap_of_its_own() -> Iterator[None]:
    """Meanwhile an autograd function or custom operator with a vmap rule of its own, which may mix records, is refused.

    Raises:
        RuntimeError: one is called.
    """

    def refuse(interpreter: Any, rule: Any, function: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the vmap rule of {getattr(function, '__name__', function)} would see all records.")

    with vmap_rules_refused(refuse):
        yield
