"""Composed privacy losses, as exponentially tilted discrete distributions.

The characteristic function of a sum of losses is the product of theirs (Koskela et al. 2020, arXiv 1906.03049). But a
Fourier transform's rounding errors are relative to the largest mass, while δ is the mass of a tail. Each round's
masses m(L) are therefore multiplied by e^(θL)/M, with M = Σ m(L) e^(θL), before the transform, and the composed ones
by e^(-θL) ΠM afterwards: with θ such that the tilted loss is ε on average, the tail is where the masses are largest.
Any θ gives a bound; a good one gives a tight bound.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import next_fast_len
from scipy.signal import lfilter

from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import Pair
from dpexp.accounting.pld_numerics import Convolution, Cumulants, Window, cumulants_of, log_rounding
from dpexp.accounting.rdp import Array

_ULP = 2.0**-53
_FINEST, _COARSEST = 2**14, 2**21  # points of the composed grid
_NATS = 14.0  # e^-14 is what cutting off tails may cost, relative to δ
_LEVEL, _LOWEST = 7.0, -100  # nats of δ for which one tilt serves; and how many times as many there can be
_NODES = 1 + 1e-12  # sums of losses are the grid's but for some units in the last place
_KEPT, _FIRST = 4, 6  # distributions, and those of them that depend on a level alone
_MANY = 1000  # kinds of rounds, for which a grid half as fine has to do
_CELLS = 2**22  # numbers held at once


class PrivacyLoss:
    """A discrete privacy loss distribution on the losses h·(first + 0, 1, …).

    Args:
        mass: of each; infinite: mass of the infinite loss; error: by how much δ at each loss may be too small.
        scale: the logarithm of the unit of these three.
    """

    def __init__(self, h: float, first: int, mass: Array, infinite: float, error: Array, scale: float) -> None:
        self.h = h
        self._losses = h * (first + np.arange(len(mass)))
        # C_j = Σ_{i>=j} m_i e^(L_j-L_i) and δ_j = δ_{j+1} + (1 - e^-h) C_{j+1}: sums without cancellation
        self._certain = lfilter([1.0], [1.0, -math.exp(-h)], mass[::-1])[::-1]
        above = np.append(self._certain[1:], 0.0)[::-1]
        self._delta = infinite - math.expm1(-h) * np.cumsum(above)[::-1]
        self._error, self._infinite, self._scale = error, infinite, scale

    @property
    def lowest(self) -> float:
        return float(self._losses[0])

    @property
    def points(self) -> int:
        return len(self._losses)

    def delta(self, epsilon: float) -> float:
        """δ(ε) = E[(1 - e^(ε-L))⁺]; 1 for an ε below the lowest loss."""
        if epsilon < self._losses[0]:
            return 1.0
        j = int(np.searchsorted(self._losses, epsilon))
        if j == len(self._losses):
            return self._unscaled(self._infinite)
        within = math.expm1(epsilon - self._losses[j]) * self._certain[j]
        return self._unscaled(self._delta[j] - within + self._error[max(j - 1, 0)])

    def epsilon(self, delta: float) -> float:
        """The smallest ε >= `lowest` with δ(ε) <= delta; infinite if there is none."""
        target = math.exp(min(math.log(delta) - self._scale, 700))
        bound = self._delta + np.append(self._error[:1], self._error[:-1])
        j = len(bound) - int(np.searchsorted(bound[::-1], target, side="right"))
        if j == len(bound):
            return math.inf
        if j == 0:
            return self.lowest
        left = self._certain[j] - (target - bound[j])
        down = math.log(left / self._certain[j]) if left > 0 else -math.inf
        return float(max(self._losses[j] + down, self._losses[j - 1]))

    def step(self, epsilon: float, rounds: float, of_delta: bool) -> float:
        """The largest h with which ε, or δ (`of_delta`: whichever allows for more), is right to a ten-thousandth, and
        with twice it to four: it adds h²/6 to each round's variance, and half of that times -d log δ/dε to ε."""
        j = min(int(np.searchsorted(self._losses, epsilon)), len(self._losses) - 1)
        delta, slope = float(self._delta[j] + self._error[j]), float(self._certain[j])
        if not (delta and slope):
            return math.inf
        scale = max(epsilon, delta / slope) if of_delta else epsilon
        return math.sqrt(1.2e-3 * scale * delta / (rounds * slope))

    def _unscaled(self, mass: float) -> float:
        return min(1.0, math.exp(min(self._scale + math.log(mass), 0))) if mass > 0 else 0.0


