"""From a ledger file to a ledger. What the lines mean is said in this package's docstring."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpexp.accounting.ledger.events import (
    ADJACENCIES,
    DiscreteSumQueryEvent,
    Ledger,
    OneTimeQueryEvent,
    Query,
    Round,
    SamplingEvent,
    SumQueryEvent,
    checked,
    is_whole,
    parts,
)
from dpexp.accounting.ledger.integrity import VERSION, Chain, end_of, missing, read_end
from dpexp.errors import ConfigError

NEWLINE, BRACE = b"\n{"


def read_ledger(path: str | Path) -> Ledger:
    """Reads a ledger file, up to its last complete line, and warns if it ends early.

    Raises:
        ConfigError: the file is missing, is no ledger, lacks or repeats lines, was edited, contradicts itself, or holds
            a round that makes no sense.
    """
    ledger = ledger_so_far(path)
    if ledger.incomplete:
        warnings.warn(
            f"the ledger {path} ends early, after {len(ledger)} rounds: {early(ledger)}.",
            stacklevel=2,
        )
    return ledger


def early(ledger: Ledger) -> str:
    """What the early end of a ledger means."""
    if ledger.lost is not None:
        return f"lines are missing ({ledger.lost}), so that more was spent than it says"
    return "the run was killed or is still writing it, or lines are missing at its end, and more was spent"


def ledger_so_far(path: str | Path) -> Ledger:
    """`read_ledger` for whoever expects an early end, as of a run under way, and tells of `truncated` himself."""
    return contents(Path(path)).ledger


def holds(written: bytes, other: bytes) -> bool:
    """Whether a ledger's bytes begin with all complete lines of another's, but for one that closes that."""
    other = other[: other.rfind(b"\n") + 1]
    last = other[other.rfind(b"\n", 0, -1) + 1 :]
    if b'"sha256": ' in last:
        other = other[: -len(last)]
    return written.startswith(other)


@dataclass(frozen=True)
class Contents:
    """All that a file says: with the ledger its header, the numbers of its specs, and the chain of its complete lines
    (None for version 1)."""

    ledger: Ledger
    header: dict[str, Any]
    specs: dict[int, Round]
    chain: Chain | None


def contents(path: Path) -> Contents:
    """Raises:
    ConfigError: as `read_ledger`.
    """
    end = read_end(path)
    try:
        lost = missing(path, end) if end else None
        with path.open("rb") as file:
            first = file.readline()
            header = _parse(f"{path}, line 1", first) if first.endswith(b"\n") else {}
            version = header.get("dpexp_ledger") if isinstance(header, dict) else None
            if version == 1:
                untold = "it is of version 1, which is not closed, so that lines may be missing at its end"
                return _ended(_version_1(path, header, file), lost, untold)
            if version == VERSION:
                untold = (
                    f"no {end_of(path).name} lies beside it, so that it may have been cut at an earlier closing line"
                )
                if end:
                    untold = f"were it and {end_of(path).name} put back to an earlier state together, it would not show"
                return _ended(_version_2(path, first, file), lost, untold)
    except OSError as error:
        raise ConfigError(f"the ledger {path} cannot be read ({error.strerror}).") from error
    raise ConfigError(f"{path} is not a dpexp ledger of version 1 or {VERSION}.")


def _ended(read: Contents, lost: str | None, untold: str) -> Contents:
    truncated = read.ledger.incomplete or lost is not None
    ledger = replace(read.ledger, incomplete=truncated, lost=lost, untold=None if truncated else untold)
    return replace(read, ledger=ledger)


def _version_1(path: Path, header: dict[str, Any], file: Iterable[bytes]) -> Contents:
    """{"round": spec} for a round; neither numbered nor linked nor closed. Equal lines are read once."""
    told = _LedgerFacts(path, header)
    lines = Counter(file)
    partial = any(not line.endswith(b"\n") for line in lines)
    for line, count in lines.items():
        if not line.endswith(b"\n"):
            continue
        entry = _parse(str(path), line)
        if _keys(entry) == ["queries", "sampling", "spec"]:
            told.define(str(path), entry, count)
        elif _keys(entry) == ["round"]:
            told.happened(str(path), entry["round"], count)
        else:
            raise ConfigError(f"{path} holds a line that is neither a spec nor a round: {line[:60]!r}.")
    return told.contents(truncated=partial or not lines)


def _version_2(path: Path, first: bytes, file: Iterable[bytes]) -> Contents:
    chain = Chain()
    told = _LedgerFacts(path, _linked(f"{path}, line 1", first, 1, chain.add(first)))
    counts: dict[bytes, int] = {}  # by spec, as round lines name it
    partial, closed_at, spec, before = False, 0, b"", ""
    for line in file:
        if line[-1] != NEWLINE:
            partial = True
            break
        if line[0] == BRACE:
            before = chain.sha256()
        link = chain.add(line)
        if spec in counts and line == b'[%d,%b,"%b"]\n' % (chain.lines, spec, link):  # as in the line before
            counts[spec] += 1
            continue
        spec = line[line.find(b",") + 1 : -9]
        if spec in counts and line == b'[%d,%b,"%b"]\n' % (chain.lines, spec, link):
            counts[spec] += 1
            continue
        where = f"{path}, line {chain.lines}"
        entry = _linked(where, line, chain.lines, link)
        if _keys(entry) == ["line", "link", "queries", "sampling", "spec"]:
            if entry["spec"] != chain.specs:
                raise ConfigError(f"{where}: round spec {entry['spec']!r} is out of turn; the next is {chain.specs}.")
            told.define(where, entry)
            chain.specs += 1
            counts[b"%d" % entry["spec"]] = 0
        elif _keys(entry) == ["line", "link", "not_private"]:
            told.not_private(where, entry["not_private"])
        elif _keys(entry) == ["line", "link", "rounds", "sha256"]:
            closed_at = chain.lines
            if (entry["rounds"], entry["sha256"]) != (sum(counts.values()), before):
                raise ConfigError(
                    f"{where} closes the ledger after {entry['rounds']!r} rounds with the digest {entry['sha256']!r}, "
                    f"but before it there are {sum(counts.values())} with the digest {before}."
                )
        else:
            raise ConfigError(f"{where} is no spec, no round of a spec before it, and no closing line: {line[:60]!r}.")
    for spec, count in counts.items():
        told.happened(str(path), int(spec), count)
    chain.rounds = sum(counts.values())
    return told.contents(truncated=partial or closed_at != chain.lines, chain=chain)


def _linked(where: str, line: bytes, number: int, link: bytes) -> Any:
    """The line as JSON, if its number and its link are those that belong there."""
    entry = _parse(where, line)
    match entry:
        case {"line": said, "link": given} | [said, _, given]:
            pass
        case _:
            raise ConfigError(f"{where} has no number and link: {line[:60]!r}.")
    if said != number:
        raise ConfigError(
            f"{where} says that it is line {said!r}, so lines before it were lost, repeated, added or moved."
        )
    if given != link.decode() or line[-7:-3] != link:
        raise ConfigError(
            f"{where} has the link {given!r}, but what stands before it gives {link.decode()!r}, so this line or one "
            "before it was edited."
        )
    return entry


def _keys(entry: Any) -> list[str] | None:
    return sorted(entry) if isinstance(entry, dict) else None


class _LedgerFacts:
    """What the lines of a file have told so far.

    Raises:
        ConfigError: the header's adjacency or privacy unit is unknown, or its reason for a run that is not private no
            text.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        if header.get("adjacency") not in ADJACENCIES:
            raise ConfigError(
                f"{path}: adjacency {header.get('adjacency')!r} is unknown; known: {', '.join(ADJACENCIES)}."
            )
        if not isinstance(header.get("not_private"), str | None):
            raise ConfigError(f"{path}: the header's not_private {header['not_private']!r} is not understood.")
        try:
            self._record = checked(header.get("record"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        self._header = header
        self._found: str | None = None  # after it began
        self._specs: dict[int, Round] = {}
        self._rounds: Counter[Round] = Counter()

    def define(self, where: str, entry: dict[str, Any], times: int = 1) -> None:
        """A spec, checked against what the header says was planned."""
        number = entry["spec"]
        if not is_whole(number):
            raise ConfigError(f"{where}: a round spec is numbered {number!r}, not by a whole number.")
        if number in self._specs or times > 1:
            raise ConfigError(f"{where}: round spec {number} is defined twice.")
        try:
            sampling = SamplingEvent(**entry["sampling"])
            if not isinstance(entry["queries"], list) or not entry["queries"]:
                raise TypeError("queries must be a list of at least one")
            self._specs[number] = Round(sampling, tuple(_query(**query) for query in entry["queries"]))
        except TypeError as error:
            raise ConfigError(f"{where}: round spec {number} is not understood ({error}).") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: round spec {number}: {error}") from error
        planned = self._header.get("sampling")
        if planned is None or self._specs[number].one_time_query is not None:
            return
        if not isinstance(planned, dict) or not isinstance(planned.get("q"), list):
            raise ConfigError(f"{where}: the header's sampling {planned!r} is not understood.")
        said = planned.get("policy"), planned.get("n"), planned["q"]
        if (sampling.policy, sampling.n) != said[:2] or sampling.q not in said[2]:
            raise ConfigError(
                f"{where}: the header says sampling {said[0]} of n={said[1]} at q in {said[2]}, but round spec "
                f"{number} says {sampling.policy} of n={sampling.n} at q={sampling.q}."
            )

    def not_private(self, where: str, reason: Any) -> None:
        if not isinstance(reason, str):
            raise ConfigError(f"{where}: not_private {reason!r} is not understood.")
        self._found = self._found or reason

    def happened(self, where: str, spec: Any, times: int) -> None:
        if not is_whole(spec) or spec not in self._specs:
            raise ConfigError(f"{where} names round spec {spec!r}, which it has not defined before.")
        if times:
            self._rounds[self._specs[spec]] += times

    def contents(self, truncated: bool, chain: Chain | None = None) -> Contents:
        exposed = self._header.get("not_private") or self._found
        ledger = Ledger(self._header["adjacency"], dict(self._rounds), truncated, exposed, self._record)
        return Contents(ledger, self._header, self._specs, chain)


def _query(**facts: Any) -> Query:
    if "parts_by" in facts:
        return parts(**facts)
    if "query" in facts:
        return OneTimeQueryEvent(**facts)
    if isinstance(facts.get("bands"), list):
        facts["bands"] = tuple(facts["bands"])
    return DiscreteSumQueryEvent(**facts) if "sigma2" in facts else SumQueryEvent(**facts)


def _parse(where: str, line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON, or gives a key twice: {line[:60]!r}.") from error


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
