"""What may happen to a ledger's file while a run is writing it."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SamplingEvent,
    SumQueryEvent,
    ledger_so_far,
    read_ledger,
)
from dpexp.errors import ConfigError

SAMPLING = SamplingEvent("poisson", 0.01, 60_000)
QUERY = SumQueryEvent("all", 1.0, 4.0)


def one_round(writer, query=QUERY):
    writer.sample(SAMPLING)
    writer.query(query)
    writer.commit()


@pytest.fixture
def writer(tmp_path):
    """Has written three rounds."""
    writer = LedgerWriter(tmp_path / "run" / "l.jsonl", planned=[SAMPLING])
    for _ in range(3):
        one_round(writer)
    return writer


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
    """In place, as often as the clock of the file's times needs to go on."""
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


LOSSES = {
    truncated: "was changed from [0-9]+ bytes",
    emptied: "was changed from [0-9]+ bytes to 0",
    without_a_line: "was changed from",
    added_to: "was changed from",
    edited: "was edited while",
    edited_with_its_time_set_back: "was edited while",
    replaced: "was replaced by another file",
    deleted: "was deleted or moved",
    deleted_with_its_folder: "was deleted or moved",
}


@pytest.mark.parametrize("act", ["commit", "sync", "close"])
@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_ledger_stops_the_run_and_is_rescued(writer, lose, act):
    path, known = writer.path, writer.ledger
    lose(path)
    left = path.read_bytes() if path.exists() else None
    with pytest.raises(ConfigError, match=f"{LOSSES[lose]}.* its 3 rounds are in .*l.rescued1.jsonl"):
        one_round(writer) if act == "commit" else getattr(writer, act)()
    assert (path.read_bytes() if path.exists() else None) == left, "what lies there now is somebody else's"
    rescued = path.with_name("l.rescued1.jsonl")
    assert read_ledger(rescued) == known == writer.ledger
    writer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        one_round(writer)
    rescued.replace(path)
    again = LedgerWriter(path, planned=[SAMPLING], resume=True)
    one_round(again)
    again.close()
    assert len(read_ledger(path)) == 4


@pytest.mark.parametrize("act", ["sync", "close"])
def test_an_edit_that_no_time_tells_of_is_found_by_the_next_checkpoint_and_the_end(writer, monkeypatch, act):
    """One within a tick of the file system's clock, say."""
    monkeypatch.setattr("dpexp.accounting.ledger.writer._times", lambda found: (0, 0))
    one_round(writer)
    edited(writer.path)
    one_round(writer)
    left = writer.path.read_bytes()
    with pytest.raises(ConfigError, match=r"was edited while .* its 5 rounds are in"):
        getattr(writer, act)()
    assert writer.path.read_bytes() == left
    assert read_ledger(writer.path.with_name("l.rescued1.jsonl")) == writer.ledger


def touched(path):
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        path.touch()


def rewritten_as_it_was(path):
    with path.open("rb+") as file:
        file.write(path.read_bytes())


def given_a_second_name(path):
    os.link(path, path.with_name("backup"))


def made_read_only(path):
    path.chmod(0o400)


@pytest.mark.parametrize("act", ["commit", "sync", "close"])
@pytest.mark.parametrize(
    "touch", [touched, rewritten_as_it_was, given_a_second_name, made_read_only], ids=lambda touch: touch.__name__
)
def test_a_file_that_was_touched_and_holds_what_it_held_stops_nothing(writer, touch, act):
    touch(writer.path)
    one_round(writer) if act == "commit" else getattr(writer, act)()
    writer.close()
    assert read_ledger(writer.path) == writer.ledger
    assert not list(writer.path.parent.glob("*rescued*"))


def test_what_nobody_touched_is_not_read_again_each_round(writer, monkeypatch):
    monkeypatch.setattr(LedgerWriter, "_content", lambda self: pytest.fail("was read"))
    one_round(writer)
    monkeypatch.undo()
    writer.close()
    assert read_ledger(writer.path) == writer.ledger


