"""Figures, as matplotlib objects."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from pandas import DataFrame, Series

from dpexp.accounting.accountants import APPROXIMATIONS, epsilon
from dpexp.accounting.claims import releases
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.tradeoff import type_two_errors

POINTS = 25


def epsilon_over_rounds(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε spent against rounds done, one line an accountant. Rounds are taken in the order of their specs."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="round", ylabel=f"ε at δ = {delta:g}")
    total = len(ledger)
    marks = sorted({max(1, round(total * k / POINTS)) for k in range(1, POINTS + 1)}) if total else []
    curves = {name: [epsilon(_first(ledger, mark), delta, name) for mark in marks] for name in accountants}
    _draw(axes, marks, curves)
    if marks and len(curves) == 1:
        (values,) = curves.values()
        axes.annotate(f"{values[-1]:.4g}", (marks[-1], values[-1]), xytext=(-4, 6),
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.set_xlim(left=0)
    return figure


def _draw(axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """One line an accountant, on a logarithmic scale where they lie far apart."""
    for name, values in curves.items():
        approximate = name in APPROXIMATIONS
        label = f"{name} (approximation)" if approximate else name
        axes.plot(x, values, label=label, linestyle="--" if approximate else "-")
    ends = [values[-1] for values in curves.values() if len(values)]
    axes.margins(y=0.1)
    if ends and max(ends) > 5 * min(ends) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="accountant", fontsize="small")


def _first(ledger: Ledger, count: int) -> Ledger:
    rounds = {}
    for round_, times in ledger.rounds.items():
        taken = min(times, count)
        if taken:
            rounds[round_] = taken
        count -= taken
    return Ledger(ledger.adjacency, rounds)


def trade_off(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """Left ε for every δ, one line an accountant; right the errors of a test for one record, by the first of them."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="δ", ylabel="ε", xscale="log")
    deltas = np.geomspace(1e-12, 0.1, POINTS).tolist()
    _draw(left, deltas, {name: [epsilon(ledger, d, name) for d in deltas] for name in accountants})
    left.axvline(delta, color="grey", linewidth=0.8, linestyle=":")
    alpha = np.linspace(0, 1, 201)
    right = figure.add_subplot(1, 2, 2, xlabel="type I error", ylabel=f"type II error, at least (by {accountants[0]})")
    right.plot(alpha, type_two_errors(ledger, alpha.tolist(), accountants[0]))
    right.plot(alpha, 1 - alpha, color="grey", linewidth=0.8, linestyle=":", label="guessing")
    right.set_aspect("equal")
    right.grid(alpha=0.3)
    right.legend()
    return figure


# Trials side by side. A frame of trials has the columns of `dpexp.tracking.read.TRIAL`.

_LINE = ("group", "mechanism", "allocation")
_VARYING = ("data", "model", "bound", "sampling")
_TOGETHER = 6  # lines that one panel can show
_MOST_ROWS = 60
_MOST_RUNS = 12
_MARKERS = "osD^vP*X"
WITHOUT_PRIVACY = "no: trained without privacy"


def drawn(trials: DataFrame) -> DataFrame:
    """The trials that are drawn, finished and with an ε, and two columns more: `line`, group, mechanism and
    allocation with whatever else differs between these trials; `level`, ε to two digits."""
    found = trials[(trials["status"] == "FINISHED") & trials["epsilon"].notna()]
    named = [column for column in _VARYING if found[column].nunique(dropna=False) > 1]
    labels = [
        " · ".join([*(str(row[key]) for key in _LINE), *(f"{key}={row[key]}" for key in named)])
        for row in found.to_dict("records")
    ]
    return found.assign(line=labels, level=[f"{value:.2g}" for value in found["epsilon"]])


