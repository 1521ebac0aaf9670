"""A LightningModule around a plain classifier."""

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from dpexp.errors import RecordError
from dpexp.training.augment import Augment, views


class Classifier(pl.LightningModule):
    """Trains `model` with cross entropy on (x, y) batches; on batches that name what they hold, as the models of
    transformers take them, with the loss that the model itself computes from its `labels`.

    Args:
        optimizer: parameters -> optimizer.
        scheduler: optimizer -> learning rate scheduler, stepped every round; or None.
        augment: makes a view of a record (see `augment.views`); None: a record is its only one.
        multiplicity: of so many views the mean is a record's loss in training.
    """

    METRICS = ("test_loss", "test_accuracy")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        augment: Augment | None = None,
        multiplicity: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self.scheduler = scheduler
        self.augment = augment
        self.multiplicity = multiplicity

    def forward(self, x: Tensor) -> Tensor:
        return scores_of(self.model(x))

    def loss_and_scores(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Of (x, y), or of a batch by name.

        Raises:
            RecordError: the model computes no loss of its own.
        """
        if not isinstance(batch, Mapping):
            x, y = batch
            scores = self(x)
            return F.cross_entropy(scores, y), scores
        outputs = self.model(**batch)
        loss = getattr(outputs, "loss", None)
        if loss is None:
            raise RecordError(
                f"data: its batches hold {', '.join(batch)}, of which {type(self.model).__name__} computes no loss; "
                "give a model of transformers `labels` too, another model tuples (x, y)."
            )
        return loss, getattr(outputs, "logits", None)

    def training_step(self, batch: Any) -> Tensor:
        if self.augment is not None:
            batch = views(batch, self.augment, self.multiplicity)
        loss, scores = self.loss_and_scores(batch)
        self.log_dict(_measured("train", batch, loss, scores))
        return loss

    def validation_step(self, batch: Any) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any) -> None:
        self._evaluate(batch)

    def _evaluate(self, batch: Any) -> None:
        loss, scores = self.loss_and_scores(batch)
        measured = _measured("test", batch, loss, scores)
        self.log_dict(measured, on_step=False, on_epoch=True, batch_size=len(_labels(batch)))

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def _labels(batch: Any) -> Tensor:
    return batch["labels"] if isinstance(batch, Mapping) else batch[1]


def _measured(on: str, batch: Any, loss: Tensor, scores: Tensor | None) -> dict[str, Tensor]:
    y, measured = _labels(batch), {f"{on}_loss": loss}
    if scores is not None and scores.dim() == y.dim() + 1 and not y.is_floating_point():
        measured[f"{on}_accuracy"] = (scores.argmax(1) == y).float().mean()
    return measured


def scores_of(outputs: Any) -> Tensor:
    """Those of a model of transformers are among other things."""
    return getattr(outputs, "logits", outputs)
