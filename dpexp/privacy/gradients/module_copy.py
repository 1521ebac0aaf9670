"""A throwaway copy of a module, on which its training step is traced, and what the step leaves in it."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from dpexp._lightning_compat import pl
from dpexp._torch_compat import own_tensors
from dpexp.privacy.gradients.frozen_trainer import FrozenTrainer

_SHARED = (np.ndarray, Dataset, DataLoader, pl.LightningDataModule, torch.optim.Optimizer)


def _own_but_parameters(t: Tensor) -> Tensor:
    return t if isinstance(t, nn.Parameter) else t.detach().clone()


def copy_of(module: nn.Module, tensor: Callable[[Tensor], Tensor] = _own_but_parameters) -> Any:
    """A copy of a module, and of all objects and containers that are reached from it; parameters and data are shared.

    Its Trainer is a `FrozenTrainer`. An attribute that cannot be copied is shared.

    Args:
        tensor: what takes a tensor's place in the copy; by default a clone of all but parameters.
    """
    with ExitStack() as around:
        for kind in (Tensor, nn.Parameter):
            around.enter_context(patch.object(kind, "__deepcopy__", lambda t, memo: tensor(t)))
        copied: Any
        memo: dict[int, Any] = {}
        held = [value for layer in module.modules() for value in vars(layer).values()]
        memo |= {id(value): value for value in held if isinstance(value, _SHARED)}
        try:
            copied = copy.deepcopy(module, known := dict(memo))
        except Exception:
            for value in held:
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
            copied = copy.deepcopy(module, known := memo)
        if (trainer := getattr(module, "_trainer", None)) is not None:  # Lightning's modules are copied without it
            copied.trainer = FrozenTrainer(trainer, lambda part: copy.deepcopy(part, known))
        return copied


# Attributes that PyTorch and Lightning change by themselves.
_OWN = {*vars(nn.Module()), *vars(pl.LightningModule()), "_flat_weights", "_flat_weight_refs"} - {
    "training",
    "_forward_hooks",
    "_forward_pre_hooks",
}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MAX_DEPTH, _MAX_ENTRIES = 4, 1000


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module and its layers hold beside the values of parameters and buffers, by dotted name.

    Containers and plain objects are entered; `len` under a container's name is the number of its entries. Metrics are
    left out.
    """
    found: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, Metric | MetricCollection):
            prefix = f"{name}." if name else ""
            found[f"{prefix}class"] = type(layer)
            found |= {f"{prefix}{key}": t is None for owner in own_tensors(layer) for key, t in owner.items()}
            for key, value in vars(layer).items():
                if key not in _OWN:
                    found.update(_entries(f"{prefix}{key}", value, _MAX_DEPTH))
    return found


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    inner: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, (dict, *_CONTAINERS)):
        yield f"{name}.len", len(value)
        inner = iter(value.items() if isinstance(value, dict) else enumerate(value))
    else:
        yield name, value
        if not isinstance(value, (*_PLAIN, nn.Module, Tensor, *_SHARED)) and _is_users(type(value)):
            inner = iter(vars(value).items())
    for (key, one), _ in zip(inner, range(_MAX_ENTRIES if depth else 0), strict=False):
        yield from _entries(f"{name}.{key}", one, depth - 1)


def _is_users(kind: type) -> bool:
    """Whether objects of a class have attributes that a step may change."""
    own = kind.__module__.partition(".")[0] not in _LIBRARIES
    return own and "__dict__" in dir(kind) and not issubclass(kind, type)


_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "builtins", "functools"}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names of attributes that differ: plain values by value, others by identity."""
    return [name for name in {**before, **now} if not _equal(before.get(name, _missing), now.get(name, _missing))]


_missing = object()


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and (a == b or (a != a and b != b)))
