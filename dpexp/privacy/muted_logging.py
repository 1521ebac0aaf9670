"""Mutes a LightningModule's logging while it is trained, and imitates other rounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dpexp._lightning_compat import pl
from dpexp.privacy.gradients.training_step import drop
from dpexp.privacy.round import PrivateRound


def mute(module: pl.LightningModule, logged: set[str]) -> None:
    """Replaces the module's `log` until `unmute`: hooks drop what they log, as the stand-ins on which `training_step`
    runs do. Metrics that it updates are empty here."""

    module.log = partial(drop, logged)  # type: ignore[method-assign]


def log_released(module: pl.LightningModule, name: str, value: float, **options: Any) -> None:
    """Logs a released or unsafe value of a muted module."""
    type(module).log(module, name, value, on_step=True, on_epoch=False, **options)


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)


def log_diagnostics(pl_module: pl.LightningModule, engine: PrivateRound) -> None:
    """Logs the last sample's size, mean loss, median norms and fractions clipped, all of them not private."""
    observed = engine.observations
    sizes = sum(len(chunk["loss"]) for chunk in observed)
    values: dict[str, float] = {"unsafe/sample_size": float(sizes)}
    if sizes:
        values["unsafe/train_loss"] = float(torch.cat([chunk["loss"] for chunk in observed]).float().mean())
    for group in engine.current_plan.groups:
        norms = [chunk[key] for chunk in observed if (key := f"norm/{group.name}") in chunk]
        if norms:
            joined = torch.cat(norms)
            values[f"unsafe/median_norm/{group.name}"] = float(joined.median())
            values[f"unsafe/clip_fraction/{group.name}"] = float((joined > group.S).float().mean())
    for name, value in values.items():
        log_released(pl_module, name, value)


@contextmanager
def as_in_round(trainer: pl.Trainer, t: int, place: tuple[int, int], args: list[Any]) -> Iterator[None]:
    """Within, the Trainer's counters say round `t` at (epoch, batch index), and optimizers' settings are halved.

    `args` of training_step after the batch, batch_idx first, are changed in place.
    """
    loop, (epoch, batch) = trainer.fit_loop, place
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    batches = loop.epoch_loop.batch_progress.current
    counts = [(loop.epoch_progress.current, epoch), (steps, t), (batches, batch)]
    before = [dict(vars(count)) for count, _ in counts]
    original_args, is_last = [*args], loop.epoch_loop.batch_progress.is_last_batch
    try:
        for count, number in counts:
            vars(count).update(dict.fromkeys(vars(count), number))
        loop.epoch_loop.batch_progress.is_last_batch = not is_last
        args[:1] = [batch] if args else []
        with later_settings(trainer.optimizers):
            yield
    finally:
        for (count, _), was in zip(counts, before, strict=True):
            vars(count).update(was)
        loop.epoch_loop.batch_progress.is_last_batch = is_last
        args[:] = original_args


@contextmanager
def later_settings(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Halves the optimizers' settings in the block, as a scheduler may do."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = [(group, key, value) for group in groups for key, value in group.items() if _is_number(value)]
    try:
        for group, key, value in settings:
            group[key] = value / 2
        yield
    finally:
        for group, key, value in settings:
            group[key] = value


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, torch.Tensor) and value.dim() == 0)
