"""Nothing is written to a parameter while data is seen."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.randomness import Seeds
from dpexp.privacy.isolation.state import CHANGED, State


class Guard(TorchFunctionMode):
    """While active, no tensor of a state can be changed without its version telling: what `.data` gives shares the
    version; to set it is refused, and so are hooks on parameters, which would stay for other records.

    Attributes:
        error: the last one that a function of torch raised, whoever may have caught it.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._seeds = Seeds()
        self._modes: list[tuple] = []
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._modes.append(_modes())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _set_modes(*self._modes.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._seeds.refuse_others()
        if func in _CHANGES and id(args[0]) in self._state.known:
            if func == _DATA[0]:
                return args[0].detach()
            raise ConfigError(CHANGED.format(name=self._state.name(args[0])))
        if _exchanges(func):
            raise ConfigError(EXCHANGES.format(name=packet(func)))
        if _learns_statistics(func, args, kwargs or {}):
            raise ConfigError(
                "model: a call of batch_norm in training mode mixes the records of a batch, which no clipping of one "
                "record can bound; use group_norm, layer_norm or instance_norm, or freeze it with training=False."
            )
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def _modes() -> tuple:
    """What a step may have switched on or off for whoever comes after."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
    )


def _set_modes(
    gradients: bool, dtype: torch.dtype, device: torch.device, autocasts: list[tuple[str, bool, torch.dtype]]
) -> None:
    torch.set_grad_enabled(gradients)
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        torch.set_default_device(device)
    for kind, enabled, of in autocasts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, of)


_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_CHANGES = {*_DATA, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.set_}

# The place of running_mean; that of training is 5.
_BATCH_NORMS: dict[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3} | {
    getattr(torch.ops.aten, name): 3
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
}
WATCHED = {*_CHANGES, *_BATCH_NORMS}


def _learns_statistics(func: Any, args: tuple, kwargs: dict) -> bool:
    """Without running statistics a call may be about weights alone, as in weight standardisation."""
    place = _BATCH_NORMS.get(packet(func))
    if place is None:
        return False
    given = dict(enumerate(args))
    mean, training = kwargs.get("running_mean", given.get(place)), kwargs.get("training", given.get(5))
    return isinstance(mean, Tensor) and bool(training)


EXCHANGES = (
    "model: training_step exchanges something with other processes ({name}), which would mix their records with its "
    "own; compute a record's loss from that record alone."
)


def _exchanges(func: Any) -> bool:
    """Operators that reach process groups by their names."""
    operator = packet(func)
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    return operator._qualified_op_name.partition("::")[0] in ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")


def packet(func: Any) -> Any:
    """An operator whatever its overload, as in torch.ops.aten; other functions as they are."""
    return func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
