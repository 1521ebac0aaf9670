"""Data sets in memory, whose test set is taken as public, and a reader of users' files."""

import codecs
import csv
import hashlib
import json
import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from glob import glob
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from pandas import NA, ArrowDtype, DataFrame, Series, concat, factorize
from pandas.io.common import get_handle
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError, in_one_line
from dpexp.training.classifier import scores_of
from dpexp.training.data.hugging_face import is_hugging_face, split_of

_ARRAYS = (".npy", ".npz", ".pt")  # files of numbers
_BATCH = 1000  # inputs that a model predicts for at once
_DELIMITERS = ",;\t|"
_QUOTED = re.compile(rf'(^|[{_DELIMITERS}]) *"(?:[^"]|"")*("|$)')  # a name in quotes, which begins a field
_LONGEST = 2**31 - 1  # characters of a field in a CSV file
_END = 'the"end'  # a line after all others, which is a row by itself unless a quote is open
_BOOLEANS = {"true": "True", "TRUE": "True", "false": "False", "FALSE": "False"}  # a spreadsheet's, and pandas'
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)[.]0|-?[1-9]([.][0-9]{1,16})?e[+](1[6-9]|[2-9][0-9]|[12][0-9]{2}|30[0-8])")


class InMemory(pl.LightningDataModule):
    """Training and test sets in memory.

    Attributes:
        train, test: the data sets.
        class_names: of a classifier's classes, in order, if they have names.
        batch_size, num_workers: of the training loader, for non-private training; private training draws its own
            samples. A job sets both.
        usable_only: the training loader leaves out rows that cannot be used, for non-private training; in private
            training they keep their places. A job sets it.
    """

    train: Any
    test: Any
    class_names: Sequence[str] | None = None
    batch_size = 256
    num_workers = 0
    usable_only = False

    def train_dataloader(self) -> DataLoader:
        _ = self.test  # a mistake in it is found before training
        train = self.train
        if self.usable_only and (usable := getattr(train, "usable", None)) is not None:
            train = Subset(train, usable.nonzero().flatten().tolist())
        return DataLoader(train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 1000)


class RawData(InMemory):
    """Data whose inputs come as users have them, and which encodes new ones, for `python -m dpexp predict` and served
    models.

    Its constructor reads no data: where a model predicts, the training set may not exist. Without `class_names` its
    model is no classifier.
    """

    _text: str | None = None  # the column of documents in a text file
    example_file = "rows.csv"  # for `python -m dpexp predict`

    def input_in_words(self) -> str:
        return f"a row with the columns {', '.join(map(repr, self.example()))}"

    def read_inputs(self, path: Path) -> DataFrame:
        """New inputs in a file, one per row; by default a table."""
        if path.suffix in _ARRAYS:
            raise ConfigError(f"data={path} holds an array; this model takes inputs as its card.md says.")
        return rows_of("data", str(path), self._text)

    @abstractmethod
    def encode(self, inputs: DataFrame) -> Any:
        """The model's input: x [N, …]."""

    @abstractmethod
    def example(self) -> DataFrame:
        """Two inputs of the test set, which is public."""

    def outputs(self, model: nn.Module, x: Any) -> Tensor:
        """The model's outputs [N, …] for what `encode` returns."""
        return torch.cat([scores_of(model(part)) for part in x.split(_BATCH)])

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        """Writes what a trained model gives besides its weights into its job's folder; by default nothing."""

    def decode(self, outputs: Tensor) -> Tensor:
        """Predicted numbers [N] in their own unit, from the outputs [N] of a regression model."""
        return outputs

    def predictions(self, model: nn.Module, inputs: DataFrame) -> DataFrame:
        """A column `prediction`, and for classifiers the probability p_NAME of each class; one row per input."""
        with torch.no_grad():
            outputs = self.outputs(model, self.encode(inputs)).float()
        if self.class_names is None:
            return DataFrame({"prediction": self.decode(outputs.flatten())}, index=inputs.index)
        p = outputs.softmax(1)
        columns = {f"p_{name}": p[:, k] for k, name in enumerate(self.class_names)}
        best = [self.class_names[k] for k in p.argmax(1).tolist()]
        return DataFrame({"prediction": best} | columns, index=inputs.index)


