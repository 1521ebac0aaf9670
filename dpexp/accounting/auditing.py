"""Audits with one run: tests of a privacy claim by an attacker's guesses, and of a plan by its releases.

Each of m canaries is included by a fair coin. The attacker guesses the coins of the r canaries that it is surest of,
and c guesses are right. If so many right guesses are unlikely under a claim, the claim is refuted. An audit can refute
a claim but never prove it, since another attacker may do better.

A `Check` tests one number of the plan, such as the noise's standard deviation, at a level: if the plan is followed, it
is refuted at most with that probability.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, norm
from scipy.stats import t as student

from dpexp.accounting.accountants import delta, epsilon, guarantee
from dpexp.accounting.composition import Array
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rounding import down, up
from dpexp.accounting.tradeoff import lines

POWER = 0.95  # the probability with which an error of the size `Check.detectable` is found


@dataclass(frozen=True)
class Check:
    """A test of one number of the plan.

    Attributes:
        limit: a confidence limit of the true number, at the level of the test: a lower one, except for the noise, for
            which it is an upper one.
        detectable: the number closest to the plan that would have been refuted with probability `POWER`.
    """

    name: str
    planned: float
    found: float
    limit: float
    detectable: float
    refuted: bool

    def message(self) -> str:
        """What is refuted."""
        limit = f"at most {up(self.limit, 4)}" if self.limit < self.planned else f"at least {down(self.limit, 4)}"
        return f"the {self.name} is {limit}, and {self.planned:.4g} was planned"


def noise_scale(noise: Array, level: float) -> Check:
    """Tests the standard deviation of noise [P, D], planned to be independent and standard normal.

    The sum of its squares is χ² with PD degrees of freedom. Refuted if the standard deviation is smaller than 1.
    """
    squares, count = float((noise.astype(np.float64) ** 2).sum()), noise.size
    found, limit = math.sqrt(squares / count), math.sqrt(squares / chi2.ppf(level, count))
    detectable = math.sqrt(chi2.ppf(level, count) / chi2.ppf(POWER, count))
    return Check("noise", 1.0, found, limit, detectable, limit < 1)


def noise_reuse(noise: Array, level: float) -> Check:
    """Tests the largest correlation of two rows of noise [P, D], planned to be independent.

    t = r √((D-2)/(1-r²)) of two normal rows has Student's distribution with D - 2 degrees of freedom. The level is
    divided among the pairs.
    """
    rows, dim = noise.shape
    r = np.atleast_2d(np.corrcoef(noise.astype(np.float64)))
    found = float(np.abs(np.nan_to_num(r[np.triu_indices(rows, 1)])).max(initial=0.0))
    quantile = student.isf(level / max(1, rows * (rows - 1)), dim - 2)  # two-sided
    critical = float(quantile / math.sqrt(dim - 2 + quantile**2))
    detectable = critical + norm.ppf(POWER) / math.sqrt(dim)
    return Check("correlation of noise", 0.0, found, max(0.0, found - critical), detectable, found > critical)


def rate_of_inclusion(drawn: int, draws: int, q: float, level: float) -> Check:
    """Tests the sampling rate of records, in units of q: included `drawn` times in `draws`.

    The lower limit is that of Clopper & Pearson (1934). It also holds for samples that depend on one another as the
    policies define: samples of fixed size and cyclic samples vary less than independent indicators of mean q (Hoeffding
    1956, 1963). Refuted if the rate is larger.
    """
    limit = float(beta.ppf(level, drawn, draws - drawn + 1)) if drawn else 0.0
    enough = int(binom.isf(level, draws, q)) + 1
    detectable = float(beta.ppf(POWER, enough, draws - enough + 1)) if enough <= draws else 1.0
    return Check("rate of inclusion", 1.0, drawn / draws / q, limit / q, detectable / q, limit > q)


def contribution(name: str, values: NDArray[np.float64], error: float, level: float) -> Check:
    """Tests the mean contribution of canaries, in units of the clip norm, from `values` with noise of standard
    deviation `error`. Refuted if it is larger than 1."""
    found, error = float(values.mean()), error / math.sqrt(len(values))
    limit, detectable = found - norm.isf(level) * error, 1 + (norm.isf(level) + norm.ppf(POWER)) * error
    return Check(name, 1.0, found, limit, detectable, limit > 1)


def largest_contribution(values: NDArray[np.float64], error: float, level: float) -> Check:
    """Tests the largest of `values`, as for `contribution`: detects a single record that counts twice."""
    margin, found = float(norm.isf(level / len(values))) * error, float(values.max())
    detectable = 1 + margin + norm.ppf(POWER) * error
    return Check("largest contribution", 1.0, found, found - margin, detectable, found - margin > 1)


PARTS = (2, 8, 32)  # the coins of m/2, m/8 and m/32 canaries are guessed: fixed before the scores are seen
_MAX_EPSILON = 100.0  # or μ, at which a search ends
_MAX_EXPONENT = 700.0  # e^700 is finite


def p_value(m: int, r: int, c: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability that at least c of r guesses are right, if (ε, δ)-DP holds.

    P[C >= c] <= P[B >= c] + 2mδ max_i P[c > B >= c - i]/i with B ~ Binomial(r, e^ε/(1 + e^ε)) (Steinke, Nasr &
    Jagielski 2023, arXiv 2305.08846, theorem 5.2, as their appendix D computes it).
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(c - 1, -1, -1), r, accuracy))
    worst = float((below / np.arange(1, c + 1)).max()) if c else 0.0
    return min(1.0, float(binom.sf(c - 1, r, accuracy)) + 2 * m * delta * worst)


def epsilon_bound(m: int, r: int, c: int, delta: float, level: float) -> float:
    """Nearly the largest ε for which (ε, δ)-DP is refuted at the level, and so is every smaller ε; 0 if there is
    none."""
    return _largest(lambda e: p_value(m, r, c, e, delta) < level)


Mask = NDArray[np.bool_]
Inverse = Callable[[float], float]  # y -> the smallest x with 1 - f(x) >= y


def refuted(m: int, r: int, c: int, inverse: Inverse, level: float) -> bool:
    """Whether at least c of r right guesses have a probability below `level` for every f-DP mechanism.

    Let p_i be the probability of i right guesses, a_j = Σ_{i>=j} p_i i/m and b_j = Σ_{i>=j} p_i (r-i)/m. Flipping the
    coin of a random canary turns the event "its guess is right, and more than j guesses are" into "its guess is wrong,
    and at least j guesses are right". Therefore a_{j+1} <= 1 - f(b_j) (Mahloujifar, Melis & Chaudhuri 2024, arXiv
    2410.22235, theorem 9). Starting from a tail of probability `level` at c, this recursion gives the smallest possible
    a_0 + b_0, which must equal r/m (their algorithm 3).

    Args:
        inverse: the inverse of 1 - f, with f(x) the least type II error at a type I error of x.
    """
    a, b = level * c / m, level * (r - c) / m
    for i in range(c - 1, 0, -1):
        if a + b > r / m:
            return True
        more = max(0.0, inverse(min(a, 1.0)) - b)
        a, b = a + more * i / (r - i), b + more
    return a + max(b, inverse(min(a, 1.0)) if c else b) > r / m


def mu_bound(m: int, r: int, c: int, level: float) -> float:
    """Nearly the largest μ for which μ-Gaussian DP is refuted at the level."""
    return _largest(lambda mu: refuted(m, r, c, lambda y: float(ndtr(ndtri(y) - mu)), level))


def inverse_of(ledger: Ledger, accountant: str = "pld") -> Inverse:
    """The inverse of 1 - f, for the trade-off function f of a ledger.

    f is the largest of the lines 1 - δ(ε) - e^ε x and e^-ε (1 - δ(ε) - x) (Dong, Roth & Su 2022, proposition 2.12). It
    is its own inverse, so that 1 - f(x) >= y if x >= f(1 - y).
    """
    epsilon, delta = lines(guarantee(ledger, accountant)) if ledger.rounds else (np.zeros(1), np.zeros(1))
    curve = [(e, d) for e, d in zip(epsilon.tolist(), delta.tolist(), strict=True) if e < _MAX_EXPONENT]
    touching = [(math.exp(e), 1 - d) for e, d in reversed(curve)]
    touching += [(math.exp(-e), math.exp(-e) * (1 - d)) for e, d in curve[1:]]
    crossings = [(high - low) / (steep - flat) for (steep, high), (flat, low) in pairwise(touching)]
    crossings = np.maximum.accumulate(crossings).tolist()

    def inverse(y: float) -> float:
        slope, height = touching[bisect_right(crossings, 1 - y)]  # the highest line; any line is a bound
        return max(0.0, height - slope * (1 - y))

    return inverse


class LowerBound(NamedTuple):
    """At one δ, the ε claimed for the attacked rounds, and lower bounds on it: without assumptions, and if canaries are
    independent."""

    delta: float
    claimed: float
    found: float
    if_independent: float


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        canaries: m, the number of canaries.
        included: the number of included canaries.
        right: the number of right guesses if all coins are guessed.
        tests: the number of tests among which the error probability is divided, so that all bounds hold together at
            `confidence`.
        p: the p-value of the claimed trade-off function, times `tests`; the claim is refuted below 1 - confidence.
        p_independent: the p-value of the claimed δ(0), times `tests`: on average at most (1 + δ(0))/2 of all coins can
            be guessed right. It assumes independent canaries, whose scores do not depend on the coins of others, as is
            the case if noise and samples are independent. It is then far more powerful.
        mu_claimed: the μ of Gaussian DP with the claimed δ(0) = 2Φ(μ/2) - 1; exact without amplification by sampling.
        mu_estimate: the distance between the mean scores of included and other canaries, in standard deviations.
        mu_error: its standard error.
        mu_bound: a lower bound on μ at `confidence`.
        mu_bound_if_independent: a lower bound on μ if canaries are independent, by true and false positive rates (Nasr
            et al. 2023, arXiv 2302.07956).
        mu_refuted: whether these rates refute the claimed trade-off function.
        checks: tests of numbers of the plan, by the releases.
        errors: (type I, type II) of the attacker, for each threshold: [K, 2].
    """

    canaries: int
    included: int
    right: int
    confidence: float
    tests: int
    bounds: tuple[LowerBound, ...]
    p: float
    p_independent: float
    mu_claimed: float
    mu_estimate: float
    mu_error: float
    mu_bound: float
    mu_bound_if_independent: float
    mu_refuted: bool
    checks: tuple[Check, ...]
    errors: Array

    def summary(self) -> dict[str, float]:
        """The numbers by name, such as for MLflow."""
        found = {
            "canaries": self.canaries, "right": self.right, "p": self.p, "p_independent": self.p_independent,
            "mu_claimed": self.mu_claimed, "mu_estimate": self.mu_estimate, "mu_error": self.mu_error,
            "mu_at_least": self.mu_bound, "mu_at_least_if_independent": self.mu_bound_if_independent,
            "refuted": float(bool(self.exceeded)),
        }  # fmt: skip
        for check in self.checks:
            name = check.name.replace(" ", "_")
            found |= {name: check.found, f"{name}_detectable": check.detectable}
        for bound in self.bounds:
            at = f"delta_{bound.delta:g}"
            found |= {
                f"epsilon_of_attacked_rounds/{at}": bound.claimed,
                f"epsilon_lower_bound/{at}": bound.found,
                f"epsilon_lower_bound_if_independent/{at}": bound.if_independent,
            }
        return found

    @property
    def exceeded(self) -> list[str]:
        """The refuted claims, as messages."""
        found = [
            f"at δ = {up(bound.delta, 4)} ε of the attacked rounds is at least {down(value, 4)}{assumption}, and "
            f"{up(bound.claimed, 4)} was claimed"
            for bound in self.bounds
            for value, assumption in ((bound.found, ""), (bound.if_independent, " if canaries are independent"))
            if value > bound.claimed
        ]
        if min(self.p, self.p_independent) < 1 - self.confidence or self.mu_refuted:
            found.append(
                f"the attacker is right more often than the claimed trade-off allows (p = {up(self.p, 2)}, or if "
                f"canaries are independent {up(self.p_independent, 2)}; μ = {self.mu_estimate:.3g} was found, at "
                f"least {down(self.mu_bound_if_independent, 3)} if they are, and {up(self.mu_claimed, 3)} claimed)"
            )
        return found + [check.message() for check in self.checks if check.refuted]


