"""The run in MLflow that mirrors a job's record (`dpexp.tracking` says what each of them is for).

`Mirror.push` sends what the run does not have yet: from a thread while the job trains, and later by
`python -m dpexp mirror FOLDER`. In this module, `facts` are those of the job's `run.json`, whose keys are a table in
`dpexp.tracking.record.Record`.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils import chunk_list

from dpexp.accounting.ledger import Ledger, contains_lines
from dpexp.accounting.risk import FIGURES
from dpexp.accounting.rounding import down, up
from dpexp.config import Tracking
from dpexp.errors import ConfigError
from dpexp.tracking.client import MAX_METRICS, MAX_PARAMS, create_run, open_store, set_view
from dpexp.tracking.job_folder import (
    CHECKPOINT,
    ERROR_TAG,
    LEDGER,
    METRICS,
    OUTPUT_TAG,
    RECORD,
    RUN,
    SENT,
    START_TAG,
    STATUS,
    ended,
    exclusive,
    read_json,
    write_json,
)
from dpexp.tracking.provenance import one_line, without_passwords
from dpexp.tracking.registered_model import send_model

_DIGITS = 5
INTERVAL = 2.0  # seconds between pushes while a job trains


class Mirror:
    """The run that mirrors a job's folder.

    `mirror.json` in the folder says what the run has. Making one needs the server; no method raises because of it.
    """

    def __init__(self, client: MlflowClient, run_id: str, folder: Path, facts: Mapping[str, Any]) -> None:
        self._client, self._run_id, self._folder, self._facts = client, run_id, folder, facts
        run = client.get_run(run_id)
        self._tags, self._params, self._status = run.data.tags, run.data.params, run.info.status
        self._sent = read_json(folder / SENT)  # by the id of a run: a job may have one in several stores
        sent = self._sent.get(run_id, {})
        self._lines: int = sent.get("lines", 0)
        self._files: dict[str, list[int]] = sent.get("files", {})
        self._thread = Thread(target=self._follow, daemon=True)  # at its end, Python does not wait for it
        self._ended, self._given_up = Event(), False
        self._end: Mapping[str, Any] = {}
        self.missed: str | None = None  # why the server has not got everything

    def follow(self) -> None:
        """Pushes every two seconds, from a thread, until `close`."""
        self._thread.start()

    def close(self, end: Mapping[str, Any], patience: float) -> bool:
        """Pushes the rest and how the job ended; returns whether the server answered within `patience` seconds."""
        self._end = end
        self._ended.set()
        self._thread.join(patience)
        self._given_up = self._thread.is_alive()
        if self._given_up:
            self.missed = self.missed or f"it did not answer within {patience:g} s"
        return not self._given_up

    def _follow(self) -> None:
        self.push({})
        while not self._ended.wait(INTERVAL):
            self.push({})
        self.push(self._end)

    def push(self, end: Mapping[str, Any]) -> None:
        """Sends what the run lacks.

        Args:
            end: how the job ended; empty while it goes on.
        """
        if self._given_up:
            return
        self.missed = None
        try:
            self._push(end)
        except Exception as error:  # of the folder
            self.missed = self.missed or one_line(error)

    def _push(self, end: Mapping[str, Any]) -> None:
        """Sends tags, parameters, metrics, files, and at last the status. A failed request does not stop later ones."""
        facts = self._facts
        tags = facts["tags"] | ({ERROR_TAG: end["reason"]} if end.get("reason") else {})
        self._push_texts("tags", RunTag, tags, self._tags)
        self._push_texts("params", Param, facts["params"], self._params)
        self._push_metrics()
        # In this order: a ledger may have gone on after its end.
        first = [METRICS, STATUS, LEDGER, "ledger.end.json"] if end else []
        for path in (self._folder / name for name in (*first, *facts["files"])):
            if path.exists() and self._files.get(path.name) != _version(path) and self._sends_file(path):
                self._files[path.name] = _version(path)
                self._keep()
        status = end.get("status", self._status)
        if status != self._status and self._sends(self._client.set_terminated, status, end.get("time")):
            self._status = status

    def _push_texts(self, kind: str, entity: Callable[..., Any], texts: dict[str, str], known: dict[str, str]) -> None:
        """Sends the tags or parameters that the run does not know yet."""
        lacking = [entity(*one) for one in texts.items() if known.get(one[0]) != one[1]]
        for some in chunk_list(lacking, MAX_PARAMS):
            if self._sends(self._client.log_batch, **{kind: some}):
                known |= {one.key: one.value for one in some}

    def _push_metrics(self) -> None:
        """Sends the lines of `metrics.jsonl` that the run does not have."""
        with (self._folder / METRICS).open() as file:
            rows = [json.loads(line) for line in islice(file, self._lines, None) if line.endswith("\n")]
        # The duration of a round depends on its private sample, so that no point has a time of its own: line k of the
        # file gets the start plus k milliseconds. A line that is sent twice is the same point, which MLflow has once.
        points = [
            Metric(name, shown(name, value), self._facts["start"] + line, row["step"])
            for line, row in enumerate(rows, self._lines)
            for name, value in row["metrics"].items()
        ]
        log = self._client.log_batch
        if points and all(self._sends(log, metrics=some) for some in chunk_list(points, MAX_METRICS)):
            self._lines += len(rows)
            self._keep()

    def _sends_file(self, path: Path) -> bool:
        """Sends a file, or the folder of a model; returns whether the server took it."""
        if path.name == "mlflow_model":
            return self._sends(partial(send_model, self._client), path.resolve(), **self._facts["model"])
        if path.suffix == ".yaml":
            return self._sends(self._client.log_text, without_passwords(path.read_text()), path.name)
        return self._sends(self._client.log_artifact, str(path.resolve()))

    def _sends(self, request: Callable[..., Any], *values: Any, **named: Any) -> bool:
        """Sends one request, and returns whether the server took it.

        An error is remembered in `missed`, and does not keep later requests from being sent.
        """
        if self._given_up:
            return False
        try:
            request(self._run_id, *values, **named)
        except Exception as error:
            self.missed = self.missed or one_line(error)
            return False
        return True

    def _keep(self) -> None:
        """Writes down in `mirror.json` what the run has by now."""
        with suppress(OSError):  # a full disk; later it is sent again
            self._sent[self._run_id] = {"lines": self._lines, "files": self._files}
            write_json(self._folder / SENT, self._sent)


def shown(name: str, value: float) -> float:
    """A metric with as many digits as people look at.

    Rounding must not flatter: what is claimed, as ε, is rounded up; lower bounds and the noise z are rounded down.
    """
    if not math.isfinite(value) or value == int(value):
        return value
    if any(word in name for word in ("at_least", "lower_bound", "noise_multiplier")):
        return float(down(value, _DIGITS))
    if any(word.startswith(("epsilon", *FIGURES)) for word in name.split()):
        return float(up(value, _DIGITS))
    return float(f"{value:.{_DIGITS}g}")


def _version(path: Path) -> list[int]:
    """Size and time of a file, or of all in a folder: they change when one is written."""
    found = [one.stat() for one in (path, *path.rglob("*")) if one.name != "MLmodel"]  # which send_model writes
    return [sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)]


def mirror_folder(folder: Path, uri: str | None) -> str:
    """Sends what the run of an ended job lacks; creates the run in a store that has none. Returns its id.

    Args:
        uri: the store; by default that of the job.
    """
    if not (facts := read_json(folder / RECORD)):
        raise ConfigError(f"{folder} holds no {RECORD}, the record of a job; name the folder of a job.")
    store = Tracking(**facts["store"])
    store.uri = uri or store.uri
    if store.uri is None:
        raise ConfigError(f"the job in {folder} had no store; give uri=….")
    _check_store(store.uri, folder, facts)
    store_name = without_passwords(store.uri)
    with exclusive(folder):
        client, experiment_id = open_store(store)
        try:
            if (run := find_run(client, folder)) is not None:
                run_id = run.info.run_id
                _refuse_earlier_copy(folder, facts, run)
                _refuse_older_ledger(client, run_id, folder / LEDGER)
            else:
                begin = partial(create_job_run, client, experiment_id, facts, folder)
                run_id = begin_job_run(store.uri, client, facts, folder, begin)
            mirror = Mirror(client, run_id, folder, facts)
        except (MlflowException, OSError) as error:
            raise ConfigError(f"{store_name} cannot be used: {one_line(error)}") from error
        mirror.push(ended(folder))
        if mirror.missed is not None:
            raise ConfigError(f"the run {run_id} of {store_name} still lacks some of {folder}: {mirror.missed}")
        conclude_job_run(store.uri, client, facts, run_id, folder)
    return run_id


def _check_store(uri: str, folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuses a store that would not know of a job's later rounds, or whose password is not known."""
    if facts["spends"] and (folder / CHECKPOINT).exists() and without_passwords(uri) != facts["store"]["uri"]:
        raise ConfigError(
            f"the job in {folder} can be resumed, and {without_passwords(uri)} would not know of its rounds on "
            f"data.id={facts['spends']['data_id']} then; mirror it once it has ended, or delete its {CHECKPOINT}."
        )
    if "…" in uri:  # which without_passwords wrote into the record in place of a password
        raise ConfigError(f"the password of {uri} is not kept; give uri=….")


