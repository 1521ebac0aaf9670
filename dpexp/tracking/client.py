"""MLflow's client: opening a store, sending a run's data, and the list of runs."""

import json
import logging
import os
import sqlite3
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from shlex import quote
from threading import Thread

from filelock import FileLock, Timeout
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.utils import chunk_list
from sqlalchemy import make_url

from dpexp.errors import ConfigError, is_own, place_of, root_of
from dpexp.tracking.job_folder import finished_result
from dpexp.tracking.provenance import HOST, valid_name, without_passwords
from dpexp.tracking.registered_model import send_model

# MLflow draws a chart of each metric: names with a slash first, then by name. What a run is looked at for, epsilon and
# test_…, comes before what is constant.
TRIED = "tried "  # prefix of what calibration tried
WITH = "with "  # prefix of the figures of a plan, its guarantee and its audit, and of released statistics
ERROR = "dpexp.error"  # a tag: why a run did not finish
OUTPUT = "dpexp.output"  # a tag: the job's folder
MAX_METRICS, MAX_PARAMS = 1000, 100  # per request, MLflow's own limits
SEND_INTERVAL = 2.0  # seconds between requests with metrics
_PATIENCE = 600  # seconds for other processes that hold a lock
_SILENCE = 5  # seconds that a process waits for another without a word
# Their messages quote no record
_OWN_PACKAGES = ("dpexp", "hydra", "omegaconf", "mlflow", "pytorch_lightning", "lightning")


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
    root = root_of(error)
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
        with _created_alone(uri):
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(experiment)
            return client, found.experiment_id if found else client.create_experiment(experiment, artifacts)
    except (MlflowException, OSError, sqlite3.Error) as error:
        raise ConfigError(f"tracking.uri={without_passwords(uri)} cannot be used: {one_line(error)}") from error


def database(uri: str) -> Path | None:
    """The file of an SQLite store; None for other stores."""
    scheme, separator, _ = uri.partition(":///")
    path = make_url(uri).database if separator and scheme.partition("+")[0] == "sqlite" else None
    return Path(path).resolve() if path else None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds a lock, for which it waits some minutes, after a few seconds with a word; a failure is an OSError.
    `what`: whose turn it is that the lock gives."""
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
        if finished_result(Path(run.data.tags.get(OUTPUT, ""))):
            client.set_terminated(run.info.run_id)
        else:
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


class Sender:
    """Sends metrics, parameters, tags and files of one run, in order, from a thread of its own.

    The timestamps of metrics count up by one millisecond from the start: the duration of a round depends on its private
    sample.

    No method raises because of the server. What it misses is not sent again; the job's folder has the results. At its
    end, Python does not wait for the thread.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._clock = count(int(time.time() * 1000))
        self._calls: SimpleQueue[tuple[Future, Callable[[], object]]] = SimpleQueue()
        self._closed = False
        self._send(int)
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()
        self._metrics: list[Metric] = []  # until the next request
        self._next_request = 0.0
        self.missed: str | None = None  # why the server has not got everything

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        now = next(self._clock)
        self._metrics += [Metric(valid_name(key), float(value), now, step) for key, value in values.items()]
        if self._last.done() and time.monotonic() >= self._next_request:  # a slow server gets fewer requests, no queue
            self._next_request = time.monotonic() + SEND_INTERVAL
            self._send_metrics()

    def params(self, values: Mapping[str, str]) -> None:
        for some in chunk_list([Param(key, value) for key, value in values.items()], MAX_PARAMS):
            self._send(self._client.log_batch, self._run_id, params=some)

    def tags(self, values: Mapping[str, str]) -> None:
        for key, value in values.items():
            self._send(self._client.set_tag, self._run_id, key, value)

    def file(self, path: Path) -> None:
        self._send(self._client.log_artifact, self._run_id, str(path.resolve()))

    def text(self, path: Path) -> None:
        """Sends a text file without the passwords of addresses."""
        self._send(self._client.log_text, self._run_id, without_passwords(path.read_text()), path.name)

    def model(self, folder: Path, rounds: int, tags: Mapping[str, str], name: str | None) -> None:
        """Logs a folder in MLflow's format as a model, and registers it under `name`, if given."""
        self._send(send_model, self._client, self._run_id, folder.resolve(), rounds, tags, name)

    def close(self, status: str, patience: float) -> bool:
        """Sends the rest and then the status, for at most `patience` seconds. Whether the server answered in time."""
        self._send_metrics()
        self._send(self._client.set_terminated, self._run_id, status)
        answered = not wait([self._last], patience).not_done
        if not answered:
            self.missed = self.missed or f"it did not answer within {patience:g} s"
        self._closed = True
        self._calls.put((Future(), int))
        return answered

    def _send_metrics(self) -> None:
        for some in chunk_list(self._metrics, MAX_METRICS):
            self._send(self._client.log_batch, self._run_id, metrics=some)
        self._metrics = []

    def _send(self, call: Callable[..., object], *values: object, **named: object) -> None:
        self._last: Future[None] = Future()
        self._calls.put((self._last, partial(call, *values, **named)))

    def _work(self) -> None:
        while not self._closed:
            done, call = self._calls.get()
            try:
                call()
            except Exception as error:
                self.missed = self.missed or one_line(error)
            done.set_result(None)


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
