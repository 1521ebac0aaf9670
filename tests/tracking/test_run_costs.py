"""What each run on a data set counts as, and what all of them come to."""

import json
import math
import multiprocessing
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from made import write_run
from mlflow import MlflowClient

from dpexp.accounting.ledger import (
    Ledger,
    Round,
    SumQueryEvent,
    concatenate,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.sampling import sampling_event
from dpexp.commands.account import account
from dpexp.config import Tracking
from dpexp.errors import ConfigError
from dpexp.tracking import data_budget
from dpexp.tracking.client import open_store
from dpexp.tracking.data_budget import (
    BUDGET,
    COUNTS_AS,
    DATA_ID,
    RunCost,
    budget_used,
    cost_at,
    costs_in,
    distinct_runs,
)
from dpexp.tracking.job_folder import LEDGER, PLANNED_LEDGER, RUN

FORK = multiprocessing.get_context("fork")
Q, EVENT = 0.25, sampling_event("poisson", 0.25, 1000)
KEPT = budget({"epsilon": 4, "delta": 1e-5})


def rounds(z, count, adjacency="add_remove"):
    return Ledger(adjacency, {Round(EVENT, (SumQueryEvent("all", 1.0, z),)): count} if count else {})


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    client, experiment = open_store(Tracking(uri, str(folder / "artifacts"), "one"))
    return uri, client, experiment, folder


class Runs:
    """Begins runs on a data set of the test's own, and ends them, as jobs do."""

    def __init__(self, store, data_id):
        self.uri, self.client, self.experiment, self.folder = store
        self.data_id, self._count = data_id, 0

    def begin(self, plan, output=None, earlier=None, **tags):
        """Starts a job with a plan; returns its folder."""
        facts = {"spends": {"data_id": self.data_id, "budget": None, "trains": True}}
        self._count += 1
        output = output or self.folder / f"{self.data_id} {self._count}"
        output.mkdir(exist_ok=True)
        write_ledger(output / PLANNED_LEDGER, plan)
        own = {"dpexp.private": "yes", "mlflow.user": "ann"} | tags
        name = f"run {self._count}"
        run_id = data_budget.start(
            self.uri, self.client, facts, plan, output, earlier,
            lambda: (earlier or self.client.create_run(self.experiment, tags=own, run_name=name)).info.run_id,
        )  # fmt: skip
        (output / RUN).write_text(run_id)
        return output

    def end(self, output, status="FINISHED"):
        """Ends it; the store gets what the folder has."""
        for path in (output / LEDGER, output / "ledger.end.json"):
            if path.exists():
                self.client.log_artifact(self.id(output), str(path))
        self.client.set_terminated(self.id(output), status)
        data_budget.end(self.client, self.uri, self.id(output), output)

    def __call__(self, z=5.0, count=3, planned=10, status="FINISHED", adjacency="add_remove", **tags):
        """A whole run, of some of its rounds."""
        output = self.begin(rounds(z, planned, adjacency), **tags)
        write_run(output / LEDGER, rounds(z, count, adjacency))
        self.end(output, status)
        return output

    def ran(self, ledger, **tags):
        """A whole run that did what it had planned."""
        output = self.begin(ledger, **tags)
        write_run(output / LEDGER, ledger)
        self.end(output)
        return output

    def id(self, output):
        return (output / RUN).read_text()

    def tag(self, output):
        return self.client.get_run(self.id(output)).data.tags[COUNTS_AS]

    def artifact(self, output, name):
        return self.folder / "artifacts" / self.id(output) / "artifacts" / name

    def charges(self):
        return costs_in(self.uri, self.data_id)

    def account(self, *more):
        return account([f"data.id={self.data_id}", f"uri={self.uri}", *more])


@pytest.fixture
def run_on(store, request):
    return Runs(store, re.sub(r"\W", "_", request.node.name))


# What a run counts as


def test_runs_that_closed_their_ledgers_count_as_them_however_they_ended_and_wherever_they_are(run_on):
    outputs = [run_on(count=k, status=status) for k, status in enumerate(("FINISHED", "FAILED", "KILLED"), 1)]
    run_on.client.delete_run(run_on.id(outputs[1]))
    shutil.rmtree(outputs[2])
    outputs[0].rename(outputs[0].with_name(f"{outputs[0].name} moved"))
    charges = run_on.charges()
    assert [len(charge.ledger) for charge in charges] == [1, 2, 3] and not any(charge.note for charge in charges)
    assert all("  ann  " in charge.shown for charge in charges)


@pytest.mark.parametrize("status", ["RUNNING", "KILLED", "FINISHED"])
@pytest.mark.parametrize("folder", ["kept", "deleted"])
def test_a_run_that_did_not_end_counts_as_its_plan_whatever_the_store_and_its_folder_say(
    run_on, status, folder, capsys
):
    """It is running, or was killed by SIGKILL, or another container with the same host name saw no such process."""
    output = run_on.begin(rounds(5.0, 10))
    write_run(output / LEDGER, rounds(5.0, 3), close=False)
    if status != "RUNNING":
        run_on.client.set_terminated(run_on.id(output), status)
    if folder == "deleted":
        shutil.rmtree(output)
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 10 and "it counts as its plan" in charge.note
    found = run_on.account("delta=1e-5", "budget={epsilon: 4, delta: 1e-5}")
    assert found["unknown"] == 0 and found["spent"] == pytest.approx(rho(rounds(5.0, 10), KEPT.order), rel=1e-12)
    assert "ε = at most" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["nothing", "the ledger", "its end", "some rounds", "a closing line", "the end file"])
