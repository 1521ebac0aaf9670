"""A LightningModule around a plain classifier."""

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dpexp
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
        class_weights: a weight of each class, or what gives them in each step, by which losses are averaged in
            training. In private training, where a record is by itself, they weigh its clipped gradient, as parts of the
            largest.
    """

    METRICS = ("test_loss", "test_accuracy")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        augment: Augment | None = None,
        multiplicity: int = 1,
        class_weights: Tensor | Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self.scheduler = scheduler
        self.augment = augment
        self.multiplicity = multiplicity
        self._weights_now = class_weights if callable(class_weights) else None
        self.register_buffer("class_weights", None if callable(class_weights) else class_weights, persistent=False)

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
        weights = self._weights_now() if self._weights_now is not None else self.class_weights
        if isinstance(weights, Tensor):
            loss = _weighed(scores, _labels(batch), weights.to(loss))
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


def _weighed(scores: Tensor | None, y: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy, of which the mean goes by weights; of one record it is the same, and `dpexp.weigh` does the rest.

    Raises:
        RecordError: labels are no classes.
    """
    if scores is None or scores.dim() != y.dim() + 1 or y.is_floating_point():
        raise RecordError("data.class_weights: a record's label must be a whole number, its class; leave them out.")
    own = weights[y]
    dpexp.weigh(own.mean() / weights.max())
    losses = own * F.cross_entropy(scores, y, reduction="none")
    return losses.sum() / own.sum().clamp(min=torch.finfo(own.dtype).tiny)


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
