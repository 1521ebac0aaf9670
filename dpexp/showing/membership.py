"""What a membership attacker got beside what a claim allows, drawn."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpexp.accounting.ledger import Ledger
from dpexp.accounting.membership import Membership
from dpexp.accounting.tradeoff import type_two_errors
from dpexp.showing.rounding import up



def membership_figure(found: Membership, ledger: Ledger | None, accountant: str = "pld") -> Figure:
    """The attacker's true positive rate against its false positive rate, and above which curve none comes: left as it
    is, right on logarithmic scales, which show who is found for sure. Chance may bring the attacker into the grey band.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _rates(axes, found, ledger, accountant)
    left.set_ylim(-0.03, 1.03)
    right.set(xscale="log", yscale="log", xlim=(_LEAST, 1), ylim=(_LEAST, 1.1))
    left.legend(fontsize="small", loc="lower right")
    low, high = found.interval
    allowed = "" if ledger is None else f", {up(100 * found.share_allowed, 4)}% allowed"
    figure.suptitle(
        f"{found.coins} coins of mislabelled records; {found.right / found.coins:.1%} guessed right "
        f"({low:.1%} to {high:.1%}{allowed})" + (": the claim is refuted" if found.exceeded else ""),
        fontsize="small",
    )  # fmt: skip
    return figure


def _rates(axes: Axes, found: Membership, ledger: Ledger | None, accountant: str) -> None:
    alpha = np.concatenate([np.geomspace(_LEAST, 0.02, 40), np.linspace(0.02, 1, 150)])
    if ledger is not None:
        most = 1 - type_two_errors(ledger, alpha.tolist(), accountant)
        counts = found.coins / 2
        off = 2.6 * np.sqrt(np.maximum(most * (1 - most), 1 / counts) / counts)
        axes.fill_between(alpha, most, most + off, color="lightgrey", label="chance")
        axes.plot(alpha, most, color="C0", label=f"claimed: no attacker above (by {accountant})")
    axes.plot(found.errors[:, 0], 1 - found.errors[:, 1], ".", color="C3", markersize=4,
              label="the attacker, by threshold")  # fmt: skip
    axes.plot(alpha, alpha, color="grey", linestyle=":", linewidth=0.8, label="guessing")
    axes.set(xlabel="FPR: taken for included, and was not", ylabel="TPR: was included, and found")
    axes.grid(alpha=0.3)
