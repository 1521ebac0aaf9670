"""`python -m dpexp schema`: writes the schema of a table, to be filled in from public knowledge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pandas import Series

from dpexp.commands.command_line import read_options
from dpexp.errors import ConfigError
from dpexp.reporting.terminal import console
from dpexp.training.data.raw import rows_of, text_of, texts_of
from dpexp.training.data.tables import KINDS, OPTIONS, cell_of, numbers_of, present

_STYLE: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "default_flow_style": None, "width": 120}
_HEAD = """\
# Public facts about {path}. Fill in what is empty from public knowledge, never by looking at the rows: `rows` is the
# published number of training rows, `min` and `max` the range of a number or a date, `values` the categories. The kinds
# were guessed from the first rows of {guessed}:
# a column is a number, a date, a category, or ignored. `decimal` and `thousands` are signs within a number, `unit` is
# what may stand on either side of it, as € or %, and `negative: ()` says that one in parentheses is below zero.
# `format` is that of a date, as %d.%m.%Y, and by default ISO 8601, as 2024-01-31.
"""
# How numbers and dates may be written; of these, the first and the second one may be confused:
_FORMS: dict[str, list[dict[str, str]]] = {
    "number": [{"thousands": ","}, {"decimal": ","}, {"decimal": ",", "thousands": "."}, {"thousands": " "},
               {"decimal": ",", "thousands": " "}, {"thousands": "'"}, {"thousands": "’"}],
    "date": [{"format": "%d/%m/%Y"}, {"format": "%m/%d/%Y"}, {"format": "%d.%m.%Y"}, {"format": "%Y/%m/%d"}],
}  # fmt: skip


@dataclass
class Source:
    path: str | None = None
    test_path: str | None = None
    person: str | None = None


@dataclass
class Options:
    data: Source = field(default_factory=Source)
    out: str | None = None
    unsafe: bool = False


def schema(arguments: Sequence[str]) -> dict[str, Any]:
    """Writes and returns the schema of a table; see `python -m dpexp schema --help`."""
    given = [argument for argument in arguments if argument != "data=csv"]
    if other := [argument for argument in given if "=" not in argument]:
        raise ConfigError(f"schema: {other[0]} is no option; see schema --help.")
    cfg: Options = read_options(Options, given)
    person, test_path = text_of(cfg.data.person or "row"), cfg.data.test_path
    path = cfg.data.path or (None if cfg.unsafe else test_path)
    if path is None:
        raise ConfigError("schema needs data.path, a file with the training rows, or data.test_path, with public rows.")
    out = Path(cfg.out or Path(path).name.removesuffix(Path(path).suffix).removesuffix(".csv") + ".yaml")
    if out.exists():
        raise ConfigError(f"out={out} exists already; name another file.")
    rows = rows_of("data.test_path", test_path) if test_path else rows_of("data.path", path, named={})
    columns = {str(name): _guessed(values) for name, values in rows.items()}
    if person != "row" and person not in columns:
        raise ConfigError(f"data.person={person} is no column of {path}: {', '.join(columns)}.")
    content: dict[str, Any] = {"rows": None}
    if person != "row":
        content["persons"], columns[person] = None, {"kind": "ignored"}
    if cfg.unsafe:
        content |= _in_the_clear(path, person, columns)
    guessed = {name: facts for name, facts in columns.items() if name != person}
    ignored = [name for name, facts in guessed.items() if facts["kind"] == "ignored"]
    unclear = [name for name, facts in guessed.items() if _is_unclear(facts)]
    for said, names in (
        ("Ignored, since most texts differ or all are missing", ignored),
        ("Two ways to read them fit; write the right one into decimal, thousands or format", unclear),
    ):
        if names:
            cells = [f"{name} ({cell_of(rows[name])})" for name in names] if test_path else names
            console.print(f"{said}: {', '.join(cells)}.", soft_wrap=True, markup=False)
    content |= {"columns": columns}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_HEAD.format(path=path, guessed=test_path or path) + yaml.safe_dump(content, **_STYLE))
    console.print(f"Schema: {out}", soft_wrap=True)
    return content


def _is_unclear(facts: dict[str, Any]) -> bool:
    """Whether two ways to read a column fit: `_guessed` has left empty how it is written."""
    return any(facts.get(key, "") is None for key in OPTIONS[facts["kind"]])


def _guessed(values: Any) -> dict[str, Any]:
    """Guesses a column's kind and how its numbers or dates are written, from its first rows.

    Returns:
        The column's part of the schema. The facts that are to be filled in are empty, and so is how it is written if
        two ways fit.
    """
    values = values.head(1000)
    known = present(values)
    around = _around(known)
    are_classes = {*known} == {"0", "1"} or known.str.fullmatch(r"0\d+").any()  # flags and codes are no amounts
    for kind, forms in () if are_classes else _FORMS.items():
        facts = {"kind": kind} | (around if kind == "number" else {})
        counts = [np.isfinite(numbers_of(values, facts | form)).sum() for form in ({}, *forms)]
        if (best := max(counts)) > 0.5 * len(known):
            form = ({}, *forms)[counts.index(best)]
            asks = counts[0] < counts[1] == counts[2] == best
            return dict.fromkeys(("kind", *KINDS[kind])) | facts | (dict.fromkeys(form) if asks else form)
    is_name = len(values) > 20 and values.nunique() > 0.5 * len(values)
    kind = "category" if len(known) and not is_name else "ignored"
    return {"kind": kind} | dict.fromkeys(KINDS[kind])


def _around(known: Series) -> dict[str, str]:
    """What stands around a column's numbers: the most frequent sign of percent or of a currency, and parentheses."""
    units = known.str.extract("([%$€£¥₹])")[0].mode()
    unit = {"unit": units[0]} if len(units) else {}
    return unit | ({"negative": "()"} if known.str.contains("(", regex=False).any() else {})


def _in_the_clear(path: str, person: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Fills in all facts from the rows without noise."""
    rows = rows_of("data.path", path, named={})
    for name, facts in columns.items():
        if "min" in facts:
            known = numbers_of(rows[name], facts)
            known = known[np.isfinite(known)]
            if not len(known):  # to be filled in
                continue
            low, high = float(known.min()), float(known.max())
            facts["min"], facts["max"] = low, high if low < high else low + 1
            if facts["kind"] == "date":
                facts["min"], facts["max"] = (str(np.datetime64(math.floor(x), "D")) for x in (low, high + 1))
        elif facts["kind"] == "category":
            facts["values"] = sorted({*texts_of(rows[name])} - {""})
    counted = {} if person == "row" else {"persons": len({*texts_of(rows[person])} - {""})}
    console.print("The facts were read from the rows without noise: jobs with this schema are tagged as not private.")
    return {"rows": len(rows), **counted, "unsafe": True}
