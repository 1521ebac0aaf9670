"""Opening a store, in which many processes may write at once, and taking turns."""

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from test_mirror import Job
from test_run_costs import FORK

from dpexp.config import Tracking
from dpexp.tracking import client as module
from dpexp.tracking.client import locked, open_store


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


def written(uri, folder, barrier, missed):
    barrier.wait(60)
    client, experiment = open_store(Tracking(uri, str(folder)))
    job = Job(folder, client, experiment)
    job.mirror.follow()
    for step in range(200):
        job.record.metrics({"a": float(step)}, step)
    job.mirror.close({"status": "FINISHED"}, patience=60)
    missed.put(job.mirror.missed)


def test_processes_write_at_once_into_a_store_that_none_has_used_before(tmp_path, empty_store):
    uri, count = f"sqlite:///{tmp_path}/new/mlflow.db", 3
    barrier, missed = FORK.Barrier(count), FORK.Queue()
    for k in range(count):
        FORK.Process(target=written, args=(uri, tmp_path / str(k), barrier, missed)).start()
    assert [missed.get(timeout=120) for _ in range(count)] == [None] * count
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs(["1"])
    assert [run.info.status for run in runs] == ["FINISHED"] * count
    for run in runs:
        assert [point.value for point in client.get_metric_history(run.info.run_id, "a")] == [*range(200)]


def test_an_experiment_that_another_job_makes_meanwhile_is_found(tmp_path, empty_store, monkeypatch):
    asked, get = [], MlflowClient.get_experiment_by_name

    def late(client, name):
        asked.append(name)
        if len(asked) == 1:
            client.create_experiment(name)
            return None
        return get(client, name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", late)
    client, experiment_id = open_store(Tracking(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path)))
    assert client.get_experiment(experiment_id).name == "dpexp" and len(asked) == 2
