"""Nothing is written to a parameter while data is seen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError
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
        self.error: Exception | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _CHANGES and id(args[0]) in self._state.known:
            if func == _DATA[0]:
                return args[0].detach()
            raise ConfigError(CHANGED.format(name=self._state.name(args[0])))
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


_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_CHANGES = {*_DATA, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.set_}

# The place of running_mean; that of training is 5.
_BATCH_NORMS: dict[Any, int] = {F.batch_norm: 1, torch.batch_norm: 3} | {
    getattr(torch.ops.aten, name): 3
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
}


def _learns_statistics(func: Any, args: tuple, kwargs: dict) -> bool:
    """Without running statistics a call may be about weights alone, as in weight standardisation."""
    place = _BATCH_NORMS.get(packet(func))
    if place is None:
        return False
    given = dict(enumerate(args))
    mean, training = kwargs.get("running_mean", given.get(place)), kwargs.get("training", given.get(5))
    return isinstance(mean, Tensor) and bool(training)


def packet(func: Any) -> Any:
    """An operator whatever its overload, as in torch.ops.aten; other functions as they are."""
    return func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
