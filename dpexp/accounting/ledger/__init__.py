"""The privacy ledger (McMahan et al. 2018, section 6), as events in memory and as JSON Lines on disk.

The file is append-only and readable without this package:

    {"line": 1, "dpexp_ledger": 2, "run": "9f0c…", "adjacency": "add_remove",
     "sampling": {"policy": "poisson", "n": 60000, "q": [0.01]}, "format": "JSON Lines. …", "link": "1d0f"}
    {"line": 2, "spec": 0, "sampling": {"policy": "poisson", "q": 0.01, "n": 60000},
     "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}], "link": "93c4"}
    [3,0,"e07b"]
    [4,0,"5a62"]
    {"line": 5, "rounds": 2, "sha256": "…", "link": "b8f1"}

A header with a random number of 128 bits that tells the run from every other, the sampling that was planned, and the
format in words; each distinct round once, as a numbered spec;
one short line a round, [line, spec, link]; a closing line. A round is on disk before its result is used, so that a
crash can only count a round too many, never one too few.

*Links.* Every line has its number and a link: the first four hex digits of the SHA-256 of all bytes of the file before
the link, so that it covers its own line and all lines before. A line that was lost, repeated, moved, added or edited
breaks the numbers or the links from there on; reading refuses the file and says where. The closing line has the whole
SHA-256 of the lines before it. There is no key in this: it shows accidents and careless edits, and no forger, who can
compute links for whatever he writes.

*The end.* A run that ends, even by an error, closes its ledger. A ledger without a closing line at its end ends early:
the run was killed or is still writing it, or lines were lost at the end, which nothing in the file can tell apart.
A half-written last line is a round that was never released, and does not count.

Beside it, ledger.end.json has how many bytes were on disk at the last checkpoint or at the end, and their SHA-256: a
ledger with fewer has lost lines, also where it was cut at an earlier closing line. See
`dpexp.accounting.ledger.integrity`.

*Resumption.* A resumed run goes on behind the last complete line: behind a closing line, which then stands in the
middle, or behind a round, where a half-written line is cut off first. Rounds are counted from the beginning of the
file. So a ledger may have several closing lines, and a killed run that was resumed leaves no trace in it. A checkpoint
holds the size and the SHA-256 of the ledger at its time, and is resumed only with a ledger that begins so, whatever
came after. Since headers differ, no run's checkpoint is taken for another's, though they did the same. A copied folder
has the same header: two ledgers that went on from there both count in full what they have in common.

*Whole numbers.* Where noise was exact, a query is {"group": "all", "grid": 2.4e-07, "S2": 17592186044416,
"sigma2": 281474976710656} in place of S and sigma: whole multiples of the grid were summed, with squared norms of at
most S2, and discrete Gaussians of parameter sigma2 were added.

*Correlated noise.* A query with "bands": [0.86, 0.43, …] had noise that depends on that of the rounds before, in the
same block: the rounds since the one, counted from 0, that "block" of their sampling names, in which a job began or was
resumed. Their sampling is {"policy": "cyclic_poisson", "q": 0.01, "n": 60000, "parts": 8, "block": 0}. What such rounds
cost is said in `dpexp.accounting.releases`.

*Before training.* A query of all records that is answered once is a round of its own, on a sample of all, with one
query: {"query": "pca", "noise": "gaussian", "S": 1.0, "S_replaced": 1.4142135623730951, "scale": 16.0}; or one of each
of several disjoint parts: {"query": "class_counts", "parts_by": "class", "queries": [{"query": "0", "noise": "laplace",
…}, …]}. The sampling in the header is that of the other rounds. A reader that does not know such a query refuses the
ledger, as it refuses whatever it does not know, so that the version is what it was.

*Whose data.* A round is about records: examples, unless the header says otherwise, as {"record": {"kind":
"microbatch", "k": 8}} for units of 8 examples or {"record": {"kind": "user", "most": 16, …}} for users, of each of whom
at most 16 examples took part in a round. n counts them, and neighbours differ in one of them.

*Not private.* Where a run's noise seed is known, or private statistics are shown, its header says so in "not_private".
A resume can neither take that back nor begin it. Where a check finds during training that a step or a data set keeps
something of a record, a line {"line": 9, "not_private": "the bound may not have held since round 3 (…)", "link": "…"}
says so, and the run ends.

*Under way.* Before each line the file must still be the one that was written so far: the same file, of the same size,
and, if its times tell that somebody touched it, with the same bytes. At every checkpoint and at the end all bytes are
looked at. So an edit in place that no time tells of, because a clock was set back or has not gone on since the last
write, or because a network file system tells of it late, may be found only then, and one made after the end only by
the next reader. What was written so far is rescued into a new file, byte by byte.

A ledger of version 2 without "run" was written before there was one, or is a plan's. Version 1, with {"round": 0} for a
round and neither numbers nor links nor closing line, is read, but not continued.

A ledger is a document from elsewhere: reading one executes nothing, and refuses whatever does not add up.
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
    joined,
    rate_in_part,
)
from dpexp.accounting.ledger.reader import early, holds, ledger_so_far, read_ledger
from dpexp.accounting.ledger.writer import LedgerWriter, write_ledger

__all__ = [
    "ADJACENCIES",
    "LARGEST_Z",
    "POLICIES",
    "DiscreteSumQueryEvent",
    "Ledger",
    "LedgerWriter",
    "OneTimeQueryEvent",
    "ParallelQueryEvent",
    "Query",
    "Round",
    "SamplingEvent",
    "SumQueryEvent",
    "early",
    "holds",
    "joined",
    "ledger_so_far",
    "rate_in_part",
    "read_ledger",
    "write_ledger",
]
