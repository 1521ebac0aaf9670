"""Nothing that training_step leaves behind reaches another record, another round, or anybody's eyes.

Training data is seen in one place alone, `training_step`; hooks are given a sealed sample (see `delivery`). What a step
could leave there is set back: attributes, containers, buffers, random number generators; what it logs is dropped. Where
nothing can be set back, as in a parameter, it is refused. What neither the module nor its Trainer holds, such as a
global variable or a file, is out of reach.
"""

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from operator import is_
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError
from dpexp.privacy.keystream import KeyStream

_ATOMS = {str, int, float, complex, bool, bytes, type(None), torch.device, torch.dtype, torch.Size}
_CONTAINERS = (dict, list, set, deque, bytearray, array)
_CONTENTS = (*_CONTAINERS, Tensor, np.ndarray)
_EMPTY: dict = {}
_NOTHING = object()
# Packages of whose objects nothing is remembered but modules, and those of them whose objects hold plain data.
_CLOSED = {
    *sys.stdlib_module_names, "torch", "pytorch_lightning", "lightning_fabric", "lightning", "numpy", "pandas", "dpexp",
    "mlflow", "rich",
}  # fmt: skip
_OPEN = ("types", "argparse", "collections", "queue", "functools", "torch.distributions")

CHANGED = (
    "model: {name} is changed inside training_step, so data could reach it without noise; leave parameters to the "
    "optimizer, or change them in a hook such as on_train_batch_end."
)


@dataclass(frozen=True)
class Surroundings:
    """What a step can get hold of besides its module.

    Attributes:
        holders: objects and dictionaries, of which what they hold directly is set back.
        tensors: by name, that must not change.
    """

    holders: tuple[Any, ...] = ()
    tensors: tuple[tuple[str, Tensor], ...] = ()


def surroundings(trainer: pl.Trainer) -> Surroundings:
    """The Trainer and what belongs to it: loops, connectors, optimizers and schedulers, callbacks, data module."""
    own = [part for part in vars(trainer).values() if type(part).__module__.startswith("pytorch_lightning.")]
    loop = trainer.fit_loop
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    others = [part for part in trainer.callbacks if not isinstance(part, pl.callbacks.ProgressBar)]  # type: ignore[attr-defined]
    holders = [
        trainer, trainer.strategy, trainer.accelerator, trainer.precision_plugin, *own, loop.epoch_loop,
        loop.epoch_loop.automatic_optimization, loop._data_source.instance, *schedulers,
        *trainer.optimizers, *groups, *others, getattr(trainer, "datamodule", None),
    ]  # fmt: skip
    states = [
        (f"the optimizer's {name}", value)
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]
    return Surroundings(tuple(h for h in holders if isinstance(h, dict) or hasattr(h, "__dict__")), tuple(states))


class _Kept:
    """A container, a tensor, or an object's or class's attributes, with the contents of before and the way to it."""

    __slots__ = ("contents", "key", "parent", "thing", "version")

    def __init__(self, thing: Any, contents: Any, version: int, parent: "_Kept | None", key: Any) -> None:
        self.thing, self.contents, self.version, self.parent, self.key = thing, contents, version, parent, key

    @property
    def name(self) -> str:
        above = self.parent.name if self.parent else ""
        own = "" if self.key in ("_modules", "_buffers", "_parameters", None) else str(self.key)
        return ".".join(part for part in (above, own) if part)


class _Attributes(dict):
    """Contents of what has no dictionary of its own to write to: slots, and classes."""


