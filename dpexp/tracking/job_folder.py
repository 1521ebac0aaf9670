"""Whether a job is under way: its process holds a lock in the job's folder for as long as it lives. And whether it has
come to release anything.

Imports nothing slow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dpexp.errors import ConfigError

# Files of the job's folder:
RUN = "mlflow_run_id"
PROMISED = "promised_ledger.jsonl"  # what the job will have released at its end, at most
BEGUN = "training_begun"  # there before a ledger is; gone again if none was begun
_GLANCE = 1.0  # seconds: longer than another process takes to look whether the lock is held


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Two processes that go on with one job would write to the same run.

    Raises:
        ConfigError: another process is at it.
    """
    lock = _lock(output)
    try:
        lock.acquire(timeout=_GLANCE)
    except Timeout as error:
        raise ConfigError(f"the job in {output} is under way in another process.") from error
    try:
        yield
    finally:
        lock.release()


def under_way(output: Path) -> bool | None:
    """Whether another process is at the job in a folder; None if that cannot be told from here."""
    lock = _lock(output)
    if not Path(lock.lock_file).exists():
        return False
    try:
        with lock.acquire(blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # another user's, say
        return None


@contextmanager
def begun(output: Path, released: Callable[[], bool]) -> Iterator[None]:
    """Marks a job's folder while it trains, and for ever unless nothing was `released`: a ledger that is missing there
    was lost, and not left unwritten."""
    new = not (output / BEGUN).exists()
    (output / BEGUN).touch()
    try:
        yield
    finally:
        if new and not released():
            (output / BEGUN).unlink(missing_ok=True)


def _lock(output: Path) -> FileLock:
    return FileLock(output / f"{RUN}.lock")
