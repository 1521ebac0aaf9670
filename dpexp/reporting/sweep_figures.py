"""Figures of a sweep: accuracy, loss, ε or the calibrated parameter against a setting.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`; every point is a configuration: the mean over its
seeds, with the 95 % interval of an accuracy.
"""

import json
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator
from pandas import DataFrame, to_numeric

from dpexp.accounting.rounding import up
from dpexp.reporting.comparisons import (
    DRAW,
    EPSILON,
    WHY,
    Z,
    best_baselines,
    configurations,
    finished,
    labels,
    number,
    targets,
    trained,
)

LINES = 10  # at most, in a figure
ROUND = "round"  # of an evaluation during training, as a setting of a trial
_TICKS = 8


class NotDrawn(Exception):
    """A figure would be unreadable; the message says why, and what to do."""


def curves(trials: DataFrame, x: str, *ys: str) -> Figure:
    """Draws each y against x in a panel; a line joins configurations that differ in x alone.

    Args:
        x: `epsilon`, or a setting, such as `optimizer.lr`; words are drawn in alphabetical order.
        ys: `test_accuracy`, with the best accuracy without privacy as a horizontal line; `test_loss`; `epsilon`; or
            `knob_value`, the calibrated parameter.

    Raises:
        NotDrawn: there are more than ten lines.
    """
    runs = finished(trials).dropna(subset=[*ys])
    points, by = configurations(runs, [x, ROUND, EPSILON, Z])
    numbers = [key for key in by if all(number(value) is not None for value in points[key])]
    along = x if x in by else next(iter(numbers), None)
    lines = [key for key in by if key != along]
    points = points.assign(line=labels(points, lines))
    if x == ROUND:
        spent = points.groupby("line")["epsilon"].transform("max")
        ends = [f"ε = {up(most, 3)}" for most in spent]
        points["line"] = [f"{line} · {end}" if line else end for line, end in zip(points["line"], ends, strict=True)]
    if (count := points["line"].nunique()) > LINES:
        raise NotDrawn(f"{', '.join(lines)} make {count} lines; compare in MLflow.")
    is_number = x == "epsilon" or x in numbers
    points = points.assign(x=to_numeric(points[x]) if is_number else points[x].factorize()[0])
    knob = " or ".join(sorted(points["knob"].unique()))
    names = {"epsilon": "ε", "test_accuracy": "test accuracy", "test_loss": "test loss", "knob_value": f"{knob} needed"}
    by_x = x
    if x == "epsilon":
        by_x = "the ε spent during training" if ROUND in by else "ε"
    figure = Figure(figsize=(8 if len(ys) == 1 else 6 * len(ys), 5), layout="constrained")
    for axes, y in zip(figure.subplots(1, len(ys), squeeze=False)[0], ys, strict=True):
        _panel(axes, points, y, is_number)
        tops = best_baselines(trials) if y == "test_accuracy" else {}
        for (_, model), top in tops.items():
            among = f" (the best of {top.others + 1})" if top.others else ""
            label = f"{model} without privacy{among}"
            axes.axhline(top.row["test_accuracy"], label=label, color="black", linestyle=":")
        interval = ""
        if y == "test_accuracy" and points["margin"].notna().any():
            interval = ", mean ± 95 % interval"
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(-0.02, bottom), min(1.02, top))  # the interval of few runs reaches beyond
        axes.set(xlabel=by_x, ylabel=names[y] + interval)
        if y == "knob_value":
            axes.set_title(WHY.get(knob, ""), fontsize="small", wrap=True)
        if is_number:
            _ticks(axes, points["x"].unique().tolist(), claim=x in ("epsilon", EPSILON))
        else:
            axes.set_xticks(range(points["x"].nunique()), points[x].unique())
    where = [points[key].iloc[0] for key in ("data", "model") if points[key].nunique() == 1]
    figure.suptitle(f"{' and '.join(names[y] for y in ys)} by {by_x}: {', '.join(where) or 'all trials'}")
    handles, shown = figure.axes[0].get_legend_handles_labels()
    if shown:
        columns = 2 if max(map(len, shown)) < 50 else 1
        figure.legend(handles, shown, loc="outside lower center", ncols=columns, fontsize="small")
    return figure


