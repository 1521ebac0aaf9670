"""MLflow's client: opening a store, sending a run's data even if the server is away, and the list of runs."""

import json
import logging
import os
import sqlite3
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dpexp.errors import ConfigError, is_own, place_of
from dpexp.tracking.provenance import HOST, without_passwords
from dpexp.tracking.registered_model import send_model

# MLflow draws a chart of each metric: names with a slash first, then by name. What a run is looked at for, epsilon and
# test_…, comes before what is constant.
TRIED = "tried "  # prefix of what calibration tried
WITH = "with "  # prefix of the figures of a plan, its guarantee and its audit, and of released statistics
ERROR = "dpexp.error"  # a tag: why a run did not finish
OUTPUT = "dpexp.output"  # a tag: the job's folder
MAX_METRICS = 1000  # per request, MLflow's own limit
SEND_INTERVAL = 2.0  # seconds between requests
RETRY_INTERVAL = 0.5  # seconds
_PATIENCE = 120  # seconds for other processes that open the same database
# Their messages quote no record.
_OWN_PACKAGES = (
    "dpexp",
    "hydra",
    "omegaconf",
    "mlflow",
    "pytorch_lightning",
    "lightning",
)  # their messages quote no record


def constants(values: Mapping[str, float]) -> dict[str, float]:
    """Figures by the names of their metrics."""
    return {WITH + name.replace("/", " "): value for name, value in values.items()}


def metric_of(knob: str) -> str:
    """The figure that has the value of a calibrated parameter."""
    return {"sampling_rate_at_fixed_noise": "sampling_rate", "steps": "rounds"}.get(knob, knob)


