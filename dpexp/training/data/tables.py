"""Users' tables, in CSV or Parquet, encoded by a schema of public facts.

A row is encoded by itself. A value that is missing, no number, no date, or in no category contributes zeros. A training
row without a target or a person stays in its place, and contributes nothing. In test rows, which are public, a warning
counts such values. A file that is no table at all, as by a quote that is never closed, is refused.
"""

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from pandas import DataFrame, Index, Series, to_numeric
from pandas.api.types import is_float_dtype, is_integer_dtype
from pandas.util import hash_pandas_object
from torch import Tensor
from torch.utils.data import TensorDataset

from dpexp.errors import ConfigError, in_one_line
from dpexp.rows import PlacedRows
from dpexp.training.data.raw import (
    RawData,
    check_columns,
    codes_of,
    in_part,
    rows_of,
    stripped,
    text_of,
    texts_of,
    with_name,
)

# Kinds of columns, with the facts that each needs, and those that it may have:
KINDS = {"number": ("min", "max"), "category": ("values",), "date": ("min", "max"), "ignored": ()}
OPTIONS = {"number": ("decimal", "thousands", "unit", "negative"), "category": (), "date": ("format",), "ignored": ()}
_SIZES = {"number": 2, "date": 6, "ignored": 0}  # features
MISSING = ("", "na", "n/a", "nan", "nat", "none", "null")  # in lower case
_UNUSABLE = "data: a row has no known target, no known person, or more or fewer fields than the header."


