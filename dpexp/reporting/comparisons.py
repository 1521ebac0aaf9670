"""Which configuration is best, and which others chance may have put below it."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pandas import DataFrame, Series

CHOICES = ("data", "model", "group", "mechanism", "clip_norm", "clip_rule", "allocation", "sampling")
EPSILON, Z = "privacy.epsilon", "privacy.noise_multiplier"
DRAW = "draw"  # of private selection: tells repetitions apart, and comes last
_NAMES = {EPSILON: "target ε", Z: "z", "privacy.delta": "δ"}
_TOLD = ("optimizer.", "sampling.", "clip_norm.", EPSILON, Z, "privacy.delta")
_FOLLOW = ("_target_", "policy", "n", "classes", "shape", "root", "module._target_")  # a choice implies them
_SECTIONS = ("optimizer.", "sampling.", "privacy.")  # whose keys speak for themselves
_WORDS = 4  # values in a label
_UNSET = "not set"


def settings(trials: DataFrame) -> DataFrame:
    """A row a trial; a column a choice, such as group, or a parameter, such as optimizer.lr; all as texts."""
    read = [json.loads(configuration) for configuration in trials["configuration"]]
    keys = sorted({key for parameters in read for key in parameters}, key=lambda key: (_rank(key), key))
    columns = {name: [_text(value) for value in trials[name]] for name in CHOICES}
    columns |= {key: [_text(parameters.get(key)) for parameters in read] for key in keys}
    return DataFrame(columns, index=trials.index, dtype=object)


def _rank(key: str) -> int:
    return 0 if key in (EPSILON, Z) else 2 if key == DRAW else 1


def _text(value: object) -> str:
    if value is None or value != value or value == "None":
        return _UNSET
    found = number(value)
    return str(value) if found is None else repr(found).removesuffix(".0")  # 1 and 1.0 are one setting


def number(value: object) -> float | None:
    """The finite number that a text says, if it says one."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def apart(table: DataFrame, first: Sequence[str] = ()) -> list[str]:
    """The columns of settings that tell configurations apart. Those that follow from the ones before them (as n does
    from the data) are left out; `first` come before all others."""
    kept: list[str] = []
    told = 1
    for column in dict.fromkeys((*(name for name in first if name in table), *table)):
        with_it = len(table[[*kept, column]].drop_duplicates())
        if with_it > told:
            kept, told = [*kept, column], with_it
    return kept


def labels(table: DataFrame, by: Sequence[str]) -> list[str]:
    """Each row's settings in words, such as `group=flat · lr=0.1`."""
    names = short_names(by)
    return [" · ".join(f"{names[key]}={_value(key, row[key])}" for key in by) for _, row in table.iterrows()]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """`lr` for `optimizer.lr`, unless another of the keys would be called so too."""
    plain = {key: _NAMES.get(key, key.removesuffix("._target_").removeprefix(_section(key))) for key in keys}
    often = list(plain.values())
    return {key: name if often.count(name) == 1 else key for key, name in plain.items()}


def _section(key: str) -> str:
    return next((section for section in _SECTIONS if key.startswith(section)), "")


def _value(key: str, value: str) -> str:
    return value.rpartition(".")[2] if key.endswith("._target_") else value


def held(trials: DataFrame, first: Sequence[str] = (), width: int = 120) -> str:
    """What is the same in all of these trials; and what differs but follows from what tells them apart
    (see `apart`)."""
    table = settings(trials)
    telling = apart(table, first)
    known = [key for key in table if not (key.partition(".")[0] in CHOICES and key.partition(".")[2] in _FOLLOW)]
    same = [key for key in known if table[key].nunique() == 1 and table[key].iloc[0] != _UNSET]
    same = [key for key in same if key in CHOICES or key.startswith(_TOLD)]
    along = [key for key in known if table[key].nunique() > 1 and key not in telling]
    names = short_names([*same, *along, *telling])
    told = "Fixed: " + " · ".join(f"{names[key]}={_value(key, table[key].iloc[0])}" for key in same) + "."
    if along:
        told += f" Not fixed, but following: {', '.join(names[key] for key in along)}."
    return textwrap.fill(told, width, break_long_words=False)


def shared(table: DataFrame, everywhere: DataFrame) -> str:
    """A label for the rows of settings that are drawn as one, which no other rows of `everywhere` have: the values to
    which they are confined, or where such words would take in others, the first row and how many are like it."""
    if len(table) == len(everywhere):
        return "the only configuration" if len(table) == 1 else f"all {len(table)} configurations"
    confined = {key: [*dict.fromkeys(table[key])] for key in table if set(table[key]) != set(everywhere[key])}
    order = [*confined]
    for key in sorted(order, key=lambda key: (-len(confined[key]), -order.index(key))):
        others = {name: values for name, values in confined.items() if name != key}
        if _inside(everywhere, others) == len(table):
            confined = others
    if _inside(everywhere, confined) > len(table) or any(len(values) > _WORDS for values in confined.values()):
        telling = [key for key in everywhere if everywhere[key].nunique() > 1]
        return f"{labels(table.head(1), telling)[0]} and {len(table) - 1} alike"
    names = short_names([*confined])
    words = [f"{names[key]}={' or '.join(_value(key, value) for value in confined[key])}" for key in confined]
    return " · ".join(words) + (f" ({len(table)} configurations)" if len(table) > 1 else "")


