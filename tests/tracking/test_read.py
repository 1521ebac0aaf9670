"""Trials read from MLflow."""

import json
import math
import shutil

import pytest
from mlflow import MlflowClient

from dpexp.errors import ConfigError
from dpexp.tracking import read


@pytest.fixture
def client(tmp_path, empty_store):
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


@pytest.fixture
def began(client, tmp_path):
    """Creates a run in the experiment `mine`, with a tag for the folder of its job; returns it."""
    experiment = client.create_experiment("mine", str(tmp_path / "artifacts"))
    return lambda output=None, **tags: client.create_run(
        experiment, tags=tags | ({"dpexp.output": str(output)} if output else {})
    )


def test_sources_are_experiments_parents_and_runs(tmp_path, monkeypatch, client, began):
    uri, group = client.tracking_uri, {"dpexp.group": "flat"}
    parent, empty = (began(**{"dpexp.sweep_hash": k}).info.run_id for k in "ab")
    given = {"privacy.delta": "1e-06", "calibrate": "steps", "accountant.names": '["rdp"]', "tracking.uri": "x"}
    lines = [[], [{"with rounds": 70, "tried steps": 70}, {"test_accuracy": 0.5}], [{"test_accuracy": 0.75}]]
    children = []
    for k, metrics in enumerate(lines):
        folder = tmp_path / f"trial {k}"
        folder.mkdir()
        configuration = given | {"seed": str(k), "optimizer.lr": str(k // 2)}
        (folder / "run.json").write_text(json.dumps({"configuration": configuration}))
        rows = (json.dumps({"step": step, "metrics": values}) for step, values in enumerate(metrics))
        (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
        run = began(folder, **group | {"mlflow.parentRunId": parent, "dpexp.seed": str(k)})
        children.append(run.info.run_id)
    client.log_artifacts(children[2], str(folder))  # the last ran on another machine
    shutil.rmtree(folder)
    single = began(**group).info.run_id
    monkeypatch.setattr(read, "PAGE", 2)
    frame = read.trials(uri, [parent])
    assert list(frame["run_id"]) == children[::-1]
    assert set(frame["parent_id"]) == {parent} and set(frame["accountant"]) == {"rdp"} and set(frame["delta"]) == {1e-6}
    assert frame["knob_value"].tolist()[1] == 70 and math.isnan(frame["test_accuracy"][2])
    assert frame["steps"].tolist() == [dict(enumerate(metrics)) for metrics in reversed(lines)]
    configuration = frame.set_index("seed")["configuration"]
    assert configuration["0"] == configuration["1"] != configuration["2"]
    assert set(read.trials(uri, ["mine"])["run_id"]) == {*children, single}
    assert set(read.trials(uri, [single, children[0]])["run_id"]) == {single, children[0]}
    assert read.trials(uri, [empty]).empty and list(read.trials(uri, [empty]).columns) == list(read.TRIAL)


@pytest.mark.parametrize("missing, uri, message", [
    ("dpexp", "sqlite:///mlflow.db", "dpexp is neither an experiment nor a run of sqlite"),
    ("mine", "sqlite:///no.db", "does not exist, so there are no runs"), ("mine", "x:y", "uri=x:y cannot be"),
])  # fmt: skip
def test_sources_that_are_missing_are_refused_in_one_sentence(tmp_path, monkeypatch, began, missing, uri, message):
    began()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^[^\n]*{message}[^\n]*$"):
        read.trials(uri, [missing])


def test_a_run_of_an_earlier_version_has_no_record(client, began):
    run_id = began().info.run_id
    client.log_param(run_id, "optimizer.lr", "0.1")
    client.log_metric(run_id, "test_accuracy", 0.5)
    (row,) = read.trials(client.tracking_uri, ["mine"]).to_dict("records")
    assert json.loads(row["configuration"]) == {"optimizer.lr": "0.1"} and row["test_accuracy"] == 0.5


def test_a_folder_that_another_run_has_taken_is_not_a_runs_own(tmp_path, client, began):
    """A trial's folder was deleted, and the sweep started again: its earlier run's ledger is that of the store."""
    folder = tmp_path / "0"
    folder.mkdir()
    runs = {"of the first": began(folder), "of the second": began(folder)}
    for said, run in runs.items():
        (folder / "ledger.jsonl").write_text(said)
        (folder / "mlflow_run_id").write_text(run.info.run_id)
        client.log_artifact(run.info.run_id, str(folder / "ledger.jsonl"))
    assert [read.own_folder(run) for run in runs.values()] == [None, folder]
    for said, run in runs.items():
        with read.folder_of(client, run, "ledger.jsonl") as found:
            assert (found / "ledger.jsonl").read_text() == said


def test_a_store_that_cannot_be_read_is_named_without_its_password():
    with pytest.raises(ConfigError, match="no run of") as refused:
        read.output_of("unknown://me:hunter2@host/x", "a")
    assert "hunter2" not in str(refused.value) and "unknown://me:…@host/x" in str(refused.value)
