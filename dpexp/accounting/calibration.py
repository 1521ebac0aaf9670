"""Solves for one parameter of a plan such that the plan meets a privacy target."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling.policy import MOST_ROUNDS
from dpexp.errors import ConfigError

if TYPE_CHECKING:
    from dpexp.accounting.risk import PrivacyTarget


@dataclass(frozen=True)
class Calibratable:
    """A parameter of a plan that can be solved for: whether ε rises with it, the range of the search, whether it must
    be an integer, and what of the noise is held, in words; empty: nothing."""

    epsilon_rises: bool
    lowest: float
    highest: float
    is_integer: bool = False
    held: str = ""


# With each σ_g of the averages held, σ̃_g = q n σ_g and z rise with q (arXiv 1812.06210, section 4).
# `clip_norm` scales every S_g.
CALIBRATABLE = {
    "noise_multiplier": Calibratable(False, 2.0**-20, 2.0**20),
    "sampling_rate": Calibratable(False, 2.0**-40, 1.0, held="each σ_g of the averages"),
    "sampling_rate_at_fixed_noise": Calibratable(True, 2.0**-40, 1.0, held="z"),
    "steps": Calibratable(True, 1, MOST_ROUNDS, is_integer=True, held="z and q"),
    "clip_norm": Calibratable(True, 2.0**-20, 2.0**20, held="each σ̃_g"),
}


@dataclass(frozen=True)
class Calibration:
    """A parameter that was solved for.

    Attributes:
        knob, value: the name of the parameter, one of CALIBRATABLE, and its value.
        target, cost: the name of the target, and the plan's cost in terms of it; figures: as (name, figure) to show.
        missed: in words, that the cost is further below the target than the precision; empty: it is not.
        trace: (value, cost) of every value tried, in order.
    """

    knob: str
    value: float
    target: str
    cost: float
    figures: tuple[tuple[str, float], ...]
    missed: str
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
    """The value of a parameter whose cost is at most the target, and no more than `precision` (relative) below it,
    but at the end of the range, and for jumps of the cost, as at each number of rounds; with these, it is one near
    `start`.

    It is the smallest such value of `noise_multiplier` and `sampling_rate`, and the largest of the others. At fixed
    σ_g, ε does not rise monotonically as q falls: if hardly any record is ever sampled, it falls again. The search for
    `sampling_rate` therefore goes down from q = 1 to the first q that costs more than the target.

    Args:
        knob: the name of the parameter, one of CALIBRATABLE.
        ledger_at: the ledger of the plan with a value of the parameter.
        start: a value to start near.
        lowest: the smallest value allowed, if larger than that of CALIBRATABLE.

    Raises:
        ConfigError: no value reaches the target; says the best cost.
    """
    limits = CALIBRATABLE[knob]
    low, high = math.log(max(limits.lowest, lowest or 0)), math.log(limits.highest)
    cheap, costly = (low, high) if limits.epsilon_rises else (high, low)
    search = _Search(lambda v: target.cost(ledger_at(v), accountant), target.limit, precision, limits.is_integer)
    if knob == "sampling_rate":
        found = search.best(cheap, cheap, costly, -math.log(0.75), 1)
    else:
        near, step = min(max(math.log(start), low), high), math.log(4)
        if accountant == "pld" and hasattr(target, "estimate"):
            rough = _Search(lambda v: target.estimate(ledger_at(v)), target.limit, 0.01, limits.is_integer)
            if found := rough.best(near, cheap, costly, step):
                near, step = math.log(found[0]), math.log(1.02)
        found = search.best(near, cheap, costly, step)
    if found is None:
        value, cost = min(search.costs.items(), key=lambda probe: probe[1])
        best = ", ".join(f"{name}={up(figure, 4)}" for name, figure in target.figures(cost).items())
        raise ConfigError(
            f"{target} cannot be reached by calibrate={knob}: the best is {best}, at {knob}={value:.4g}; choose a "
            "weaker target, or change another parameter."
        )
    value, cost = found
    if limits.is_integer and value < limits.highest:
        missed = f" ({value + 1:.0f} would cost more than {target})"
    else:
        missed = f" (no value closer below {target} was found between {math.exp(low):.4g} and {math.exp(high):.4g})"
    return Calibration(
        knob, value, target.name, cost, tuple(target.figures(cost).items()),
        missed if cost < target.limit * (1 - precision) else "", tuple(search.costs.items()),
    )  # fmt: skip


class _Search:
    """A search over the logarithm t of a parameter. `costs` are those of the values tried, in order."""

    def __init__(self, cost_at: Callable[[float], float], limit: float, precision: float, is_integer: bool) -> None:
        self._cost_at, self._limit, self._is_integer = cost_at, limit, is_integer
        self._precision = 0.0 if is_integer else precision
        self.costs: dict[float, float] = {}

    def best(
        self, start: float, cheap: float, costly: float, step: float, growth: float = 2
    ) -> tuple[float, float] | None:
        """The last value tried that costs at most the limit, and its cost: of all that do, the nearest to the limit.

        Steps from `start` towards the end on the other side of the limit bracket it, and Brent's method finds it.
        """
        from scipy.optimize import brentq  # slow to import

        began, inner, outer = self._excess(start), start, start
        end = costly if began <= 0 else cheap
        step = math.copysign(step, end - start)
        while outer != end and self._excess(outer) * began > 0:
            following = min(outer + step, end) if step > 0 else max(outer + step, end)
            inner, outer, step = outer, following, growth * step
        if self._excess(outer) * began < 0:
            brentq(self._excess, inner, outer, xtol=1e-13)
        return next((tried for tried in reversed(self.costs.items()) if tried[1] <= self._limit), None)

    def _excess(self, t: float) -> float:
        """How far a cost is above the limit; 0 if it is below it by no more than the precision."""
        value = round(math.exp(t)) if self._is_integer else math.exp(t)
        if value not in self.costs:
            self.costs[value] = self._cost_at(value)
        cost = self.costs[value]
        if self._limit * (1 - self._precision) <= cost <= self._limit:
            return 0.0
        return math.log(min(max(cost / (self._limit * (1 - self._precision / 2)), 1e-6), 1e6))
