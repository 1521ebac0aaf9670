"""The privacy ledger (McMahan et al. 2018, section 6), as events in memory and as JSON Lines on disk.

The file is append-only and readable without this package:

    {"dpexp_ledger": 1, "adjacency": "add_remove", "sampling": {"policy": "poisson", "n": 60000, "q": [0.01]}}
    {"spec": 0, "sampling": {"policy": "poisson", "q": 0.01, "n": 60000},
     "queries": [{"group": "all", "S": 1.0, "sigma": 4.0}]}
    {"round": 0}
    {"round": 0}

A header with the sampling that was planned; each distinct round once, as a numbered spec; then one line a round
that names its spec. A round is on disk before its result is used, so that a crash can only count a round too many,
never one too few.

A ledger is a document from elsewhere: reading one executes nothing, and refuses whatever does not add up.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from dpexp.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA_VERSION = 1
POLICIES = ("poisson", "truncated_poisson", "fixed_size", "shuffle", "all")
LARGEST_Z = 1e8
ADJACENCIES = ("add_remove", "replace_one", "replace_null")


@dataclass(frozen=True)
class SamplingEvent:
    """A sample was drawn (paper, section 6).

    Attributes:
        policy: `poisson` (each record independently at rate q), `truncated_poisson` (the same, then a random subset
            of at most `maximum`), `fixed_size` (q·n of n, without replacement), `shuffle` (a batch of a partition of
            the records into 1/q equal ones) or `all`.
        q: the rate at which a record is included.
        n: the number of records, published.
        maximum: of `truncated_poisson` alone.
        epoch: of `shuffle` alone; samples of the same epoch are disjoint.
    """

    policy: str
    q: float
    n: int
    maximum: int | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"sampling policy {self.policy!r} is unknown; known: {', '.join(POLICIES)}.")
        if not (_is_number(self.q) and 0 < self.q <= 1):
            raise ConfigError(f"sampling rate q={self.q} must lie in (0, 1].")
        if not (_is_whole(self.n) and self.n >= 1):
            raise ConfigError(f"number of records n={self.n} must be a whole number of at least 1.")
        if self.policy == "all" and self.q != 1:
            raise ConfigError(f"sampling policy all includes every record, so q={self.q} must be 1.")
        if self.policy in ("fixed_size", "shuffle"):
            batch = self.q * self.n
            if round(batch) < 1 or not math.isclose(batch, round(batch), rel_tol=1e-9):
                raise ConfigError(f"sampling policy {self.policy}: q·n={batch} must be a whole number of records.")
        for name, owner, least in (("maximum", "truncated_poisson", 1), ("epoch", "shuffle", 0)):
            value = getattr(self, name)
            if (value is not None) != (self.policy == owner):
                raise ConfigError(f"sampling policy {self.policy}: {name}={value}, which is for {owner} alone.")
            if value is not None and not (_is_whole(value) and value >= least):
                raise ConfigError(f"sampling {name}={value} must be a whole number of at least {least}.")


@dataclass(frozen=True)
class SumQueryEvent:
    """A Gaussian sum query with privacy tuple (S, σ̃): vectors of L2 norm at most S were summed and noise of
    standard deviation σ̃ was added to the sum (paper, sections 2 and 6)."""

    group: str
    S: float
    sigma: float

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            raise ConfigError(f"group {self.group!r} must be a name.")
        for name, value in (("S", self.S), ("sigma", self.sigma)):
            if not (_is_number(value) and value > 0):
                raise ConfigError(f"group {self.group!r}: {name}={value} must be a finite number above 0.")
        if not self.sigma / LARGEST_Z <= self.S <= self.sigma * LARGEST_Z:
            raise ConfigError(
                f"group {self.group!r}: S/sigma={self.S}/{self.sigma} must lie between 1e-8 and 1e8, beyond which "
                "accounting loses its digits."
            )


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


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


def joined(ledgers: Sequence[Ledger]) -> Ledger:
    """What several runs on the same data cost together: their rounds, one run after the other.

    Raises:
        ConfigError: they are stated for different adjacencies.
    """
    adjacencies = sorted({ledger.adjacency for ledger in ledgers})
    if len(adjacencies) != 1:
        raise ConfigError(f"ledgers for different adjacencies ({', '.join(adjacencies)}) cannot be composed.")
    rounds: Counter[Round] = Counter()
    epochs = 0
    for ledger in ledgers:
        for round_, count in ledger.rounds.items():
            if round_.sampling.epoch is not None:  # epochs of different runs are not disjoint
                sampling = replace(round_.sampling, epoch=round_.sampling.epoch + epochs)
                round_ = replace(round_, sampling=sampling)
            rounds[round_] += count
        epochs = 1 + max((round_.sampling.epoch or 0 for round_ in rounds), default=0)
    return Ledger(adjacencies[0], dict(rounds), any(ledger.truncated for ledger in ledgers))


class LedgerWriter:
    """Appends rounds to the file at `path` as they happen.

    The sampler reports `sample`, the mechanisms report `query`, and `commit` puts the round on disk.

    Args:
        planned: the sampling events that the run may report, but for their epochs; they go into the header.
        resume: continue the ledger already at `path`. Without it an existing file is an error, so that two
            runs never share one.

    Raises:
        ConfigError: the file exists (or, with `resume`, does not).
    """

    def __init__(
        self,
        path: str | Path,
        adjacency: str = "add_remove",
        planned: Iterable[SamplingEvent] = (),
        resume: bool = False,
    ) -> None:
        self.path = Path(path)
        self._specs: dict[Round, int] = {}
        self._counts: Counter[Round] = Counter()
        self._adjacency = adjacency
        self._sampling: SamplingEvent | None = None
        self._queries: list[SumQueryEvent] = []
        if resume:
            self._continue(_planned(planned))
        elif self.path.exists():
            raise ConfigError(f"ledger={self.path} already holds another run's rounds; name a new file.")
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self.path.open("x")
            self._lock()
            self._append({"dpexp_ledger": SCHEMA_VERSION, "adjacency": adjacency} | _planned(planned))

    def _continue(self, planned: dict[str, object]) -> None:
        if not self.path.exists():
            raise ConfigError(f"ledger={self.path} does not exist, so the run it belongs to cannot be resumed.")
        before = read_ledger(self.path)
        header = _parse(self.path, next(iter(_lines(self.path)[0])))
        if before.adjacency != self._adjacency or (planned and {"sampling": header.get("sampling")} != planned):
            raise ConfigError(
                f"ledger={self.path} was begun for adjacency {before.adjacency} and sampling {header.get('sampling')}, "
                f"but the run that would continue it plans {self._adjacency} and {planned.get('sampling')}."
            )
        self._specs = _numbers(self.path)
        self._counts = Counter(before.rounds)
        self._file = self.path.open("a")
        self._lock()
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)

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
            spec = max(self._specs.values(), default=-1) + 1
            self._append(_spec_entry(spec, round_))
            self._specs[round_] = spec
        self._append({"round": spec})
        self._counts[round_] += 1
        self._sampling = None

    def _append(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _lock(self) -> None:
        """Two processes that continue the same ledger would each know half of it."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"ledger={self.path} is being written by another process.") from error
        except OSError:  # a file system without locks
            pass

    def sync(self) -> None:
        """Puts the rounds so far where a power cut does not reach them."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


def _planned(events: Iterable[SamplingEvent]) -> dict[str, object]:
    facts = {(event.policy, event.n) for event in events}
    if not facts:
        return {}
    ((policy, n),) = facts
    return {"sampling": {"policy": policy, "n": n, "q": sorted({event.q for event in events})}}


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Writes a whole ledger, such as a plan's, as the file that carrying it out would leave."""
    header = {"dpexp_ledger": SCHEMA_VERSION, "adjacency": ledger.adjacency}
    lines = [json.dumps(header | _planned(round_.sampling for round_ in ledger.rounds)) + "\n"]
    for spec, (round_, count) in enumerate(ledger.rounds.items()):
        lines.append(json.dumps(_spec_entry(spec, round_)) + "\n")
        lines += [json.dumps({"round": spec}) + "\n"] * count
    path.write_text("".join(lines))


