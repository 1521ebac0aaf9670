"""Audits with one run: tests of a privacy claim by an attacker's guesses, and of a plan by its releases.

Each of m canaries is included by a fair coin. The attacker guesses the coins of the r canaries that it is surest of,
and c guesses are right. If so many right guesses are unlikely under μ-Gaussian DP, this μ is refuted. An audit can
refute a claim but never prove it, since another attacker may do better.

A `Check` tests one number of the plan, such as the noise's standard deviation, at a level: if the plan is followed, it
is refuted with at most that probability; counts are never refuted then.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, nct, norm
from scipy.stats import t as student

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.composition import Array, GaussianMechanism
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.rounding import down, up

Mask = NDArray[np.bool_]
Inverse = Callable[[float], float]  # y -> the smallest x with 1 - f(x) >= y

POWER = 0.95  # the probability with which an error of the size `Check.detectable` is found
PARTS = (2, 8, 32)  # the coins of m/2, m/8 and m/32 canaries are guessed: fixed before the scores are seen
_MAX_MU = 100.0  # the largest μ that is searched
_MAX_DISTANCE = 1e6


@dataclass(frozen=True)
class Check:
    """A test of one number of the plan.

    Attributes:
        limit: a confidence limit of the true number, at the level of the test: a lower one, except for the noise, for
            which it is an upper one.
        detectable: the number closest to the plan that would have been refuted with probability `POWER`.
        said: the message, if it is a count.
    """

    name: str
    planned: float
    found: float
    limit: float
    detectable: float
    refuted: bool
    said: str = ""

    def message(self) -> str:
        """What is refuted."""
        if self.said:
            return self.said
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


def contribution(name: str, found: float, error: float, level: float) -> Check:
    """Tests a canary's contribution in units of the clip norm, found with normal noise of standard deviation `error`.
    Refuted if it is larger than 1."""
    margin = float(norm.isf(level)) * error
    return Check(name, 1.0, found, found - margin, 1 + margin + norm.ppf(POWER) * error, found - margin > 1)


def participations(found: int, planned: int) -> Check:
    """Tests in how many rounds of an epoch a canary was, at most. Refuted if there are more than `planned`."""
    said = f"a record was in {found} rounds of an epoch, and at most {planned} were planned"
    return _counted("rounds of an epoch", found, planned, said)


def releases(seen: Mapping[str, int], ledger: Ledger) -> Check:
    """Tests the number of releases of the group of which the fewest are in the ledger. Refuted if some are not.

    Args:
        seen: the releases of each group that left the mechanism, of trainings whose rounds the ledger has.
    """
    written = Counter(dict.fromkeys(seen, 0))
    for round_, count in ledger.training.items():
        written.update({query.name: count for query in round_.queries})
    name = max(seen, key=lambda name: seen[name] - written[name])
    said = f"{seen[name]} noisy sums of {name} were released, and the ledger has {written[name]}"
    return _counted("releases", seen[name], written[name], said)


def _counted(name: str, found: int, planned: int, said: str) -> Check:
    return Check(name, planned, found, found, planned + 1, found > planned, said)


def distance(yes: Array, no: Array, mu: float, level: float) -> Check:
    """Tests the distance between the mean scores of included and excluded canaries, in standard deviations: μ.

    The scores of a Gaussian release are independent normal ones, and Student's statistic has its noncentral
    distribution. Refuted if the distance is larger than `mu`.
    """
    m, root = len(yes) + len(no), math.sqrt(len(yes) * len(no) / (len(yes) + len(no)))
    spread = math.sqrt((((yes - yes.mean()) ** 2).sum() + ((no - no.mean()) ** 2).sum()) / (m - 2))
    found = min(float(yes.mean() - no.mean()) / max(spread, 1e-300), _MAX_DISTANCE)
    limit = _largest(lambda x: nct.sf(found * root, m - 2, x * root) < level)
    critical = nct.isf(level, m - 2, min(mu, _MAX_MU) * root)
    detectable = max(mu, _largest(lambda x: nct.sf(critical, m - 2, x * root) < POWER))
    return Check("distance of scores", mu, found, limit, detectable, limit > mu)


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


class LowerBound(NamedTuple):
    """At one δ, the ε claimed for the attacked rounds, and the ε of Gaussian DP with the audit's lower bound on μ."""

    delta: float
    claimed: float
    found: float


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        canaries: m, the number of canaries.
        right: the number of right guesses if all coins are guessed.
        mu_claimed: the μ of the attacked rounds, which are Gaussian mechanisms without amplification by sampling.
        mu_bound: a lower bound on μ, which supposes nothing of the canaries.
        bounds: what it says of ε.
        checks: tests of numbers of the plan, by the releases.
        confidence: with which the bound and all checks hold together.
        errors: (type I, type II) of the attacker, for each threshold: [K, 2].
    """

    canaries: int
    right: int
    mu_claimed: float
    mu_bound: float
    bounds: tuple[LowerBound, ...]
    checks: tuple[Check, ...]
    confidence: float
    errors: Array

    def summary(self) -> dict[str, float]:
        """The numbers by name, such as for MLflow."""
        found = {
            "canaries": self.canaries, "right": self.right, "mu_claimed": self.mu_claimed,
            "mu_at_least": self.mu_bound, "refuted": float(bool(self.exceeded)),
        }  # fmt: skip
        for check in self.checks:
            name = check.name.replace(" ", "_")
            found |= {name: check.found, f"{name}_detectable": check.detectable}
        for bound in self.bounds:
            at = f"delta_{bound.delta:g}"
            found |= {f"epsilon_of_attacked_rounds/{at}": bound.claimed, f"epsilon_lower_bound/{at}": bound.found}
        return found

    @property
    def exceeded(self) -> list[str]:
        """The refuted claims, as messages."""
        found = []
        if self.mu_bound > self.mu_claimed:
            found = [f"μ is at least {down(self.mu_bound, 4)}, and {up(self.mu_claimed, 4)} was claimed"]
        return found + [check.message() for check in self.checks if check.refuted]


def audit(
    scores: Array,
    included: Mask,
    ledger: Ledger,
    deltas: Sequence[float],
    level: float,
    checks: Sequence[Check],
    accountant: str = "pld",
    confidence: float = 0.95,
    middle: float = 0.5,
) -> Audit:
    """Tests the privacy claim of a ledger by an attacker's scores.

    Args:
        scores: [m], the attacker's score of each canary.
        included: [m], fair coins that the attacker did not see.
        ledger: of the releases that the attacker saw: Gaussian ones that all canaries may be in.
        deltas: the δ of the lower bounds on ε.
        level: of each check (see `level_of_checks`).
        checks: tests by the releases, to which that of the scores' distance is added.
        accountant: of the claimed ε.
        confidence: with which all bounds hold together.
        middle: the score above which a canary is guessed as included, if all coins are guessed.
    """
    m, sizes = len(scores), [len(scores) // part for part in PARTS if len(scores) // part >= 2]
    guesses = [guessed(scores, included, r) for r in sizes]
    bound = max(mu_bound(m, r, c, (1 - confidence) / (2 * len(guesses))) for r, c in guesses)
    mu = 2 * float(ndtri((1 + delta(ledger, 0.0)) / 2))
    yes, no = scores[included], scores[~included]
    return Audit(
        canaries=m,
        right=int(((scores > middle) == included).sum()),
        mu_claimed=mu,
        mu_bound=bound,
        bounds=tuple(
            LowerBound(d, epsilon(ledger, d, accountant), GaussianMechanism(bound).epsilon(d) if bound else 0.0)
            for d in deltas
        ),
        checks=(distance(yes, no, mu, level), *checks),
        confidence=confidence,
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


def errors(yes: Array, no: Array) -> Array:
    """(type I, type II) errors of guessing scores above a threshold as included, for 201 thresholds."""
    thresholds = np.quantile(np.concatenate([yes, no]), np.linspace(0, 1, 201))
    return np.array([[(no > t).mean(), (yes <= t).mean()] for t in thresholds])


def _largest(holds: Callable[[float], bool]) -> float:
    """A lower bound on the largest number for which a property holds that holds for all smaller numbers."""
    low, high = 0.0, 1.0
    while high < _MAX_MU and holds(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
