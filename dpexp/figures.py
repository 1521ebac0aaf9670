"""Figures, as matplotlib objects."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpexp.accounting.accountants import APPROXIMATIONS, epsilon
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
