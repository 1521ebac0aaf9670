"""Rounds with correlated noise: blocks of cyclic samples (`dpexp.accounting.releases`)."""

import math

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from runs import composed, ledger, round_of, sampled

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent, concatenate
from dpexp.accounting.releases import Release, releases
from dpexp.errors import ConfigError


def bands(b):
    """Some c with ‖c‖ = 1."""
    return tuple(np.full(b, b**-0.5).tolist())


def banded(z=1.0, q=0.05, parts=4, block=0, c=None):
    return round_of(z, q, "cyclic_poisson", parts=parts, block=block, bands=c or bands(parts))


def of(rounds, adjacency="add_remove"):
    return releases(Ledger(adjacency, rounds), "pld")


@pytest.mark.parametrize("rounds", [1, 5, 40])
def test_a_block_costs_as_many_poisson_rounds_as_its_largest_partition(rounds):
    theirs = composed(PLDAccountant(), (sampled(1.3, 0.2), math.ceil(rounds / 4))).get_epsilon(1e-5)
    found = epsilon(Ledger("add_remove", {banded(1.3): rounds}), 1e-5)
    assert theirs * 0.9995 <= found == pytest.approx(theirs, rel=2e-3)


OWN = SumQueryEvent("loss", 3.0, 4.0)  # a metric's, of one band
WITH = Round(banded().sampling, (*banded(2.0).queries, OWN))


@pytest.mark.parametrize(
    "rounds, z, count",
    [
        ({banded(c=(1.0, 0.5, 0.375, 0.3125)): 40}, (1 + 0.5**2 + 0.375**2 + 0.3125**2) ** -0.5, 10),
        ({WITH: 4, banded(2.0): 4}, (1 / 4 + 9 / 16) ** -0.5, 2),
    ],
    ids=["a column longer than 1", "independent noise beside"],
)
def test_each_query_counts_with_its_own_norm(rounds, z, count):
    """Forgotten, it would make z too large."""
    ((release, found),) = of(rounds).items()
    assert release.z == pytest.approx(z) and found == count


@pytest.mark.parametrize(
    "rounds, adjacency, found",
    [
        # each block is rounded up: a resume begins another
        ({banded(block=0): 5, banded(block=5): 3}, "add_remove", {Release(1.0, 0.2): 3}),
        # of rounds that differ, a record may be in the costliest
        ({banded(1.0): 2, banded(3.0): 4, banded(2.0): 6}, "add_remove", {Release(1.0, 0.2): 2, Release(2.0, 0.2): 1}),
        ({banded(): 8}, "replace_one", {Release(0.5, 0.2, "poisson_replaced"): 2}),
        ({banded(): 8}, "replace_null", {Release(1, 0.2): 2}),
    ],
)
def test_what_blocks_cost(rounds, adjacency, found):
    assert of(rounds, adjacency) == found


def test_runs_on_the_same_data_share_no_block():
    def firsts(*runs):
        return sorted(round_.sampling.first for round_ in concatenate(runs).rounds)

    one = Ledger("add_remove", {banded(block=0): 5, banded(block=5): 3})
    assert firsts(one, one) == [0, 5, 6, 11] and sum(releases(concatenate([one, one])).values()) == 6
    cyclic = Ledger("replace_null", {banded(): 5})
    assert firsts(ledger(1.0, 0.1, 1, "shuffle", "replace_null", epoch=7), cyclic, cyclic) == [7, 8, 9]


BOTH = Round(banded().sampling, (*banded().queries, SumQueryEvent("other", 1.0, 1.0, bands=bands(4))))


@pytest.mark.parametrize(
    "rounds, message",
    [
        ({round_of(bands=bands(4)): 4}, "choose sampling=cyclic_poisson with at least 4 partitions"),
        ({banded(q=0.1, parts=3, c=bands(4)): 4}, "unlike sampling=cyclic_poisson with 3 part"),
        # A group that pauses would have its columns closer to one another than a record's rounds are; bands that change
        # are no longer a column's.
        *(({banded(): 4, other: 4}, "block 0 have different rates, numbers of partitions or bands")
          for other in (BOTH, banded(c=(0.8, 0.6)), banded(parts=5, c=(1.0,)), banded(q=0.06))),
    ],
)  # fmt: skip
def test_noise_that_reaches_a_records_next_round_is_refused(rounds, message):
    with pytest.raises(ConfigError, match=message):
        epsilon(Ledger("add_remove", rounds), 1e-5)
