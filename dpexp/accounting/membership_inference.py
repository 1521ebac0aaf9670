"""What whoever sees final models, and nothing else, finds out about who was among the data, beside what is claimed.

Canaries are each in or out of a training by a fair coin. Of the final model the attacker asks the loss of each canary,
and compares it with those of reference models, which it trained in the same way by coins of its own: the likelihood
ratio attack (Carlini et al. 2022, arXiv 2112.03570), with reference models that had the canary and that had not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import PARTS, Mask, epsilon_bound, errors, guessed, inverse_of, smallest_level
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rdp import Array
from dpexp.accounting.risk import largest_advantage, largest_tpr

FPR = 0.01
_LEAST = 1e-12  # of a loss, or of a variance


def log_odds(losses: Array) -> Array:
    """log(p/(1-p)) with p = e^-loss, the probability that a classifier gives the label: nearly normal from training to
    training (Carlini et al. 2022, section V). 0 where a loss is not a number."""
    losses = np.clip(np.nan_to_num(losses, nan=math.log(2), posinf=1e3), _LEAST, 1e3)
    return -losses - np.log(-np.expm1(-losses))


def likelihood_ratios(found: Array, references: Array, coins: Mask) -> Array:
    """Logarithms of how much likelier log-odds are with the canary than without; above 0, it was rather in.

    Args:
        found: [A, k] log-odds by the attacked models; references: [R, k] by the reference models.
        coins: [R, k], which canaries these had: each canary is in at least two of them, and out of two.

    Each canary has a normal law with, and one without; their means are its own, their two variances are shared by all
    canaries, since reference models are few.
    """
    logs = []
    for had in (coins, ~coins):
        count = had.sum(0)
        mean = np.where(had, references, 0.0).sum(0) / count
        variance = float((np.where(had, references - mean, 0.0) ** 2).sum() / (count - 1).sum()) + _LEAST
        spread = variance * (1 + 1 / count)  # the mean is known so far only
        logs.append(-((found - mean) ** 2) / (2 * spread) - np.log(spread) / 2)
    return logs[0] - logs[1]


class Claim(NamedTuple):
    """At one δ: the ε claimed, infinite where there is no claim, and a lower bound on the true one."""

    delta: float
    claimed: float
    found: float


@dataclass(frozen=True)
class Membership:
    """What the attacker got, and what the claim allows any attacker (everything, where there is no claim).

    Attributes:
        coins: m; right: how many are guessed right when all are; interval: of their share, at `confidence`, as if
            guesses did not depend on one another.
        advantage: TPR - FPR of these guesses; tpr: at an FPR of at most 1 %, by these canaries.
        bounds: hold at `confidence` together with p, whether or not canaries depend on one another.
        p: of the whole claimed trade-off curve: below 1 - confidence, it is refuted.
        spent: ε of all trainings that had a part in what is shown here.
        errors: (type I, type II) of the attacker, by threshold: [K, 2].
    """

    coins: int
    right: int
    interval: tuple[float, float]
    confidence: float
    advantage: float
    advantage_allowed: float
    tpr: float
    tpr_allowed: float
    bounds: tuple[Claim, ...]
    p: float
    spent: float
    errors: Array

    @property
    def share_allowed(self) -> float:
        """Of the coins, that may be guessed right on average."""
        return (1 + self.advantage_allowed) / 2

    def summary(self) -> dict[str, float]:
        """Its numbers, by name; without those that are infinite."""
        found = {
            "canaries": self.coins, "right": self.right, "share_right": self.right / self.coins,
            "share_right_low": self.interval[0], "share_right_high": self.interval[1],
            "share_right_allowed": self.share_allowed, "advantage": self.advantage,
            "advantage_allowed": self.advantage_allowed, f"tpr_at_fpr_{FPR:g}": self.tpr,
            f"tpr_at_fpr_{FPR:g}_allowed": self.tpr_allowed, "p": self.p,
            "epsilon_together": self.spent, "refuted": float(bool(self.exceeded)),
        }  # fmt: skip
        for bound in self.bounds:
            found[f"epsilon_claimed/delta_{bound.delta:g}"] = bound.claimed
            found[f"epsilon_lower_bound/delta_{bound.delta:g}"] = bound.found
        return {name: value for name, value in found.items() if math.isfinite(value)}

    @property
    def exceeded(self) -> list[str]:
        """In words, what was claimed and is refuted."""
        found = [
            f"at δ = {bound.delta:g} ε is at least {bound.found:.4g}, and {bound.claimed:.4g} was claimed"
            for bound in self.bounds
            if bound.found > bound.claimed
        ]
        if self.p < 1 - self.confidence:
            found.append(f"the attacker is right more often than the claimed trade-off allows (p = {self.p:.2g})")
        return found


def membership(
    scores: Array,
    included: Mask,
    ledger: Ledger | None,
    deltas: Sequence[float],
    accountant: str = "pld",
    confidence: float = 0.95,
    spent: float = math.inf,
) -> Membership:
    """Judges a training's claim by what an attacker scored.

    Args:
        scores: [A, k] of the canaries in A trainings, of which 0 divides those taken for in from those for out;
            included: [A, k], by fair coins, none of which had a part in a score but by way of its own training's model.
        ledger: of that training which released the most, of a plan that they had in common; None if they were not
            private.
        spent: see Membership.

    All A trainings are one release with m = A k coins, each of which is in one of them, so that theorems on m coins
    and one release hold of them.
    """
    scores, included = scores.ravel(), included.ravel()
    m, tests = len(scores), len(PARTS) * (len(deltas) + 1)
    level = (1 - confidence) / tests
    guesses = [guessed(scores, included, m // part) for part in PARTS if m // part >= 2]
    yes, no = scores[included], scores[~included]
    right = int((yes > 0).sum() + (no <= 0).sum())
    share = binomtest(right, m).proportion_ci(confidence)
    threshold = np.sort(no)[-1 - math.floor(FPR * len(no))]
    p = 1.0
    if ledger is not None:
        inverse = inverse_of(ledger, accountant)
        p = min(1.0, tests * min(smallest_level(m, r, c, inverse) for r, c in guesses))
    return Membership(
        coins=m,
        right=right,
        interval=(float(share.low), float(share.high)),
        confidence=confidence,
        advantage=float((yes > 0).mean() - (no > 0).mean()),
        advantage_allowed=1.0 if ledger is None else largest_advantage(ledger, accountant),
        tpr=float((yes > threshold).mean()),
        tpr_allowed=1.0 if ledger is None else largest_tpr(ledger, FPR, accountant),
        bounds=tuple(
            Claim(
                d,
                math.inf if ledger is None else epsilon(ledger, d, accountant),
                max(epsilon_bound(m, r, c, d, level) for r, c in guesses),
            )
            for d in deltas
        ),
        p=p,
        spent=spent,
        errors=errors(yes, no),
    )
