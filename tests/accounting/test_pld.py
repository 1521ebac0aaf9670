"""Composed privacy losses far out in the tail, and over many rounds."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm
from test_accountants import exact_gaussian, ledger

from dpexp.accounting import pld, pld_numerics
from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import PoissonPair
from dpexp.accounting.pld_numerics import Convolution
from tests.extended import extended, poisson


@pytest.mark.parametrize(
    "z, q, rounds, d, h, width",
    [
        (1.0, 1e-4, 5000, 1e-11, 2e-5, 1.5),  # one lucky sample makes the tail
        (0.5, 1e-3, 100, 1e-12, 1e-4, 30.0),
        (3.0, 0.01, 100_000, 1e-12, 1e-4, 20.0),
        (2.0, 0.3, 3, 1e-9, 1e-4, 10.0),
    ],
)
def test_far_tails_against_extended_precision(z, q, rounds, d, h, width):
    run = ledger(z, q, rounds)
    expected = extended(poisson(z, q, rounds, d, h), rounds, d, width)
    assert epsilon(run, d) == pytest.approx(expected, rel=5e-4)
    assert delta(run, epsilon(run, d)) == pytest.approx(d, rel=1e-3)


@pytest.mark.parametrize("mu", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize("d", [0.3, 1e-5, 1e-60])
def test_the_gaussian_mechanism_at_every_delta(mu, d):
    """As one round, and as a thousand."""
    if norm.cdf(mu / 2) - norm.cdf(-mu / 2) <= d:
        return
    exact = exact_gaussian(mu, d)
    for rounds in (1, 1000):
        composed = pld.ComposedLoss(
            [PoissonPair(math.sqrt(rounds) / mu, 1.0, 0.5)], np.array([float(rounds)]), GaussianMechanism(1e3)
        )
        assert exact * (1 - 1e-9) <= composed.epsilon(d) <= exact * (1 + 3e-4)
        assert d * (1 - 1e-6) <= composed.delta(exact) <= d * (1 + 3e-3 * max(1, math.log(1 / d)))


def test_delta_down_to_next_to_nothing():
    run = ledger(1.0, 0.01, 1000)
    deltas = [delta(run, e) for e in np.linspace(0, 60, 25)]
    assert all(0 < b < a for a, b in itertools.pairwise(deltas)) and deltas[-1] < 1e-200
    assert epsilon(run, deltas[-1]) == pytest.approx(60, rel=1e-6)


def test_the_error_that_a_convolution_states_holds():
    """Against polynomial powers in Python's whole numbers."""
    random = np.random.default_rng(0)
    weights = random.integers(1, 1000, 6).astype(object)
    exact = np.array([1], dtype=object)
    for _ in range(40):
        exact = np.convolve(exact, weights)
    total = sum(weights) ** 40
    exact = np.array([float(value / total) if value else 0.0 for value in exact])
    for few in (0.0, 1.0):  # by transforms, and by sums
        convolution = Convolution(1024)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pld_numerics, "_SPARSE", few)
            convolution.add([3], [(weights / sum(weights)).astype(float)], np.array([40.0]))
        mass, error = convolution.masses(120)
        off = float(np.linalg.norm(mass[: len(exact)] - exact))
        assert off <= error < 1e-11


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("z", [0.03, 1e-3, 1e-5])
def test_with_next_to_no_noise_only_the_number_of_samples_counts(z, accountant):
    """Who also sees which samples have the record, k of them, has δ = Σ P(k) δ_k. All that this adds to a round's loss
    is at most -log q, or -log(1-q)."""
    q, rounds, d = 0.01, 300, 1e-5
    k = np.arange(1, 40)
    weights, hidden = binom.pmf(k, rounds, q), -k * math.log(q) - (rounds - k) * math.log1p(-q)
    mechanisms = [GaussianMechanism(math.sqrt(one) / z) for one in k]

    def seen(epsilon, lost):
        return sum(w * m.delta(epsilon + own) for w, m, own in zip(weights, mechanisms, lost, strict=True))

    low = brentq(lambda e: seen(e, hidden) - d, 0.1 / z**2, 30 / z**2)
    high = brentq(lambda e: seen(e, 0 * hidden) - d, 0.1 / z**2, 30 / z**2)
    found = epsilon(ledger(z, q, rounds), d, accountant)
    assert low * (1 - 1e-8) <= found <= high * (1 + (2e-4 if accountant == "pld" else 0.2))
