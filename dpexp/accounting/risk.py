"""Privacy as attack risk and as Gaussian DP, and the privacy targets of calibration.

All figures are upper bounds. They follow from the accountant's whole curve δ(ε), not from one
(ε, δ), which would allow for far better attacks than exist. Calibrating to an attack risk needs less noise than
calibrating to an (ε, δ) that implies it (Kulynych et al. 2024, arXiv 2407.02191).

A test for one record has a true positive rate, TPR = 1 - type II error, and a false positive rate, FPR = α = type I
error. If (ε, δ)-DP holds for several (ε, δ), then the type II error of any test is at least the trade-off function

    f(α) = max over them of 0, 1 - δ - e^ε α, e^(-ε)(1 - δ - α)     (Dong, Roth & Su 2022, proposition 2.12)

f is symmetric about β = α. It is a valid bound for any set of (ε, δ); more of them make it tighter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr, ndtri

from dpexp.accounting.accountants import Guarantee, epsilon, guarantee
from dpexp.accounting.composition import Array, GaussianMechanism
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.pld import ComposedLoss
from dpexp.accounting.releases import releases
from dpexp.accounting.rounding import up

FALSE_POSITIVES = (0.001, 0.01)
POINTS = 200
TAIL = 1e-10  # a δ below which curves are not compared
_LOWEST_U = -6.0  # δ = Φ(6) bounds nothing
_MAX_EXPONENT = 700.0  # e^700 is finite


def tpr_at(fpr: float) -> str:
    """The name of the figure for the TPR at an FPR."""
    return f"tpr_at_fpr_{fpr:g}"


FIGURES = ("mu", "advantage", *map(tpr_at, FALSE_POSITIVES))


@dataclass(frozen=True)
class Risk:
    """The risk of a record in the data of a ledger's runs: bounds on any test for one record.

    Attributes:
        advantage: the largest TPR - FPR of any test.
        tpr: the largest TPR at each FPR of FALSE_POSITIVES.
        mu: the smallest μ for which the ledger is μ-Gaussian DP, up to a probability of 1e-10 (see `gaussian_bound`);
            infinite if the accountant shows none.
    """

    advantage: float
    tpr: dict[float, float]
    mu: float

    def figures(self) -> dict[str, float]:
        """The figures by the names of FIGURES; without μ if it is infinite."""
        values = (self.mu, self.advantage, *self.tpr.values())
        return {name: value for name, value in zip(FIGURES, values, strict=True) if math.isfinite(value)}


def in_words(found: Mapping[str, float], unit: str = "record") -> str:
    """The limits of membership tests, without symbols.

    Args:
        found: as `Risk.figures` returns it.
        unit: the privacy unit.
    """
    more = f"at most {up(100 * found['advantage'], 3)} percentage points more often than by guessing"
    rates = (f"at most {up(100 * found[tpr_at(fpr)], 3)} % at {100 * fpr:g} % false alarms" for fpr in FALSE_POSITIVES)
    return f"an attacker who knows all other data finds a {unit} that was in the data {more}: {', '.join(rates)}"


def gaussian(found: Mapping[str, float]) -> str:
    """The text about μ that follows ε; "" if `Risk.figures` has no μ."""
    return f"; Gaussian DP with μ = {up(found['mu'], 4)}, up to a probability of {TAIL:g}" if "mu" in found else ""


def risk(ledger: Ledger, accountant: str = "pld") -> Risk:
    """The risk of a ledger by an accountant.

    Raises:
        ConfigError: as for `accountants.epsilon`.
    """
    if not ledger.rounds:
        return Risk(0.0, {fpr: fpr for fpr in FALSE_POSITIVES}, 0.0)
    tpr = {fpr: largest_tpr(ledger, fpr, accountant) for fpr in FALSE_POSITIVES}
    mu = gaussian_bound(guarantee(ledger, accountant, use_cache=False))
    return Risk(largest_advantage(ledger, accountant), tpr, mu)


def largest_advantage(ledger: Ledger, accountant: str = "pld") -> float:
    """An upper bound on TPR - FPR of any test for one record."""
    if not ledger.rounds:
        return 0.0
    return min(advantage(guarantee(ledger, accountant, use_cache=False)), _ever_sampled(ledger, accountant))


def largest_tpr(ledger: Ledger, fpr: float, accountant: str = "pld") -> float:
    """An upper bound on the TPR of any test for one record with this FPR."""
    if not ledger.rounds:
        return fpr
    found = guarantee(ledger, accountant, use_cache=False)
    return min(true_positives(found, fpr), fpr + _ever_sampled(ledger, accountant))


def _ever_sampled(ledger: Ledger, accountant: str) -> float:
    """The probability that a record is in any sample, 1 - Π(1 - q). It bounds the advantage, since releases do not
    depend on a record that is in no sample."""
    never = math.fsum(
        count * math.log1p(-release.q) if release.q < 1 else -math.inf
        for release, count in releases(ledger, accountant).items()
    )
    return min(1.0, -math.expm1(never) * (1 + 1e-12))


def type_two_errors(ledger: Ledger, type_one: Sequence[float], accountant: str = "pld") -> Array:
    """Lower bounds [K] on the type II error of any test with type I error `type_one` [K].

    The test decides from all releases which of two neighbouring data sets they were computed on.
    """
    alpha = np.asarray(type_one, dtype=float)
    if not ledger.rounds:
        return 1 - alpha
    found = guarantee(ledger, accountant)
    if isinstance(found, GaussianMechanism):
        return ndtr(-ndtri(alpha) - found.mu)
    epsilon, delta = (each[:, None] for each in lines(found))
    steep = np.exp(np.minimum(epsilon, _MAX_EXPONENT)) * alpha
    best = np.maximum(1 - delta - steep, np.exp(-epsilon) * (1 - delta - alpha)).max(axis=0)
    return np.maximum(best, 0)


def lines(privacy: Guarantee) -> tuple[Array, Array]:
    """Increasing ε [K] from 0 and decreasing δ [K], for each of which (ε, δ)-DP holds. The last δ is at most TAIL,
    unless that needs an infinite ε."""
    at, where = _parametrization(privacy)
    found = np.array([at(t) for t in where])
    if len(found) > 1 and math.isfinite(found[-1, 0]):
        found[-1, 1] = min(found[-1, 1], TAIL)
    found = found[np.isfinite(found[:, 0])]
    epsilon, delta = np.maximum.accumulate(found[:, 0]), np.minimum.accumulate(found[:, 1])
    last = np.append(np.diff(epsilon) > 0, True)
    epsilon, delta = epsilon[last], delta[last]
    equal = (1 - delta) * np.exp(-epsilon) / (1 + np.exp(-epsilon))  # both errors of a test, where they are equal
    least = int(np.argmax(equal))
    below = slice(least + (epsilon[least] == 0), None)
    return _convex(np.append(0.0, epsilon[below]), np.append(1 - 2 * equal[least], delta[below]))


def _convex(epsilon: Array, delta: Array) -> tuple[Array, Array]:
    """Removes points that others imply: δ is convex in e^ε."""
    kept: list[int] = []
    slopes: list[float] = []  # -dδ/de^ε from each to the next
    for k in range(len(epsilon)):
        while kept:
            j = kept[-1]
            gap = min(epsilon[k] - epsilon[j], _MAX_EXPONENT)
            slope = math.exp(-epsilon[j]) * (delta[j] - delta[k]) / math.expm1(gap)
            if not slopes or slope <= slopes[-1]:
                slopes.append(slope)
                break
            kept.pop()
            slopes.pop()
        kept.append(k)
    return epsilon[kept], delta[kept]


def true_positives(privacy: Guarantee, alpha: float) -> float:
    """An upper bound on the TPR of any test with FPR α: 1 - f(α), minimized over all (ε, δ), not only those of `lines`.

    Each bound is a convex function of e^ε, so that it has one minimum.
    """
    at, where = _parametrization(privacy)

    def steep(t: float) -> float:
        epsilon, delta = at(t)
        return delta + math.exp(min(epsilon, _MAX_EXPONENT)) * alpha

    def flat(t: float) -> float:
        epsilon, delta = at(t)
        return 1 - math.exp(-epsilon) * (1 - delta - alpha)

    return min(1.0, steep(where[0]), _least(steep, where), _least(flat, where))


def advantage(privacy: Guarantee) -> float:
    """An upper bound on TPR - FPR of any test: δ(0) (Kulynych et al. 2024, arXiv 2407.02191, section 2).

    For accountants that are not tight at ε = 0 it is the smallest (e^ε - 1 + 2δ)/(e^ε + 1).
    """
    if isinstance(privacy, ComposedLoss | GaussianMechanism):
        return privacy.delta(0.0)
    at, where = _parametrization(privacy)

    def bound(t: float) -> float:
        epsilon, delta = at(t)
        return math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, _MAX_EXPONENT)))

    return min(1.0, _least(bound, where))


def gaussian_bound(privacy: Guarantee) -> float:
    """The smallest μ such that G_μ(α) - 1e-10 <= f(α) for every α, with the trade-off function of Gaussian DP,
    G_μ(α) = Φ(Φ^-1(1-α) - μ). Equivalently, δ(ε) <= δ_μ(ε) + 1e-10 for every ε.

    Without the tolerance, sampling would not reduce μ at all: a record that was in every sample is as easy to detect as
    without sampling. f lies above the polygon bounded by `lines`. G_μ is convex, so that it lies below the polygon if
    it lies below each corner; corners with α <= β suffice, since both curves are symmetric (Gomez et al. 2025, arXiv
    2503.10945).
    """
    if isinstance(privacy, GaussianMechanism):
        return privacy.mu
    epsilon, delta = lines(privacy)
    with np.errstate(over="ignore"):
        step = -np.diff(delta) / np.expm1(np.diff(epsilon))
    alpha = np.append((1 - delta[0]) / 2, np.exp(-epsilon[:-1]) * step)
    found = np.append((1 + delta[0]) / 2, delta[:-1] + step)
    found -= TAIL
    with np.errstate(invalid="ignore"):
        needed = np.where(found > 0, ndtri(np.clip(found, 0, 1)) - ndtri(alpha), 0.0)
    mu = float(max(needed.max(), 0.0)) * (1 + 1e-12) if delta[-1] <= TAIL else math.inf
    return min(mu, privacy.unsampled.mu) if isinstance(privacy, ComposedLoss) else mu


def _least(bound: Callable[[float], float], where: Array) -> float:
    """The minimum from the second argument on: δ at an ε close to 0 takes seconds."""
    if len(where) < 2:
        return math.inf
    return float(minimize_scalar(bound, bounds=(where[1], where[-1]), method="bounded").fun)


def _parametrization(privacy: Guarantee) -> tuple[Callable[[float], tuple[float, float]], Array]:
    """A function from a parameter to (ε, δ), and the parameters to evaluate."""
    if not isinstance(privacy, ComposedLoss | GaussianMechanism):
        where = np.linspace(_LOWEST_U, float(-ndtri(TAIL)), POINTS)
        return lambda u: (privacy.epsilon(float(ndtr(-u))), float(ndtr(-u))), where
    largest, mu = privacy.epsilon(TAIL), -2 * float(ndtri((1 - privacy.delta(0.0)) / 2))
    if not math.isfinite(largest) or largest == 0:
        where = np.zeros(1)
    else:
        body = min(largest, mu * (6 + mu / 2))  # beyond it, a Gaussian mechanism with this μ has a negligible δ
        where = np.union1d(np.linspace(0, body, POINTS), np.linspace(body, largest, POINTS // 2))
    return lambda epsilon: (float(epsilon), privacy.delta(float(epsilon))), where


@dataclass(frozen=True)
class Epsilon:
    """ε at δ.

    Each target has a text, its configuration; the name and `limit` of its cost; the `cost` of a ledger, and a cost as
    `figures` to show; and the μ of Gaussian DP whose cost is the limit. `plan.options.Target` checks its values.
    """

    limit: float
    delta: float
    name = "epsilon"

    def __str__(self) -> str:
        return f"privacy.epsilon={up(self.limit, 6)} at privacy.delta={up(self.delta, 6)}"

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return epsilon(ledger, self.delta, accountant)

    def estimate(self, ledger: Ledger) -> float:
        """A quick approximation of the cost by `pld`; no bound."""
        found = guarantee(ledger)
        return found.estimate(self.delta) if isinstance(found, ComposedLoss) else found.epsilon(self.delta)

    def figures(self, cost: float) -> dict[str, float]:
        return {"ε": cost}

    @property
    def mu(self) -> float:
        def excess(log_mu: float) -> float:
            return GaussianMechanism(math.exp(log_mu)).delta(self.limit) - self.delta

        low, high = min(1e-12, self.delta), max(1e6, 2 * math.sqrt(self.limit))
        return math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-12))


@dataclass(frozen=True)
class MaxAdvantage:
    """The largest TPR - FPR of any test for one record."""

    limit: float
    name = "advantage"

    def __str__(self) -> str:
        return f"privacy.max_advantage={self.limit:g}"

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return largest_advantage(ledger, accountant)

    def figures(self, cost: float) -> dict[str, float]:
        return {"advantage": cost}

    @property
    def mu(self) -> float:
        return 2 * float(ndtri((1 + self.limit) / 2))


@dataclass(frozen=True)
class MaxTpr:
    """The largest TPR at each FPR. The cost is the largest of (TPR - FPR) / (allowed TPR - FPR)."""

    rates: Mapping[float, float]
    name = "tpr"
    limit = 1.0

    def __str__(self) -> str:
        return f"privacy.max_tpr_at_fpr={{{', '.join(f'{fpr:g}: {tpr:g}' for fpr, tpr in self.rates.items())}}}"

    def cost(self, ledger: Ledger, accountant: str) -> float:
        return max((largest_tpr(ledger, fpr, accountant) - fpr) / (tpr - fpr) for fpr, tpr in self.rates.items())

    def figures(self, cost: float) -> dict[str, float]:
        return {f"TPR at FPR {fpr:g}": min(fpr + cost * (tpr - fpr), 1.0) for fpr, tpr in self.rates.items()}

    @property
    def mu(self) -> float:
        return min(float(ndtri(tpr) - ndtri(fpr)) for fpr, tpr in self.rates.items())


PrivacyTarget = Epsilon | MaxAdvantage | MaxTpr
