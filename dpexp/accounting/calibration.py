"""Solves for one parameter of a plan such that the plan meets a privacy target."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rounding import up
from dpexp.errors import ConfigError

if TYPE_CHECKING:
    from dpexp.accounting.risk import PrivacyTarget


@dataclass(frozen=True)
class Calibratable:
    """A parameter of a plan that can be solved for: whether ε rises with it, the range of the search, and whether it
    must be an integer."""

    epsilon_rises: bool
    lowest: float
    highest: float
    is_integer: bool = False


# `sampling_rate` keeps each σ_g of the averages fixed, so that σ̃_g = q n σ_g and z rise with q (paper, section 4);
# `sampling_rate_at_fixed_noise` keeps z fixed. `clip_norm` scales every S_g at fixed σ̃_g.
CALIBRATABLE = {
    "noise_multiplier": Calibratable(False, 2.0**-6, 2.0**20),
    "sampling_rate": Calibratable(False, 2.0**-40, 1.0),
    "sampling_rate_at_fixed_noise": Calibratable(True, 2.0**-40, 1.0),
    "steps": Calibratable(True, 1, 2**40, is_integer=True),
    "clip_norm": Calibratable(True, 2.0**-20, 2.0**20),
}


@dataclass(frozen=True)
class Calibration:
    """A parameter that was solved for.

    Attributes:
        knob, value: the name of the parameter, one of CALIBRATABLE, and its value.
        target, cost: the name of the target, and the plan's cost in terms of it; figures: as (name, figure) to show.
        trace: (value, cost) of every value tried, in order.
    """

    knob: str
    value: float
    target: str
    cost: float
    figures: tuple[tuple[str, float], ...]
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
    """The value of a parameter whose cost is at most the target, and no more than `precision` (relative) below it.

    It is the smallest such value of `noise_multiplier` and `sampling_rate`, and the largest of the others. At fixed
    σ_g, ε does not rise monotonically as q falls: if hardly any record is ever sampled, it falls again. The search for
    `sampling_rate` therefore goes down from q = 1 to the first q that costs more than the target.

    Args:
        knob: the name of the parameter, one of CALIBRATABLE.
        ledger_at: the ledger of the plan with a value of the parameter.
        start: a value to start near.
        lowest: the smallest value allowed, if larger than that of CALIBRATABLE.

    Raises:
        ConfigError: the target is invalid, or no value reaches it; says the best cost.
    """
    target.check(accountant)
    limits = CALIBRATABLE[knob]
    low, high = math.log(max(limits.lowest, lowest or 0)), math.log(limits.highest)
    cheap, costly = (low, high) if limits.epsilon_rises else (high, low)
    search = _Search(lambda v: target.cost(ledger_at(v), accountant), target.limit, precision, limits.is_integer)
    if knob == "sampling_rate":
        found = search.walk(cheap, costly, -math.log(0.75), 1) if search.affords(cheap) else None
    else:
        near, step = min(max(math.log(start), low), high), math.log(4)
        if accountant == "pld" and hasattr(target, "estimate"):
            rough = _Search(lambda v: target.estimate(ledger_at(v)), target.limit, 0.01, limits.is_integer)
            found = rough.around(near, cheap, costly, step)
            near, step = (math.log(found[0]), math.log(1.02)) if found else (near, step)
        found = search.around(near, cheap, costly, step)
    if found is None:
        value, cost = min(search.trace, key=lambda probe: probe[1])
        best = ", ".join(f"{name}={up(figure, 4)}" for name, figure in target.figures(cost).items())
        raise ConfigError(
            f"{target} cannot be reached by calibrate={knob}: the best is {best}, at {knob}={value:.4g}; choose a "
            "weaker target, or change another parameter."
        )
    value, cost = found
    return Calibration(knob, value, target.name, cost, tuple(target.figures(cost).items()), tuple(search.trace))


class _CloseEnough(Exception):
    """A probe is within the precision of the target."""


class _Search:
    """A search over the logarithm of a parameter, between its `cheap` and its `costly` end."""

    def __init__(self, cost_at: Callable[[float], float], target: float, precision: float, is_integer: bool) -> None:
        self._cost_at = cost_at
        self._target, self._precision, self._is_integer = target, precision, is_integer
        self._costs: dict[float, float] = {}
        self.trace: list[tuple[float, float]] = []

    def around(self, start: float, cheap: float, costly: float, step: float) -> tuple[float, float] | None:
        """Doubles the steps from `start` towards the end on the other side of the target."""
        return self.walk(start, costly if self.affords(start) else cheap, step, 2)

    def walk(self, inner: float, outer: float, step: float, growth: float) -> tuple[float, float] | None:
        """Takes steps to `outer` until the target lies between two probes."""
        affordable = self.affords(inner)
        step = math.copysign(step, outer - inner)
        while inner != outer:
            following = min(inner + step, outer) if step > 0 else max(inner + step, outer)
            if self.affords(following) != affordable:
                return self._root(inner, following)
            inner, step = following, growth * step
        return (self._value(outer), self._cost(outer)) if affordable else None

    def _root(self, one: float, other: float) -> tuple[float, float]:
        if self._is_integer:
            while abs(self._value(one) - self._value(other)) > 1:
                middle = math.log((self._value(one) + self._value(other)) // 2)
                if self.affords(middle) == self.affords(one):
                    one = middle
                else:
                    other = middle
            return self._best()
        aim = self._target * (1 - self._precision / 2)

        def excess(t: float) -> float:
            cost = self._cost(t)
            if self._target * (1 - self._precision) <= cost <= self._target:
                raise _CloseEnough
            return math.log(min(max(cost / aim, 1e-6), 1e6))

        with suppress(_CloseEnough):
            from scipy.optimize import brentq  # slow to import

            brentq(excess, one, other, xtol=1e-13)
        return self._best()

    def _best(self) -> tuple[float, float]:
        """The costliest affordable probe; of equals, the last."""
        value, cost = max((probe for probe in reversed(self.trace) if probe[1] <= self._target), key=lambda p: p[1])
        return value, cost

    def affords(self, t: float) -> bool:
        return self._cost(t) <= self._target

    def _value(self, t: float) -> float:
        return round(math.exp(t)) if self._is_integer else math.exp(t)

    def _cost(self, t: float) -> float:
        value = self._value(t)
        if value not in self._costs:
            self._costs[value] = self._cost_at(value)
            self.trace.append((value, self._costs[value]))
        return self._costs[value]
