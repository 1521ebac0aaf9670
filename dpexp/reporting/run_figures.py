"""Figures of runs: ε over rounds and by accountant, trade-off curves, values released with noise."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from pandas import DataFrame

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import is_bound
from dpexp.accounting.ledger import Ledger, ParallelQueryEvent
from dpexp.accounting.releases import releases
from dpexp.accounting.tradeoff import type_two_errors
from dpexp.privacy.private_metrics import GradientSignal, MetricEstimates, signal_curve
from dpexp.reporting.comparisons import common_label
from dpexp.reporting.panels import caption
from dpexp.reporting.wording import up

POINTS = 25
_MAX_RUNS = 12
_MAX_PANELS = 8


def epsilon_over_rounds(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε against rounds, one line per accountant. Equal rounds are counted together."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=_rounds([ledger]), ylabel=f"ε at δ = {up(delta, 4)}")
    total = ledger.training_rounds
    marks = sorted({max(1, round(total * k / POINTS)) for k in range(1, POINTS + 1)}) if total else []
    curves = {name: [epsilon(_first(ledger, mark), delta, name) for mark in marks] for name in accountants}
    _draw(axes, marks, curves)
    if marks and len(curves) == 1:
        (values,) = curves.values()
        axes.annotate(f"{values[-1]:.4g}", (marks[-1], values[-1]), xytext=(-4, 6),
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return figure


def _rounds(ledgers: Sequence[Ledger]) -> str:
    """The label of an axis of rounds: a ledger counts equal rounds, and does not have their order."""
    several = any(sum(round_.one_time_query is None for round_ in ledger.rounds) > 1 for ledger in ledgers)
    return "round, equal rounds together" if several else "round"


def _draw(axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """One line per accountant, on a logarithmic scale if they differ much."""
    for name, values in curves.items():
        axes.plot(x, values, label=accountant_label(name), linestyle="--" if not is_bound(name) else "-")
    ends = [values[-1] for values in curves.values() if len(values)]
    axes.margins(y=0.1)
    if ends and max(ends) > 5 * min(ends) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(title="accountant", fontsize="small")


def accountant_label(accountant: str) -> str:
    """The accountant, marked if it is an approximation."""
    return f"{accountant} (approximation, no bound)" if not is_bound(accountant) else accountant


def _first(ledger: Ledger, count: int) -> Ledger:
    """A ledger's first rounds of training, and all releases before them."""
    rounds = {round_: times for round_, times in ledger.rounds.items() if round_.one_time_query is not None}
    for round_, times in ledger.rounds.items():
        if round_ in rounds:
            continue
        taken = min(times, count)
        if taken:
            rounds[round_] = taken
        count -= taken
    return Ledger(ledger.adjacency, rounds, record=ledger.record)


def trade_off(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε against δ, one line per accountant (left), and the trade-off curve by the first accountant (right)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="δ", ylabel="ε", xscale="log")
    deltas = np.geomspace(1e-12, 0.1, POINTS).tolist()
    _draw(left, deltas, {name: [epsilon(ledger, d, name) for d in deltas] for name in accountants})
    left.axvline(delta, color="grey", linewidth=0.8, linestyle=":")
    alpha = np.linspace(0, 1, 201)
    label = f"type II error, {'at least' if is_bound(accountants[0]) else 'about'} (by {accountants[0]})"
    right = figure.add_subplot(1, 2, 2, xlabel="type I error", ylabel=label)
    right.plot(alpha, type_two_errors(ledger, alpha.tolist(), accountants[0]))
    right.plot(alpha, 1 - alpha, color="grey", linewidth=0.8, linestyle=":", label="guessing")
    right.set_aspect("equal")
    right.grid(alpha=0.3)
    right.legend()
    return figure


def same_cost(runs: Mapping[str, tuple[Ledger, float, str]]) -> list[list[str]]:
    """Groups of run ids with equal releases, δ and accountant."""
    equal: dict[tuple, list[str]] = {}
    for run_id, (ledger, delta, accountant) in runs.items():
        costs = [(f"{release.z:.6g}", replace(release, z=1.0), count) for release, count in releases(ledger).items()]
        equal.setdefault((frozenset(costs), delta, accountant), []).append(run_id)
    return list(equal.values())


