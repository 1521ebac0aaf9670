"""Data whose inputs come as users have them: rows of a table, images, texts."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpexp._lightning_compat import pl
from dpexp.training.classifier import scores_of

if TYPE_CHECKING:  # slow to import
    from pandas import DataFrame

_BATCH = 1000  # inputs that a model predicts for at once


class RawData(pl.LightningDataModule):
    """A data module that also encodes new inputs, for `python -m dpexp predict` and served models.

    Its constructor reads no data: where a model predicts, the training set may not exist.

    Attributes:
        class_names: of a classifier's classes, in order; None: the model is no classifier.
        train, test: the data sets, which are read when they are first asked for.
        batch_size: of training without privacy.
    """

    class_names: Sequence[str] | None = None
    train: Any
    test: Any
    batch_size: int

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 1000)

    @abstractmethod
    def read_inputs(self, path: Path) -> "DataFrame":
        """New inputs in a file, one per row."""

    @abstractmethod
    def encode(self, inputs: "DataFrame") -> Any:
        """The model's input: x [N, …]."""

    @abstractmethod
    def example(self) -> "DataFrame":
        """Two inputs of the test set, which is public."""

    def outputs(self, model: nn.Module, x: Any) -> Tensor:
        """The model's outputs [N, …] for what `encode` returns."""
        return torch.cat([scores_of(model(part)) for part in x.split(_BATCH)])

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        """Writes what a trained model gives besides its weights into its job's folder; by default nothing."""

    def decode(self, outputs: Tensor) -> Tensor:
        """Predicted numbers [N] in their own unit, from the outputs [N] of a model that is no classifier."""
        return outputs

    def predictions(self, model: nn.Module, inputs: "DataFrame") -> "DataFrame":
        """A column `prediction`, and for classifiers the probability p_NAME of each class; one row per input."""
        from pandas import DataFrame

        with torch.no_grad():
            outputs = self.outputs(model, self.encode(inputs)).float()
        if self.class_names is None:
            return DataFrame({"prediction": self.decode(outputs.flatten())}, index=inputs.index)
        p = outputs.softmax(1)
        columns = {f"p_{name}": p[:, k] for k, name in enumerate(self.class_names)}
        best = [self.class_names[k] for k in p.argmax(1).tolist()]
        return DataFrame({"prediction": best} | columns, index=inputs.index)
