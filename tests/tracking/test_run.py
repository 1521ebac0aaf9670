"""What a run leaves in MLflow, however it ends."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import result_of, signal_after, store_of
from mlflow import MlflowClient
from test_run_costs import FORK

import dpexp
from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SumQueryEvent,
    ledger_so_far,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.risk import FIGURES
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling import sampling_event
from dpexp.config import Tracking
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.round import RoundEngine
from dpexp.reporting import terminal
from dpexp.tracking.client import end_dead_runs, open_store
from dpexp.tracking.provenance import HOST
from dpexp.tracking.record import published_error

QUICK = (
    "sampling.steps=4", "sampling.expected_batch_size=512", "privacy.noise_multiplier=1.0",
    "trainer.num_evaluations=2", "model=logistic",
)  # fmt: skip


def only_run(folder):
    experiments = [experiment.experiment_id for experiment in store_of(folder).search_experiments()]
    (run,) = store_of(folder).search_runs(experiments)
    return run


def artifacts(folder, run):
    return {item.path for item in store_of(folder).list_artifacts(run.info.run_id)}


def test_a_finished_run(dpexp_job, tmp_path):
    output = dpexp_job("group=conv_fc", "model=cnn", *QUICK[:-1], "mechanism=joint", "accountant=all")
    run = only_run(tmp_path)
    assert run.info.status == "FINISHED"
    params, metrics, tags = run.data.params, run.data.metrics, run.data.tags
    assert params["privacy.noise_multiplier"] == "1.0" and params["group._target_"] == "dpexp.conv_fc"
    constant = {f"with {name}" for name in ("rounds", "noise_multiplier", "sampling_rate", "learning_rate", *FIGURES)}
    public = {"test_accuracy", "test_loss", "test_auc", "test_macro_f1", "test_calibration_error",
              "test_majority_accuracy", "test_balanced_accuracy",
              *(f"test_recall_{k}" for k in range(10)), *constant}  # fmt: skip
    assert {name for name in metrics if not name.startswith("epsilon")} == public, "nothing private"
    assert "None" not in params.values() and "privacy.epsilon" not in params
    assert next(name for name in sorted(metrics) if not name.startswith("epsilon")) == "test_accuracy"
    assert not any("/" in name for name in metrics), "MLflow draws such first"
    assert {"plan.S.conv", "plan.sigma.conv", "plan.share.fc"} <= set(params)
    planned = read_ledger(output / "planned_ledger.jsonl")
    assert len(planned) == 4 and planned == read_ledger(output / "ledger.jsonl")
    result = result_of(output)
    assert result["mlflow_run_id"] == run.info.run_id
    assert metrics["epsilon"] == float(up(dpexp.epsilon(read_ledger(output / "ledger.jsonl"), 1e-4), 5))
    assert metrics["epsilon_rdp"] == float(up(result["epsilon"]["rdp"], 5))
    assert metrics["test_accuracy"] == pytest.approx(result["metrics"]["test_accuracy"], abs=5e-6)
    assert "compiled" not in f"{tags} {params} {result}"  # which times of a record's step decided
    assert tags["dpexp.private"] == "yes" and tags["dpexp.group"] == "conv_fc" and tags["dpexp.mechanism"] == "joint"
    wanted = {"ledger.jsonl", "config.yaml", "overrides.yaml", "plan.json", "epsilon.png", "result.json"}
    assert wanted <= artifacts(tmp_path, run)
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.name == "digits" and json.loads(data.dataset.profile) == {"n": 1437}
    history = store_of(tmp_path).get_metric_history(run.info.run_id, "epsilon")
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert sorted(point.value for point in history) == [point.value for point in history]
    accuracies = store_of(tmp_path).get_metric_history(run.info.run_id, "test_accuracy")
    steps = [point.step for point in accuracies]
    assert steps == [3, 4, 4], "after one epoch, which is three rounds; after the last round; in the end"
    assert set(steps) <= {point.step for point in history}, "so that a chart can have ε as its x axis"


@pytest.mark.parametrize("asked", ["privacy.enabled=false", "diagnostics=unsafe"])
def test_a_run_that_is_not_private_says_so(asked, dpexp_job, tmp_path):
    output = dpexp_job(*QUICK, "accountant=moments", asked)
    run, private = only_run(tmp_path), asked == "diagnostics=unsafe"
    assert run.data.tags["dpexp.private"].startswith("no") and result_of(output)["private"] is False
    shown = {"epsilon", "unsafe/train_loss", "unsafe/sample_size", "unsafe/clip_fraction/all"}
    assert shown & {*run.data.metrics} == (shown if private else set()) and "test_accuracy" in run.data.metrics


def test_a_crash_is_failed_and_keeps_its_ledger_and_its_text_stays_on_this_machine(dpexp_job, tmp_path, monkeypatch):
    """It may quote a record."""
    release, rounds = RoundEngine.release, []

    def breaking(self, ledger):
        rounds.append(release(self, ledger))
        if len(rounds) == 3:
            raise ValueError("Target Smith, John is out of bounds")
        return rounds[-1]

    monkeypatch.setattr(RoundEngine, "release", breaking)
    with pytest.raises(ValueError, match="Target"):
        dpexp_job(*QUICK)
    run, (ledger,) = only_run(tmp_path), tmp_path.glob("outputs/*/*/ledger.jsonl")
    assert run.info.status == "FAILED" and len(read_ledger(ledger)) == 3
    sent = artifacts(tmp_path, run)
    assert {"ledger.jsonl", "epsilon.png"} <= sent and "error.txt" not in sent
    assert run.data.tags["dpexp.error"].startswith("ValueError in test_run.py, line ")
    assert "Target" not in str(run.to_dictionary()) and "Target" in (ledger.parent / "error.txt").read_text()


@pytest.mark.parametrize("tracking, rounds", [("mlflow", 3), ("none", 4)])
def test_a_run_that_loses_its_ledger_stops_and_says_how_many_rounds_count(
    dpexp_job, tmp_path, monkeypatch, tracking, rounds
):
    """Before the next release, or after the last of four."""
    commit = LedgerWriter.commit

    def losing(self):
        commit(self)
        if len(self.ledger) == rounds:
            self.path.write_bytes(b"") if tracking == "mlflow" else self.path.unlink()

    monkeypatch.setattr(LedgerWriter, "commit", losing)
    with pytest.raises(SystemExit, match=f"while its run was writing it, so training stops; its {rounds} rounds count"):
        dpexp_job(*QUICK, f"tracking={tracking}")
    if tracking == "mlflow":
        run = only_run(tmp_path)
        assert run.info.status == "FAILED" and "its 3 rounds count" in run.data.tags["dpexp.error"]


def test_an_interrupted_run_whose_ledger_could_not_be_closed_says_so(tmp_path, capsys, recwarn):
    sampling, query = sampling_event("poisson", 0.1, 100), SumQueryEvent("all", 1.0, 4.0)
    early = Ledger("add_remove", {Round(sampling, (query,)): 3}, incomplete=True)
    write_ledger(tmp_path / "ledger.jsonl", early)
    terminal.print_interrupted(SimpleNamespace(rounds=9), tmp_path, 1e-5, "pld")
    printed = " ".join(capsys.readouterr().out.split())
    assert "after 3 of 9 rounds" in printed and "It has no closing line, so it reads as one that ends" in printed
    assert not recwarn


def silent_after(rounds):
    """Lets MLflow's requests wait for a minute once a job has done some rounds."""
    commit, request = LedgerWriter.commit, MlflowClient.log_batch

    def noting(self):
        commit(self)
        if len(self.ledger) == rounds:
            Path("silent").touch()

    def waiting(self, *given, **named):
        if Path("silent").exists():
            time.sleep(60)
        return request(self, *given, **named)

    LedgerWriter.commit, MlflowClient.log_batch = noting, waiting


