"""The sampler that runs is the sampler that is accounted."""

import math
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, chisquare

from dpexp.accounting.sampling import POLICIES, FixedSize, Poisson, Shuffle, TruncatedPoisson, event_of
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.options import Schedules
from dpexp.privacy.sampling.loader import RoundSampler


def sampler(size=100, q=0.1, rounds=50, physical=7, seed=0):
    return RoundSampler(
        lambda t: Poisson(sampling_rate=q), size, rounds, physical, KeyStream.known(seed, "sampling", 0)
    )


def samples(sampler):
    """The samples of one epoch, put together from their chunks, and the chunks."""
    rounds, chunks = [], []
    for rows in sampler:
        chunk = sampler.pending.popleft()
        if chunk.first:
            rounds.append([])
        rounds[-1].extend(rows)
        chunks.append((rows, chunk))
        sampler.completed += chunk.last
    return rounds, chunks


def test_inclusion_is_independent_with_probability_q():
    q, size, rounds = 0.07, 40, 4000
    stream = KeyStream.known(1, "sampling", 0)
    included = torch.zeros(rounds, size, dtype=torch.long)
    for row in included:
        row[Poisson(sampling_rate=q).draw(size, stream)[0]] = 1
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
    stream = KeyStream.known(0, "sampling", 0)
    assert sum(len(Poisson(sampling_rate=1e-9).draw(10_000_000, stream)[0]) for _ in range(3)) <= 2


def test_chunks_put_a_sample_together():
    rounds, chunks = samples(sampler(q=0.3))
    assert max(len(rows) for rows, _ in chunks) == 7
    expected = KeyStream.known(0, "sampling", 0)
    assert rounds == [Poisson(sampling_rate=0.3).draw(100, expected)[0] for _ in rounds]


def test_an_empty_sample_is_still_a_round():
    """Trap 3."""
    rounds, chunks = samples(sampler(size=3, q=0.01, rounds=200))
    assert [] in rounds and len(rounds) == 100
    assert all(chunk.first and chunk.last for rows, chunk in chunks if not rows)


@pytest.mark.parametrize("size, batch", [(93, 1), (99, 1), (105, 1), (1437, 512), (50, 50), (10, 3)])
def test_no_epoch_loses_a_round(size, batch):
    """Trap 4."""
    run = sampler(size, batch / size, rounds=10**6)
    for epoch in range(1, 6):
        samples(run)
        assert run.completed == math.ceil(epoch * size / batch - 1e-9)
    run = sampler(rounds=25)
    assert [len(samples(run)[0]) for _ in range(4)] == [10, 10, 5, 0], "it ends after the planned rounds"


def test_reading_ahead_and_starting_again_keep_chunks_and_rows_together():
    run = sampler(q=0.2)
    abandoned = iter(run)
    list(islice(abandoned, 5))
    rows = list(islice(iter(run), 9))
    assert len(run.pending) == len(rows), "and none of those abandoned"
    assert [chunk.last for chunk in run.pending][:-1] == [chunk.first for chunk in run.pending][1:]


def included(policy, size, draws, seed=2):
    """[samples, size]: which record is in which sample."""
    stream = KeyStream.known(seed, "sampling", 0)
    rows = []
    while len(rows) < draws:
        for sample in policy.draw(size, stream):
            assert len(set(sample)) == len(sample), "no record twice"
            row = torch.zeros(size, dtype=torch.long)
            row[sample] = 1
            rows.append(row)
    return torch.stack(rows)


