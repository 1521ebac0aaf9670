"""Trials that differ in their seed alone are one configuration: one point of a figure, with its seeds as spread.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`.
"""

import json
import math
from collections.abc import Sequence

from pandas import DataFrame, Series

from dpexp.showing.best import Best, best
from dpexp.showing.settings import EPSILON, apart, labels, number, settings

WITHOUT_PRIVACY = "no: trained without privacy"


def finished(trials: DataFrame) -> DataFrame:
    """The private trials that finished, each with an ε (that of its plan where it only made one), and one column more:
    `level`, the target ε, or without one ε to two digits."""
    found = trials[trials["status"] == "FINISHED"]
    found = found.assign(epsilon=found["epsilon"].fillna(found["epsilon_planned"]))
    found = found[found["epsilon"].notna()]
    levels = [
        f"{spent:.2g}" if math.isnan(aim) else f"{aim:g}"
        for spent, aim in zip(found["epsilon"], targets(found), strict=True)
    ]
    return found.assign(level=levels)


def trained(trials: DataFrame) -> DataFrame:
    """Those of the finished trials that have a test accuracy."""
    return finished(trials[trials["test_accuracy"].notna() & trials["epsilon"].notna()])


def targets(trials: DataFrame) -> Series:
    """The target ε of each trial; NaN where nothing was solved for it."""
    given = [number(json.loads(configuration).get(EPSILON)) for configuration in trials["configuration"]]
    return Series(given, index=trials.index, dtype=float).where(trials["knob_value"].notna())


def configurations(trials: DataFrame, first: Sequence[str] = ()) -> tuple[DataFrame, list[str]]:
    """Trials that differ in their seed alone, as one row.

    Args:
        first: of what tells them apart, the columns that come first (see `settings.apart`).

    Returns:
        A frame, in their order, and those of its columns that tell the rows apart. The others are label, which says
        the same in words; run_id, name, data, model, level, delta and knob of the first run; run_ids, and `runs`,
        their number; and over them the means of epsilon, accuracy and knob_value, and spread, the standard deviation
        of accuracy (NaN for one).
    """
    table = settings(trials)
    by = apart(table, first)
    groups = trials.groupby([table[key] for key in by] or [0] * len(trials), sort=False)
    taken = {name: (name, "first") for name in ("run_id", "name", "data", "model", "level", "delta", "knob")}
    points = groups.agg(
        **{name: how for name, how in taken.items() if name in trials},
        epsilon=("epsilon", "mean"),
        accuracy=("test_accuracy", "mean"),
        spread=("test_accuracy", "std"),
        knob_value=("knob_value", "mean"),
        run_ids=("run_id", list),
        runs=("run_id", "size"),
    )
    told = table.loc[groups.head(1).index, by].reset_index(drop=True)
    points = points.reset_index(drop=True).drop(columns=by, errors="ignore").join(told)
    order = sorted(points.index, key=lambda row: [_order(told.at[row, key]) for key in by])
    return points.assign(label=labels(told, by)).loc[order].reset_index(drop=True), by


def _order(value: str) -> tuple[bool, float, str]:
    """Numbers by size, before words."""
    found = number(value)
    return found is None, found or 0.0, value


def ceilings(trials: DataFrame) -> dict[tuple[str, str], Best]:
    """The best of the non-private twins, by data set and model."""
    twins = trials[(trials["status"] == "FINISHED") & trials["private"].str.startswith(WITHOUT_PRIVACY)]
    points, _ = configurations(twins.dropna(subset=["test_accuracy"]))
    return {(data, model): best(part) for (data, model), part in points.groupby(["data", "model"])}