class State:
    """What a module holds now: all that is reached from it through attributes and containers.

    Attributes:
        known: ids of all that was reached.
    """

    def __init__(self, module: nn.Module, around: Surroundings | None = None) -> None:
        around = around or Surroundings()
        parameters = list(module.named_parameters())
        named = [(f"the parameter {name}", parameter) for name, parameter in parameters]
        self._fixed = [(name, tensor, tensor._version) for name, tensor in (*named, *around.tensors)]
        self._trained = [(parameter, parameter.requires_grad) for _, parameter in parameters]
        self._kept: list[_Kept] = []
        self.known = {id(tensor) for _, tensor, _ in self._fixed}
        for holder in around.holders:
            attributes = holder if isinstance(holder, dict) else vars(holder)
            kept = self._keep(attributes, None, None)
            for key, value in list(attributes.items()):
                if isinstance(value, _CONTAINERS) and id(value) not in self.known:
                    self._keep(value, kept, key)
        self._walk([(module, None, None), *((vars(parameter), None, name) for name, parameter in parameters)])

    def restore(self) -> list[str]:
        """Sets everything back; returns the names of what had changed.

        Raises:
            ConfigError: a parameter was changed, or something else that cannot be set back.
        """
        changed = [name for kept in self._kept for name in _set_back(kept)]
        for parameter, trained in self._trained:
            parameter.grad = None
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
                changed.append("requires_grad of a parameter")
        for name, tensor, version in self._fixed:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.zero_()  # lest it be saved on the way out
                raise ConfigError(CHANGED.format(name=name))
        return changed

    def name(self, tensor: Tensor) -> str:
        """Of a tensor that was reached."""
        named = {id(fixed): name for name, fixed, _ in self._fixed}
        return ({id(kept.thing): kept.name for kept in self._kept} | named)[id(tensor)]

    def _walk(self, ahead: list[tuple[Any, _Kept | None, Any]]) -> None:
        known = self.known
        while ahead:
            thing, parent, key = ahead.pop()
            if type(thing) in _ATOMS or id(thing) in known:
                continue
            if isinstance(thing, _CONTENTS):
                parent = self._keep(thing, parent, key)
            else:
                known.add(id(thing))
            if inside := self._inside(thing, parent, key):
                ahead += [(value, parent, key if k is None else k) for k, value in inside]

    def _keep(self, thing: Any, parent: _Kept | None, key: Any) -> _Kept:
        self.known.add(id(thing))
        version = 0
        if isinstance(thing, dict):
            contents: Any = dict(thing) if thing else _EMPTY
        elif isinstance(thing, Tensor):
            contents, version = _copied(thing), thing._version
        elif isinstance(thing, array):
            contents = thing[:]
        else:
            contents = thing.copy()
        kept = _Kept(thing, contents, version, parent, key)
        self._kept.append(kept)
        return kept

    def _inside(self, thing: Any, parent: _Kept | None, key: Any) -> Iterable[tuple[Any, Any]]:
        """(name, value) of what a thing holds, as far as it is worth going; a name of None is the thing's own."""
        if isinstance(thing, dict):
            return thing.items()
        if isinstance(thing, list | tuple | set | frozenset | deque):
            return enumerate(thing) if thing else ()
        if isinstance(thing, Tensor):
            return ((None, vars(thing)),) if vars(thing) else ()
        if isinstance(thing, nn.Module):
            return ((None, vars(thing)), (None, type(thing))) if _is_open[type(thing)] else ((None, vars(thing)),)
        if isinstance(thing, type):
            if not _is_open[thing]:
                return ()
            bases = [(None, base) for base in thing.__bases__]
            return [*self._attributes(thing, dict(vars(thing)), parent, thing.__name__), *bases]
        if not _is_open[type(thing)]:
            return ()
        found: list[tuple[Any, Any]] = [(None, type(thing))]
        if isinstance(thing, _lru_cache_wrapper):
            self._kept.append(_Kept(thing, thing.cache_info(), 0, parent, key))
        if isinstance(thing, partial):
            found += [(None, thing.func), (None, thing.args), (None, thing.keywords)]
        if hasattr(thing, "__dict__"):
            found.append((None, vars(thing)))
        if slots := _slots[type(thing)]:
            found += self._attributes(thing, {n: getattr(thing, n) for n in slots if hasattr(thing, n)}, parent, key)
        return found

    def _attributes(self, thing: Any, values: dict, parent: _Kept | None, key: Any) -> Iterable[tuple[Any, Any]]:
        self._kept.append(_Kept(thing, _Attributes(values), 0, parent, key))
        return values.items()


class _Openness(dict[type, bool]):
    """Whether objects of a type are looked into."""

    def __missing__(self, kind: type) -> bool:
        package = kind.__module__.partition(".")[0]
        self[kind] = package not in _CLOSED or kind.__module__.startswith(_OPEN)
        return self[kind]


class _Slots(dict[type, tuple[str, ...]]):
    """The names of a type's slots."""

    def __missing__(self, kind: type) -> tuple[str, ...]:
        declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
        names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
        self[kind] = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
        return self[kind]


