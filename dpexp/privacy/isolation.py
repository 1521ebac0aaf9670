"""Nothing that training_step leaves behind reaches another record, another round, or anybody's eyes.

Training data is seen in one place alone, `training_step`; hooks are given a sealed sample (see `delivery`). What a step
could leave there is set back: attributes, containers, buffers, random number generators; what it logs is dropped. Where
nothing can be set back, as in a parameter, it is refused. What the module does not hold, such as a global variable or a
file, is out of reach.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError

_ATOMS = {str, int, float, complex, bool, bytes, type(None), type, torch.device, torch.dtype}
_CONTAINERS = (dict, list, set, deque, bytearray)
_CONTENTS = (*_CONTAINERS, Tensor, np.ndarray)
_EMPTY: dict = {}
_CLOSED = {*sys.stdlib_module_names, "torch", "pytorch_lightning", "lightning_fabric", "lightning", "numpy", "dpexp"}


class _Kept:
    """A container or a tensor, with its contents of before and the way to it."""

    __slots__ = ("contents", "key", "parent", "thing", "version")

    def __init__(self, thing: Any, contents: Any, version: int, parent: "_Kept | None", key: Any) -> None:
        self.thing, self.contents, self.version, self.parent, self.key = thing, contents, version, parent, key

    @property
    def name(self) -> str:
        above = self.parent.name if self.parent else ""
        own = "" if self.key in ("_modules", "_buffers", "_parameters", None) else str(self.key)
        return ".".join(part for part in (above, own) if part)


class State:
    """What a module holds now: all that is reached from it through attributes and containers.

    Args:
        beside: more objects and dictionaries, of which only what they hold directly counts.

    Attributes:
        known: ids of all that was reached.
    """

    def __init__(self, module: nn.Module, beside: tuple[Any, ...] = ()) -> None:
        self._parameters = [(name, parameter, parameter._version) for name, parameter in module.named_parameters()]
        self._kept: list[_Kept] = []
        self.known = {id(parameter) for _, parameter, _ in self._parameters}
        for thing in beside:
            named = thing if isinstance(thing, dict) else vars(thing)
            kept = self._keep(named, None, None)
            for key, value in list(named.items()):
                if isinstance(value, _CONTAINERS):
                    self._keep(value, kept, key)
        self._walk(module)

    def restore(self) -> list[str]:
        """Sets everything back; returns the names of what had changed.

        Raises:
            ConfigError: a parameter was changed.
        """
        changed = [name for kept in self._kept for name in _set_back(kept)]
        for name, parameter, version in self._parameters:
            if parameter._version != version:
                raise ConfigError(CHANGED.format(name=name))
        return changed

    def name(self, tensor: Tensor) -> str:
        """Of a tensor that the module holds."""
        named = {id(parameter): name for name, parameter, _ in self._parameters}
        named |= {id(kept.thing): kept.name for kept in self._kept}
        return named[id(tensor)]

    def _walk(self, root: Any) -> None:
        ahead: list[tuple[Any, _Kept | None, Any]] = [(root, None, None)]
        known = self.known
        while ahead:
            thing, parent, key = ahead.pop()
            if type(thing) in _ATOMS or id(thing) in known:
                continue
            if isinstance(thing, _CONTENTS):
                parent = self._keep(thing, parent, key)
            else:
                known.add(id(thing))
            if inside := _inside(thing):
                ahead += [(value, parent, k) for k, value in inside]

    def _keep(self, thing: Any, parent: "_Kept | None", key: Any) -> "_Kept":
        self.known.add(id(thing))
        version = 0
        if isinstance(thing, dict):
            contents: Any = dict(thing) if thing else _EMPTY
        elif isinstance(thing, Tensor):
            contents, version = thing.detach().clone(), thing._version
        else:
            contents = thing.copy()
        kept = _Kept(thing, contents, version, parent, key)
        self._kept.append(kept)
        return kept


CHANGED = (
    "model: the parameter {name} is changed inside training_step, so data could reach it without noise; leave that to "
    "the optimizer, or do it in a hook such as on_train_batch_end."
)


def _inside(thing: Any) -> Iterable[tuple[Any, Any]]:
    """(name, value) of what is held, as far as it is worth going."""
    if isinstance(thing, dict):
        return thing.items()
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return enumerate(thing) if thing else ()
    if isinstance(thing, nn.Module):
        return ((None, vars(thing)),)
    if type(thing).__module__.partition(".")[0] in _CLOSED or not hasattr(thing, "__dict__"):
        return ()
    return ((None, vars(thing)),)


def _set_back(kept: _Kept) -> list[str]:
    thing, before = kept.thing, kept.contents
    if before is _EMPTY and not thing:
        return []
    if isinstance(thing, Tensor):
        # On a GPU only the version is asked for; a look at the contents would wait for it.
        if thing._version == kept.version and (thing.is_cuda or _equal(thing, before)):
            return []
        with torch.no_grad():
            thing.copy_(before)
        return [kept.name]
    if isinstance(thing, np.ndarray):
        if np.array_equal(thing, before, equal_nan=thing.dtype.kind in "fc"):
            return []
        thing[...] = before
        return [kept.name]
    if isinstance(thing, dict):
        if (
            len(thing) == len(before)
            and all(map(is_, thing, before))
            and all(map(is_, thing.values(), before.values()))
        ):
            return []
        changed = [key for key in {**before, **thing} if thing.get(key, _NOTHING) is not before.get(key, _NOTHING)]
        thing.clear()
        thing.update(before)
        return [f"{kept.name}.{key}".lstrip(".") for key in changed]
    if isinstance(thing, list | deque):
        if len(thing) == len(before) and all(map(is_, thing, before)):
            return []
        thing.clear()
        thing.extend(before)
        return [kept.name]
    if thing == before:
        return []
    thing.clear()
    thing.update(before) if isinstance(thing, set) else thing.extend(before)
    return [kept.name]


_NOTHING = object()


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and bool(
        (a == b)[~a.isnan()].all()))  # fmt: skip


class Guard(TorchFunctionMode):
    """While active, no tensor of a state can be changed without its version telling: what `.data` gives shares the
    version, and to set it is refused."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _DATA and id(args[0]) in self._state.known:
            if func == _DATA[0]:
                return args[0].detach()
            raise ConfigError(CHANGED.format(name=self._state.name(args[0])))
        return func(*args, **(kwargs or {}))


_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


@contextmanager
def own_randomness(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Meanwhile random numbers are those of a seed, by default one that is drawn before; afterwards the generators do
    not tell how many were used."""
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def without_loggers(trainer: pl.Trainer) -> Iterator[None]:
    """Meanwhile the loggers that are found by way of the Trainer or the module pass nothing on."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def mute(module: pl.LightningModule) -> None:
    """From now on `log` does nothing: in training, what a module could tell was computed from records without noise."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)