@pytest.mark.parametrize("closed", [True, False])
def test_an_older_copy_beside_a_rescued_ledger_is_not_gone_on_with(writer, closed):
    """What lies behind the copy would count nowhere."""
    path, older = writer.path, writer.path.read_bytes()
    one_round(writer)
    path.unlink()
    with pytest.raises(ConfigError, match="rescued1"):
        one_round(writer)
    rescued = path.with_name("l.rescued1.jsonl")
    path.write_bytes(older)
    with pytest.raises(ConfigError, match=r"lacks rounds that .*l\.rescued1\.jsonl holds"):
        LedgerWriter(path, planned=[SAMPLING], resume=True)
    lines = rescued.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines if closed else lines[:-1]))
    again = LedgerWriter(path, planned=[SAMPLING], resume=True)
    one_round(again)
    again.close()
    assert len(read_ledger(path)) == 5
    LedgerWriter(path, planned=[SAMPLING], resume=True).close()


def test_what_is_rescued_is_the_file_itself(writer):
    """In its order, so that a checkpoint from before the loss is resumed with it."""
    position = writer.position
    one_round(writer, SumQueryEvent("other", 1.0, 2.0))
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


# Another run's


def written(path, rounds):
    """A closed ledger of rounds with these σ̃."""
    writer = LedgerWriter(path, planned=[SAMPLING])
    for sigma in rounds:
        one_round(writer, SumQueryEvent("all", 1.0, sigma))
    writer.close()
    return writer


def resumed(path, position):
    writer = LedgerWriter(path, planned=[SAMPLING], resume=True, position=position)
    one_round(writer)
    writer.close()
    return len(read_ledger(path))


def test_a_position_is_the_sha256_of_the_file_so_far(writer):
    file = writer.path.read_bytes()
    assert writer.position == {"bytes": len(file), "sha256": hashlib.sha256(file).hexdigest()}


@pytest.mark.parametrize(
    "rounds",
    [[90, 90, 90], [4, 90, 90], [90, 4, 4, 90], [4, 90, 4, 4], [4, 4], []],
    ids=["cheaper", "one of them cheaper", "one put before", "another order", "lost at the end", "all lost"],
)
def test_only_what_begins_as_the_run_to_resume_did_is_continued(tmp_path, rounds):
    """However many rounds it has, and although its links are right."""
    position = written(tmp_path / "own.jsonl", [4, 4, 90]).position
    written(tmp_path / "other.jsonl", rounds)
    before = (tmp_path / "other.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="does not begin with the rounds that the checkpoint's run had written"):
        resumed(tmp_path / "other.jsonl", position)
    assert (tmp_path / "other.jsonl").read_bytes() == before
    assert resumed(tmp_path / "own.jsonl", position) == 4


def test_the_run_to_resume_may_have_gone_on(writer):
    position = writer.position
    one_round(writer, SumQueryEvent("all", 1.0, 9.0))
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b"[6,")
    assert resumed(writer.path, position) == 5
    assert resumed(writer.path, position) == 6


def test_a_file_that_shrinks_in_the_middle_of_a_commit_gets_no_gap(writer, monkeypatch):
    """Between the check and the write: the line goes to the new end, not behind NUL bytes."""
    monkeypatch.setattr(LedgerWriter, "_check_file", lambda self: truncated(self.path))
    one_round(writer)
    assert b"\0" not in writer.path.read_bytes()


def test_what_was_rescued_is_never_overwritten(writer):
    path = writer.path
    path.with_name("l.rescued1.jsonl").write_text("precious")
    path.unlink()
    with pytest.raises(ConfigError, match=r"are in .*l\.rescued2\.jsonl"):
        one_round(writer)
    assert path.with_name("l.rescued1.jsonl").read_text() == "precious"


def test_what_cannot_be_rescued_is_said(writer):
    writer.path.unlink()
    writer.path.parent.rmdir()
    writer.path.parent.write_text("a file where the folder was")
    with pytest.raises(ConfigError, match=r"its 3 rounds could not be saved in .*l\.rescued1\.jsonl \(File exists\)"):
        one_round(writer)