def begin_job_run(
    uri: str,
    client: MlflowClient,
    facts: Mapping[str, Any],
    folder: Path,
    begin: Callable[[], str],
    planned: Ledger | None = None,
    earlier: Run | None = None,
) -> str:
    """Creates or reopens a job's run by `begin`, and returns its id.

    On a named data set (`data.id`), the run counts among its runs from then on, if the data set's budget has room.

    Args:
        planned: what is asked of the data set's budget, if it has one; None: nothing.
        earlier: the run of a resumed job.
    """
    if facts["spends"] is None:
        return begin()
    from dpexp.tracking import data_budget

    return data_budget.start(uri, client, facts, planned, folder, earlier, begin)


def conclude_job_run(uri: str, client: MlflowClient, facts: Mapping[str, Any], run_id: str, folder: Path) -> None:
    """Lets the run of an ended job on a named data set count as its ledger."""
    if facts["spends"] is not None:
        from dpexp.tracking import data_budget

        data_budget.end(client, uri, run_id, folder)


def create_job_run(client: MlflowClient, experiment_id: str, facts: Mapping[str, Any], folder: Path) -> str:
    """Creates the run of a job; returns its id, which its folder remembers."""
    run_id = create_run(client, experiment_id, facts["tags"], start_time=facts["start"], run_name=facts["name"])
    write_json(folder / SENT, {**read_json(folder / SENT), run_id: {}})
    set_view(client, experiment_id)
    inputs = DatasetInput(Dataset(**facts["data"]), [InputTag("mlflow.data.context", "training")])
    client.log_inputs(run_id, [inputs])
    return run_id