ENDLESS = ("model=logistic", "sampling.steps=2000", "privacy.noise_multiplier=20", "trainer.num_evaluations=0",
           "trainer.compile=false")  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_interrupted_is_killed_and_keeps_a_valid_ledger(forked, tmp_path, number):
    job = forked(*ENDLESS, first=(signal_after, 20, number))
    printed = job.ended()
    assert job.exitcode == 128 + number, printed[-2000:]
    (ledger,) = tmp_path.glob("outputs/*/*/ledger.jsonl")
    found, run = ledger_so_far(ledger), only_run(tmp_path)
    assert len(found) >= 19 and not found.incomplete and run.info.status == "KILLED"
    assert {"ledger.jsonl", "epsilon.png"} <= artifacts(tmp_path, run)
    assert f"Interrupted after {len(found)} of 2000 rounds: ε =" in printed and "Traceback" not in printed
    assert "python -m dpexp resume" in printed and "Warning" not in printed and "ends early" not in printed


@pytest.mark.parametrize("asleep", ["from the start", "after 20 rounds"])
def test_a_server_that_does_not_answer_does_not_keep_an_interrupted_job(forked, tmp_path, asleep):
    """It accepts connections, at first or later, and is silent: MLflow itself waits half a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        if asleep == "from the start":
            job = forked(*ENDLESS, f"tracking.uri={uri}")
            server.settimeout(120)
            server.accept()
        else:
            job = forked(*ENDLESS, first=(silent_after, 20))
            while len([*tmp_path.glob("silent")]) == 0 and job.is_alive():
                time.sleep(0.05)
        time.sleep(1)
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        printed = job.ended()
    assert job.exitcode == 128 + signal.SIGTERM, printed[-2000:]
    assert time.monotonic() - began < 15  # 3 s on an idle machine
    if asleep != "from the start":
        (ledger,) = tmp_path.glob("outputs/*/*/ledger.jsonl")
        assert not read_ledger(ledger).incomplete and "it did not answer within 2 s" in printed


def test_of_sigkill_the_next_run_in_the_store_tells(tmp_path, empty_store):
    client, experiment = open_store(Tracking(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "one"))
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    (tmp_path / "result.json").write_text('{"configuration": "…"}')
    began = [
        {"dpexp.host": host, "dpexp.pid": str(pid), "dpexp.output": str(output)}
        for host, pid, output in (
            (HOST, dead.pid, "gone"), (HOST, dead.pid, tmp_path), (HOST, os.getpid(), "gone"), ("far", dead.pid, "gone")
        )
    ]  # fmt: skip
    ids = [client.create_run(experiment, tags=tags).info.run_id for tags in began]
    end_dead_runs(client, experiment)
    found = [client.get_run(run_id) for run_id in ids]
    assert [run.info.status for run in found] == ["KILLED", "FINISHED", "RUNNING", "RUNNING"]
    assert found[0].data.tags["dpexp.error"].startswith("its process was killed") and len(found[1].data.tags) == 4


def test_mistakes_in_a_configuration_are_told_in_full(tmp_path):
    assert published_error(ConfigError("q=2 must lie in (0, 1]."), tmp_path) == "q=2 must lie in (0, 1]."
    try:
        try:
            float("Smith, John")
        except ValueError as error:
            raise ConfigError(f"data.module: it cannot be made: {error}.") from error
    except ConfigError as error:
        assert published_error(error, tmp_path).startswith("ValueError in test_run.py, line ")
    try:
        raise RecordError("Smith, John")
    except RecordError as error:
        assert published_error(error, tmp_path).startswith("RecordError in test_run.py, line ")
