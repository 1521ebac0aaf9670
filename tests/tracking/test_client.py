"""Data that a tracking server misses is kept, and many processes may write at once."""

import warnings
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from test_data_budget import FORK

from dpexp.tracking import client as module
from dpexp.tracking.client import MAX_METRICS, Outbox, open_store, send_unsent


class Away:
    """A client whose server is away while `down`."""

    def __init__(self, client):
        self.client = client
        self.down = True
        self.requests = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.requests.append(name)
            if self.down:
                raise ConnectionError("no route to host")
            return getattr(self.client, name)(*args, **kwargs)

        return call


@pytest.fixture
def run(tmp_path, empty_store, monkeypatch):
    """A client that can go away, the store's address, and the id of a run in it."""
    monkeypatch.setattr(module, "SEND_INTERVAL", 0.01)
    monkeypatch.setattr(module, "RETRY_INTERVAL", 0.01)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client, experiment = open_store(uri, "dpexp", str(tmp_path / "artifacts"))
    return Away(client), uri, client.create_run(experiment).info.run_id


def test_metrics_are_sent_in_batches_once_a_server_is_back(run, tmp_path):
    client, uri, run_id = run
    outbox = Outbox(client, uri, run_id, tmp_path / "unsent" / "a.jsonl")
    for step in range(2500):
        outbox.metrics({"a": float(step)}, step)
    while len(client.requests) < 2:  # it was tried again
        pass
    with outbox._changed:  # not between two of its requests
        client.requests.clear()
        client.down = False
    assert outbox.close("FINISHED") and not (tmp_path / "unsent").exists()
    assert client.requests.count("log_batch") <= -(-2500 // MAX_METRICS) + 1
    assert [point.value for point in client.get_metric_history(run_id, "a")] == list(range(2500))
    assert client.get_run(run_id).info.status == "FINISHED"


def test_no_metric_tells_how_long_a_round_took(run, tmp_path, monkeypatch):
    client, uri, run_id = run
    client.down = False
    times = iter([1000.0, 2000.0, 5000.0, 9000.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(times), sleep=lambda seconds: None))
    outbox = Outbox(client, uri, run_id, tmp_path / "a.jsonl")
    for step in range(3):
        outbox.metrics({"a": 1.0, "b": 2.0}, step)
    assert outbox.close("FINISHED")
    first, *later = [point.timestamp for point in client.get_metric_history(run_id, "a")]
    assert first == 1_000_000 and later == [first + 1, first + 2]


def test_what_never_arrived_is_sent_when_the_store_is_used_next(run, tmp_path):
    client, uri, run_id = run
    outbox = Outbox(client, uri, run_id, tmp_path / "unsent" / "a.jsonl")
    (tmp_path / "notes.txt").write_text("kept")
    outbox.params({"p": "1"})
    outbox.metrics({"a": 1.0}, 1)
    outbox.tags({"t": "x"})
    outbox.file(tmp_path / "notes.txt")
    assert not outbox.close("KILLED", patience=0.1)
    send_unsent(client, uri, tmp_path / "unsent")
    assert (tmp_path / "unsent" / "a.jsonl").exists(), "still away: still kept"
    client.down = False
    send_unsent(client, "sqlite:///elsewhere.db", tmp_path / "unsent")
    assert (tmp_path / "unsent" / "a.jsonl").exists(), "another store's"
    send_unsent(client, uri, tmp_path / "unsent")
    assert not list((tmp_path / "unsent").iterdir())
    found = client.get_run(run_id)
    data = found.data
    assert (found.info.status, data.params["p"], data.metrics["a"], data.tags["t"]) == ("KILLED", "1", 1.0, "x")
    assert [item.path for item in client.list_artifacts(run_id)] == ["notes.txt"]


def test_an_item_that_mlflow_refuses_delays_no_other(run, tmp_path):
    client, uri, run_id = run
    client.down = False
    outbox = Outbox(client, uri, run_id, tmp_path / "a.jsonl")
    outbox.metrics({"a+b": 1.0, "a": 2.0}, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert outbox.close("FINISHED")
    assert any("a+b" in str(warning.message) for warning in caught)
    assert client.get_run(run_id).data.metrics == {"a": 2.0} and client.get_run(run_id).info.status == "FINISHED"


def written(uri, folder, barrier, codes):
    barrier.wait(60)
    client, experiment = open_store(uri, "dpexp", str(folder))
    run_id = client.create_run(experiment).info.run_id
    outbox = Outbox(client, uri, run_id, folder / f"{run_id}.jsonl")
    for step in range(500):
        outbox.metrics({"a": float(step)}, step)
    codes.put(outbox.close("FINISHED", patience=60))


def test_processes_write_at_once_into_a_store_that_none_has_used_before(tmp_path, empty_store):
    uri, count = f"sqlite:///{tmp_path}/new/mlflow.db", 3
    barrier, codes = FORK.Barrier(count), FORK.Queue()
    writers = [FORK.Process(target=written, args=(uri, tmp_path, barrier, codes)) for _ in range(count)]
    for writer in writers:
        writer.start()
    assert [codes.get(timeout=120) for _ in writers] == [True] * count
    for writer in writers:
        writer.join(60)
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs(["1"])
    assert len(runs) == count and {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "a")
        assert [point.value for point in points] == list(range(500))
