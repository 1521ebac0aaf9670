"""The privacy ledger (McMahan et al. 2018, section 6), as events in memory and as JSON Lines on disk.

The file is append-only and readable without this package:

    {"dpexp_ledger": 1, "adjacency": "add_remove"}
    {"spec": 0, "sampling": {"policy": "poisson", "q": 0.01, "n": 60000},
     "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}]}
    {"round": 0}
    {"round": 0}

A header; each distinct round once, as a numbered spec; then one line a round that names its spec. A round is
on disk before its result is used, so that a crash can only count a round too many, never one too few.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from dpexp.errors import ConfigError

SCHEMA_VERSION = 1
ADJACENCIES = ("add_remove",)


@dataclass(frozen=True)
class SamplingEvent:
    """A sample was drawn: each of about n records was included by `policy` at rate q (paper, section 6)."""

    policy: str
    q: float
    n: int

    def __post_init__(self) -> None:
        if self.policy != "poisson":
            raise ConfigError(f"sampling policy {self.policy!r} is unknown to the ledger; known: poisson.")
        if not 0 < self.q <= 1:
            raise ConfigError(f"sampling rate q={self.q} must lie in (0, 1].")
        if self.n < 1:
            raise ConfigError(f"number of records n={self.n} must be at least 1.")


@dataclass(frozen=True)
class SumQueryEvent:
    """A Gaussian sum query with privacy tuple (S, σ̃): vectors of L2 norm at most S were summed and noise of
    standard deviation σ̃ was added to the sum (paper, sections 2 and 6)."""

    group: str
    S: float
    sigma: float

    def __post_init__(self) -> None:
        for name, value in (("S", self.S), ("sigma", self.sigma)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"group {self.group!r}: {name}={value} must be a finite number above 0.")


@dataclass(frozen=True)
class Round:
    """One sampling event and the sum queries that were answered on its sample."""

    sampling: SamplingEvent
    queries: tuple[SumQueryEvent, ...]

    @property
    def noise_multiplier(self) -> float:
        """z = (Σ_g (S_g/σ̃_g)²)^(-1/2): the round as one Gaussian sum query (paper, equation 1)."""
        return 1 / math.sqrt(sum((query.S / query.sigma) ** 2 for query in self.queries))


@dataclass(frozen=True)
class Ledger:
    """Distinct rounds with how often each happened. `truncated`: the file ended in a half-written line."""

    adjacency: str
    rounds: Mapping[Round, int]
    truncated: bool = False

    def __len__(self) -> int:
        return sum(self.rounds.values())


class LedgerWriter:
    """Appends rounds to the file at `path` as they happen.

    The sampler reports `sample`, the mechanisms report `query`, and `commit` puts the round on disk.

    Args:
        resume: continue the ledger already at `path`. Without it an existing file is an error, so that two
            runs never share one.

    Raises:
        ConfigError: the file exists (or, with `resume`, does not).
    """

    def __init__(self, path: str | Path, adjacency: str = "add_remove", resume: bool = False) -> None:
        self.path = Path(path)
        self._specs: dict[Round, int] = {}
        self._counts: Counter[Round] = Counter()
        self._adjacency = adjacency
        self._sampling: SamplingEvent | None = None
        self._queries: list[SumQueryEvent] = []
        if resume:
            self._continue()
        elif self.path.exists():
            raise ConfigError(f"ledger={self.path} already holds another run's rounds; name a new file.")
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self.path.open("x")
            self._append({"dpexp_ledger": SCHEMA_VERSION, "adjacency": adjacency})

    def _continue(self) -> None:
        if not self.path.exists():
            raise ConfigError(f"ledger={self.path} does not exist, so the run it belongs to cannot be resumed.")
        before = read_ledger(self.path)
        self._adjacency = before.adjacency
        self._specs = {round_: spec for spec, round_ in _specs(self.path).items()}
        self._counts = Counter(before.rounds)
        self._file = self.path.open("r+")
        whole = self.path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(whole)
        self._file.seek(whole)

    @property
    def ledger(self) -> Ledger:
        """What has been committed so far."""
        return Ledger(self._adjacency, dict(self._counts))

    def sample(self, event: SamplingEvent) -> None:
        """Opens a round. A sample that was drawn but whose sums were never released costs nothing."""
        self._sampling = event
        self._queries = []

    def query(self, event: SumQueryEvent) -> None:
        """Adds a sum query to the open round."""
        self._queries.append(event)

    def commit(self) -> None:
        """Closes the open round and flushes it. Only then may its sums be released."""
        if self._sampling is None or not self._queries:
            raise RuntimeError("a round needs a sampling event and at least one sum query event.")
        round_ = Round(self._sampling, tuple(self._queries))
        spec = self._specs.get(round_)
        if spec is None:
            spec = len(self._specs)
            self._append(
                {
                    "spec": spec,
                    "sampling": asdict(round_.sampling),
                    "queries": [asdict(query) for query in round_.queries],
                }
            )
            self._specs[round_] = spec
        self._append({"round": spec})
        self._counts[round_] += 1
        self._sampling = None

    def _append(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_ledger(path: str | Path) -> Ledger:
    """Reads a ledger file, up to its last complete line.

    Raises:
        ConfigError: the file is missing, is no ledger, or holds a round that makes no sense.
    """
    path = Path(path)
    lines, truncated = _lines(path)
    header = _parse(path, next(iter(lines), b"{}"))
    if header.get("dpexp_ledger") != SCHEMA_VERSION:
        raise ConfigError(f"{path} is not a dpexp ledger of version {SCHEMA_VERSION}.")
    adjacency = header.get("adjacency")
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"{path}: adjacency {adjacency!r} is unknown; known: {', '.join(ADJACENCIES)}.")
    specs = _specs(path)
    rounds: Counter[Round] = Counter()
    for line, count in lines.items():
        entry = _parse(path, line)
        if "round" in entry:
            if entry["round"] not in specs:
                raise ConfigError(f"{path} names round spec {entry['round']!r}, which it never defines.")
            rounds[specs[entry["round"]]] += count
    return Ledger(str(adjacency), dict(rounds), truncated)


def _lines(path: Path) -> tuple[Counter[bytes], bool]:
    """Distinct complete lines with their counts, in order of first appearance: fast for a million rounds."""
    try:
        with path.open("rb") as file:
            lines = Counter(file)
    except OSError as error:
        raise ConfigError(f"the ledger {path} cannot be read ({error.strerror}).") from error
    partial = [line for line in lines if not line.endswith(b"\n")]
    for line in partial:
        del lines[line]
    return lines, bool(partial)


def _specs(path: Path) -> dict[int, Round]:
    specs: dict[int, Round] = {}
    for line in _lines(path)[0]:
        entry = _parse(path, line)
        if "spec" not in entry:
            continue
        try:
            sampling = SamplingEvent(**entry["sampling"])
            specs[entry["spec"]] = Round(sampling, tuple(SumQueryEvent(**query) for query in entry["queries"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: round spec {entry['spec']!r} is not understood ({error}).") from error
    return specs


def _parse(path: Path, line: bytes) -> dict:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path} holds a line that is not JSON: {line[:60]!r}.") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{path} holds a line that is not a JSON object: {line[:60]!r}.")
    return entry
