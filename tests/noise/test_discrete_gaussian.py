"""The discrete Gaussian's sampler: digits against mpmath, draws against the pmf, ties, and no floating point in it."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_continuous import OneWord
from torch.utils._python_dispatch import TorchDispatchMode

from dpexp.privacy.noise.discrete_gaussian import SIGMA2, DiscreteGaussian, cumulative, exp_digits, powers
from dpexp.privacy.noise.randomness import KeyStream

mpmath.mp.prec = 600
SIGMAS = [Fraction(1, 2), 1, 3, 30, 1000, 10_000, 2**24]


def sampler(sigma, key=0):
    return DiscreteGaussian(Fraction(sigma) ** 2, KeyStream.known(key, "test", 0))


@pytest.mark.parametrize("x", [Fraction(0), Fraction(1, 2), Fraction(7, 3), Fraction(1, 2**49), Fraction(90), 3000])
@pytest.mark.parametrize("bits", [1, 31, 94, 200])
def test_digits_of_exponentials(x, bits):
    exact = mpmath.floor(
        mpmath.mpf(2) ** bits * mpmath.exp(-mpmath.mpf(Fraction(x).numerator) / Fraction(x).denominator)
    )
    assert exp_digits(Fraction(x), bits) == int(exact)


def test_digits_of_powers():
    for x in (Fraction(1, 2**49), Fraction(2**28, 2**49), Fraction(1, 7), Fraction(9)):
        assert powers(x, 300, 31) == [exp_digits(d * x, 31) for d in range(300)]


@pytest.mark.parametrize("a", [Fraction(1, 2), Fraction(1, 8), Fraction(2), Fraction(9, 20), Fraction(50)])
def test_digits_of_cumulative_probabilities(a):
    terms = [mpmath.exp(-mpmath.mpf(a.numerator) / a.denominator * i * i) for i in range(80)]
    for j in (0, 1, 2, 5, 30):
        for bits in (31, 94):
            share = sum(terms[j + 1 :]) / sum(terms)  # what is beyond j
            assert cumulative(a, j, bits) == int(mpmath.ceil(2**bits * (1 - share))) - 1


def cell_probabilities(sigma, width, cells):
    """Of ⌊k / width⌋ for a discrete Gaussian k, from its pmf; for a large σ, at some k, evenly apart."""
    step = max(1, width // 2**12)
    k = np.arange(-math.ceil(12 * sigma + 12) // step, math.ceil(12 * sigma + 12) // step + 1) * step
    pmf = np.exp(-((k / float(sigma)) ** 2) / 2)
    return np.bincount(np.clip(k // width, cells[0], cells[-1]) - cells[0], pmf / pmf.sum())


@pytest.mark.parametrize("sigma", SIGMAS)
def test_draws_follow_the_pmf(sigma):
    count, width = 200_000, max(1, int(sigma / 8))
    drawn = sampler(sigma).draw(count).numpy()
    most = math.ceil(4 * sigma / width)
    cells = np.arange(-most, most + 1)
    expected = cell_probabilities(sigma, width, cells) * count
    found = np.bincount(np.clip(drawn // width, cells[0], cells[-1]) - cells[0], minlength=len(cells))
    often = expected > 5
    assert found[~often].sum() <= 40
    assert chisquare(found[often], expected[often] * found[often].sum() / expected[often].sum()).pvalue > 1e-3
    assert abs(drawn.mean()) < 4 * float(sigma) / math.sqrt(count)


def test_the_lowest_bits_are_uniform_and_neighbours_independent():
    drawn = sampler(2**24).draw(200_000)
    assert chisquare(torch.bincount(drawn & 255, minlength=256).numpy()).pvalue > 1e-3
    products = (drawn[:-1].double() * drawn[1:].double()).numpy() / 2.0**48
    assert abs(products.mean()) < 4 * products.std() / math.sqrt(len(products))
    assert len(drawn.unique()) > 190_000


@pytest.mark.parametrize("sigma", [Fraction(1, 2), Fraction(17, 10), 3, 1000, 2**24])
def test_quick_decisions_are_the_slow_ones(sigma):
    gaussian = sampler(sigma, key=1)
    words = gaussian._words(3000)
    values, kept = gaussian.decide(words)
    for i in range(words.shape[1]):
        slow = gaussian.decide_one((words[:, i] & (2**31 - 1)).tolist(), bool(words[1, i] < 0))
        assert slow == (int(values[i]) if kept[i] else None)


def test_where_31_digits_do_not_tell_more_are_drawn():
    """U begins with the digits of a cumulative probability, or of the probability to keep a proposal: what follows
    decides, all zeros or all ones."""
    for following, larger in ((0, False), (2**63 - 1, True)):
        gaussian = DiscreteGaussian(SIGMA2, OneWord(following))
        border = torch.tensor([[gaussian._borders[1]], [0], [0], [0], [0], [0]], dtype=torch.int32)
        values, kept = gaussian.decide(border)
        assert kept.item() and values.item() == (2 + larger - 1) * 2**24
        digit = 5  # y = 5 is m = 25 for x = 0
        word = int(gaussian._tables[0][digit**2])
        words = torch.tensor([[0], [digit], [word], [0], [0], [0]], dtype=torch.int32)
        values, kept = gaussian.decide(words)
        assert kept.item() is not larger


def test_a_proposal_of_minus_zero_is_none():
    gaussian = sampler(3)
    zero, minus = (
        torch.tensor([[0], [word], *[[0]] * len(gaussian._tables)], dtype=torch.int32) for word in (0, -(2**31))
    )
    assert gaussian.decide(zero)[1].item() and not gaussian.decide(minus)[1].item()


class NoFloats(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            assert not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()), func
        return found


def test_no_floating_point_number_enters_the_sampler():
    with NoFloats():
        DiscreteGaussian(SIGMA2, KeyStream.known(2, "test", 0)).draw(10_000)
    with pytest.raises(AssertionError), NoFloats():
        torch.ones(3, dtype=torch.int64) / 2


@pytest.mark.parametrize("sigma2", [0, -1, Fraction(2**58)])
def test_a_sigma_out_of_range_is_refused(sigma2):
    with pytest.raises(ValueError, match="σ"):
        DiscreteGaussian(sigma2, KeyStream())
