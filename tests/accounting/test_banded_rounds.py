"""Rounds with correlated noise: blocks of cyclic samples (`dpexp.accounting.releases`)."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent, concatenate
from dpexp.accounting.releases import Release, releases
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError

N = 1000


def bands(b):
    """Some c with ‖c‖ = 1."""
    return tuple(np.full(b, b**-0.5).tolist())


def round_(z=1.0, q=0.05, parts=4, block=0, c=None):
    return Round(
        sampling_event("cyclic_poisson", q, N, parts=parts, block=block),
        (SumQueryEvent("all", 1.0, z, bands=bands(parts) if c is None else c),),
    )


def poisson(z, q, rounds):
    return Ledger("add_remove", {Round(sampling_event("poisson", q, N), (SumQueryEvent("all", 1.0, z),)): rounds})


@pytest.mark.parametrize("rounds", [1, 5, 40])
def test_a_block_costs_as_many_poisson_rounds_as_its_largest_partition(rounds):
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.3))
    accountant.compose(event, math.ceil(rounds / 4))
    found = epsilon(Ledger("add_remove", {round_(1.3): rounds}), 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert found >= accountant.get_epsilon(1e-5) * 0.9995


def test_the_column_norm_is_the_ledgers():
    """Forgotten, it would make z too large."""
    forgotten = Ledger("add_remove", {round_(1.0, c=(1.0, 0.5, 0.375, 0.3125)): 40})
    ((release, count),) = releases(forgotten).items()
    assert release.z == pytest.approx(1 / math.sqrt(1 + 0.5**2 + 0.375**2 + 0.3125**2)) and count == 10


@pytest.mark.parametrize(
    "rounds, adjacency, found",
    [
        # each block is rounded up: a resume begins another
        ({round_(block=0): 5, round_(block=5): 3}, "add_remove", {Release(1.0, 0.2): 3}),
        # of rounds that differ, a record may be in the costliest
        (
            {round_(1.0): 2, round_(3.0): 4, round_(2.0): 6}, "add_remove",
            {Release(1.0, 0.2): 2, Release(2.0, 0.2): 1},
        ),
        ({round_(): 8}, "replace_one", {Release(0.5, 0.2, "poisson_replaced"): 2}),
        ({round_(): 8}, "replace_null", {Release(1, 0.2): 2}),
    ],
)  # fmt: skip
def test_what_blocks_cost(rounds, adjacency, found):
    assert releases(Ledger(adjacency, rounds), "pld") == found


def test_independent_noise_beside_counts_with_its_own_norm():
    """A metric's, of one band, in the same rounds."""
    both = (SumQueryEvent("all", 1.0, 2.0, bands=bands(4)), SumQueryEvent("loss", 3.0, 4.0))
    event = round_().sampling
    run = Ledger("add_remove", {Round(event, both): 4, Round(event, both[:1]): 4})
    ((release, count),) = releases(run).items()
    assert release.z == pytest.approx((1 / 4 + 9 / 16) ** -0.5) and count == 2


def test_runs_on_the_same_data_share_no_block():
    one = Ledger("add_remove", {round_(block=0): 5, round_(block=5): 3})
    both = concatenate([one, one])
    assert sorted(r.sampling.first for r in both.rounds) == [0, 5, 6, 11]
    assert sum(releases(both).values()) == 6
    query = SumQueryEvent("all", 1.0, 1.0)
    shuffled = Ledger("replace_null", {Round(sampling_event("shuffle", 0.1, N, epoch=7), (query,)): 1})
    cyclic = Ledger("replace_null", {round_(): 5})
    assert sorted(r.sampling.first for r in concatenate([shuffled, cyclic, cyclic]).rounds) == [7, 8, 9]


@pytest.mark.parametrize(
    "event, message",
    [
        ({"policy": "poisson", "q": 0.1}, "choose sampling=cyclic_poisson with at least 4 partitions"),
        ({"policy": "cyclic_poisson", "q": 0.1, "parts": 3, "block": 0}, "unlike sampling=cyclic_poisson with 3 part"),
    ],
)
def test_noise_that_reaches_a_records_next_round_is_refused(event, message):
    run = Ledger("add_remove", {Round(sampling_event(n=N, **event), round_().queries): 4})
    with pytest.raises(ConfigError, match=message):
        epsilon(run, 1e-5)


def test_bands_that_are_not_the_same_in_every_round_of_a_block_are_refused():
    """A group that pauses would have its columns closer to one another than a record's rounds are; bands that change
    are no longer a column's."""
    both = (*round_().queries, SumQueryEvent("other", 1.0, 1.0, bands=bands(4)))
    for other in (Round(round_().sampling, both), round_(c=(0.8, 0.6)), round_(parts=5, c=(1.0,)), round_(q=0.06)):
        with pytest.raises(ConfigError, match="block 0 have different rates, numbers of partitions or bands"):
            epsilon(Ledger("add_remove", {round_(): 4, other: 4}), 1e-5)
