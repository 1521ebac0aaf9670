import hashlib
import json
import math
import time
import warnings

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


def linked(lines):
    """A ledger file, from its lines without numbers and links; strings are taken as they are."""
    file = b""
    for number, line in enumerate(lines, 1):
        if isinstance(line, str):
            file += line.encode()
            continue
        before = (
            f'[{number},{line},"' if isinstance(line, int) else json.dumps({"line": number} | line)[:-1] + ', "link": "'
        )
        if line == {"rounds": 2}:
            before = before[: -len(', "link": "')] + f', "sha256": "{hashlib.sha256(file).hexdigest()}", "link": "'
        file += before.encode()
        after = f'{hashlib.sha256(file).hexdigest()[:4]}"{"]" if isinstance(line, int) else "}"}\n'
        file += after.encode()
    return file


HEADER = {"dpexp_ledger": 2, "adjacency": "add_remove"}
SPEC = {
    "spec": 0,
    "sampling": {"policy": "poisson", "q": 0.01, "n": 60_000},
    "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}],
}


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


# Damage


def test_wherever_a_file_is_cut_off_it_is_read_so_far_and_said(tmp_path):
    path = tmp_path / "l.jsonl"
    header, spec, *rest = closed(path)
    whole = path.read_bytes()
    ends = [len(header + spec + b"".join(rest[: k + 1])) for k in range(3)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size < len(header):
            with pytest.raises(ConfigError, match="not a dpexp ledger"):
                read_ledger(path)
            continue
        rounds = sum(end <= size for end in ends)
        with pytest.warns(UserWarning, match=f"ends early, after {rounds} rounds: the run was killed or"):
            ledger = read_ledger(path)
        assert len(ledger) == rounds and ledger.truncated
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_ledger(path)) == 3


def refused(path, lines):
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError) as said:
        read_ledger(path)
    return str(said.value)


def test_lines_lost_repeated_or_moved_are_said(tmp_path):
    path = tmp_path / "l.jsonl"
    lines = closed(path, 5)
    for k in range(1, len(lines) - 1):
        said = refused(path, lines[:k] + lines[k + 1 :])
        assert f"line {k + 1} says that it is line {k + 2}" in said
        said = refused(path, lines[: k + 1] + lines[k:])
        assert f"line {k + 2} says that it is line {k + 1}" in said
        said = refused(path, [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]])
        assert f"line {k + 1} says that it is line {k + 2}" in said
    assert "not a dpexp ledger" in refused(path, lines[1:])
    assert "line 4 says that it is line 6" in refused(path, lines[:3] + lines[5:])


def test_every_edit_is_said(tmp_path):
    """Each byte of a closed ledger in turn: none is redundant, none goes unread."""
    path = tmp_path / "l.jsonl"
    lines = closed(path)
    whole = b"".join(lines)
    number = 1
    for place, byte in enumerate(whole):
        edited = whole[:place] + bytes([byte + 1]) + whole[place + 1 :]
        if place == len(whole) - 1:
            continue  # the last line break; without it the last line is half written
        said = refused(path, [edited])
        assert f"line {number}" in said or "not a dpexp ledger" in said
        number += byte == ord("\n")
    path.write_bytes(b"".join(lines).replace(b'"sigma": 4.0', b'"sigma": 9.0'))
    with pytest.raises(ConfigError, match=r"line 2 has the link .* so this line or one before it was edited"):
        read_ledger(path)


def test_a_query_removed_from_a_spec_is_said(tmp_path):
    path = tmp_path / "l.jsonl"
    lines = closed(path, 2, (SumQueryEvent("conv", 1.0, 4.0), SumQueryEvent("fc", 2.0, 3.0)))
    spec = lines[1].replace(b'{"group": "conv", "S": 1.0, "sigma": 4.0}, ', b"")
    assert spec != lines[1]
    assert "line 2" in refused(path, [lines[0], spec, *lines[2:]])


def test_an_added_line_with_the_right_number_is_said(tmp_path):
    path = tmp_path / "l.jsonl"
    lines = closed(path, 2)
    added = lines[3].replace(b"[4,", b"[5,")
    assert "line 5 has the link" in refused(path, [*lines[:4], added])


