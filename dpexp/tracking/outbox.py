"""What a run has to tell MLflow, sent in batches from a thread of its own, and kept while the server is away."""

import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dpexp.tracking.model import send_model

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
