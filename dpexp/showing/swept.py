"""What a sweep tried, and what came of it.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`; every point is a configuration, its mean over seeds
with their standard deviation.
"""

import json
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, to_numeric

from dpexp.showing.configurations import configurations, finished
from dpexp.showing.panels import NotDrawn, arrange, caption, grid, legend, look, parts, percent, scale
from dpexp.showing.settings import DRAW, EPSILON, held, labels, number, short_names

_ROWS = 4  # panels of two figures each


def numbers_swept(trials: DataFrame) -> list[str]:
    """The numerical parameters, other than the target ε, of which a sweep tried more than two values."""
    read = [json.loads(configuration) for configuration in finished(trials)["configuration"]]
    found = []
    for key in sorted({key for parameters in read for key in parameters}):
        values = {number(parameters.get(key)) for parameters in read}
        if key not in (EPSILON, DRAW) and len(values) > 2 and None not in values:
            found.append(key)
    return found


def against(trials: DataFrame, key: str) -> Figure:
    """Left ε, right test accuracy (or where nothing was trained the solved knob) against a parameter. A line joins
    configurations that differ in this parameter alone; rows are made of whatever else differs.

    Raises:
        NotDrawn: there is more than can be told apart.
    """
    runs = finished(trials)
    points, by = configurations(runs, [key])
    panels, lines = arrange(points, [name for name in by if name != key], _ROWS)
    points = points.assign(x=to_numeric(points[key]), line=labels(points, lines))
    styles = look(points["line"])
    second = "accuracy" if points["accuracy"].notna().any() else "knob_value"
    knob = " or ".join(sorted(points["knob"].unique()))
    rows = list(parts(points, panels))
    figure = Figure(figsize=(10, 1.4 + 3.2 * len(rows)), layout="constrained")
    drawn = figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey="col")
    for (title, panel), pair in zip(rows, drawn, strict=True):
        for axes, column in zip(pair, ("epsilon", second), strict=True):
            _lines(axes, panel, column, styles)
            name = {"epsilon": "ε", "accuracy": "test accuracy", "knob_value": f"{knob} needed"}[column]
            axes.set(xlabel=key, ylabel=name)
            axes.set_title(title, fontsize="small")
    scale(drawn[0, 0], "x", points["x"])
    scale(drawn[0, 0], "y", points["epsilon"], digits=2)
    if second == "accuracy":
        percent(drawn[0, 1], "y")
    else:
        scale(drawn[0, 1], "y", points["knob_value"], digits=3)
    caption(figure, held(runs, [key]))
    legend(figure)
    return figure


def _lines(axes: Axes, points: DataFrame, column: str, styles: Mapping[str, dict]) -> None:
    for name, line in points.sort_values("x").groupby("line", sort=False):
        spread = line["spread"] if column == "accuracy" else None
        axes.errorbar(line["x"], line[column], spread, label=name or None, capsize=2, markersize=5, **styles[str(name)])
    axes.grid(alpha=0.3)


def needed(trials: DataFrame) -> Figure:
    """The solved knob against the target ε. A line joins configurations that differ in their target alone; panels are
    made of whatever else differs.

    Raises:
        NotDrawn: no two targets were solved for, several knobs were, or there is more than can be told apart.
    """
    runs = finished(trials)
    runs = runs[runs["knob_value"].notna()]
    points, by = configurations(runs, [EPSILON])
    if EPSILON not in by:
        raise NotDrawn("No knob was solved for two values of ε.")
    if points["knob"].nunique() > 1:
        raise NotDrawn(f"Different knobs were solved for: {', '.join(sorted(points['knob'].unique()))}.")
    idle: list[str] = []
    for name in [name for name in by if name != EPSILON]:
        rest = [key for key in by if key not in (name, *idle)]
        if _one_value(points, rest):
            idle, points = [*idle, name], points.drop_duplicates(rest)
    panels, lines = arrange(points, [name for name in by if name not in (EPSILON, *idle)])
    points = points.assign(target=to_numeric(points[EPSILON]), line=labels(points, lines))
    styles = look(points["line"])
    sorted_panels = list(parts(points, panels))
    figure, grid_ = grid(len(sorted_panels))
    for axes, (title, panel) in zip(grid_, sorted_panels, strict=True):
        for name, line in panel.sort_values("target").groupby("line", sort=False):
            axes.plot(line["target"], line["knob_value"], label=name or None, markersize=5, **styles[str(name)])
        axes.set(xlabel="target ε", ylabel=f"{points['knob'].iloc[0]} needed")
        axes.label_outer()
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
    scale(grid_[0], "x", points["target"], logarithmic=True)
    scale(grid_[0], "y", points["knob_value"], logarithmic=True, digits=3)
    caption(
        figure, held(runs, [EPSILON]), f"The same for every {', '.join(short_names(idle).values())}." if idle else ""
    )
    legend(figure)
    return figure


def _one_value(points: DataFrame, settings: Sequence[str]) -> bool:
    """Whether the knob that was needed depends on these settings alone."""
    found = points.groupby([*settings])["knob_value"]
    return bool((found.max() - found.min() <= 1e-4 * found.min()).all())


def progress(histories: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *told: str) -> Figure:
    """Test accuracy against the ε spent so far: a colour a configuration, a line each of its trainings.

    Args:
        histories: by label of a configuration the points (ε, accuracy) of each training; told: what the caption says.
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
    caption(figure, *told)
    legend(figure, columns=1)
    return figure
