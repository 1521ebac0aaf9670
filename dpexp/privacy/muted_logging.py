"""Mutes logging while training_step processes records, and imitates other rounds."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from dpexp._lightning_compat import pl
from dpexp.privacy.gradients.branches import HiddenNumber
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private_metrics import release
from dpexp.privacy.round import PrivateRound


def mute(module: pl.LightningModule, logged: set[str]) -> None:
    """Replaces `log` and metrics of torchmetrics until `unmute`, since in training their values are not private.

    `log` adds the name to `logged` and passes the value on for private release; it is dropped unless the plan has a
    metric of that name. Metrics that `training_step` updates stay empty, and later hooks cannot read them.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged.add(name)
        release(name, value)

    module.log = log  # type: ignore[method-assign]
    mute_metrics(module, logged)


def mute_metrics(module: pl.LightningModule, logged: set[str]) -> None:
    """The same for metrics alone: those of a copy of a muted module have their own methods again."""
    for name, metric in _metrics(module):
        vars(metric).setdefault(_OWN, {method: vars(metric).get(method) for method in _MUTED})
        note = partial(logged.add, f"self.{name}")
        vars(metric).update({method: partial(_muted, metric, method, note) for method in _MUTED})


def log_released(module: pl.LightningModule, name: str, value: float, **options: Any) -> None:
    """Logs a released or unsafe value of a muted module."""
    type(module).log(module, name, value, on_step=True, on_epoch=False, **options)


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)
    for _, metric in _metrics(module):
        for name, own in vars(metric).pop(_OWN, {}).items():
            vars(metric).pop(name, None)
            if own is not None:
                setattr(metric, name, own)


def say_dropped(logged: set[str], plan: PrivacyPlan) -> None:
    """Warns of values of training_step that are not released, by name."""
    names = logged - {vector.name for group in plan.groups for vector in group.vectors}
    if names:
        warnings.warn(
            f"what training_step logs is private, and is dropped: {', '.join(sorted(names))}; to release a value with "
            "noise, give private_metrics.release='{NAME: {clip_norm: 4, budget_share: 0.01}}'"
        )


_MUTED = ("forward", "update", "compute")
# Set on a metric, since its hash changes with its state: methods set on it before, and whether an update was dropped.
_OWN, _DROPPED = "_dpexp_own", "_dpexp_dropped"


def _metrics(module: pl.LightningModule) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric | MetricCollection)]


def _muted(metric: Any, name: str, note: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    """Replaces a metric's methods; the result cannot be read, unless no update was dropped."""
    if name != "compute":
        note()
        vars(metric)[_DROPPED] = True
    elif not vars(metric).get(_DROPPED):
        own = vars(metric)[_OWN]["compute"]
        return own() if own is not None else type(metric).compute(metric)
    return {key: HiddenNumber() for key in [*metric.keys()]} if isinstance(metric, MetricCollection) else HiddenNumber()


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
