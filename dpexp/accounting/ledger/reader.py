"""Reads ledger files. The package's docstring describes the format."""

import json
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dpexp.accounting.ledger.events import (
    ADJACENCIES,
    Ledger,
    OneTimeQueryEvent,
    Part,
    Query,
    Round,
    SumQueryEvent,
    is_integer,
)
from dpexp.accounting.ledger.integrity import VERSION, Chain, end_of, missing, read_end
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError

NEWLINE, BRACE = b"\n{"


def read_ledger(path: str | Path) -> Ledger:
    """Reads a ledger file, up to its last complete line, and warns if it ends early.

    Examples:
        >>> import dpexp, torch
        >>> from pathlib import Path
        >>> from dpexp.accounting.ledger import write_ledger
        >>> sampling, target = dpexp.Poisson(sampling_rate=0.1, steps=5), dpexp.Target(noise_multiplier=1.0)
        >>> plan = dpexp.make_plan(torch.nn.Linear(3, 1), n=100, sampling=sampling, target=target)
        >>> write_ledger(Path("planned.jsonl"), plan.ledger())
        >>> len(dpexp.read_ledger("planned.jsonl"))
        5

    Raises:
        ConfigError: the file is missing or no ledger, has missing, repeated or edited lines, contradicts itself, or has
            an invalid round.
    """
    ledger = ledger_so_far(path)
    if ledger.incomplete:
        reason = incomplete_reason(ledger)
        warnings.warn(f"the ledger {path} ends early, after {len(ledger)} rounds: {reason}.", stacklevel=2)
    return ledger


def incomplete_reason(ledger: Ledger) -> str:
    """Why a ledger is incomplete, in words."""
    if ledger.lost is not None:
        return f"lines are missing ({ledger.lost}), so that more was spent than it says"
    return "the run was killed or is still writing it, or lines are missing at its end, and more was spent"


def ledger_so_far(path: str | Path) -> Ledger:
    """`read_ledger` without the warning, such as for a run that is still writing. See `Ledger.incomplete`."""
    return contents(Path(path)).ledger


def contains_lines(written: bytes, other: bytes) -> bool:
    """Whether a ledger's bytes begin with all complete lines of another's, except for its closing line."""
    other = other[: other.rfind(b"\n") + 1]
    last = other[other.rfind(b"\n", 0, -1) + 1 :]
    if b'"sha256": ' in last:
        other = other[: -len(last)]
    return written.startswith(other)


@dataclass(frozen=True)
class Contents:
    """The contents of a ledger file. `specs` are by number; `chain` is of all complete lines."""

    ledger: Ledger
    header: dict[str, Any]
    specs: dict[int, Round]
    chain: Chain


def contents(path: Path) -> Contents:
    """Raises as `read_ledger`."""
    end = read_end(path)
    try:
        lost = missing(path, end) if end else None
        with path.open("rb") as file:
            read = _read(path, file)
    except OSError as error:
        raise ConfigError(f"the ledger {path} cannot be read ({error.strerror}).") from error
    name = end_of(path).name
    if "run" not in read.header:
        unverified = "it has no number of a run: a plan, not a run"
    elif end:
        unverified = f"if it and {name} were both restored to an earlier state, nothing would show it"
    else:
        unverified = f"there is no {name} next to it, so that it may have been cut at an earlier closing line"
    incomplete = read.ledger.incomplete or lost is not None
    ledger = replace(read.ledger, incomplete=incomplete, lost=lost, unverified=None if incomplete else unverified)
    return replace(read, ledger=ledger)


