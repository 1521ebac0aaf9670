"""Correlated noise: its bands, its law as it is released, and the samples that go with it."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2, chisquare
from test_policies import sampler, samples

from dpexp.accounting.sampling import CyclicPoisson
from dpexp.privacy.noise import correlated
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise, Noisy
from dpexp.privacy.noise.randomness import KeyStream


def toeplitz(c, rounds):
    return sum(c_j * np.eye(rounds, k=-j) for j, c_j in enumerate(c[:rounds]))


def workload(rounds, momentum):
    """As a matrix: momentum's recursion, summed."""
    return np.tril(np.ones((rounds, rounds))) @ toeplitz(momentum ** np.arange(rounds), rounds)


def assert_law(x, c):
    """Noise [rounds, numbers] is C⁻¹Z of a standard normal Z: C times it is white, and its covariance is C⁻¹C⁻ᵀ."""
    rounds, n = x.shape
    C = toeplitz(c, rounds)
    white = C @ x
    squares, off = (white**2).sum(1), white @ white.T / math.sqrt(n)
    assert ((chi2.ppf(1e-4, n) < squares) & (squares < chi2.ppf(1 - 1e-4, n))).all()
    assert np.abs(off[~np.eye(rounds, dtype=bool)]).max() < 4.5
    inverse = np.linalg.inv(C)
    assert np.cov(x) == pytest.approx(inverse @ inverse.T, abs=6 * 1.5 / math.sqrt(n))


# Coefficients


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["sqrt", "optimal"])
@pytest.mark.parametrize("b, rounds", [(1, 5), (4, 30), (8, 8)])
def test_the_error_is_that_of_the_matrices(kind, b, rounds, momentum):
    """By numpy's inverse."""
    c = correlated.coefficients(kind, b, rounds, momentum)
    assert len(c) == b and 1 - 1e-12 < math.hypot(*c) <= 1
    inverse = np.linalg.inv(toeplitz(c, rounds))
    expected = np.linalg.norm(workload(rounds, momentum) @ inverse) / math.sqrt(rounds)
    assert correlated.error(c, rounds, momentum) == pytest.approx(expected, rel=1e-10)
    assert correlated.inverse(c, rounds) == pytest.approx(inverse[:, 0], abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_cut_the_square_root_is_one(momentum):
    """C² = A up to scale (Kalinin & Lampert 2024, theorem 1)."""
    c = toeplitz(correlated.square_root(12, momentum), 12)
    assert c @ c / c[0, 0] ** 2 == pytest.approx(workload(12, momentum), abs=1e-12)


@pytest.mark.parametrize("rounds", [50, 977])
def test_the_least_error_is_that_of_a_search(rounds):
    """Two bands: no c_1 does better."""
    best = correlated.error(correlated.optimal(2, rounds), rounds)
    tried = [math.hypot(1, t) * correlated.error((1.0, t), rounds) for t in np.linspace(-0.9, 0.999, 400)]
    assert min(tried) >= best * (1 - 1e-9) and min(tried) < best * 1.001


# Samples


def drawn(parts, q=0.05, size=240):
    """[rounds, size]: who is in which sample."""
    run = sampler(lambda t: CyclicPoisson(sampling_rate=q, partitions=parts), size, rounds=400)
    seen = []
    while run.completed < run.rounds:
        rounds, chunks = samples(run)
        assert {chunk.first_round for _, chunk in chunks} == {0}, "one block, as long as the job runs"
        seen += rounds
    return torch.stack([torch.bincount(torch.tensor(rows, dtype=torch.long), minlength=size) for rows in seen])


def test_each_record_is_sampled_in_its_own_part_alone_at_the_stated_rate():
    parts, q = 4, 0.05
    seen = drawn(parts, q)
    by_turn = torch.stack([seen[turn::parts].sum(0) for turn in range(parts)])
    assert ((by_turn > 0).sum(0) == 1).all(), "over all of Lightning's epochs, which begin every 20 rounds"
    part_of = by_turn.argmax(0)
    assert chisquare(part_of.bincount(minlength=parts).numpy()).pvalue > 1e-3, "parts are drawn evenly"
    assert binomtest(int(seen.sum()), seen.numel(), q).pvalue > 1e-3
    counts = by_turn.max(0).values.double()
    assert chisquare(counts.numpy()).pvalue > 1e-3 and counts.mean() == pytest.approx(100 * q * parts, rel=0.05)
    own = torch.stack([seen[part_of[i] :: parts, i][:100] for i in range(240)])
    together = int((own[part_of == 0][:-1] * own[part_of == 0][1:]).sum())
    assert binomtest(together, 100 * (int((part_of == 0).sum()) - 1), (q * parts) ** 2).pvalue > 1e-3, "independently"


def test_parts_are_drawn_independently():
    """Not dealt out: how many there are in one varies as it should."""
    sizes = [
        len(CyclicPoisson(sampling_rate=0.1, partitions=4).partition(1000, KeyStream.known(k, "sampling", 0))[0])
        for k in range(400)
    ]
    assert np.var(sizes) == pytest.approx(1000 * 0.25 * 0.75, rel=0.3)


# Noise


def test_each_group_has_noise_of_its_own_with_the_law_of_the_inverse_and_values_independent_noise():
    """Covariance C⁻¹C⁻ᵀ over rounds, of large tensors and of small ones, which are drawn otherwise."""
    c, rounds, d = correlated.optimal(4, 12), 12, 40_000
    noise = CorrelatedNoise(GaussianNoise(KeyStream.known(3, "noise", 0)))
    kinds = {"one": (3.0, c), "other": (2.0, c), "small": (0.5, c), "value": (1.0, (1.0,))}
    total = {name: torch.zeros(rounds, d, dtype=torch.float64) for name in kinds} | {"small": torch.zeros(rounds, 2000)}
    for t in range(rounds):
        noise.add_to([Noisy(name, total[name][t], *kind) for name, kind in kinds.items()], divisor=2.0)
    x = {name: total[name].double().numpy() / (sigma / 2) for name, (sigma, _) in kinds.items()}
    for name, (_, bands) in kinds.items():
        assert_law(x[name], bands)
    white = np.concatenate([toeplitz(kinds[name][1], rounds) @ x[name] for name in ("one", "other", "value")])
    assert np.corrcoef(white) == pytest.approx(np.eye(3 * rounds), abs=5 / math.sqrt(d))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps, lambda noise: torch.save(noise, io.BytesIO())])
def test_past_noise_is_neither_copied_nor_saved(way):
    with pytest.raises(TypeError, match="past noise is secret"):
        way(CorrelatedNoise(GaussianNoise()))
