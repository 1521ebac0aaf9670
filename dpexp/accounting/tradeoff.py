"""The whole trade-off: δ for every ε, and the error of whoever guesses whether a record was there.

A test for one record is right about members at its true positive rate, TPR = 1 - type II error, and wrong about others
at its false positive rate, FPR = α = type I error. If (ε, δ)-DP holds for several (ε, δ), then no test errs less than

    f(α) = max over them of 0, 1 - δ - e^ε α, e^(-ε)(1 - δ - α)     (Dong, Roth & Su 2022, proposition 2.12)

which is symmetric about β = α, and bounds the error of every test whichever (ε, δ) are taken: fewer only blur it.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from dpexp.accounting.accountants import Guarantee, guarantee
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.pld import ComposedLoss
from dpexp.accounting.rdp import Array

POINTS = 200
TAIL = 1e-10  # a δ, below which curves need not be told apart
_FARTHEST = -6.0  # Φ(6) is a δ that says nothing
_LARGEST = 700.0  # e^700 is still a number


def type_two_errors(ledger: Ledger, type_one: Sequence[float], accountant: str = "pld") -> Array:
    """A lower bound on the type II error of any test whose type I error is as given: the test tells from all releases
    whether the data were those of one neighbour or the other."""
    alpha = np.asarray(type_one, dtype=float)
    if not ledger.rounds:
        return 1 - alpha
    said = guarantee(ledger, accountant)
    if isinstance(said, GaussianMechanism):
        return ndtr(-ndtri(alpha) - said.mu)
    epsilon, delta = (each[:, None] for each in lines(said))
    steep = np.exp(np.minimum(epsilon, _LARGEST)) * alpha
    best = np.maximum(1 - delta - steep, np.exp(-epsilon) * (1 - delta - alpha)).max(axis=0)
    return np.maximum(best, 0)


@lru_cache(maxsize=1)  # μ and its regret ask for the same
def lines(said: Guarantee) -> tuple[Array, Array]:
    """Rising ε [K] from 0 on and falling δ [K], (ε, δ)-DP being guaranteed for each; the last δ is at most TAIL, but
    where that takes an infinite ε.

    Of composed losses and Gaussians δ is read for evenly spaced ε from 0 on, in a heavy tail fewer. Any other
    accountant has an ε for every δ (Rényi DP and the theorems alike), and is read for δ = Φ(-u) with evenly spaced u.
    """
    at, where = _reading(said)
    found = np.array([at(t) for t in where])
    if len(found) > 1 and math.isfinite(found[-1, 0]):
        found[-1, 1] = min(found[-1, 1], TAIL)
    found = found[np.isfinite(found[:, 0])]
    epsilon, delta = np.maximum.accumulate(found[:, 0]), np.minimum.accumulate(found[:, 1])
    last = np.append(np.diff(epsilon) > 0, True)
    epsilon, delta = epsilon[last], delta[last]
    equal = (1 - delta) * np.exp(-epsilon) / (1 + np.exp(-epsilon))  # both errors of a test, where they are the same
    least = int(np.argmax(equal))
    below = slice(least + (epsilon[least] == 0), None)
    return _convex(np.append(0.0, epsilon[below]), np.append(1 - 2 * equal[least], delta[below]))


def _convex(epsilon: Array, delta: Array) -> tuple[Array, Array]:
    """Without those that others imply: δ of all that is known is convex in e^ε."""
    kept: list[int] = []
    slopes: list[float] = []  # -dδ/de^ε from each to the next
    for k in range(len(epsilon)):
        while kept:
            j = kept[-1]
            slope = math.exp(-epsilon[j]) * (delta[j] - delta[k]) / math.expm1(min(epsilon[k] - epsilon[j], _LARGEST))
            if not slopes or slope <= slopes[-1]:
                slopes.append(slope)
                break
            kept.pop()
            slopes.pop()
        kept.append(k)
    return epsilon[kept], delta[kept]


def true_positives(said: Guarantee, alpha: float) -> float:
    """An upper bound on the TPR of any test with FPR α: 1 - f(α), at the best (ε, δ) of all, not only of `lines`.

    Each bound is a convex function of e^ε, so that it has one minimum.
    """
    at, where = _reading(said)

    def steep(t: float) -> float:
        epsilon, delta = at(t)
        return delta + math.exp(min(epsilon, _LARGEST)) * alpha

    def flat(t: float) -> float:
        epsilon, delta = at(t)
        return 1 - math.exp(-epsilon) * (1 - delta - alpha)

    return min(1.0, steep(where[0]), _least(steep, where), _least(flat, where))


def advantage(said: Guarantee) -> float:
    """An upper bound on TPR - FPR of any test: δ(0) (Kulynych et al. 2024, arXiv 2407.02191, section 2); of an
    accountant that is tight at some other ε, the least (e^ε - 1 + 2δ)/(e^ε + 1)."""
    if isinstance(said, ComposedLoss | GaussianMechanism):
        return said.delta(0.0)
    at, where = _reading(said)

    def bound(t: float) -> float:
        epsilon, delta = at(t)
        return math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, _LARGEST)))

    return min(1.0, _least(bound, where))


def gaussian_bound(said: Guarantee) -> float:
    """The smallest μ for which the trade-off curve of Gaussian DP, G_μ(α) = Φ(Φ^-1(1-α) - μ), lies nowhere more than
    TAIL above f: G_μ(α) - 1e-10 <= f(α) for every α. Equivalently δ(ε) <= δ_μ(ε) + 1e-10 for every ε.

    Without TAIL, sampling would not count at all. Who was in every sample is far out in the tail as easy to find as
    without sampling, and a Gaussian curve that is to lie below f even there has μ² = Σ 1/z².

    f lies above the polygon that `lines` bound, and G_μ is convex: it is below the polygon where it is below each
    corner. Those with α <= β suffice, since both curves are symmetric. (Gomez et al. 2025, arXiv 2503.10945; their
    program leaves out the corners with α or β below 1e-10.)
    """
    if isinstance(said, GaussianMechanism):
        return said.mu
    epsilon, delta = lines(said)
    with np.errstate(over="ignore"):
        step = -np.diff(delta) / np.expm1(np.diff(epsilon))
    alpha = np.append((1 - delta[0]) / 2, np.exp(-epsilon[:-1]) * step)
    found = np.append((1 + delta[0]) / 2, delta[:-1] + step)
    found -= TAIL
    with np.errstate(invalid="ignore"):
        needed = np.where(found > 0, ndtri(np.clip(found, 0, 1)) - ndtri(alpha), 0.0)
    mu = float(max(needed.max(), 0.0)) * (1 + 1e-12) if delta[-1] <= TAIL else math.inf
    return min(mu, said.unsampled.mu) if isinstance(said, ComposedLoss) else mu


def regret(said: Guarantee, mu: float) -> float:
    """How much is lost by telling μ instead of f: the smallest Δ with f(α + Δ) - Δ <= G_μ(α) for every α (Gomez et al.
    2025, after Kaissis et al. 2024, arXiv 2406.08918). Symmetrised, it is the larger of both ways; the other is at most
    TAIL, since G_μ lies below f.

    The lines of slope -e^ε that touch either curve show that Δ = sup over ε >= 0 of (δ_μ(ε) - δ(ε))/(1 + e^ε), with
    the δ of Gaussian DP and that of the guarantee. Not too small: between two of `lines` δ is replaced by what a convex
    function of e^ε cannot lie below, which is where the chords beside them would go on. Then the largest value is at
    one of them, or where two such chords cross.
    """
    if mu == 0 or (isinstance(said, GaussianMechanism) and said.mu == mu):
        return 0.0
    if not math.isfinite(mu):
        return 1.0
    epsilon, delta = lines(said)
    epsilon, delta = epsilon[epsilon < _LARGEST / 2], delta[epsilon < _LARGEST / 2]
    x = np.exp(epsilon)
    if len(x) > 1:  # δ(-ε) = 1 - e^-ε + e^-ε δ(ε)
        x, delta = np.append(1 / x[1], x), np.append(1 - (1 - delta[1]) / x[1], delta)
    if len(x) >= 4:
        slope = np.diff(delta) / np.diff(x)
        left, right, before, after = x[1:-2], x[2:-1], slope[:-2], slope[2:]
        with np.errstate(divide="ignore", invalid="ignore"):
            cross = (delta[2:-1] - after * right - delta[1:-2] + before * left) / (before - after)
        cross = np.clip(np.where(np.isfinite(cross), cross, left), left, right)
        least = np.maximum(delta[1:-2] + before * (cross - left), delta[2:-1] + after * (cross - right))
        x, delta = np.append(x, cross), np.append(delta, least)
    told = GaussianMechanism(mu)
    apart = [(told.delta(math.log(at)) - d) / (1 + at) for at, d in zip(x, delta, strict=True) if at >= 1]
    return float(max(0.0, *apart))


def _least(bound: Callable[[float], float], where: Array) -> float:
    """Not next to the first: to read δ at an ε next to 0 takes seconds."""
    if len(where) < 2:
        return math.inf
    return float(minimize_scalar(bound, bounds=(where[1], where[-1]), method="bounded").fun)


def _reading(said: Guarantee) -> tuple[Callable[[float], tuple[float, float]], Array]:
    """A function to (ε, δ), and arguments at which it is of use."""
    if not isinstance(said, ComposedLoss | GaussianMechanism):
        where = np.linspace(_FARTHEST, float(-ndtri(TAIL)), POINTS)
        return lambda u: (said.epsilon(float(ndtr(-u))), float(ndtr(-u))), where
    most, scale = said.epsilon(TAIL), -2 * float(ndtri((1 - said.delta(0.0)) / 2))
    if not math.isfinite(most) or most == 0:
        where = np.zeros(1)
    else:
        body = min(most, scale * (6 + scale / 2))  # where all of it is that matters of a Gaussian with μ = `scale`
        where = np.union1d(np.linspace(0, body, POINTS), np.linspace(body, most, POINTS // 2))
    return lambda epsilon: (float(epsilon), said.delta(float(epsilon))), where
