"""Figures of runs: ε over rounds, trade-off curves, values released with noise, an audit's errors."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import Audit
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.risk import type_two_errors
from dpexp.accounting.rounding import down, up
from dpexp.privacy.private_metrics import MetricEstimates

POINTS = 25
_MAX_PANELS = 8


def epsilon_over_rounds(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε against rounds, one line per accountant."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    # A ledger counts equal rounds, and does not have their order.
    label = "round, equal rounds together" if len(ledger.training) > 1 else "round"
    axes = figure.add_subplot(xlabel=label, ylabel=f"ε at δ = {up(delta, 4)}", title="ε over rounds")
    total = ledger.training_rounds
    marks = sorted({max(1, round(total * k / POINTS)) for k in range(1, POINTS + 1)}) if total else []
    curves = {name: [epsilon(_first(ledger, mark), delta, name) for mark in marks] for name in accountants}
    _draw(axes, marks, curves)
    if marks and len(curves) == 1:
        (values,) = curves.values()
        axes.annotate(up(values[-1], 4), (marks[-1], values[-1]), xytext=(-4, 6),
                      textcoords="offset points", ha="right")  # fmt: skip
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return figure


def _draw(axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """One line per accountant, on a logarithmic scale if they differ much."""
    for name, values in curves.items():
        axes.plot(x, values, label=name)
    ends = [values[-1] for values in curves.values() if len(values)]
    axes.margins(y=0.1)
    if ends and max(ends) > 5 * min(ends) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(title="accountant", fontsize="small")


def _first(ledger: Ledger, count: int) -> Ledger:
    """A ledger's first rounds of training, and all releases before them."""
    rounds = Counter(ledger.rounds)
    for round_, times in ledger.training.items():
        rounds[round_] = min(times, count)
        count -= rounds[round_]
    return Ledger(ledger.adjacency, +rounds, record=ledger.record)  # without those that are not reached


def trade_off(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε against δ, one line per accountant (left), and the trade-off curve by the first accountant (right)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="δ", ylabel="ε", xscale="log", title="ε by δ")
    deltas = np.geomspace(1e-12, 0.1, POINTS).tolist()
    _draw(left, deltas, {name: [epsilon(ledger, d, name) for d in deltas] for name in accountants})
    left.axvline(delta, color="grey", linewidth=0.8, linestyle=":")
    alpha = np.linspace(0, 1, 201)
    label = f"type II error, at least (by {accountants[0]})"
    right = figure.add_subplot(1, 2, 2, xlabel="type I error", ylabel=label, title="Errors of a membership test")
    right.plot(alpha, type_two_errors(ledger, alpha.tolist(), accountants[0]))
    right.plot(alpha, 1 - alpha, color="grey", linewidth=0.8, linestyle=":", label="guessing")
    right.set_aspect("equal")
    right.grid(alpha=0.3)
    right.legend()
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
    figure.axes[0].set_title("Private metrics, as released with noise", fontsize="medium")
    figure.axes[-1].set_xlabel("round")
    return figure


def class_counts(counts: Sequence[float], deviation: float, name: str) -> Figure:
    """Released counts as bars, ± one standard deviation of the noise; 0: without noise."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="class", ylabel="records")
    axes.bar(range(len(counts)), counts, yerr=deviation or None, capsize=3, alpha=0.8)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_title(f"{name}: noise of standard deviation {deviation:.3g}", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", alpha=0.3)
    return figure


def audit_figure(audit: Audit, ledger: Ledger, claim: str, accountant: str = "pld") -> Figure:
    """The claimed trade-off curve of the attacked rounds, and the attacker's errors.

    If the claim is true, the points lie above the curve or, by sampling error, in the grey band. The job's own `claim`
    is only stated above the figure: it differs, since the attacked rounds are of all records, without sampling.
    """
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    alpha = np.concatenate([np.geomspace(5e-4, 0.02, 60), np.linspace(0.02, 1, 200)])
    curve = type_two_errors(ledger, alpha.tolist(), accountant)
    counts = audit.canaries / 2
    off = 2.6 * np.sqrt(np.maximum(curve * (1 - curve), 1 / counts) / counts)
    axes.fill_between(alpha, curve - off, curve, color="lightgrey", label="sampling error")
    axes.plot(alpha, curve, color="C0", label=f"claimed: no attacker below (by {accountant})")
    axes.plot(*audit.errors.T, ".", color="C3", markersize=4, label="the attacker, by threshold")
    axes.plot(alpha, 1 - alpha, color="grey", linestyle=":", linewidth=0.8, label="guessing")
    axes.set(xlabel="type I error: guessed included, was not", ylabel="type II error: was included, guessed not",
             xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))  # fmt: skip
    axes.legend(fontsize="small", loc="upper right")
    axes.grid(alpha=0.3)
    axes.set_title(f"Attacked: its noise in {ledger.training_rounds} rounds of all records", fontsize="medium")
    verdict = "refuted" if audit.exceeded else "not refuted"
    figure.suptitle(
        f"Audit of the job's claim of {claim}: {verdict}\n"
        f"{audit.canaries} canaries, {audit.right / audit.canaries:.1%} guessed right; "
        f"μ claimed {up(audit.mu_claimed, 3)}, at least {down(audit.mu_bound, 3)}",
        fontsize="medium",
    )
    return figure
