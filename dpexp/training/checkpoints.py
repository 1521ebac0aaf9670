"""A checkpoint to go on from."""

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor


class Checkpoints(pl.Callback):
    """Keeps the last state of a training.

    It is saved every so many rounds and when the training is interrupted, behind the callback that counts the rounds.

    Args:
        every: rounds; None for interruptions only.
    """

    def __init__(self, path: Path, every: int | None) -> None:
        self._path = path
        self._every = every

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._every and trainer.global_step % self._every == 0:
            save(trainer, self._path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt | SystemExit):
            return
        if trainer.state.fn == TrainerFn.FITTING and trainer.global_step:
            save(trainer, self._path)


def save(trainer: pl.Trainer, path: Path) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    if trainer.world_size == 1:
        trainer.save_checkpoint(beside)
    elif trainer.is_global_zero:  # without waiting for the others, of which one may be interrupted elsewhere
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), beside)
    else:
        return
    os.replace(beside, path)


class LastCheckpoint(pl.Callback):
    """Keeps the state of the last round, for as long as the model is not kept, before a callback behind it replaces
    the weights by an average."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        save(trainer, self._path)


class LastWeights(pl.Callback):
    """Keeps the weights of the last round, before a callback behind it replaces them by an average."""

    weights: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}
