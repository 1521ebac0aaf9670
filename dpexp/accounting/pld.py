"""Privacy loss distributions of composed rounds, by Fourier transforms of exponentially tilted losses.

*Formula.* With the privacy loss L of all rounds together, δ(ε) = E[(1 - e^(ε-L))⁺]. L is the sum of the rounds'
losses, and the characteristic function of a sum is the product of theirs (Koskela et al. 2020, arXiv 1906.03049). The
rounding errors of a Fourier transform are relative to the largest mass, while δ is the mass of a tail. Therefore each
round's masses m(L) are *tilted*: multiplied by e^(θL)/M, with M = Σ m(L) e^(θL). The composed masses are multiplied by
e^(-θL) ΠM afterwards (`compose`).

*The bound does not depend on the search.* δ(ε) of `compose` is an upper bound for every tilt θ, window and step h. How
tight it is depends on them: it is tight if the mean of the tilted loss is near ε. `_Direction` searches for such a tilt
with approximate cumulants (`dpexp.accounting.pld_numerics`), which decide nothing else.

*The search*, for one direction (P against Q, or Q against P):

1. δ is divided into levels of 7 nats. A composition that suits one δ of a level nearly suits the others, so the last
   one of a level is cached, for a few levels at a time.
2. The first θ is the right one if the tail is *light*: if the tilted sum of losses is close to a normal distribution,
   as for many rounds of which each contributes little. A tail is heavy if a few rounds make it, as for a small q.
3. ε is read off the composed loss. (If δ is asked for, ε is given.)
4. The search ends if no composition would give a better answer (`_is_final`), or if the bound is `enough`: one that
   another direction exceeds already.
5. If ε is not inside the window, or is lost in rounding errors, the tilt is too large, and θ is divided by 8.
6. Otherwise ε gives a better θ and a better step h. If those in use are as good, the search ends. Else the losses are
   composed again, at most 8 times in all.

| Case | Answer |
|---|---|
| ε below the smallest loss of the grid | δ = 1; then a level nearer to 1 is tried |
| ε above the largest one | δ is the mass of the infinite loss |
| no ε of the grid has that δ | infinity, in place of which `ComposedLoss` has ε without sampling |
| a direction whose largest loss is at most ε of the other direction | it is not composed |
| δ below e^-693 | the first composition is the answer |

Read next: `dominating_pairs` (the losses of one round), `pld_numerics` (the convolution and its rounding errors).
"""

import math
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.fft import next_fast_len
from scipy.signal import lfilter

from dpexp.accounting.composition import MAX_CELLS, Array, GaussianMechanism, batches
from dpexp.accounting.dominating_pairs import Pair
from dpexp.accounting.pld_numerics import Convolution, Cumulants, Window, cumulants_of, log_rounding

_ULP = 2.0**-53
_MIN_POINTS, _MAX_POINTS = 2**14, 2**21  # of the composed grid
_LOST_NATS = 14.0  # truncating tails may cost e^-14 of δ
_ROUNDING_NATS = 8.0  # rounding errors of less than e^-8 of δ are negligible
_WINDOW_NATS = 14.0  # windows omit e^-25 of the tilted mass: e^-11 of δ, if the Chernoff bound is below e^14 δ
_LEVEL, _LOWEST_LEVEL = 7.0, -100  # nats of δ per level, for which one tilt is used; and the lowest level
_MOST_COMPOSITIONS = 8  # after the first guess
_NODES = 1 + 1e-12  # allows for rounding errors of the grid's losses
_CACHED, _CACHED_FIRST = 4, 6  # composed losses kept, and those for a first guess by level
_MANY_PAIRS = 1000  # different rounds, above which the grid is half as fine


