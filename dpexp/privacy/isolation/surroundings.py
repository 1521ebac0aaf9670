"""What a step can get hold of besides its module."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn


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
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    others = [part for part in trainer.callbacks if not isinstance(part, pl.callbacks.ProgressBar)]  # type: ignore[attr-defined]
    holders = [
        trainer, trainer.strategy, trainer.accelerator, trainer.precision_plugin, *own, *_loops(trainer.fit_loop),
        trainer.fit_loop._data_source.instance, *schedulers, *trainer.optimizers, *groups, *states, *others,
        getattr(trainer, "datamodule", None),
    ]  # fmt: skip
    tensors = [(f"the optimizer's {name}", value) for state in states for name, value in state.items()]
    for part in others:
        for name, value in vars(part).items():
            inside = {name: value}
            if isinstance(value, nn.Module):
                inside = {f"{name}.{k}": t for k, t in (*value.named_parameters(), *value.named_buffers())}
            tensors += [(f"{type(part).__name__}'s {k}", t) for k, t in inside.items()]
    return Surroundings(
        tuple(h for h in holders if isinstance(h, dict) or hasattr(h, "__dict__")),
        tuple((name, value) for name, value in tensors if isinstance(value, Tensor)),
    )


def _loops(part: Any) -> Iterator[Any]:
    """A loop, the loops in it, and their counts."""
    yield part
    for inner in vars(part).values():
        if type(inner).__module__.startswith("pytorch_lightning.loops") and not isinstance(inner, type):
            yield from _loops(inner)