def configurations(trials: DataFrame) -> DataFrame:
    """Trials that differ in their seed alone, as one row.

    Returns:
        Columns data, line, group, configuration; level; epsilon and accuracy, means over the seeds; spread, the
        standard deviation of accuracy over the seeds (0 for a single one); seeds, their number; and best: no
        configuration of the same line is more accurate at this level.
    """
    scored = drawn(trials).dropna(subset=["test_accuracy"])
    keys = ["data", "line", "group", "configuration"]
    found = scored.groupby(keys, as_index=False, dropna=False).agg(
        level=("level", "first"),
        epsilon=("epsilon", "mean"),
        accuracy=("test_accuracy", "mean"),
        spread=("test_accuracy", "std"),
        seeds=("test_accuracy", "size"),
    )
    best = found.groupby(["line", "level"])["accuracy"].transform("max")
    return found.fillna({"spread": 0.0}).assign(best=found["accuracy"] == best).sort_values(["line", "epsilon"])


def ceilings(trials: DataFrame) -> DataFrame:
    """The non-private twins: of each data set and model the most accurate configuration, with the columns data,
    model, accuracy, spread and seeds, over the seeds."""
    twins = trials[(trials["status"] == "FINISHED") & trials["private"].str.startswith(WITHOUT_PRIVACY)]
    found = (
        twins.dropna(subset=["test_accuracy"])
        .groupby(["data", "model", "configuration"], as_index=False, dropna=False)
        .agg(
            accuracy=("test_accuracy", "mean"),
            spread=("test_accuracy", "std"),
            seeds=("test_accuracy", "size"),
        )
    )
    return found.fillna({"spread": 0.0}).sort_values("accuracy", ascending=False).drop_duplicates(["data", "model"])


def frontier(trials: DataFrame) -> Figure:
    """Test accuracy against ε: means over seeds with their standard deviations. A line joins, at each ε, the best
    configuration of one group, mechanism and allocation; its others are pale. Horizontal: the non-private twins.

    Args:
        trials: see above; a panel a group where the lines are many.
    """
    points, tops = configurations(trials), ceilings(trials)
    names, groups = sorted(points["line"].unique()), sorted(points["group"].unique(), key=str)
    split = len(names) > _TOGETHER and len(groups) > 1
    panels: list[str | None] = [*groups] if split else [None]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns if split else 8, 4 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    short = {name: name.partition(" · ")[2] if split else name for name in names}
    styles = {label: k for k, label in enumerate(dict.fromkeys(short.values()))}
    for axes, group in zip(grid.flat, panels, strict=False):
        chosen = points if group is None else points[points["group"] == group]
        for name, line in chosen.groupby("line"):
            _line(axes, line, short[str(name)], styles[short[str(name)]])
        _ceilings(axes, tops)
        axes.set(title=group, xlabel="ε")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy")
    grid[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    _epsilon_axis(grid[0, 0], points["epsilon"].tolist())
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns if split else 2,
                      fontsize="small")  # fmt: skip
    return figure


