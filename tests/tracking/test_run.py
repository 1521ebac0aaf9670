"""What a run leaves in MLflow, however it ends."""

import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import result_of, signal_after, store_of
from mlflow import MlflowClient
from runs import ledger
from test_run_costs import FORK, words

import dpexp
from dpexp.accounting.ledger import LedgerWriter, ledger_so_far, read_ledger, write_ledger
from dpexp.accounting.risk import FIGURES
from dpexp.accounting.rounding import up
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


def only_ledger(folder):
    (path,) = folder.glob("outputs/*/*/ledger.jsonl")
    return path


def test_a_finished_run(trained):
    run, output = only_run(trained), only_ledger(trained).parent
    params, metrics, tags, result = run.data.params, run.data.metrics, run.data.tags, result_of(output)
    constant = {f"with {name}" for name in ("rounds", "noise_multiplier", "sampling_rate", "learning_rate", *FIGURES)}
    public = {"test_accuracy", "test_loss", "test_auc", "test_macro_f1", "test_calibration_error",
              "test_majority_accuracy", "test_balanced_accuracy",
              *(f"test_recall_{k}" for k in range(10)), *constant}  # fmt: skip
    others = sorted(name for name in metrics if not name.startswith("epsilon"))
    assert {*others} == public, "nothing private"
    assert others[0] == "test_accuracy" and not any("/" in name for name in metrics), "MLflow draws such first"
    assert params["privacy.noise_multiplier"] == "1.0" and params["group._target_"] == "dpexp.per_layer"
    assert "None" not in params.values() and "privacy.epsilon" not in params
    assert {f"plan.{of}.{group}" for of in ("S", "sigma", "share") for group in result["groups"]} <= set(params)
    assert result["mlflow_run_id"] == run.info.run_id and run.info.status == "FINISHED"
    assert metrics["epsilon"] == float(up(dpexp.epsilon(read_ledger(output / "ledger.jsonl"), 1e-4), 5))
    assert metrics["epsilon_rdp"] == float(up(result["epsilon"]["rdp"], 5))
    assert metrics["test_accuracy"] == pytest.approx(result["metrics"]["test_accuracy"], abs=5e-6)
    assert "compiled" not in f"{tags} {params} {result}"  # which times of a record's step decided
    assert (tags["dpexp.private"], tags["dpexp.group"], tags["dpexp.mechanism"]) == ("yes", "per_layer", "separate")
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.name == "digits" and json.loads(data.dataset.profile) == {"n": 1437}
    epsilons = store_of(trained).get_metric_history(run.info.run_id, "epsilon")
    assert [point.step for point in epsilons] == [1, 2, 3, 4], "so that a chart can have ε as its x axis"
    assert sorted(point.value for point in epsilons) == [point.value for point in epsilons]


@pytest.mark.parametrize("asked", ["privacy.enabled=false", "diagnostics=unsafe"])
def test_a_run_that_is_not_private_says_so(asked, dpexp_job, tmp_path):
    output = dpexp_job(*QUICK, "accountant=moments", "sampling.steps=1", "trainer.num_evaluations=0", asked)
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
    run, path = only_run(tmp_path), only_ledger(tmp_path)
    sent = artifacts(tmp_path, run)
    assert run.info.status == "FAILED" and len(read_ledger(path)) == 3
    assert {"ledger.jsonl", "epsilon.png"} <= sent and "error.txt" not in sent
    assert run.data.tags["dpexp.error"].startswith("ValueError in test_run.py, line ")
    assert "Target" not in str(run.to_dictionary()) and "Target" in path.with_name("error.txt").read_text()


def test_a_run_that_loses_its_ledger_stops_and_says_how_many_rounds_count(dpexp_job, tmp_path, monkeypatch):
    commit = LedgerWriter.commit

    def losing(self):
        commit(self)
        if len(self.ledger) == 3:
            self.path.write_bytes(b"")

    monkeypatch.setattr(LedgerWriter, "commit", losing)
    with pytest.raises(SystemExit, match="while its run was writing it, so training stops; its 3 rounds count"):
        dpexp_job(*QUICK)
    run = only_run(tmp_path)
    assert run.info.status == "FAILED" and "its 3 rounds count" in run.data.tags["dpexp.error"]