class Table(RawData):
    """The rows of a table, for classification if the target is a category, and regression if it is a number.

    A number x becomes 2 (x - min)/(max - min) - 1, clipped to [-1, 1], and an indicator of missing values; a category
    becomes one indicator for each of its values. A date becomes what a number of days does, and sine and cosine of 2π
    times the month (from 0) / 12, and of 2π times the day of the week (Monday is 0) / 7.

    Args:
        path: the training rows.
        columns: name -> {kind: number, min, max}, {kind: date, min, max}, {kind: category, values} or {kind: ignored};
            all are public facts. A number may have the signs `decimal` and `thousands`, a `unit` on either side, as €
            or %, and `negative`, the parentheses () around numbers below zero; a date a `format` of strptime.
        target: the column to predict.
        person: `row`, or the column that identifies a person, whose rows are then one user's (`user_of`).
        test_path: the test rows, which are taken as public; or
        test_hash: {column, fraction}: rows with a hash of this column below the fraction are test rows; those
            with nothing in it are training rows.
        part: {column, low, high}: only training rows with a hash of this column in the range are used (`in_part`).
    """

    def __init__(
        self, path: str | None, columns: Mapping[str, Mapping[str, Any]], target: str, person: str,
        test_path: str | None = None, test_hash: Mapping[str, Any] | None = None,
        part: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if path is None:
            raise ConfigError("data.path must be given: a file with the training rows.")
        target, person = text_of(target), text_of(person)
        columns = {text_of(name): facts for name, facts in columns.items()}
        self._path, self._target, self._person = path, target, person
        self._test_rows = ("data.path", path, True) if test_path is None else ("data.test_path", test_path, None)
        self._part = with_name(part)
        self._columns = {name: facts for name, facts in columns.items() if name not in (target, person)}
        self._used = {name: "data.schema" for name, facts in self._columns.items() if facts["kind"] != "ignored"}
        named = {} if person == "row" else {person: "data.person"}
        self._named = self._used | {target: "data.target"} | named
        self._facts = columns[target]
        self.class_names = self._facts.get("values")
        if (test_path is None) == (test_hash is None):
            raise ConfigError(
                "data.test_path or data.test_hash must be given, and not both: a file of test rows, or "
                "{column: NAME, fraction: 0.2}, by a hash of which rows are test rows; test rows are not protected."
            )
        if test_hash is not None and not ({*test_hash} == {"column", "fraction"} and 0 < test_hash["fraction"] < 1):
            raise ConfigError(f"data.test_hash={dict(test_hash)} must be {{column: NAME, fraction: 0.2}}.")
        self._test_hash = test_hash = with_name(test_hash)
        if test_hash is not None and person not in ("row", test_hash["column"]):
            raise ConfigError(f"data.test_hash.column={test_hash['column']} must be the person, {person}.")

    @cached_property
    def train(self) -> TensorDataset:
        return self._data_set("data.path", self._path, in_test=False)

    @cached_property
    def test(self) -> TensorDataset:
        return self._data_set(*self._test_rows)

    def example(self) -> DataFrame:
        return self._split(*self._test_rows)[[*self._used]].head(2)

    def encode(self, inputs: DataFrame) -> Tensor:
        """x [N, features]."""
        check_columns("data", inputs, self._used)
        parts = self._parts(inputs)
        self._report("data", inputs, parts)
        return torch.from_numpy(np.concatenate([*parts.values()], 1))

    def _parts(self, rows: DataFrame) -> dict[str, np.ndarray]:
        """The features [N, …] of each column."""
        return {name: _encoded(rows[name], self._columns[name]) for name in self._used}

    def _report(self, where: str, rows: DataFrame, parts: Mapping[str, np.ndarray], refuse: bool = False) -> None:
        """Warns of values of public rows that are neither known nor missing. Refuses columns in another unit than the
        schema's: most numbers are further from the middle of their range than it is wide. `refuse`: and those without
        any known value."""
        said, unread = [], []
        for name, part in parts.items():
            facts = self._facts if name == self._target else self._columns[name]
            known = _known(part, facts)
            odd = present(rows[name][~known])
            if refuse and not known.any():
                unread.append(_unread(rows, name, facts))
            if facts["kind"] == "number":
                low, high = facts["min"], facts["max"]
                far = np.abs(numbers_of(rows[name], facts) - (low + high) / 2) > high - low
                if far.sum() > len(rows) / 2:
                    unread.append(f"in most rows {name} is far from {low:g} to {high:g}, its range in data.schema")
            if len(odd):
                said.append(f"in {len(odd)} of {len(rows)} rows {name} is not {_wanted(facts)}: {cell_of(odd)}")
        if unread:
            raise ConfigError(f"{where}: {'; '.join(unread)}; correct data.schema or the file.")
        if said:
            advice = "They count as missing, unless data.schema has such values, or says how they are written."
            warnings.warn(f"{where}: {'; '.join(said)}. {advice}")

    def decode(self, outputs: Tensor) -> Tensor:
        low, high = self._facts["min"], self._facts["max"]
        return low + (outputs + 1) / 2 * (high - low)

    def _data_set(self, key: str, path: str, in_test: bool | None) -> TensorDataset:
        rows, where = self._split(key, path, in_test), f"{key}={path}"
        check_columns(where, rows, self._named)
        y, parts = _encoded(rows[self._target], self._facts), self._parts(rows)
        known = torch.from_numpy(_known(y, self._facts))
        x, labels = torch.from_numpy(np.concatenate([*parts.values()], 1)), torch.from_numpy(y)
        labels = labels.argmax(1) if self.class_names else labels[:, 0]
        if in_test is not False:
            self._report(where, rows, {self._target: y} | parts, refuse=True)
            return TensorDataset(x[known], labels[known])
        if self._person == "row":
            return PlacedRows(x, labels, usable=known, reason=_UNUSABLE)
        codes = torch.from_numpy(codes_of(texts_of(rows[self._person])))
        data = PlacedRows(x, labels, usable=known & (codes >= 0), reason=_UNUSABLE)
        data.user_of = codes  # type: ignore[attr-defined]
        return data

    def _split(self, key: str, path: str, in_test: bool | None) -> DataFrame:
        """The rows of a file; only those in the test set, or those of the part that are not in it."""
        if in_test is None:
            return rows_of(key, path)
        named = self._named | ({self._part["column"]: "data.part.column"} if self._part else {})
        if self._test_hash is not None:
            column = self._test_hash["column"]
            named |= dict.fromkeys(self._columns, "data.schema") | {column: "data.test_hash.column"}
        rows = rows_of(key, path, named=named)
        if self._test_hash is not None:
            ids = texts_of(rows[column]).astype(object)
            hashed = hash_pandas_object(ids, index=False).to_numpy()
            is_test = (hashed < self._test_hash["fraction"] * 2.0**64) & ids.ne("").to_numpy()
            rows = rows[is_test == in_test]
        return rows if in_test else in_part(f"{key}={path}", rows, self._part)


def _encoded(values: Series, facts: Mapping[str, Any]) -> np.ndarray:
    """float32 [N, …]: a scaled number, whether it is missing, and a date's month and weekday; or indicators of a
    category's values."""
    if facts["kind"] == "category":
        codes = Index([*map(text_of, facts["values"])]).get_indexer(Index(texts_of(values)))
        return (codes[:, None] == np.arange(len(facts["values"]))).astype(np.float32)
    x = numbers_of(values, facts)
    low, high = (_days(facts[key]) if facts["kind"] == "date" else facts[key] for key in ("min", "max"))
    is_missing = ~np.isfinite(x)
    with np.errstate(all="ignore"):  # of single values
        scaled = np.clip(2 * (np.clip(x, low, high) - low) / (high - low) - 1, -1, 1)
    columns = [np.where(is_missing, 0, scaled), is_missing]
    if facts["kind"] == "date":
        days = np.where(is_missing, 0, np.floor(x)).astype("datetime64[D]")
        months, weekdays = days.astype("datetime64[M]").astype(int) % 12, (days.astype(int) + 3) % 7  # day 0: Thursday
        for angle in (2 * np.pi * months / 12, 2 * np.pi * weekdays / 7):
            columns += [np.where(is_missing, 0, np.sin(angle)), np.where(is_missing, 0, np.cos(angle))]
    return np.stack(columns, 1).astype(np.float32)


def _known(part: np.ndarray, facts: Mapping[str, Any]) -> Any:
    """bool [N]: which values of an encoded column are known."""
    return part.any(1) if facts["kind"] == "category" else part[:, 1] == 0


def _wanted(facts: Mapping[str, Any]) -> str:
    """The values of a column, in words."""
    return f"one of {', '.join(facts['values'])}" if facts["kind"] == "category" else f"a {facts['kind']}"


def _unread(rows: DataFrame, name: str, facts: Mapping[str, Any]) -> str:
    """That no public row has a value of a column, in words, with one that it has."""
    return f"in no row is {name} {_wanted(facts)}, but {cell_of(rows[name])}"


def present(values: Series) -> Series:
    """The texts of those values that are not missing."""
    texts = texts_of(values)
    return texts[~texts.str.lower().isin(MISSING)]


def cell_of(values: Series) -> str:
    """The first one of public values that is not missing, for a message."""
    texts = present(values)
    return repr(texts.iloc[0][:40]) if len(texts) else "all are missing"


def numbers_of(values: Series, facts: Mapping[str, Any]) -> np.ndarray:
    """float64 [N]: numbers, or days since 1970, each read by itself as the column's facts say; NaN for what is none."""
    if facts["kind"] == "date":
        return values.astype(object).map(lambda value: _days(value, facts.get("format"))).to_numpy(np.float64)
    if not (is_integer_dtype(values.dtype) or is_float_dtype(values.dtype)):
        texts = texts_of(values)
        if any(facts.get(key) for key in OPTIONS["number"]):
            texts = values.astype(object).map(lambda value: _plain_number(value, facts)).astype(str)
        values = to_numeric(texts, errors="coerce")
    return values.to_numpy(np.float64, na_value=np.nan)


def _plain_number(value: Any, facts: Mapping[str, Any]) -> str:
    """A number as Python writes it, of a text that is written as a column's facts say."""
    if not isinstance(value, str):
        return text_of(value)
    decimal, thousands, unit = facts.get("decimal") or ".", facts.get("thousands") or "", facts.get("unit") or ""
    unit = rf"({re.escape(unit)})?"  # stands on either side, also within a sign or parentheses, but between no digits
    text = re.sub(rf"(?<![\d\s]){unit}\s*|\s*{unit}(?!\s*\d)", "", stripped(value))
    if facts.get("negative"):
        text = re.sub(r"^\((.*)\)$", r"-\1", text)
    head, point, tail = text.partition(decimal)
    sign = r"\s" if thousands.isspace() else re.escape(thousands)
    if thousands and re.fullmatch(rf"[+-]?\d{{1,3}}({sign}\d{{3}})+", head):
        head = re.sub(sign, "", head)
    return "" if "." in head + tail else f"{head}.{tail}" if point else head


def _days(value: Any, form: str | None = None) -> float:
    text = text_of(value)
    try:
        moment = datetime.strptime(text, form) if form and not isinstance(value, date) else datetime.fromisoformat(text)
    except ValueError:
        return np.nan
    return (moment.replace(tzinfo=None) - datetime(1970, 1, 1)) / timedelta(days=1)


def facts_of(
    schema: str | None, target: str | None, person: str | None, test_path: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """What a schema file says: `columns` of a `Table`, `n`, `users`, `shape`, `classes` and `unsafe`.

    Raises:
        ConfigError: the file is no schema, or something that is needed is empty or wrong; names all of it, with a cell
            of each such column from the test file, which is public.
    """
    for key, value, what in (
        ("schema", schema, "a file that python -m dpexp schema writes"), ("target", target, "the column to predict"),
        ("person", person, "whom ε protects: row, or the column that identifies a person"),
    ):  # fmt: skip
        if value is None:
            raise ConfigError(f"data.{key} must be given: {what}.")
    assert schema and target and person
    target, person = text_of(target), text_of(person)
    content = _read_schema(schema)
    columns = content["columns"]
    for key, name in (("target", target), ("person", person)):
        if name not in columns and not (key == "person" and name == "row"):
            raise ConfigError(f"data.{key}={name} is no column of {schema}; its columns are {', '.join(columns)}.")
    if person != "row":
        columns[person] = {"kind": "ignored"}  # an id has no range, and no classes
    if content.get("released"):
        raise ConfigError(f"{schema}: released={content['released']} is no longer accounted for; fill in public facts.")
    counted = ["rows"] if person == "row" else ["rows", "persons"]
    wrong = [
        f"{key}={content.get(key)} must be the published number of training {key}"
        for key in counted
        if not re.fullmatch("[1-9][0-9]*", str(content.get(key)))
    ]
    if wrong_columns := {name: said for name, facts in columns.items() if (said := _wrong(facts, name == target))}:
        wrong += _with_cells(wrong_columns, columns, test_path)
    if wrong:
        raise ConfigError(f"{schema}: {'; '.join(wrong)}. Correct it from public knowledge, not from the rows.")
    used = [facts for name, facts in columns.items() if name not in (target, person)]
    features = sum(_SIZES.get(facts["kind"], len(facts.get("values") or ())) for facts in used)
    if not features:
        raise ConfigError(f"{schema}: all columns but the target are ignored.")
    return {
        "columns": columns, "n": int(content["rows"]), "users": int(content["persons"]) if counted[1:] else None,
        "shape": [features], "classes": len(columns[target].get("values") or [0]),
        "unsafe": text_of(content.get("unsafe") or False) != "False",
    }  # fmt: skip


def _read_schema(schema: str) -> dict[str, Any]:
    """A schema, whose words are texts, as cells are: of themselves, YAML would make a number of 01 and no of false."""
    try:
        content = yaml.load(Path(os.path.expanduser(schema)).read_bytes(), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or in_one_line(error)[:200]
        raise ConfigError(f"data.schema={schema} cannot be read: {reason}.") from error
    columns = content.get("columns") if isinstance(content, dict) else None
    if not isinstance(columns, dict) or not columns:
        raise ConfigError(f"data.schema={schema} has no columns; python -m dpexp schema writes one.")
    return content | {"columns": {text_of(name): facts for name, facts in columns.items()}}


def _number(word: Any) -> float:
    """The number that a word of a schema is; NaN if it is none."""
    with suppress(TypeError, ValueError):
        return float(word)
    return np.nan


def _wrong(facts: Any, is_target: bool) -> str:
    """Why what a schema says of a column is incomplete or no fact of its kind; "" if it is all right, and then has the
    form that a `Table` takes."""
    kind = facts.get("kind") if isinstance(facts, dict) else None
    if kind not in KINDS:
        return f".kind={kind} must be one of {', '.join(KINDS)}"
    if is_target and kind in ("ignored", "date"):
        return f".kind={kind} must be number or category"
    if empty := [key for key, word in (dict.fromkeys(KINDS[kind], "") | facts).items() if word in ("", "null")]:
        return f": {' and '.join(empty)} must be filled in"
    if kind == "number":
        decimal, thousands, unit = facts.get("decimal", "."), facts.get("thousands", ""), facts.get("unit", "%")
        if not re.fullmatch(r"([^\w+-])(?!\1)[^\w+-]?", f"{decimal}{thousands}"):
            return f": decimal={decimal} and thousands={thousands} must be two signs, as '.' and ','"
        if not re.match(r"[^\d\s.,()+-]", unit) or facts.get("negative", "()") != "()":
            return f": unit={unit} must be a word or a sign, as € or %, and negative, if given, ()"
    elif kind == "date":
        form = str(facts.get("format", "%Y"))
        if "%" not in form or np.isnan(_days(date(2024, 1, 31).strftime(form), form)):
            return f".format={form} must be a format of strptime, as %d.%m.%Y"
    if "min" in KINDS[kind]:
        low, high = (_number(facts[key]) if kind == "number" else _days(facts[key]) for key in ("min", "max"))
        if not -np.inf < low < high < np.inf:
            example = "-0.5 and 9" if kind == "number" else "1999-01-31 and 2024-12-31"
            return f": min={facts['min']} and max={facts['max']} must be {kind}s, the smaller one first, as {example}"
        if kind == "number":
            facts |= {"min": low, "max": high}
    elif kind == "category":
        values = facts["values"]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return f".values={values} must be a list of texts"
        facts["values"] = texts = [text_of(value) for value in values]
        if len({*texts}) < len(texts) or len(texts) < (2 if is_target else 1):
            return f".values={texts} must be {'at least two different texts' if is_target else 'different texts'}"
    return ""


def _with_cells(wrong: Mapping[str, str], columns: Mapping[str, Any], test_path: str | None) -> list[str]:
    """What is wrong of each column, and which others no row of the test file has, each with a cell of that file."""
    rows = DataFrame() if test_path is None else rows_of("data.test_path", test_path)
    said = []
    for name, facts in columns.items():
        if name in wrong:
            cell = f" ({cell_of(rows[name])} in {test_path})" if name in rows else ""
            said.append(f"columns.{name}{wrong[name]}{cell}")
        elif name in rows and facts["kind"] != "ignored" and not _known(_encoded(rows[name], facts), facts).any():
            said.append(_unread(rows, name, facts))
    return said
