"""What may happen to a ledger's file while a run is writing it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import add, round_of, write_run
from test_ledger import ONE, OTHER, SAMPLING, run_of

from dpexp.accounting.ledger import LedgerWriter, ledger_so_far, read_ledger
from dpexp.errors import ConfigError


@pytest.fixture
def writer(tmp_path):
    """Has written three rounds."""
    return write_run(tmp_path / "run" / "l.jsonl", run_of(ONE, ONE, ONE), close=False)


def resumed(path, position=None, planned=(SAMPLING,)):
    """The number of rounds after a resumed run has added one."""
    writer = LedgerWriter(path, planned=planned, resume=True, position=position)
    add(writer, ONE)
    writer.close()
    return len(read_ledger(path))


# Lost


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


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


def edited_unseen(path):
    """As on a file system whose timestamps are too coarse."""
    edited(path)


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def deleted_with_its_folder(path):
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize(
    "lose, act, message",
    [
        (truncated, "commit", "was changed from [0-9]+ bytes"), (added_to, "close", "was changed from"),
        (edited, "commit", "was edited while"), (edited_unseen, "sync", "was edited while"),
        (edited_unseen, "close", "was edited while"),
        (replaced, "commit", "was replaced by another file"), (Path.unlink, "sync", "was deleted or moved"),
        (deleted_with_its_folder, "commit", "was deleted or moved"),
    ],
)  # fmt: skip
def test_a_lost_ledger_stops_the_run(writer, lose, act, message, monkeypatch):
    path = writer.path
    if lose is edited_unseen:
        monkeypatch.setattr("dpexp.accounting.ledger.writer._times", lambda found: (0, 0))
    lose(path)
    left = path.read_bytes() if path.exists() else None
    with pytest.raises(ConfigError, match=f"{message}.*its 3 rounds count"):
        add(writer, ONE) if act == "commit" else getattr(writer, act)()
    assert (path.read_bytes() if path.exists() else None) == left, "the new file may be someone else's"
    writer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        add(writer, ONE)


def test_a_file_that_was_touched_but_not_changed_is_continued(writer):
    before = writer.path.stat().st_mtime_ns
    while writer.path.stat().st_mtime_ns == before:
        writer.path.touch()
    add(writer, ONE)
    writer.close()
    assert read_ledger(writer.path) == writer.ledger


# Another run's


def written(path, z):
    """A closed ledger of rounds with these z."""
    return write_run(path, run_of(*(round_of(one, 0.01, n=60_000) for one in z)))


@pytest.mark.parametrize(
    "z", [[4, 90, 90], [4, 4, 90], [4, 4]], ids=["one cheaper", "another run that did the same", "lost at the end"]
)
def test_only_a_ledger_that_begins_as_the_checkpoints_is_continued(tmp_path, z):
    """However many rounds it has, and although its links are right."""
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    position = written(own, [4, 4, 90]).position
    written(other, z)
    before = other.read_bytes()
    with pytest.raises(ConfigError, match="does not begin with the rounds that the checkpoint's run had written"):
        resumed(other, position)
    assert other.read_bytes() == before and resumed(own, position) == 4


# While it is written


def test_an_interrupt_in_the_middle_of_a_write_leaves_a_whole_ledger(writer, monkeypatch):
    """Ctrl-C reaches Python when the system call returns: the line is in the file, and the round is not released."""
    write = os.write

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add(writer, OTHER)
    monkeypatch.setattr(os, "write", write)
    assert len(ledger_so_far(writer.path)) == 3
    add(writer, OTHER)
    writer.close()
    assert read_ledger(writer.path) == writer.ledger and len(writer.ledger) == 4


COMMON = """
import os, resource, sys, time
from dpexp.accounting.ledger import LedgerWriter, SumQueryEvent
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError

def one_round(writer):
    writer.sample(sampling_event("poisson", 0.01, 60_000))
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
        assert "is closed, or belongs to the process that forked" in said
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


def test_a_full_disk_stops_the_run_and_leaves_a_whole_ledger(tmp_path):
    """The writes that the limit cuts short put 0, 1, 2, … bytes into the file."""
    path = tmp_path / "l.jsonl"
    job = started(FULL + "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, -1))\nwriter.close()\n", path)
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    *said, rounds = printed.splitlines()
    assert len(said) == 20 and set(said) == {f"ledger={path} cannot be written (File too large)."}
    assert ledger_so_far(path) == replace(run_of(*[ONE] * int(rounds)), incomplete=True)
    numbers = [json.loads(line)[0] for line in path.read_text().splitlines() if line.startswith("[")]
    assert numbers == list(range(3, int(rounds) + 3))
    assert "could not be closed" in errors
