"""A LightningModule around a plain classifier."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


class Classifier(pl.LightningModule):
    """Trains `model` with cross entropy on (x, y) batches.

    Args:
        optimizer: parameters -> optimizer.
        scheduler: optimizer -> learning rate scheduler, stepped every round; or None.
    """

    METRICS = ("test_loss", "test_accuracy")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self.scheduler = scheduler

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._evaluate(batch)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._evaluate(batch)

    def _evaluate(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        scores = self(x)
        values = F.cross_entropy(scores, y), (scores.argmax(1) == y).float().mean()
        self.log_dict(
            dict(zip(self.METRICS, values, strict=True)),
            on_step=False,
            on_epoch=True,
            batch_size=len(y),
        )

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
