"""A run has what its job's folder has: while the job trains, which no server delays, and later."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dpexp.config import Tracking
from dpexp.tracking import mirror as module
from dpexp.tracking import record
from dpexp.tracking.client import open_store
from dpexp.tracking.job_folder import read_json
from dpexp.tracking.mirror import Mirror, create_job_run, shown
from dpexp.tracking.record import Record


class Away:
    """A client whose server raises `error`, if there is one, and answers each request only when it may."""

    def __init__(self, client):
        self.client, self.error, self.requests = client, None, []
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.requests.append(name)
            self.answers.wait(30)
            if self.error:
                raise ConnectionError(self.error)
            return getattr(self.client, name)(*args, **kwargs)

        return call


OTHERS = {"starts": [], "spends": None}


class Job:
    """A job's record in a folder, and its mirror in a store."""

    def __init__(self, folder, client, experiment, start=1_000_000):
        folder.mkdir(parents=True, exist_ok=True)
        data = {"name": "digits", "digest": "n=1", "source_type": "code", "source": "{}"}
        facts = {"name": "job", "start": start, "tags": {"t": "x"}, "params": {}, "data": data, "files": []} | OTHERS
        self.folder, self.client, self.run_id = folder, client, create_job_run(client, experiment, facts, folder)
        self.mirror, self.record = Mirror(client, self.run_id, folder, facts), Record(folder, facts)

    def mirror_later(self):
        return Mirror(self.client, self.run_id, self.folder, read_json(self.folder / "run.json"))

    @property
    def run(self):
        return self.client.client.get_run(self.run_id)

    def history(self, name, of="value"):
        """The values of a metric, or its times."""
        return [getattr(point, of) for point in self.client.client.get_metric_history(self.run_id, name)]


@pytest.fixture
def job(tmp_path, empty_store, monkeypatch):
    """A job whose server can go away."""
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    client, experiment = open_store(Tracking(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "artifacts")))
    made = Job(tmp_path / "job", Away(client), experiment)
    made.client.requests.clear()
    return made


INTERVAL = module.INTERVAL
FINISHED = {"status": "FINISHED", "time": 2_000_000}


def test_metrics_wait_for_a_slow_server_in_few_requests(job):
    job.client.answers.clear()
    for step in range(2501):
        job.record.metrics({"a": float(step), "b+c": 0.0}, step)
        if step == 0:
            job.mirror.follow()
    job.client.answers.set()
    assert job.mirror.close(FINISHED, patience=20)
    assert job.mirror.missed is None and job.client.requests.count("log_batch") <= 1 + 6
    assert job.history("a") == [*range(2501)]
    assert job.run.info.status == "FINISHED" and {*job.run.data.metrics} == {"a", "bc"}, "a name that MLflow takes"


def test_metrics_of_a_job_that_trains_are_there_within_five_seconds(job):
    job.mirror.follow()
    job.record.metrics({"a": 1.0}, 1)
    began = time.monotonic()
    while not job.history("a"):
        assert time.monotonic() - began < 5
    job.mirror.close(FINISHED, patience=20)
    assert INTERVAL < 5


def test_no_metric_tells_how_long_a_round_took(job, monkeypatch):
    times = iter([2000.0, 5000.0, 9000.0])
    monkeypatch.setattr(record, "time", SimpleNamespace(time=lambda: next(times)))
    for step in range(3):
        job.record.metrics({"a": 1.0, "b": 2.0}, step)
        job.mirror.push({})
    assert job.history("a", "timestamp") == [1_000_000, 1_000_001, 1_000_002]


UP = (
    "epsilon, epsilon_planned, with mu, with preprocessing pca mu, with advantage, with tpr_at_fpr_0.01, "
    "with audit mu_claimed, tried advantage, tried epsilon, with audit epsilon_of_attacked_rounds delta_1e-05"
)
DOWN = (
    "with audit epsilon_lower_bound delta_1e-05, with audit mu_at_least, with noise_multiplier, tried noise_multiplier"
)


