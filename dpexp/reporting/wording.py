"""How the terminal, model cards and reports word plans and results."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round
from dpexp.accounting.ledger.events import neighbours
from dpexp.accounting.risk import gaussian, in_words
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling import FullBatch, event_of
from dpexp.privacy.plan.plan import PrivacyPlan

RECALL = "test_recall_"  # of class 0, 1, …
BASELINES = {"test_accuracy": "test_majority_accuracy", "test_perplexity": "test_unigram_perplexity"}


def before_training(event: OneTimeQueryEvent, plan: PrivacyPlan, delta: float) -> str:
    """A release before training in words, with its own ε."""
    noise = "σ" if event.noise == "gaussian" else "Laplace noise b"
    own = Ledger(plan.adjacency, {Round(event_of(FullBatch(), plan.n), (event,)): 1})
    cost = f"ε = {up(epsilon(own, delta), 3)} by itself"
    return f"Before the first round: {event.query}: S = {event.S:.4g}, {noise} = {event.scale:.4g}, {cost}"


def guarantee_in_words(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """ε and δ of a result, what an attacker may find, and what one record may change."""
    spent = ", ".join(f"{up(value, 4)} by {name}" for name, value in result["epsilon"].items())
    unit, delta = result.get("unit", "record"), up(result["delta"], 4)
    first = next(iter(result["epsilon"].values()))
    ratio = up(math.exp(first) if first < 700 else math.inf, 3)
    return (
        f"ε = {spent}, δ = {delta}, {neighbours(result['adjacency'], unit)}{gaussian(result['risk'])}",
        f"{in_words(result['risk'], unit)}.",
        f"One {unit} changes the probability of any result at most {ratio}-fold, plus {delta}.",
    )


def range_of(numbers: Iterable[float], digits: int) -> str:
    """The smallest and the largest number, or the one that they are to so many digits."""
    ordered = sorted(numbers)
    low, high = (f"{number:.{digits}g}" for number in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} – {high}"


def measured(name: str, value: float) -> str:
    """A metric's value; accuracies in percent."""
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"
