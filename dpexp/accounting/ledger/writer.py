"""Writes ledger files, round by round. The package's docstring describes the format."""

import errno
import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dpexp.accounting.ledger.events import Ledger, Part, Query, Round
from dpexp.accounting.ledger.integrity import Chain, end_of, write_end
from dpexp.accounting.ledger.reader import Contents, contents
from dpexp.accounting.sampling.policy import SamplingEvent
from dpexp.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_round = lru_cache(typed=True)(Round)  # rounds are mostly equal


class LedgerWriter:
    """Appends rounds to the ledger file at `path` as they happen.

    If the process stops, the file has every round whose `commit` has returned, and at most one more. `sync` protects
    against a power failure. The writing process locks the file. A forked child neither writes nor holds the lock.

    Args:
        planned: the sampling events of the plan, for the header, which has their policy, n and rates.
        resume: continue the ledger at `path`; otherwise it must be new, or of a run that ended before its first round.
        position: the `position` in the checkpoint of the run to resume, with whose bytes the ledger must begin.
        not_private_reason: why the run is not private, if so. A resumed run cannot remove it.
        record: the privacy unit; None: one example.
        part: the only records that the rounds use; None: all of the data set.

    Raises:
        ConfigError: the file exists, is written by another process, or cannot be written; or the one to resume does not
            exist, is damaged, or belongs to another plan or run.
    """

    def __init__(
        self,
        path: str | Path,
        adjacency: str = "add_remove",
        planned: Iterable[SamplingEvent] = (),
        resume: bool = False,
        position: Mapping[str, Any] | None = None,
        not_private_reason: str | None = None,
        record: Mapping[str, Any] | None = None,
        part: Part | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._adjacency = adjacency
        self._not_private_reason = not_private_reason
        self._record, self._part = record, part
        self._header = {"run": os.urandom(16).hex()} | _header(Ledger(adjacency, {}, record=record, part=part), planned)
        if not_private_reason is not None:
            self._header["not_private"] = not_private_reason
        self._chain = Chain()  # of the lines in the file
        self._closed = False  # the last line is a closing line
        self._times: tuple[int, int] | None = None  # of the file after the last write; None: compare its bytes
        self._specs: dict[Round, int] = {}
        self._counts: Counter[Round] = Counter()
        self._sampling: SamplingEvent | None = None
        self._queries: list[Query] = []
        existed = self.path.exists()
        if resume and not existed:
            raise ConfigError(f"ledger={self.path} does not exist, so the run it belongs to cannot be resumed.")
        with self._refusing_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "ab+")
        _OPEN.add(self)
        try:
            self._lock()
            self._continue(position) if resume else self._begin(existed)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Keeps two processes from continuing the same ledger."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"ledger={self.path} is being written by another process.") from error
        except OSError:  # a file system without locks
            pass

    def _begin(self, existed: bool) -> None:
        if existed or self._content():
            before = contents(self.path).ledger
            if before.rounds:
                raise ConfigError(f"ledger={self.path} already holds another run's rounds; name a new file.")
            if before.incomplete:
                raise ConfigError(
                    f"ledger={self.path} is of another run, which has not ended or lost lines; name a new file."
                )
            os.ftruncate(self._file.fileno(), 0)
        end_of(self.path).unlink(missing_ok=True)  # of an earlier ledger at the same path
        try:
            chain = Chain()
            with self._refusing_errors():
                self._append(chain.header(self._header), chain)
        except BaseException:
            if not self._file.closed:
                self.path.unlink(missing_ok=True)
            raise

    def _continue(self, position: Mapping[str, Any] | None) -> None:
        before = to_continue(self.path)
        planned = self._header.get("sampling")
        found = before.header.get("sampling") if planned else planned
        begun = before.ledger.adjacency, found, before.ledger.record, before.ledger.part
        own = self._adjacency, planned, self._record, self._part
        if begun != own:
            raise ConfigError(
                f"ledger={self.path} was begun for {_described(*begun)}, but the run that would continue it plans "
                f"{_described(*own)}."
            )
        if self._not_private_reason is not None and before.ledger.not_private_reason is None:
            raise ConfigError(
                f"ledger={self.path} was begun by a private run, but the one that would continue it is not "
                f"({self._not_private_reason}), which no reader would learn; begin a new run."
            )
        _check_position(self.path, before, position)
        self._specs = {round_: spec for spec, round_ in before.specs.items()}
        self._counts = Counter(before.ledger.rounds)
        self._chain, self._closed = before.chain, not before.ledger.incomplete
        self._not_private_reason = before.ledger.not_private_reason
        os.ftruncate(self._file.fileno(), self._chain.size)

    @property
    def ledger(self) -> Ledger:
        """The committed rounds."""
        return Ledger(
            self._adjacency, dict(self._counts), False, self._not_private_reason, self._record, part=self._part
        )

    @property
    def position(self) -> dict[str, Any]:
        """The number of bytes written so far and their SHA-256, which identify the run and its progress."""
        return {"bytes": self._chain.size, "sha256": self._chain.sha256()}

    def sample(self, event: SamplingEvent) -> None:
        """Begins a round. A sample whose sums are never released costs nothing."""
        self._sampling = event
        self._queries = []

    def query(self, event: Query) -> None:
        """Adds a query to the current round."""
        self._queries.append(event)

    def commit(self) -> None:
        """Writes the current round to the file. Only then may its sums be released.

        Raises:
            ConfigError: the round could not be written, such as on a full disk, or the file is no longer the one
                written so far.
        """
        if self._sampling is None or not self._queries:
            raise RuntimeError("a round needs a sampling event and at least one sum query event.")
        round_ = _round(self._sampling, tuple(self._queries))
        chain = self._chain.copy()
        spec = self._specs.get(round_, chain.specs)
        described = b"" if round_ in self._specs else chain.spec(round_)
        with self._refusing_errors():
            self._append(described + chain.round(spec), chain)
        self._closed = False
        self._specs[round_] = spec
        self._counts[round_] += 1
        self._sampling = None

    @contextmanager
    def _refusing_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"ledger={self.path} cannot be written ({error.strerror}).") from error

    def _append(self, lines: bytes, chain: Chain) -> None:
        """Appends lines, after which `chain` describes the file. If anything fails, none of them are appended."""
        self._check_file()
        try:
            left = lines
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            self._times = _times(os.fstat(self._file.fileno()))
            self._chain = chain
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._chain.size)
            raise

    def _check_file(self) -> None:
        if self._file.closed:
            raise RuntimeError(f"the ledger {self.path} is closed, or belongs to the process that forked this one.")
        try:
            found = os.stat(self.path)
            if not os.path.samestat(found, os.fstat(self._file.fileno())):
                what = "was replaced by another file"
            elif found.st_size != self._chain.size:
                what = f"was changed from {self._chain.size} bytes to {found.st_size}"
            elif _times(found) != self._times and hashlib.sha256(self._content()).hexdigest() != self._chain.sha256():
                what = "was edited"
            else:
                self._times = _times(found)
                return
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
            what = "was deleted or moved" if gone else f"cannot be reached ({error.strerror})"
        self._file.close()
        raise ConfigError(
            f"ledger={self.path} {what} while its run was writing it, so training stops; its {self._chain.rounds} "
            "rounds count, although the file may lack them."
        )

    def _content(self) -> bytes:
        self._file.seek(0)
        return self._file.readall()

    def sync(self) -> None:
        """Compares every byte of the file, and flushes it to disk. Raises as `commit`."""
        if self._file.closed:
            return
        self._times = None
        self._check_file()
        with self._refusing_errors():
            os.fsync(self._file.fileno())
        write_end(self.path, self.position)

    def close(self) -> None:
        """Writes the closing line, unless the last line is one, and closes the file. Raises as `commit`; warns if there
        is no room for the line."""
        if self._file.closed:
            return
        chain = self._chain.copy()
        self._times = None
        try:
            try:
                if not self._closed:
                    self._append(chain.closing(), chain)
            except OSError as error:
                warnings.warn(
                    f"the ledger {self.path} could not be closed ({error.strerror}): it has all of its rounds, but "
                    "reads as incomplete."
                )
            self.sync()
        finally:
            self._file.close()