def value_of(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric, figure or calibrated parameter of a run."""
    return metrics.get(name, metrics.get(WITH + metric_of(name)))


def one_line(error: BaseException) -> str:
    """The message of an error in one line, without passwords of addresses."""
    return without_passwords(" ".join(str(error).split()))


def published_error(error: Exception, output: Path) -> str:
    """The text of an error for the server: all of a `ConfigError` by dpexp; type and place of any other.

    The message of another error may quote a record: it is written to `error.txt` in the job's folder.
    """
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(error, ConfigError) and is_own(error) and type(root).__module__.partition(".")[0] in _OWN_PACKAGES:
        return one_line(error)
    with suppress(OSError):  # the disk may be full
        output.mkdir(parents=True, exist_ok=True)
        (output / "error.txt").write_text("".join(traceback.format_exception(error)))
    return f"{place_of(root)}; see error.txt in the job's folder"


def open_store(uri: str, experiment: str, artifacts: str | None) -> tuple[MlflowClient, str]:
    """A client, and the id of the experiment, which is created if it does not exist."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="mlflow")
    try:
        with _creation_lock(uri):
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(experiment)
            return client, found.experiment_id if found else client.create_experiment(experiment, artifacts)
    except (MlflowException, OSError, sqlite3.Error) as error:
        raise ConfigError(f"tracking.uri={without_passwords(uri)} cannot be used: {one_line(error)}") from error


@contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """Lets one process at a time create an SQLite store, in WAL mode: readers and writers do not block each other."""
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
    """Ends the RUNNING runs whose process on this machine is gone: a process killed by SIGKILL ends no run."""
    condition = f"attributes.status = 'RUNNING' and tags.`dpexp.host` = '{HOST}'"
    for run in client.search_runs([experiment_id], condition):
        if not _is_alive(int(run.data.tags.get("dpexp.pid", "0"))):
            client.set_tag(run.info.run_id, ERROR, "its process was killed: SIGKILL, out of memory, or power failure")
            client.set_terminated(run.info.run_id, "KILLED")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return pid > 0


class Outbox:
    """Sends metrics, parameters, tags and files of one run, in order, from a thread of its own.

    The timestamps of metrics count up by one millisecond from the start: the duration of a round depends on its private
    sample.

    No method raises because of the server. What could not be sent until `close` is written to the file `unsent`, from
    which `send_unsent` delivers it when the store is used next.
    """

    def __init__(self, client: MlflowClient, uri: str, run_id: str, unsent: Path) -> None:
        self._client = client
        self._head = {"uri": uri, "run_id": run_id}
        self._unsent = unsent
        self._clock = count(int(time.time() * 1000))
        self._items: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        now = next(self._clock)
        self._add([{"metric": [key, float(value), now, step]} for key, value in values.items()])

    def params(self, values: Mapping[str, str]) -> None:
        self._add([{"param": [key, value]} for key, value in values.items()])

    def tags(self, values: Mapping[str, str]) -> None:
        self._add([{"tag": [key, value]} for key, value in values.items()])

    def file(self, path: Path) -> None:
        self._add([{"file": str(path.resolve())}])

    def model(self, folder: Path, rounds: int, tags: Mapping[str, str], name: str | None) -> None:
        """Logs a folder in MLflow's format as a model, and registers it under `name`, if given."""
        self._add([{"model": [str(folder.resolve()), rounds, dict(tags), name]}])

    def close(self, status: str, patience: float = 20.0) -> bool:
        """Sends the rest and then the status, for at most `patience` seconds; returns whether everything arrived."""
        self._add([{"status": status}])
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)
        with self._changed:
            left, self._items = self._items, []
        if left:
            self._unsent.parent.mkdir(parents=True, exist_ok=True)
            _write_lines(self._unsent, [self._head, *left])
        return not left

    def _add(self, items: list[dict[str, Any]]) -> None:
        with self._changed:
            self._items += items

    def _deliver(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(SEND_INTERVAL)
                items, closing = list(self._items), self._closing
            sent = 0
            try:
                for batch in _batches(items):
                    _send(self._client, self._head["run_id"], batch)
                    sent += len(batch)
            except Exception:  # tried again
                time.sleep(RETRY_INTERVAL)
            with self._changed:
                del self._items[:sent]
                if closing and not self._items:
                    return


def send_unsent(client: MlflowClient, uri: str, folder: Path) -> None:
    """Sends what earlier runs of the same store could not send."""
    for path in sorted(folder.glob("*.jsonl")):
        claimed = path.with_suffix(f".{os.getpid()}")
        try:
            os.rename(path, claimed)  # so that no other process sends it
        except FileNotFoundError:
            continue
        head, *items = [json.loads(line) for line in claimed.read_text().splitlines()]
        try:
            if head["uri"] == uri:
                while items:
                    batch = _batches(items)[0]
                    _send(client, head["run_id"], batch)
                    del items[: len(batch)]
        except Exception:
            _write_lines(claimed, [head, *items])
        finally:
            if items:
                os.rename(claimed, path)
            else:
                claimed.unlink()


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _batches(items: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Consecutive items of one type, as many as one request can take."""
    limits = {"metric": MAX_METRICS, "param": 100, "tag": 100}
    batches: list[list[dict[str, Any]]] = []
    for item in items:
        (type_,) = item
        if batches and type_ in batches[-1][0] and len(batches[-1]) < limits.get(type_, 1):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _send(client: MlflowClient, run_id: str, batch: list[dict[str, Any]]) -> None:
    """Sends a batch; an item that MLflow refuses as invalid is dropped with a warning."""
    try:
        _request(client, run_id, batch)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if len(batch) == 1:
            warnings.warn(f"MLflow takes no {json.dumps(batch[0])[:200]}: {str(error).splitlines()[0]}")
        else:
            for item in batch:
                _send(client, run_id, [item])


def _request(client: MlflowClient, run_id: str, batch: list[dict[str, Any]]) -> None:
    (type_,) = batch[0]
    values = [item[type_] for item in batch]
    if type_ == "metric":
        client.log_batch(run_id, metrics=[Metric(*value) for value in values])
    elif type_ == "param":
        client.log_batch(run_id, params=[Param(*value) for value in values])
    elif type_ == "tag":
        client.log_batch(run_id, tags=[RunTag(*value) for value in values])
    elif type_ == "file" and Path(values[0]).exists():  # it may have been deleted meanwhile
        client.log_artifact(run_id, values[0])
    elif type_ == "model" and Path(values[0][0]).exists():
        folder, *arguments = values[0]
        send_model(client, run_id, Path(folder), *arguments)
    elif type_ == "status":
        client.set_terminated(run_id, values[0])


# The columns of the list of runs. MLflow keeps such views in undocumented tags of the experiment.
COLUMNS = [  # metrics come before parameters, and by name
    "metrics.`epsilon`", "metrics.`test_accuracy`", "params.`privacy.delta`", "params.`plan.z`", "params.`plan.q`",
    "tags.`dpexp.group`", "tags.`dpexp.mechanism`", "tags.`dpexp.clip_rule`", "tags.`dpexp.allocation`",
    "tags.`dpexp.seed`", "tags.`dpexp.error`",
]  # fmt: skip
VIEW = "dpexp"


def set_view(client: MlflowClient, experiment_id: str) -> None:
    """Stores the columns of the list of runs in the experiment."""
    state = {"selectedColumns": COLUMNS, "orderByKey": "metrics.`test_accuracy`", "orderByAsc": False}
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
