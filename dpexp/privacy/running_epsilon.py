"""ε during training: computed from the ledger at some rounds, and bounded in between by ε of the next such round."""

import math
from dataclasses import replace

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import check_covered, check_delta
from dpexp.accounting.ledger import Ledger, concatenate
from dpexp.privacy.plan.plan import PrivacyPlan

_READINGS = 20  # in addition to those after 1, 2, 4, 8, … rounds


class RunningEpsilon:
    """ε of a training run at the given δ.

    Attributes:
        delta: the given δ.
        epsilon: at the last reading.
        at_most: at the next reading.
        read_at: completed rounds at the last reading.

    Raises:
        ConfigError: δ is out of range, or the accountant does not cover the plan's sampling.
    """

    def __init__(self, plan: PrivacyPlan, delta: float, accountant: str) -> None:
        check_delta(delta)
        check_covered(type(plan.sampling), plan.adjacency, accountant)
        self.epsilon = self.at_most = 0.0
        self.read_at = self._since = 0
        self._plan, self.delta, self._accountant = plan, delta, accountant
        self._every = math.ceil(max(1, plan.rounds) / _READINGS)
        self._before = Ledger(plan.adjacency, {})

    @property
    def shown(self) -> float:
        """`at_most`, rounded up to the three digits or three decimals that progress bars show."""
        if math.isinf(self.at_most):
            return self.at_most
        step = 10.0 ** max(-3, math.floor(math.log10(max(self.at_most, 1e-3))) - 2)
        return math.ceil(self.at_most / step) * step

    def begin(self, ledger: Ledger, completed: int) -> None:
        """Begins or resumes a fit after `completed` rounds; the ledger may have further rounds of a lost state."""
        self._before, self._since = ledger, completed
        self._look_ahead(completed)

    def due(self, completed: int) -> bool:
        return completed.bit_count() == 1 or not completed % self._every or completed >= self._plan.rounds

    def read(self, ledger: Ledger, completed: int) -> None:
        self.read_at = completed
        self.epsilon = epsilon(ledger, self.delta, self._accountant)
        self._look_ahead(completed)

    def _look_ahead(self, completed: int) -> None:
        """Computes `at_most`: the cost of the plan's rounds does not depend on what is learnt during training."""
        next_reading = min(1 << completed.bit_length(), (completed // self._every + 1) * self._every, self._plan.rounds)
        self.at_most = max(self.epsilon, self.after(next_reading))

    def after(self, rounds: int) -> float:
        """ε once so many of the plan's rounds are done, from the rounds that the ledger had at the beginning."""
        ahead = concatenate([self._before, replace(self._plan, rounds=rounds).ledger(self._since)])
        return epsilon(ahead, self.delta, self._accountant)
