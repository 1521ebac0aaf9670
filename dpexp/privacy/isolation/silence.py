"""Nothing is logged from where data is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric, MetricCollection

from dpexp.privacy.engine.questions import Unreadable
from dpexp.privacy.given import release


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
    """From now on `log` shows nothing: in training, what a module could tell was computed from records without noise.
    It gives the value for release, which is dropped unless the plan names it. Metrics of torchmetrics that
    `training_step` updates stay empty, and later hooks find nothing in them."""
    module.log = lambda name, value, *args, **kwargs: release(name, value)  # type: ignore[method-assign]
    for metric in _metrics(module):
        if _OWN not in vars(metric):
            own = {name: metric.__dict__.get(name) for name in _EMPTIED}
            vars(metric).update({name: partial(_nothing, metric, name) for name in _EMPTIED} | {_OWN: own})


def log_although_mute(module: pl.LightningModule, name: str, value: float, **options: Any) -> None:
    """What is released, or shown as unsafe."""
    type(module).log(module, name, value, on_step=True, on_epoch=False, **options)


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)
    for metric in _metrics(module):
        for name, own in vars(metric).pop(_OWN, {}).items():
            vars(metric).pop(name, None)
            if own is not None:
                setattr(metric, name, own)


_EMPTIED = ("forward", "update", "compute")
# Attributes of a metric, whose hash changes with its state: what was on it before, and whether an update was dropped.
_OWN, _DROPPED = "_dpexp_own", "_dpexp_dropped"


def _metrics(module: pl.LightningModule) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]


def _nothing(metric: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """In place of a metric's methods: nothing that may be read."""
    if name != "compute":
        vars(metric)[_DROPPED] = True
    elif not vars(metric).get(_DROPPED):
        own = vars(metric)[_OWN]["compute"]
        return own() if own is not None else type(metric).compute(metric)
    return {key: Unreadable() for key in [*metric.keys()]} if isinstance(metric, MetricCollection) else Unreadable()
