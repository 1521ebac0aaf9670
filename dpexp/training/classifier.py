"""A LightningModule for classifiers, and augmentation: several random views of each record."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torchmetrics.functional import r2_score
from torchmetrics.functional.classification import (
    multiclass_auroc,
    multiclass_calibration_error,
    multiclass_f1_score,
    multiclass_recall,
)

import dpexp
from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError, RecordError

Augment = Callable[[Tensor], Tensor]
_MAX_RECALLS = 20  # classes
_SGD_DISTANCE, _ADAM_DISTANCE = 20.0, 0.28  # D and A: the best of five tasks at ε = 0.5 to 8 and T = 12 to 1 130


def views(batch: Any, augment: Augment, multiplicity: int = 1) -> Any:
    """Replaces a batch (x, y, …) of B records by one of B·K rows: K = `multiplicity` independent random views of each
    x, with y and further tensors repeated.

    The mean loss over the rows is that over the records, with each record's loss averaged over its views (De et al.
    2022, arXiv 2204.13650, section 3.2).

    Examples:
        >>> import dpexp, torch
        >>> x, y = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])
        >>> rows, labels = dpexp.views((x, y), augment=torch.rand_like, multiplicity=3)
        >>> rows.shape, labels
        (torch.Size([6, 1, 4, 4]), tensor([0, 0, 0, 1, 1, 1]))

    Args:
        augment: one example's x -> a view of it, of a fixed shape. It should draw with torch, and not branch on random
            values (`torch.where`, `gather`); otherwise records are processed one at a time, which is slow.

    Raises:
        RecordError: the batch is not a tuple or list that begins with a tensor.
    """
    if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
        raise RecordError(
            f"augment: batches must be (x, y, …), and a batch of the data is a {type(batch).__name__}; "
            "set augment=none."
        )
    x, *others = batch
    rows = torch.stack([augment(example) for example in x for _ in range(multiplicity)])
    return rows, *(o.repeat_interleave(multiplicity, 0) if isinstance(o, Tensor) else o for o in others)


class FlipCrop:
    """Random horizontal flips and crops of images [C, H, W], padded by reflection, as in De et al. 2022.

    Args:
        max_shift: an image is shifted by -max_shift, …, max_shift pixels in each direction.
        flip: whether to flip with probability 1/2; False for images that change their meaning, such as digits.
    """

    def __init__(self, max_shift: int = 4, flip: bool = True) -> None:
        if max_shift < 0:
            raise ConfigError(f"augment.max_shift={max_shift} must be at least 0.")
        self.max_shift, self.flip = max_shift, flip

    def __call__(self, x: Tensor) -> Tensor:
        """[C, H, W] -> [C, H, W], by one `gather` with random indices, which vmap can batch."""
        if x.dim() != 3 or min(x.shape[1:]) <= self.max_shift:
            raise RecordError(
                f"augment.max_shift={self.max_shift}: flip_crop takes images [C, H, W] with more than max_shift pixels "
                f"in each direction, and the data's x has shape {list(x.shape)}."
            )
        _, height, width = x.shape
        shift = torch.randint(-self.max_shift, self.max_shift + 1, (2,), device=x.device)
        rows = torch.arange(height, device=x.device) + shift[0]
        columns = torch.arange(width, device=x.device) + shift[1]
        if self.flip:
            columns = torch.where(torch.rand((), device=x.device) < 0.5, width - 1 - columns, columns)
        at = (_mirrored(rows, height)[:, None] * width + _mirrored(columns, width)).flatten()
        return x.flatten(1).gather(1, at.expand(len(x), -1)).reshape(x.shape)


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Indices beyond an edge are mirrored at it, as in torch's padding "reflect"."""
    return size - 1 - (size - 1 - index.abs()).abs()