def rows_of(key: str, path: str, text: str | None = None, named: Mapping[str, str] | None = None) -> DataFrame:
    """The rows of a file in UTF-8: of Parquet, of lines of JSON (.jsonl or .json), or of CSV, in which every
    value is a text; of all files that a pattern such as texts/*.jsonl matches, by name; or of the split train, or test,
    of a data set in Hugging Face's format: a folder, or a name on the hub.

    Private rows stay in their places, whatever they hold: a line that is blank, no object, or has more or fewer fields
    than the header is a row without any value. Of public rows, blank lines are left out.

    Args:
        key: the configuration key of the path, for messages.
        text: the column of documents; a file of any other kind than .csv is then a text of them, between blank lines.
        named: of private rows, the columns that are needed, each with the option that names it, or {} for all; None: of
            public rows.

    Raises:
        ConfigError: the file cannot be read so, or private rows lack a column.
    """
    file = Path(os.path.expanduser(path))
    try:
        if is_hugging_face(path):
            split = "test" if key == "data.test_path" else "train"
            rows = _of_hugging_face(split_of(path, None, split, *(named or ())))
        else:
            parts = [_rows_of_file(f"{key}={path}", one, text, named) for one in files_of(path) or [file]]
            # As objects: a missing value in one file must not change how another's numbers are read.
            rows = parts[0] if len(parts) == 1 else concat([one.astype(object) for one in parts], ignore_index=True)
        check_columns(f"{key}={path}", rows, named or {})
        return rows
    except ConfigError:
        raise
    except UnicodeError as error:
        raise ConfigError(f"{key}={path} is {error}.") from error
    except Exception as error:  # each compression has its own
        reason = getattr(error, "strerror", None) or in_one_line(error)[:200]
        raise ConfigError(f"{key}={path} cannot be read: {reason}.") from error


def files_of(path: str) -> list[Path]:
    """A file or folder; or those that match a pattern, by name."""
    file = Path(os.path.expanduser(path))
    return [file] if file.exists() else [Path(found) for found in sorted(glob(str(file)))]


def _rows_of_file(where: str, file: Path, text: str | None, named: Mapping[str, str] | None) -> DataFrame:
    kinds = {suffix.lower() for suffix in file.suffixes}
    if ".parquet" in kinds:
        return _parquet(where, file)
    if kinds & {".jsonl", ".json"}:
        return _json(file, named)
    if text is None or ".csv" in kinds:
        return _csv(where, file, named is None)
    texts = re.split(r"\n(?:[ \t]*\n)+", content_of(file, "replace", has_header=False).replace("\r\n", "\n"))
    return DataFrame({text: [one.strip() for one in texts if one.strip(" \t\n")]}, dtype=object)


def _of_hugging_face(split: Any) -> DataFrame:
    """The rows of a split; a class is given by its name."""
    found = split.with_format("arrow")[:]
    rows = DataFrame({text_of(name): _series(found[name]) for name in found.column_names})
    for name, feature in split.features.items():
        if names := getattr(feature, "names", None):
            known = dict(enumerate(names))
            rows[text_of(name)] = Series([known.get(k) for k in rows[text_of(name)]], dtype=object)
    return rows


def _parquet(where: str, file: Path) -> DataFrame:
    from pyarrow import parquet

    found = parquet.ParquetFile(file).read()
    names = _names(where, found.column_names)
    return DataFrame(dict(zip(names, map(_series, found.columns), strict=True)))


def _json(file: Path, named: Mapping[str, str] | None) -> DataFrame:
    lines = content_of(file, "replace", has_header=False).removesuffix("\n").split("\n")
    found = [_parsed(line) for line in lines if named is not None or line.strip()]
    return DataFrame(found, columns=[*named] if named else None, dtype=object)


def _csv(where: str, file: Path, is_public: bool) -> DataFrame:
    content = content_of(file, "strict" if is_public else "replace")
    delimiter = delimiter_of(content)
    csv.field_size_limit(_LONGEST)
    reader = csv.reader(chain(StringIO(content, newline=""), [_END]), delimiter=delimiter, skipinitialspace=True)
    header = next(filter(None, reader))
    if header == [_END]:
        raise ValueError("No columns to read from file")
    names = _names(where, header)
    rows: list[list[str]] = []
    last: list[str] = []
    for last in reader:
        missing = len(names) - len(last)
        if is_public and missing < 0:
            raise ValueError(f"Expected {len(names)} fields in line {reader.line_num}, saw {len(last)}")
        if last or not is_public:
            kept = last if is_public or not missing else []
            rows.append(kept + [""] * (len(names) - len(kept)))
    if last != [_END]:
        raise ValueError("a quote is never closed")
    return DataFrame(rows[:-1], columns=names, dtype=str)