@pytest.mark.parametrize("names, direction", [(UP, 1), (DOWN, -1), ("test_loss", 0)])
def test_what_is_shown_of_a_bound_is_one(names, direction):
    for name in names.split(", "):
        for value in np.geomspace(0.02, 200, 40).tolist():
            rounded = shown(name, value)
            assert rounded == pytest.approx(value, rel=1e-4)
            assert direction * rounded >= direction * value
        assert shown(name, math.inf) == math.inf and shown(name, 12345678.0) == 12345678.0


def test_what_a_server_missed_arrives_once_it_is_there_again(job):
    (job.folder / "notes.txt").write_text("kept")
    job.client.error = "no route to host"
    job.record.metrics({"a": 1.0}, 1)
    job.record.add("notes.txt", "never.txt", tags={"t": "y"})
    job.mirror.push({})
    assert job.mirror.missed == "no route to host" and not job.run.data.metrics
    job.client.error = None
    job.mirror.follow()
    assert job.mirror.close({"status": "KILLED", "reason": "it was late"}, patience=20) and job.mirror.missed is None
    found = job.run
    assert (found.info.status, found.data.metrics, found.data.tags["t"]) == ("KILLED", {"a": 1.0}, "y")
    assert found.data.tags["dpexp.error"] == "it was late"
    assert [item.path for item in job.client.client.list_artifacts(job.run_id)] == ["metrics.jsonl", "notes.txt"]


def test_what_a_server_refuses_does_not_keep_the_rest_from_it(job, monkeypatch):
    def full(*given):
        raise OSError("no space left")

    monkeypatch.setattr(job.client.client, "log_artifact", full)
    job.record.metrics({"a": 1.0}, 1)
    job.mirror.push(FINISHED)
    assert (job.mirror.missed, job.run.info.status, job.history("a")) == ("no space left", "FINISHED", [1.0])


def test_nothing_is_sent_twice(job):
    """By another process, too."""
    notes, requests = job.folder / "notes.txt", job.client.requests
    notes.write_text("kept")
    job.record.add("notes.txt", tags={"u": "z"}, params={"p": "1"})
    job.record.metrics({"a": 1.0}, 1)
    job.mirror.push(FINISHED)
    assert sorted(requests) == ["log_artifact"] * 2 + ["log_batch"] * 3 + ["set_terminated"]
    requests.clear()
    job.mirror.push(FINISHED)
    job.mirror_later().push(FINISHED)
    assert requests == ["get_run"]
    notes.write_text("changed")
    job.record.metrics({"a": 2.0}, 2)
    job.mirror.push(FINISHED)
    assert requests == ["get_run", "log_batch", "log_artifact", "log_artifact"]
    (job.folder / "mirror.json").unlink()
    job.mirror_later().push(FINISHED)
    assert job.history("a") == [1.0, 2.0], "what is sent twice is there once"


def test_a_line_that_was_cut_is_none(job):
    job.record.metrics({"a": 1.0}, 1)
    with (job.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metr')
    job.mirror.push({})
    assert job.mirror.missed is None and job.history("a") == [1.0]
    Record(job.folder, {"files": [], "tags": {}, "params": {}, "start": 1_000_000}).metrics({"a": 3.0}, 3)
    job.mirror.push({})
    assert job.mirror.missed is None and job.history("a", "step") == [1, 3]


def test_a_server_that_never_answers_does_not_hold_up_the_end(job):
    job.client.answers.clear()
    for step in range(100):
        job.record.metrics({"a": 1.0}, step)
    job.mirror.follow()
    assert not job.mirror.close(FINISHED, patience=0.1)
    assert job.mirror.missed == "it did not answer within 0.1 s"
    job.client.answers.set()
    job.mirror._thread.join()
    assert job.client.requests == ["log_batch"], "all others were given up"