def _panel(axes: Axes, points: DataFrame, y: str, is_number: bool) -> None:
    """Draws y against x, line by line."""
    for k, (label, line) in enumerate(points.sort_values("x").groupby(points["line"], sort=False)):
        margin = line["margin"] if y == "test_accuracy" else None
        axes.errorbar(
            line["x"], line[y], margin, elinewidth=1, label=label or None, capsize=2, marker="osD^vP"[k % 6],
            linestyle="-" if is_number else "",
        )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:.4g} %" if y == "test_accuracy" else f"{value:.4g}")
    )


def _ticks(axes: Axes, values: Sequence[float], claim: bool) -> None:
    """Sets the ticks of x to the values, if they are few; logarithmic, if they lie far apart.

    Args:
        claim: they are ε, so that ticks are rounded up.
    """
    values = sorted(values)
    logarithmic = 0 < 4 * values[0] < values[-1]
    if logarithmic:
        axes.set_xscale("log")
    places = [math.log(value) if logarithmic else value for value in values]
    kept = values[:1]  # without those whose label would overlap the one before
    for value, place in zip(values, places, strict=True):
        before = math.log(kept[-1]) if logarithmic else kept[-1]
        if place - before > 0.06 * (places[-1] - places[0]):
            kept.append(value)
    if len(kept) <= _TICKS:
        axes.set_xticks(kept, [up(value, 3) if claim else f"{value:.3g}" for value in kept])
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if logarithmic else AutoLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def swept_numbers(trials: DataFrame) -> list[str]:
    """The numerical parameters with more than two values in a sweep, without the target ε.

    Of parameters that change together, as steps and whatever is interpolated from them, only the first counts, since
    their figures would be the same.
    """
    read = [json.loads(configuration) for configuration in finished(trials)["configuration"]]
    found: dict[tuple[int, ...], str] = {}
    for key in sorted({key for parameters in read for key in parameters}):
        values = [number(parameters.get(key)) for parameters in read]
        distinct = [*dict.fromkeys(values)]
        if key not in (EPSILON, DRAW) and len(distinct) > 2 and None not in distinct:
            found.setdefault(tuple(map(distinct.index, values)), key)
    return [*found.values()]


def figures_of(trials: DataFrame, evaluations: DataFrame) -> tuple[dict[str, Figure], list[str]]:
    """The figures of a sweep by file name, and why others are not drawn.

    - Test accuracy against ε and each swept number, or else against the first setting that differs. Without training,
      the calibrated parameter or ε takes the place of the accuracy.
    - The calibrated parameter against its target ε.
    - If trials were evaluated during training: accuracy against ε, and accuracy and loss against the round.

    Args:
        evaluations: a frame like `trials`, with a row for each evaluation during training. Its round is a setting.
    """
    runs, needed = trained(trials), targets(finished(trials))
    y = "epsilon"
    if len(runs):
        y = "test_accuracy"
    elif needed.notna().any():
        y = "knob_value"
    pairs = [("epsilon", y)] if runs["level"].nunique() > 1 else []
    pairs += [(key, y) for key in swept_numbers(trials)]
    if not pairs and len(runs):
        pairs = [(key, y) for key in configurations(runs)[1][:1]]
    if needed.nunique() > 1:
        pairs.append((EPSILON, "knob_value"))
    wanted = {f"{of.removesuffix('_value')}_by_{key}.png": (trials, key, [of]) for key, of in pairs}
    if len(evaluations) > 2 * len(runs):
        wanted["progress.png"] = (evaluations, "epsilon", [y])
        losses = ["test_loss"] if evaluations["test_loss"].notna().any() else []
        wanted["rounds.png"] = (evaluations, ROUND, [y, *losses])
    drawn, omitted = {}, []
    for name, (frame, key, ofs) in wanted.items():
        try:
            drawn[name] = curves(frame, key, *ofs)
        except NotDrawn as why:
            omitted.append(f"{name} is not drawn: {why}")
    return drawn, omitted
