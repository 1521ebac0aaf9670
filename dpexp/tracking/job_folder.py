"""Names of files in a job's folder, and its lock.

Imports nothing slow.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dpexp.errors import ConfigError

RUN = "mlflow_run_id"
LEDGER = "ledger.jsonl"
PLANNED_LEDGER = "planned_ledger.jsonl"  # the most that the job will have released at its end
CONFIGURATION = "configuration"  # in result.json once the job has ended well: a hash of what could change it
_PATIENCE = 1.0  # seconds: longer than another process takes to look whether the lock is held


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Holds the lock of a job's folder: two processes that resume one job would write to the same run."""
    lock = FileLock(output / f"{RUN}.lock")
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise ConfigError(f"the job in {output} is running in another process.") from error
    try:
        yield
    finally:
        lock.release()


def finished_result(output: Path) -> dict[str, Any] | None:
    """The content of result.json, if the job in a folder has ended well."""
    try:
        result: dict[str, Any] = json.loads((output / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return result if CONFIGURATION in result else None
