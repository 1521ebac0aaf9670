"""Configurations of a sweep: the settings that differ, labels, means over seeds, the best one and its ties."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame, Series
from scipy import stats

from dpexp.accounting.rounding import up
from dpexp.reporting.wording import measured

CHOICES = ("data", "model", "group", "mechanism", "clip_norm", "alpha", "clip_rule", "allocation", "sampling")
EPSILON, DELTA, Z = "privacy.epsilon", "privacy.delta", "privacy.noise_multiplier"
VARIED_FIRST = (EPSILON, Z, "privacy.enabled")  # from which it follows that a baseline has no group
SCORES = ("test_accuracy", "test_loss", "knob_value")
DRAW = "draw"  # number of a draw of private selection; the last column
_UNSET = "not set"
WITHOUT_PRIVACY = "no: trained without privacy"
CONFIDENCE = 0.95
WHY = {  # explanations of how a calibrated parameter changes with ε
    "sampling_rate": "The sampling rate q falls as ε rises: each σ_g of the averages is held, and a larger ε allows "
    "less noise on the sum, σ̃_g = q·n·σ_g, hence smaller samples."
}


def settings(trials: DataFrame) -> DataFrame:
    """One row per trial; columns are choices, such as group, and parameters, such as optimizer.lr; all texts."""
    read = [json.loads(configuration) for configuration in trials["configuration"]]
    keys = sorted({key for parameters in read for key in parameters}, key=lambda key: (_rank(key), key))
    columns = {name: [_text(value) for value in trials[name]] for name in CHOICES}
    columns |= {key: [_text(parameters.get(key)) for parameters in read] for key in keys}
    return DataFrame(columns, index=trials.index, dtype=object)


def _rank(key: str) -> int:
    """The place of a parameter among the columns: ε and z come first, the number of a draw last."""
    if key in (EPSILON, Z):
        return 0
    return 2 if key == DRAW else 1


def _text(value: object) -> str:
    """A setting as a text, which is the same for equal numbers."""
    if value is None or value != value or value == "None":
        return _UNSET
    found = number(value)
    return str(value) if found is None else repr(found).removesuffix(".0")  # 1 and 1.0 are equal


def number(value: object) -> float | None:
    """The finite number in a text, if it is one."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def distinguishing(table: DataFrame, first: Sequence[str] = ()) -> list[str]:
    """The columns of settings in which configurations differ, the columns in `first` before others.

    A column that follows from those before it (as n follows from the data) is left out.
    """
    found: list[str] = []
    count = 1
    for column in dict.fromkeys((*(name for name in first if name in table), *table)):
        with_column = len(table[[*found, column]].drop_duplicates())
        if with_column > count:
            found, count = [*found, column], with_column
    return found


def labels(table: DataFrame, by: Sequence[str]) -> list[str]:
    """A label for each row, such as `group=flat · optimizer.lr=0.1`."""
    names = {key: key.removesuffix("._target_") for key in by}
    shown = {key: _shown(key, table[key].unique()) for key in by}
    return [" · ".join(f"{names[key]}={shown[key][row[key]]}" for key in by) for _, row in table.iterrows()]


def _shown(key: str, values: Iterable[str]) -> dict[str, str]:
    """Values as they are shown: fractions to three digits, where that keeps them apart."""
    full = {value: value.rpartition(".")[2] if key.endswith("._target_") else value for value in values}
    fractions = {value: found for value in full if (found := number(value)) and not found.is_integer()}
    claim = key in (EPSILON, DELTA)
    short = full | {value: up(found, 3) if claim else f"{found:.3g}" for value, found in fractions.items()}
    return short if len({*short.values()}) == len(full) else full


