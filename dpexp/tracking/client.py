"""MLflow's client: opening a store, sending a run's data, and the list of runs."""

import json
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock, Timeout
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking.context.git_context import GitRunContext
from mlflow.tracking.context.registry import resolve_tags
from sqlalchemy import make_url

from dpexp.config import Tracking
from dpexp.errors import ConfigError
from dpexp.tracking.job_folder import ERROR_TAG, OUTPUT_TAG, ended
from dpexp.tracking.provenance import HOST, one_line, without_passwords

MAX_METRICS, MAX_PARAMS = 1000, 100  # per request, MLflow's own limits
_PATIENCE = 600  # seconds for other processes that hold a lock
_SILENCE = 5  # seconds that a process waits for another without a word


def open_store(store: Tracking) -> tuple[MlflowClient, str]:
    """A client, and the id of the experiment, which is created if it does not exist."""
    uri, experiment = str(store.uri), store.experiment
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="mlflow")
    try:
        with _created_alone(uri):
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(experiment)
            if found is None:
                try:
                    return client, client.create_experiment(experiment, store.artifacts)
                except MlflowException:  # another job may have made it meanwhile
                    found = client.get_experiment_by_name(experiment)
                    if found is None:
                        raise
            return client, found.experiment_id
    except (MlflowException, OSError, sqlite3.Error) as error:
        raise ConfigError(f"tracking.uri={without_passwords(uri)} cannot be used: {one_line(error)}") from error


def create_run(client: MlflowClient, experiment_id: str, tags: Mapping[str, str], **others: Any) -> str:
    """Creates a run, with the tags that MLflow finds for its columns Source and Created by, too; returns its id."""
    ignored: Any = [GitRunContext]  # it looks where dpexp lies, and quotes the repository's address
    run_id: str = client.create_run(experiment_id, tags=resolve_tags(tags, ignored), **others).info.run_id
    return run_id


def database(uri: str) -> Path | None:
    """The file of an SQLite store; None for other stores."""
    scheme, separator, _ = uri.partition(":///")
    path = make_url(uri).database if separator and scheme.partition("+")[0] == "sqlite" else None
    return Path(path).resolve() if path else None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock of a file, for which other processes take turns.

    It waits for some minutes, and after a few seconds says so. Every failure is an OSError, also that the time is over.

    Args:
        what: what the processes take turns in, for the message.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # where that fails, FileLock would try for ever
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=_SILENCE)
    except Timeout:
        warnings.warn(
            f"waiting for {what}, in which jobs take turns, for at most {_PATIENCE} s; end the job that holds the lock "
            f"if it hangs (fuser {quote(str(path))} names its process)."
        )
        held = lock.acquire(timeout=_PATIENCE)
    with held:
        yield


@contextmanager
def _created_alone(uri: str) -> Iterator[None]:
    """Lets one process at a time create an SQLite store, in WAL mode: readers and writers do not block each other."""
    if (file := database(uri)) is None:
        yield
        return
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # seconds that jobs which start at once need not queue for

    with locked(file.with_suffix(".lock"), f"MLflow's database {file}"):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        yield


def end_dead_runs(client: MlflowClient, experiment_id: str) -> None:
    """Ends the RUNNING runs whose process on this machine is gone: it was killed, or the server was away at its end."""
    condition = f"attributes.status = 'RUNNING' and tags.`dpexp.host` = '{HOST}'"
    for run in client.search_runs([experiment_id], condition):
        if _is_alive(int(run.data.tags.get("dpexp.pid", "0"))):
            continue
        end = ended(Path(run.data.tags.get(OUTPUT_TAG, "")))
        if end.get("reason"):
            client.set_tag(run.info.run_id, ERROR_TAG, end["reason"])
        client.set_terminated(run.info.run_id, end["status"], end.get("time"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return pid > 0


# The columns of the list of runs. MLflow keeps such views in undocumented tags of the experiment.
COLUMNS = [  # metrics come before parameters, and by name
    "metrics.`epsilon`", "metrics.`test_accuracy`", "metrics.`test_auc`",
    "params.`privacy.delta`", "params.`plan.z`", "params.`plan.q`",
    "tags.`dpexp.model`", "tags.`dpexp.group`", "tags.`dpexp.mechanism`", "tags.`dpexp.clip_rule`",
    "tags.`dpexp.allocation`", "tags.`dpexp.seed`", "tags.`dpexp.error`",
]  # fmt: skip
VIEW = "dpexp"


def set_view(client: MlflowClient, experiment_id: str) -> None:
    """Stores the columns of the list of runs in the experiment."""
    state = {"selectedColumns": COLUMNS, "orderByKey": "attributes.start_time", "orderByAsc": False}
    client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{VIEW}", json.dumps(state))


def address(uri: str, experiment_id: str) -> str:
    """The address of the list of runs, without a password, for a local store with the command that serves it.

    The address of the experiment itself opens a page for traces.
    """
    uri = without_passwords(uri)
    page = f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}"
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/{page}"
    return f"mlflow ui --backend-store-uri {quote(uri)}, then http://127.0.0.1:5000/{page}"