class PrivacyLoss:
    """A discrete privacy loss distribution on the losses h·(first + 0, 1, …).

    Args:
        mass: of each loss.
        infinite: the mass of the infinite loss.
        error: by how much δ at each loss may be too small.
        scale: the logarithm of the unit of mass, infinite and error.
        certain: the mass, not in that unit, of single rounds' infinite losses, which no window or grid lessens.
    """

    def __init__(
        self, h: float, first: int, mass: Array, infinite: float, error: Array, scale: float, certain: float
    ) -> None:
        self.h, self.certain = h, certain
        self._losses = h * (first + np.arange(len(mass)))
        # C_j = Σ_{i>=j} m_i e^(L_j-L_i) and δ_j = δ_{j+1} + (1 - e^-h) C_{j+1}: sums without cancellation
        self._slopes = lfilter([1.0], [1.0, -math.exp(-h)], mass[::-1])[::-1]
        above = np.append(self._slopes[1:], 0.0)[::-1]
        self._delta = infinite - math.expm1(-h) * np.cumsum(above)[::-1]
        self._error, self._infinite, self._scale = error, infinite, scale

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def lowest(self) -> float:
        return float(self._losses[0])

    def delta(self, epsilon: float) -> float:
        """δ(ε) = E[(1 - e^(ε-L))⁺]; 1 for an ε below the lowest loss."""
        if epsilon < self._losses[0]:
            return 1.0
        j = int(np.searchsorted(self._losses, epsilon))
        if j == len(self._losses):
            return self._unscaled(self._infinite)
        within = math.expm1(epsilon - self._losses[j]) * self._slopes[j]
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
        remaining = self._slopes[j] - (target - bound[j])
        shift = math.log(remaining / self._slopes[j]) if remaining > 0 else -math.inf
        return float(max(self._losses[j] + shift, self._losses[j - 1]))

    def step(self, epsilon: float, rounds: float, of_delta: bool) -> float:
        """The largest h for a relative error of 1e-4 in ε, or in either ε or δ (`of_delta`); twice h has 4e-4.

        A grid of step h adds h²/6 to each round's variance, and half of that times -d log δ/dε to ε."""
        j = min(int(np.searchsorted(self._losses, epsilon)), len(self._losses) - 1)
        delta, slope = float(self._delta[j] + self._error[j]), float(self._slopes[j])
        if not (delta and slope):
            return math.inf
        scale = max(epsilon, delta / slope) if of_delta else epsilon
        return math.sqrt(1.2e-3 * scale * delta / (rounds * slope))

    def _unscaled(self, mass: float) -> float:
        return min(1.0, math.exp(min(self._scale + math.log(mass), 0))) if mass > 0 else 0.0


class ComposedLoss:
    """The privacy loss of rounds with dominating pairs `pairs`, which happened `counts` [R] times.

    Args:
        unsampled: an upper bound: the cost of the same rounds without sampling.
    """

    def __init__(self, pairs: Sequence[Pair], counts: Array, unsampled: GaussianMechanism) -> None:
        cumulants = cumulants_of(pairs, counts)
        self._directions = [_Direction(pairs, counts, cumulants)]
        if any(pair.reverse != pair for pair in pairs):
            self._directions.append(_Direction([pair.reverse for pair in pairs], counts, cumulants.reverse))
        self.unsampled = unsampled

    def without_cache(self) -> "ComposedLoss":
        """The same without cached compositions, on whose order the last digits depend."""
        found = copy(self)
        found._directions = [direction.without_cache() for direction in self._directions]
        return found

    def delta(self, epsilon: float) -> float:
        largest = 0.0
        for direction in self._directions:
            largest = max(largest, direction.delta(epsilon, largest) if epsilon < direction.max_loss else 0.0)
        return min(largest, self.unsampled.delta(epsilon))

    def epsilon(self, delta: float) -> float:
        unsampled, largest = self.unsampled.epsilon(delta), 0.0
        for direction in self._directions:
            if min(unsampled, direction.max_loss) > largest:
                largest = max(largest, min(direction.epsilon(delta, largest), direction.max_loss))
        return min(largest, unsampled)

    def estimate(self, delta: float) -> float:
        """A quick approximation of ε, within a few per cent if tails are light (see above); no bound."""
        return min(self.unsampled.epsilon(delta), max(direction.estimate(delta) for direction in self._directions))