def _read(path: Path, file: BinaryIO) -> Contents:
    chain = Chain()
    header = _header(path, file.readline(), chain)
    specs: dict[int, Round] = {}
    counts: dict[bytes, int] = {}  # by spec, as round lines name it
    partial, closed_at, before = False, 0, ""
    for line in file:
        if line[-1] != NEWLINE:
            partial = True
            break
        if line[0] == BRACE:
            before = chain.sha256()
        link = chain.add(line)
        spec = line[line.find(b",") + 1 : -9]
        if spec in counts and line == b'[%d,%b,"%b"]\n' % (chain.lines, spec, link):
            counts[spec] += 1
            continue
        where = f"{path}, line {chain.lines}"
        entry = _linked(where, line, chain.lines, link)
        match sorted(entry) if isinstance(entry, dict) else None:
            case ["line", "link", "queries", "sampling", "spec"]:
                if not is_integer(entry["spec"]) or entry["spec"] != chain.specs:
                    raise ConfigError(
                        f"{where}: round spec {entry['spec']!r} is out of turn; the next is {chain.specs}."
                    )
                specs[chain.specs] = _spec(f"{where}: round spec {chain.specs}", entry)
                counts[b"%d" % chain.specs] = 0
                chain.specs += 1
            case ["line", "link", "rounds", "sha256"]:
                closed_at = chain.lines
                if (entry["rounds"], entry["sha256"]) != (sum(counts.values()), before):
                    raise ConfigError(
                        f"{where} closes the ledger after {entry['rounds']!r} rounds with the digest "
                        f"{entry['sha256']!r}, but before it there are {sum(counts.values())} with the digest {before}."
                    )
            case _:
                raise ConfigError(
                    f"{where} is no spec, no round of an earlier spec and no closing line: {line[:60]!r}."
                )
    chain.rounds = sum(counts.values())
    rounds: Counter[Round] = Counter()
    for spec, count in counts.items():
        if count:
            rounds[specs[int(spec)]] += count
    incomplete = partial or closed_at != chain.lines
    part = Part(**header["part"]) if header.get("part") is not None else None
    ledger = Ledger(
        header["adjacency"], dict(rounds), incomplete, header.get("not_private"), header.get("record"), part=part
    )
    return Contents(ledger, header, specs, chain)


def _linked(where: str, line: bytes, number: int, link: bytes) -> Any:
    """The line as JSON, if its number and its link are right."""
    entry = _parse(where, line)
    match entry:
        case {"line": own_number, "link": own_link} | [own_number, _, own_link]:
            pass
        case _:
            raise ConfigError(f"{where} has no number and link: {line[:60]!r}.")
    if own_number != number:
        raise ConfigError(
            f"{where} has the line number {own_number!r}, so lines before it were lost, repeated, added or moved."
        )
    if own_link != link.decode() or line[-7:-3] != link:
        raise ConfigError(
            f"{where} has the link {own_link!r}, but the bytes before it give {link.decode()!r}, so this line or one "
            "before it was edited."
        )
    return entry


def _header(path: Path, line: bytes, chain: Chain) -> dict[str, Any]:
    """The first line of a ledger, whose facts are understood."""
    where = f"{path}, line 1"
    header = _parse(where, line) if line.endswith(b"\n") else None
    if not isinstance(header, dict) or header.get("dpexp_ledger") != VERSION:
        raise ConfigError(f"{path} is not a dpexp ledger of version {VERSION}.")
    _linked(where, line, 1, chain.add(line))
    for name, understood in (
        ("adjacency", header.get("adjacency") in ADJACENCIES),
        ("not_private", isinstance(header.get("not_private"), str | None)),
        ("record", _is_record(header.get("record"))),
        ("part", _is_part(header.get("part"))),
    ):
        if not understood:
            raise ConfigError(f"{path}: the header's {name} {header.get(name)!r} is not understood.")
    return header


def _is_record(record: Any) -> bool:
    """Whether a header's record is a privacy unit."""
    match record:
        case None:
            return True
        case {"kind": "microbatch", "k": count} | {"kind": "user", "most": count}:
            return is_integer(count) and count >= 1
    return False


def _is_part(part: Any) -> bool:
    with suppress(ConfigError, TypeError):
        return part is None or Part(**part) is not None
    return False


def _spec(where: str, entry: dict[str, Any]) -> Round:
    try:
        if not isinstance(entry["queries"], list) or not entry["queries"]:
            raise TypeError("queries must be a list of at least one")
        return Round(sampling_event(**entry["sampling"]), tuple(_query(**query) for query in entry["queries"]))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{where} is not understood ({error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _query(**facts: Any) -> Query:
    if "query" in facts:
        return OneTimeQueryEvent(**facts)
    if isinstance(facts.get("bands"), list):
        facts["bands"] = tuple(facts["bands"])
    return SumQueryEvent(**facts)


def _parse(where: str, line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON, or gives a key twice: {line[:60]!r}.") from error


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