class ComposedLoss:
    """Of rounds with dominating pairs `pairs`, which happened `counts` [R] times.

    Args:
        unsampled: what they would cost if every record were in every sample, which is never less.
    """

    def __init__(self, pairs: Sequence[Pair], counts: Array, unsampled: GaussianMechanism) -> None:
        cumulants = cumulants_of(pairs, counts)
        self._ways = [_OneWay(pairs, counts, cumulants)]
        if any(pair.reverse != pair for pair in pairs):
            self._ways.append(_OneWay([pair.reverse for pair in pairs], counts, cumulants.reverse))
        self.unsampled = unsampled

    def anew(self) -> "ComposedLoss":
        """The same before it was asked anything, on whose order last digits depend."""
        found = copy(self)
        found._ways = [way.anew() for way in self._ways]
        return found

    def delta(self, epsilon: float) -> float:
        largest = 0.0
        for way in self._ways:
            largest = max(largest, way.delta(epsilon, largest) if epsilon < way.most else 0.0)
        return min(largest, self.unsampled.delta(epsilon))

    def epsilon(self, delta: float) -> float:
        unsampled, largest = self.unsampled.epsilon(delta), 0.0
        for way in self._ways:
            if min(unsampled, way.most) > largest:
                largest = max(largest, min(way.epsilon(delta, largest), way.most))
        return min(largest, unsampled)

    def estimate(self, delta: float) -> float:
        """ε within a few per cent where tails are light: no bound, but quick."""
        return min(self.unsampled.epsilon(delta), max(way.estimate(delta) for way in self._ways))


class _Composed(NamedTuple):
    loss: PrivacyLoss
    law: Cumulants
    window: Window


class _OneWay:
    """P against Q. What was composed is kept, by levels of δ."""

    def __init__(self, pairs: Sequence[Pair], counts: Array, cumulants: Cumulants) -> None:
        self._pairs, self._counts, self._cumulants = pairs, counts, cumulants
        self._rounds = float(counts.sum())
        self._coarse = 2.0 if len(pairs) > _MANY else 1.0
        self.most = float(counts @ np.array([pair.max_loss for pair in pairs]))
        self._first = lru_cache(_FIRST)(self._first)  # type: ignore[method-assign]
        self._kept: dict[int, _Composed] = {}

    def anew(self) -> "_OneWay":
        found = copy(self)
        found._kept = {}
        return found

    def epsilon(self, delta: float, enough: float) -> float:
        """A tight bound, or any that is at most `enough`."""
        loss = self._settled(math.log(delta), enough)
        return max(0.0, loss.epsilon(delta)) * _NODES

    def estimate(self, delta: float) -> float:
        return max(0.0, self._cumulants.at(self._cumulants.tilt_for_delta(math.log(delta))).mean)

    def delta(self, epsilon: float, enough: float) -> float:
        """The smallest bound of the levels that lead to the one that holds it; or any that is at most `enough`."""
        tried, best, log_delta = set[int](), 1.0, self._cumulants.light_log_delta(epsilon)
        while (level := self._level(log_delta)) not in tried and best > enough:
            tried.add(level)
            loss = self._settled(log_delta, enough, epsilon)
            best = min(best, loss.delta(epsilon / _NODES))
            log_delta = math.log(max(best, 1e-300))
        return best

    @staticmethod
    def _level(log_delta: float) -> int:
        return min(max(math.floor(log_delta / _LEVEL), _LOWEST), -1)

    def _settled(self, log_delta: float, enough: float, given: float | None = None) -> PrivacyLoss:
        """Losses that are tilted, and on a grid as fine, as suits δ and its ε, or the δ of a `given` ε; or on which
        what is asked for is at most `enough`.

        First with the θ at which δ would be reached if the tilted law were Gaussian. Where tails are heavy, that is
        too large and its grid too coarse, but from the ε that was found better ones follow.
        """
        level = self._level(log_delta)
        log_lost = level * _LEVEL - _NATS
        loss, law, window = self._kept.get(level) or self._first(level, log_lost)
        for _ in range(8):
            epsilon, h = loss.epsilon(math.exp(log_delta)) if given is None else given, loss.h
            found = epsilon * _NODES if given is None else loss.delta(epsilon / _NODES)
            if epsilon <= 0 or epsilon < loss.lowest or level == _LOWEST or found <= enough:
                break
            if loss.lowest < epsilon < math.inf:
                step = loss.step(epsilon, self._rounds, given is not None)
                theta, finer = law.tilt_for_mean(epsilon), self._coarse * step
                bound = log_delta - 8 - log_rounding(self._rounds)  # up to which rounding is next to nothing beside δ
                serves = law.chernoff(window.theta, epsilon) < min(bound, log_delta + 14)  # a window leaves e^-25 out
                if (serves or theta > 0.8 * window.theta) and (finer > 0.8 * h or loss.points > 0.9 * _COARSEST):
                    break
                windows = [law.window(theta * tenths / 10, log_lost) for tenths in range(10, 0, -1)]
                harmless = [w for w in windows if law.chernoff(w.theta, epsilon) < bound and w.width > 0]
                narrow, h = min(harmless or windows[:1], key=lambda w: w.width), min(finer, h)
                window = window if serves and window.width < 1.2 * narrow.width else narrow
            else:
                window = law.window(window.theta / 8, log_lost)
            loss = compose(self._pairs, self._counts, law, window, h, log_lost)
        if len(self._kept) == _KEPT:
            self._kept.clear()
        self._kept[level] = _Composed(loss, law, window)
        return loss

    def _first(self, level: int, log_lost: float) -> _Composed:
        law = self._cumulants.truncated(log_lost - math.log(self._rounds))
        window = law.window(law.tilt_for_delta((level + 0.5) * _LEVEL), log_lost)
        h = max(self._coarse * law.step(window.theta), window.width / (_FINEST + 600 * math.sqrt(self._rounds)))
        return _Composed(compose(self._pairs, self._counts, law, window, h, log_lost), law, window)


