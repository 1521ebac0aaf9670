"""What may happen to a ledger's file while a run is writing it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from test_ledger import ALL, OTHER, SAMPLING, one_round

from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SumQueryEvent, ledger_so_far, read_ledger
from dpexp.errors import ConfigError


@pytest.fixture
def writer(tmp_path):
    """Has written three rounds."""
    writer = LedgerWriter(tmp_path / "run" / "l.jsonl", planned=[SAMPLING])
    for _ in range(3):
        one_round(writer)
    return writer


def resumed(path, position=None, planned=(SAMPLING,)):
    """The number of rounds after a resumed run has added one."""
    writer = LedgerWriter(path, planned=planned, resume=True, position=position)
    one_round(writer)
    writer.close()
    return len(read_ledger(path))


# Lost


def truncated(path):
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def emptied(path):
    path.write_bytes(b"")


def without_a_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))


def added_to(path):
    with path.open("ab") as file:
        file.write(b"[6,0,")


def edited(path):
    """In place, until the file's timestamp changes."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with path.open("rb+") as file:
            file.seek(path.read_bytes().index(b'"sigma": ') + len(b'"sigma": '))
            file.write(b"9")


def edited_with_its_time_set_back(path):
    before = path.stat()
    edited(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def deleted(path):
    path.unlink()


def deleted_with_its_folder(path):
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize(
    "lose, act, message",
    [
        (truncated, "commit", "was changed from [0-9]+ bytes"), (emptied, "sync", "was changed from [0-9]+ bytes to 0"),
        (without_a_line, "close", "was changed from"), (added_to, "commit", "was changed from"),
        (edited, "commit", "was edited while"), (edited, "close", "was edited while"),
        (edited_with_its_time_set_back, "commit", "was edited while"),
        (replaced, "commit", "was replaced by another file"), (deleted, "sync", "was deleted or moved"),
        (deleted_with_its_folder, "commit", "was deleted or moved"), (deleted, "close", "was deleted or moved"),
    ],
)  # fmt: skip
def test_a_lost_ledger_stops_the_run_and_is_rescued(writer, lose, act, message):
    path, known = writer.path, writer.ledger
    lose(path)
    left = path.read_bytes() if path.exists() else None
    with pytest.raises(ConfigError, match=f"{message}.* its 3 rounds are in .*l.rescued1.jsonl"):
        one_round(writer) if act == "commit" else getattr(writer, act)()
    assert (path.read_bytes() if path.exists() else None) == left, "the new file may be someone else's"
    rescued = path.with_name("l.rescued1.jsonl")
    assert read_ledger(rescued) == known == writer.ledger
    writer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        one_round(writer)
    rescued.replace(path)
    assert resumed(path) == 4


@pytest.mark.parametrize("act", ["sync", "close"])
def test_an_edit_without_a_new_timestamp_is_found_at_the_next_checkpoint_and_at_the_end(writer, monkeypatch, act):
    monkeypatch.setattr("dpexp.accounting.ledger.writer._times", lambda found: (0, 0))
    one_round(writer)
    edited(writer.path)
    one_round(writer)
    left = writer.path.read_bytes()
    with pytest.raises(ConfigError, match=r"was edited while .* its 5 rounds are in"):
        getattr(writer, act)()
    assert writer.path.read_bytes() == left
    assert read_ledger(writer.path.with_name("l.rescued1.jsonl")) == writer.ledger


@pytest.mark.parametrize("act", ["commit", "sync"])
def test_a_file_that_was_touched_but_not_changed_is_continued(writer, act):
    before = writer.path.stat().st_mtime_ns
    while writer.path.stat().st_mtime_ns == before:
        writer.path.touch()
    one_round(writer) if act == "commit" else writer.sync()
    writer.close()
    assert read_ledger(writer.path) == writer.ledger and not list(writer.path.parent.glob("*rescued*"))


@pytest.mark.parametrize("closed", [True, False])
def test_an_older_copy_next_to_a_rescued_ledger_is_not_continued(writer, closed):
    path, older = writer.path, writer.path.read_bytes()
    one_round(writer)
    path.unlink()
    with pytest.raises(ConfigError, match="rescued1"):
        one_round(writer)
    path.write_bytes(older)
    with pytest.raises(ConfigError, match=r"lacks rounds that .*l\.rescued1\.jsonl holds"):
        resumed(path)
    lines = path.with_name("l.rescued1.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines if closed else lines[:-1]))
    assert (resumed(path), resumed(path)) == (5, 6)


def test_a_rescued_ledger_has_the_same_bytes(writer):
    """So that a checkpoint from before the loss is resumed with it."""
    position = writer.position
    one_round(writer, *OTHER)
    one_round(writer)
    before = writer.path.read_bytes()
    emptied(writer.path)
    with pytest.raises(ConfigError, match="its 5 rounds are in"):
        writer.sync()
    rescued = writer.path.with_name("l.rescued1.jsonl")
    assert rescued.read_bytes().startswith(before)
    again = LedgerWriter(rescued, planned=[SAMPLING], resume=True, position=position)
    one_round(again)
    rescued.unlink()
    with pytest.raises(ConfigError, match=r"its 6 rounds are in .*l\.rescued1\.rescued1\.jsonl"):
        one_round(again)
    twice = rescued.with_name("l.rescued1.rescued1.jsonl")
    assert twice.read_bytes().startswith(before) and read_ledger(twice) == again.ledger


def test_a_rescued_ledger_is_never_overwritten(writer):
    path = writer.path
    path.with_name("l.rescued1.jsonl").write_text("precious")
    path.unlink()
    with pytest.raises(ConfigError, match=r"are in .*l\.rescued2\.jsonl"):
        one_round(writer)
    assert path.with_name("l.rescued1.jsonl").read_text() == "precious"


def test_a_ledger_that_cannot_be_rescued_is_reported(writer):
    deleted_with_its_folder(writer.path)
    writer.path.parent.write_text("a file where the folder was")
    with pytest.raises(ConfigError, match=r"its 3 rounds could not be saved in .*l\.rescued1\.jsonl \(File exists\)"):
        one_round(writer)


# Another run's


def written(path, noise):
    """A closed ledger of rounds with these σ̃."""
    writer = LedgerWriter(path, planned=[SAMPLING])
    for sigma in noise:
        one_round(writer, SumQueryEvent("all", 1.0, sigma))
    writer.close()
    return writer


@pytest.mark.parametrize(
    "noise", [[90, 90, 90], [4, 90, 90], [90, 4, 4, 90], [4, 90, 4, 4], [4, 4], []],
    ids=["cheaper", "one of them cheaper", "one put before", "another order", "lost at the end", "all lost"],
)  # fmt: skip
def test_only_a_ledger_that_begins_as_the_checkpoints_is_continued(tmp_path, noise):
    """However many rounds it has, and although its links are right."""
    position = written(tmp_path / "own.jsonl", [4, 4, 90]).position
    written(tmp_path / "other.jsonl", noise)
    before = (tmp_path / "other.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="does not begin with the rounds that the checkpoint's run had written"):
        resumed(tmp_path / "other.jsonl", position)
    assert (tmp_path / "other.jsonl").read_bytes() == before
    assert resumed(tmp_path / "own.jsonl", position) == 4


def test_the_ledger_may_have_more_rounds_than_the_checkpoint(writer):
    position = writer.position
    one_round(writer, SumQueryEvent("all", 1.0, 9.0))
    writer.close()
    added_to(writer.path)
    assert (resumed(writer.path, position), resumed(writer.path, position)) == (5, 6)


# While it is written


def test_a_file_that_shrinks_in_the_middle_of_a_commit_gets_no_gap(writer, monkeypatch):
    """Between the check and the write: the line is appended at the new end, not after NUL bytes."""
    monkeypatch.setattr(LedgerWriter, "_check_file", lambda self: truncated(self.path))
    one_round(writer)
    assert b"\0" not in writer.path.read_bytes()


def test_an_interrupt_in_the_middle_of_a_write_leaves_a_whole_ledger(writer, monkeypatch):
    """Ctrl-C reaches Python when the system call returns: the line is in the file, and the round is not released."""
    write = os.write

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_round(writer, *OTHER)
    monkeypatch.setattr(os, "write", write)
    assert len(ledger_so_far(writer.path)) == 3
    one_round(writer, *OTHER)
    writer.close()
    assert read_ledger(writer.path) == writer.ledger and len(writer.ledger) == 4


def test_two_processes_cannot_continue_the_same_ledger(writer):
    with pytest.raises(ConfigError, match="being written by another process"):
        LedgerWriter(writer.path, planned=[SAMPLING], resume=True)
    writer.close()
    assert resumed(writer.path) == 4


COMMON = """
import os, resource, sys, time
from dpexp.accounting.ledger import LedgerWriter, SamplingEvent, SumQueryEvent
from dpexp.errors import ConfigError

def one_round(writer):
    writer.sample(SamplingEvent("poisson", 0.01, 60_000))
    writer.query(SumQueryEvent("all", 1.0, 4.0))
    writer.commit()

writer = LedgerWriter(sys.argv[1])
one_round(writer)
"""


def started(script, path):
    command = [sys.executable, "-c", COMMON + script, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_forked_child_neither_writes_nor_holds_the_lock_of_its_killed_parent(tmp_path):
    """As loader workers, which outlive a killed parent by seconds."""
    path = tmp_path / "l.jsonl"
    with started(
        """
if os.fork() == 0:
    try:
        one_round(writer)
    except RuntimeError as error:
        print(os.getpid(), error, flush=True)
time.sleep(60)
""",
        path,
    ) as parent:
        child, said = parent.stdout.readline().split(maxsplit=1)
        assert "is closed, or belongs to the process that" in said
        with pytest.raises(ConfigError, match="being written by another process"):
            LedgerWriter(path, resume=True)
        parent.kill()
        parent.wait()
        os.kill(int(child), 0)  # it lives
        try:
            assert resumed(path, planned=()) == 2
        finally:
            os.kill(int(child), signal.SIGKILL)


FULL = """
size = os.stat(sys.argv[1]).st_size
for room in range(0, 20):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
    try:
        while True:
            one_round(writer)
            size = os.stat(sys.argv[1]).st_size
    except ConfigError as error:
        print(error, flush=True)
    assert os.stat(sys.argv[1]).st_size == size
committed = len(writer.ledger)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.commit()
one_round(writer)
print(committed + 2)
"""


@pytest.mark.parametrize("room_for_the_end", [True, False])
def test_a_full_disk_stops_the_run_and_leaves_a_whole_ledger(tmp_path, room_for_the_end):
    """The writes that the limit cuts short put 0, 1, 2, … bytes into the file."""
    path = tmp_path / "l.jsonl"
    script = FULL if room_for_the_end else FULL + "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, -1))\n"
    job = started(script + "writer.close()\n", path)
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    *said, rounds = printed.splitlines()
    assert len(said) == 20 and set(said) == {f"ledger={path} cannot be written (File too large)."}
    expected = Ledger("add_remove", {Round(SAMPLING, ALL): int(rounds)}, incomplete=not room_for_the_end)
    assert ledger_so_far(path) == expected
    numbers = [json.loads(line)[0] for line in path.read_text().splitlines() if line.startswith("[")]
    assert numbers == list(range(3, int(rounds) + 3))
    assert ("could not be closed" in errors) == (not room_for_the_end)


@pytest.mark.parametrize("path", ["file/l.jsonl", "file/below/l.jsonl"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ledger=.* cannot be written \((Not a directory|File exists)\)"):
        LedgerWriter(tmp_path / path)
