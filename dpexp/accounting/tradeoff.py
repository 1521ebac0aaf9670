"""The whole trade-off: δ for every ε, and the error of whoever guesses whether a record was there."""

from collections.abc import Sequence

import numpy as np

from dpexp.accounting.accountants import delta
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.renyi import Array

POINTS = 200


def type_two_errors(ledger: Ledger, type_one: Sequence[float], accountant: str = "pld") -> Array:
    """A lower bound on the type II error of any test whose type I error is as given: the test tells from all releases
    whether the data were those of one neighbour or the other.

    f(α) = sup over ε of max(0, 1 - δ(ε) - e^ε α, e^(-ε)(1 - δ(ε) - α)) (Dong, Roth & Su 2022, proposition 2.12).
    """
    alpha = np.asarray(type_one, dtype=float)
    best = np.zeros_like(alpha)
    for e, d in losses(ledger, accountant):
        best = np.maximum(best, np.maximum(1 - d - np.exp(e) * alpha, np.exp(-e) * (1 - d - alpha)))
    return best


def losses(ledger: Ledger, accountant: str = "pld") -> list[tuple[float, float]]:
    """(ε, δ(ε)) from ε = 0 to where δ is next to nothing."""
    if not ledger.rounds:
        return [(0.0, 0.0)]
    largest = 1.0
    while delta(ledger, largest, accountant) > 1e-9 and largest < 500:
        largest *= 1.5
    grid = np.concatenate([[0.0], np.geomspace(largest / 1e4, largest, POINTS)]).tolist()
    return [(e, delta(ledger, e, accountant)) for e in grid]
