"""ledger.end.json detects lines lost at the end of a ledger, and reports no others."""

import pytest

from dpexp.accounting.ledger import LedgerWriter, SumQueryEvent, ledger_so_far, read_ledger
from dpexp.accounting.ledger.integrity import end_of, read_end
from dpexp.accounting.sampling import sampling_event
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import cost_at

EVENT, QUERY = sampling_event("poisson", 0.01, 1000), SumQueryEvent("all", 1.0, 4.0)


def rounds(writer, count):
    for _ in range(count):
        writer.sample(EVENT)
        writer.query(QUERY)
        writer.commit()


@pytest.fixture
def resumed(tmp_path):
    """Two closing lines: after 3 rounds, and after 5."""
    path = tmp_path / "ledger.jsonl"
    for resume, count in ((False, 3), (True, 2)):
        writer = LedgerWriter(path, resume=resume)
        rounds(writer, count)
        writer.close()
    return path


def cut(path, at):
    """Leaves as many lines."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:at]))


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_cut_at_an_earlier_closing_line_shows(resumed, capsys):
    assert read_end(resumed)["bytes"] == resumed.stat().st_size
    cut(resumed, 6)  # header, spec, three rounds, closing line
    with pytest.warns(UserWarning, match=r"lines are missing \(\d+ bytes of it were on disk, as ledger.end.json says"):
        ledger = read_ledger(resumed)
    assert len(ledger) == 3 and ledger.incomplete and "are left" in ledger.lost
    account([str(resumed), "delta=1e-5"])
    assert "ends early, after 3 rounds: lines are missing" in printed(capsys)
    with pytest.raises(ConfigError, match=r"has lost lines .* replace it with a complete copy"):
        LedgerWriter(resumed, resume=True)
    assert cost_at(resumed).ledger is None


def test_a_cut_anywhere_shows(resumed):
    for at in range(8, 0, -1):
        cut(resumed, at)
        assert ledger_so_far(resumed).lost is not None


def test_what_the_end_file_cannot_show_is_reported(resumed, capsys):
    account([str(resumed), "delta=1e-5"])
    assert "if it and ledger.end.json were both restored to an earlier state, nothing would show it" in printed(capsys)
    end_of(resumed).unlink()
    cut(resumed, 6)
    assert not read_ledger(resumed).incomplete
    account([str(resumed), "delta=1e-5"])
    said = printed(capsys)
    assert "ledger.jsonl: there is no ledger.end.json next to it, so that it may have been cut at an earlier" in said


def test_a_kill_between_the_ledger_and_its_end_loses_nothing(tmp_path, monkeypatch):
    """The ledger is on disk first, and may have gone on."""
    path = tmp_path / "ledger.jsonl"
    writer = LedgerWriter(path)
    rounds(writer, 2)
    writer.sync()
    before = end_of(path).read_bytes()
    rounds(writer, 2)
    monkeypatch.setattr("dpexp.accounting.ledger.writer.write_end", lambda *_: None)
    writer.close()
    assert end_of(path).read_bytes() == before
    ledger = read_ledger(path)
    assert len(ledger) == 4 and not ledger.incomplete and ledger.lost is None
    monkeypatch.undo()
    again = LedgerWriter(path, resume=True)
    rounds(again, 1)
    again.close()
    assert read_end(path)["bytes"] == path.stat().st_size and len(read_ledger(path)) == 5


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"bytes": -1, "sha256": ""}'])
def test_a_damaged_end_file_is_ignored(resumed, content):
    end_of(resumed).write_bytes(content)
    ledger = read_ledger(resumed)
    assert not ledger.incomplete and "there is no ledger.end.json next to it" in ledger.unverified


def test_an_end_file_of_another_ledger_is_not_used(resumed, tmp_path):
    kept = tmp_path / "kept.jsonl"
    resumed.rename(kept)
    writer = LedgerWriter(resumed)  # in the same place
    rounds(writer, 1)
    assert ledger_so_far(resumed).lost is None
    writer.close()
    assert read_ledger(resumed).lost is None
    kept.replace(resumed)
    assert "does not begin with the" in ledger_so_far(resumed).lost
