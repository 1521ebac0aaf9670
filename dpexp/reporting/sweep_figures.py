"""Figures of a sweep: accuracy, ε and calibrated parameters against its settings, and its plans.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`; every point is a configuration: the mean over its
seeds, with their standard deviation.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame, to_numeric

from dpexp.privacy.noise.correlated import max_noise_std
from dpexp.reporting.comparisons import (
    DRAW,
    EPSILON,
    Best,
    Z,
    best,
    best_baselines,
    common_label,
    configurations,
    finished,
    fixed_settings,
    labels,
    number,
    short_names,
    trained,
)
from dpexp.reporting.panels import NotDrawn, arrange, caption, grid, legend, parts, percent, scale, styles_of

_MAX_ROWS = 60
_BAR_CHARACTERS = 65  # that fit into a bar of full width
_TOLERANCE = 1.1  # plans that differ by a smaller factor are drawn as one


def groups_of(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a plan.json: name, share of the budget, and magnitudes per coordinate of the released average.

    `record` = αS/(qn√d): the most that one record adds; `noise` = ασ̃/(qn), or more if it is correlated; `average` =
    αS/√d: the most that a sample of expected size comes to. α is the largest scale of the group's vectors, for the
    noise the root mean square over its coordinates.
    """
    expected = plan["sampling"]["q"] * plan["n"]
    found = []
    for group in plan["groups"]:
        dims, alphas = [vector["d"] for vector in group["vectors"]], group["alphas"]
        average = max(alphas) * group["S"] / math.sqrt(sum(dims))
        scale = math.sqrt(sum(d * alpha**2 for d, alpha in zip(dims, alphas, strict=True)) / sum(dims))
        noise = scale * max_noise_std(group["sigma"], group["bands"])
        numbers = {"record": average / expected, "noise": noise / expected, "average": average}
        found.append({"group": group["name"], "share": group["share"]} | numbers)
    return found


