"""Lightning's private interface, as far as dpexp uses it: here and nowhere else, under names that say what it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.optimizer import _MockOptimizer as NoOptimizer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection

__all__ = ["NoOptimizer"]


def training_loader(trainer: pl.Trainer) -> Any:
    """From wherever it comes: an argument of fit, the module or a data module."""
    return trainer.fit_loop._data_source.dataloader()


def replace_training_loader(trainer: pl.Trainer, loader: Any) -> None:
    """Before Lightning asks for it, which it does after on_fit_start."""
    source = trainer.fit_loop._data_source
    source.instance, source.name = loader, ""


def validation_loader(trainer: pl.Trainer) -> Any:
    """None: there is none."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return source.dataloader() if source.is_defined() else None


@contextmanager
def results_dropped(trainer: pl.Trainer) -> Iterator[None]:
    """Meanwhile what is logged by way of the module is lost."""
    loop = trainer.fit_loop.epoch_loop
    before, loop._results = loop._results, _ResultCollection(training=True)
    try:
        yield
    finally:
        loop._results = before


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What save_checkpoint would save, without waiting for other processes."""
    return trainer._checkpoint_connector.dump_checkpoint()


def start_method(strategy: DDPStrategy) -> str:
    return strategy._start_method


def syncs_batch_norm(strategy: DDPStrategy) -> bool:
    return strategy._layer_sync is not None


def has_comm_hook(strategy: DDPStrategy) -> bool:
    return strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None
