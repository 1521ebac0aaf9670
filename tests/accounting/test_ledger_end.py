"""ledger.end.json detects lines lost at the end of a ledger, and reports no others."""

import pytest
from runs import add, ledger, round_of, write_run

from dpexp.accounting.ledger import LedgerWriter, ledger_so_far, read_ledger
from dpexp.accounting.ledger.integrity import end_of, read_end
from dpexp.errors import ConfigError

ONE = round_of(4.0, 0.01)


def run(path, rounds, **options):
    return write_run(path, ledger(4.0, 0.01, rounds), **options)


@pytest.fixture
def resumed(tmp_path):
    """Two closing lines: after 3 rounds, and after 5."""
    path = tmp_path / "ledger.jsonl"
    run(path, 3)
    run(path, 2, resume=True)
    return path


def cut(path, at):
    """Leaves as many lines."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:at]))


def test_a_cut_at_an_earlier_closing_line_shows(resumed):
    assert read_end(resumed)["bytes"] == resumed.stat().st_size
    cut(resumed, 6)  # header, spec, three rounds, closing line
    with pytest.warns(UserWarning, match=r"lines are missing \(\d+ bytes of it were on disk, as ledger.end.json says"):
        ledger = read_ledger(resumed)
    assert len(ledger) == 3 and ledger.incomplete and "are left" in ledger.lost
    with pytest.raises(ConfigError, match=r"has lost lines .* replace it with a complete copy"):
        LedgerWriter(resumed, resume=True)


def test_a_cut_anywhere_shows(resumed):
    for at in range(8, 0, -1):
        cut(resumed, at)
        assert ledger_so_far(resumed).lost is not None


def test_what_the_end_file_cannot_show_is_not_guessed(resumed):
    end_of(resumed).unlink()
    cut(resumed, 6)
    assert not read_ledger(resumed).incomplete


def test_a_kill_between_the_ledger_and_its_end_loses_nothing(tmp_path, monkeypatch):
    """The ledger is on disk first, and may have gone on."""
    path = tmp_path / "ledger.jsonl"
    writer = run(path, 2, close=False)
    writer.sync()
    before = end_of(path).read_bytes()
    add(writer, ONE, ONE)
    with monkeypatch.context() as killed:
        killed.setattr("dpexp.accounting.ledger.writer.write_end", lambda *_: None)
        writer.close()
    assert end_of(path).read_bytes() == before
    ledger = read_ledger(path)
    assert len(ledger) == 4 and not ledger.incomplete and ledger.lost is None
    run(path, 1, resume=True)
    assert read_end(path)["bytes"] == path.stat().st_size and len(read_ledger(path)) == 5


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"bytes": -1, "sha256": ""}'])
def test_a_damaged_end_file_is_ignored(resumed, content):
    end_of(resumed).write_bytes(content)
    ledger = read_ledger(resumed)
    assert not ledger.incomplete and "there is no ledger.end.json next to it" in ledger.unverified


def test_an_end_file_of_another_ledger_is_not_used(resumed, tmp_path):
    kept = resumed.rename(tmp_path / "kept.jsonl")
    writer = run(resumed, 1, close=False)  # in the same place
    assert ledger_so_far(resumed).lost is None
    writer.close()
    assert read_ledger(resumed).lost is None
    kept.replace(resumed)
    assert "does not begin with the" in ledger_so_far(resumed).lost
