"""Which value of one knob meets a target?"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpexp.accounting.ledger import Ledger
from dpexp.errors import ConfigError

if TYPE_CHECKING:
    from dpexp.accounting.risk import PrivacyTarget


@dataclass(frozen=True)
class Calibratable:
    """A number of the plan that can be solved for.

    Attributes:
        rising: ε rises with it.
        whole: it is a whole number.
    """

    epsilon_rises: bool
    lowest: float
    highest: float
    is_integer: bool = False


# `sampling_rate` holds each σ_g of the averages fixed, so that σ̃_g = q n σ_g and z rise with q (paper, section 4);
# `sampling_rate_at_fixed_noise` holds z. `clip_norm` scales every S_g at fixed σ̃_g.
CALIBRATABLE = {
    "noise_multiplier": Calibratable(False, 2.0**-6, 2.0**20),
    "sampling_rate": Calibratable(False, 2.0**-40, 1.0),
    "sampling_rate_at_fixed_noise": Calibratable(True, 2.0**-40, 1.0),
    "steps": Calibratable(True, 1, 2**40, is_integer=True),
    "clip_norm": Calibratable(True, 2.0**-20, 2.0**20),
}


@dataclass(frozen=True)
class Calibration:
    """A knob that was solved for.

    Attributes:
        value: of the knob; target: the name of what was to be spent; cost: what it costs in that; spent: the same as
            figures for people.
        trace: every value that was tried with what it costs, in order.
    """

    knob: str
    value: float
    target: str
    cost: float
    spent: tuple[tuple[str, float], ...]
    trace: tuple[tuple[float, float], ...]


def solve(
    knob: str,
    ledger_at: Callable[[float], Ledger],
    target: "PrivacyTarget",
    accountant: str = "pld",
    *,
    start: float,
    lowest: float | None = None,
    precision: float = 1e-3,
) -> Calibration:
    """The value of the knob that spends the target: the cost is never above it, and within `precision` below.

    For `noise` and `q` that is the smallest such value, otherwise the largest. A whole number is the last that does
    not exceed the target, however far below it that is.

    At fixed σ_g, ε (and any other cost) does not fall with q everywhere: below some q so few records are ever sampled
    that ε falls with q again, for want of training. `q` therefore comes down from 1, in steps of at most a quarter, to
    the first q that costs more than the target, and solves between it and the one before.

    Args:
        ledger_at: the ledger that training with a value of the knob would write.
        start: near which to begin.
        lowest: the smallest value allowed, if larger than the knob's own.

    Raises:
        ConfigError: the target makes no sense, or no value reaches it; says the best cost reachable.
    """
    from dpexp.accounting.risk import Epsilon  # slow to import

    target.check(accountant)
    facts = CALIBRATABLE[knob]
    low, high = math.log(max(facts.lowest, lowest or 0)), math.log(facts.highest)
    cheap, dear = (low, high) if facts.epsilon_rises else (high, low)
    search = _Search(
        lambda value: target.cost(ledger_at(value), accountant), target.limit, precision, facts.is_integer
    )  # fmt: skip
    if knob == "sampling_rate":
        found = search.between_neighbours(cheap, dear, math.log(0.75))
    else:
        near, step = min(max(math.log(start), low), high), math.log(4)
        if accountant == "pld" and isinstance(target, Epsilon):
            rough = _Search(lambda value: target.estimate(ledger_at(value)), target.limit, 0.01, facts.is_integer)
            found = rough.around(near, cheap, dear, step)
            near, step = (math.log(found[0]), math.log(1.02)) if found else (near, step)
        found = search.around(near, cheap, dear, step)
    if found is None:
        value, cost = min(search.trace, key=lambda probe: probe[1])
        best = ", ".join(f"{name}={figure:.4g}" for name, figure in target.figures(cost).items())
        raise ConfigError(
            f"{target} cannot be reached by calibrate={knob}: the best is {best}, at {knob}={value:.4g}; ask for more, "
            "or change another knob."
        )
    value, cost = found
    return Calibration(knob, value, target.name, cost, tuple(target.figures(cost).items()), tuple(search.trace))


class _Enough(Exception):
    """A probe is close enough to the target."""


class _Search:
    def __init__(self, cost_at: Callable[[float], float], target: float, precision: float, whole: bool) -> None:
        self._cost_at = cost_at
        self._target, self._precision, self._whole = target, precision, whole
        self._costs: dict[float, float] = {}
        self.trace: list[tuple[float, float]] = []

    def around(self, start: float, cheap: float, dear: float, step: float) -> tuple[float, float] | None:
        """Steps from `start` towards one end or the other until the target lies between two probes."""
        inner, outer = (start, dear) if self._affordable(start) else (start, cheap)
        ahead = math.copysign(step, outer - inner)
        towards_dear = outer == dear
        while True:
            if inner == outer:
                return self._best() if towards_dear else None
            following = inner + ahead
            following = min(following, outer) if ahead > 0 else max(following, outer)
            if self._affordable(following) != towards_dear:
                break
            inner, ahead = following, 2 * ahead
        return self._root(inner, following)

    def between_neighbours(self, cheap: float, dear: float, step: float) -> tuple[float, float] | None:
        """Steps evenly from the cheap end on."""
        if not self._affordable(cheap):
            return None
        inner = cheap
        while inner != dear:
            following = max(inner + step, dear)
            if not self._affordable(following):
                return self._root(inner, following)
            inner = following
        return self._value(dear), self._cost(dear)

    def _root(self, one: float, other: float) -> tuple[float, float]:
        if self._whole:
            while abs(self._value(one) - self._value(other)) > 1:
                middle = math.log((self._value(one) + self._value(other)) // 2)
                if self._affordable(middle) == self._affordable(one):
                    one = middle
                else:
                    other = middle
            return self._best()
        aim = self._target * (1 - self._precision / 2)

        def excess(t: float) -> float:
            cost = self._cost(t)
            if self._target * (1 - self._precision) <= cost <= self._target:
                raise _Enough
            return math.log(min(max(cost / aim, 1e-6), 1e6))

        with suppress(_Enough):
            from scipy.optimize import brentq  # slow to import

            brentq(excess, one, other, xtol=1e-13)
        return self._best()

    def _best(self) -> tuple[float, float]:
        """The costliest probe that is affordable; of equals, the last."""
        value, cost = max((probe for probe in reversed(self.trace) if probe[1] <= self._target), key=lambda p: p[1])
        return value, cost

    def _affordable(self, t: float) -> bool:
        return self._cost(t) <= self._target

    def _value(self, t: float) -> float:
        return round(math.exp(t)) if self._whole else math.exp(t)

    def _cost(self, t: float) -> float:
        value = self._value(t)
        if value not in self._costs:
            self._costs[value] = self._cost_at(value)
            self.trace.append((value, self._costs[value]))
        return self._costs[value]