def finished(trials: DataFrame) -> DataFrame:
    """The finished private trials, with the planned ε where nothing was trained, and columns `level` and `cost`.

    The level is the target ε or, without one, ε to two digits. The cost adds whatever else differs of the guarantee:
    only trials of equal cost can be compared by their accuracy.
    """
    found = trials[trials["status"] == "FINISHED"]
    found = found.assign(epsilon=found["epsilon"].fillna(found["epsilon_planned"]))
    found = found[found["epsilon"].notna()]
    levels = [
        up(spent, 2) if math.isnan(target) else up(target, 6)
        for spent, target in zip(found["epsilon"], targets(found), strict=True)
    ]
    costs = Series([f"ε = {level}" for level in levels], index=found.index, dtype=object)
    for key, name in (("delta", "δ"), ("adjacency", "adjacency"), ("privacy_unit", "privacy_unit")):
        if found[key].nunique(dropna=False) > 1:
            costs += f", {name} = " + found[key].astype(str)
    return found.assign(level=levels, cost=costs)


def trained(trials: DataFrame) -> DataFrame:
    """The finished trials that have a test accuracy."""
    return finished(trials[trials["test_accuracy"].notna() & trials["epsilon"].notna()])


def targets(trials: DataFrame) -> Series:
    """The target ε of each trial; NaN where nothing was calibrated."""
    found = [number(json.loads(configuration).get(EPSILON)) for configuration in trials["configuration"]]
    return Series(found, index=trials.index, dtype=float).where(trials["knob_value"].notna())


@dataclass(frozen=True)
class Best:
    """The configuration with the highest mean accuracy.

    Attributes:
        row: of the frame of configurations.
        others: the number of other configurations.
        tied: labels of the others that do not differ significantly from it.
    """

    row: dict[str, Any]
    others: int
    tied: list[str]

    def __str__(self) -> str:
        return f"{self.row['label']} ({self.certainty})"

    @property
    def certainty(self) -> str:
        """The number of runs, the confidence interval, and the comparison with the others."""
        runs = "1 run" if self.row["runs"] == 1 else f"mean of {self.row['runs']} runs"
        half = self.row["margin"]
        interval = "no interval" if math.isnan(half) else f"95 % interval ± {half:.2%}"
        if not self.others or math.isnan(half):
            return f"{runs}, {interval}"
        return f"{runs}, {interval}; significantly above {self.others - len(self.tied)} of {self.others} others"


def configurations(trials: DataFrame, first: Sequence[str] = ()) -> tuple[DataFrame, list[str]]:
    """One row for all trials that differ only in their seed.

    Args:
        first: the columns that come first among those that distinguish configurations.

    Returns:
        A sorted frame, and those of its columns that distinguish the rows. The others are label; run_id, name, data,
        model, level, cost, delta and knob of the first run; the number of runs; the largest epsilon; the means of
        test_accuracy, test_auc, knob_value and test_loss; the runs' accuracies; and the margin of their mean.
    """
    table = settings(trials)
    by = distinguishing(table, first)
    groups = trials.groupby([table[key] for key in by] or [0] * len(trials), sort=False)
    taken = {name: (name, "first") for name in ("run_id", "name", "data", "model", "level", "cost", "delta", "knob")}
    points = groups.agg(
        **{name: how for name, how in taken.items() if name in trials},
        epsilon=("epsilon", "max"),
        test_accuracy=("test_accuracy", "mean"),
        accuracies=("test_accuracy", list),
        margin=("test_accuracy", margin),
        knob_value=("knob_value", "mean"),
        test_loss=("test_loss", "mean"),
        test_auc=("test_auc", "mean"),
        runs=("run_id", "size"),
    )
    varied = table.loc[groups.head(1).index, by].reset_index(drop=True)
    points = points.reset_index(drop=True).drop(columns=by, errors="ignore").join(varied)
    order = sorted(points.index, key=lambda row: [_order(varied.at[row, key]) for key in by])
    return points.assign(label=labels(varied, by)).loc[order].reset_index(drop=True), by


def margin(accuracies: Series) -> float:
    """Half the width of the 95 % confidence interval of a mean, by Student's t; NaN if no values differ."""
    if not accuracies.std() > 0:
        return math.nan
    return float(stats.sem(accuracies) * stats.t.ppf((1 + CONFIDENCE) / 2, len(accuracies) - 1))


def _order(value: str) -> tuple[bool, float, str]:
    """Sorts numbers by size, before words."""
    found = number(value)
    return found is None, found or 0.0, value


