"""`python -m dpexp schema`: writes the schema of a table, empty, or filled in by a private release."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import LedgerWriter, OneTimeQueryEvent, SamplingEvent
from dpexp.accounting.risk import Epsilon
from dpexp.accounting.rounding import up
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.table_ranges import TableRanges
from dpexp.reporting.terminal import console
from dpexp.training.data.raw import rows_of, texts_of
from dpexp.training.data.tables import KINDS, numbers_of, read_schema

_MARGIN = 1 + 1e-6  # for the accountant's own rounding
_STYLE: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "default_flow_style": None, "width": 120}
_HEAD = """\
# Public facts about {path}. Fill in what is empty from public knowledge, never by looking at the rows: `rows` is the
# published number of training rows, `min` and `max` the range of a number, `values` the categories. The kinds were
# guessed from the first rows: a column is a number, a category, or ignored.
"""


@dataclass
class Source:
    path: str | None = None
    schema: str | None = None
    person: str | None = None


@dataclass
class Options:
    data: Source = field(default_factory=Source)
    out: str | None = None
    epsilon: float | None = None
    delta: float = 1e-6
    unsafe: bool = False


def schema(arguments: Sequence[str]) -> dict[str, Any]:
    """Writes and returns the schema of a table; see `python -m dpexp schema --help`."""
    given = [argument for argument in arguments if argument != "data=csv"]
    if other := [argument for argument in given if "=" not in argument]:
        raise ConfigError(f"schema: {other[0]} is no option; see schema --help.")
    cfg: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_dotlist(given)))
    path, person = cfg.data.path, cfg.data.person or "row"
    if path is None:
        raise ConfigError("schema needs data.path, a file with the training rows.")
    if cfg.epsilon is not None:
        return _released(cfg, path, person)
    out = Path(cfg.out or Path(path).with_suffix(".yaml").name)
    if out.exists():
        raise ConfigError(f"out={out} exists already; name another file.")
    columns = {name: _guessed(rows) for name, rows in next(rows_of("data.path", path)).items()}
    if person != "row" and person not in columns:
        raise ConfigError(f"data.person={person} is no column of {path}: {', '.join(columns)}.")
    content: dict[str, Any] = {"rows": None} | ({} if person == "row" else {"persons": None})
    if cfg.unsafe:
        content |= _in_the_clear(path, person, columns)
    return _write(out, path, content | {"columns": columns})


def _write(out: Path, path: str, content: dict[str, Any]) -> dict[str, Any]:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_HEAD.format(path=path) + yaml.safe_dump(content, **_STYLE))
    console.print(f"Schema: {out}", soft_wrap=True)
    return content


def _guessed(values: Any) -> dict[str, Any]:
    """A column's kind, from its first rows, with its facts empty."""
    values = values.head(1000)
    is_number = np.isfinite(numbers_of(values)).sum() > 0.5 * (texts_of(values) != "").sum()
    is_name = not is_number and len(values) > 20 and values.nunique() > 0.5 * len(values)
    kind = "number" if is_number else "ignored" if is_name else "category"
    return {"kind": kind} | dict.fromkeys(KINDS[kind])


def _in_the_clear(path: str, person: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Fills in all facts from the rows without noise."""
    import pandas as pd

    rows = pd.concat(rows_of("data.path", path))
    for name, facts in columns.items():
        if facts["kind"] == "number":
            known = numbers_of(rows[name])
            known = known[np.isfinite(known)]
            facts["min"], facts["max"] = float(known.min()), float(known.max())
        elif facts["kind"] == "category":
            facts["values"] = sorted({*texts_of(rows[name])} - {""})
    counted = {} if person == "row" else {"persons": len({*texts_of(rows[person])} - {""})}
    console.print("The facts were read from the rows without noise: jobs with this schema are tagged as not private.")
    return {"rows": len(rows), **counted, "unsafe": True}


def _released(cfg: Any, path: str, person: str) -> dict[str, Any]:
    """Fills in the rows and ranges of a schema by one Gaussian release, which is in a ledger first."""
    if cfg.data.schema is None:
        raise ConfigError(
            "epsilon needs data.schema: a schema whose kinds of columns you have checked, since what is released must "
            "not depend on the rows; python -m dpexp schema without epsilon writes one."
        )
    if person != "row":
        raise ConfigError("epsilon: the release protects a row, not a person; fill in the schema by hand.")
    content = read_schema(cfg.data.schema)
    columns = content["columns"]
    ranges = [name for name, facts in columns.items() if facts["kind"] == "number"]
    ledger_path = Path(cfg.data.schema).with_suffix(".ledger.jsonl")
    target = Epsilon(cfg.epsilon, cfg.delta)
    target.check("pld")
    step = TableRanges(len(ranges), noise_multiplier=_MARGIN / target.mu)
    event = step.query("schema", "add_remove", None)
    assert isinstance(event, OneTimeQueryEvent)
    total = torch.zeros(step.d, dtype=torch.float64)
    for rows in rows_of("data.path", path):
        if missing := [name for name in ranges if name not in rows]:
            raise ConfigError(f"data.path={path} has no column {missing[0]}, which data.schema names.")
        total += step.sums_of([numbers_of(rows[name]) for name in ranges], len(rows))
    ledger = LedgerWriter(ledger_path)
    ledger.sample(SamplingEvent("all", 1.0, 1))
    ledger.query(event)
    ledger.commit()
    sigma = event.scale
    GaussianNoise().add_to([(total, sigma)])
    spent = epsilon(ledger.ledger, cfg.delta)
    ledger.close()
    for name, (low, high) in zip(ranges, step.ranges(total, sigma), strict=True):
        columns[name]["min"], columns[name]["max"] = low, high
    console.print(
        f"The number of rows and {len(ranges)} ranges were released with ε = {up(spent, 4)}, δ = {up(cfg.delta, 4)}, "
        f"for adding or removing one row; every job with this schema accounts for it. Ledger: {ledger_path}",
        soft_wrap=True,
    )
    content["rows"] = max(1, math.floor(float(total[0])))
    content["released"] = {"ranges": len(ranges), "noise_multiplier": step.noise_multiplier}
    return _write(Path(cfg.data.schema), path, content)