def test_a_run_counts_as_its_ledger_only_once_the_store_has_it_closed(run_on, lost):
    """A server that is gone, or full, does not take all files."""
    output = run_on.begin(rounds(5.0, 10))
    write_run(output / LEDGER, rounds(5.0, 3))
    whole = {path: path.read_bytes() for path in (output / LEDGER, output / "ledger.end.json")}
    if lost == "a closing line":
        (output / LEDGER).write_bytes(b"".join(whole[output / LEDGER].splitlines(keepends=True)[:-1]))
    elif lost == "the end file":
        (output / "ledger.end.json").unlink()
    elif lost == "some rounds":
        (output / LEDGER).unlink()
        write_run(output / LEDGER, rounds(5.0, 2))
    for path in whole:
        missed = {"the ledger": LEDGER, "its end": "ledger.end.json"}.get(lost)
        if path.exists() and path.name != missed:
            run_on.client.log_artifact(run_on.id(output), str(path))
    if lost == "some rounds":
        for path, content in whole.items():
            path.write_bytes(content)
    data_budget.end(run_on.client, run_on.uri, run_on.id(output), output)
    assert run_on.tag(output) == (LEDGER if lost == "nothing" else PLANNED_LEDGER)
    assert len(run_on.charges()[0].ledger) == (3 if lost == "nothing" else 10)


def test_a_resumed_run_is_one_run_and_counts_as_its_new_plan_until_it_ends(run_on, monkeypatch):
    """On any machine."""
    output = run_on(count=3, planned=10, status="KILLED")
    there = output.with_name(f"{output.name} on another machine")
    shutil.copytree(output, there)
    shutil.rmtree(output)
    for module in ("client", "provenance"):
        monkeypatch.setattr(f"dpexp.tracking.{module}.HOST", "another machine")
    run_on.begin(rounds(5.0, 12), there, run_on.client.get_run(run_on.id(there)))
    assert [len(charge.ledger) for charge in run_on.charges()] == [12] and run_on.tag(there) == PLANNED_LEDGER
    write_run(there / LEDGER, rounds(5.0, 8), resume=True)
    assert [len(charge.ledger) for charge in run_on.charges()] == [12], "of a round that no store knows"
    run_on.end(there)
    assert [len(charge.ledger) for charge in run_on.charges()] == [11] and run_on.tag(there) == LEDGER


def test_a_copied_store_on_another_machine_says_the_same(run_on, tmp_path, monkeypatch):
    outputs = [run_on(count=3), run_on.begin(rounds(5.0, 10))]
    for output in outputs:
        shutil.rmtree(output)
    with (
        closing(sqlite3.connect(run_on.folder / "mlflow.db")) as here,
        closing(sqlite3.connect(tmp_path / "s.db")) as to,
    ):
        here.backup(to)
    for module in ("client", "provenance"):
        monkeypatch.setattr(f"dpexp.tracking.{module}.HOST", "another machine")
    there = costs_in(f"sqlite:///{tmp_path}/s.db", run_on.data_id)
    assert [len(charge.ledger) for charge in there] == [3, 10] and there == run_on.charges()


