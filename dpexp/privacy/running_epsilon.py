"""ε while a training goes on: read from the ledger now and then, and in between bounded by what it will be at the next
reading, so that what is shown is never below what is spent."""

import math
from dataclasses import replace

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, joined
from dpexp.privacy.plan.plan import PrivacyPlan

_READINGS = 20  # besides those after 1, 2, 4, 8, … rounds


class RunningEpsilon:
    """
    Args:
        plan: that the training carries out.
        delta: at which ε is told.

    Attributes:
        epsilon: spent at the last reading.
        at_most: what is spent until the next one.
        read_at: rounds done at the last one.
    """

    def __init__(self, plan: PrivacyPlan, delta: float, accountant: str) -> None:
        self.epsilon = self.at_most = 0.0
        self.read_at = self._since = 0
        self._plan, self._delta, self._accountant = plan, delta, accountant
        self._every = math.ceil(plan.rounds / _READINGS)
        self._before = Ledger(plan.adjacency, {})

    @property
    def shown(self) -> float:
        """`at_most` for progress bars, which show three digits or three decimals of it: rounded up to both."""
        if math.isinf(self.at_most):
            return self.at_most
        step = 10.0 ** max(-3, math.floor(math.log10(max(self.at_most, 1e-3))) - 2)
        return math.ceil(self.at_most / step) * step

    def begin(self, ledger: Ledger, completed: int) -> None:
        """A fit begins, or goes on after so many rounds; the ledger may have more, which were undone."""
        self._before, self._since = replace(ledger, record=self._plan.privacy_unit.to_header()), completed
        self._look_ahead(completed)

    def due(self, completed: int) -> bool:
        return completed.bit_count() == 1 or not completed % self._every or completed >= self._plan.rounds

    def read(self, ledger: Ledger, completed: int) -> None:
        self.read_at = completed
        self.epsilon = epsilon(ledger, self._delta, self._accountant)  # of what was looked ahead at, as a rule
        self._look_ahead(completed)

    def _look_ahead(self, completed: int) -> None:
        """To the next reading: what the plan's rounds cost depends on nothing that is learnt on the way."""
        there = min(1 << completed.bit_length(), (completed // self._every + 1) * self._every, self._plan.rounds)
        ahead = joined([self._before, replace(self._plan, rounds=there).ledger(self._since)])
        self.at_most = max(self.epsilon, epsilon(ahead, self._delta, self._accountant))