class _Composed(NamedTuple):
    loss: PrivacyLoss
    cumulants: Cumulants
    window: Window


class _Direction:
    """The loss of P against Q. Compositions are cached by levels of δ.

    Attributes:
        max_loss: an upper bound on the loss of all rounds together.
    """

    def __init__(self, pairs: Sequence[Pair], counts: Array, cumulants: Cumulants) -> None:
        self._pairs, self._counts, self._cumulants = pairs, counts, cumulants
        self._rounds = float(counts.sum())
        self._coarse = 2.0 if len(pairs) > _MANY_PAIRS else 1.0
        self.max_loss = float(counts @ np.array([pair.max_loss for pair in pairs]))
        self._first_guess = lru_cache(_CACHED_FIRST)(self._first_guess)  # type: ignore[method-assign]
        self._cache: dict[int, _Composed] = {}

    def without_cache(self) -> "_Direction":
        """A copy with an empty cache of compositions.

        First guesses stay cached, since they depend on the level alone, and not on earlier calls.
        """
        found = copy(self)
        found._cache = {}
        return found

    def epsilon(self, delta: float, enough: float) -> float:
        """A tight bound, or any bound that is at most `enough`."""
        loss = self._composed(math.log(delta), enough)
        return max(0.0, loss.epsilon(delta)) * _NODES

    def estimate(self, delta: float) -> float:
        return max(0.0, self._cumulants.at(self._cumulants.tilt_for_delta(math.log(delta))).mean)

    def delta(self, epsilon: float, enough: float) -> float:
        """The smallest bound of the levels tried until one contains it, or any bound that is at most `enough`."""
        tried, best, log_delta = set[int](), 1.0, self._cumulants.light_log_delta(epsilon)
        while (level := self._level(log_delta)) not in tried and best > enough:
            tried.add(level)
            loss = self._composed(log_delta, enough, epsilon)
            best = min(best, loss.delta(epsilon / _NODES))
            log_delta = math.log(max(best, 1e-300))
        return best

    @staticmethod
    def _level(log_delta: float) -> int:
        return min(max(math.floor(log_delta / _LEVEL), _LOWEST_LEVEL), -1)

    def _composed(self, log_delta: float, enough: float, at_epsilon: float | None = None) -> PrivacyLoss:
        """The composed loss, tilted for ε at δ, or for δ at `at_epsilon`; or for which that is at most `enough`.

        The search at the top of this file, whose steps the comments count.
        """
        level = self._level(log_delta)  # 1
        log_lost = level * _LEVEL - _LOST_NATS
        loss, cumulants, window = self._cache.get(level) or self._first_guess(level, log_lost)  # 2
        for _ in range(_MOST_COMPOSITIONS):
            epsilon = loss.epsilon(math.exp(log_delta)) if at_epsilon is None else at_epsilon  # 3
            bound = epsilon * _NODES if at_epsilon is None else loss.delta(epsilon / _NODES)
            if bound <= enough or self._is_final(loss, epsilon, log_delta):  # 4
                break
            h = loss.h
            if not loss.lowest < epsilon < math.inf:  # 5
                window = cumulants.window(window.theta / 8, log_lost)
            else:  # 6
                theta = cumulants.tilt_for_mean(epsilon)
                negligible = log_delta - _ROUNDING_NATS - log_rounding(self._rounds)
                is_accurate = cumulants.chernoff(window.theta, epsilon) < min(negligible, log_delta + _WINDOW_NATS)
                tilt_is_good = is_accurate or theta > 0.8 * window.theta
                finer = self._coarse * loss.step(epsilon, self._rounds, of_delta=at_epsilon is not None)
                grid_is_good = finer > 0.8 * h or len(loss) > 0.9 * _MAX_POINTS
                if tilt_is_good and grid_is_good:
                    break
                narrow = _narrowest_window(cumulants, theta, epsilon, negligible, log_lost)
                if not (is_accurate and window.width < 1.2 * narrow.width):
                    window = narrow
                h = min(finer, h)
            loss = compose(self._pairs, self._counts, cumulants, window, h, log_lost)
        if len(self._cache) == _CACHED:
            self._cache.clear()
        self._cache[level] = _Composed(loss, cumulants, window)
        return loss

    def _is_final(self, loss: PrivacyLoss, epsilon: float, log_delta: float) -> bool:
        """Whether no other tilt, window or grid for δ of this level would give a better answer than this loss."""
        below_the_grid = epsilon <= 0 or epsilon < loss.lowest
        at_lowest_level = self._level(log_delta) == _LOWEST_LEVEL
        # Infinite losses of single rounds have more mass than δ, in whatever window: no finite ε has this δ.
        stays_infinite = epsilon == math.inf and loss.certain > math.exp(log_delta)
        return below_the_grid or at_lowest_level or stays_infinite

    def _first_guess(self, level: int, log_lost: float) -> _Composed:
        """A composition for the middle of a level of δ, as if tails were light."""
        cumulants = self._cumulants.truncated(log_lost - math.log(self._rounds))
        window = cumulants.window(cumulants.tilt_for_delta((level + 0.5) * _LEVEL), log_lost)
        finest = window.width / (_MIN_POINTS + 600 * math.sqrt(self._rounds))
        h = max(self._coarse * cumulants.step(window.theta), finest)
        loss = compose(self._pairs, self._counts, cumulants, window, h, log_lost)
        return _Composed(loss, cumulants, window)