@pytest.mark.parametrize("name", [LEDGER, PLANNED_LEDGER])
@pytest.mark.parametrize("how", ["missing", "edited", "empty", "cut", "killed and cut", "cut at a closing line"])
def test_a_lost_artifact_counts_as_unknown_and_never_as_nothing(run_on, name, how, capsys):
    output = run_on.begin(rounds(4.0, 10))
    if name == LEDGER:
        for resume in (False, True):
            write_run(output / LEDGER, rounds(4.0, 3), resume=resume)
        run_on.end(output)
    path = run_on.artifact(output, name)
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "missing":
        path.unlink()
    elif how == "cut at a closing line":
        path.write_bytes(b"".join(lines[: 6 if name == LEDGER else -1]))
    elif how == "edited":
        path.write_bytes(path.read_bytes().replace(b"4.0", b"9.0"))
    else:
        path.write_bytes(b"".join(lines[:4]) if "cut" in how else b"")
    if how == "killed and cut":
        end_of(path).unlink(missing_ok=True)
    (charge,) = run_on.charges()
    assert charge.ledger is None and name in charge.note and "/tmp" not in charge.note
    run_on(z=4.0, count=2)
    found = run_on.account("budget={epsilon: 4, delta: 1e-5}")
    printed = " ".join(capsys.readouterr().out.split())
    assert found["unknown"] == 1 and found["spent"] == pytest.approx(rho(rounds(4.0, 2), KEPT.order), rel=1e-12)
    assert "What run 1 spent is unknown" in printed and "an unknown amount more" in printed
    assert "cannot be kept any more" in printed
    with pytest.raises(ConfigError, match=rf"the run run 1 spent is unknown .*artifact of the run {charge.identity}"):
        budget_used(run_on.charges(), KEPT, run_on.data_id)


def test_a_ledger_that_may_have_lost_its_end_is_unknown(run_on):
    output = run_on(count=3)
    end_of(run_on.artifact(output, LEDGER)).unlink()
    (charge,) = run_on.charges()
    assert charge.ledger is None and "there is no ledger.end.json" in charge.note


@pytest.mark.parametrize("said", [None, "../ledger.jsonl", "config.yaml"])
def test_a_run_that_names_no_artifact_is_unknown(run_on, said):
    """As one of an earlier version."""
    output = run_on(count=3)
    if said is None:
        run_on.client.delete_tag(run_on.id(output), COUNTS_AS)
    else:
        run_on.client.set_tag(run_on.id(output), COUNTS_AS, said)
    (charge,) = run_on.charges()
    assert charge.ledger is None and "its tag dpexp.counts_as names no ledger" in charge.note


def test_an_artifact_that_was_put_back_counts(run_on):
    output = run_on(count=3)
    run_on.artifact(output, LEDGER).unlink()
    assert run_on.charges()[0].ledger is None
    run_on.client.log_artifact(run_on.id(output), str(output / LEDGER))
    assert len(run_on.charges()[0].ledger) == 3


def test_a_run_that_was_never_named_is_none_of_the_data_set(run_on, monkeypatch):
    """Its plan is there before its name: a run that has released something is never without."""
    sent = []
    monkeypatch.setattr(MlflowClient, "log_artifact", lambda *given, **named: sent.append("plan"))
    monkeypatch.setattr(MlflowClient, "set_tag", lambda self, run_id, key, value: sent.append(key))
    run_on.begin(rounds(5.0, 3))
    assert sent == ["plan", COUNTS_AS, DATA_ID]


def test_runs_of_many_experiments_are_found(run_on, monkeypatch):
    """Stores tell of so many experiments at a time."""
    run_on(count=3)
    for number in range(3):
        MlflowClient(run_on.uri).create_experiment(f"later {number}")
    search = MlflowClient.search_experiments
    monkeypatch.setattr(MlflowClient, "search_experiments", lambda *args, **kw: search(*args, **kw, max_results=1))
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 3


def test_a_run_without_privacy_leaves_no_budget(run_on, capsys):
    run_on(count=3)
    run_on(count=2, **{"dpexp.private": "no: trained without privacy"})
    run_on(count=2, **{"dpexp.private": "no: the noise seed is known"})
    assert run_on.account("delta=1e-5")["unknown"] == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("so that nothing bounds what it showed.") == 2 and "unknown amount" in printed
    with pytest.raises(ConfigError, match=r"it is not private \(trained without privacy\)"):
        budget_used(run_on.charges(), KEPT, run_on.data_id)


# Folders and files


def test_a_folder_counts_as_its_closed_ledger_else_as_its_plan_else_as_unknown(run_on, tmp_path):
    output = run_on.begin(rounds(5.0, 10))
    (output / "config.yaml").write_text("privacy: {delta: 1.0e-6, budget: {epsilon: 4, delta: 1.0e-5}}")
    charge = cost_at(output)
    assert len(charge.ledger) == 10 and "as its plan" in charge.note
    assert (charge.delta, charge.budget, charge.identity) == (1e-6, KEPT, run_on.id(output))
    write_run(output / LEDGER, rounds(5.0, 3), close=False)
    assert len(cost_at(output).ledger) == 10 == len(cost_at(output / LEDGER).ledger)
    write_run(output / LEDGER, rounds(5.0, 3), resume=True)
    assert len(cost_at(output).ledger) == 6 == len(cost_at(output / LEDGER).ledger)
    assert distinct_runs([cost_at(output), cost_at(output / LEDGER)]) == [cost_at(output)]
    lines = (output / LEDGER).read_bytes().splitlines(keepends=True)
    (output / LEDGER).write_bytes(b"".join(lines[:5]))
    assert len(cost_at(output).ledger) == 10
    (output / PLANNED_LEDGER).unlink()
    assert cost_at(output).ledger is None and cost_at(tmp_path / "nowhere.jsonl").ledger is None
    (output / "config.yaml").write_text("privacy: {enabled: false}")
    assert "not private" in cost_at(output).note


