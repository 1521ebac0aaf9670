"""Opening a tracking store that several processes use at once."""

import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dpexp.errors import ConfigError
from dpexp.tracking.origin import HOST

SAME = {"noise": "noise_multiplier", "q_at_fixed_z": "q", "steps": "rounds"}  # calibrated knob -> metric that has it
TRIED = "tried "  # begins the metrics of calibration; MLflow shows those with a slash above accuracy, others by name
_PATIENCE = 120  # seconds for others that open the same database
ERROR = "dpexp.error"  # a tag: why a run did not finish
OUTPUT = "dpexp.output"  # a tag: where a run's ledger lies, should it not come to log it


def open_store(uri: str, experiment: str, artifacts: str | None) -> tuple[MlflowClient, str]:
    """A client, and the id of the experiment, which is created if it is new.

    Raises:
        ConfigError: the store cannot be used.
    """
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="mlflow")
    try:
        with _alone(uri):
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(experiment)
            return client, found.experiment_id if found else client.create_experiment(experiment, artifacts)
    except (MlflowException, OSError, sqlite3.Error) as error:
        raise ConfigError(f"tracking.uri={uri} cannot be used: {' '.join(str(error).split())}") from error


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Several processes that create the same SQLite store at once would break each other; afterwards, readers and a
    writer of one in WAL mode do not wait for each other."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = database.with_suffix(".lock")
    lock.touch()  # where that fails, FileLock would try for ever
    with FileLock(lock, timeout=_PATIENCE):
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        yield


def end_dead_runs(client: MlflowClient, experiment_id: str) -> None:
    """A run killed outright stays RUNNING for ever; ends those whose process on this machine is gone."""
    running = client.search_runs(
        [experiment_id], f"attributes.status = 'RUNNING' and tags.`dpexp.host` = '{HOST}'"
    )  # fmt: skip
    for run in running:
        if not _alive(int(run.data.tags.get("dpexp.pid", "0"))):
            client.set_tag(run.info.run_id, ERROR, "its process died without a word: SIGKILL, no memory, or no power")
            client.set_terminated(run.info.run_id, "KILLED")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