def test_a_half_written_line_behind_a_closing_line_is_said(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_bytes(b"".join(closed(path)) + b"[7,")
    with pytest.warns(UserWarning, match="ends early, after 3 rounds"):
        assert read_ledger(path).truncated


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


# Lines in order, with the right links, that make no sense


SAMPLE = {"policy": "poisson", "q": 0.1, "n": 5}
QUERY = {"group": "a", "S": 1.0, "sigma": 1.0}


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense\n", "not JSON"),
        ("[" * 100_000 + "\n", "not JSON"),
        ('{"line": 4, "line": 4}\n', "gives a key twice"),
        ("[1]\n", "no number and link"),
        ("17\n", "no number and link"),
        ('{"line": 4}\n', "no number and link"),
        ('{"line": true, "link": "0000"}\n', "says that it is line True"),
        (7, "no round of a spec before it"),
        (-1, "no round of a spec before it"),
        ({"round": 0}, "no round of a spec before it"),
        ({"spec": 0, "sampling": SAMPLE, "queries": [QUERY]}, "out of turn; the next is 1"),
        ({"spec": [1], "sampling": SAMPLE, "queries": [QUERY]}, "out of turn"),
        ({"spec": True, "sampling": SAMPLE, "queries": [QUERY]}, "not by a whole number"),
        ({"spec": 1, "sampling": {"policy": "poisson", "q": 0.1}, "queries": [QUERY]}, "not understood"),
        ({"spec": 1, "sampling": SAMPLE | {"policy": "shuffle"}, "queries": [QUERY]}, "shuffle"),
        ({"spec": 1, "sampling": SAMPLE, "queries": []}, "at least one"),
        ({"spec": 1, "sampling": SAMPLE | {"q": math.nan}, "queries": [QUERY]}, "q=nan"),
        ({"spec": 1, "sampling": SAMPLE | {"q": "1"}, "queries": [QUERY]}, "q=1"),
        ({"spec": 1, "sampling": SAMPLE | {"n": True}, "queries": [QUERY]}, "n=True"),
        ({"spec": 1, "sampling": SAMPLE | {"x": 1}, "queries": [QUERY]}, "not understood"),
        ({"spec": 1, "sampling": SAMPLE, "queries": [QUERY | {"S": 1e-200}]}, "between 1e-8 and 1e8"),
        ({"spec": 1, "sampling": SAMPLE, "queries": [QUERY | {"sigma": 10**400}]}, "sigma"),
        ({"spec": 1, "sampling": SAMPLE, "queries": [QUERY | {"S": math.nan}]}, "S=nan"),
        ({"rounds": 2}, "closes the ledger after 2 rounds .* there are 1"),
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
    for text in ("{}\n", "[]\n", "\n", "", '{"dpexp_ledger": 3}\n', '{"dpexp_ledger": 2'):
        (tmp_path / "l.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"not (a dpexp ledger|JSON)"):
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


@pytest.mark.parametrize("changed", [{"q": [0.001]}, {"n": 50_000}, {"policy": "all"}, {"q": 0.01}])
def test_a_header_that_says_otherwise_than_its_rounds_is_refused(tmp_path, changed):
    path = tmp_path / "l.jsonl"
    planned = {"policy": "poisson", "n": 60_000, "q": [0.01]}
    path.write_bytes(linked([HEADER | {"sampling": planned}, SPEC, 0]))
    assert len(ledger_so_far(path)) == 1
    path.write_bytes(linked([HEADER | {"sampling": planned | changed}, SPEC, 0]))
    with pytest.raises(ConfigError, match="the header"):
        read_ledger(path)


def test_a_whole_ledger_is_written_as_a_run_would_write_it(tmp_path):
    writer = LedgerWriter(tmp_path / "run.jsonl", planned=[SAMPLING])
    for _ in range(3):
        one_round(writer)
    one_round(writer, (SumQueryEvent("other", 1.0, 2.0),))
    writer.close()
    write_ledger(tmp_path / "plan.jsonl", writer.ledger)
    assert (tmp_path / "plan.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()
    other = SamplingEvent("shuffle", 0.5, 10, epoch=0)
    mixed = Ledger("replace_null", {Round(SAMPLING, ALL): 2, Round(other, ALL): 1})
    write_ledger(tmp_path / "mixed.jsonl", mixed)
    assert read_ledger(tmp_path / "mixed.jsonl") == mixed
    write_ledger(tmp_path / "early.jsonl", Ledger("add_remove", {Round(SAMPLING, ALL): 2}, truncated=True))
    assert ledger_so_far(tmp_path / "early.jsonl").truncated, "what ended early does not become whole"


# Version 1

FIRST = (
    '{"dpexp_ledger": 1, "adjacency": "add_remove", "sampling": {"policy": "poisson", "n": 60000, "q": [0.01]}}\n',
    json.dumps(SPEC | {"spec": 7}) + "\n",
    '{"round": 7}\n',
)


def test_version_1_is_read(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_text("".join(FIRST) + 2 * FIRST[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_ledger(path) == Ledger("add_remove", {Round(SAMPLING, ALL): 3})
    with pytest.raises(ConfigError, match="is of version 1, which is read but not continued"):
        LedgerWriter(path, planned=[SAMPLING], resume=True)
    for early in (FIRST[0], "".join(FIRST) + '{"roun'):
        path.write_text(early)
        with pytest.warns(UserWarning, match="ends early"):
            assert len(read_ledger(path)) == early.count("round")


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "not JSON"),
        ("[1]", "neither a spec nor a round"),
        ('{"round": 8}', "has not defined before"),
        ('{"round": true}', "names round spec True"),
        ('{"round": 7, "times": -5}', "neither a spec nor a round"),
        (FIRST[0][:-1], "neither a spec nor a round"),
        (FIRST[1][:-1], "twice"),
        (json.dumps(SPEC | {"spec": [1]}), "not by a whole number"),
        (json.dumps(SPEC | {"spec": 8, "queries": []}), "at least one"),
        (json.dumps(SPEC | {"spec": 8, "sampling": {"policy": "poisson", "q": 0.02, "n": 60_000}}), "the header says"),
    ],
)
def test_a_line_of_version_1_that_makes_no_sense_is_refused(tmp_path, line, message):
    path = tmp_path / "l.jsonl"
    path.write_text("".join(FIRST) + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_ledger(path)


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
