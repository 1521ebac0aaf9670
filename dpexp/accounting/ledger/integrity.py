"""The lines of a ledger with their links, and ledger.end.json next to it, which detects a ledger cut at its end.

{"bytes": 4567, "sha256": "…"} is the part of the ledger that was last written durably to disk. It is replaced
atomically after each such write, so that the ledger may have more bytes, never fewer. A ledger that is shorter, or
begins with other bytes, has lost lines or belongs to another run. If both files are restored together to an earlier
state, nothing here shows it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpexp.accounting.ledger.events import Round, is_integer

VERSION = 2
FORMAT = (
    "JSON Lines. In this line, run is a random number that only this run has, and not_private, if there, why what the "
    "run shows is not covered by what its rounds cost. A record is an example, or what record says; with a "
    "part, only those whose hash by its rule is at least low and below high were used. An object with a spec describes "
    "one kind of round: how its sample was drawn, and the L2 bound S and the noise's standard deviation sigma of each "
    "sum that was released from it; or a query of all records that is answered once, as before training, with its "
    "noise, that noise's scale, and how far a record more or less (S) or another in its place (S_replaced) moves the "
    "answer. Where noise was correlated from round to round, bands are c: sigma y_t was added, with y_t = (Z_t - c_1 "
    "y_{t-1} - c_2 y_{t-2} - ...)/c_0 and independent Z_t of standard deviation 1, y being 0 before the round whose "
    "number, from 0, is block. [line, spec, link] is one round of that kind, written before its result was used. An "
    "object with rounds closes the ledger: that many rounds were written in all, and sha256 is that of all lines "
    "before it; a ledger whose last line is another ends early. line counts from 1. link is the first 4 hex digits of "
    "the SHA-256 of all bytes of the file before the link; it has no key, so it shows accidents, not forgery."
)


@dataclass(slots=True)
class Chain:
    """The lines of a ledger so far, as counts and a running hash. Each method appends a line and returns its bytes.

    Attributes:
        lines, specs, rounds: their numbers so far.
        size: of all lines, in bytes.
    """

    lines: int = 0
    size: int = 0
    specs: int = 0
    rounds: int = 0
    _sha: Any = field(default_factory=hashlib.sha256)

    def header(self, facts: Mapping[str, object]) -> bytes:
        return self._object({"dpexp_ledger": VERSION, **facts, "format": FORMAT})

    def spec(self, round_: Round) -> bytes:
        line = self._object({"spec": self.specs, **round_.facts()})
        self.specs += 1
        return line

    def round(self, spec: int) -> bytes:
        self.rounds += 1
        return self._linked(b'[%d,%d,"' % (self.lines + 1, spec), b'"]\n')

    def closing(self) -> bytes:
        return self._object({"rounds": self.rounds, "sha256": self.sha256()})

    def add(self, line: bytes) -> bytes:
        """Appends an existing line, and returns the link that it should have."""
        self._sha.update(line[:-7])
        link = self._sha.hexdigest()[:4].encode()
        self._sha.update(line[-7:])
        self.lines += 1
        self.size += len(line)
        return link

    def sha256(self) -> str:
        """The SHA-256 of all lines so far, in hex digits."""
        return self._sha.hexdigest()

    def copy(self) -> "Chain":
        return replace(self, _sha=self._sha.copy())

    def _object(self, content: dict[str, object]) -> bytes:
        return self._linked(json.dumps({"line": self.lines + 1, **content})[:-1].encode() + b', "link": "', b'"}\n')

    def _linked(self, before: bytes, after: bytes) -> bytes:
        self._sha.update(before)
        after = self._sha.hexdigest()[:4].encode() + after
        self._sha.update(after)
        self.lines += 1
        self.size += len(before) + len(after)
        return before + after


def end_of(ledger: Path) -> Path:
    """The path of its end file."""
    return ledger.with_suffix(".end.json")


def write_end(ledger: Path, position: Mapping[str, Any]) -> None:
    """Replaces the end file. If it cannot be written, the one before stays, which is still true."""
    path = end_of(ledger)
    partial = path.with_suffix(".part")
    with suppress(OSError):
        with partial.open("w") as file:
            file.write(json.dumps(position) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def read_end(ledger: Path) -> dict[str, Any] | None:
    """The end file; None if it is missing or damaged. Read it before the ledger, which may be growing."""
    try:
        end = json.loads(end_of(ledger).read_bytes())
    except (OSError, ValueError):
        return None
    valid = isinstance(end, dict) and end.keys() == {"bytes", "sha256"} and isinstance(end["sha256"], str)
    return end if valid and is_integer(end["bytes"]) and end["bytes"] >= 0 else None


def missing(ledger: Path, end: Mapping[str, Any]) -> str | None:
    """How the ledger differs from its end file; None if it does not."""
    with ledger.open("rb") as file:
        beginning = file.read(end["bytes"])
    if hashlib.sha256(beginning).hexdigest() == end["sha256"]:
        return None
    if len(beginning) < end["bytes"]:
        return f"{end['bytes']} bytes of it were on disk, as {end_of(ledger).name} says, and {len(beginning)} are left"
    return f"it does not begin with the {end['bytes']} bytes that were on disk, as {end_of(ledger).name} says"
