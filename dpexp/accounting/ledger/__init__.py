"""The privacy ledger (arXiv 1812.06210, section 6), as events in memory and as JSON Lines on disk.

The file is append-only and readable without this package:

    {"line": 1, "dpexp_ledger": 2, "run": "9f0c…", "adjacency": "add_remove",
     "sampling": {"policy": "poisson", "n": 60000, "q": [0.01]}, "format": "JSON Lines. …", "link": "1d0f"}
    {"line": 2, "spec": 0, "sampling": {"policy": "poisson", "q": 0.01, "n": 60000},
     "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}], "link": "93c4"}
    [3,0,"e07b"]
    [4,0,"5a62"]
    {"line": 5, "rounds": 2, "sha256": "…", "link": "b8f1"}

The header says what it and the other lines mean. It has a random number that identifies the run, and may have `record`,
the privacy unit, `part`, which records of the data set were used, and `not_private`, why the rounds do not cover all
that the run shows. Each distinct round is
described once, as a numbered spec; each round is one short line, [line, spec, link], which is in the file before the
round's result is used. So a crash can count one round too many, never one too few.

*Links.* A link is the first four hex digits of the SHA-256 of all bytes of the file before it. If a line was lost,
repeated, moved, added or edited, the numbers or links do not match from there on; reading refuses the file and names
the line. There is no key: links detect accidents and careless edits, not a forger, who can compute them.

*The end.* A run that ends, even with an error, writes a closing line. Without one at its end a ledger is incomplete:
the run was killed, is still writing, or lines were lost. A half-written last line is a round that was never released,
and does not count. ledger.end.json (see `dpexp.accounting.ledger.integrity`) shows a ledger that was cut at its end;
without it, a ledger is not called complete, since a resumed run's may have been cut at an earlier closing line.

*Plans.* The ledger of a plan has no random number that identifies a run, by which it is told from a run's.

*Resumption.* A resumed run appends after the last complete line. A checkpoint holds the size and SHA-256 of the ledger
at its time, and is resumed only with a ledger that begins with these bytes: never with another run's. Two ledgers that
were continued from copies of a folder both count all of their common rounds.

*While a run writes.* Before each line, the file must still be the one written so far: the same file, of the same size,
and, if its timestamps changed, with the same bytes. At every checkpoint and at the end all bytes are compared. If the
file does not match, the run stops before it releases anything more.

A reader refuses anything that it does not know or that is not consistent.
"""

from dpexp.accounting.ledger.events import (
    ADJACENCIES,
    Ledger,
    OneTimeQueryEvent,
    Part,
    Query,
    Round,
    SumQueryEvent,
    concatenate,
)
from dpexp.accounting.ledger.reader import contains_lines, incomplete_reason, ledger_so_far, read_ledger
from dpexp.accounting.ledger.writer import LedgerWriter, to_continue, write_ledger

__all__ = [
    "ADJACENCIES", "Ledger", "LedgerWriter", "OneTimeQueryEvent",
    "Part", "Query", "Round", "SumQueryEvent", "concatenate", "contains_lines",
    "incomplete_reason", "ledger_so_far", "read_ledger", "to_continue", "write_ledger",
]  # fmt: skip
