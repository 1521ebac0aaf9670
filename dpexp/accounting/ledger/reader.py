"""Reads ledger files. The package's docstring describes the format."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpexp.accounting.ledger.events import (
    ADJACENCIES,
    Ledger,
    OneTimeQueryEvent,
    ParallelQueryEvent,
    Query,
    Round,
    SamplingEvent,
    SumQueryEvent,
    is_integer,
)
from dpexp.accounting.ledger.integrity import VERSION, Chain, end_of, missing, read_end
from dpexp.errors import ConfigError

NEWLINE, BRACE = b"\n{"
SMOOTHING = 64  # t²


def read_ledger(path: str | Path) -> Ledger:
    """Reads a ledger file, up to its last complete line, and warns if it ends early.

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
            first = file.readline()
            header = _parse(f"{path}, line 1", first) if first.endswith(b"\n") else {}
            version = header.get("dpexp_ledger") if isinstance(header, dict) else None
            if version != VERSION:
                raise ConfigError(f"{path} is not a dpexp ledger of version {VERSION}.")
            read = _read(path, first, file)
    except OSError as error:
        raise ConfigError(f"the ledger {path} cannot be read ({error.strerror}).") from error
    name = end_of(path).name
    if end:
        unverified = f"if it and {name} were both restored to an earlier state, nothing would show it"
    else:
        unverified = f"there is no {name} next to it, so that it may have been cut at an earlier closing line"
    incomplete = read.ledger.incomplete or lost is not None
    ledger = replace(read.ledger, incomplete=incomplete, lost=lost, unverified=None if incomplete else unverified)
    return replace(read, ledger=ledger)


def _read(path: Path, first: bytes, file: Iterable[bytes]) -> Contents:
    chain = Chain()
    builder = _LedgerBuilder(path, _linked(f"{path}, line 1", first, 1, chain.add(first)))
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
        if _keys(entry) == ["line", "link", "queries", "sampling", "spec"]:
            if not is_integer(entry["spec"]) or entry["spec"] != chain.specs:
                raise ConfigError(f"{where}: round spec {entry['spec']!r} is out of turn; the next is {chain.specs}.")
            builder.add_spec(where, entry)
            chain.specs += 1
            counts[b"%d" % entry["spec"]] = 0
        elif _keys(entry) == ["line", "link", "not_private"]:
            builder.add_not_private(where, entry["not_private"])
        elif _keys(entry) == ["line", "link", "rounds", "sha256"]:
            closed_at = chain.lines
            if (entry["rounds"], entry["sha256"]) != (sum(counts.values()), before):
                raise ConfigError(
                    f"{where} closes the ledger after {entry['rounds']!r} rounds with the digest {entry['sha256']!r}, "
                    f"but before it there are {sum(counts.values())} with the digest {before}."
                )
        else:
            raise ConfigError(f"{where} is no spec, no round of an earlier spec and no closing line: {line[:60]!r}.")
    for spec, count in counts.items():
        builder.add_rounds(int(spec), count)
    chain.rounds = sum(counts.values())
    return builder.contents(partial or closed_at != chain.lines, chain)


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


def _keys(entry: Any) -> list[str] | None:
    return sorted(entry) if isinstance(entry, dict) else None


def _is_record(record: Any) -> bool:
    """Whether a header's record is a privacy unit."""
    match record:
        case None:
            return True
        case {"kind": "microbatch", "k": count} | {"kind": "user", "most": count}:
            return is_integer(count) and count >= 1
    return False


class _LedgerBuilder:
    """The ledger of the lines read so far."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        if header.get("adjacency") not in ADJACENCIES:
            raise ConfigError(
                f"{path}: adjacency {header.get('adjacency')!r} is unknown; known: {', '.join(ADJACENCIES)}."
            )
        if not isinstance(header.get("not_private"), str | None):
            raise ConfigError(f"{path}: the header's not_private {header['not_private']!r} is not understood.")
        if not _is_record(header.get("record")):
            raise ConfigError(f"{path}: the header's record {header['record']!r} is not understood.")
        self._header = header
        self._not_private: str | None = None  # found after the header was written
        self._specs: dict[int, Round] = {}
        self._rounds: Counter[Round] = Counter()

    def add_spec(self, where: str, entry: dict[str, Any]) -> None:
        """Adds a spec, if it agrees with the sampling that the header says was planned."""
        number = entry["spec"]
        try:
            sampling = SamplingEvent(**entry["sampling"])
            if not isinstance(entry["queries"], list) or not entry["queries"]:
                raise TypeError("queries must be a list of at least one")
            self._specs[number] = Round(sampling, tuple(_query(**query) for query in entry["queries"]))
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"{where}: round spec {number} is not understood ({error}).") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: round spec {number}: {error}") from error
        planned = self._header.get("sampling")
        if planned is None or self._specs[number].one_time_query is not None:
            return
        if not isinstance(planned, dict) or not isinstance(planned.get("q"), list):
            raise ConfigError(f"{where}: the header's sampling {planned!r} is not understood.")
        policy, n, rates = planned.get("policy"), planned.get("n"), planned["q"]
        if (sampling.policy, sampling.n) != (policy, n) or sampling.q not in rates:
            raise ConfigError(
                f"{where}: the header says sampling {policy} of n={n} at q in {rates}, but round spec {number} says "
                f"{sampling.policy} of n={sampling.n} at q={sampling.q}."
            )

    def add_not_private(self, where: str, reason: Any) -> None:
        if not isinstance(reason, str):
            raise ConfigError(f"{where}: not_private {reason!r} is not understood.")
        self._not_private = self._not_private or reason

    def add_rounds(self, spec: int, times: int) -> None:
        if times:
            self._rounds[self._specs[spec]] += times

    def contents(self, incomplete: bool, chain: Chain) -> Contents:
        reason = self._header.get("not_private") or self._not_private
        ledger = Ledger(self._header["adjacency"], dict(self._rounds), incomplete, reason, self._header.get("record"))
        return Contents(ledger, self._header, self._specs, chain)


def _query(**facts: Any) -> Query:
    if "parts_by" in facts:
        facts["queries"] = tuple(OneTimeQueryEvent(**part) for part in facts.get("queries", ()))
        return ParallelQueryEvent(**facts)
    if "query" in facts:
        return OneTimeQueryEvent(**facts)
    if isinstance(facts.get("bands"), list):
        facts["bands"] = tuple(facts["bands"])
    return _in_integers(**facts) if "sigma2" in facts else SumQueryEvent(**facts)


def _in_integers(group: str, grid: float, S2: int, sigma2: int) -> SumQueryEvent:
    """The Gaussian sum query that costs as much as one on integers, which ledgers of earlier versions may have
    (docs/mathematics.md, discrete Gaussian noise)."""
    if not (type(S2) is type(sigma2) is int and S2 >= 1 and sigma2 >= 2 * SMOOTHING):
        raise ConfigError(f"group {group!r}: S2={S2!r} and sigma2={sigma2!r} must be whole numbers above 0 and 127.")
    return SumQueryEvent(group, grid * math.sqrt(S2), grid * math.sqrt(sigma2 - SMOOTHING))


def _parse(where: str, line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON, or gives a key twice: {line[:60]!r}.") from error


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
