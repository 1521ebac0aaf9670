"""The cumulant generating function of a sum of privacy losses, approximately: where to look, and how finely."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpexp.accounting.pairs import Pair
from dpexp.accounting.renyi import Array

_BEYOND = 25  # e^-25 of a tilted law is next to nothing


class Tilted(NamedTuple):
    """K(θ) = Σ log E[e^(θL)]; the mean K' and the standard deviation √K'' of ΣL under the tilted law; what one round of
    each kind [R] has in K, and all of its kind in K''."""

    log: float
    mean: float
    deviation: float
    logs: Array
    variances: Array


class Window(NamedTuple):
    """Losses that matter. What a law tilted by θ has below `low` is next to nothing, and what it has above `high` is that
    or comes, folded into the window, to lie below its mean. Chernoff's bound at `steep` says what the law itself has there.
    """

    theta: float
    low: float
    high: float
    steep: float

    @property
    def width(self) -> float:
        return self.high - self.low


class Cumulants:
    """Of losses [R, M] with the logarithms of their masses, sorted, which happened `counts` [R] times."""

    def __init__(self, losses: Array, log_mass: Array, counts: Array) -> None:
        self._losses, self._log_mass, self._counts = losses, log_mass, counts
        self._seen: dict[float, Tilted] = {}

    def truncated(self, log_tail: float) -> "Cumulants":
        """Without the largest losses of each round, the mass of which is well below e^log_tail."""
        with np.errstate(divide="ignore"):
            log_above = np.log(np.cumsum(np.exp(self._log_mass[:, ::-1]), axis=1)[:, ::-1])
        return Cumulants(self._losses, np.where(log_above < log_tail - 5, -np.inf, self._log_mass), self._counts)

    def at(self, theta: float) -> Tilted:
        if theta not in self._seen:
            exponent = self._log_mass + theta * self._losses
            top = exponent.max(axis=1, keepdims=True)
            weight = np.exp(exponent - top)
            total = weight.sum(axis=1)
            mean = (weight * self._losses).sum(axis=1) / total
            variances = self._counts * (weight * (self._losses - mean[:, None]) ** 2).sum(axis=1) / total
            logs = np.log(total) + top[:, 0]
            deviation = math.sqrt(max(float(variances.sum()), 1e-300))
            self._seen[theta] = Tilted(
                float(self._counts @ logs), float(self._counts @ mean), deviation, logs, variances
            )
        return self._seen[theta]

    def tilt_for_mean(self, loss: float) -> float:
        """The θ >= 0 whose tilted mean is `loss`."""
        return self._root(lambda theta: self.at(theta).mean - loss)

    def tilt_for_delta(self, log_delta: float) -> float:
        """The θ >= 0 whose tilted mean is near the ε of δ, unless tails are heavy."""
        return self._root(lambda theta: log_delta - self.log_delta(theta))

    def log_delta(self, theta: float) -> float:
        """Of δ at the tilted mean, with the tilted law as a Gaussian one: e^(K - θK') (B(θs) - B((1+θ)s)) with the tilted
        standard deviation s and B(x) = e^(x²/2) Φ(-x)."""
        at = self.at(theta)
        x, s = theta * at.deviation, at.deviation
        first = math.exp(x**2 / 2 + log_ndtr(-x))
        if s > 1e-4:
            between = first - math.exp((x + s) ** 2 / 2 + log_ndtr(-x - s))
        else:
            between = s * (1 / math.sqrt(2 * math.pi) - x * first)
        return at.log - theta * at.mean + math.log(max(between, 1e-300))

    def _root(self, rising: Callable[[float], float]) -> float:
        deviation = self.at(0.0).deviation
        low, high = 1e-3 / deviation, 1 / deviation
        while rising(high) < 0 and self.log_delta(high) > -750 and high * deviation < 1e6:
            low, high = high, 2 * high
        if rising(low) >= 0:
            return 0.0
        if rising(high) <= 0:
            return high
        return math.exp(brentq(lambda t: rising(math.exp(t)), math.log(low), math.log(high), xtol=0.02))

    def window(self, theta: float, log_lost: float) -> Window:
        """Where to look for losses tilted by θ, when a mass of e^log_lost may be lost above."""
        at, unit = self.at(theta), 1 / self.at(theta).deviation
        steps = [2.0**k * unit for k in range(-6, 5)]
        low = max((at.log - self.at(theta - step).log - _BEYOND) / step for step in steps)
        low = max(low, at.mean - 600 / theta if theta else -math.inf)  # e^600 is still a number
        top = min((self.at(theta + step).log - at.log + _BEYOND) / step for step in steps)
        steeps = [theta + 2.0**k * unit for k in range(-5, 6)]
        high, steep = min(((self.at(steep).log - log_lost) / steep, steep) for steep in steeps)
        return Window(theta, low, max(high, top - (at.mean - low) / 2), steep)

    def step(self, theta: float) -> float:
        """Of a grid that raises ε by about a ten-thousandth: rounding to it multiplies E[e^(θL)] of each round by at most
        1 + θ(1+θ)h²/8, and adds at most h²/4 to its variance."""
        at, rounds = self.at(theta), float(self._counts.sum())
        return math.sqrt(min(1.2e-3 * at.deviation**2, 8e-4 * max(at.mean, at.deviation) / (1 + theta)) / rounds)


def cumulants(pairs: Sequence[Pair], counts: Array) -> Cumulants:
    points = [pair.points() for pair in pairs]
    shape = len(points), max(len(losses) for losses, _ in points)
    losses, log_mass = np.zeros(shape), np.full(shape, -np.inf)
    for r, (own, own_mass) in enumerate(points):
        order = np.argsort(own)
        losses[r, : len(own)], log_mass[r, : len(own)] = own[order], own_mass[order]
    return Cumulants(losses, log_mass, counts)
