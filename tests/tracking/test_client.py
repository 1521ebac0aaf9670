"""What a tracking server misses is kept, and many processes may write at once."""

import subprocess
import sys
import time
import warnings

import pytest
from mlflow import MlflowClient

from dpexp.tracking.client import BATCH, Outbox, open_store, send_unsent


class Away:
    """A client whose server is away while `down`."""

    def __init__(self, client):
        self.client = client
        self.down = True
        self.requests = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if self.down:
                raise ConnectionError("no route to host")
            self.requests.append(name)
            return getattr(self.client, name)(*args, **kwargs)

        return call


@pytest.fixture
def run(tmp_path):
    """A client that can go away, the store's address, and the id of a run in it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client, experiment = open_store(uri, "dpexp", str(tmp_path / "artifacts"))
    return Away(client), uri, client.create_run(experiment).info.run_id


def test_metrics_go_in_batches(run, tmp_path):
    client, uri, run_id = run
    outbox = Outbox(client, uri, run_id, tmp_path / "unsent" / "a.jsonl")
    for step in range(2500):
        outbox.metrics({"a": float(step)}, step)
    client.down = False
    assert outbox.close("FINISHED") and not (tmp_path / "unsent").exists()
    assert client.requests.count("log_batch") == -(-2500 // BATCH)
    assert [point.value for point in client.get_metric_history(run_id, "a")] == list(range(2500))
    assert client.get_run(run_id).info.status == "FINISHED"


def test_no_metric_tells_how_long_a_round_took(run, tmp_path):
    client, uri, run_id = run
    client.down = False
    outbox = Outbox(client, uri, run_id, tmp_path / "a.jsonl")
    for step in range(3):
        time.sleep(0.2 * (step == 2))
        outbox.metrics({"a": 1.0, "b": 2.0}, step)
    assert outbox.close("FINISHED")
    first, *later = [point.timestamp for point in client.get_metric_history(run_id, "a")]
    assert later == [first + 1, first + 2] and abs(time.time() * 1000 - first) < 60_000


def test_a_server_that_comes_back_has_missed_nothing(run, tmp_path):
    client, uri, run_id = run
    outbox = Outbox(client, uri, run_id, tmp_path / "a.jsonl")
    outbox.metrics({"a": 1.0}, 1)
    time.sleep(3)
    client.down = False
    outbox.metrics({"a": 2.0}, 2)
    assert outbox.close("FINISHED")
    assert [point.value for point in client.get_metric_history(run_id, "a")] == [1, 2]


def test_what_never_arrived_is_sent_when_the_store_is_used_next(run, tmp_path):
    client, uri, run_id = run
    outbox = Outbox(client, uri, run_id, tmp_path / "unsent" / "a.jsonl")
    (tmp_path / "notes.txt").write_text("kept")
    outbox.params({"p": "1"})
    outbox.metrics({"a": 1.0}, 1)
    outbox.tags({"t": "x"})
    outbox.file(tmp_path / "notes.txt")
    assert not outbox.close("KILLED", patience=1.5)
    send_unsent(client, uri, tmp_path / "unsent")
    assert (tmp_path / "unsent" / "a.jsonl").exists(), "still away: still kept"
    client.down = False
    send_unsent(client, "sqlite:///elsewhere.db", tmp_path / "unsent")
    assert (tmp_path / "unsent" / "a.jsonl").exists(), "another store's"
    send_unsent(client, uri, tmp_path / "unsent")
    assert not list((tmp_path / "unsent").iterdir())
    found = client.get_run(run_id)
    assert (found.info.status, found.data.params["p"], found.data.metrics["a"], found.data.tags["t"]) == (
        "KILLED", "1", 1.0, "x",
    )  # fmt: skip
    assert [item.path for item in client.list_artifacts(run_id)] == ["notes.txt"]


def test_what_mlflow_refuses_for_good_holds_up_nothing_else(run, tmp_path):
    client, uri, run_id = run
    client.down = False
    outbox = Outbox(client, uri, run_id, tmp_path / "a.jsonl")
    outbox.metrics({"a+b": 1.0, "a": 2.0}, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert outbox.close("FINISHED")
    assert any("a+b" in str(warning.message) for warning in caught)
    assert client.get_run(run_id).data.metrics == {"a": 2.0} and client.get_run(run_id).info.status == "FINISHED"


WRITER = """
import sys
from pathlib import Path
import dpexp.tracking
from dpexp.tracking.client import Outbox
from dpexp.tracking.client import open_store
uri, folder = sys.argv[1:]
client, experiment = open_store(uri, "dpexp", folder)
run_id = client.create_run(experiment).info.run_id
outbox = Outbox(client, uri, run_id, Path(folder) / f"{run_id}.jsonl")
for step in range(500):
    outbox.metrics({"a": float(step)}, step)
sys.exit(0 if outbox.close("FINISHED", patience=60) else 1)
"""


def test_four_processes_write_at_once_into_a_store_that_none_has_used_before(tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    command = [sys.executable, "-c", WRITER, uri, str(tmp_path / "artifacts")]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    failures = [(writer.communicate(timeout=240)[1], writer.returncode) for writer in writers]
    assert [code for _, code in failures] == [0] * 4, failures
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs(["1"])
    assert len(runs) == 4 and {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "a")
        assert [point.value for point in points] == list(range(500))
