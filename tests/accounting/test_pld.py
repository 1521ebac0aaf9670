"""Composed privacy losses far out in the tail, and over many rounds."""

import itertools
import math

import numpy as np
import pytest
from runs import exact_gaussian, ledger
from scipy.optimize import brentq
from scipy.stats import binom

from dpexp.accounting import pld, pld_numerics
from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import PoissonPair
from tests.extended import extended, poisson


@pytest.mark.parametrize(
    "z, q, rounds, d, h, width",
    [
        (1.0, 1e-4, 5000, 1e-11, 2e-5, 1.5),  # one lucky sample makes the tail
        (3.0, 0.01, 100_000, 1e-12, 1e-4, 20.0),
        (2.0, 0.3, 3, 1e-9, 1e-4, 10.0),
    ],
)
def test_far_tails_against_extended_precision(z, q, rounds, d, h, width):
    run = ledger(z, q, rounds)
    found = epsilon(run, d)
    assert found == pytest.approx(extended(poisson(z, q, rounds, d, h), rounds, d, width), rel=5e-4)
    assert delta(run, found) == pytest.approx(d, rel=1e-3)


@pytest.mark.parametrize("rounds", [1, 1000])
@pytest.mark.parametrize("mu, d", [(1e-3, 1e-5), (1e-3, 1e-60), *itertools.product((1.0, 60.0), (0.3, 1e-5, 1e-60))])
def test_the_gaussian_mechanism_at_every_delta(mu, d, rounds):
    """As one round, and as a thousand."""
    exact = exact_gaussian(mu, d)
    pair = PoissonPair(math.sqrt(rounds) / mu, 1.0, 0.5)
    composed = pld.ComposedLoss([pair], np.array([float(rounds)]), GaussianMechanism(1e3))
    assert exact * (1 - 1e-9) <= composed.epsilon(d) <= exact * (1 + 3e-4)
    assert d * (1 - 1e-6) <= composed.delta(exact) <= d * (1 + 3e-3 * max(1, math.log(1 / d)))


def test_delta_down_to_next_to_nothing():
    run = ledger(1.0, 0.01, 1000)
    deltas = [delta(run, e) for e in np.linspace(0, 60, 9)]
    assert all(0 < b < a for a, b in itertools.pairwise(deltas)) and deltas[-1] < 1e-200
    assert epsilon(run, deltas[-1]) == pytest.approx(60, rel=1e-6)


@pytest.mark.parametrize("few", [0.0, 1.0])  # by transforms, and by sums
def test_the_error_that_a_convolution_states_holds(few, monkeypatch):
    """Against a polynomial's power in whole numbers: each coefficient has 1000 bits of one number."""
    weights = [*map(int, np.random.default_rng(0).integers(1, 1000, 6))]
    power = sum(weight << 1000 * k for k, weight in enumerate(weights)) ** 40
    exact = [(power >> 1000 * k) % 2**1000 / sum(weights) ** 40 for k in range(201)]
    convolution = pld_numerics.Convolution(1024)
    monkeypatch.setattr(pld_numerics, "_SPARSE", few)
    convolution.add([3], [np.array(weights) / sum(weights)], np.array([40.0]))
    mass, error = convolution.masses(120)
    assert np.linalg.norm(mass[:201] - exact) <= error < 1e-11


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("z", [0.03, 1e-5])
def test_with_next_to_no_noise_only_the_number_of_samples_counts(z, accountant):
    """Who also sees which samples have the record, k of them, has δ = Σ P(k) δ_k. All that this adds to a round's loss
    is at most -log q, or -log(1-q)."""
    q, rounds, d = 0.01, 300, 1e-5
    k = np.arange(1, 40)
    hidden = -k * math.log(q) - (rounds - k) * math.log1p(-q)

    def excess(epsilon, lost):
        seen = [GaussianMechanism(math.sqrt(one) / z).delta(epsilon + own) for one, own in zip(k, lost, strict=True)]
        return binom.pmf(k, rounds, q) @ seen - d

    low, high = (brentq(excess, 0.1 / z**2, 30 / z**2, (lost,)) for lost in (hidden, 0 * hidden))
    found = epsilon(ledger(z, q, rounds), d, accountant)
    assert low * (1 - 1e-8) <= found <= high * (1 + (2e-4 if accountant == "pld" else 0.2))
