"""Dominating pairs: each against its definition, against dp-accounting, and against concrete neighbours."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from runs import composed, exact_gaussian, ledger
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.dominating_pairs import FixedSizePair, PoissonPair

SIZES = list(itertools.product((0.3, 6.0), (0.01, 0.95)))


def hockey_stick(z, p, q, alpha):
    """E_α of two mixtures {mean: weight} of Gaussians, the ratio of which rises: what both have above the x where
    p = αq. (By quadrature it is the same to five digits.)"""

    def excess(x):
        first, second = (logsumexp(norm.logpdf(x, [*one], z), b=[*one.values()]) for one in (p, q))
        return first - second - math.log(alpha)

    far = 40 * z + 50
    if excess(far) <= 0:
        return 0.0
    x = -far if excess(-far) >= 0 else brentq(excess, -far, far, xtol=1e-13)
    first, second = (norm.sf(x, [*one], z) @ [*one.values()] for one in (p, q))
    return first - alpha * second


def mixture(q, mean):
    return {0.0: 1 - q, mean: q} if 0 < q < 1 and mean else {mean * q: 1.0}


def on_grid(pair, h=1e-3):
    """δ at ε by the pair's discretised loss."""
    start, mass, infinite = pair.discretized(h, -math.inf, -60.0)
    losses = h * (start + np.arange(len(mass)))
    return lambda e: float(mass @ np.maximum(-np.expm1(np.minimum(e - losses, 0)), 0)) + infinite


@pytest.mark.parametrize("z, q", SIZES)
@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_a_sampled_pair_is_its_integral(z, q, a):
    found = on_grid(PoissonPair(z, q, a))
    for e in (-0.5, -0.003, 0.0, 0.004, 0.2, 1.0):
        exact = hockey_stick(z, mixture(q, a), mixture(q, a - 1), math.exp(e))
        assert exact - 1e-13 <= found(e) <= exact * (1 + 1e-3) + 1e-6


def exact_cell(z, q, a, lower, upper):
    """P's mass between two losses, and P's less e^lower times Q's, by extended precision."""
    z, q = mpmath.mpf(z), mpmath.mpf(q)

    def where(loss):
        if a == 0.5:
            return z**2 * (loss + 2 * mpmath.asinh(mpmath.sinh(loss / 2) * mpmath.exp(1 / (8 * z**2)) * (1 - q) / q))
        sign = 2 * a - 1
        ratio = 1 + mpmath.expm1(sign * loss) / q
        return sign * (z**2 * mpmath.log(ratio) + 0.5 if ratio > 0 else -mpmath.inf)

    def between(mean):
        low, high = ((where(loss) - mean) / z for loss in (lower, upper))
        low, high = (-high, -low) if low > 0 else (low, high)
        return mpmath.ncdf(high) - mpmath.ncdf(low)

    p, r = ((1 - q) * between(0) + q * between(mean) for mean in (a, a - 1))
    return p, p - mpmath.exp(lower) * r


@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_rounding_never_lowers_a_mass_or_a_loss(a):
    """Each cell has at least the mass, and at least the excess, that it has in extended precision."""
    random = np.random.default_rng(round(2 * a))
    with mpmath.workdps(60):
        for _ in range(20):
            z, q = math.exp(random.uniform(math.log(0.3), math.log(50))), min(0.99, 10 ** random.uniform(-6, 0))
            h = max(q / z * 10 ** random.uniform(-3, -0.5), math.log1p(q * math.expm1(22 / z)) / 30_000)
            first, mass, excess, _, _ = PoissonPair(z, q, a).cells(h, -300 * h, -random.uniform(20, 200))
            likely = random.choice(len(mass), 6, p=mass / mass.sum())
            for i in {0, len(mass) - 1, max(0, -first - 1), *random.integers(0, len(mass), 4), *likely}:
                exact_mass, exact_excess = exact_cell(
                    z, q, a, *(mpmath.mpf(float(h)) * int(first + i + side) for side in (0, 1))
                )
                assert mass[i] >= exact_mass - 1e-300 and excess[i] >= exact_excess - 1e-300
                assert mass[i] < 1e-3 or excess[i] - exact_excess <= 1e-6 * mass[i] * h


@pytest.mark.parametrize("z, q", SIZES)
def test_a_sample_of_fixed_size_has_the_profile_of_balle_et_al(z, q):
    """Above 0: q δ(ε') with e^ε' = 1 + (e^ε - 1)/q; below: 1 - α + α times the same at -ε. Theirs is at 2S = 1."""
    found, full = on_grid(FixedSizePair(z, q)), mixture(1.0, 0.0)
    for e in (0.0, 0.003, 0.1, 1.0):
        exact = q * hockey_stick(z, mixture(1.0, 1.0), full, 1 + math.expm1(e) / q)
        assert exact == pytest.approx(hockey_stick(z, mixture(q, 1.0), full, math.exp(e)), abs=1e-12)
        assert exact - 1e-13 <= found(e) <= exact * (1 + 1e-3) + 1e-6
        below = -math.expm1(-e) + math.exp(-e) * exact
        assert below - 1e-13 <= found(-e) <= below + 1e-5


@pytest.mark.parametrize("z, q, maximum, rounds, d", [(1.0, 0.02, 24, 100, 1e-4), (2.0, 0.5, 505, 30, 1e-9)])
def test_truncated_samples_against_dp_accounting(z, q, maximum, rounds, d):
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, q, maximum, z)
    theirs = composed(pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 2e-4), (event, rounds)).get_epsilon(d)
    found = epsilon(ledger(z, q, rounds, "truncated_poisson", "replace_null", maximum=maximum), d)
    full = exact_gaussian(2 * math.sqrt(rounds) / z, d)  # a record nulled may let another in
    assert found == pytest.approx(min(theirs, full), rel=1e-3)
    assert epsilon(ledger(z, q, rounds, "poisson", "replace_null"), d) <= found * (1 + 1e-4)


@pytest.mark.parametrize("maximum", [999, 5000])
def test_a_maximum_that_never_binds_costs_nothing(maximum):
    plain = epsilon(ledger(1.0, 0.1, 50, "poisson", "replace_null"), 1e-6)
    run = ledger(1.0, 0.1, 50, "truncated_poisson", "replace_null", maximum=maximum)
    assert epsilon(run, 1e-6) == pytest.approx(plain, rel=1e-12)
