"""Figures, as matplotlib objects."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger

POINTS = 25


def epsilon_over_rounds(ledger: Ledger, delta: float, accountants: Sequence[str]) -> Figure:
    """ε spent against rounds done, one line an accountant. Rounds are taken in the order of their specs."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="round", ylabel=f"ε at δ = {delta:g}")
    total = len(ledger)
    marks = sorted({max(1, round(total * k / POINTS)) for k in range(1, POINTS + 1)}) if total else []
    for name in accountants:
        values = [epsilon(_first(ledger, mark), delta, name) for mark in marks]
        axes.plot([0, *marks], [0.0, *values], label=name)
        if values:
            axes.annotate(f"{values[-1]:.4g}", (marks[-1], values[-1]), xytext=(-4, 6),
                          textcoords="offset points", ha="right")  # fmt: skip
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="accountant")
    return figure


def _first(ledger: Ledger, count: int) -> Ledger:
    rounds = {}
    for round_, times in ledger.rounds.items():
        taken = min(times, count)
        if taken:
            rounds[round_] = taken
        count -= taken
    return Ledger(ledger.adjacency, rounds)
