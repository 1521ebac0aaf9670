"""The privacy ledger (McMahan et al. 2018, section 6), as events in memory and as JSON Lines on disk.

The file is append-only and readable without this package:

    {"line": 1, "dpexp_ledger": 2, "run": "9f0c…", "adjacency": "add_remove",
     "sampling": {"policy": "poisson", "n": 60000, "q": [0.01]}, "format": "JSON Lines. …", "link": "1d0f"}
    {"line": 2, "spec": 0, "sampling": {"policy": "poisson", "q": 0.01, "n": 60000},
     "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}], "link": "93c4"}
    [3,0,"e07b"]
    [4,0,"5a62"]
    {"line": 5, "rounds": 2, "sha256": "…", "link": "b8f1"}

The header has a random number of 128 bits that identifies the run, the planned sampling, and a description of the
format. Each distinct round is described once, as a numbered spec. Each round is one short line, [line, spec, link]. A
closing line ends the file. A round is on disk before its result is used, so that a crash can count one round too many,
never one too few.

*Links.* Every line has its number and a link: the first four hex digits of the SHA-256 of all bytes of the file before
the link. It covers its own line and all lines before. If a line was lost, repeated, moved, added or edited, the numbers
or links do not match from there on; reading refuses the file and names the line. The closing line has the full SHA-256
of the lines before it. There is no key: links detect accidents and careless edits, not a forger, who can compute them.

*The end.* A run that ends, even with an error, closes its ledger. A ledger whose last line is not a closing line is
incomplete: the run was killed, is still writing, or lines at the end were lost; the file cannot tell which. A
half-written last line is a round that was never released, and does not count.

The file ledger.end.json next to it has the number of bytes that were on disk at the last checkpoint or at the end, and
their SHA-256. A ledger with fewer bytes has lost lines, even if it was cut at an earlier closing line. See
`dpexp.accounting.ledger.integrity`.

*Resumption.* A resumed run appends after the last complete line: after a closing line, which stays in the file, or
after a round, where a half-written line is removed first. Rounds are counted from the beginning of the file. A ledger
may therefore have several closing lines. A checkpoint holds the size and SHA-256 of the ledger at its time. It is
resumed only with a ledger that begins with these bytes. Since headers differ, a checkpoint never matches the ledger of
another run, even if both did the same. A copied folder has the same header: two ledgers that were continued from there
both count all of their common rounds.

*Discrete noise.* A query {"group": "all", "grid": 2.4e-07, "S2": 17592186044416, "sigma2": 281474976710656} has
integers in place of S and sigma: integer multiples of the grid with squared norms of at most S2 were summed, and
discrete Gaussians of parameter sigma2 were added.

*Correlated noise.* A query with "bands": [0.86, 0.43, …] had noise that depends on the noise of earlier rounds of the
same block. A block starts at the round, counted from 0, that "block" in the sampling names: where a job was begun or
resumed. Its sampling is {"policy": "cyclic_poisson", "q": 0.01, "n": 60000, "parts": 8, "block": 0}. The cost of such
rounds is proved in `dpexp.accounting.releases.CyclicBlocks`.

*One-time queries.* A query on all records that is answered once, such as before training, is a round of its own, with
the sampling policy `all` and one query: {"query": "pca", "noise": "gaussian", "S": 1.0, "S_replaced":
1.4142135623730951, "scale": 16.0}; or one query on each of several disjoint parts: {"query": "class_counts",
"parts_by": "class", "queries": [{"query": "0", "noise": "laplace", …}, …]}. The sampling in the header is that of the
other rounds. A reader that does not know such a query refuses the ledger, as it refuses anything else that it does not
know, so the version number did not change.

*Privacy unit.* Records are examples, unless the header has {"record": {"kind": "microbatch", "k": 8}} for units of 8
examples, or {"record": {"kind": "user", "most": 16, …}} for users, of whom at most 16 examples each took part in a
round. n counts these units, and neighbouring data sets differ in one of them.

*Not private.* If a run's noise seed is known, or unprotected statistics are shown, its header says so in "not_private".
A resumed run can neither remove nor introduce this. If a check during training finds that a step or a data set keeps
information about a record, a line {"line": 9, "not_private": "the bound may not have held since round 3 (…)", "link":
"…"} says so, and the run ends.

*While a run writes.* Before each line, the file must still be the one written so far: the same file, of the same size,
and, if its timestamps changed, with the same bytes. At every checkpoint and at the end all bytes are compared. An edit
in place that leaves the timestamps unchanged may thus be found only then, and an edit after the end only by the next
reader. If the file does not match, the rounds written so far are saved to a new file, byte by byte.

A ledger of version 2 without "run" is older, or is that of a plan. Version 1, with {"round": 0} for a round and
without line numbers, links and closing line, is read but not continued.

Reading a ledger executes no code of the file, and refuses any content that is not consistent.
"""

from dpexp.accounting.ledger.events import (
    ADJACENCIES,
    LARGEST_Z,
    POLICIES,
    DiscreteSumQueryEvent,
    Ledger,
    OneTimeQueryEvent,
    ParallelQueryEvent,
    Query,
    Round,
    SamplingEvent,
    SumQueryEvent,
    concatenate,
    rate_in_part,
)
from dpexp.accounting.ledger.reader import contains_lines, incomplete_reason, ledger_so_far, read_ledger
from dpexp.accounting.ledger.writer import LedgerWriter, write_ledger

__all__ = [
    "ADJACENCIES", "LARGEST_Z", "POLICIES", "DiscreteSumQueryEvent", "Ledger", "LedgerWriter", "OneTimeQueryEvent",
    "ParallelQueryEvent", "Query", "Round", "SamplingEvent", "SumQueryEvent", "concatenate", "contains_lines",
    "incomplete_reason", "ledger_so_far", "rate_in_part", "read_ledger", "write_ledger",
]  # fmt: skip
