"""A throwaway copy of a module, on which its training step is traced or runs for one record, and what it leaves there.

Its Trainer is frozen: it has the numbers of the moment when the copy was made.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from dpexp._lightning_compat import pl
from dpexp._torch_compat import own_tensors
from dpexp.errors import ConfigError

_DATA = (Dataset, DataLoader, pl.LightningDataModule, torch.optim.Optimizer)
_SHARED = (np.ndarray, *_DATA)


def _clone(t: Tensor) -> Tensor:
    if is_lazy(t):
        return t
    own = t.detach().clone()
    return nn.Parameter(own, t.requires_grad) if isinstance(t, nn.Parameter) else own


def copy_of(module: nn.Module, tensor: Callable[[Tensor], Tensor] | None = None) -> Any:
    """A copy of a module, and of all objects and containers that are reached from it; its parameters and data are
    shared.

    Its Trainer is a `FrozenTrainer`. An attribute that cannot be copied is shared.

    Args:
        tensor: what takes a tensor's place in the copy, whose arrays are then shared; None: a clone of all tensors and
            arrays but the module's parameters.
    """
    parameters = {id(p) for p in module.parameters()}
    replace = tensor or (lambda t: t if id(t) in parameters else _clone(t))
    with ExitStack() as around:
        for kind in (Tensor, nn.Parameter):
            around.enter_context(patch.object(kind, "__deepcopy__", lambda t, memo: replace(t)))
        copied: Any
        memo: dict[int, Any] = {}
        held = [value for layer in module.modules() for value in vars(layer).values()]
        memo |= {id(value): value for value in held if isinstance(value, _SHARED if tensor else _DATA)}
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
            copied.trainer = FrozenTrainer(trainer, known)
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
    """The attributes of a module and its layers by dotted name, without the values of parameters and buffers.

    The entries of containers and the attributes of the user's objects are included, and the length of each container.
    Metrics are left out.
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
    """The names of attributes that differ. Numbers and texts are compared by value, other objects by identity.

    The length of a container is named only if none of its entries is.
    """
    names = [name for name in {**before, **now} if not _equal(before.get(name, _missing), now.get(name, _missing))]
    return [name for name in names if not (name.endswith(".len") and _begins(name[:-3], names) > 1)]


def _begins(beginning: str, names: list[str]) -> int:
    return sum(name.startswith(beginning) for name in names)


_missing = object()


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and issubclass(type(a), _PLAIN) and (a == b or (a != a and b != b)))


_COUNTERS = ("current_epoch", "global_step", "training", "validating", "testing", "sanity_checking", "should_stop")
_NUMBERS = (int, float, str, type(None), torch.dtype, torch.device, Tensor, Path)
_PACKAGES = {"pytorch_lightning", "lightning", "lightning_fabric"}


class FrozenTrainer:
    """A view of a Trainer, or of a part of it, from which numbers and parts of Lightning may be read.

    Counters are read when the view is made, other numbers at their first use. What is set is set on the view alone.
    Loggers do nothing, optimizers have the settings of their groups and no parameters.

    Args:
        copies: by the id of a module, its copy.

    Raises:
        ConfigError: data, a method, a network that is not part of the module, or another object is read.
    """

    _seen: Any
    _copies: dict[int, Any]

    def __init__(self, seen: Any, copies: dict[int, Any], name: str = "trainer") -> None:
        vars(self).update(_seen=seen, _copies=copies, _name=name, _read={})
        for counter in _COUNTERS if name == "trainer" else ():
            getattr(self, counter)

    __class__ = property(lambda self: type(self._seen))  # type: ignore[assignment]  # for isinstance

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._read:
            self._read[name] = self._frozen(getattr(self._seen, name), f"{self._name}.{name}")
        return self._read[name]

    def _frozen(self, value: Any, name: str) -> Any:
        if isinstance(value, _NUMBERS):
            return value
        if isinstance(value, dict):
            return {key: self._frozen(one, f"{name}[{key!r}]") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._frozen(one, f"{name}[{k}]") for k, one in enumerate(value)]
        if isinstance(value, nn.Module) and id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, pl.loggers.Logger):
            return pl.loggers.logger.DummyLogger()
        if hasattr(value, "param_groups"):
            return _settings(value)
        if hasattr(value, "get_last_lr"):
            rates = [*value.get_last_lr()]
            return SimpleNamespace(get_last_lr=lambda: rates)
        packages = {one.__module__.partition(".")[0] for one in type(value).__mro__}
        if packages & _PACKAGES and not isinstance(value, pl.LightningDataModule | nn.Module):
            return FrozenTrainer(value, self._copies, name)
        raise ConfigError(
            f"training_step reads {name}, a {type(value).__name__}, but it is traced for one record and may read only "
            "numbers of the Trainer; keep what it needs in an attribute or a buffer of the module, set before training."
        )


def _settings(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer that only has the settings of another's groups."""
    made = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
    vars(made).update(param_groups=[group | {"params": []} for group in groups], state={}, defaults={})
    return made