def audit(
    scores: Array,
    included: Mask,
    ledger: Ledger,
    deltas: Sequence[float],
    accountant: str = "pld",
    confidence: float = 0.95,
    middle: float = 0.5,
    checks: Sequence[Check] = (),
) -> Audit:
    """Tests the privacy claim of a ledger by an attacker's scores.

    Args:
        scores: [m], the attacker's score of each canary.
        included: [m], fair coins that the attacker did not see.
        ledger: of the releases that the attacker saw.
        deltas: the δ of the lower bounds on ε.
        accountant: of the claim.
        confidence: with which all bounds hold together.
        middle: the score above which a canary is guessed as included, if all coins are guessed.
        checks: tests by the releases, which have half of the error probability, as divided by `level_of_checks`.
    """
    m, tests = len(scores), 2 * (len(PARTS) * (len(deltas) + 4) + 1)
    level = (1 - confidence) / tests
    guesses = [guessed(scores, included, m // part) for part in PARTS if m // part >= 2]
    rates = _rates(scores, included, level)
    found = [max(epsilon_bound(m, r, c, d, level) for r, c in guesses) for d in deltas]
    bounds = [
        LowerBound(
            d,
            epsilon(ledger, d, accountant),
            least,
            max(least, *(math.log(max(right - d, 1e-300) / wrong) for right, wrong in rates)),
        )
        for d, least in zip(deltas, found, strict=True)
    ]
    inverse = inverse_of(ledger, accountant)
    p = min(smallest_level(m, r, c, inverse) for r, c in guesses)
    yes, no = scores[included], scores[~included]
    spread = math.sqrt((yes.var(ddof=1) + no.var(ddof=1)) / 2)
    mu = float(yes.mean() - no.mean()) / max(spread, 1e-300)
    right = int(((scores > middle) == included).sum())
    total_variation = delta(ledger, 0.0, accountant)
    return Audit(
        canaries=m,
        included=int(included.sum()),
        right=right,
        confidence=confidence,
        tests=tests,
        bounds=tuple(bounds),
        p=min(1.0, p * tests),
        p_independent=min(1.0, tests * float(binom.sf(right - 1, m, (1 + total_variation) / 2))),
        mu_claimed=2 * float(ndtri((1 + total_variation) / 2)),
        mu_estimate=mu,
        mu_error=math.sqrt(1 / len(yes) + 1 / len(no) + mu**2 / (2 * m)),
        mu_bound=max(mu_bound(m, r, c, level) for r, c in guesses),
        mu_bound_if_independent=max(0.0, *(float(ndtri(right) - ndtri(wrong)) for right, wrong in rates)),
        mu_refuted=any(inverse(right) > wrong for right, wrong in rates),
        checks=tuple(checks),
        errors=errors(yes, no),
    )


def level_of_checks(confidence: float, count: int) -> float:
    """The level of each of `count` checks, which together have half of the error probability."""
    return (1 - confidence) / (2 * count)


def guessed(scores: Array, included: Mask, r: int) -> tuple[int, int]:
    """(r, number of right guesses): the r/2 highest scores are guessed as included, the r/2 lowest as not."""
    half = r // 2
    order = np.argsort(scores, kind="stable")
    return 2 * half, int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def _rates(scores: Array, included: Mask, level: float) -> list[tuple[float, float]]:
    """(lower bound on the true positive rate, upper bound on the false positive rate) of guessing the highest scores as
    included, or the lowest as not (Clopper & Pearson 1934)."""
    ascending = np.argsort(scores, kind="stable")
    found = []
    for part in PARTS:
        for side, order in ((included, ascending[::-1]), (~included, ascending)):
            chosen = side[order[: len(scores) // part // 2]]
            right, wrong, positives, negatives = (int(mask.sum()) for mask in (chosen, ~chosen, side, ~side))
            low = float(beta.ppf(level / 2, right, positives - right + 1)) if right else 0.0
            high = float(beta.ppf(1 - level / 2, wrong + 1, negatives - wrong)) if wrong < negatives else 1.0
            found.append((low, high))
    return found


def errors(yes: Array, no: Array) -> Array:
    """(type I, type II) errors of guessing scores above a threshold as included, for 201 thresholds."""
    thresholds = np.quantile(np.concatenate([yes, no]), np.linspace(0, 1, 201))
    return np.array([[(no > t).mean(), (yes <= t).mean()] for t in thresholds])


def _largest(holds: Callable[[float], bool]) -> float:
    """A lower bound on the largest number for which a property holds that holds for all smaller numbers."""
    low, high = 0.0, 1.0
    while high < _MAX_EPSILON and holds(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest_level(m: int, r: int, c: int, inverse: Inverse) -> float:
    """The smallest level at which f-DP is refuted, rounded up by at most a factor of e^0.1."""
    low, high = -70.0, 0.0  # logarithms
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(m, r, c, inverse, math.exp(middle)) else (middle, high)
    return math.exp(high)
