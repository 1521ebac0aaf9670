"""The one ledger of several processes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SamplingEvent
from dpexp.accounting.ledger.events import Query
from dpexp.privacy.processes import Processes


class SharedLedger:
    """A ledger that the first process writes. The others learn of each round when it is in the file, and count it too.

    Args:
        begin: opens the file; called in the first process only.
    """

    def __init__(self, processes: Processes, begin: Callable[[], LedgerWriter]) -> None:
        self._processes = processes
        self._writer: LedgerWriter | None = None
        with processes.together():
            if processes.first:
                self._writer = begin()
        found: Ledger = processes.told(self._writer.ledger if self._writer else None)
        self._adjacency, self._counts, self._exposed = found.adjacency, Counter(found.rounds), found.exposed
        self._sampling: SamplingEvent | None = None
        self._queries: list[Query] = []

    @property
    def ledger(self) -> Ledger:
        """What has been committed so far."""
        return Ledger(self._adjacency, dict(self._counts), exposed=self._exposed)

    @property
    def position(self) -> dict[str, Any] | None:
        """See `LedgerWriter`; None in processes that write neither ledger nor checkpoint."""
        return self._writer.position if self._writer else None

    def sample(self, event: SamplingEvent) -> None:
        self._sampling, self._queries = event, []
        if self._writer:
            self._writer.sample(event)

    def query(self, event: Query) -> None:
        self._queries.append(event)
        if self._writer:
            self._writer.query(event)

    def commit(self) -> None:
        """Returns when the round is in the file, in every process.

        Raises:
            ConfigError: it is not, in every process.
        """
        with self._processes.together():
            if self._writer:
                self._writer.commit()
        if self._sampling is None:
            raise RuntimeError("a round needs a sampling event.")
        self._counts[Round(self._sampling, tuple(self._queries))] += 1
        self._sampling = None

    def not_private(self, reason: str) -> None:
        """See `LedgerWriter`."""
        self._exposed = self._exposed or reason
        if self._writer:
            self._writer.not_private(reason)

    def sync(self) -> None:
        if self._writer:
            self._writer.sync()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def ledger_of(processes: Processes, begin: Callable[[], LedgerWriter]) -> LedgerWriter | SharedLedger:
    return begin() if processes.alone else SharedLedger(processes, begin)
