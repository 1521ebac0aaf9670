"""The sampler that runs is the sampler that is accounted."""

import math
from itertools import islice

import pytest
import torch
from scipy.stats import binomtest, chisquare

from dpexp.errors import ConfigError
from dpexp.privacy.sampling import Poisson, RoundSampler


def sampler(size=100, q=0.1, rounds=50, physical=7, seed=0):
    return RoundSampler(Poisson(q), size, rounds, physical, torch.Generator().manual_seed(seed))


def samples(sampler):
    """The samples of one epoch, put together from their chunks, and the chunks."""
    rounds, chunks = [], []
    for rows in sampler:
        chunk = sampler.pending.popleft()
        if chunk.first:
            rounds.append([])
        rounds[-1].extend([] if chunk.empty else rows)
        chunks.append((rows, chunk))
        sampler.completed += chunk.last
    return rounds, chunks


def test_inclusion_is_independent_with_probability_q():
    q, size, rounds = 0.07, 40, 4000
    generator = torch.Generator().manual_seed(1)
    included = torch.zeros(rounds, size, dtype=torch.long)
    for row in included:
        row[Poisson(q).draw(size, generator)] = 1
    assert binomtest(int(included.sum()), rounds * size, q).pvalue > 1e-3
    counts = included.sum(0).double()
    assert chisquare(counts.numpy()).pvalue > 1e-3, "every record alike"
    together = (included[:, ::2] * included[:, 1::2]).sum()
    assert binomtest(int(together), rounds * size // 2, q**2).pvalue > 1e-3, "pairs independent"
    following = (included[:-1] * included[1:]).sum()
    assert binomtest(int(following), (rounds - 1) * size, q**2).pvalue > 1e-3, "rounds independent"
    sizes = included.sum(1).double()
    assert sizes.var().item() == pytest.approx(size * q * (1 - q), rel=0.1), "sample sizes are binomial, not fixed"


def test_a_tiny_rate_is_not_rounded_up():
    """In float32 a uniform below 1e-9 happens with probability 2^-24, sixty times too often."""
    generator = torch.Generator().manual_seed(0)
    assert sum(len(Poisson(1e-9).draw(10_000_000, generator)) for _ in range(3)) <= 2


def test_chunks_put_a_sample_together():
    rounds, chunks = samples(sampler(q=0.3))
    assert max(len(rows) for rows, _ in chunks) == 7
    assert all(chunk.size == len(rows) for rows, chunk in chunks)
    expected = torch.Generator().manual_seed(0)
    assert rounds == [Poisson(0.3).draw(100, expected) for _ in rounds]


def test_an_empty_sample_is_still_a_round():
    """Trap 3."""
    rounds, chunks = samples(sampler(size=3, q=0.01, rounds=200))
    assert [] in rounds and len(rounds) == 100
    empty = [(rows, chunk) for rows, chunk in chunks if chunk.empty]
    assert empty and all(rows == [0] and chunk.first and chunk.last for rows, chunk in empty)


@pytest.mark.parametrize("size, batch", [(93, 1), (99, 1), (105, 1), (1437, 512), (50, 50), (10, 3)])
def test_no_epoch_loses_a_round(size, batch):
    """Trap 4."""
    run = sampler(size, batch / size, rounds=10**6)
    for epoch in range(1, 6):
        samples(run)
        assert run.completed == math.ceil(epoch * size / batch - 1e-9)


def test_it_ends_after_the_planned_rounds():
    run = sampler(rounds=25)
    assert [len(samples(run)[0]) for _ in range(4)] == [10, 10, 5, 0]


def test_reading_ahead_and_starting_again_keep_chunks_and_rows_together():
    run = sampler(q=0.2)
    abandoned = iter(run)
    list(islice(abandoned, 5))
    rows = list(islice(iter(run), 9))
    assert [chunk.size for chunk in run.pending] == [len(chunk) for chunk in rows]


def test_an_empty_training_set_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        sampler(size=0)
