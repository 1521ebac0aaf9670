"""Data whose inputs come as users have them: rows of a table, images, texts."""

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.training.classifier import scores_of

if TYPE_CHECKING:  # slow to import
    from pandas import DataFrame, Series

_BATCH = 1000  # inputs that a model predicts for at once
_ROWS = 2**18  # read at once
_DELIMITERS = ",;\t|"
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)[.]0|-?[1-9]([.][0-9]{1,16})?e[+](1[6-9]|[2-9][0-9]|[12][0-9]{2}|30[0-8])")


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

    file = Path(os.path.expanduser(path))
    try:
        if file.suffix.lower() == ".parquet":
            from pyarrow import parquet

            source = parquet.ParquetFile(file)
            _check_names(f"{key}={path}", source.schema_arrow.names)
            for batch in source.iter_batches(_ROWS):
                yield pd.DataFrame(dict(zip(batch.schema.names, map(_series, batch.columns), strict=True)))
            return
        first, form = layout_of(file)
        if not first.strip():
            raise ConfigError(f"{key}={path} is empty; its first line must name the columns.")
        with pd.read_csv(
            file, dtype=str, keep_default_na=False, skipinitialspace=True, chunksize=_ROWS, header=None, **form
        ) as parts:
            rows = next(parts)
            names = rows.iloc[0].tolist()  # beyond which no row may reach
            _check_names(f"{key}={path}", [name.strip() for name in names])
            yield from (part.set_axis(names, axis=1).fillna("") for part in chain([rows[1:]], parts))
    except ConfigError:
        raise
    except UnicodeError as error:
        raise ConfigError(
            f"{key}={path} is not in UTF-8, or UTF-16 with its mark; convert it, as by iconv -f latin1 -t utf-8 (or, "
            "if each second byte is zero, iconv -f utf-16le)."
        ) from error
    except Exception as error:  # each compression has its own
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(f"{key}={path} cannot be read as a table: {reason}.") from error


def layout_of(file: Path) -> tuple[str, dict[str, Any]]:
    """The first line of a CSV file, and its `encoding` and `sep` for pandas: the delimiter that is in it most often."""
    encoding = encoding_of(file)
    with opened(file, encoding) as source:
        first = source.handle.readline().rstrip("\r\n")
    if "\0" in first:
        raise UnicodeError("no text has a NUL")
    return first, {"encoding": encoding, "sep": max(_DELIMITERS, key=first.count)}


def opened(file: Path, encoding: str | None = None) -> Any:
    """A file, which may be compressed, for reading bytes or, in an encoding, texts."""
    from pandas.io.common import get_handle

    return get_handle(file, "r" if encoding else "rb", encoding=encoding, is_text=bool(encoding), compression="infer")


def encoding_of(file: Path) -> str:
    """UTF-16 or UTF-32 if a file begins with their mark, else UTF-8."""
    with opened(file) as source:
        start = source.handle.read(4)
    marks = ((b"\xff\xfe\0\0", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
    return next((name for mark, name in marks if start.startswith(mark)), "utf-8-sig")


def _check_names(where: str, names: Sequence[str]) -> None:
    for name in names:
        if not name or names.count(name) > 1:
            said = f"{name} occurs twice" if name else "one has no name"
            raise ConfigError(f"{where}: each column must have a name of its own, and {said}.")


def _series(column: Any) -> "Series":
    """A column of a Parquet file; where its type is not one of numbers, each value is decoded by itself."""
    from pandas import ArrowDtype, Series
    from pyarrow import types

    if types.is_integer(column.type) or types.is_floating(column.type):
        return column.to_pandas(types_mapper=ArrowDtype)
    values = [None] * len(column)
    for k, value in enumerate(column):
        with suppress(Exception):  # Python has no such value, as a date after the year 9999
            values[k] = value.as_py()
    return Series(values, dtype=object)


def texts_of(values: "Series") -> "Series":
    """`text_of` each value."""
    from pandas import StringDtype

    if not isinstance(values.dtype, StringDtype):
        return values.astype(object).map(text_of).astype(str)
    texts = values.fillna("").astype(str).str.strip()
    may_be_float = texts.str.endswith(".0") | texts.str.contains("e+", regex=False)
    return texts.where(~may_be_float, texts[may_be_float].map(text_of))


def text_of(value: Any) -> str:
    """A value as a text without blanks around it; "" if it is missing. A whole number as Python writes floats, such as
    1.0 or 1e+16, becomes its digits, since other rows may have made its column one of floats: 1.0 and "1" are one."""
    from pandas import NA

    if value is None or value is NA or value != value:
        return ""
    text = str(value).strip()
    if _WHOLE.fullmatch(text):
        return f"{Decimal(text) or Decimal():f}".removesuffix(".0")
    return text
