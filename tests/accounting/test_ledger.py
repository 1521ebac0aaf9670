"""Ledgers as they are written, read, resumed and concatenated."""

import math

import pytest

from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    OneTimeQueryEvent,
    Round,
    SumQueryEvent,
    concatenate,
    ledger_so_far,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError

SAMPLING = sampling_event("poisson", 0.01, 60_000)
ALL = (SumQueryEvent("all", 1.0, 4.0),)
OTHER = (SumQueryEvent("other", 1.0, 2.0),)


def one_round(writer, *queries):
    writer.sample(SAMPLING)
    for query in queries or ALL:
        writer.query(query)
    writer.commit()


def write(path, rounds, queries=ALL):
    writer = LedgerWriter(path)
    for _ in range(rounds):
        one_round(writer, *queries)
    return writer


def closed(path, rounds=3, queries=ALL):
    """The lines of a closed ledger."""
    write(path, rounds, queries).close()
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read(tmp_path):
    two = (SumQueryEvent("conv", 1.0, 4.0), SumQueryEvent("fc", 2.0, 3.0))
    writer = write(tmp_path / "l.jsonl", 3, two)
    writer.sample(SAMPLING)  # never released, so it costs nothing
    one_round(writer, two[0])
    assert len(ledger_so_far(tmp_path / "l.jsonl")) == 4, "each round is on disk when commit returns"
    writer.close()
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == writer.ledger and not ledger.incomplete
    assert ledger.rounds == {Round(SAMPLING, two): 3, Round(SAMPLING, two[:1]): 1}


@pytest.mark.parametrize("end", ["closed", "killed", "half a round", "half a closing line"])
def test_resuming_continues_the_same_ledger(tmp_path, end):
    path = tmp_path / "l.jsonl"
    lines = closed(path)
    end_of(path).unlink()  # as of a run that was killed before it wrote it
    left = {"closed": lines, "killed": lines[:-1], "half a round": [*lines[:-2], lines[-2][:-3]],
            "half a closing line": [*lines[:-1], lines[-1][:-3]]}  # fmt: skip
    path.write_bytes(b"".join(left[end]))
    before = 2 if end == "half a round" else 3
    for more, queries in ((1, ALL), (2, OTHER)):
        writer = LedgerWriter(path, resume=True)
        one_round(writer, *queries)
        writer.close()
        assert read_ledger(path) == writer.ledger and len(writer.ledger) == before + more
    assert path.read_text().count('"spec"') == 2 and path.read_text().count('"sha256"') == 2 + (end == "closed")


