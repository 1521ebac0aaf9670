"""The list of runs in MLflow's UI, and where it is."""

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
from typing import Any

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dpexp.errors import ConfigError, is_own
from dpexp.tracking.provenance import HOST
from dpexp.tracking.registered_model import send_model

_OWN_WORDS = ("dpexp", "hydra", "omegaconf", "mlflow", "pytorch_lightning")


def keep_error(error: Exception, output: Path) -> str:
    """What others may read of an error: a mistake in the configuration is a sentence of dpexp's own; of any other,
    whose text may quote a record, only type and place, while all of it is left in `error.txt` in the job's folder."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(error, ConfigError) and is_own(error) and type(root).__module__.partition(".")[0] in _OWN_WORDS:
        return " ".join(str(error).split())
    with suppress(OSError):  # that may be what went wrong
        output.mkdir(parents=True, exist_ok=True)
        (output / "error.txt").write_text("".join(traceback.format_exception(error)))
    places = [frame for frame in traceback.extract_tb(root.__traceback__) if "site-packages" not in frame.filename]
    where = f" in {Path(places[-1].filename).name}, line {places[-1].lineno}, {places[-1].name}" if places else ""
    return f"{type(root).__name__}{where}; see error.txt in the job's folder"


SAME = {"sampling_rate_at_fixed_noise": "sampling_rate", "steps": "rounds"}  # calibrated knob -> metric that has it
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


BATCH = 1000  # metrics a request, MLflow's own limit
EVERY = 2.0  # seconds


class Outbox:
    """Metrics, parameters, tags and files of one run, in order.

    Metrics have no times of their own: how long a round took tells of the records that were in it. They are counted on,
    a millisecond each, from when the outbox was made.

    Nothing here raises because of the server. What could not be sent by the time of `close` is left in `unsent`,
    which `send_unsent` delivers when the store is used next.
    """

    def __init__(self, client: MlflowClient, uri: str, run_id: str, unsent: Path) -> None:
        self._client = client
        self._letter = {"uri": uri, "run_id": run_id}
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
        """A folder in MLflow's form, to be a logged model and under a name a registered one."""
        self._add([{"model": [str(folder.resolve()), rounds, dict(tags), name]}])

    def close(self, status: str, patience: float = 20.0) -> bool:
        """Sends the rest, the run's status last; returns whether all of it arrived.

        Args:
            patience: seconds to go on trying for.
        """
        self._add([{"status": status}])
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)
        with self._changed:
            left, self._items = self._items, []
        if left:
            self._unsent.parent.mkdir(parents=True, exist_ok=True)
            self._unsent.write_text("".join(json.dumps(line) + "\n" for line in [self._letter, *left]))
        return not left

    def _add(self, items: list[dict[str, Any]]) -> None:
        with self._changed:
            self._items += items

    def _deliver(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(EVERY)
                items, closing = list(self._items), self._closing
            sent = 0
            try:
                for batch in _batches(items):
                    _send(self._client, self._letter["run_id"], batch)
                    sent += len(batch)
            except Exception:  # whatever the reason, it is tried again
                time.sleep(0.5)
            with self._changed:
                del self._items[:sent]
                if closing and not self._items:
                    return


def send_unsent(client: MlflowClient, uri: str, folder: Path) -> None:
    """Delivers what earlier runs could not, if the same store is at hand now."""
    for path in sorted(folder.glob("*.jsonl")):
        claimed = path.with_suffix(f".{os.getpid()}")
        try:
            os.rename(path, claimed)  # no other process sends it too
        except FileNotFoundError:
            continue
        letter, *items = [json.loads(line) for line in claimed.read_text().splitlines()]
        try:
            if letter["uri"] == uri:
                while items:
                    batch = _batches(items)[0]
                    _send(client, letter["run_id"], batch)
                    del items[: len(batch)]
        except Exception:
            claimed.write_text("".join(json.dumps(line) + "\n" for line in [letter, *items]))
        finally:
            if items:
                os.rename(claimed, path)
            else:
                claimed.unlink()


def _batches(items: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours of one kind that one request can carry."""
    limits = {"metric": BATCH, "param": 100, "tag": 100}
    batches: list[list[dict[str, Any]]] = []
    for item in items:
        (kind,) = item
        if batches and kind in batches[-1][0] and len(batches[-1]) < limits.get(kind, 1):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _send(client: MlflowClient, run_id: str, batch: list[dict[str, Any]]) -> None:
    """Sends a batch; of what MLflow refuses for good, only that is lost, with a warning."""
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
    (kind,) = batch[0]
    values = [item[kind] for item in batch]
    if kind == "metric":
        client.log_batch(run_id, metrics=[Metric(*value) for value in values])
    elif kind == "param":
        client.log_batch(run_id, params=[Param(*value) for value in values])
    elif kind == "tag":
        client.log_batch(run_id, tags=[RunTag(*value) for value in values])
    elif kind == "file" and Path(values[0]).exists():  # it may have been deleted while the server was away
        client.log_artifact(run_id, values[0])
    elif kind == "model" and Path(values[0][0]).exists():
        folder, *facts = values[0]
        send_model(client, run_id, Path(folder), *facts)
    elif kind == "status":
        client.set_terminated(run_id, values[0])


# MLflow keeps such views in undocumented tags of the experiment.
COLUMNS = [  # metrics come before parameters, and by name
    "metrics.`epsilon`", "metrics.`test_accuracy`", "params.`privacy.delta`", "params.`plan.z`", "params.`plan.q`",
    "tags.`dpexp.group`", "tags.`dpexp.mechanism`", "tags.`dpexp.clip_rule`", "tags.`dpexp.allocation`",
    "tags.`dpexp.seed`", "tags.`dpexp.error`",
]  # fmt: skip
VIEW = "dpexp"


CHARTS = ("test_accuracy", "epsilon")  # on top; MLflow adds one of each other metric behind them
_SECTION = {"uuid": "metrics", "name": "Model metrics", "display": True, "isReordered": True}
_LINE = {
    "type": "LINE", "metricSectionId": "metrics", "runsCountToCompare": 10, "deleted": False, "isGenerated": True,
    "lineSmoothness": 0, "scaleType": "linear", "xAxisScaleType": "linear", "range": {}, "xAxisKey": "step",
    "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
}  # fmt: skip


def show_columns(client: MlflowClient, experiment_id: str) -> None:
    state = {
        "selectedColumns": COLUMNS, "orderByKey": "metrics.`test_accuracy`", "orderByAsc": False,
        "isAccordionReordered": True, "compareRunSections": [_SECTION],
        "compareRunCharts": [_LINE | {"uuid": name, "metricKey": name, "displayName": name} for name in CHARTS],
    }  # fmt: skip
    client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{VIEW}", json.dumps(state))


def address(uri: str, experiment_id: str) -> str:
    """How to see the list of runs: its address at a server, or the command that starts one, and the address there. The
    address of the experiment itself opens a page for traces."""
    page = f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}"
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/{page}"
    return f"mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000/{page}"
