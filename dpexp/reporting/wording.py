"""How the terminal, model cards and reports word plans and results."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.ledger.events import neighbours
from dpexp.accounting.risk import gaussian, in_words
from dpexp.accounting.rounding import up
from dpexp.privacy.plan.plan import PrivacyPlan

RECALL = "test_recall_"  # of class 0, 1, …
BASELINES = {"test_accuracy": "test_majority_accuracy", "test_perplexity": "test_unigram_perplexity"}


def before_training(plan: PrivacyPlan, delta: float) -> Iterator[str]:
    """Each release before training in words, with its own ε."""
    for round_ in plan.before_training:
        own = epsilon(Ledger(plan.adjacency, {round_: 1}), delta)
        yield f"Before the first round: {round_.queries[0]}, ε = {up(own, 3)} by itself"


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