_OPEN: WeakSet[LedgerWriter] = WeakSet()


def _close_in_child() -> None:
    """Closes the files in a forked child, such as a loader's worker, which would otherwise hold the lock."""
    for writer in _OPEN:
        writer._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def to_continue(path: Path, position: Mapping[str, Any] | None = None) -> Contents:
    """The contents of a ledger that a run continues, if they are those of the run that made the checkpoint.

    Args:
        position: `LedgerWriter.position` in the checkpoint.

    Raises:
        ConfigError: it is damaged, has lost lines, or does not begin with the checkpoint's rounds.
    """
    before = contents(path)
    if before.ledger.lost is not None:
        raise ConfigError(
            f"ledger={path} has lost lines ({before.ledger.lost}); replace it with a complete copy, such as its run's "
            "artifact in MLflow."
        )
    _check_position(path, before, position)
    return before


def _check_position(path: Path, before: Contents, position: Mapping[str, Any] | None) -> None:
    written = path.read_bytes()[: before.chain.size]
    if position is not None and hashlib.sha256(written[: position["bytes"]]).hexdigest() != position["sha256"]:
        raise ConfigError(
            f"ledger={path} does not begin with the rounds that the checkpoint's run had written by then, so it is "
            "another run's or was changed since; resume with the ledger of the run that made the checkpoint."
        )


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Writes a whole ledger to a file, such as that of a plan."""
    chain = Chain()
    planned = (round_.sampling for round_ in ledger.training)
    with path.open("wb") as file:
        file.write(chain.header(_header(ledger, planned)))
        for spec, (round_, count) in enumerate(ledger.rounds.items()):
            file.write(chain.spec(round_))
            file.writelines(chain.round(spec) for _ in range(count))
        if not ledger.incomplete:
            file.write(chain.closing())


def _times(found: os.stat_result) -> tuple[int, int]:
    """A file's modification and change times. Setting back the first changes the second."""
    return found.st_mtime_ns, found.st_ctime_ns


def _described(adjacency: str, sampling: object, record: Mapping[str, Any] | None, part: Part | None) -> str:
    of = f" on {part}" if part else ""
    return f"adjacency={adjacency}, sampling {sampling} and privacy_unit={record or 'example'}{of}"


def _header(ledger: Ledger, planned: Iterable[SamplingEvent]) -> dict[str, object]:
    """The header, with the sampling if all rounds have the same policy and n."""
    header: dict[str, object] = {"adjacency": ledger.adjacency}
    header |= {"record": ledger.record} if ledger.record is not None else {}
    header |= {"part": asdict(ledger.part)} if ledger.part is not None else {}
    events = list(planned)
    policies = {(event.policy.name, event.n, getattr(event.policy, "num_selected", None)) for event in events}
    if len(policies) == 1:
        ((policy, n, selected),) = policies
        of_each = {} if selected is None else {"num_selected": selected}
        header["sampling"] = {"policy": policy, "n": n, "q": sorted({event.q for event in events}), **of_each}
    return header