def _spec_entry(spec: int, round_: Round) -> dict[str, object]:
    sampling = {key: value for key, value in asdict(round_.sampling).items() if value is not None}
    return {"spec": spec, "sampling": sampling, "queries": [asdict(query) for query in round_.queries]}


def read_ledger(path: str | Path) -> Ledger:
    """Reads a ledger file, up to its last complete line.

    Raises:
        ConfigError: the file is missing, is no ledger, contradicts itself, or holds a round that makes no sense.
    """
    path = Path(path)
    lines, truncated = _lines(path)
    entries = [(_parse(path, line), count) for line, count in lines.items()]
    header = entries[0][0] if entries else {}
    if header.get("dpexp_ledger") != SCHEMA_VERSION:
        raise ConfigError(f"{path} is not a dpexp ledger of version {SCHEMA_VERSION}.")
    adjacency = header.get("adjacency")
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"{path}: adjacency {adjacency!r} is unknown; known: {', '.join(ADJACENCIES)}.")
    specs: dict[int, Round] = {}
    rounds: Counter[Round] = Counter()
    for entry, count in entries[1:]:
        keys = sorted(entry)
        if keys == ["queries", "sampling", "spec"]:
            if not _is_whole(entry["spec"]):
                raise ConfigError(f"{path}: a round spec is numbered {entry['spec']!r}, not by a whole number.")
            if entry["spec"] in specs or count > 1:
                raise ConfigError(f"{path} defines round spec {entry['spec']!r} twice.")
            specs[entry["spec"]] = _spec(path, entry, header.get("sampling"))
        elif keys == ["round"]:
            if not _is_whole(entry["round"]) or entry["round"] not in specs:
                raise ConfigError(f"{path} names round spec {entry['round']!r}, which it has not defined before.")
            rounds[specs[entry["round"]]] += count
        else:
            raise ConfigError(f"{path} holds an entry of {', '.join(keys) or 'nothing'}, neither a spec nor a round.")
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