def find_run(client: MlflowClient, folder: Path) -> Run | None:
    """The run of the job in a folder; None if it has none in this store."""
    own = [(folder / RUN).read_text()] if (folder / RUN).exists() else []
    for run_id in (*own, *read_json(folder / SENT)):
        try:
            return client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    return None


def earlier_run(client: MlflowClient, output: Path, facts: Mapping[str, Any]) -> Run | None:
    """The run of a job that is resumed; None if it has none in this store, or the folder is a copy of another job's.

    Raises:
        ConfigError: the folder's ledger lacks rounds of the run's.
    """
    if (run := find_run(client, output)) is None:
        return None
    said = Path(run.data.tags.get(OUTPUT_TAG, output))
    if said.exists() and not said.samefile(output):  # of a folder of another machine, nothing exists here
        return None
    _refuse_older_ledger(client, run.info.run_id, output / LEDGER)
    return None if _is_of_another_start(facts, run) else run


def _is_of_another_start(facts: Mapping[str, Any], run: Run) -> bool:
    """Whether a job went on in another copy of its folder: its run shows a start that this folder does not have."""
    return START_TAG in run.data.tags and run.data.tags[START_TAG] not in facts["starts"]


def _refuse_earlier_copy(folder: Path, facts: Mapping[str, Any], run: Run) -> None:
    """Refuses the folder of a job that was resumed in a copy of it.

    The ledgers need not show it: the one in MLflow may not have the first round since.
    """
    if _is_of_another_start(facts, run):
        host, process = (run.data.tags.get(f"dpexp.{name}") for name in ("host", "pid"))
        raise ConfigError(
            f"{folder} is an earlier copy of its job, whose run {run.info.run_id} went on in process {process} of "
            f"{host}; mirror the folder of that one."
        )


def _refuse_older_ledger(client: MlflowClient, run_id: str, ledger: Path) -> None:
    """Refuses a ledger that lacks rounds of the copy in MLflow: they would count nowhere."""
    with tempfile.TemporaryDirectory() as copied:
        if all(artifact.path != ledger.name for artifact in client.list_artifacts(run_id)):
            return
        client.download_artifacts(run_id, ledger.name, copied)
        written = ledger.read_bytes() if ledger.exists() else b""
        if not contains_lines(written, (Path(copied) / ledger.name).read_bytes()):
            raise ConfigError(
                f"{ledger} lacks rounds that the ledger of its run {run_id} in MLflow holds, as an earlier copy does; "
                "put the run's artifact in its place, so that all of them count."
            )
