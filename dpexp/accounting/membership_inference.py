"""Membership inference on final models: the likelihood ratio attack (Carlini et al. 2022, arXiv 2112.03570).

Each canary is in or out of a training by a fair coin. The attacker sees only the final model. It compares the model's
loss on each canary with those of shadow models, which it trained in the same way with coins of its own, so that some
had the canary and some had not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import PARTS, Mask, epsilon_bound, errors, guessed, inverse_of, smallest_level
from dpexp.accounting.composition import Array
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.risk import largest_advantage, largest_tpr

FPR = 0.01
_MIN = 1e-12  # the smallest loss and variance


def log_odds(losses: Array) -> Array:
    """log(p/(1-p)) with p = e^-loss, the classifier's probability of the label; 0 where a loss is NaN.

    Over trainings it is nearly normal (Carlini et al. 2022, section V).
    """
    losses = np.clip(np.nan_to_num(losses, nan=math.log(2), posinf=1e3), _MIN, 1e3)
    return -losses - np.log(-np.expm1(-losses))


def likelihood_ratios(found: Array, references: Array, coins: Mask) -> Array:
    """Log likelihood ratios [A, k] of log-odds with the canary in and out of the training; above 0 suggests in.

    Log-odds are modelled as normal, in and out. Each canary has its own two means; the two variances are shared by all
    canaries, since there are few shadow models.

    Args:
        found: [A, k], log-odds of k canaries by the target models.
        references: [R, k], log-odds by the shadow models.
        coins: [R, k], which canaries the shadow models had: each canary is in at least two of them, and out of two.
    """
    logs = []
    for had in (coins, ~coins):
        count = had.sum(0)
        mean = np.where(had, references, 0.0).sum(0) / count
        variance = float((np.where(had, references - mean, 0.0) ** 2).sum() / (count - 1).sum()) + _MIN
        spread = variance * (1 + 1 / count)  # includes the error of the mean
        logs.append(-((found - mean) ** 2) / (2 * spread) - np.log(spread) / 2)
    return logs[0] - logs[1]


class Claim(NamedTuple):
    """The claimed ε at one δ, infinite without a claim, and a lower bound on the true ε."""

    delta: float
    claimed: float
    found: float


@dataclass(frozen=True)
class Membership:
    """The attacker's success, and what the claim allows any attacker (everything, without a claim).

    Attributes:
        coins: m, the number of canaries over all target models.
        right: the number of right guesses if all coins are guessed.
        interval: a confidence interval of their fraction at `confidence`, which assumes independent guesses.
        advantage: TPR - FPR of these guesses.
        tpr: the TPR at an FPR of at most 1 %, of these canaries.
        bounds: lower bounds on ε, which hold at `confidence` together with p, even if canaries are not independent.
        p: the p-value of the claimed trade-off function; the claim is refuted below 1 - confidence.
        total_epsilon: ε of all trainings that contribute to these figures.
        errors: (type I, type II) of the attacker, for each threshold: [K, 2].
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
    total_epsilon: float
    errors: Array

    @property
    def share_allowed(self) -> float:
        """The fraction of the coins that the claim allows to be guessed right on average."""
        return (1 + self.advantage_allowed) / 2

    def summary(self) -> dict[str, float]:
        """The finite numbers by name, such as for MLflow."""
        found = {
            "canaries": self.coins, "right": self.right, "share_right": self.right / self.coins,
            "share_right_low": self.interval[0], "share_right_high": self.interval[1],
            "share_right_allowed": self.share_allowed, "advantage": self.advantage,
            "advantage_allowed": self.advantage_allowed, f"tpr_at_fpr_{FPR:g}": self.tpr,
            f"tpr_at_fpr_{FPR:g}_allowed": self.tpr_allowed, "p": self.p,
            "epsilon_together": self.total_epsilon, "refuted": float(bool(self.exceeded)),
        }  # fmt: skip
        for bound in self.bounds:
            found[f"epsilon_claimed/delta_{bound.delta:g}"] = bound.claimed
            found[f"epsilon_lower_bound/delta_{bound.delta:g}"] = bound.found
        return {name: value for name, value in found.items() if math.isfinite(value)}

    @property
    def exceeded(self) -> list[str]:
        """The refuted claims, as messages."""
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
    total_epsilon: float = math.inf,
) -> Membership:
    """Tests a training's privacy claim by an attacker's scores.

    The A trainings are together one mechanism with m = A k coins, each of which affects one of them, so that theorems
    on m coins and one mechanism apply.

    Args:
        scores: [A, k], of k canaries in A trainings; above 0 a canary is guessed as in.
        included: [A, k], fair coins, which affect scores only through the model of their own training.
        ledger: of the training with the most rounds, of their common plan; None if they were not private.
        deltas: the δ of the lower bounds on ε.
        accountant: of the claim.
        confidence: with which all bounds hold together.
        total_epsilon: see Membership.
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
        total_epsilon=total_epsilon,
        errors=errors(yes, no),
    )
