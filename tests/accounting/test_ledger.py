import json
import math
import time

import pytest

from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SamplingEvent,
    SumQueryEvent,
    joined,
    ledger_so_far,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
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


def closed(path, rounds=3, queries=ALL):
    write(path, rounds, queries).close()
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read(tmp_path):
    two = (SumQueryEvent("conv", 1.0, 4.0), SumQueryEvent("fc", 2.0, 3.0))
    writer = write(tmp_path / "l.jsonl", 3, two)
    writer.sample(SAMPLING)
    writer.query(two[0])
    writer.commit()
    writer.close()
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == writer.ledger
    assert ledger.rounds == {Round(SAMPLING, two): 3, Round(SAMPLING, two[:1]): 1}
    assert len(ledger) == 4 and not ledger.truncated


def test_a_round_is_on_disk_when_commit_returns(tmp_path):
    writer = write(tmp_path / "l.jsonl", 5)
    assert len(ledger_so_far(tmp_path / "l.jsonl")) == 5, "before close, and before anything is released"
    writer.close()


def test_a_sample_that_was_never_released_costs_nothing(tmp_path):
    writer = write(tmp_path / "l.jsonl", 1)
    writer.sample(SAMPLING)
    writer.sample(SAMPLING)
    writer.query(SumQueryEvent("all", 1.0, 4.0))
    writer.commit()
    writer.close()
    assert len(read_ledger(tmp_path / "l.jsonl")) == 2


# Resumption


def one_round(writer, queries=ALL):
    writer.sample(SAMPLING)
    for query in queries:
        writer.query(query)
    writer.commit()


@pytest.mark.parametrize("end", ["closed", "killed", "half a round", "half a closing line"])
def test_resuming_continues_the_same_ledger(tmp_path, end):
    path = tmp_path / "l.jsonl"
    lines = closed(path)
    end_of(path).unlink()  # as of a run that was killed before it came to write it
    path.write_bytes(
        b"".join(
            {
                "closed": lines,
                "killed": lines[:-1],
                "half a round": [*lines[:-2], lines[-2][:-3]],
                "half a closing line": [*lines[:-1], lines[-1][:-3]],
            }[end]
        )
    )
    before = 2 if end == "half a round" else 3
    writer = LedgerWriter(path, resume=True)
    one_round(writer)
    assert len(writer.ledger) == before + 1
    writer.close()
    assert read_ledger(path) == writer.ledger
    assert path.read_text().count('"spec"') == 1 and path.read_text().count('"sha256"') == 1 + (end == "closed")
    writer = LedgerWriter(path, resume=True)
    one_round(writer, (SumQueryEvent("other", 1.0, 2.0),))
    writer.close()
    assert read_ledger(path) == writer.ledger and len(writer.ledger) == before + 2


def test_a_damaged_ledger_is_not_continued(tmp_path):
    path = tmp_path / "l.jsonl"
    lines = closed(path)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigError, match="line 3 says that it is line 4"):
        LedgerWriter(path, resume=True)
    assert path.read_bytes() == b"".join(lines[:2] + lines[3:])


