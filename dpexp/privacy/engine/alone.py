"""What PyTorch refuses for one record is refused for many: else it would depend on others whether one contributes."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.utils._pytree import tree_map_only


class Alone:
    """Tries a function on the first record, wherever the engine computes it in a way of its own."""

    def __init__(self) -> None:
        self._tried: set[Hashable] = set()

    def try_out(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        """Once for all calls that look alike.

        Raises:
            Exception: what the function raises.
        """
        look = (func, _settings(), _look(args), _look(kwargs))
        if look in self._tried:
            return
        args, kwargs = tree_map_only(Tensor, _first, (args, kwargs))
        with temporarily_pop_interpreter_stack(), torch.no_grad():
            func(*args, **kwargs)
        self._tried.add(look)


def _first(tensor: Tensor) -> Tensor:
    """A copy, since the function may write to it."""
    if _functorch.is_batchedtensor(tensor):
        return _functorch.get_unwrapped(tensor).detach().select(_functorch.maybe_get_bdim(tensor), 0).clone()
    return tensor.detach()


def _look(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, _functorch.is_batchedtensor(value)
    if isinstance(value, list | tuple):
        return tuple(map(_look, value))
    if isinstance(value, dict):
        return tuple((key, _look(item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _look((value.start, value.stop, value.step))
    return type(value), value  # 1, 1.0 and True are equal, yet not the same


def _settings() -> Hashable:
    """What PyTorch may refuse a call by, besides its arguments."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    backends = torch.backends.cuda
    attention = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled())
    return *autocast, *attention
