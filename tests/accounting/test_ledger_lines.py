"""A ledger file line by line, against JSON and SHA-256 alone: what is read, and what is refused."""

import hashlib
import json
import math
import warnings

import pytest
from test_ledger import closed

from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.ledger.integrity import end_of
from dpexp.errors import ConfigError


def linked(lines):
    """A ledger file, from its lines without numbers and links; strings are taken as they are, and a sha256 of None is
    made the right one."""
    file = b""
    for number, line in enumerate(lines, 1):
        if isinstance(line, str):
            file += line.encode()
            continue
        before, after = f'[{number},{line},"', '"]\n'
        if isinstance(line, dict):
            right = {"sha256": hashlib.sha256(file).hexdigest()} if line.get("sha256", "") is None else {}
            before, after = json.dumps({"line": number} | line | right)[:-1] + ', "link": "', '"}\n'
        file += before.encode()
        file += (hashlib.sha256(file).hexdigest()[:4] + after).encode()
    return file


HEADER = {"dpexp_ledger": 2, "adjacency": "add_remove"}
SPEC = {
    "spec": 0,
    "sampling": {"policy": "poisson", "q": 0.01, "n": 60_000},
    "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}],
}


def test_the_file_is_plain_json_lines(tmp_path):
    file = b"".join(closed(tmp_path / "l.jsonl", 2))
    header, *lines, closing = [json.loads(line) for line in file.splitlines()]
    assert header["dpexp_ledger"] == 2 and header["adjacency"] == "add_remove"
    assert "SHA-256 of all bytes of the file before the link" in header["format"]
    assert lines[0]["queries"] == [{"group": "all", "S": 1.0, "sigma": 4.0}]
    assert [line[:2] for line in lines[1:]] == [[3, 0], [4, 0]]
    assert closing["line"] == 5 and closing["rounds"] == 2
    assert closing["sha256"] == hashlib.sha256(file[: file.rindex(b'{"line": 5')]).hexdigest()
    del header["line"], header["link"], closing["line"], closing["link"]
    assert file == linked([header, SPEC, 0, 0, closing])


# Damage


def test_a_file_cut_off_anywhere_is_read_so_far_with_a_warning(tmp_path):
    path = tmp_path / "l.jsonl"
    header, spec, *rest = closed(path)
    end_of(path).unlink()  # as of a run that was killed before it came to write it
    whole = path.read_bytes()
    ends = [len(header + spec + b"".join(rest[: k + 1])) for k in range(3)]
    for size in sorted({*range(0, len(whole), 29), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(whole[:size])
        if size < len(header):
            with pytest.raises(ConfigError, match="not a dpexp ledger"):
                read_ledger(path)
            continue
        rounds = sum(end <= size for end in ends)
        with pytest.warns(UserWarning, match=f"ends early, after {rounds} rounds: the run was killed or"):
            ledger = read_ledger(path)
        assert len(ledger) == rounds and ledger.incomplete
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_ledger(path)) == 3


def refused(path, lines):
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError) as said:
        read_ledger(path)
    return str(said.value)


def test_lines_lost_repeated_or_moved_are_refused(tmp_path):
    path = tmp_path / "l.jsonl"
    lines = closed(path, 5)
    for k in range(1, len(lines) - 1):
        before, (this, following), after = lines[:k], lines[k : k + 2], lines[k + 2 :]
        for changed, place, number in (
            ([following], k + 1, k + 2), ([this, this, following], k + 2, k + 1), ([following, this], k + 1, k + 2)
        ):  # fmt: skip
            said = refused(path, [*before, *changed, *after])
            assert f"line {place} has the line number {number}" in said
    assert "not a dpexp ledger" in refused(path, lines[1:])
    assert "line 4 has the line number 6" in refused(path, lines[:3] + lines[5:])


def test_every_edit_is_refused(tmp_path, monkeypatch):
    """Each byte of a closed ledger in turn: none is redundant, none goes unread. (Links have 16 bits: of an edit in a
    ledger with another run's number, the next line may be the first to tell.)"""
    monkeypatch.setattr("dpexp.accounting.ledger.writer.os.urandom", bytes)
    monkeypatch.setattr("dpexp.accounting.ledger.integrity.FORMAT", "JSON Lines.")  # a quarter of the bytes
    path = tmp_path / "l.jsonl"
    lines = closed(path)
    whole = b"".join(lines)
    number = 1
    for place, byte in enumerate(whole[:-1]):  # without the last line break the last line is half written
        said = refused(path, [whole[:place], bytes([byte + 1]), whole[place + 1 :]])
        assert f"line {number}" in said or "not a dpexp ledger" in said
        number += byte == ord("\n")
    said = refused(path, [whole.replace(b'"sigma": 4.0', b'"sigma": 9.0')])
    assert "line 2 has the link" in said and "so this line or one before it was edited" in said
    added = lines[3].replace(b"[4,", b"[5,")
    assert "line 5 has the link" in refused(path, [*lines[:4], added])


# Lines in order, with the right links, that make no sense


SAMPLE = {"policy": "poisson", "q": 0.1, "n": 5}
QUERY = {"group": "a", "S": 1.0, "sigma": 1.0}


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense\n", "not JSON"),
        ("[" * 100_000 + "\n", "not JSON"),
        ('{"line": 4, "line": 4}\n', "gives a key twice"),
        ('{"line": 4}\n', "no number and link"),
        ('{"line": true, "link": "0000"}\n', "has the line number True"),
        (-1, "no round of an earlier spec"),
        ({"round": 0}, "no round of an earlier spec"),
        ({"spec": 0, "sampling": SAMPLE, "queries": [QUERY]}, "out of turn; the next is 1"),
        ({"spec": 1, "sampling": SAMPLE | {"policy": "shuffle"}, "queries": [QUERY]}, "shuffle"),
        ({"spec": 1, "sampling": SAMPLE, "queries": []}, "at least one"),
        ({"spec": 1, "sampling": SAMPLE | {"q": math.nan}, "queries": [QUERY]}, r"sampling_rate=nan\) must lie"),
        ({"spec": 1, "sampling": SAMPLE | {"x": 1}, "queries": [QUERY]}, "x=1 contradicts"),
        ({"spec": 1, "sampling": SAMPLE, "queries": [QUERY | {"sigma": 10**400}]}, "sigma"),
        ({"spec": 1, "sampling": SAMPLE, "queries": [QUERY | {"S": math.nan}]}, "S=nan"),
        ({"rounds": 2, "sha256": None}, "closes the ledger after 2 rounds .* there are 1"),
        ({"rounds": 1, "sha256": "0"}, "with the digest '0'"),
        (HEADER, "no closing line"),
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_refused(tmp_path, line, message):
    path = tmp_path / "l.jsonl"
    path.write_bytes(linked([HEADER, SPEC, 0]))
    assert len(ledger_so_far(path)) == 1
    path.write_bytes(linked([HEADER, SPEC, 0, line]))
    with pytest.raises(ConfigError, match=f"line 4.*{message}"):
        read_ledger(path)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    for text in ("{}\n", "[]\n", "\n", "", '{"dpexp_ledger": 1}\n', '{"dpexp_ledger": 3}\n', '{"dpexp_ledger": 2'):
        (tmp_path / "l.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"not (a dpexp ledger|JSON)"):
            read_ledger(tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ledger(tmp_path / "missing.jsonl")