def _line(axes: Axes, points: DataFrame, label: str, style: int) -> None:
    best, rest = points[points["best"]], points[~points["best"]]
    look: dict[str, Any] = {"color": f"C{style % 10}", "marker": _MARKERS[style % len(_MARKERS)]}
    axes.errorbar(best["epsilon"], best["accuracy"], best["spread"], label=label, capsize=3, elinewidth=1, markersize=5,
                  linestyle=("-", "--", ":")[style // 10 % 3], **look)  # fmt: skip
    axes.plot(rest["epsilon"], rest["accuracy"], linestyle="", alpha=0.3, markersize=4, **look)


def _ceilings(axes: Axes, tops: DataFrame) -> None:
    for k, top in enumerate(tops.to_dict("records")):
        which = f" ({top['data']}, {top['model']})" if len(tops) > 1 else ""
        look: dict[str, Any] = {"color": "black", "linestyle": (0, (1, 1 + k)), "linewidth": 1.2}
        axes.axhline(top["accuracy"], label=f"without privacy{which}", **look)
        axes.axhspan(top["accuracy"] - top["spread"], top["accuracy"] + top["spread"], color="black", alpha=0.08, lw=0)


def _epsilon_axis(axes: Axes, values: Sequence[float]) -> None:
    if values and max(values) > 4 * min(values) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        levels = sorted({float(f"{value:.2g}") for value in values})
        if len(levels) <= 8:
            axes.xaxis.set_major_locator(FixedLocator(levels))
            axes.xaxis.set_minor_locator(NullLocator())


def noise_and_signal(plans: DataFrame) -> Figure:
    """For each group of each run, per coordinate of the released average: what one record can add at most, the noise,
    and what the records of a sample of expected size come to at most.

    Args:
        plans: a row a group; columns line, group, and record = αS/(qn√d), noise = ασ̃/(qn) and average = αS/√d, with α
            the largest scale of the group's vectors, or for the noise the root mean square over its coordinates. Of
            many, the first runs are drawn.
    """
    rows: list[dict | str] = []
    for name, run in plans.groupby("line", sort=False):
        if not rows or len(rows) + len(run) < _MOST_ROWS:
            rows += [str(name), *run.to_dict("records")]
    figure = Figure(figsize=(9, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="per coordinate of the released average")
    runs, everything = sum(isinstance(row, str) for row in rows), plans["line"].nunique()
    if runs < everything:
        axes.set_title(f"{runs} of {everything} runs", fontsize="small")
    at = [(y, row) for y, row in enumerate(rows) if isinstance(row, dict)]
    y = [place for place, _ in at]
    record, noise, average = ([row[key] for _, row in at] for key in ("record", "noise", "average"))
    axes.hlines(y, record, average, color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(record, y, color="C0", marker="o", label="one record, at most: αS/(qn√d)")
    axes.scatter(noise, y, color="C3", marker="|", s=90, linewidths=2.5, label="noise: ασ̃/(qn)")
    axes.scatter(average, y, facecolors="white", edgecolors="C0", label="a whole sample, at most: αS/√d")
    axes.set_yticks(range(len(rows)), [row if isinstance(row, str) else row["group"] for row in rows])
    for tick, row in zip(axes.yaxis.get_major_ticks(), rows, strict=True):
        tick.label1.set(fontsize="small", fontweight="bold" if isinstance(row, str) else "normal")
        tick.tick1line.set_visible(isinstance(row, dict))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return figure


def budget_shares(plans: DataFrame) -> Figure:
    """How each allocation shares a group's budget out: w_g, stacked to 1, one bar a grouping and allocation, or more
    where its shares depend on something else.

    Args:
        plans: a row a group of a run; columns line, grouping, allocation, group, share.
    """
    bars: dict[tuple, str] = {}
    for name, run in plans.groupby("line", sort=False):
        shares = tuple((group, round(share, 3)) for group, share in zip(run["group"], run["share"], strict=True))
        bars.setdefault((run["grouping"].iloc[0], run["allocation"].iloc[0], shares), str(name))
    bars = dict(sorted(bars.items()))
    kinds = [key[:2] for key in bars]
    labels = [" · ".join(key[:2]) if kinds.count(key[:2]) == 1 else line for key, line in bars.items()]
    groups = list(dict.fromkeys(group for *_, shares in bars for group, _ in shares))
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlabel="share w of the budget", xlim=(0, 1))
    colors = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    named = set()
    for y, (*_, shares) in enumerate(bars):
        left = 0.0
        for group, share in shares:
            axes.barh(y, share, 0.7, left=left, color=colors(groups.index(group) % colors.N), alpha=0.75,
                      edgecolor="white", label=None if group in named else group)  # fmt: skip
            named.add(group)
            text = f"{group} {share:.0%}" if len(group) + 5 < 90 * share else f"{share:.0%}" if share > 0.04 else ""
            axes.text(left + share / 2, y, text, ha="center", va="center", fontsize="small")
            left += share
    if any(len(group) + 5 >= 90 * share for *_, shares in bars for group, share in shares):
        figure.set_figheight(figure.get_figheight() + 0.4 + 0.22 * -(-len(groups) // 5))
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    axes.set_yticks(range(len(bars)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def epsilon_of_runs(runs: Mapping[str, tuple[Ledger, float, str]]) -> Figure:
    """ε spent against rounds done, one line a run; runs whose releases cost the same share a line.

    Args:
        runs: by label the ledger, δ and the accountant; the first twelve distinct ones are drawn.
    """
    alike: dict[tuple, list[str]] = {}
    for label, (ledger, delta, accountant) in runs.items():
        costs = [(f"{release.z:.6g}", replace(release, z=1.0), count) for release, count in releases(ledger).items()]
        alike.setdefault((frozenset(costs), delta, accountant), []).append(label)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    deltas = {delta for _, delta, _ in runs.values()}
    axes = figure.add_subplot(xlabel="round", ylabel="ε" + (f" at δ = {deltas.pop():g}" if len(deltas) == 1 else ""))
    for k, labels in enumerate(list(alike.values())[:_MOST_RUNS]):
        ledger, delta, accountant = runs[labels[0]]
        total = len(ledger)
        marks = sorted({min(1, total), *(round(total * part / POINTS) for part in range(POINTS + 1))})
        values = [epsilon(_first(ledger, mark), delta, accountant) for mark in marks]
        axes.plot(marks, values, color=f"C{k % 10}", linestyle="-" if k < 10 else "--", label=_together(labels))
        axes.plot(marks[-1], values[-1], marker="o", markersize=4, color=f"C{k % 10}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    return figure


def _together(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]}\nand {len(labels) - 1} that cost the same"


def epsilon_by_accountant(costs: DataFrame) -> Figure:
    """ε of each run by each accountant, as bars; runs that cost the same share theirs.

    Args:
        costs: a row a run, by label; a column an accountant, NaN where it has no bound.
    """
    alike: dict[tuple, list[str]] = {}
    for label, row in zip(costs.index, costs.to_numpy(), strict=True):
        alike.setdefault(tuple(f"{value:.4g}" for value in row), []).append(str(label))
    shown = costs.loc[[labels[0] for labels in alike.values()]]
    width = 0.85 / len(costs.columns)
    figure = Figure(figsize=(9, 1.2 + 0.17 * len(costs.columns) * len(shown)), layout="constrained")
    axes = figure.add_subplot(xlabel="ε", xscale="log")
    for k, name in enumerate(costs.columns):
        values = shown[name].where(np.isfinite(shown[name]) & (shown[name] > 0)).to_numpy()
        approximate = name in APPROXIMATIONS
        places = np.arange(len(shown)) + (k - (len(costs.columns) - 1) / 2) * width
        bars = axes.barh(places, values, width * 0.9, color=f"C{k}", alpha=0.8, hatch="///" if approximate else None,
                         edgecolor="white" if approximate else None,
                         label=f"{name} (approximation, no bound)" if approximate else name)  # fmt: skip
        axes.bar_label(bars, ["" if np.isnan(value) else f" {value:.3g}" for value in values], fontsize="x-small")
    axes.set_yticks(range(len(shown)), [_together(labels) for labels in alike.values()], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(loc="outside upper center", ncols=6, fontsize="small")
    return figure


def numbers_swept(trials: DataFrame) -> list[str]:
    """The numerical parameters, other than the target ε, of which a sweep tried more than two values."""
    settings = [json.loads(configuration) for configuration in trials["configuration"]]
    keys = sorted({key for setting in settings for key in setting})
    found = []
    for key in keys:
        values = {setting.get(key) for setting in settings}
        if key != "privacy.epsilon" and len(values) > 2 and all(_number(value) is not None for value in values):
            found.append(key)
    return found


def against(trials: DataFrame, key: str) -> Figure:
    """ε, and test accuracy or the solved knob, against a parameter; means over seeds, one line for each line of the
    frontier."""
    x = [_number(json.loads(configuration)[key]) for configuration in trials["configuration"]]
    frame = drawn(trials.assign(x=x, epsilon=trials["epsilon"].fillna(trials["epsilon_planned"])))
    second = "test_accuracy" if frame["test_accuracy"].notna().any() else "knob_value"
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("epsilon", second), strict=True):
        for line, part in frame.groupby("line"):
            means = part.groupby("x")[column].agg(["mean", "std"]).fillna(0.0)
            axes.errorbar(means.index, means["mean"], means["std"], marker="o", capsize=2, label=str(line))
        name = {"epsilon": "ε", "test_accuracy": "test accuracy", "knob_value": str(frame["knob"].iloc[0])}[column]
        axes.set(xlabel=key, ylabel=name, xscale="log" if min(frame["x"]) > 0 else "linear")
        ticks = sorted(set(frame["x"]))
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if column == "epsilon" and max(frame[column]) > 8 * min(frame[column]) > 0:
            axes.set_yscale("log")
        if frame["line"].nunique() > 1:
            axes.legend(fontsize="small")
    return figure


def targets(trials: DataFrame) -> Series:
    """The target ε of each trial; NaN where nothing was solved for it."""
    settings = [json.loads(configuration) for configuration in trials["configuration"]]
    found = [_number(setting.get("privacy.epsilon")) for setting in settings]
    return Series(found, index=trials.index, dtype=float).where(trials["knob_value"].notna())


def compared(trials: DataFrame) -> Figure:
    """Test accuracy of each configuration, the best on top: means over seeds with their standard deviations, and the
    non-private twins as vertical lines. For trials of one and the same ε."""
    points, tops = configurations(trials), ceilings(trials)
    points = points.sort_values("accuracy").tail(_MOST_ROWS)
    figure = Figure(figsize=(8, 1.4 + 0.28 * max(4, len(points))), layout="constrained")
    axes = figure.add_subplot(xlabel="test accuracy" + (f" at ε = {points['level'].iloc[-1]}" if len(points) else ""))
    axes.errorbar(points["accuracy"], range(len(points)), xerr=points["spread"], fmt="o", capsize=2)
    axes.set_yticks(range(len(points)), labels=points["line"], fontsize="small")
    for _, top in tops.iterrows():
        axes.axvline(top["accuracy"], color="black", linestyle="--", linewidth=0.8, label="without privacy")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if len(tops):
        axes.legend(fontsize="small")
    return figure


def needed(trials: DataFrame) -> Figure:
    """The solved knob against the target ε: means over seeds, one line for each setting of whatever else was swept."""
    settings = [json.loads(configuration) for configuration in trials["configuration"]]
    others = numbers_swept(trials)
    labels = [", ".join(f"{key}={setting.get(key)}" for key in others) or "all" for setting in settings]
    frame = trials.assign(target=targets(trials), setting=labels).dropna(subset=["target", "knob_value"])
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="target ε", ylabel=" or ".join(sorted(frame["knob"].unique())) + " needed")
    for setting, part in frame.groupby("setting"):
        means = part.groupby("target")["knob_value"].mean()
        axes.plot(means.index, means, marker="o", label=str(setting))
    axes.set(xscale="log", yscale="log")
    ticks = sorted(set(frame["target"]))
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    values = sorted(set(frame["knob_value"]))
    axes.set_yticks(values[:: max(1, len(values) // 8)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.grid(alpha=0.3)
    if frame["setting"].nunique() > 1:
        axes.legend(fontsize="small")
    return figure


def progress(histories: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Test accuracy against the ε spent so far, one line a training: points (ε, accuracy)."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="ε spent", ylabel="test accuracy")
    for name, points in histories.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center")
    return figure


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