def _numbers(path: Path) -> dict[Round, int]:
    """The number of each spec of a ledger that has been read."""
    entries = (_parse(path, line) for line in _lines(path)[0])
    return {_spec(path, entry, None): entry["spec"] for entry in entries if "spec" in entry}


def _spec(path: Path, entry: dict, planned: object) -> Round:
    """A round's spec, checked against what the header says was planned."""
    try:
        sampling = SamplingEvent(**entry["sampling"])
        if not isinstance(entry["queries"], list) or not entry["queries"]:
            raise TypeError("queries must be a list of at least one")
        round_ = Round(sampling, tuple(SumQueryEvent(**query) for query in entry["queries"]))
    except TypeError as error:
        raise ConfigError(f"{path}: round spec {entry['spec']!r} is not understood ({error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: round spec {entry['spec']!r}: {error}") from error
    if planned is None:
        return round_
    if not isinstance(planned, dict) or not isinstance(planned.get("q"), list):
        raise ConfigError(f"{path}: the header's sampling {planned!r} is not understood.")
    said = planned.get("policy"), planned.get("n"), planned["q"]
    if (sampling.policy, sampling.n) != said[:2] or sampling.q not in said[2]:
        raise ConfigError(
            f"{path}: the header says sampling {said[0]} of n={said[1]} at q in {said[2]}, but round spec "
            f"{entry['spec']} says {sampling.policy} of n={sampling.n} at q={sampling.q}."
        )
    return round_


def _parse(path: Path, line: bytes) -> dict:
    try:
        entry = json.loads(line, object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds a line that is not JSON: {line[:60]!r}.") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{path} holds a line that is not a JSON object: {line[:60]!r}.")
    return entry


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
