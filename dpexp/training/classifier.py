"""A LightningModule around a plain classifier."""

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dpexp
from dpexp.errors import ConfigError, RecordError

Augment = Callable[[Tensor], Tensor]


def views(batch: Any, augment: Augment, multiplicity: int = 1) -> Any:
    """A batch (x, y, …) of B records as one of B·K rows: K views of each x, drawn independently, and whatever goes with
    it K times. The mean loss over them is that of the records.

    Args:
        augment: one example's x -> a view of it, of the same shape whatever is drawn. To be computed for many records
            at once it must draw by torch (`torch.rand`, `torch.randint`) and not branch on what it draws
            (`torch.where`, `gather`); it is right, and slow, otherwise.
        multiplicity: K.

    Raises:
        RecordError: the batch is no tuple that begins with a tensor.
    """
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
        raise RecordError(
            f"augment: views are made of x in batches (x, y, …), and a batch of the data is a {type(batch).__name__}; "
            "set augment=none."
        )
    x, *others = batch
    several = torch.stack([augment(one) for one in x for _ in range(multiplicity)])
    return several, *(_repeated(other, multiplicity) for other in others)


class FlipCrop:
    """Horizontal flips with probability 1/2 and shifts by up to some pixels, for images [C, H, W]: De et al.'s.

    Args:
        max_shift: an image is shifted by -max_shift, …, max_shift pixels in each direction, which is a random crop of
            the image with so many pixels more on every side.
        padding: what is on them: "reflect", the image in a mirror, as in the paper; or "zeros".
        flip: False for images that mean something else in a mirror, such as digits.

    Raises:
        ConfigError: another padding, or pixels that are none.
    """

    def __init__(self, max_shift: int = 4, padding: str = "reflect", flip: bool = True) -> None:
        if padding not in ("reflect", "zeros"):
            raise ConfigError(f"augment.padding={padding} is unknown; choose reflect or zeros.")
        if max_shift < 0:
            raise ConfigError(f"augment.max_shift={max_shift} must be at least 0.")
        self.max_shift, self.padding, self.flip = max_shift, padding, flip

    def __call__(self, x: Tensor) -> Tensor:
        """[C, H, W] -> [C, H, W]: one lookup by drawn indices, so that many records' views are one operation.

        Raises:
            RecordError: x is no image, or too small for what it is shifted by.
        """
        if x.dim() != 3 or min(x.shape[1:]) <= self.max_shift:
            raise RecordError(
                f"augment.max_shift={self.max_shift}: flip_crop takes images [C, H, W] of more pixels than that, "
                f"and the "
                f"data's x has the shape {list(x.shape)}."
            )
        _, height, width = x.shape
        shift = torch.randint(-self.max_shift, self.max_shift + 1, (2,), device=x.device)
        rows = torch.arange(height, device=x.device) + shift[0]
        columns = torch.arange(width, device=x.device) + shift[1]
        if self.flip:
            columns = torch.where(torch.rand((), device=x.device) < 0.5, width - 1 - columns, columns)
        at = (_mirrored(rows, height)[:, None] * width + _mirrored(columns, width)).flatten()
        seen = x.flatten(1).gather(1, at.expand(len(x), -1)).reshape(x.shape)
        if self.padding == "reflect":
            return seen
        return torch.where(_inside(rows, height)[:, None] & _inside(columns, width), seen, 0)


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Beyond its edges an image begins to go back, as in torch's padding "reflect"."""
    return size - 1 - (size - 1 - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _repeated(other: Any, multiplicity: int) -> Any:
    return other.repeat_interleave(multiplicity, 0) if isinstance(other, Tensor) else other


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