def compose(
    pairs: Sequence[Pair], counts: Array, cumulants: Cumulants, window: Window, h: float, log_lost: float
) -> PrivacyLoss:
    """The sum of the rounds' losses, on a window about its tilted mean.

    Its δ(ε) is at least the true one for every ε in the window. What lies above is counted as infinite loss, by
    Chernoff's bound, and so is what lies beyond the grid of a single round; what lies below has no part in δ(ε); what a
    circular convolution folds into the window only adds to it. The tilted masses err by what `Convolution` states, as
    an L2 norm, so that δ(ε) errs by at most that times the norm of e^(-θL) (1 - e^(ε-L))⁺ ΠM (Cauchy and Schwarz). All
    other sums are of positive terms: each round's tilting multiplies them by at most e^(4xu), with x the size of the
    exponents, of which those below -746 are next to nothing, and sums of N terms by e^(4Nu).

    Args:
        cumulants: of the losses; h: the largest step of the grid; log_lost: logarithm of the mass that may be taken for
            infinite loss.
    """
    total, theta, at = float(counts.sum()), window.theta, cumulants.at(window.theta)
    smallest, largest = cumulants.range
    lowest = np.maximum((at.logs - 40) / theta, smallest)  # what has less is next to nothing of the tilted law
    far = max(abs(window.low), abs(window.high))
    least = max(window.width / _COARSEST, float((largest - lowest).max()) / _CELLS, 2.0**-40 * far)
    h = max(min(h, window.width / _FINEST), least)
    spread = 4 * h * math.sqrt(total)  # by more than that rounding to the grid hardly ever moves the sum
    first = max(math.floor((window.low - spread) / h), math.floor((at.mean - 650 / theta) / h) + 1)
    size = next_fast_len(max(math.ceil((window.high + spread) / h) - first, 1) + 1, real=True)
    convolution = Convolution(size)
    log, log_above, infinite, exponents = 0.0, 0.0, 0.0, 0.0
    for rows in _portions(np.argsort(-at.variances), (largest - lowest) / h + 1):
        starts, tilted = [], []
        for r in rows:
            # Above the largest a tilt would make much of next to nothing.
            start, mass, beyond = pairs[r].discretized(h, lowest[r], log_lost - math.log(total), largest[r])
            losses = h * (start + np.arange(len(mass)))
            with np.errstate(divide="ignore"):
                log_mass = np.log(mass)
            law, moment = _normalised(log_mass + theta * losses)
            starts.append(start)
            tilted.append(law)
            log += counts[r] * moment
            log_above += counts[r] * _normalised(log_mass + window.steep * losses)[1]
            infinite += counts[r] * beyond
            far = max(abs(losses[0]), abs(losses[-1]))
            exponents += counts[r] * (1000 + max(theta, window.steep) * far + abs(moment))
        convolution.add(starts, tilted, counts[rows])
    losses = h * (first + np.arange(size))
    far = max(abs(losses[0]), abs(losses[-1]), abs(at.mean))
    slack = 4 * (exponents + max(theta, window.steep) * far + 1000 + size) * _ULP
    infinite = (infinite + math.exp(min(log_above - window.steep * losses[-1], 0.0))) * math.exp(slack)
    down = np.exp(-theta * (losses - at.mean))
    mass, error = convolution.masses(first)
    scale = log - theta * at.mean + slack
    with np.errstate(over="ignore"):
        infinite = float(np.exp(math.log(infinite) - scale)) if infinite else 0.0
    return PrivacyLoss(h, first, mass * down, infinite, error * _norm(theta, h, size) * down, scale)


def _normalised(log_mass: Array) -> tuple[Array, float]:
    """Masses that sum to 1, and the logarithm of the sum that they had."""
    top = log_mass.max()
    mass = np.exp(log_mass - top)
    total = mass.sum()
    return mass / total, float(top + np.log(total))


def _norm(theta: float, h: float, size: int) -> float:
    """Of e^(-θL) (1 - e^-L) over L = h, 2h, …"""
    r, s = math.exp(-2 * theta * h), math.exp(-h)
    apart = (1 - r) * (1 - r * s) * (1 - r * s**2)
    return math.sqrt(min(r * (1 - s) ** 2 * (1 + r * s) / apart, size) if apart > 0 else size)


def _portions(order: NDArray[np.intp], widths: Array) -> Iterator[NDArray[np.intp]]:
    """Rounds that fit into memory together."""
    while len(order):
        widest = np.maximum.accumulate(widths[order[:64]])
        most = max(1, int(np.count_nonzero(widest * np.arange(1, len(widest) + 1) <= _CELLS)))
        yield order[:most]
        order = order[most:]