def _narrowest_window(cumulants: Cumulants, theta: float, epsilon: float, negligible: float, log_lost: float) -> Window:
    """The narrowest window, which needs the fewest points, of a tilt that is accurate at ε; that of θ if none is.

    Args:
        theta: whose tilted mean is ε; θ/10, 2θ/10, … θ are tried. A smaller tilt may have the narrower window.
        negligible: a tilt is accurate if the logarithm of its Chernoff bound on the mass above ε is below this.
    """
    windows = [cumulants.window(theta * tenths / 10, log_lost) for tenths in range(10, 0, -1)]
    accurate = [w for w in windows if cumulants.chernoff(w.theta, epsilon) < negligible and w.width > 0]
    return min(accurate or windows[:1], key=lambda w: w.width)


def compose(
    pairs: Sequence[Pair], counts: Array, cumulants: Cumulants, window: Window, h: float, log_lost: float
) -> PrivacyLoss:
    """The sum of the rounds' losses, on a window around its tilted mean.

    Its δ(ε) is at least the true one for every ε in the window. Mass above the window (by Chernoff's bound), or above
    the grid of a single round, is counted as infinite loss. Mass below the window does not contribute to δ(ε). Mass
    that the circular convolution wraps into the window only increases δ(ε).

    The error of δ(ε) is at most the L2 norm of the errors of the tilted masses, which `Convolution` bounds, times the
    norm of e^(-θL) (1 - e^(ε-L))⁺ ΠM (Cauchy-Schwarz). All other sums have positive terms: tilting each round
    multiplies them by at most e^(4xu), with the size x of the exponents, and sums of N terms by at most e^(4Nu).

    Args:
        cumulants: of the losses; a guide to the grid, as in the search.
        h: the largest step of the grid.
        log_lost: logarithm of the mass that may be counted as infinite loss.
    """
    # The grid
    rounds, theta, at = float(counts.sum()), window.theta, cumulants.at(window.theta)
    smallest, largest = cumulants.range
    lowest = np.maximum((at.logs - 40) / theta, smallest)  # below it, the tilted mass is negligible
    h, first, size = _grid(window, at.mean, h, rounds, widest=float((largest - lowest).max()))

    # The tilted masses of each round, and their convolution
    convolution = Convolution(size)
    log_moment = 0.0  # log ΠM, of the tilt θ
    log_moment_above = 0.0  # the same of the tilt `steep`, for Chernoff's bound
    certain = 0.0  # mass of single rounds' infinite losses
    exponents = 0.0  # the sizes of all rounds' exponents, for the rounding errors of e^x
    for rows in batches(np.argsort(-at.variances), (largest - lowest) / h + 1, most=64):
        starts, tilted = [], []
        for r in rows:
            # A tilt would magnify the negligible mass above the largest loss.
            start, mass, beyond = pairs[r].discretized(h, lowest[r], log_lost - math.log(rounds), largest[r])
            losses = h * (start + np.arange(len(mass)))
            with np.errstate(divide="ignore"):
                log_mass = np.log(mass)
            tilted_mass, moment = _normalized(log_mass + theta * losses)
            starts.append(start)
            tilted.append(tilted_mass)
            log_moment += counts[r] * moment
            log_moment_above += counts[r] * _normalized(log_mass + window.steep * losses)[1]
            certain += counts[r] * beyond
            farthest_of_round = max(abs(losses[0]), abs(losses[-1]))
            exponents += counts[r] * (1000 + max(theta, window.steep) * farthest_of_round + abs(moment))
        convolution.add(starts, tilted, counts[rows])

    # The composed masses, no longer tilted, with their error and what counts as infinite loss
    losses = h * (first + np.arange(size))
    farthest = max(abs(losses[0]), abs(losses[-1]), abs(at.mean))
    slack = 4 * (exponents + max(theta, window.steep) * farthest + 1000 + size) * _ULP
    above = math.exp(min(log_moment_above - window.steep * losses[-1], 0.0))  # Chernoff's bound
    infinite = (certain + above) * math.exp(slack)
    untilt = np.exp(-theta * (losses - at.mean))  # in units of e^scale
    mass, error = convolution.masses(first)
    scale = log_moment - theta * at.mean + slack
    with np.errstate(over="ignore"):
        infinite = float(np.exp(math.log(infinite) - scale)) if infinite else 0.0
    return PrivacyLoss(h, first, mass * untilt, infinite, error * _norm(theta, h, size) * untilt, scale, certain)