class Classifier(pl.LightningModule):
    """Trains `model` on batches (x, y), with cross entropy if y are classes and the mean squared error if they are
    numbers; or on mappings with the loss that the model computes from them, as models of transformers do.

    Examples:
        >>> import dpexp, torch
        >>> module = dpexp.Classifier(torch.nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> module.training_step((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))).shape
        torch.Size([])

    Args:
        optimizer: parameters -> optimizer; None: it is set before the training.
        scheduler: optimizer -> learning-rate scheduler, stepped every round; or None.
        augment: makes one random view of an example (see `views`); None: no augmentation.
        multiplicity: number of views K over which a record's training loss is averaged.
        class_weights: one weight per class [classes], or a function that returns them in each step, for a weighted mean
            loss. In private training a record's clipped gradient is multiplied by its weight divided by the largest.
    """

    OBJECTIVES: tuple[str, ...] = (
        "test_loss",
        "test_accuracy",
        "test_balanced_accuracy",
        "test_auc",
        "test_macro_f1",
        "test_calibration_error",
        "test_r2",
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        augment: Augment | None = None,
        multiplicity: int = 1,
        class_weights: Tensor | Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.augment = augment
        self.multiplicity = multiplicity
        self._weights_now = class_weights if callable(class_weights) else None
        self.register_buffer("class_weights", None if callable(class_weights) else class_weights, persistent=False)
        self._tested: list[tuple[Tensor, Tensor]] = []  # scores and labels

    def forward(self, x: Tensor) -> Tensor:
        return scores_of(self.model(x))

    def loss_and_scores(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Mean loss and scores [B, classes, ...] of a batch; no scores if a model gives none."""
        if not isinstance(batch, Mapping):
            x, y = batch
            scores = self(x)
            if y.is_floating_point():
                return F.mse_loss(scores.reshape(y.shape), y), scores.reshape(y.shape)
            return F.cross_entropy(scores, y), scores
        outputs = self.model(**batch)
        loss = getattr(outputs, "loss", None)
        if loss is None:
            raise RecordError(
                f"data: its batches hold {', '.join(batch)}, from which {type(self.model).__name__} computes no loss; "
                "add `labels` for a model of transformers, and use tuples (x, y) for any other model."
            )
        return loss, getattr(outputs, "logits", None)

    def metrics(self, stage: str, batch: Any, loss: Tensor, scores: Tensor | None) -> dict[str, Tensor]:
        """What is logged of a batch, by name."""
        y, metrics = _labels(batch), {f"{stage}_loss": loss}
        if scores is not None and scores.dim() == y.dim() + 1 and not y.is_floating_point():
            metrics[f"{stage}_accuracy"] = (scores.argmax(1) == y).float().mean()
        return metrics

    def training_step(self, batch: Any) -> Tensor:
        if self.augment is not None:
            batch = views(batch, self.augment, self.multiplicity)
        loss, scores = self.training_loss(batch)
        self.log_dict(self.metrics("train", batch, loss, scores))
        return loss

    def training_loss(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """What `loss_and_scores` gives, with classes weighted."""
        loss, scores = self.loss_and_scores(batch)
        weights = self._weights_now() if self._weights_now is not None else self.class_weights
        if isinstance(weights, Tensor):
            loss = _weighted_loss(scores, _labels(batch), weights.to(loss))
        return loss, scores

    def validation_step(self, batch: Any) -> Tensor | None:
        loss, scores = self.loss_and_scores(batch)
        metrics = self.metrics("test", batch, loss, scores)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(_labels(batch)))
        return scores

    def test_step(self, batch: Any) -> None:
        scores = self.validation_step(batch)
        if scores is not None and scores.dim() < 3:
            self._tested.append((scores.float(), _labels(batch)))

    def on_test_epoch_end(self) -> None:
        if self._tested:
            self.log_dict(_metrics_of_all(*map(torch.cat, zip(*self._tested, strict=True))))
        self._tested = []

    def configure_optimizers(self) -> Any:
        assert self.optimizer is not None  # as dpexp.commands.build sets it
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def noisy_learning_rate(optimizer: Mapping[str, Any], rounds: int, gradient_norm: float) -> float:
    """The learning rate for a number of rounds with noise, `optimizer.lr: auto`.

    SGD: (1 - momentum) D/(G √T), the step of SGD for gradients of norm at most G, with noise (Bassily et al. 2014,
    arXiv 1405.7085, algorithm 1). Adam, whose steps are no longer where there is more noise: A/√T.

    Args:
        optimizer: the section of the configuration; rounds: T; gradient_norm: G.
    """
    if optimizer["_target_"] == "torch.optim.SGD":
        return (1 - optimizer.get("momentum", 0)) * _SGD_DISTANCE / (gradient_norm * math.sqrt(rounds))
    if optimizer["_target_"] == "torch.optim.Adam":
        return _ADAM_DISTANCE / math.sqrt(rounds)
    raise ConfigError(
        f"optimizer.lr=auto is for torch.optim.SGD and torch.optim.Adam; give {optimizer['_target_']} a number."
    )


def _weighted_loss(scores: Tensor | None, y: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the cross entropy. For a single record `dpexp.weigh` applies the weight."""
    if scores is None or scores.dim() != y.dim() + 1 or y.is_floating_point():
        raise RecordError(
            "data.class_weights need labels that are integers, one class per record; set data.class_weights=null."
        )
    own = weights[y]
    dpexp.weigh(own.mean() / weights.max())
    losses = own * F.cross_entropy(scores, y, reduction="none")
    return losses.sum() / own.sum().clamp(min=torch.finfo(own.dtype).tiny)


def _labels(batch: Any) -> Tensor:
    return batch["labels"] if isinstance(batch, Mapping) else batch[1]


def _metrics_of_all(scores: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Metrics of a test set that are no mean over its records; of AUC and F1, the mean over the classes.

    The majority accuracy is that of always giving the test set's most frequent class; the balanced accuracy is the mean
    recall of the classes that the test set has. The calibration error compares confidence and accuracy in 15 bins
    (Naeini et al. 2015).
    """
    if y.is_floating_point() and scores.shape == y.shape and len(y) > 1:
        return {"test_r2": r2_score(scores, y)}
    if y.dim() != 1 or y.is_floating_point() or scores.dim() != 2 or scores.shape[1] < 2 or len(y.unique()) < 2:
        return {}
    p, classes = scores.softmax(1), scores.shape[1]
    counts = y.bincount(minlength=classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that the test set lacks
        recall = multiclass_recall(p, y, classes, average="none")
        recalls = (
            {f"test_recall_{k}": recall[k] for k in range(classes) if counts[k]} if classes <= _MAX_RECALLS else {}
        )
        return recalls | {
            "test_majority_accuracy": counts.max() / len(y),
            "test_balanced_accuracy": recall[counts > 0].mean(),
            "test_auc": multiclass_auroc(p, y, classes),
            "test_macro_f1": multiclass_f1_score(p, y, classes, average="macro"),
            "test_calibration_error": multiclass_calibration_error(p, y, classes, n_bins=15),
        }


def scores_of(outputs: Any) -> Tensor:
    """The scores in a model's output: its `logits`, as in transformers, or the output itself."""
    return getattr(outputs, "logits", outputs)