def test_two_runs_never_share_a_ledger(tmp_path):
    write(tmp_path / "l.jsonl", 1)
    with pytest.raises(ConfigError, match="already holds"):
        LedgerWriter(tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        LedgerWriter(tmp_path / "other.jsonl", resume=True)
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize("S, sigma", [(0, 1), (-1, 1), (1, 0), (math.inf, 1), (1, math.nan)])
def test_a_query_needs_sensible_numbers(S, sigma):
    with pytest.raises(ConfigError, match="all"):
        SumQueryEvent("all", S, sigma)


def test_equation_1_collapses_a_round():
    round_ = Round(SAMPLING, (SumQueryEvent("a", 3.0, 6.0), SumQueryEvent("b", 1.0, 1.0)))
    assert round_.noise_multiplier == pytest.approx((0.25 + 1) ** -0.5, rel=1e-15)


def test_a_million_rounds_are_small_and_quickly_read(tmp_path):
    path = tmp_path / "l.jsonl"
    four = tuple(SumQueryEvent(f"group{i}", 1.0, 4.0) for i in range(4))
    million = Ledger("add_remove", {Round(SAMPLING, four): 500_000, Round(SAMPLING, four[:3]): 500_000})
    write_ledger(path, million)
    assert path.stat().st_size <= 20_000_000
    started = time.process_time()
    assert read_ledger(path) == million
    assert time.process_time() - started <= 2


def test_an_empty_ledger_has_no_rounds(tmp_path):
    LedgerWriter(tmp_path / "l.jsonl").close()
    assert read_ledger(tmp_path / "l.jsonl") == Ledger("add_remove", {})


def test_a_whole_ledger_is_written_as_a_run_would_write_it(tmp_path):
    writer = LedgerWriter(tmp_path / "run.jsonl", planned=[SAMPLING])
    for _ in range(3):
        one_round(writer)
    one_round(writer, (SumQueryEvent("other", 1.0, 2.0),))
    writer.close()
    write_ledger(tmp_path / "plan.jsonl", writer.ledger)
    (planned, *rest), (happened, *others) = (told(tmp_path / f"{name}.jsonl") for name in ("plan", "run"))
    assert len(int(happened.pop("run"), 16).to_bytes(16)) == 16 and planned == happened and rest == others
    other = SamplingEvent("shuffle", 0.5, 10, epoch=0)
    mixed = Ledger("replace_null", {Round(SAMPLING, ALL): 2, Round(other, ALL): 1})
    write_ledger(tmp_path / "mixed.jsonl", mixed)
    assert read_ledger(tmp_path / "mixed.jsonl") == mixed
    write_ledger(tmp_path / "early.jsonl", Ledger("add_remove", {Round(SAMPLING, ALL): 2}, incomplete=True))
    assert ledger_so_far(tmp_path / "early.jsonl").truncated, "what ended early does not become whole"


def told(path):
    """Lines without their links and digests, which differ with the run's number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("link", "sha256")}
        if isinstance(line, dict) else line[:2]
        for line in lines
    ]  # fmt: skip


# Whose it is


def test_runs_that_did_the_same_have_ledgers_of_their_own(tmp_path):
    one, other = write(tmp_path / "one.jsonl", 3), write(tmp_path / "other.jsonl", 3)
    position = one.position
    one.close(), other.close()
    with pytest.raises(ConfigError, match="so it is another run's"):
        LedgerWriter(tmp_path / "other.jsonl", resume=True, position=position)
    LedgerWriter(tmp_path / "one.jsonl", resume=True, position=position).close()


def test_a_ledger_without_a_number_is_read_and_continued(tmp_path):
    write_ledger(tmp_path / "l.jsonl", Ledger("add_remove", {Round(SAMPLING, ALL): 2}))
    writer = LedgerWriter(tmp_path / "l.jsonl", planned=[SAMPLING], resume=True)
    one_round(writer)
    writer.close()
    assert len(read_ledger(tmp_path / "l.jsonl")) == 3


def test_a_closed_ledger_to_which_nothing_was_added_stays_as_it_was(tmp_path):
    write(tmp_path / "l.jsonl", 2).close()
    before = (tmp_path / "l.jsonl").read_bytes()
    LedgerWriter(tmp_path / "l.jsonl", resume=True).close()
    assert (tmp_path / "l.jsonl").read_bytes() == before


def test_what_is_not_private_stays_so_and_what_is_cannot_become_so(tmp_path):
    LedgerWriter(tmp_path / "open.jsonl", exposed="the noise seed is known").close()
    again = LedgerWriter(tmp_path / "open.jsonl", resume=True)
    one_round(again)
    again.close()
    found = read_ledger(tmp_path / "open.jsonl")
    assert found == again.ledger and found.exposed == "the noise seed is known"
    write(tmp_path / "l.jsonl", 1).close()
    assert read_ledger(tmp_path / "l.jsonl").exposed is None
    with pytest.raises(ConfigError, match=r"begun by a private run, .* \(unsafe diagnostics\)"):
        LedgerWriter(tmp_path / "l.jsonl", resume=True, exposed="unsafe diagnostics")
    assert joined([read_ledger(tmp_path / "l.jsonl"), found]).exposed == found.exposed


# Several ledgers


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


@pytest.mark.parametrize("policy, q", [("fixed_size", 0.123), ("shuffle", 1e-9)])
def test_a_batch_must_be_whole(policy, q):
    with pytest.raises(ConfigError, match="must be a whole number of records"):
        SamplingEvent(policy, q, 10, epoch=0 if policy == "shuffle" else None)
