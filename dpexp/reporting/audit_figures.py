"""Figures of audits: the attacker's errors and the claimed trade-off curve."""

import numpy as np
from matplotlib.figure import Figure

from dpexp.accounting.auditing import Audit
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rounding import down, up
from dpexp.accounting.tradeoff import type_two_errors


def audit_figure(audit: Audit, ledger: Ledger, claim: str, accountant: str = "pld") -> Figure:
    """The claimed trade-off curve of the attacked rounds, and the attacker's errors. The job's `claim` stands above: it
    is another, since all records are in the attacked rounds.

    If the claim is true, the points lie above the curve or, by sampling error, in the grey band.
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
