"""A checkpoint to go on from."""

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor


class Checkpoints(pl.Callback):
    """Keeps the last state of a training that has not come to its end.

    It is saved every so many rounds, when the training is interrupted, and when it stops early; behind the callback
    that counts the rounds.

    Args:
        every: rounds; None for interruptions only.
        rounds: after which the training is at its end, where no checkpoint is left.
    """

    def __init__(self, path: Path, every: int | None, rounds: int) -> None:
        self._path = path
        self._every = every
        self._rounds = rounds

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._every and trainer.global_step % self._every == 0:
            self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.global_step and isinstance(exception, KeyboardInterrupt | SystemExit):
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step < self._rounds:
            self._save(trainer)
        else:
            self._path.unlink(missing_ok=True)

    def _save(self, trainer: pl.Trainer) -> None:
        """Whole or not at all."""
        beside = self._path.with_suffix(".part")
        trainer.save_checkpoint(beside)
        os.replace(beside, self._path)


class LastWeights(pl.Callback):
    """Keeps the weights of the last round, before a callback behind it replaces them by an average."""

    weights: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}
