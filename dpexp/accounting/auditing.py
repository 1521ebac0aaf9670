"""What an attacker got, beside what was claimed: audits with one run.

m canaries are each included by a fair coin. The attacker guesses the coins of r of them, those that it is surest of,
and is right c times. If so many right guesses are unlikely under a claim, the claim is refuted. An audit can refute a
claim; it can never prove one, since another attacker may do better.
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
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rdp import Array
from dpexp.accounting.tradeoff import lines

POWER = 0.95  # with which an error of the size that is told is found


@dataclass(frozen=True)
class Check:
    """One number, found and planned.

    Attributes:
        limit: of the true number, at the level of the test; lower, but of noise, of which it is an upper one.
        detectable: the number nearest to the plan that would have been refuted with probability `POWER`.
    """

    name: str
    planned: float
    found: float
    limit: float
    detectable: float
    refuted: bool

    def words(self) -> str:
        """What is refuted, in words."""
        side = "at most" if self.limit < self.planned else "at least"
        return f"the {self.name} is {side} {self.limit:.4g}, and {self.planned:.4g} was planned"


def noise_scale(noise: Array, level: float) -> Check:
    """The standard deviation of noise [P, D] that is planned to be independent standard normal: by its sum of squares,
    which is χ² with PD degrees of freedom. Refuted if smaller."""
    squares, count = float((noise.astype(np.float64) ** 2).sum()), noise.size
    found, limit = math.sqrt(squares / count), math.sqrt(squares / chi2.ppf(level, count))
    detectable = math.sqrt(chi2.ppf(level, count) / chi2.ppf(POWER, count))
    return Check("noise", 1.0, found, limit, detectable, limit < 1)


def noise_reuse(noise: Array, level: float) -> Check:
    """The largest correlation of two of P rows of noise [P, D] that is planned to be independent: t = r √((D-2)/(1-r²))
    is Student's with D - 2 degrees of freedom for two normal rows, and the level is shared out among the pairs."""
    rows, places = noise.shape
    r = np.atleast_2d(np.corrcoef(noise.astype(np.float64)))
    found = float(np.abs(np.nan_to_num(r[np.triu_indices(rows, 1)])).max(initial=0.0))
    quantile = student.isf(level / max(1, rows * (rows - 1)), places - 2)  # of both signs
    most = float(quantile / math.sqrt(places - 2 + quantile**2))
    reach = norm.ppf(POWER) / math.sqrt(places)
    return Check("correlation of noise", 0.0, found, max(0.0, found - most), most + reach, found > most)


def rate_of_inclusion(drawn: int, chances: int, q: float, level: float) -> Check:
    """The rate at which records are in samples, in units of q: `drawn` of as many `chances`, with the lower limit of
    Clopper & Pearson (1934). It holds also where samples depend on one another as the policies say: of indicators with
    mean q, fixed sizes and turns vary less than independent ones (Hoeffding 1956, 1963). Refuted if larger."""
    limit = float(beta.ppf(level, drawn, chances - drawn + 1)) if drawn else 0.0
    enough = int(binom.isf(level, chances, q)) + 1
    detectable = float(beta.ppf(POWER, enough, chances - enough + 1)) if enough <= chances else 1.0
    return Check("rate of inclusion", 1.0, drawn / chances / q, limit / q, detectable / q, limit > q)


def contribution(name: str, values: NDArray[np.float64], error: float, level: float) -> Check:
    """What canaries contribute, in units of the bound: the mean of `values`, each with noise of standard deviation
    `error`. Refuted if larger than 1."""
    found, error = float(values.mean()), error / math.sqrt(len(values))
    limit, detectable = found - norm.isf(level) * error, 1 + (norm.isf(level) + norm.ppf(POWER)) * error
    return Check(name, 1.0, found, limit, detectable, limit > 1)


def largest_contribution(values: NDArray[np.float64], error: float, level: float) -> Check:
    """The largest of `values`, as `contribution` has them: one record that counts twice is found."""
    reach = float(norm.isf(level / len(values))) * error
    found = float(values.max())
    return Check(
        "largest contribution", 1.0, found, found - reach, 1 + reach + norm.ppf(POWER) * error, found - reach > 1
    )


