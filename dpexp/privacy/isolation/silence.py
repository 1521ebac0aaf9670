"""Nothing is logged from where data is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection

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
    It gives the value for release, which is dropped unless the plan names it."""
    module.log = lambda name, value, *args, **kwargs: release(name, value)  # type: ignore[method-assign]


def log_although_mute(module: pl.LightningModule, name: str, value: float, **options: Any) -> None:
    """What is released, or shown as unsafe."""
    type(module).log(module, name, value, on_step=True, on_epoch=False, **options)


def unmute(module: pl.LightningModule) -> None:
    module.__dict__.pop("log", None)
