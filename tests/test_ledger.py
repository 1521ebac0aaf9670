import json
import math

import pytest

from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SamplingEvent,
    SumQueryEvent,
    joined,
    read_ledger,
)
from dpexp.errors import ConfigError

SAMPLING = SamplingEvent("poisson", 0.01, 60_000)


ALL = (SumQueryEvent("all", 1.0, 4.0),)


def write(path, rounds, queries=ALL):
    writer = LedgerWriter(path)
    for _ in range(rounds):
        writer.sample(SAMPLING)
        for query in queries:
            writer.query(query)
        writer.commit()
    return writer


def test_what_was_written_is_read(tmp_path):
    two = (SumQueryEvent("conv", 1.0, 4.0), SumQueryEvent("fc", 2.0, 3.0))
    writer = write(tmp_path / "l.jsonl", 3, two)
    writer.sample(SAMPLING)
    writer.query(two[0])
    writer.commit()
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == writer.ledger
    assert ledger.rounds == {Round(SAMPLING, two): 3, Round(SAMPLING, two[:1]): 1}
    assert len(ledger) == 4 and not ledger.truncated


def test_the_file_is_plain_json_lines(tmp_path):
    write(tmp_path / "l.jsonl", 2)
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert lines[0] == {"dpexp_ledger": 1, "adjacency": "add_remove"}
    assert lines[1]["queries"] == [{"group": "all", "S": 1.0, "sigma": 4.0}]
    assert lines[2:] == [{"round": 0}, {"round": 0}]


def test_a_round_is_on_disk_when_commit_returns(tmp_path):
    writer = write(tmp_path / "l.jsonl", 5)
    assert len(read_ledger(tmp_path / "l.jsonl")) == 5, "before close, and before anything is released"
    writer.close()


def test_a_sample_that_was_never_released_costs_nothing(tmp_path):
    writer = write(tmp_path / "l.jsonl", 1)
    writer.sample(SAMPLING)
    writer.sample(SAMPLING)
    writer.query(SumQueryEvent("all", 1.0, 4.0))
    writer.commit()
    assert len(read_ledger(tmp_path / "l.jsonl")) == 2