PARTS = (2, 8, 32)  # of m canaries, guessed are m/2, m/8 and m/32: settled before the scores are seen
_LARGEST = 100.0  # ε, or μ, at which a search ends
_STEEPEST = 700.0  # e^700 is still a number


def p_value(m: int, r: int, c: int, epsilon: float, delta: float) -> float:
    """How likely at least c of r guesses are right if what is audited is (ε, δ)-DP, at most.

    P[C >= c] <= P[B >= c] + 2mδ max_i P[c > B >= c - i]/i with B ~ Binomial(r, e^ε/(1 + e^ε)) (Steinke, Nasr &
    Jagielski 2023, arXiv 2305.08846, theorem 5.2, as their appendix D computes it).
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(c - 1, -1, -1), r, accuracy))
    worst = float((below / np.arange(1, c + 1)).max()) if c else 0.0
    return min(1.0, float(binom.sf(c - 1, r, accuracy)) + 2 * m * delta * worst)


def epsilon_bound(m: int, r: int, c: int, delta: float, level: float) -> float:
    """An ε, nearly the largest, for which (ε, δ)-DP is refuted at the level; 0 if there is none. What is (ε, δ)-DP is
    so for every larger ε, so that a smaller one is refuted with it."""
    return _largest(lambda e: p_value(m, r, c, e, delta) < level)


Mask = NDArray[np.bool_]
Inverse = Callable[[float], float]  # y -> the smallest x with 1 - f(x) >= y


def refuted(m: int, r: int, c: int, inverse: Inverse, level: float) -> bool:
    """Whether at least c of r guesses being right has a probability below `level` for whatever is f-DP.

    Let p_i be the probability that i guesses are right, a_j = Σ_{i>=j} p_i i/m and b_j = Σ_{i>=j} p_i (r-i)/m. For a
    random canary, "it is guessed right, and more than j are" turns into "it is guessed wrong, and at least j are right"
    when its coin is flipped, so that a_{j+1} <= 1 - f(b_j) (Mahloujifar, Melis & Chaudhuri 2024, arXiv 2410.22235,
    theorem 9). From a tail of the level's size at c, that gives the least a_0 + b_0, which is r/m (algorithm 3 there).

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
    """A μ, nearly the largest, for which μ-Gaussian DP is refuted at the level."""
    return _largest(lambda mu: refuted(m, r, c, lambda y: float(ndtr(ndtri(y) - mu)), level))


def inverse_of(ledger: Ledger, accountant: str = "pld") -> Inverse:
    """Of 1 - f, where f is what a ledger claims: the largest of the lines 1 - δ(ε) - e^ε x and e^-ε (1 - δ(ε) - x)
    (Dong, Roth & Su 2022, proposition 2.12). f is its own inverse, so that 1 - f(x) >= y where x >= f(1 - y)."""
    epsilon, delta = lines(guarantee(ledger, accountant)) if ledger.rounds else (np.zeros(1), np.zeros(1))
    curve = [(e, d) for e, d in zip(epsilon.tolist(), delta.tolist(), strict=True) if e < _STEEPEST]
    touching = [(math.exp(e), 1 - d) for e, d in reversed(curve)]
    touching += [(math.exp(-e), math.exp(-e) * (1 - d)) for e, d in curve[1:]]
    crossings = [(high - low) / (steep - flat) for (steep, high), (flat, low) in pairwise(touching)]
    crossings = np.maximum.accumulate(crossings).tolist()

    def inverse(y: float) -> float:
        slope, height = touching[bisect_right(crossings, 1 - y)]  # any line is a bound; this one is the highest
        return max(0.0, height - slope * (1 - y))

    return inverse


class LowerBound(NamedTuple):
    """At one δ: the ε claimed, and lower bounds on the true one, of which the second supposes independent canaries, and
    so is no less than the first, which supposes nothing."""

    delta: float
    claimed: float
    found: float
    if_independent: float