def epsilon_of_runs(runs: Mapping[str, tuple[Ledger, float, str]], settings: DataFrame, fixed: str = "") -> Figure:
    """ε against rounds; runs of equal cost share a line. At most twelve lines are drawn.

    Args:
        runs: ledger, δ and accountant by run id.
        fixed: caption with the fixed settings.
    """
    distinct = same_cost(runs)
    drawn = distinct[:_MAX_RUNS]
    figure = Figure(figsize=(9, 4.2 + 0.12 * len(drawn)), layout="constrained")
    deltas = {delta for _, delta, _ in runs.values()}
    axes = figure.add_subplot(
        xlabel=_rounds([runs[members[0]][0] for members in drawn]),
        ylabel=f"ε at δ = {up(deltas.pop(), 4)}" if len(deltas) == 1 else "ε, each at its δ",
    )
    for k, members in enumerate(drawn):
        ledger, delta, accountant = runs[members[0]]
        total = ledger.training_rounds
        marks = sorted({min(1, total), *(round(total * part / POINTS) for part in range(POINTS + 1))})
        values = [epsilon(_first(ledger, mark), delta, accountant) for mark in marks]
        label = common_label(settings.loc[members], settings.loc[[*runs]])
        axes.plot(marks, values, color=f"C{k % 10}", linestyle="-" if k < 10 else "--", label=label)
        axes.plot(marks[-1], values[-1], marker="o", markersize=4, color=f"C{k % 10}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(alpha=0.3)
    omitted = len(drawn) < len(distinct)
    caption(figure, fixed, f"{len(drawn)} of {len(distinct)} that differ in cost." if omitted else "")
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    return figure


def epsilon_by_accountant(costs: DataFrame, fixed: str = "") -> Figure:
    """ε by each accountant, as bars, of at most twelve configurations.

    Args:
        costs: a row per label; a column per accountant, NaN where it has no bound.
        fixed: caption with the fixed settings.
    """
    shown = costs.head(_MAX_RUNS)
    width = 0.85 / len(costs.columns)
    figure = Figure(figsize=(9, 1.4 + 0.17 * len(costs.columns) * len(shown)), layout="constrained")
    axes = figure.add_subplot(xlabel="ε", xscale="log")
    for k, name in enumerate(costs.columns):
        values = shown[name].where(np.isfinite(shown[name]) & (shown[name] > 0)).to_numpy()
        approximate = not is_bound(name)
        places = np.arange(len(shown)) + (k - (len(costs.columns) - 1) / 2) * width
        bars = axes.barh(places, values, width * 0.9, color=f"C{k}", alpha=0.8, hatch="///" if approximate else None,
                         edgecolor="white" if approximate else None, label=accountant_label(name))  # fmt: skip
        axes.bar_label(bars, ["" if np.isnan(value) else f" {value:.3g}" for value in values], fontsize="x-small")
    axes.set_yticks(range(len(shown)), [textwrap.fill(str(label), 48) for label in shown.index], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    caption(figure, fixed, f"{len(shown)} of {len(costs)} that differ in cost." if len(shown) < len(costs) else "")
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    return figure


def signal_and_noise(signals: GradientSignal) -> Figure:
    """The norm of the average gradient of each group, as estimated from releases, and the norm of its noise.

    The signal is drawn ± 2 standard deviations, where it is distinguishable from 0. At most eight groups are drawn.
    """
    shown = list(signals.history)[:_MAX_PANELS]
    figure = Figure(figsize=(6.5, 0.8 + 2.2 * len(shown)), layout="constrained")
    for k, name in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, k + 1, ylabel=name, yscale="log")
        found = signal_curve(signals.history[name])
        low, middle, high = (np.sqrt(np.maximum(found.signal + sign * 2 * found.sd, 0)) for sign in (-1, 0, 1))
        floor = 0.3 * min([np.sqrt(found.noise).min(), *high[high > 0]])  # a logarithmic axis has no 0
        axes.plot(found.rounds, np.sqrt(found.noise), color="C7", label="noise")
        detected = low > 0
        axes.plot(found.rounds, np.where(detected, middle, np.nan), "o-", color="C0", markersize=3, label="signal")
        axes.fill_between(found.rounds, np.maximum(low, floor), high, color="C0", alpha=0.2, label="± 2 sd")
        axes.set_ylim(bottom=floor)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small", ncols=3)
    figure.axes[0].set_title("Norm of a round's average gradient, in the mechanism's units", fontsize="medium")
    figure.axes[-1].set_xlabel("round")
    return figure


def values_over_rounds(estimates: MetricEstimates) -> Figure:
    """Releases and moving average of at most eight private metrics, ± 2 standard deviations of their noise."""
    shown = list(estimates.history)[:_MAX_PANELS]
    figure = Figure(figsize=(6, 0.6 + 2.4 * len(shown)), layout="constrained")
    for k, name in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, k + 1, ylabel=name)
        rounds, values, _ = zip(*estimates.history[name], strict=True)
        axes.plot(rounds, values, ".", color="C0", alpha=0.35, markersize=3)
        means, sds = zip(*(estimates.moving_average(name, m + 1) for m in range(len(rounds))), strict=True)
        axes.plot(rounds, means, color="C0", label="mean of the last fifth")
        low, high = ([m + sign * 2 * sd for m, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color="C0", alpha=0.2, label="± 2 sd of its noise")
        axes.grid(alpha=0.3)
        settled = slice(len(means) // 10, None)  # the first releases are too noisy to set the scale
        axes.set_ylim(min(low[settled]), max(high[settled]))
        axes.set_xlim(0, rounds[-1])
    figure.axes[0].legend(fontsize="small")
    figure.axes[-1].set_xlabel("round")
    return figure


def class_counts(counts: Sequence[float], event: ParallelQueryEvent | None, name: str) -> Figure:
    """Released counts as bars, ± one standard deviation of the noise (√2 b for Laplace noise).

    Args:
        event: their release; None: without noise.
    """
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="class", ylabel="records")
    scale = 0.0 if event is None else max(query.scale for query in event.queries)
    deviation = scale * (math.sqrt(2) if event is not None and event.noise == "laplace" else 1.0)
    axes.bar(range(len(counts)), counts, yerr=deviation or None, capsize=3, alpha=0.8)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_title(f"{name}: noise of standard deviation {deviation:.3g}", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", alpha=0.3)
    return figure
