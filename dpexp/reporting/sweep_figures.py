"""Figures of a sweep: accuracy, ε and calibrated parameters against its settings, and its plans.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`; every point is a configuration: the mean over its
seeds, with their standard deviation.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from pandas import DataFrame, to_numeric

from dpexp.accounting.rounding import up
from dpexp.reporting.comparisons import (
    DRAW,
    EPSILON,
    Best,
    Z,
    best,
    best_baselines,
    configurations,
    finished,
    fixed_settings,
    labels,
    number,
    short_names,
    trained,
)

LINES, PANELS = 6, 12  # at most: lines in a panel, panels in a figure
_TICKS = 8
_MARKERS = "osD^vP"


class NotDrawn(Exception):
    """A figure would mislead or be unreadable; the message says why."""


def arrange(points: DataFrame, by: Sequence[str], max_panels: int = PANELS) -> tuple[list[str], list[str]]:
    """Splits settings into those that make panels and those that make lines: as few panels as possible, of few lines.

    Data sets and models never share a panel.
    """
    separate = [key for key in by if key in ("data", "model")]
    free = [key for key in by if key not in separate]
    found = []
    for size in range(len(free) + 1 if len(free) <= _TICKS else 0):
        for chosen in itertools.combinations(free, size):
            panels, lines = [*separate, *chosen], [key for key in free if key not in chosen]
            count = len(points[panels].drop_duplicates()) if panels else 1
            fullest = max(len(part[lines].drop_duplicates()) if lines else 1 for _, part in parts(points, panels))
            if count <= max_panels and fullest <= LINES:
                found.append((count, panels, lines))
    if not found:
        names = ", ".join(short_names(by).values())
        raise NotDrawn(
            f"{len(points[[*by]].drop_duplicates())} settings of {names} do not fit into {max_panels} "
            f"panels of {LINES} lines; draw fewer trials at a time."
        )
    _, panels, lines = min(found, key=lambda option: option[0])
    return panels, lines


def parts(points: DataFrame, keys: Sequence[str]) -> Iterator[tuple[str, DataFrame]]:
    """(label, rows) for each combination of values of the keys; all rows together if there are no keys."""
    if not keys:
        yield "", points
        return
    for _, part in points.groupby([*keys], sort=False):
        yield labels(part.head(1), keys)[0], part


def grid(count: int, width: float = 4.0, height: float = 3.4, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels with shared axes."""
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (max(8.0, width * columns) if columns > 1 else 8.0, height * rows + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for spare in axes.flat[count:]:
        spare.remove()
    for column in axes.T[count % columns or columns :]:  # the last row is short
        column[rows - 2].xaxis.set_tick_params(labelbottom=True)
    return figure, list(axes.flat[:count])


def styles_of(labels_: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each line."""
    return {
        label: {"color": f"C{k % 10}", "marker": _MARKERS[k % len(_MARKERS)], "linestyle": ("-", "--")[k // 10 % 2]}
        for k, label in enumerate(dict.fromkeys(labels_))
    }


def finish(figure: Figure, title: str, *notes: str, columns: int = 2) -> None:
    """Adds a title, and below the panels notes, such as the fixed settings, and one legend of all labelled lines."""
    found = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(title)
    below = figure.legend([*found.values()], [*found], loc="outside lower center", ncols=columns, fontsize="small")
    below.set_title("\n".join(filter(None, notes)), FontProperties(size="x-small"))
    below.set_frame_on(False)


def scale(
    axes: Axes, which: str, values: Iterable[float], logarithmic: bool | None = None, claim: bool = False
) -> None:
    """Scales an axis: ticks at the values if they are few; nearly equal values are not magnified.

    Args:
        which: x or y.
        values: all that are drawn along the axis; non-finite ones are ignored.
        logarithmic: by default, if the values lie far apart.
        claim: they are ε, so that ticks are rounded up.
    """
    axis: Axis = getattr(axes, f"{which}axis")
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        lowest, highest = finite[0], finite[-1]
        if logarithmic is None:
            logarithmic = highest > 4 * lowest
        logarithmic = logarithmic and lowest > 0
        if logarithmic:
            getattr(axes, f"set_{which}scale")("log")
        size = max(abs(lowest), abs(highest))
        if highest - lowest <= 5e-3 * size:
            getattr(axes, f"set_{which}lim")(lowest - (0.1 * size or 1), highest + (0.1 * size or 1))
        short = [up(value, 3) if claim else f"{value:.3g}" for value in finite]
        ticks = sorted({v if v == int(v) else float(text) for v, text in zip(finite, short, strict=True)})
        if len(ticks) <= _TICKS:
            axis.set_major_locator(FixedLocator(_spaced(ticks, logarithmic)))
            axis.set_minor_locator(NullLocator())
        elif logarithmic:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _spaced(ticks: list[float], logarithmic: bool) -> list[float]:
    """Drops ticks whose label would overlap the one before."""
    places = [math.log(tick) for tick in ticks] if logarithmic else ticks
    room = 0.06 * (places[-1] - places[0])
    kept: list[int] = []
    for k, place in enumerate(places):
        if not kept or place - places[kept[-1]] > room:
            kept.append(k)
    return [ticks[k] for k in kept]


def percent(axes: Axes, which: str) -> None:
    """Formats an axis in percent."""
    axis: Axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


_MAX_ROWS = 60
_MAX_PANEL_ROWS = 4
_FILLS = {"highest mean": "C0", "not significantly lower": "lightskyblue", "significantly lower": "white"}


def frontier(trials: DataFrame) -> Figure:
    """Test accuracy against ε, with the best non-private baseline of the same data and model as a horizontal line.

    A line joins configurations that differ only in their target ε (or in z, if no target differs); other settings make
    further lines and panels.
    """
    runs = trained(trials)
    if runs["level"].nunique() < 2:
        raise NotDrawn("There are not two values of ε to draw accuracy against.")
    points, by = configurations(runs)
    along = next((key for key in (EPSILON, Z) if key in by), None)
    panels, lines = arrange(points, [key for key in by if key != along])
    points = points.assign(line=labels(points, lines))
    tops, styles = best_baselines(trials), styles_of(points["line"])
    count = len(points[panels].drop_duplicates()) if panels else 1
    figure, grid_ = grid(count)
    for axes, (title, panel) in zip(grid_, parts(points, panels), strict=True):
        _draw(axes, title, panel, ("epsilon", "ε"), ("accuracy", "test accuracy"), styles)
        if top := tops.get((panel["data"].iloc[0], panel["model"].iloc[0])):
            accuracy, spread = top.row["accuracy"], top.row["spread"]
            axes.axhline(accuracy, label=_baseline_label(top), color="black", linestyle=":")
            if spread > 0:
                axes.axhspan(accuracy - spread, accuracy + spread, color="black", alpha=0.08, lw=0)
        axes.label_outer()
    scale(grid_[0], "x", points["epsilon"], claim=True)
    percent(grid_[0], "y")
    finish(figure, "Test accuracy by ε", fixed_settings(runs))
    return figure


def _baseline_label(top: Best, of: str = "") -> str:
    among = f" (the best of {top.others + 1})" if top.others else ""
    return f"{of} without privacy{among}".strip()


def compared(trials: DataFrame) -> Figure:
    """Test accuracy of each configuration, for trials of one data set and one ε.

    The best is on top; filled points are the best and those that are not significantly lower.
    """
    runs = trained(trials)
    if runs["data"].nunique() != 1 or runs["cost"].nunique() != 1:
        raise NotDrawn("Only trials of one data set at one privacy cost are compared by accuracy alone.")
    points, _ = configurations(runs)
    points = points.sort_values("accuracy", kind="stable")
    top = best(points)
    everything, points = len(points), points.tail(_MAX_ROWS)
    rows = points.to_dict("records")
    names = [f"{row['label'] or 'the only one'} ({row['runs']} run{'s' * (row['runs'] > 1)})" for row in rows]
    wide = max(9, 5 + 0.075 * max(map(len, names)))
    figure = Figure(figsize=(wide, 1.8 + 0.28 * max(4, len(points))), layout="constrained")
    axes = figure.add_subplot(xlabel="test accuracy")
    best_one, tied, lower = _FILLS
    kinds = points["label"].map(
        lambda name: best_one if name == top.row["label"] else tied if name in top.tied else lower
    )
    for kind, fill in _FILLS.items():
        at = [y for y, found in enumerate(kinds) if found == kind]
        if at:
            one = points.iloc[at]
            axes.errorbar(one["accuracy"], at, xerr=one["spread"], fmt="o", capsize=2, color="C0", label=kind,
                          markerfacecolor=fill)  # fmt: skip
    models = points["model"].unique()
    for (data, model), ceiling in best_baselines(trials).items():
        if data == top.row["data"] and model in models:
            label = _baseline_label(ceiling, model if len(models) > 1 else "")
            axes.axvline(
                ceiling.row["accuracy"], color="black", linestyle=(0, (1, 1 + [*models].index(model))), label=label
            )
    axes.set_yticks(range(len(points)), names, fontsize="small")
    axes.set_ylim(-0.6, max(3.4, len(points) - 0.4))
    axes.grid(alpha=0.3)
    percent(axes, "x")
    omitted = f"The {len(points)} best of {everything}." if len(points) < everything else ""
    title = f"Test accuracy at ε = {up(points['epsilon'].max(), 3)}"
    finish(figure, title, fixed_settings(runs), omitted, columns=4)
    return figure


def swept_numbers(trials: DataFrame) -> list[str]:
    """The numerical parameters with more than two values in a sweep, without the target ε. Of those that go together,
    as steps and whatever is interpolated from them, it is the first: their figures are the same."""
    read = [json.loads(configuration) for configuration in finished(trials)["configuration"]]
    found: dict[tuple[int, ...], str] = {}
    for key in sorted({key for parameters in read for key in parameters}):
        values = [number(parameters.get(key)) for parameters in read]
        distinct = [*dict.fromkeys(values)]
        if key not in (EPSILON, DRAW) and len(distinct) > 2 and None not in distinct:
            found.setdefault(tuple(map(distinct.index, values)), key)
    return [*found.values()]


def against(trials: DataFrame, key: str) -> Figure:
    """ε (left) and test accuracy, or without training the calibrated parameter (right), against a parameter.

    A line joins configurations that differ only in this parameter; other settings make further lines and rows.
    """
    runs = finished(trials)
    points, by = configurations(runs, [key])
    panels, lines = arrange(points, [name for name in by if name != key], _MAX_PANEL_ROWS)
    points = points.assign(x=to_numeric(points[key]), line=labels(points, lines))
    styles = styles_of(points["line"])
    is_trained = bool(points["accuracy"].notna().any())
    knob = " or ".join(sorted(points["knob"].unique()))
    second = ("accuracy", "test accuracy") if is_trained else ("knob_value", f"{knob} needed")
    rows = list(parts(points, panels))
    figure = Figure(figsize=(10, 1.4 + 3.2 * len(rows)), layout="constrained")
    drawn = figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey="col")
    for (title, panel), pair in zip(rows, drawn, strict=True):
        for axes, y in zip(pair, (("epsilon", "ε"), second), strict=True):
            _draw(axes, title, panel, ("x", key), y, styles)
    scale(drawn[0, 0], "x", points["x"])
    scale(drawn[0, 0], "y", points["epsilon"], claim=True)
    if is_trained:
        percent(drawn[0, 1], "y")
    else:
        scale(drawn[0, 1], "y", points["knob_value"])
    finish(figure, f"ε and {second[1]} by {key}", fixed_settings(runs, [key]))
    return figure


def _draw(
    axes: Axes, title: str, points: DataFrame, x: tuple[str, str], y: tuple[str, str], styles: Mapping[str, dict]
) -> None:
    """Draws the lines of a panel; `x` and `y` are a column and its name."""
    for name, line in points.sort_values(x[0]).groupby("line", sort=False):
        spread = line["spread"] if y[0] == "accuracy" else None
        axes.errorbar(line[x[0]], line[y[0]], spread, label=name or None, capsize=2, markersize=5, **styles[str(name)])
    axes.set(xlabel=x[1], ylabel=y[1])
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)


def needed(trials: DataFrame) -> Figure:
    """The calibrated parameter against the target ε.

    A line joins configurations that differ only in their target; other settings make further lines and panels.
    """
    runs = finished(trials)
    runs = runs[runs["knob_value"].notna()]
    points, by = configurations(runs, [EPSILON])
    if EPSILON not in by:
        raise NotDrawn("No parameter was calibrated for two values of ε.")
    if points["knob"].nunique() > 1:
        raise NotDrawn(f"Different parameters were calibrated: {', '.join(sorted(points['knob'].unique()))}.")
    irrelevant: list[str] = []
    for name in [name for name in by if name != EPSILON]:
        rest = [key for key in by if key not in (name, *irrelevant)]
        if _depends_only_on(points, rest):
            irrelevant, points = [*irrelevant, name], points.drop_duplicates(rest)
    panels, lines = arrange(points, [name for name in by if name not in (EPSILON, *irrelevant)])
    points = points.assign(target=to_numeric(points[EPSILON]), line=labels(points, lines))
    styles = styles_of(points["line"])
    knob = f"{points['knob'].iloc[0]} needed"
    drawn = list(parts(points, panels))
    figure, grid_ = grid(len(drawn))
    for axes, (title, panel) in zip(grid_, drawn, strict=True):
        _draw(axes, title, panel, ("target", "target ε"), ("knob_value", knob), styles)
        axes.label_outer()
    scale(grid_[0], "x", points["target"], logarithmic=True, claim=True)
    scale(grid_[0], "y", points["knob_value"], logarithmic=True)
    note = f"The same for every {', '.join(short_names(irrelevant).values())}." if irrelevant else ""
    finish(figure, f"{points['knob'].iloc[0]} needed for each ε", fixed_settings(runs, [EPSILON]), note)
    return figure


def _depends_only_on(points: DataFrame, settings: Sequence[str]) -> bool:
    """Whether the calibrated parameter depends only on these settings."""
    found = points.groupby([*settings])["knob_value"]
    return bool((found.max() - found.min() <= 1e-4 * found.min()).all())


def progress(histories: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *notes: str) -> Figure:
    """Test accuracy against the ε spent during training: one colour per configuration, one line per training.

    Args:
        histories: by label of a configuration, the points (ε, accuracy) of each of its trainings.
        notes: lines of the caption.
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel="ε spent", ylabel="test accuracy")
    for k, (name, trainings) in enumerate(histories.items()):
        drawn = [points for points in trainings if points]
        for j, points in enumerate(drawn):
            label = f"{name or 'all'} ({len(drawn)} run{'s' if len(drawn) > 1 else ''})" if j == 0 else None
            axes.plot(*zip(*points, strict=True), marker=".", color=f"C{k % 10}", linewidth=1, label=label)
    percent(axes, "y")
    axes.grid(alpha=0.3)
    finish(figure, "Test accuracy by the ε spent during training", *notes, columns=1)
    return figure