def test_two_runs_never_share_a_ledger(tmp_path):
    write(tmp_path / "l.jsonl", 1)
    with pytest.raises(ConfigError, match="already holds"):
        LedgerWriter(tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        LedgerWriter(tmp_path / "other.jsonl", resume=True)
    assert not (tmp_path / "other.jsonl").exists()


VALID = {
    sampling_event: {"policy": "cyclic_poisson", "q": 0.1, "n": 10, "parts": 2, "block": 0},
    SumQueryEvent: {"group": "all", "S": 1.0, "sigma": 1.0},
    OneTimeQueryEvent: {"query": "a", "noise": "laplace", "S": 1.0, "S_replaced": 2.0, "scale": 1.0},
}


@pytest.mark.parametrize(
    "event, facts, message",
    [
        (sampling_event, {"parts": 11}, "at most 10 partitions"), (sampling_event, {"parts": 0}, "at least 1"),
        (sampling_event, {"block": None}, "block=None must be a whole number"),
        (sampling_event, {"block": -1}, "at least 0"),
        (sampling_event, {"policy": "poisson"}, "parts=2 contradicts"),
        (sampling_event, {"policy": "shuffle", "q": 0.123, "epoch": 0}, "must be a whole number of records"),
        (SumQueryEvent, {"bands": ()}, "bands="), (SumQueryEvent, {"bands": (0.0, 1.0)}, "bands="),
        (SumQueryEvent, {"bands": (1.0, math.inf)}, "bands="), (SumQueryEvent, {"bands": (1e-9,)}, "bands="),
        (OneTimeQueryEvent, {"noise": "cauchy"}, "is unknown"),
        (OneTimeQueryEvent, {"S": 0.0}, "S=0.0"), (OneTimeQueryEvent, {"S_replaced": 2.1}, "above 2S"),
        (OneTimeQueryEvent, {"S_replaced": True}, "S_replaced=True"), (OneTimeQueryEvent, {"query": 3}, "name"),
        (OneTimeQueryEvent, {"scale": 1e-9}, "between 1e-8 and 1e8"),
    ],
)  # fmt: skip
def test_invalid_events_are_refused(event, facts, message):
    event(**VALID[event])
    with pytest.raises(ConfigError, match=message):
        event(**VALID[event] | facts)


def test_equation_1_reduces_a_round_to_one_query():
    round_ = Round(SAMPLING, (SumQueryEvent("a", 3.0, 6.0), SumQueryEvent("b", 1.0, 1.0)))
    assert round_.z("add_remove") == 2 * round_.z("replace_one") == pytest.approx((0.25 + 1) ** -0.5, rel=1e-15)


def test_a_whole_ledger_is_written_as_a_run_would_write_it(tmp_path):
    writer = LedgerWriter(tmp_path / "run.jsonl", planned=[SAMPLING])
    for queries in (ALL, ALL, ALL, OTHER):
        one_round(writer, *queries)
    writer.close()
    write_ledger(tmp_path / "plan.jsonl", writer.ledger)
    assert read_ledger(tmp_path / "plan.jsonl") == read_ledger(tmp_path / "run.jsonl")
    mixed = {Round(SAMPLING, ALL): 2, Round(sampling_event("shuffle", 0.5, 10, epoch=0), ALL): 1}
    for ledger in (Ledger("replace_null", mixed), Ledger("add_remove", {}), Ledger("add_remove", mixed, True)):
        write_ledger(tmp_path / "other.jsonl", ledger)
        assert ledger_so_far(tmp_path / "other.jsonl") == ledger


def test_a_resumed_run_stays_private_or_not_private(tmp_path):
    LedgerWriter(tmp_path / "open.jsonl", not_private_reason="the noise seed is known").close()
    again = LedgerWriter(tmp_path / "open.jsonl", resume=True)
    one_round(again)
    again.close()
    found = read_ledger(tmp_path / "open.jsonl")
    assert found == again.ledger and found.not_private_reason == "the noise seed is known"
    write(tmp_path / "l.jsonl", 1).close()
    assert read_ledger(tmp_path / "l.jsonl").not_private_reason is None
    with pytest.raises(ConfigError, match=r"begun by a private run, .* \(unsafe diagnostics\)"):
        LedgerWriter(tmp_path / "l.jsonl", resume=True, not_private_reason="unsafe diagnostics")
    assert concatenate([read_ledger(tmp_path / "l.jsonl"), found]).not_private_reason == found.not_private_reason


def test_concatenated_ledgers_have_separate_epochs():
    shuffled = [Round(sampling_event("shuffle", 0.5, 10, epoch=e), ALL) for e in (0, 2)]
    one = Ledger("replace_one", {shuffled[0]: 2, shuffled[1]: 1})
    both = concatenate([one, one])
    assert len(both) == 6 and sorted(r.sampling.first for r in both.rounds) == [0, 2, 3, 5]
    poisson = Ledger("add_remove", {Round(SAMPLING, ALL): 3})
    assert concatenate([poisson, poisson]).rounds == {Round(SAMPLING, ALL): 6}
    with pytest.raises(ConfigError, match="different adjacencies"):
        concatenate([one, poisson])


@pytest.mark.parametrize(
    "options",
    [
        {"planned": [sampling_event("poisson", 0.02, 60_000)]},
        {"planned": [sampling_event("poisson", 0.01, 50_000)]},
        {"adjacency": "replace_null", "planned": [SAMPLING]},
        {"record": {"kind": "microbatch", "k": 8}, "planned": [SAMPLING]},
    ],
)
def test_a_run_may_only_continue_the_ledger_of_its_own_plan(tmp_path, options):
    LedgerWriter(tmp_path / "l.jsonl", planned=[SAMPLING]).close()
    with pytest.raises(ConfigError, match=r"was begun for .*, but the run that would continue it plans"):
        LedgerWriter(tmp_path / "l.jsonl", resume=True, **options)
