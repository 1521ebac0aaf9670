"""The private names of Lightning that dpexp uses, wrapped in functions; no other module uses them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.optimizer import _MockOptimizer as NoOptimizer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection

__all__ = ["NoOptimizer"]


def training_loader(trainer: pl.Trainer) -> Any:
    """The training loader, whether given to fit, by the module or by a data module."""
    return trainer.fit_loop._data_source.dataloader()


def replace_training_loader(trainer: pl.Trainer, loader: Any) -> None:
    """Replaces the training loader; must be called no later than on_fit_start."""
    source = trainer.fit_loop._data_source
    source.instance, source.name = loader, ""


def validation_loader(trainer: pl.Trainer) -> Any:
    """The validation loader, or None."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return source.dataloader() if source.is_defined() else None


@contextmanager
def results_dropped(trainer: pl.Trainer) -> Iterator[None]:
    """Drops what the module logs within this context."""
    loop = trainer.fit_loop.epoch_loop
    before, loop._results = loop._results, _ResultCollection(training=True)
    try:
        yield
    finally:
        loop._results = before


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The checkpoint that save_checkpoint would write, without waiting for other processes."""
    return trainer._checkpoint_connector.dump_checkpoint()


def start_method(strategy: DDPStrategy) -> str:
    return strategy._start_method


def syncs_batch_norm(strategy: DDPStrategy) -> bool:
    return strategy._layer_sync is not None


def has_comm_hook(strategy: DDPStrategy) -> bool:
    return strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None