def noise_and_signal(plans: Mapping[str, Sequence[dict]], settings: DataFrame, fixed: str = "") -> Figure:
    """The magnitudes of `groups_of` for each group of each plan. Plans within 10 % of one another are drawn as one.

    Args:
        fixed: caption with the fixed settings.
    """
    blocks: list[tuple[list[str], Sequence[dict]]] = []
    for run_id, groups in plans.items():
        found = next((members for members, other in blocks if _are_close(groups, other)), None)
        if found is None:
            blocks.append(([run_id], groups))
        else:
            found.append(run_id)
    rows: list[dict | str] = []
    drawn = 0
    for members, groups in blocks:
        if not rows or len(rows) + 1 + len(groups) <= _MAX_ROWS:
            rows += [common_label(settings.loc[members], settings.loc[[*plans]]), *groups]
            drawn += 1
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="per coordinate of the released average")
    at = [(y, row) for y, row in enumerate(rows) if isinstance(row, dict)]
    y = [place for place, _ in at]
    record, noise, average = ([row[key] for _, row in at] for key in ("record", "noise", "average"))
    axes.hlines(y, record, average, color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(record, y, color="C0", marker="o", label="one record, at most: αS/(qn√d)")
    axes.scatter(noise, y, color="C3", marker="|", s=90, linewidths=2.5, label="noise: ασ̃/(qn)")
    axes.scatter(average, y, facecolors="white", edgecolors="C0", label="a whole sample, at most: αS/√d")
    axes.set_yticks(y, [row["group"] for _, row in at], fontsize="small")
    for place, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(0.01, place, row, transform=axes.get_yaxis_transform(), va="center", fontsize="small",
                      fontweight="bold")  # fmt: skip
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    caption(figure, fixed, f"{drawn} of {len(blocks)} plans that differ." if drawn < len(blocks) else "")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _are_close(plan: Sequence[dict], other: Sequence[dict]) -> bool:
    return [group["group"] for group in plan] == [group["group"] for group in other] and all(
        math.isclose(one[key], two[key], rel_tol=1 - 1 / _TOLERANCE)
        for one, two in zip(plan, other, strict=True)
        for key in ("record", "noise", "average")
    )


def budget_shares(plans: Mapping[str, Sequence[dict]], settings: DataFrame, fixed: str = "") -> Figure:
    """The budget share w_g of each group, stacked to 1; one bar for all plans with the same shares.

    Args:
        fixed: caption with the fixed settings.
    """
    bars: dict[tuple, list[str]] = {}
    for run_id, plan in plans.items():
        bars.setdefault(tuple((group["group"], round(group["share"], 3)) for group in plan), []).append(run_id)
    bars = dict(sorted(bars.items()))
    groups = list(dict.fromkeys(group for shares in bars for group, _ in shares))
    figure = Figure(figsize=(10, 1.3 + 0.5 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlabel="share w of the budget", xlim=(0, 1))
    colors = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    named = set()
    for y, shares in enumerate(bars):
        left = 0.0
        for group, share in shares:
            axes.barh(y, share, 0.7, left=left, color=colors(groups.index(group) % colors.N), alpha=0.75,
                      edgecolor="white", label=None if group in named else group)  # fmt: skip
            named.add(group)
            named_in_bar = len(group) + 5 < _BAR_CHARACTERS * share
            text = f"{group} {share:.0%}" if named_in_bar else f"{share:.0%}" if share > 0.04 else ""
            axes.text(left + share / 2, y, text, ha="center", va="center", fontsize="small")
            left += share
    if any(len(group) + 5 >= _BAR_CHARACTERS * share for shares in bars for group, share in shares):
        figure.set_figheight(figure.get_figheight() + 0.4 + 0.22 * -(-len(groups) // 5))
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    everywhere = settings.loc[[*plans]]
    names = [textwrap.fill(common_label(settings.loc[members], everywhere), 42) for members in bars.values()]
    axes.set_yticks(range(len(bars)), names, fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    caption(figure, fixed)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def frontier(trials: DataFrame) -> Figure:
    """Test accuracy against ε, with the best non-private baseline of the same data and model as a horizontal line.

    A line joins configurations that differ only in their target ε (or in z, if no target differs); other settings make
    further lines and panels.

    Raises:
        NotDrawn: there are no two values of ε, or too many settings.
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
        for name, line in panel.sort_values("epsilon").groupby("line", sort=False):
            axes.errorbar(line["epsilon"], line["accuracy"], line["spread"], label=name or None, capsize=3,
                          elinewidth=1, markersize=5, **styles[str(name)])  # fmt: skip
        if top := tops.get((panel["data"].iloc[0], panel["model"].iloc[0])):
            accuracy, spread = top.row["accuracy"], top.row["spread"]
            axes.axhline(accuracy, label=_baseline_label(top), color="black", linestyle=":")
            if spread > 0:
                axes.axhspan(accuracy - spread, accuracy + spread, color="black", alpha=0.08, lw=0)
        axes.set(xlabel="ε", ylabel="test accuracy")
        axes.label_outer()
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
    scale(grid_[0], "x", points["epsilon"], digits=2)
    percent(grid_[0], "y")
    caption(figure, fixed_settings(runs))
    legend(figure)
    return figure


def _baseline_label(top: Best, of: str = "") -> str:
    among = f" (the best of {top.others + 1})" if top.others else ""
    return f"{of} without privacy{among}".strip()


def compared(trials: DataFrame) -> Figure:
    """Test accuracy of each configuration, for trials of one data set and one ε.

    The best is on top; filled points are the best and those that are not significantly lower.

    Raises:
        NotDrawn: there is no trained private trial, or they differ in data set or ε.
    """
    runs = trained(trials)
    if runs["data"].nunique() != 1 or runs["level"].nunique() != 1:
        raise NotDrawn("Only trials of one data set at one ε are compared by accuracy alone.")
    points, _ = configurations(runs)
    points = points.sort_values("accuracy", kind="stable")
    top = best(points)
    everything, points = len(points), points.tail(_MAX_ROWS)
    names = [f"{row['label'] or 'the only one'} ({_runs(row['runs'])})" for row in points.to_dict("records")]
    wide = max(9, 5 + 0.075 * max(map(len, names)))
    figure = Figure(figsize=(wide, 1.8 + 0.28 * max(4, len(points))), layout="constrained")
    axes = figure.add_subplot(xlabel=f"test accuracy at ε = {points['level'].iloc[-1]}")
    kinds = ["the best" if row["label"] == top.row["label"] else "tied" if row["label"] in top.tied else "lower"
             for row in points.to_dict("records")]  # fmt: skip
    for kind, (name, fill) in _KINDS.items():
        at = [y for y, found in enumerate(kinds) if found == kind]
        if at:
            rows = points.iloc[at]
            axes.errorbar(rows["accuracy"], at, xerr=rows["spread"], fmt="o", capsize=2, color="C0", label=name,
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
    legend(figure, columns=4)
    omitted = f"The {len(points)} best of {everything}." if len(points) < everything else ""
    caption(figure, fixed_settings(runs), omitted)
    return figure


_KINDS = {
    "the best": ("highest mean", "C0"),
    "tied": ("not significantly lower", "lightskyblue"),
    "lower": ("significantly lower", "white"),
}


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


_MAX_PANEL_ROWS = 4


def swept_numbers(trials: DataFrame) -> list[str]:
    """The numerical parameters with more than two values in a sweep, without the target ε."""
    read = [json.loads(configuration) for configuration in finished(trials)["configuration"]]
    found = []
    for key in sorted({key for parameters in read for key in parameters}):
        values = {number(parameters.get(key)) for parameters in read}
        if key not in (EPSILON, DRAW) and len(values) > 2 and None not in values:
            found.append(key)
    return found


def against(trials: DataFrame, key: str) -> Figure:
    """ε (left) and test accuracy, or without training the calibrated parameter (right), against a parameter.

    A line joins configurations that differ only in this parameter; other settings make further lines and rows.

    Raises:
        NotDrawn: there are too many settings.
    """
    runs = finished(trials)
    points, by = configurations(runs, [key])
    panels, lines = arrange(points, [name for name in by if name != key], _MAX_PANEL_ROWS)
    points = points.assign(x=to_numeric(points[key]), line=labels(points, lines))
    styles = styles_of(points["line"])
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
    caption(figure, fixed_settings(runs, [key]))
    legend(figure)
    return figure


def _lines(axes: Axes, points: DataFrame, column: str, styles: Mapping[str, dict]) -> None:
    for name, line in points.sort_values("x").groupby("line", sort=False):
        spread = line["spread"] if column == "accuracy" else None
        axes.errorbar(line["x"], line[column], spread, label=name or None, capsize=2, markersize=5, **styles[str(name)])
    axes.grid(alpha=0.3)


def needed(trials: DataFrame) -> Figure:
    """The calibrated parameter against the target ε.

    A line joins configurations that differ only in their target; other settings make further lines and panels.

    Raises:
        NotDrawn: there are no two targets, several parameters were calibrated, or there are too many settings.
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
    note = f"The same for every {', '.join(short_names(irrelevant).values())}." if irrelevant else ""
    caption(figure, fixed_settings(runs, [EPSILON]), note)
    legend(figure)
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
    caption(figure, *notes)
    legend(figure, columns=1)
    return figure
