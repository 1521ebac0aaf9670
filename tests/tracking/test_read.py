"""Trials read from MLflow."""

import json
import math
import shutil

import pytest
from mlflow import MlflowClient

from dpexp.errors import ConfigError
from dpexp.tracking import read


def test_sources_are_experiments_parents_and_runs(tmp_path, monkeypatch, empty_store):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("mine", str(tmp_path))
    parent, empty = (client.create_run(experiment, tags={"dpexp.sweep_hash": k}).info.run_id for k in "ab")
    tags = {"dpexp.group": "flat", "mlflow.parentRunId": parent}
    children = [client.create_run(experiment, tags=tags).info.run_id for _ in range(3)]
    single = client.create_run(experiment, tags={"dpexp.group": "flat"}).info.run_id
    given = {"privacy.delta": "1e-06", "calibrate": "steps", "accountant.names": '["rdp"]', "tracking.uri": "x"}
    lines = [[], [{"with rounds": 70, "tried steps": 70}, {"test_accuracy": 0.5}], [{"test_accuracy": 0.75}]]
    for k, run_id in enumerate(children):
        folder = tmp_path / f"trial {k}"
        folder.mkdir()
        record = {"configuration": given | {"seed": str(k), "optimizer.lr": str(k // 2)}}
        (folder / "run.json").write_text(json.dumps(record))
        rows = [json.dumps({"step": step, "metrics": values}) + "\n" for step, values in enumerate(lines[k])]
        (folder / "metrics.jsonl").write_text("".join(rows))
        client.set_tag(run_id, "dpexp.seed", str(k))
        client.set_tag(run_id, "dpexp.output", str(folder))
        if k == 2:  # which ran on another machine
            client.log_artifacts(run_id, str(folder))
            shutil.rmtree(folder)
    monkeypatch.setattr(read, "PAGE", 2)
    frame = read.trials(uri, [parent])
    assert list(frame["run_id"]) == [children[2], children[1], children[0]]
    assert set(frame["parent_id"]) == {parent} and set(frame["accountant"]) == {"rdp"} and set(frame["delta"]) == {1e-6}
    assert frame["knob_value"].tolist()[1] == 70 and math.isnan(frame["test_accuracy"][2])
    assert frame["steps"].tolist() == [{0: {"test_accuracy": 0.75}}, {0: lines[1][0], 1: lines[1][1]}, {}]
    configuration = frame.set_index("seed")["configuration"]
    assert configuration["0"] == configuration["1"] != configuration["2"]
    assert set(read.trials(uri, ["mine"])["run_id"]) == {*children, single}
    assert set(read.trials(uri, [single, children[0]])["run_id"]) == {single, children[0]}
    assert read.trials(uri, [empty]).empty and list(read.trials(uri, [empty]).columns) == list(read.TRIAL)
    for missing, where, message in (
        ("dpexp", uri, "dpexp is neither an experiment nor a run of sqlite"),
        ("mine", f"sqlite:///{tmp_path}/no.db", "does not exist, so there are no runs"),
        ("mine", "x:y", "uri=x:y cannot be"),
    ):
        with pytest.raises(ConfigError, match=f"^[^\n]*{message}[^\n]*$"):
            read.trials(where, [missing])


def test_a_run_of_an_earlier_version_has_no_record(tmp_path, empty_store):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("mine", str(tmp_path))).info.run_id
    client.log_param(run_id, "optimizer.lr", "0.1")
    client.log_metric(run_id, "test_accuracy", 0.5)
    (row,) = read.trials(uri, ["mine"]).to_dict("records")
    assert json.loads(row["configuration"]) == {"optimizer.lr": "0.1"} and row["test_accuracy"] == 0.5


def test_a_folder_that_another_run_has_taken_is_not_a_runs_own(tmp_path, empty_store):
    """A trial's folder was deleted, and the sweep started again: its earlier run's ledger is that of the store."""
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    folder, lost = tmp_path / "0", tmp_path / "lost"
    for place in (folder, lost):
        place.mkdir()
    (lost / "ledger.jsonl").write_text("of the first")
    experiment = client.create_experiment("mine", str(tmp_path / "artifacts"))
    first, second = (client.create_run(experiment, tags={"dpexp.output": str(folder)}) for _ in range(2))
    client.log_artifact(first.info.run_id, str(lost / "ledger.jsonl"))
    (folder / "ledger.jsonl").write_text("of the second")
    (folder / "mlflow_run_id").write_text(second.info.run_id)
    assert read.own_folder(second) == folder and read.own_folder(first) is None
    for run, said in ((first, "of the first"), (second, "of the second")):
        with read.folder_of(client, run, "ledger.jsonl") as found:
            assert (found / "ledger.jsonl").read_text() == said


def test_a_store_that_cannot_be_read_is_named_without_its_password():
    with pytest.raises(ConfigError, match="no run of") as refused:
        read.output_of("unknown://me:hunter2@host/x", "a")
    assert "hunter2" not in str(refused.value) and "unknown://me:…@host/x" in str(refused.value)