def test_fixed_size_samples_are_uniform_subsets_of_exactly_that_size():
    size, batch, rounds = 20, 6, 5000
    seen = included(FixedSize(sampling_rate=batch / size), size, rounds)
    assert (seen.sum(1) == batch).all()
    assert chisquare(seen.sum(0).double().numpy()).pvalue > 1e-3, "every record alike"
    together = int((seen[:, ::2] * seen[:, 1::2]).sum())
    pairs = batch * (batch - 1) / (size * (size - 1))
    assert binomtest(together, rounds * size // 2, pairs).pvalue > 1e-3, "without replacement"
    following = int((seen[:-1] * seen[1:]).sum())
    assert following / ((rounds - 1) * size) == pytest.approx((batch / size) ** 2, rel=0.03), "drawn anew each round"


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 400), batch=st.integers(1, 400), seed=st.integers(0, 9))
def test_a_shuffled_epoch_has_every_record_exactly_once(n, batch, seed):
    """Of q·n in each sample but the last, which has the rest; the events say the sizes that are drawn."""
    policy = Shuffle(sampling_rate=min(batch, n) / n)
    drawn = policy.draw(n, KeyStream.known(seed, "sampling", 0))
    assert sorted(i for sample in drawn for i in sample) == list(range(n))
    assert len(drawn) == policy.rounds_per_epoch == policy.rounds(1)
    events = [event_of(policy.at_round(t, n), n, 0) for t in range(len(drawn))]
    assert [round(event.q * n) for event in events] == [len(sample) for sample in drawn]
    assert math.fsum(event.q for event in events) == pytest.approx(1, abs=1e-12)
    last = policy.at_round(len(drawn) - 1, n)
    assert last.weight == pytest.approx(len(drawn[-1]) / len(drawn[0]))
    assert [len(sample) for sample in last.draw(n, KeyStream())] == [len(sample) for sample in drawn], "when resumed"


@pytest.mark.parametrize("n, batch", [(10**9 + 1, 10**3), (10**8, 1), (10**7 + 1, 10**3), (3 * 10**8, 10**8)])
def test_the_rest_of_many_records_is_exact(n, batch):
    policy = Shuffle(sampling_rate=batch / n)
    assert policy.rounds_per_epoch == -(-n // batch)
    last = policy.at_round(policy.rounds_per_epoch - 1, n)
    assert event_of(last, n, 0).q * n == pytest.approx(n % batch or batch, rel=1e-12)
    assert last.rounds_per_epoch == policy.rounds_per_epoch


def test_a_rate_of_ten_digits_is_the_whole_batch_that_it_means():
    policy, _ = Shuffle(sampling_rate=0.3333333333, epochs=1).resolve(300)
    assert policy == Shuffle(sampling_rate=100 / 300)
    policy, rounds = Shuffle(sampling_rate=0.9999999999, epochs=2).resolve(50)
    assert policy.rounds_per_epoch == 1 and rounds == 2


def test_shuffled_samples_are_drawn_uniformly_and_anew_each_epoch():
    size, batch, epochs = 23, 5, 3000
    seen = included(Shuffle(sampling_rate=batch / size), size, 5 * epochs)
    assert seen.sum(1).tolist() == [5, 5, 5, 5, 3] * epochs
    by_epoch = seen.reshape(epochs, 5, size)
    assert (by_epoch.sum(1) == 1).all(), "each record once"
    for k in (0, 4):
        assert chisquare(by_epoch[:, k].sum(0).double().numpy()).pvalue > 1e-3, "every record alike"
    following = int((by_epoch[:-1, 4] * by_epoch[1:, 4]).sum())
    assert following / ((epochs - 1) * size) == pytest.approx((3 / size) ** 2, rel=0.15), "shuffled anew each epoch"


def test_truncation_keeps_a_uniform_subset_of_at_most_the_maximum():
    size, q, maximum, rounds = 30, 0.4, 12, 6000
    seen = included(TruncatedPoisson(sampling_rate=q, max_batch_size=maximum), size, rounds)
    sizes = seen.sum(1)
    assert int(sizes.max()) == maximum
    cut = binom.sf(maximum - 1, size, q)
    assert binomtest(int((sizes == maximum).sum()), rounds, cut).pvalue > 1e-3
    for k in (6, 9, 11):
        assert binomtest(int((sizes == k).sum()), rounds, binom.pmf(k, size, q)).pvalue > 1e-3, "below it, Poisson"
    assert chisquare(seen[sizes == maximum].sum(0).double().numpy()).pvalue > 1e-3, "whoever is cut off is random"


def test_an_epoch_of_shuffled_batches_begins_anew_after_a_resume():
    """The permutation is gone with the process, so that further batches are not disjoint with the earlier ones."""
    run = RoundSampler(lambda t: Shuffle(sampling_rate=0.1), 100, 50, 7, KeyStream.known(0, "sampling", 0))
    samples(run)
    assert run.completed == 10
    run.completed = 14
    _, chunks = samples(run)
    assert {chunk.first_round for _, chunk in chunks} == {14} and run.completed == 20
    _, chunks = samples(run)
    assert {chunk.first_round for _, chunk in chunks} == {20} and run.completed == 30


def test_a_resumed_shuffled_epoch_has_samples_of_the_sizes_that_its_events_say():
    policy = Shuffle(sampling_rate=5 / 13)  # samples of 5, 5 and 3
    for completed in range(6):
        run = RoundSampler(lambda t: policy.at_round(t, 13), 13, 6, 7, KeyStream.known(0, "sampling", 0))
        run.completed = completed
        rounds, chunks = samples(run)
        assert [len(sample) for sample in rounds] == [5, 5, 3][completed % 3 :]
        assert len({i for sample in rounds for i in sample}) == sum(map(len, rounds)), "disjoint"
        assert {chunk.first_round for _, chunk in chunks} == {completed}


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("fixed_size", {"sampling_rate": 0.123}, "expected_batch_size=12 is the nearest"),
        (
            "truncated_poisson",
            {"sampling_rate": 0.1, "max_batch_size": None},
            r"max_batch_size=None\) must be an integer",
        ),
        ("truncated_poisson", {"sampling_rate": 0.1, "max_batch_size": 0}, "at least 1"),
        ("poisson", {"sampling_rate": True}, r"sampling_rate=True\) must lie in \(0, 1\]"),
        ("poisson", {"sampling_rate": 0.1, "expected_batch_size": 10}, "exactly one of sampling.sampling_rate or"),
        ("poisson", {"expected_batch_size": 101}, "expected_batch_size=101 exceeds data.n=100"),
    ],
)
def test_policies_that_make_no_sense_are_refused(name, given, message):
    with pytest.raises(ConfigError, match=message):
        POLICIES[name](**given, steps=1).resolve(100)