def _inside(table: DataFrame, confined: Mapping[str, Sequence[str]]) -> int:
    """How many rows have only such values."""
    for key, values in confined.items():
        table = table[table[key].isin(values)]
    return len(table)


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


@dataclass(frozen=True)
class Best:
    """The configuration with the highest mean accuracy.

    Attributes:
        row: of the frame of configurations; others: how many it was the highest of, less one.
        margin: half the width of the mean's 95 % interval; NaN where no runs tell what chance does.
        tied: labels of the others whose difference from it could be chance.
    """

    row: dict[str, Any]
    others: int
    margin: float
    tied: list[str]

    @property
    def label(self) -> str:
        return self.row["label"] or "the only configuration"

    def __str__(self) -> str:
        return f"{self.label} ({self.certainty})"

    @property
    def certainty(self) -> str:
        """How sure it is, in words: of how many runs a mean, and how it stands among the others."""
        runs = "1 run" if self.row["runs"] == 1 else f"mean of {self.row['runs']} runs"
        chance = "chance unknown" if math.isnan(self.margin) else f"95 % interval ± {self.margin:.2%}"
        return "; ".join(filter(None, (f"{runs}, {chance}", self._standing)))

    @property
    def _standing(self) -> str:
        if not self.others:
            return ""
        every = "the only other" if self.others == 1 else f"all {self.others} others"
        if not self.tied:
            return f"above {every} by more than chance"
        if len(self.tied) < self.others:
            return f"not told apart from {len(self.tied)} of {self.others} others"
        return f"not told apart from {every.replace('all', 'any of')}"


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


if TYPE_CHECKING:
    from pandas import DataFrame

CONFIDENCE = 0.95


def best(points: "DataFrame") -> Best:
    """Of configurations (see there), at least one, the best by its mean over seeds.

    Its interval is Student's, with one variance for all that are compared, pooled over their seeds. Others are tied
    with it unless their means lie further apart than chance explains at 95 %, all pairs considered, since the best
    was chosen among all: Tukey 1949 and Kramer 1956. Where no configuration has several runs that differ, nothing is
    told apart.
    """
    ranked = points.sort_values("accuracy", ascending=False, kind="stable").to_dict("records")
    top, rest = ranked[0], ranked[1:]
    repeated = [row for row in ranked if row["runs"] > 1]
    freedom = sum(row["runs"] - 1 for row in repeated)
    variance = sum((row["runs"] - 1) * row["spread"] ** 2 for row in repeated) / max(freedom, 1)
    if not variance > 0:
        return Best(top, len(rest), math.nan, [row["label"] for row in rest])
    from scipy.stats import studentized_range, t

    margin = t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance / top["runs"])
    range_ = studentized_range.ppf(CONFIDENCE, len(ranked), freedom) if rest else math.inf
    tied = [
        row["label"]
        for row in rest
        if top["accuracy"] - row["accuracy"] <= range_ * math.sqrt(variance * (1 / top["runs"] + 1 / row["runs"]) / 2)
    ]
    return Best(top, len(rest), float(margin), tied)


def best_by_data(trials: "DataFrame") -> dict[str, Best]:
    """The best configuration on each data set."""
    from dpexp.reporting.comparisons import configurations

    return {data: best(configurations(runs)[0]) for data, runs in trials.groupby("data", sort=False)}


def best_of_trials(trials: "DataFrame") -> dict[str, Any] | None:
    """What a sweep says of its best configuration, private where any is: `name`, with how sure that is, and
    `test_accuracy`, its mean. Of several data sets the name tells the bests on the others first."""
    from dpexp.reporting.comparisons import trained

    found = trained(trials)
    if found.empty:
        found = trials[(trials["status"] == "FINISHED") & trials["test_accuracy"].notna()]
    if found.empty:
        return None
    tops = best_by_data(found)
    names = [f"on {data}: {top}" if len(tops) > 1 else str(top) for data, top in tops.items()]
    *others, last = zip(names, (top.row["accuracy"] for top in tops.values()), strict=True)
    before = "".join(f"{name}, test accuracy {accuracy:.2%}; " for name, accuracy in others)
    return {"name": before + last[0], "test_accuracy": last[1]}
