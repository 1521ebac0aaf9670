"""Data whose inputs come as users have them: rows of a table, images, texts."""

import csv
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.training.classifier import scores_of

if TYPE_CHECKING:  # slow to import
    from pandas import DataFrame

_BATCH = 1000  # inputs that a model predicts for at once
_ROWS = 2**18  # read at once
_DELIMITERS = ",;\t|"


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
        _ = self.test  # a mistake in it is found before training
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 1000)

    def read_inputs(self, path: Path) -> "DataFrame":
        """New inputs in a file, one per row; by default a table."""
        from pandas import concat

        return concat(rows_of("data", str(path)), ignore_index=True)

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


def rows_of(key: str, path: str) -> Iterator["DataFrame"]:
    """The rows of a CSV or Parquet file, in parts; every value of a CSV file is a text.

    Args:
        key: the configuration key of the path, for messages.

    Raises:
        ConfigError: the file cannot be read as a table with a header.
    """
    import pandas as pd

    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            for batch in parquet.ParquetFile(file).iter_batches(_ROWS):
                yield batch.to_pandas()
            return
        header = _header(key, file)
        with pd.read_csv(
            file, sep=header, dtype=str, keep_default_na=False, skipinitialspace=True, chunksize=_ROWS,
            encoding="utf-8-sig", index_col=False,
        ) as parts:  # fmt: skip
            yield from (part.fillna("") for part in parts)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not in UTF-8; convert it, as by iconv -f latin1 -t utf-8.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(f"{key}={path} cannot be read as a table: {reason}.") from error


def _header(key: str, file: Path) -> str:
    """The delimiter of a CSV file, which occurs most often in its header."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        first = lines.readline().rstrip("\r\n")
    if not first:
        raise ConfigError(f"{key}={file} is empty; its first line must name the columns.")
    delimiter = max(_DELIMITERS, key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        raise ConfigError(
            f"{key}={file}: its first line must name each column once, and {twice[0] or 'a name without letters'} "
            "occurs twice." if twice else f"{key}={file}: a column has no name in the first line."
        )  # fmt: skip
    return delimiter