_is_open, _slots = _Openness(), _Slots()


def _copied(tensor: Tensor) -> Tensor | None:
    """None: of such a kind that it cannot be set back."""
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return tensor.detach().clone() if plain else None


def _set_back(kept: _Kept) -> list[str]:
    thing, before = kept.thing, kept.contents
    if before is _EMPTY and not thing:
        return []
    if isinstance(before, _Attributes):
        return _set_attributes_back(kept)
    if isinstance(thing, _lru_cache_wrapper):
        if thing.cache_info() == before:
            return []
        thing.cache_clear()
        return [kept.name]
    if isinstance(thing, Tensor):
        if thing.is_leaf and thing.grad is not None:
            thing.grad = None
        # On a GPU only the version is asked for; a look at the contents would wait for it.
        if thing._version == kept.version and (before is None or thing.is_cuda or _equal(thing, before)):
            return []
        if before is None:
            raise ConfigError(CHANGED.format(name=f"{kept.name}, which cannot be set back,"))
        with torch.no_grad():
            thing.copy_(before)
        return [kept.name]
    if isinstance(thing, np.ndarray):
        if np.array_equal(thing, before, equal_nan=thing.dtype.kind in "fc"):
            return []
        thing[...] = before
        return [kept.name]
    if isinstance(thing, dict):
        same = len(thing) == len(before) and all(map(is_, thing, before))
        if same and all(map(is_, thing.values(), before.values())):
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
    if isinstance(thing, set):
        thing.clear()
        thing.update(before)
    else:
        thing[:] = before
    return [kept.name]


def _set_attributes_back(kept: _Kept) -> list[str]:
    thing, before = kept.thing, kept.contents
    names = vars(thing) if isinstance(thing, type) else _slots[type(thing)]
    changed = []
    for name in {*before, *names}:
        now = vars(thing).get(name, _NOTHING) if isinstance(thing, type) else getattr(thing, name, _NOTHING)
        if now is before.get(name, _NOTHING):
            continue
        changed.append(f"{kept.name}.{name}".lstrip("."))
        if name in before:
            setattr(thing, name, before[name])
        else:
            delattr(thing, name)
    return changed


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or torch.equal(a, b):
        return a.shape == b.shape
    numbers = a.is_floating_point() or a.is_complex()
    return numbers and torch.equal(a.isnan(), b.isnan()) and bool((a == b)[~a.isnan()].all())


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
def own_randomness(device: torch.device, stream: KeyStream) -> Iterator[None]:
    """Meanwhile the random number generators go on from secret states of full size; afterwards they are as before.

    A record's loss may be random, as with dropout. That costs nothing as long as each record's random numbers are
    independent of all else and nobody knows them: the release is then a mixture, over random numbers that do not depend
    on who is there, of releases of which each is private. From a known seed they would depend on a record's place.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_everything(stream)
        if device.type == "cuda":
            torch.cuda.manual_seed(int(stream.words(1)))
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seed_everything(stream: KeyStream) -> None:
    """Fills the whole states of this process's generators: torch's own seed would be one of only 2^32."""
    state = torch.Generator().get_state()
    words = stream.words(2 * _MERSENNE)
    state[_LEGACY : _LEGACY + 8 * _MERSENNE] = (words[:_MERSENNE] & 0xFFFFFFFF).view(torch.uint8)
    torch.set_rng_state(state)
    np.random.set_state(("MT19937", (words[_MERSENNE:] & 0xFFFFFFFF).numpy().astype(np.uint32), _MERSENNE, 0, 0.0))
    random.seed(stream.words(4).numpy().tobytes())


_MERSENNE, _LEGACY = 624, 24  # numbers of a Mersenne twister; bytes before them in torch's state


@contextmanager
def nothing_logged(trainer: pl.Trainer) -> Iterator[None]:
    """Meanwhile whatever is logged by way of the module or the Trainer is lost."""
    loggers, loop = trainer.loggers, trainer.fit_loop.epoch_loop
    results = loop._results
    trainer.loggers = [DummyLogger() for _ in loggers]
    loop._results = _ResultCollection(training=True)
    try:
        yield
    finally:
        trainer.loggers, loop._results = loggers, results


def mute(module: pl.LightningModule) -> None:
    """From now on `log` does nothing: in training, what a module could tell was computed from records without noise."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)