def test_a_half_written_last_line_is_dropped_and_said(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    ledger = read_ledger(path)
    assert len(ledger) == 2 and ledger.truncated


def test_resuming_continues_the_same_ledger(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, 3).close()
    path.write_bytes(path.read_bytes() + b'{"rou')
    writer = LedgerWriter(path, resume=True)
    writer.sample(SAMPLING)
    writer.query(SumQueryEvent("all", 1.0, 4.0))
    writer.commit()
    assert len(writer.ledger) == 4
    assert read_ledger(path) == writer.ledger
    assert path.read_text().count('"spec"') == 1


def test_two_runs_never_share_a_ledger(tmp_path):
    write(tmp_path / "l.jsonl", 1)
    with pytest.raises(ConfigError, match="already holds"):
        LedgerWriter(tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        LedgerWriter(tmp_path / "other.jsonl", resume=True)


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"round": 7}', "has not defined before"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1}, "queries": []}', "not understood"),
        ('{"spec": 1, "sampling": {"policy": "shuffle", "q": 0.1, "n": 5}, "queries": []}', "shuffle"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5}, "queries": []}', "at least one"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": NaN, "n": 5}, "queries": []}', "q=nan"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": "1", "n": 5}, "queries": []}', "q=1"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5, "q": 0.2}, "queries": []}', "not JSON"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": true}, "queries": []}', "n=True"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5, "x": 1}, "queries": []}', "not understood"),
        ('{"spec": [1], "sampling": {}, "queries": []}', "not by a whole number"),
        ('{"spec": 0, "sampling": {}, "queries": []}', "twice"),
        ('{"round": true}', "names round spec True"),
        ('{"round": 0, "times": -5}', "neither a spec nor a round"),
        ("[" * 100_000, "not JSON"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5}, '
         '"queries": [{"group": "a", "S": 1e-200, "sigma": 1e200}]}', "between 1e-8 and 1e8"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5}, '
         '"queries": [{"group": "a", "S": 1.0, "sigma": 1%s}]}' % ("0" * 400), "sigma"),
        ('{"spec": 1, "sampling": {"policy": "poisson", "q": 0.1, "n": 5}, '
         '"queries": [{"group": "a", "S": NaN, "sigma": 1.0}]}', "S=nan"),
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_refused(tmp_path, line, message):
    path = tmp_path / "l.jsonl"
    write(path, 1).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_ledger(path)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "l.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="not a dpexp ledger"):
        read_ledger(tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ledger(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("S, sigma", [(0, 1), (-1, 1), (1, 0), (math.inf, 1), (1, math.nan)])
def test_a_query_needs_sensible_numbers(S, sigma):
    with pytest.raises(ConfigError, match="all"):
        SumQueryEvent("all", S, sigma)


def test_equation_1_collapses_a_round():
    round_ = Round(SAMPLING, (SumQueryEvent("a", 3.0, 6.0), SumQueryEvent("b", 1.0, 1.0)))
    assert round_.noise_multiplier == pytest.approx((0.25 + 1) ** -0.5, rel=1e-15)


def test_a_million_rounds_are_small(tmp_path):
    path = tmp_path / "l.jsonl"
    four = tuple(SumQueryEvent(f"group{i}", 1.0, 4.0) for i in range(4))
    write(path, 1, four).close()
    with path.open("a") as file:
        file.writelines(['{"round": 0}\n'] * 999_999)
    assert path.stat().st_size <= 20_000_000
    assert len(read_ledger(path)) == 1_000_000


def test_an_empty_ledger_has_no_rounds(tmp_path):
    LedgerWriter(tmp_path / "l.jsonl").close()
    assert read_ledger(tmp_path / "l.jsonl") == Ledger("add_remove", {})


@pytest.mark.parametrize("changed", ['"q": [0.001]', '"n": 50000', '"policy": "all"'])
def test_a_header_that_says_otherwise_than_its_rounds_is_refused(tmp_path, changed):
    path = tmp_path / "l.jsonl"
    writer = LedgerWriter(path, planned=[SAMPLING])
    writer.sample(SAMPLING)
    writer.query(ALL[0])
    writer.commit()
    header, *rest = path.read_text().splitlines()
    key = changed.split(":")[0]
    (before,) = [part for part in ('"q": [0.01]', '"n": 60000', '"policy": "poisson"') if part.startswith(key)]
    assert before in header
    path.write_text("\n".join([header.replace(before, changed), *rest]) + "\n")
    with pytest.raises(ConfigError, match="the header says sampling"):
        read_ledger(path)


def test_joined_ledgers_are_one_after_the_other(tmp_path):
    shuffled = [Round(SamplingEvent("shuffle", 0.5, 10, epoch=e), ALL) for e in (0, 2)]
    one = Ledger("replace_one", {shuffled[0]: 2, shuffled[1]: 1})
    both = joined([one, one])
    assert len(both) == 6
    assert sorted(r.sampling.epoch for r in both.rounds) == [0, 2, 3, 5], "epochs of two runs are not disjoint"
    poisson = Ledger("add_remove", {Round(SAMPLING, ALL): 3})
    assert joined([poisson, poisson]).rounds == {Round(SAMPLING, ALL): 6}
    with pytest.raises(ConfigError, match="different adjacencies"):
        joined([one, poisson])


def begun(path, **facts):
    sampling = SamplingEvent(**{"policy": "poisson", "q": 0.01, "n": 60_000} | facts)
    LedgerWriter(path, planned=[sampling]).close()
    return sampling


@pytest.mark.parametrize("facts", [{"q": 0.02}, {"n": 50_000}, {"policy": "shuffle", "q": 0.01, "epoch": 0}])
def test_a_run_may_only_continue_the_ledger_of_its_own_plan(tmp_path, facts):
    begun(tmp_path / "l.jsonl")
    other = SamplingEvent(**{"policy": "poisson", "q": 0.01, "n": 60_000} | facts)
    with pytest.raises(ConfigError, match="the run that would continue it plans"):
        LedgerWriter(tmp_path / "l.jsonl", planned=[other], resume=True)
    with pytest.raises(ConfigError, match="begun for adjacency add_remove"):
        LedgerWriter(tmp_path / "l.jsonl", "replace_null", planned=[SAMPLING], resume=True)


def test_two_processes_cannot_continue_the_same_ledger(tmp_path):
    begun(tmp_path / "l.jsonl")
    first = LedgerWriter(tmp_path / "l.jsonl", planned=[SAMPLING], resume=True)
    with pytest.raises(ConfigError, match="being written by another process"):
        LedgerWriter(tmp_path / "l.jsonl", planned=[SAMPLING], resume=True)
    first.close()
    LedgerWriter(tmp_path / "l.jsonl", planned=[SAMPLING], resume=True).close()


def test_resuming_a_ledger_with_gaps_in_its_numbers_keeps_it_readable(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, 2).close()
    path.write_text(path.read_text().replace('"spec": 0', '"spec": 7').replace('"round": 0', '"round": 7'))
    writer = LedgerWriter(path, resume=True)
    writer.sample(SAMPLING)
    writer.query(SumQueryEvent("other", 1.0, 2.0))
    writer.commit()
    assert len(read_ledger(path)) == 3


@pytest.mark.parametrize("policy, q", [("fixed_size", 0.123), ("shuffle", 1e-9)])
def test_a_batch_must_be_whole(policy, q):
    with pytest.raises(ConfigError, match="must be a whole number of records"):
        SamplingEvent(policy, q, 10, epoch=0 if policy == "shuffle" else None)