def test_a_run_that_was_found_twice_counts_once_as_the_most_that_is_said(run_on):
    output = run_on.begin(rounds(5.0, 10))
    write_run(output / LEDGER, rounds(5.0, 3))
    (in_store,), in_folder = run_on.charges(), cost_at(output)
    assert len(in_store.ledger) == 10 and len(in_folder.ledger) == 3
    for order in ((in_store, in_folder), (in_folder, in_store)):
        (cost,) = distinct_runs(order)
        assert len(cost.ledger) == 10
    twice = [RunCost("a", "a", ledger=rounds(z, 2)) for z in (5.0, 6.0, 5.0)]
    assert distinct_runs(twice)[0].ledger == concatenate([rounds(5.0, 2), rounds(6.0, 2)])
    lost = replace(in_folder, ledger=None, note="it is lost")
    for order in ((in_store, lost), (lost, in_store)):
        (cost,) = distinct_runs(order)
        assert cost.ledger is None and cost.note == "it is lost"


# What they come to


def test_the_figures_are_those_of_dp_accounting(run_on, capsys):
    runs = [(5.0, 3), (3.0, 4), (5.0, 2)]
    for z, count in runs:
        run_on(z=z, count=count)
    found = run_on.account("budget={epsilon: 3, delta: 1e-5, order: 8}")
    plain, renyi = pld.PLDAccountant(), rdp.RdpAccountant([8])
    for z, count in runs:
        event = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(z)), count
        )
        plain.compose(event)
        renyi.compose(event)
    assert found["composed"] == pytest.approx(plain.get_epsilon(1e-5), rel=2e-3)
    assert found["spent"] == pytest.approx(float(renyi.rdp[0]), rel=1e-9)
    limit = 3 - math.log1p(-1 / 8) + math.log(1e-5 * 8) / 7
    assert found["limit"] == pytest.approx(limit, rel=1e-12)
    printed = " ".join(capsys.readouterr().out.split())
    said = float(re.search(r"([\d.]+) % is spent or reserved by 3 runs", printed)[1])
    assert 100 * found["spent"] / limit <= said <= 100 * found["spent"] / limit + 0.1
    assert "fixed before the first was looked at" in printed and "Rényi filter of order 8" in printed


def test_several_stores_and_ledgers_are_composed_and_none_twice(run_on, tmp_path, store):
    outputs = [run_on(count=3), run_on(count=4)]
    another = f"sqlite:///{tmp_path}/other.db"
    client, experiment = open_store(Tracking(another, str(tmp_path / "artifacts"), "two"))
    Runs((another, client, experiment, tmp_path), run_on.data_id)(count=2)
    write_run(tmp_path / "more.jsonl", rounds(5.0, 5))
    found = account(
        [f"data.id={run_on.data_id}", f"uri={store[0]},{another},{store[0]}", "delta=1e-5", str(outputs[1]),
         str(outputs[1] / LEDGER), str(tmp_path / "more.jsonl")]
    )  # fmt: skip
    plain = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(5.0))
    plain.compose(dp_accounting.SelfComposedDpEvent(event, 14))
    assert found["composed"] == pytest.approx(plain.get_epsilon(1e-5), rel=2e-3) and found["unknown"] == 0


def test_different_adjacencies_are_refused_by_name(run_on):
    run_on()
    run_on(adjacency="replace_null")
    with pytest.raises(ConfigError, match=r"different adjacencies \(add_remove, replace_null\) cannot be composed"):
        run_on.account("delta=1e-5")
    with pytest.raises(ConfigError, match="different adjacencies"):
        budget_used(run_on.charges(), KEPT, run_on.data_id)


def test_another_budget_than_the_one_that_was_kept_is_said(run_on, capsys):
    kept = budget({"epsilon": 3, "delta": 1e-5})
    run_on(z=1.0, count=9, **{BUDGET: json.dumps(asdict(kept))})
    found = run_on.account("budget={epsilon: 90, delta: 1e-5}")
    printed = " ".join(capsys.readouterr().out.split())
    assert found["spent"] < found["limit"] and f"Not the budget that the jobs kept, which is {kept}" in printed
    assert printed.index(f"Budget of {kept}") < printed.index("It is overdrawn") < printed.index("Budget of ε = 90")
    assert ": 1 run; ε by pld" in printed
