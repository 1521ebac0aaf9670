"""Throwaway copies of a module and of the owner of its training step, and what the step leaves there.

What reaches the real run (Lightning's Trainer; state, callbacks and accelerator of a Trainer of transformers) is seen
through a `View`, which has the numbers of the moment when the copy was made.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
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
_VALUES = (int, float, str, type(None), torch.dtype, torch.device, Path, Enum)


def _clone(t: Tensor) -> Tensor:
    if is_lazy(t):
        return t
    own = t.detach().clone()
    return nn.Parameter(own, t.requires_grad) if isinstance(t, nn.Parameter) else own


@contextmanager
def copies(
    module: nn.Module, owner: Any = None, parts: Sequence[str] = (), tensor: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Copies of a module and of its step's owner, and of all objects and containers that are reached from them.

    The module's parameters are shared. In the place of attributes that are data sets is a `View`. An attribute of a
    module that cannot be copied is shared; one of another owner cannot be read. Meanwhile the classes of layers and
    owner hold copies of their data, too, and what is set on these classes is undone.

    Args:
        owner: the module itself, another object, or None.
        parts: names of the owner's attributes in whose place the copy has a `View`, as Lightning's modules have of
            their Trainer.
        tensor: what takes a tensor's place in the copy, whose arrays are then shared; None: a clone of all tensors and
            arrays but the module's parameters.
    """
    parameters = {id(p) for p in module.parameters()}
    replace = tensor or (lambda t: t if id(t) in parameters else _clone(t))
    shared: tuple[type, ...] = (np.ndarray,) if tensor else ()
    with ExitStack() as around:
        with ExitStack() as copying:
            for kind in (Tensor, nn.Parameter):
                copying.enter_context(patch.object(kind, "__deepcopy__", lambda t, memo: replace(t)))
            own, known = _copy_of_module(module, shared)
            if owner is None or owner is module:
                own_owner = None if owner is None else own
            else:
                own_owner = _copy_of_owner(owner, known, parts)
            around.enter_context(_class_data_copied({*map(type, module.modules()), type(owner)}, known, shared))
        yield own, own_owner


def _copy_of_module(module: nn.Module, shared: tuple[type, ...]) -> tuple[Any, dict[int, Any]]:
    """The copy, and copies by the id of what was copied."""
    copied: Any
    memo: dict[int, Any] = {}
    named = [item for layer in module.modules() for item in vars(layer).items() if item[0] != "_modules"]
    held = [value for _, value in named]
    memo |= {id(value): value for value in held if isinstance(value, shared)}
    memo |= {id(value): _viewed(value, memo, f"self.{name}") for name, value in named if isinstance(value, _DATA)}
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
        copied.trainer = View(trainer, known)
    return copied, known


