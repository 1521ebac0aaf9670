"""What a ledger of random allocation costs: each epoch as a whole, once, as releases in one of some rounds."""

import pytest
from runs import ledger
from runs import round_of as any_round

from dpexp.accounting.coverage import check_covered
from dpexp.accounting.ledger import Ledger, LedgerWriter, concatenate, read_ledger, write_ledger
from dpexp.accounting.releases import Release, releases
from dpexp.accounting.sampling import RandomAllocation, sampling_event
from dpexp.errors import ConfigError

N = 1000


def round_of(epoch=0, k=1, t=4, z=2.0, **facts):
    return any_round(z, k / t, "random_allocation", epoch=epoch, num_selected=k, num_steps=t, **facts)


def one_of(m, z=2.0):
    return Release(z) if m == 1 else Release(z, policy="random_allocation", steps=m)


def of(rounds):
    return releases(Ledger("add_remove", rounds))


@pytest.mark.parametrize(
    "rounds, found",
    [
        *(({round_of(): rounds}, {one_of(4): 1}) for rounds in (1, 3, 4)),  # its first round costs as much as all
        ({round_of(): 4, round_of(4): 1, round_of(8): 3}, {one_of(4): 3}),
        ({round_of(z=2.0): 1, round_of(z=1.5): 1, round_of(4): 4}, {one_of(4, 1.5): 1, one_of(4): 1}),
    ],
)
def test_each_epoch_counts_once_at_the_smallest_z_of_its_rounds(rounds, found):
    assert of(rounds) == found


@pytest.mark.parametrize(
    "k, t, parts", [(2, 6, {3: 2}), (2, 5, {2: 1, 3: 1}), (3, 4, {1: 2, 2: 1}), (4, 4, {1: 4}), (1, 1, {1: 1})]
)
def test_k_of_t_rounds_are_one_round_of_each_of_k_blocks(k, t, parts):
    assert of({round_of(k=k, t=t): 1}) == {one_of(m): count for m, count in parts.items()}
    assert sum(m * count for m, count in parts.items()) == t and sum(parts.values()) == k


def test_epochs_of_several_runs_count_apart_and_beside_other_rounds():
    one = Ledger("add_remove", {round_of(): 4, round_of(4): 4})
    assert releases(concatenate([one, ledger(2.0, 0.1, 5), one])) == {one_of(4): 4, Release(2.0, 0.1): 5}


@pytest.mark.parametrize(
    "rounds, message",
    [
        (
            {round_of(): 5},
            "5 rounds of epoch 0 in which each record is in 1 of 4, so they cannot have been drawn together",
        ),
        ({round_of(): 1, round_of(k=2, t=8): 1}, "in 1 of 4 and 2 of 8, so they cannot"),
        ({round_of(bands=(0.8, -0.6)): 1}, "needs samples in which a record is at most every 2 rounds"),
    ],
    ids=["too many", "of two kinds", "correlated"],
)
def test_rounds_that_cannot_be_of_one_epoch_are_refused(rounds, message):
    with pytest.raises(ConfigError, match=message):
        of(rounds)


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"num_selected": None}, "random_allocation needs num_selected"),
        ({"num_steps": None}, "random_allocation needs num_steps"),
        ({"epoch": None}, "epoch=None must be a whole number of at least 0 for the policy random_allocation"),
        ({"num_selected": 0}, r"num_selected=0\) must be an integer of at least 1"),
        ({"num_steps": 4.0}, "num_steps=4.0 contradicts .* num_steps=4 follows"),
        ({"num_selected": 5}, "num_steps=4 contradicts .* num_steps=20 follows"),
        ({"q": 0.5}, "num_steps=4 contradicts .* num_steps=2 follows"),
        ({"maximum": 9}, "maximum=9 contradicts .* maximum=None follows"),
        ({"policy": "shuffle"}, "num_selected=1 contradicts .* num_selected=None follows"),
    ],
)
def test_events_that_contradict_themselves_are_refused(facts, message):
    right = {"policy": "random_allocation", "q": 0.25, "n": N, "epoch": 0, "num_selected": 1, "num_steps": 4}
    sampling_event(**right)
    with pytest.raises(ConfigError, match=message):
        sampling_event(**right | facts)


def test_the_ledger_is_read_as_it_was_written_and_says_what_was_allocated(tmp_path):
    run = Ledger("add_remove", {round_of(k=2): 4, round_of(4, k=2): 2})
    write_ledger(tmp_path / "l.jsonl", run)
    assert read_ledger(tmp_path / "l.jsonl") == run
    text = (tmp_path / "l.jsonl").read_text()
    assert '"sampling": {"policy": "random_allocation", "n": 1000, "q": [0.5], "num_selected": 2}' in text
    assert text.count('"num_selected": 2, "num_steps": 4, "epoch": 4') == 1, "an epoch has one spec"


def test_a_ledger_is_not_continued_with_another_number_of_rounds(tmp_path):
    LedgerWriter(tmp_path / "l.jsonl", planned=[round_of(k=1, t=4).sampling]).close()
    with pytest.raises(ConfigError, match=r"was begun for .* but the run that would continue it plans"):
        LedgerWriter(tmp_path / "l.jsonl", planned=[round_of(k=2, t=8).sampling], resume=True)


def test_only_pld_and_only_a_record_more_or_less_are_claimed():
    assert RandomAllocation.covers == {"add_remove": ("pld",)}
    with pytest.raises(
        ConfigError, match="dominating pair is stated for adding or removing a record; choose adjacency=add_rem"
    ):
        check_covered(RandomAllocation, "replace_one")
    with pytest.raises(ConfigError, match="accountant=rdp has no bound for sampling=random_allocation"):
        check_covered(RandomAllocation, None, "rdp")