def _grid(window: Window, mean: float, h: float, rounds: float, widest: float) -> tuple[float, int, int]:
    """The step, the first point (as a multiple of the step) and the number of points of the composed losses.

    Args:
        mean: of the tilted loss; points 650/θ below it would overflow when they are no longer tilted.
        h: the largest step; it is exceeded where the arrays would not fit in memory, or points have no digits left.
        widest: the largest range of the losses of a single round.
    """
    least = max(window.width / _MAX_POINTS, widest / MAX_CELLS, 2.0**-40 * max(abs(window.low), abs(window.high)))
    h = max(min(h, window.width / _MIN_POINTS), least)
    spread = 4 * h * math.sqrt(rounds)  # rounding to the grid hardly ever moves the sum further
    first = max(math.floor((window.low - spread) / h), math.floor((mean - 650 / window.theta) / h) + 1)
    return h, first, next_fast_len(max(math.ceil((window.high + spread) / h) - first, 1) + 1, real=True)


def _normalized(log_mass: Array) -> tuple[Array, float]:
    """Masses that sum to 1, and the logarithm of their previous sum."""
    top = log_mass.max()
    mass = np.exp(log_mass - top)
    total = mass.sum()
    return mass / total, float(top + np.log(total))


def _norm(theta: float, h: float, size: int) -> float:
    """The L2 norm of e^(-θL) (1 - e^-L) over L = h, 2h, …"""
    r, s = math.exp(-2 * theta * h), math.exp(-h)
    denominator = (1 - r) * (1 - r * s) * (1 - r * s**2)
    return math.sqrt(min(r * (1 - s) ** 2 * (1 + r * s) / denominator, size) if denominator > 0 else size)