def _copy_of_owner(owner: Any, known: dict[int, Any], parts: Sequence[str]) -> Any:
    """An object of the owner's class, with copies of its attributes, and views of parts and of what has no copy."""
    made: Any = object.__new__(type(owner))
    known[id(owner)] = made
    for name, value in vars(owner).items():
        vars(made)[name] = _viewed(value, known, f"self.{name}")
        if name not in parts and not isinstance(value, (*_VALUES, *_DATA)):
            with suppress(Exception):
                vars(made)[name] = _copied(value, known)
    return made


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A copy; if that fails, nothing half made is left in `known`."""
    tried = dict(known)
    copied = copy.deepcopy(value, tried)
    known.update(tried)
    return copied


def _viewed(value: Any, known: dict[int, Any], name: str) -> Any:
    """A plain value itself, the settings of an optimizer or a scheduler, and a `View` of anything else."""
    if isinstance(value, _VALUES):
        return value
    if hasattr(value, "param_groups"):
        return _settings(value)
    if hasattr(value, "get_last_lr"):
        rates = [*value.get_last_lr()]
        return SimpleNamespace(get_last_lr=lambda: rates)
    return View(value, known, name)


@contextmanager
def _class_data_copied(kinds: set[type], known: dict[int, Any], shared: tuple[type, ...]) -> Iterator[None]:
    """Gives users' classes, and their bases, copies of the data that they hold, but for what is shared; undoes that,
    and all that was set on them in the block."""
    before = {base: dict(vars(base)) for kind in kinds for base in kind.__mro__ if _is_users(base)}
    try:
        for kind in before:
            for name, value in _data_of(kind).items():
                if not isinstance(value, shared):
                    with suppress(Exception):
                        setattr(kind, name, _copied(value, known))
        yield
    finally:
        for kind, held in before.items():
            for name, value in dict(vars(kind)).items():
                if name not in held:
                    delattr(kind, name)
                elif value is not held[name]:
                    setattr(kind, name, held[name])


def _data_of(kind: type) -> dict[str, Any]:
    """The data that a class itself holds: numbers, texts, tensors, arrays and containers."""
    kinds = (*_PLAIN_DATA, *_CONTAINERS)
    return {name: value for name, value in vars(kind).items() if isinstance(value, kinds) and name[:2] != "__"}


# Attributes that PyTorch and Lightning change by themselves.
_OWN = {*vars(nn.Module()), *vars(pl.LightningModule()), "_flat_weights", "_flat_weight_refs"} - {
    "training",
    "_forward_hooks",
    "_forward_pre_hooks",
}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN_DATA = (int, float, complex, str, bytes, dict, Tensor, np.ndarray)
_MAX_DEPTH, _MAX_ENTRIES = 4, 1000


def attributes(module: nn.Module, owner: Any = None, without: Collection[str] = ()) -> dict[str, Any]:
    """The attributes of a module, of its layers and of an owner by dotted name, without the values of parameters and
    buffers.

    The entries of containers, the attributes of the user's objects and the data of users' classes are included, and the
    length of each container. Metrics are left out.

    Args:
        without: names of the owner's attributes that are left out.
    """
    found: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, Metric | MetricCollection):
            prefix = f"{name}." if name else ""
            found[f"{prefix}class"] = type(layer)
            found |= {f"{prefix}{key}": t is None for owner_ in own_tensors(layer) for key, t in owner_.items()}
            for key, value in _held_by(layer).items():
                if key not in _OWN:
                    found.update(_entries(f"{prefix}{key}", value, _MAX_DEPTH))
    if owner is not None and owner is not module:
        for key, value in _held_by(owner).items():
            if key not in without and value is not module:
                found.update(_entries(key, value, _MAX_DEPTH))
    return found


def _held_by(one: Any) -> dict[str, Any]:
    """An object's attributes, with the data of its class."""
    found: dict[str, Any] = {}
    for kind in reversed(type(one).__mro__):
        if _is_users(kind):
            found |= _data_of(kind)
    return found | vars(one)


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if type(value) is View:
        return
    inner: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, (dict, *_CONTAINERS)):
        yield f"{name}.len", len(value)
        inner = iter(value.items() if isinstance(value, dict) else enumerate(value))
    else:
        yield name, value
        if not isinstance(value, (*_PLAIN, nn.Module, Tensor, np.ndarray, *_DATA)) and _is_users(type(value)):
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
_PACKAGES = {"pytorch_lightning", "lightning", "lightning_fabric", "transformers", "accelerate"}
_REFUSED = (
    "training_step reads {name}, a {kind}, but it is traced for one record and may read only numbers of the Trainer; "
    "keep what it needs in an attribute or a buffer of the module, set before training."
)


class View:
    """A view of a part of the run, as a Trainer, of which numbers and parts of Lightning and transformers may be read.

    Counters are read when the view is made, other numbers at their first use. What is set is set on the view alone.
    Tensors are copies, loggers do nothing, optimizers have the settings of their groups and no parameters. Of data,
    only plain values may be read.

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
            value, path = getattr(self._seen, name), f"{self._name}.{name}"
            is_data = isinstance(self._seen, (dict, *_CONTAINERS, *_DATA))
            if is_data and not isinstance(value, _VALUES):
                self._refuse(value, path)
            self._read[name] = self._frozen(value, path)
        return self._read[name]

    def _frozen(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: self._frozen(one, f"{name}[{key!r}]") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._frozen(one, f"{name}[{k}]") for k, one in enumerate(value)]
        if isinstance(value, nn.Module) and id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, pl.loggers.Logger):
            return pl.loggers.logger.DummyLogger()
        packages = {one.__module__.partition(".")[0] for one in type(value).__mro__}
        is_part = packages & _PACKAGES and not isinstance(value, pl.LightningDataModule | nn.Module)
        viewed = _viewed(value, self._copies, name)
        if type(viewed) is View and not is_part:
            self._refuse(value, name)
        return viewed

    def _refuse(self, value: Any, name: str) -> NoReturn:
        raise ConfigError(_REFUSED.format(name=name, kind=type(value).__name__))

    def __bool__(self) -> bool:
        return True

    def _refuse_use(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(self._seen, self._name)

    __call__ = __len__ = __iter__ = __getitem__ = __setitem__ = __contains__ = _refuse_use

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """The model itself, as by the method of an Accelerator: in a training step it has no wrapper."""
        return model


def _settings(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer that only has the settings of another's groups."""
    made = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
    groups, defaults = copy.deepcopy((groups, getattr(optimizer, "defaults", {})))
    vars(made).update(param_groups=[group | {"params": []} for group in groups], state={}, defaults=defaults)
    return made
