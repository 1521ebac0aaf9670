"""Random allocation: each record draws its own k of an epoch's t rounds, whatever the others draw."""

from collections import Counter
from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy.stats import binom, chisquare
from test_policies import sampler, samples

from dpexp.accounting.sampling import RandomAllocation, event_of
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream


def drawn(policy, size, epochs):
    """[epochs, size]: which of the k-subsets of its epoch's rounds each record drew, and [epochs, t]: sample sizes."""
    stream, k = KeyStream.known(0, "sampling", 0), policy.num_selected
    number = {subset: i for i, subset in enumerate(combinations(range(policy.rounds_per_epoch), k))}
    found, sizes = [], []
    for _ in range(epochs):
        samples = policy.draw(size, stream)
        assert len(samples) == policy.rounds_per_epoch
        rounds = [tuple(t for t, sample in enumerate(samples) for _ in range(sample.count(i))) for i in range(size)]
        found.append([number[own] for own in rounds])  # k distinct rounds of each record
        sizes.append([*map(len, samples)])
    return np.array(found), np.array(sizes)


def p_values(policy, size, epochs):
    """Of the law of a record's rounds, and of its independence from those of other records and epochs."""
    found, sizes = drawn(policy, size, epochs)
    t, k = policy.rounds_per_epoch, policy.num_selected
    subsets = comb(t, k)

    def table(*columns):
        cells = np.ravel_multi_index(columns, [subsets] * len(columns)).ravel()
        return chisquare(np.bincount(cells, minlength=subsets ** len(columns))).pvalue

    records = np.broadcast_to(np.arange(size), found.shape)
    by_record = np.bincount(np.ravel_multi_index((records, found), (size, subsets)).ravel(), minlength=size * subsets)
    law, seen = binom.pmf(np.arange(size + 1), size, k / t) * epochs, np.bincount(sizes[:, 0], minlength=size + 1)
    common = law > 5
    seen, law = (np.append(one[common], one[~common].sum()) for one in (seen, law))
    return {
        "a record": chisquare(by_record).pvalue,
        "two records": table(found[:, ::2], found[:, 1::2]),
        "two epochs": table(found[:-1], found[1:]),
        "sizes": chisquare(seen, law).pvalue,
    }


@pytest.mark.parametrize("k, t", [(1, 4), (2, 5), (3, 4)])
def test_each_record_draws_its_rounds_uniformly_and_by_itself(k, t):
    """The four tests reject a permutation of the records, and records that follow one another, at 1e-9."""
    assert min(p_values(RandomAllocation(sampling_rate=k / t, num_selected=k), 8, 4000).values()) > 1e-3


@pytest.mark.parametrize(
    "q, k, t", [(512 / 60000, 1, 117), (0.3, 1, 3), (0.3, 2, 7), (1.0, 1, 1), (0.7, 1, 1), (1.0, 3, 3)]
)
def test_q_is_that_of_a_whole_number_of_rounds(q, k, t):
    policy, _ = RandomAllocation(sampling_rate=q, num_selected=k, steps=1).resolve(60000)
    assert (policy.q, policy.rounds_per_epoch, policy.rounds(2.5)) == (k / t, t, -(-5 * t // 2))
    facts = {"q": k / t, "num_selected": k, "num_steps": t}
    assert event_of(policy, 60000, 0).facts().items() >= facts.items()


def test_who_is_in_all_rounds_of_an_epoch_is_in_each():
    assert [*map(sorted, RandomAllocation(sampling_rate=1.0, num_selected=3).draw(5, KeyStream()))] == [[*range(5)]] * 3


def test_an_epoch_is_drawn_together_and_the_next_one_anew():
    policy = RandomAllocation(sampling_rate=2 / 6, num_selected=2)
    run = sampler(lambda t: policy, 30, rounds=12)
    for epoch in (0, 6):
        rounds, chunks = samples(run)
        assert {chunk.first_round for _, chunk in chunks} == {epoch} and run.completed == epoch + 6
        assert Counter(i for sample in rounds for i in sample) == dict.fromkeys(range(30), 2)


def test_no_policy_of_ones_own_claims_the_event():
    with pytest.raises(ConfigError, match="Claims cannot be a subclass of RandomAllocation, where each record draws"):

        class Claims(RandomAllocation):
            """Does not draw as its event says."""


def test_no_number_of_rounds_below_one_is_taken():
    with pytest.raises(ConfigError, match=r"RandomAllocation\(num_selected=0\) must be an integer of at least 1"):
        RandomAllocation(sampling_rate=0.1, num_selected=0)