@dataclass(frozen=True)
class Audit:
    """What came of an audit.

    Attributes:
        canaries: m; included: how many of them were.
        right: how many coins are guessed right when all are guessed.
        tests: among how many the error probability is shared out, so that all bounds hold at once at `confidence`.
        p: of the whole claimed trade-off curve, times `tests`: below 1 - confidence, it is refuted.
        p_independent: the same of δ(0) alone: no more than (1 + δ(0))/2 of all coins can be guessed right on average.
            It supposes independent canaries: that no one's score tells of another's coin, as none can where noise and
            samples are independent. Then it is far sharper.
        mu_claimed: of the Gaussian DP that is as hard to tell at even odds: δ(0) = 2Φ(μ/2) - 1. Exact where nothing is
            amplified by sampling.
        mu_estimate: the distance of the scores of canaries that were included and that were not, in standard
            deviations.
        mu_error: its standard error; mu_bound: a lower bound on μ, at `confidence`; mu_bound_if_independent: the same
            if canaries are independent, by the rates of right and false alarms (Nasr et al. 2023, arXiv 2302.07956).
        mu_refuted: the claimed trade-off curve does not allow these rates.
        checks: of numbers of the plan, by the releases.
        errors: (type I, type II) of the attacker, by threshold: [K, 2].
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
        """Its numbers, by name."""
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
                f"epsilon_claimed/{at}": bound.claimed,
                f"epsilon_lower_bound/{at}": bound.found,
                f"epsilon_lower_bound_if_independent/{at}": bound.if_independent,
            }
        return found

    @property
    def exceeded(self) -> list[str]:
        """In words, what was claimed and is refuted."""
        found = [
            f"at δ = {bound.delta:g} ε is at least {value:.4g}{supposed}, and {bound.claimed:.4g} was claimed"
            for bound in self.bounds
            for value, supposed in ((bound.found, ""), (bound.if_independent, " if canaries are independent"))
            if value > bound.claimed
        ]
        if min(self.p, self.p_independent) < 1 - self.confidence or self.mu_refuted:
            found.append(
                f"the attacker is right more often than the claimed trade-off allows (p = {self.p:.2g}, or if canaries "
                f"are independent {self.p_independent:.2g}; μ = {self.mu_estimate:.3g} was found, at "
                f"least {self.mu_bound_if_independent:.3g} if they are, and {self.mu_claimed:.3g} claimed)"
            )
        return found + [check.words() for check in self.checks if check.refuted]


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
    """Judges a ledger's claim by what an attacker scored.

    Args:
        scores: [m] of the canaries; included: [m], by fair coins that the attacker did not see.
        ledger: of the release.
        middle: the score above which a canary is taken for included when all are guessed.
        checks: which have half of the error probability, as `level_of_checks` shares it out.
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
    """Of each of so many: half of the error probability together."""
    return (1 - confidence) / (2 * count)


def guessed(scores: Array, included: Mask, r: int) -> tuple[int, int]:
    """(r, how many are right), of the r/2 highest scores taken for included and the r/2 lowest for not."""
    half = r // 2
    order = np.argsort(scores, kind="stable")
    return 2 * half, int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def _rates(scores: Array, included: Mask, level: float) -> list[tuple[float, float]]:
    """For the highest and the lowest scores, as many as are guessed: at least how likely a canary of that side is among
    them, and at most how likely one of the other side is (Clopper & Pearson 1934)."""
    ascending = np.argsort(scores, kind="stable")
    found = []
    for part in PARTS:
        for side, order in ((included, ascending[::-1]), (~included, ascending)):
            chosen = side[order[: len(scores) // part // 2]]
            right, wrong, of, others = (int(some.sum()) for some in (chosen, ~chosen, side, ~side))
            low = float(beta.ppf(level / 2, right, of - right + 1)) if right else 0.0
            high = float(beta.ppf(1 - level / 2, wrong + 1, others - wrong)) if wrong < others else 1.0
            found.append((low, high))
    return found


def errors(yes: Array, no: Array) -> Array:
    """(type I, type II) of whoever takes a canary above a threshold for included, for 201 thresholds."""
    thresholds = np.quantile(np.concatenate([yes, no]), np.linspace(0, 1, 201))
    return np.array([[(no > t).mean(), (yes <= t).mean()] for t in thresholds])


def _largest(holds: Callable[[float], bool]) -> float:
    """Where a property that holds for small numbers ends, from below."""
    low, high = 0.0, 1.0
    while high < _LARGEST and holds(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest_level(m: int, r: int, c: int, inverse: Inverse) -> float:
    """The smallest level at which f-DP is refuted, within a tenth, from above."""
    low, high = -70.0, 0.0  # its logarithm
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(m, r, c, inverse, math.exp(middle)) else (middle, high)
    return math.exp(high)
