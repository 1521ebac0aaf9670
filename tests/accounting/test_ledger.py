"""Ledgers as they are written, read, resumed and concatenated."""

import math

import pytest
from runs import add, ledger, round_of, write_run

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

ONE, OTHER = (round_of(z, 0.01, n=60_000) for z in (4.0, 2.0))
SAMPLING = ONE.sampling


def run_of(*rounds):
    return Ledger("add_remove", {round_: rounds.count(round_) for round_ in rounds})


def closed(path, rounds=3):
    """The lines of a closed ledger."""
    write_run(path, run_of(*[ONE] * rounds))
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "l.jsonl"


def test_what_was_written_is_read(path):
    two = (SumQueryEvent("conv", 1.0, 4.0), SumQueryEvent("fc", 2.0, 3.0))
    both, first = Round(SAMPLING, two), Round(SAMPLING, two[:1])
    writer = write_run(path, run_of(both, both, both), close=False)
    writer.sample(SAMPLING)  # never released, so it costs nothing
    add(writer, first)
    assert len(ledger_so_far(path)) == 4, "each round is on disk when commit returns"
    writer.close()
    assert read_ledger(path) == writer.ledger == run_of(both, both, both, first)


@pytest.mark.parametrize(
    "lines, cut, before", [(6, 0, 3), (5, 0, 3), (5, 3, 2), (6, 3, 3)],
    ids=["closed", "killed", "half a round", "half a closing line"],
)  # fmt: skip
def test_resuming_continues_the_same_ledger(path, lines, cut, before):
    left = b"".join(closed(path)[:lines])
    end_of(path).unlink()  # as of a run that was killed before it wrote it
    path.write_bytes(left[: len(left) - cut])
    for more, round_ in ((1, ONE), (2, OTHER)):
        writer = write_run(path, run_of(round_), resume=True)
        assert read_ledger(path) == writer.ledger and len(writer.ledger) == before + more
    assert path.read_text().count('"spec"') == 2 and path.read_text().count('"sha256"') == 2 + ((lines, cut) == (6, 0))


def test_two_runs_never_share_a_ledger(path):
    write_run(path, run_of(ONE), close=False)
    with pytest.raises(ConfigError, match="already holds"):
        LedgerWriter(path)
    with pytest.raises(ConfigError, match="does not exist"):
        LedgerWriter(path.with_name("other"), resume=True)
    assert not path.with_name("other").exists()


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


MIXED = {ONE: 2, round_of(4.0, 0.5, "shuffle", n=10): 1}


@pytest.mark.parametrize(
    "run",
    [run_of(ONE, ONE, ONE, OTHER), Ledger("replace_null", MIXED), Ledger("add_remove", {}),
     Ledger("add_remove", MIXED, incomplete=True)],
)  # fmt: skip
def test_a_whole_ledger_is_written_as_a_run_would_write_it(tmp_path, run):
    write_ledger(tmp_path / "plan.jsonl", run)
    assert ledger_so_far(tmp_path / "plan.jsonl") == run
    if run.rounds and not run.incomplete:
        assert write_run(tmp_path / "run.jsonl", run).ledger == read_ledger(tmp_path / "run.jsonl") == run


def test_a_resumed_run_stays_private_or_not_private(tmp_path, path):
    LedgerWriter(tmp_path / "open.jsonl", not_private_reason="the noise seed is known").close()
    again = LedgerWriter(tmp_path / "open.jsonl", resume=True)
    add(again, ONE)
    again.close()
    found = read_ledger(tmp_path / "open.jsonl")
    assert found == again.ledger and found.not_private_reason == "the noise seed is known"
    closed(path)
    assert read_ledger(path).not_private_reason is None
    with pytest.raises(ConfigError, match=r"begun by a private run, .* \(unsafe diagnostics\)"):
        LedgerWriter(path, resume=True, not_private_reason="unsafe diagnostics")
    assert concatenate([read_ledger(path), found]).not_private_reason == found.not_private_reason


def test_concatenated_ledgers_have_separate_epochs():
    first, second = (round_of(4.0, 0.5, "shuffle", n=10, epoch=epoch) for epoch in (0, 2))
    one = Ledger("replace_one", {first: 2, second: 1})
    both = concatenate([one, one])
    assert len(both) == 6 and sorted(r.sampling.first for r in both.rounds) == [0, 2, 3, 5]
    poisson = ledger(4.0, 0.01, 3)
    assert concatenate([poisson, poisson]) == ledger(4.0, 0.01, 6)
    with pytest.raises(ConfigError, match="different adjacencies"):
        concatenate([one, poisson])


@pytest.mark.parametrize(
    "options",
    [
        *({"planned": [sampling_event("poisson", q, n)]} for q, n in ((0.02, 60_000), (0.01, 50_000))),
        {"adjacency": "replace_null"}, {"record": {"kind": "microbatch", "k": 8}},
    ],
)  # fmt: skip
def test_a_run_may_only_continue_the_ledger_of_its_own_plan(path, options):
    LedgerWriter(path, planned=[SAMPLING]).close()
    with pytest.raises(ConfigError, match=r"was begun for .*, but the run that would continue it plans"):
        LedgerWriter(path, resume=True, **{"planned": [SAMPLING]} | options)
