"""Runs on parts of one data set: which of them one record may be in, and the part that a ledger keeps."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import ledger, write_run

from dpexp.accounting.ledger import LedgerWriter, Part, concatenate, read_ledger
from dpexp.accounting.ledger.integrity import Chain
from dpexp.accounting.multiple_runs import runs_of_one_record
from dpexp.errors import ConfigError

RULE, OTHER = "sha256 of 'name' in data.id='people'", "sha256 of 'name' in data.id='others'"


def on(low, high, rule=RULE, z=2.0, rounds=30, adjacency="add_remove"):
    """A run on a part; None: on all of the data."""
    part = None if low is None else Part(rule, low, high)
    return replace(ledger(z, 0.1, rounds), part=part, adjacency=adjacency)


ALL = (None, None)
SETS = [  # parts, and the sets of them that one record may be in
    ([(0, 0.5), (0.5, 1)], [[0], [1]]),
    ([(0.5, 1), (0, 0.5)], [[1], [0]]),
    ([(0, 0.5), (0, 0.5)], [[0, 1]]),
    ([(0, 0.6), (0.5, 1)], [[0, 1]]),
    ([(0, 0.5), (0.5, 1), ALL], [[0, 2], [1, 2]]),
    ([(0, 0.5), (0.25, 0.75), (0.5, 1)], [[0, 1], [1, 2]]),
    ([(0, 1), (0.2, 0.3), (0.3, 0.4)], [[0, 1], [0, 2]]),
    ([(0, 0.5), (0.5, 1, OTHER)], [[0, 1]]),
    ([(0, 0.5), (0.5, 1), (0, 0.5, OTHER), (0.5, 1, OTHER)], [[0, 2, 3], [1, 2, 3]]),  # one rule counts
    ([ALL, ALL], [[0, 1]]),
    ([], [[]]),
]


@pytest.mark.parametrize("parts, expected", SETS, ids=str)
def test_runs_share_a_record_if_their_ranges_of_one_rule_overlap(parts, expected):
    found = runs_of_one_record([on(*part) for part in parts])
    assert sorted(found) == sorted(expected)


ENDS = st.integers(0, 8).map(lambda k: k / 8)
PARTS = st.lists(st.tuples(ENDS, ENDS, st.sampled_from([RULE, OTHER])).filter(lambda p: p[0] < p[1]), max_size=5)


@given(PARTS, *[st.floats(0, 1, exclude_max=True)] * 2)
def test_no_record_is_in_more_runs_than_a_set_has(parts, first, second):
    """And of the rule that most runs have, or the first, each set's ranges hold one hash."""
    at = {RULE: first, OTHER: second}
    runs = {k for k, (low, high, rule) in enumerate(parts) if low <= at[rule] < high}
    sets = runs_of_one_record([on(*part) for part in parts])
    assert any(runs <= {*one} for one in sets)
    rules = [rule for *_, rule in parts]
    for one in sets:
        ranges = [parts[k] for k in one if rules[k] == max(rules, key=rules.count)]
        assert not ranges or max(low for low, *_ in ranges) < min(high for _, high, _ in ranges)


@pytest.mark.parametrize("adjacency", ["replace_one", "replace_null"])
def test_a_replaced_record_may_be_in_two_parts(adjacency):
    assert runs_of_one_record([on(*ends, adjacency=adjacency) for ends in SETS[0][0]]) == [[0, 1]]


def test_runs_of_several_adjacencies_are_not_composed_even_on_disjoint_parts():
    with pytest.raises(ConfigError, match="different adjacencies"):
        runs_of_one_record([on(0, 0.5), on(0.5, 1, adjacency="replace_null")])


def test_a_ledger_keeps_its_part_and_is_continued_only_on_it(tmp_path):
    run, path = on(0, 0.5, rounds=1), tmp_path / "a.jsonl"
    assert write_run(path, run).ledger.part == run.part == read_ledger(path).part
    assert json.loads(path.read_text().splitlines()[0])["part"] == {"rule": RULE, "low": 0, "high": 0.5}
    planned = [round_.sampling for round_ in run.rounds]
    for other in (None, Part(RULE, 0, 0.25), Part(OTHER, 0, 0.5)):
        with pytest.raises(ConfigError, match=r"was begun for .* on part \[0, 0.5\) by .*, but the run"):
            LedgerWriter(path, planned=planned, part=other, resume=True)
    LedgerWriter(path, planned=planned, part=run.part, resume=True).close()
    assert concatenate([run, run]).part == run.part and concatenate([run, on(0.5, 1)]).part is None


RIGHT = {"rule": RULE, "low": 0, "high": 1}
FORGED = [
    "", [], {}, {"rule": RULE},
    *(RIGHT | wrong for wrong in [
        {"rule": 1}, {"low": "0"}, {"low": 1}, {"low": -1}, {"high": 1.5}, {"low": False}, {"high": float("nan")},
        {"more": 1},
    ]),
]  # fmt: skip


@pytest.mark.parametrize("part", FORGED, ids=str)
def test_a_part_that_is_none_is_refused(tmp_path, part):
    path = tmp_path / "a.jsonl"
    path.write_bytes(Chain().header({"adjacency": "add_remove", "part": part}))
    with pytest.raises(ConfigError, match=r"the header's part .* is not understood"):
        read_ledger(path)