@pytest.mark.parametrize(
    "spec, expected",
    [
        (None, [1] * 6),
        (2, [2] * 6),
        ([1, 1, 2, 2, 3, 1], [1, 1, 2, 2, 3, 1]),
        ({"linear": [1, 2]}, [1, 1.2, 1.4, 1.6, 1.8, 2]),
        ({"step": {0: 1.0, 4: 0.5}}, [1, 1, 1, 1, 0.5, 0.5]),
    ],
)
def test_schedules(spec, expected):
    plan = Schedules(z=spec).over(6)
    assert [plan.at_round(t).z for t in range(6)] == pytest.approx(expected)
    assert [plan.at_round(t).q for t in range(6)] == [1] * 6
    assert sum(count for _, count in plan.segments(6)) == 6


def test_a_long_ramp_is_a_staircase():
    plan = Schedules(q={"linear": [2, 1]}).over(10_000)
    assert len(list(plan.segments(10_000))) == 32
    assert plan.at_round(0).q == 2 and plan.at_round(9_999).q == 1


@pytest.mark.parametrize("sample", [[3, 4, 3], [-1, 2], [100]])
def test_a_sample_with_a_record_twice_or_an_index_out_of_range_is_refused(sample):
    class Mine(Poisson):
        def draw(self, size, stream):
            return [sample]

    run = RoundSampler(lambda t: Mine(sampling_rate=0.1), 100, 50, 7, KeyStream.known(0, "sampling", 0))
    with pytest.raises(ConfigError, match=r"sampling: Mine\.draw gave a sample .*; give distinct indices"):
        next(iter(run))