def test_a_ledger_is_found_again_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = LedgerWriter("l.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    one_round(writer)
    writer.close()
    assert len(read_ledger(tmp_path / "l.jsonl")) == 1


def test_an_interrupt_in_the_middle_of_a_write_leaves_a_whole_ledger(writer, monkeypatch):
    """Ctrl-C reaches Python when the system call returns: the line is in the file, and the round is not released."""
    write = os.write

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_round(writer, SumQueryEvent("other", 1.0, 2.0))
    monkeypatch.setattr(os, "write", write)
    assert len(ledger_so_far(writer.path)) == 3
    one_round(writer, SumQueryEvent("other", 1.0, 2.0))
    writer.close()
    assert read_ledger(writer.path) == writer.ledger and len(writer.ledger) == 4


# Locked


def test_two_processes_cannot_continue_the_same_ledger(writer):
    path = writer.path
    with pytest.raises(ConfigError, match="being written by another process"):
        LedgerWriter(path, planned=[SAMPLING], resume=True)
    before = path.read_bytes()
    writer.close()
    LedgerWriter(path, planned=[SAMPLING], resume=True).close()
    assert path.read_bytes().startswith(before)


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


def started(script, path, **options):
    command = [sys.executable, "-c", COMMON + script, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_forked_child_does_not_hold_the_lock_of_its_killed_parent(tmp_path):
    """As loader workers, which outlive a parent that was killed by seconds."""
    parent = started(
        """
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
""",
        tmp_path / "l.jsonl",
    )
    child = int(parent.stdout.readline())
    with pytest.raises(ConfigError, match="being written by another process"):
        LedgerWriter(tmp_path / "l.jsonl", resume=True)
    parent.kill()
    parent.wait()
    os.kill(child, 0)  # it lives
    try:
        writer = LedgerWriter(tmp_path / "l.jsonl", resume=True)
    finally:
        os.kill(child, signal.SIGKILL)
    one_round(writer)
    writer.close()
    assert len(read_ledger(tmp_path / "l.jsonl")) == 2
    parent.stdout.close()
    parent.stderr.close()


def test_a_forked_child_does_not_write(tmp_path):
    job = started(
        """
child = os.fork()
if child == 0:
    try:
        one_round(writer)
    except RuntimeError as error:
        print(error, flush=True)
    writer.close()
    os._exit(0)
os.waitpid(child, 0)
one_round(writer)
writer.close()
""",
        tmp_path / "l.jsonl",
    )
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and "is closed, or belongs to the process that" in printed, errors
    assert len(read_ledger(tmp_path / "l.jsonl")) == 2


# Full

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
    """The writes that the limit cuts short get 0, 1, 2, … bytes into the file."""
    path = tmp_path / "l.jsonl"
    script = FULL if room_for_the_end else FULL + "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, -1))\n"
    job = started(script + "writer.close()\n", path)
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    *said, rounds = printed.splitlines()
    assert len(said) == 20 and set(said) == {f"ledger={path} cannot be written (File too large)."}
    assert ledger_so_far(path) == Ledger(
        "add_remove", {Round(SAMPLING, (QUERY,)): int(rounds)}, incomplete=not room_for_the_end
    )
    assert [json.loads(line)[0] for line in path.read_text().splitlines() if line.startswith("[")] == list(
        range(3, int(rounds) + 3)
    )
    assert ("could not be closed" in errors) == (not room_for_the_end)


def test_no_room_for_a_header_leaves_no_file(tmp_path):
    job = started(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (50, -1))
try:
    LedgerWriter(sys.argv[1] + ".new")
except ConfigError as error:
    print(error)
assert not os.path.exists(sys.argv[1] + ".new")
""",
        tmp_path / "l.jsonl",
    )
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and "cannot be written (File too large)" in printed, errors


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file/l.jsonl", "file/below/l.jsonl"):
        with pytest.raises(ConfigError, match=r"ledger=.* cannot be written \((Not a directory|File exists)\)"):
            LedgerWriter(tmp_path / path)