def best_baselines(trials: DataFrame) -> dict[tuple[str, str], Best]:
    """The best non-private baseline, by data set and model."""
    baselines = trials[(trials["status"] == "FINISHED") & trials["private"].str.startswith(WITHOUT_PRIVACY)]
    points, _ = configurations(baselines.dropna(subset=["test_accuracy"]))
    return {(data, model): best(part) for (data, model), part in points.groupby(["data", "model"])}


def best(points: DataFrame) -> Best:
    """The best of at least one configuration (see `configurations`) by its mean accuracy over seeds.

    Others are tied with it unless they differ significantly at 95 % in a test of all pairs (Tukey 1949, Kramer 1956),
    since the best was chosen among all. If a configuration has only one run, or no runs differ, all are tied.
    """
    ranked = points.sort_values("test_accuracy", ascending=False, kind="stable").to_dict("records")
    top, rest = ranked[0], ranked[1:]
    tied = [row["label"] for row in rest]
    if rest and points["runs"].min() > 1 and points["margin"].max() > 0:
        chances = stats.tukey_hsd(*(row["accuracies"] for row in ranked)).pvalue[0, 1:]
        tied = [label for label, chance in zip(tied, chances, strict=True) if chance >= 1 - CONFIDENCE]
    return Best(top, len(rest), tied)


def summary(trials: DataFrame) -> DataFrame:
    """A row of texts for each configuration that has finished, private or not.

    The columns are what was varied, ε, the test accuracy with its 95 % interval, and the number of runs. Without an
    accuracy, the test loss or the calibrated parameter takes its place.
    """
    done = trials[trials["status"] == "FINISHED"]
    spent = done["epsilon"].fillna(done["epsilon_planned"]).where(done["private"] == "yes")
    points, by = configurations(done.assign(epsilon=spent), VARIED_FIRST)
    table = points[by].replace(_UNSET, "")
    table["ε"] = ["not private" if math.isnan(most) else up(most, 4) for most in points["epsilon"]]
    score = next((one for one in SCORES if points[one].notna().any()), SCORES[0])
    name = " or ".join(points["knob"].unique()) if score == "knob_value" else score.replace("_", " ")
    table[name] = [measured(score, mean) for mean in points[score]]
    if points["margin"].notna().any():
        table["± (95 %)"] = ["" if math.isnan(half) else f"{half:.2%}" for half in points["margin"]]
    if points["test_auc"].notna().any():  # which tells what was learnt of a rare class
        table["AUC"] = [f"{mean:.3f}" for mean in points["test_auc"]]
    return table.assign(runs=points["runs"].astype(str))


def compact(trials: DataFrame) -> DataFrame:
    """A row for each trial: what was varied, its seed, cost, scores and MLflow run; no empty columns."""
    table = settings(trials)
    facts = trials[
        ["seed", "status", "error", "private", "epsilon", "epsilon_planned", "delta", *SCORES, "test_auc", "run_id"]
    ]
    found = table[distinguishing(table, VARIED_FIRST)].join(facts)
    return found.replace(["", _UNSET], None).dropna(axis="columns", how="all")


def best_of_trials(trials: DataFrame, apart: Sequence[str] = ("data", "cost")) -> dict[str, Best]:
    """The best configuration of a sweep; if there are several data sets or privacy costs, that of each, by its name.

    The accuracies of trials of different costs are not compared: more budget gives more of it. Private configurations
    come first.
    """
    found = trained(trials)
    if found.empty:
        found = trials[(trials["status"] == "FINISHED") & trials["test_accuracy"].notna()].assign(cost="")
    by = [key for key in apart if found[key].nunique() > 1]
    places = found[by].astype(str).agg(", ".join, axis=1) if by else Series("", index=found.index)
    return {str(place): best(configurations(runs)[0]) for place, runs in found.groupby(places, sort=False)}


def described(tops: Mapping[str, Best]) -> list[str]:
    """A line on each of the best configurations; one that had no others is not called the best."""
    lines = []
    for place, top in tops.items():
        accuracy, at = f"test accuracy {top.row['test_accuracy']:.2%}", f" at {place}" if place else ""
        lines.append(f"Best{at}: {top}, {accuracy}" if top.others else f"T{accuracy[1:]}{at} ({top.certainty})")
    return lines
