"""Data is sent beside the training, which no server delays, and many processes may write at once."""

import threading
from types import SimpleNamespace

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from test_run_costs import FORK

from dpexp.tracking import client as module
from dpexp.tracking.client import Sender, locked, open_store


class Away:
    """A client whose server is away while `down`, and answers each request only when it may."""

    def __init__(self, client):
        self.client = client
        self.down = False
        self.answers = threading.Event()
        self.answers.set()
        self.requests = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.requests.append(name)
            self.answers.wait(30)
            if self.down:
                raise ConnectionError("no route to host")
            return getattr(self.client, name)(*args, **kwargs)

        return call


@pytest.fixture
def run(tmp_path, empty_store, monkeypatch):
    """A client that can go away, and the id of a run in its store."""
    monkeypatch.setattr(module, "SEND_INTERVAL", 0.0)
    client, experiment = open_store(f"sqlite:///{tmp_path}/mlflow.db", "dpexp", str(tmp_path / "artifacts"))
    return Away(client), client.create_run(experiment).info.run_id


def test_metrics_wait_for_a_slow_server_in_few_requests(run):
    client, run_id = run
    client.answers.clear()
    sender = Sender(client, run_id)
    for step in range(2501):
        sender.metrics({"a": float(step), "b+c": 0.0}, step)
    client.answers.set()
    sender.close("FINISHED", patience=20)
    assert sender.missed is None and client.requests.count("log_batch") <= 1 + 6
    assert [point.value for point in client.get_metric_history(run_id, "a")] == list(range(2501))
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and {*found.data.metrics} == {"a", "bc"}, "a name that MLflow takes"


def test_no_metric_tells_how_long_a_round_took(run, monkeypatch):
    client, run_id = run
    times = iter([1000.0, 2000.0, 5000.0, 9000.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(times), monotonic=lambda: 0.0))
    sender = Sender(client, run_id)
    for step in range(3):
        sender.metrics({"a": 1.0, "b": 2.0}, step)
    sender.close("FINISHED", patience=20)
    first, *later = [point.timestamp for point in client.get_metric_history(run_id, "a")]
    assert first == 1_000_000 and later == [first + 1, first + 2]


def test_what_a_server_missed_is_said_and_the_rest_arrives(run, tmp_path):
    client, run_id = run
    (tmp_path / "notes.txt").write_text("kept")
    sender = Sender(client, run_id)
    client.down = True
    sender.metrics({"a": 1.0}, 1)
    sender._last.result()
    client.down = False
    sender.params({f"p{k}": "1" for k in range(101)})
    sender.tags({"t": "x"})
    sender.file(tmp_path / "notes.txt")
    sender.close("KILLED", patience=20)
    assert sender.missed == "no route to host"
    found = client.get_run(run_id)
    assert (found.info.status, found.data.tags["t"], len(found.data.params)) == ("KILLED", "x", 101)
    assert not found.data.metrics and [item.path for item in client.list_artifacts(run_id)] == ["notes.txt"]


def test_a_server_that_never_answers_does_not_hold_up_the_end(run, tmp_path):
    client, run_id = run
    client.answers.clear()
    sender = Sender(client, run_id)
    for step in range(100):
        sender.metrics({"a": 1.0}, step)
    sender.file(tmp_path / "notes.txt")
    sender.close("FINISHED", patience=0.1)
    assert sender.missed == "it did not answer within 0.1 s"
    client.answers.set()
    sender._thread.join()
    assert client.requests == ["log_batch"], "all others were given up"


def test_a_lock_says_what_it_is_waited_for_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SILENCE", 0.05)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    lock = tmp_path / "mlflow.lock"
    with (
        FileLock(lock),
        pytest.warns(UserWarning, match=rf"waiting for MLflow's database, .* end the job .*fuser {lock}"),
        pytest.raises(OSError, match="could not be acquired"),
        locked(lock, "MLflow's database"),
    ):
        raise AssertionError("it is held")
    with locked(lock, "MLflow's database"):
        pass


def written(uri, folder, barrier, codes):
    barrier.wait(60)
    client, experiment = open_store(uri, "dpexp", str(folder))
    sender = Sender(client, client.create_run(experiment).info.run_id)
    for step in range(500):
        sender.metrics({"a": float(step)}, step)
    sender.close("FINISHED", patience=60)
    codes.put(sender.missed)


def test_processes_write_at_once_into_a_store_that_none_has_used_before(tmp_path, empty_store):
    uri, count = f"sqlite:///{tmp_path}/new/mlflow.db", 3
    barrier, codes = FORK.Barrier(count), FORK.Queue()
    writers = [FORK.Process(target=written, args=(uri, tmp_path, barrier, codes)) for _ in range(count)]
    for writer in writers:
        writer.start()
    assert [codes.get(timeout=120) for _ in writers] == [None] * count
    for writer in writers:
        writer.join(60)
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs(["1"])
    assert len(runs) == count and {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "a")
        assert [point.value for point in points] == list(range(500))
