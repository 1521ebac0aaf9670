"""dp-accounting's rounds, composed in extended precision: its own composition rounds to about 1e-12 of δ."""

import math

import numpy as np
from dp_accounting import pld
from scipy.fft import irfft, next_fast_len, rfft


def extended(one, rounds, delta, width):
    """ε at `delta` of `rounds` rounds of the PrivacyLossDistribution `one`, all losses of which lie within ±`width`.

    Removing a record is the worse way; of adding one, dp-accounting's masses are noise where they are small.
    """
    pmf = one._pmf_remove.to_dense_pmf()
    h = pmf._discretization
    size = next_fast_len(int(2 * width / h), real=True)
    row = np.zeros(size, dtype=np.longdouble)
    np.add.at(row, (pmf._lower_loss + np.arange(len(pmf._probs))) % size, pmf._probs.astype(np.longdouble))
    factor, product, left = rfft(row), 1, rounds
    while left:
        if left % 2:
            product = product * factor
        factor, left = factor * factor, left // 2
    losses = (h * np.arange(size // 2)).astype(np.longdouble)
    mass = irfft(product, size)[: len(losses)]

    def excess(epsilon):
        above = losses > epsilon
        return float(mass[above] @ -np.expm1(epsilon - losses[above])) + rounds * pmf._infinity_mass - delta

    low, high = 0.0, float(losses[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def poisson(z, q, rounds, delta, h):
    log_lost = math.log(delta) - 15 - math.log(rounds)
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=h, log_mass_truncation_bound=log_lost
    )