def content_of(file: Path, errors: str, has_header: bool = True) -> str:
    """The text in a file, which may be compressed.

    Args:
        has_header: the first bytes belong to no record, and are refused if they say that all is in UTF-16.

    Raises:
        UnicodeError: it is not in UTF-8, as those say, or, if `errors` is strict, any byte.
    """
    with get_handle(file, "rb", is_text=False, compression="infer") as source:
        content: bytes = source.handle.read()
    encoding = "windows-1252"
    with suppress(UnicodeDecodeError):
        if not (has_header and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))):
            return content.decode("utf-8-sig", errors)
        encoding = "utf-16"
    raise UnicodeError(f"not in UTF-8; convert it, as by iconv -f {encoding} -t utf-8")


def _parsed(line: str) -> dict[str, Any]:
    """The object in a line of JSON; empty if the line has none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return {text_of(name): value for name, value in found.items()} if isinstance(found, dict) else {}
    return {}


def delimiter_of(content: str) -> str:
    """The delimiter that is most often in the first line of a CSV file, outside quotes.

    Of the header alone: what follows are records, which must not change how others are read.
    """
    header = content.lstrip("\r\n").partition("\n")[0]
    return max(_DELIMITERS, key=_QUOTED.sub(r"\1", header).count)


def check_columns(where: str, rows: DataFrame, named: Mapping[str, str]) -> None:
    """Refuses rows that lack a column; `named`: column -> the option that names it."""
    for name, option in named.items():
        if name not in rows:
            raise ConfigError(f"{where} has no column {name}, which {option} names.")


def in_part(where: str, rows: DataFrame, part: Mapping[str, Any] | None) -> DataFrame:
    """The rows whose hash of a column is in a range; `part` is {column, low, high}, None: all rows."""
    if part is None:
        return rows
    check_columns(where, rows, {part["column"]: "data.part.column"})
    return rows.loc[[part["low"] <= hash_of(text) < part["high"] for text in texts_of(rows[part["column"]])]]


def with_name(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What names a column under `column`, with that name as `text_of` it."""
    return part and {**part, "column": text_of(part["column"])}


def codes_of(people: Series) -> np.ndarray:
    """int64 [N]: a number for each person, in the order of their texts; -1 where there is none."""
    return factorize(people.where(people.ne("")), sort=True)[0]


def hash_of(text: str) -> float:
    """The first 53 bits of SHA-256 as a number in [0, 1)."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) / 2**53


def _names(where: str, written: Sequence[str]) -> list[str]:
    """The names of columns, as `text_of` them."""
    names = [*map(text_of, written)]
    for name in names:
        if not name or names.count(name) > 1:
            said = f"{name} occurs twice" if name else "one has no name"
            raise ConfigError(f"{where}: each column must have a name of its own, and {said}.")
    return names


def _series(column: Any) -> Series:
    """A column of a Parquet file; values that are not numbers are decoded one by one."""
    from pyarrow import types

    if types.is_integer(column.type) or types.is_floating(column.type):
        return column.to_pandas(types_mapper=ArrowDtype)
    values = [None] * len(column)
    for k, value in enumerate(column):
        with suppress(Exception):  # Python has no such value, as a date after the year 9999
            values[k] = value.as_py()
    return Series(values, dtype=object)


def texts_of(values: Series) -> Series:
    """`text_of` each value."""
    return values.astype(object).map(text_of).astype(str)


def text_of(value: Any) -> str:
    """The one form of whatever is compared: a cell, the name of a column or a class, a word of a schema. "" if missing.

    It is Unicode's form NFC, without blanks around it. A truth value has one spelling. A whole number as Python writes
    floats, such as 1.0 or 1e+16, becomes its digits, since other rows may have made its column one of floats: 1.0 and
    "1" are one.
    """
    if value is None or value is NA or value != value:
        return ""
    text = stripped(str(value))
    if _WHOLE.fullmatch(text):
        return f"{Decimal(text) or Decimal():f}".removesuffix(".0")
    return _BOOLEANS.get(text, text)


def stripped(text: str) -> str:
    """A text in Unicode's form NFC without blanks around it."""
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
    return normalize("NFC", text).strip()
