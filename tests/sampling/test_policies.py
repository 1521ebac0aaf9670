"""The sampler that runs is the sampler that is accounted."""

import math
from itertools import islice

import numpy as np
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


def sampler(policy=None, size=100, q=0.1, rounds=50):
    """Of Poisson samples, or by a policy of each round."""
    policy = policy or (lambda t: Poisson(sampling_rate=q))
    return RoundSampler(policy, size, rounds, 7, KeyStream.known(0, "sampling", 0))


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
    run = sampler(None, size, batch / size, 10**6)
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


def binomial(size, q, most=None):
    """The law of a sample's size, at most so many."""
    law = binom.pmf(np.arange(size + 1), size, q)
    return law if most is None else np.append(law[:most], law[most:].sum())


LAWS = [  # policy, number of records, samples, the law of a sample's size
    (Poisson(sampling_rate=0.07), 40, 4000, binomial(40, 0.07)),
    (FixedSize(sampling_rate=6 / 20), 20, 5000, np.eye(7)[6]),
    (TruncatedPoisson(sampling_rate=0.4, max_batch_size=12), 30, 6000, binomial(30, 0.4, 12)),
]


@pytest.mark.parametrize("policy, size, rounds, law", LAWS, ids=lambda one: getattr(one, "name", None))
def test_samples_are_uniform_subsets_of_random_size_drawn_anew_each_round(policy, size, rounds, law):
    """So a record, a pair of records in one sample, and a record in two samples come at the rates that follow."""
    seen = included(policy, size, rounds)
    sizes, k = np.bincount(seen.sum(1), minlength=len(law)), np.arange(len(law))
    assert not sizes[law * rounds < 1e-9].any()
    likely = law * rounds > 5
    if likely.sum() > 1:
        found, expected = (np.append(one[likely], one[~likely].sum()) for one in (sizes, rounds * law))
        assert chisquare(found[expected > 0], expected[expected > 0]).pvalue > 1e-3, "sizes have their law"
    q, pair = law @ k / size, law @ (k * (k - 1)) / (size * (size - 1))
    for some, rate in (
        (seen, q),
        (seen[:, ::2] * seen[:, 1::2], pair),
        (seen[:-1] * seen[1:], q**2),
    ):
        assert binomtest(int(some.sum()), some.numel(), rate).pvalue > 1e-3
    for some in (seen, seen[seen.sum(1) == seen.sum(1).max()]):
        assert chisquare(some.sum(0).double().numpy()).pvalue > 1e-3, "every record alike, also if some are cut off"


@settings(max_examples=50, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("completed", range(6))
def test_a_resumed_shuffled_epoch_has_the_samples_that_its_events_say_and_the_next_begins_anew(completed):
    """The permutation is gone with the process, so that further batches are not disjoint with the earlier ones."""
    policy = Shuffle(sampling_rate=5 / 13)  # samples of 5, 5 and 3
    run = sampler(lambda t: policy.at_round(t, 13), 13, rounds=9)
    run.completed = completed
    for sizes in ([5, 5, 3][completed % 3 :], [5, 5, 3]):
        began = run.completed
        rounds, chunks = samples(run)
        assert [len(sample) for sample in rounds] == sizes
        assert len({i for sample in rounds for i in sample}) == sum(sizes), "disjoint"
        assert {chunk.first_round for _, chunk in chunks} == {began} and run.completed == began + len(sizes)


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("fixed_size", {"sampling_rate": 0.123}, "expected_batch_size=12 is the nearest"),
        ("truncated_poisson", {"sampling_rate": 0.1, "max_batch_size": None}, r"size=None\) must be an integer"),
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
        (None, [1] * 6), (2, [2] * 6), ([1, 1, 2, 2, 3, 1], [1, 1, 2, 2, 3, 1]),
        ({"linear": [1, 2]}, np.linspace(1, 2, 6)), ({"step": {0: 1.0, 4: 0.5}}, [1] * 4 + [0.5] * 2),
    ],
    ids=str,
)  # fmt: skip
def test_schedules(spec, expected):
    plan = Schedules(z=spec).over(6)
    rounds = [plan.at_round(t) for t in range(6)]
    assert [one.z for one in rounds] == pytest.approx(list(expected)) and {one.q for one in rounds} == {1}
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

    run = sampler(lambda t: Mine(sampling_rate=0.1))
    with pytest.raises(ConfigError, match=r"sampling: Mine\.draw gave a sample .*; give distinct indices"):
        next(iter(run))
