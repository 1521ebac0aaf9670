"""Training that cannot work, told by what is public: the weights, which are released, and the validation set."""

import math
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from dpexp.errors import ConfigError
from dpexp.training.classifier import Classifier

IN_A_ROW = 2  # evaluations
_LOOKS = 100  # at the weights, during one training


class Watch(pl.Callback):
    """Stops a training whose model does not take the validation set's records, whose weights are no numbers any more,
    or whose validation loss is none at IN_A_ROW evaluations.

    Args:
        rounds: of the training; the weights are looked at after 1, 2, 4, 8, … of them, and about a hundred times.
    """

    def __init__(self, rounds: int) -> None:
        self._every = math.ceil(rounds / _LOOKS)
        self._without_loss = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, Classifier):
            _try(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step
        if done.bit_count() == 1 or done % self._every == 0:
            _refuse_no_numbers(pl_module, done)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_no_numbers(pl_module, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = {name: value for name, value in trainer.callback_metrics.items() if name.endswith("loss")}
        nan = [name for name, value in losses.items() if bool(torch.isnan(value).any())]
        self._without_loss = self._without_loss + 1 if nan else 0
        if self._without_loss >= IN_A_ROW:
            raise ConfigError(
                f"{nan[0]} was NaN at {IN_A_ROW} evaluations in a row, the last after {trainer.global_step} rounds: "
                "the model gives no numbers for some records of the validation set. Lower the learning rate "
                "(optimizer.lr), or look at the model or the loss. Training stops."
            )


def _refuse_no_numbers(module: pl.LightningModule, rounds: int) -> None:
    trained = ((name, weights) for name, weights in module.named_parameters() if weights.requires_grad)
    broken = next((name for name, weights in trained if not bool(weights.isfinite().all())), None)
    if broken is not None:
        raise ConfigError(
            f"after {rounds} rounds the weights {broken} are no finite numbers any more; lower the learning rate "
            "(optimizer.lr), or choose trainer.precision=32-true. Training stops."
        )


def _try(trainer: pl.Trainer, module: Classifier) -> None:
    """Asks the classifier for its scores of a batch of the validation set, which is taken as public."""
    data: pl.LightningDataModule = trainer.datamodule  # type: ignore[attr-defined]
    loader = data.val_dataloader() if is_overridden("val_dataloader", data) else None
    if not isinstance(loader, DataLoader):
        return
    was, shape = module.training, "unknown"
    module.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
            batch = data.on_before_batch_transfer(next(iter(loader)), 0)
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), module.device)
            batch = data.on_after_batch_transfer(batch, 0)
            if isinstance(batch, Mapping):
                shape = ", ".join(f"{name} {list(held.shape[1:])}" for name, held in batch.items())
                module.loss_and_scores(batch)
                return
            x, y = batch
            shape = str(list(x.shape[1:]))
            scores, most = module(x), int(y.max())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model: it cannot score the validation set's records, of shape {shape}; data.shape, or the model's own "
            f"arguments, must fit them: {' '.join(str(error).split())[:200]}."
        ) from error
    finally:
        module.train(was)
    if scores.dim() < 2 or most >= scores.shape[1]:
        raise ConfigError(
            f"model: its scores of {len(x)} records have the shape {list(scores.shape)}, but the validation set has a "
            f"label {most}; data.classes, or the model's own arguments, must give at least {most + 1} classes."
        )