def test_an_interrupted_run_whose_ledger_could_not_be_closed_says_so(tmp_path, capsys, recwarn):
    write_ledger(tmp_path / "ledger.jsonl", replace(ledger(rounds=3), incomplete=True))
    terminal.print_interrupted(SimpleNamespace(rounds=9), tmp_path, 1e-5, "pld")
    printed = words(capsys)
    assert "after 3 of 9 rounds" in printed and "It has no closing line, so it reads as one that ends" in printed
    assert not recwarn


def silent_after(rounds, number):
    """Lets a job of this process send itself a signal after so many rounds; from then on, MLflow's requests wait for a
    minute."""
    commit, request = LedgerWriter.commit, MlflowClient.log_batch

    def noting(self):
        commit(self)
        if len(self.ledger) == rounds:
            Path("silent").touch()
            os.kill(os.getpid(), number)

    def waiting(self, *given, **named):
        if Path("silent").exists():
            time.sleep(60)
        return request(self, *given, **named)

    LedgerWriter.commit, MlflowClient.log_batch = noting, waiting


ENDLESS = ("model=logistic", "sampling.steps=2000", "privacy.noise_multiplier=20", "trainer.num_evaluations=0",
           "trainer.compile=false")  # fmt: skip


@pytest.mark.parametrize("what, number", [(signal_after, signal.SIGINT), (silent_after, signal.SIGHUP)])
def test_a_run_that_is_interrupted_is_killed_and_keeps_a_valid_ledger(forked, tmp_path, what, number):
    """Its server does not keep it if it does not answer."""
    job = forked(*ENDLESS, first=(what, 20, number))
    printed, silent = job.ended(), tmp_path / "silent"
    assert job.exitcode == 128 + number, printed[-2000:]
    found, run = ledger_so_far(only_ledger(tmp_path)), only_run(tmp_path)
    assert len(found) >= 19 and not found.incomplete
    assert f"Interrupted after {len(found)} of 2000 rounds: ε =" in printed and "Traceback" not in printed
    assert "python -m dpexp resume" in printed and "Warning" not in printed and "ends early" not in printed
    if what is silent_after:
        assert "it did not answer within 2 s" in printed
        assert time.time() - silent.stat().st_mtime < 15  # 3 s on an idle machine
    else:
        assert run.info.status == "KILLED" and {"ledger.jsonl", "epsilon.png"} <= artifacts(tmp_path, run)


def test_a_server_that_never_answers_does_not_keep_an_interrupted_job(forked):
    """It accepts connections and is silent: MLflow itself waits half a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        job = forked(*ENDLESS, f"tracking.uri=http://127.0.0.1:{server.getsockname()[1]}")
        server.accept()
        time.sleep(1)
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        printed = job.ended()
    assert job.exitcode == 128 + signal.SIGTERM, printed[-2000:]
    assert time.monotonic() - began < 15


def test_of_sigkill_the_next_run_in_the_store_tells(tmp_path, empty_store):
    client, experiment = open_store(Tracking(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "one"))
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    (tmp_path / "result.json").write_text('{"configuration": "…"}')
    began = (
        (HOST, dead.pid, "gone"),
        (HOST, dead.pid, tmp_path),
        (HOST, os.getpid(), "gone"),
        ("far", dead.pid, "gone"),
    )
    tags = [dict(zip(("dpexp.host", "dpexp.pid", "dpexp.output"), map(str, facts), strict=True)) for facts in began]
    ids = [client.create_run(experiment, tags=own).info.run_id for own in tags]
    end_dead_runs(client, experiment)
    found = [client.get_run(run_id) for run_id in ids]
    assert [run.info.status for run in found] == ["KILLED", "FINISHED", "RUNNING", "RUNNING"]
    assert found[0].data.tags["dpexp.error"].startswith("its process was killed") and len(found[1].data.tags) == 4


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize("error, said", [
    (ConfigError("q=2 must lie in (0, 1]."), "q=2 must lie in (0, 1]."),
    (raised(ConfigError("data.module: Smith, John"), raised(ValueError())), "ValueError in test_run.py, line "),
    (raised(ConfigError("Smith, John")), "ConfigError in test_run.py, line "),
    (raised(RecordError("Smith, John")), "RecordError in test_run.py, line "),
])  # fmt: skip
def test_mistakes_in_a_configuration_are_told_in_full(tmp_path, error, said):
    found = published_error(error, tmp_path)
    assert found.startswith(said) and "Smith" not in found
