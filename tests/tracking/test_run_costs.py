"""What each run on a data set counts as, and what all of them come to."""

import json
import multiprocessing
import re
import shutil
from dataclasses import asdict, replace

import pytest
from dp_accounting import pld, rdp
from made import write_run
from mlflow import MlflowClient
from runs import composed, sampled

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
END = "ledger.end.json"


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

    def end(self, output, status="FINISHED", sent=(LEDGER, END)):
        """Ends it; the store gets what the folder has of these files."""
        for path in (output / name for name in sent):
            if path.exists():
                self.client.log_artifact(self.id(output), str(path))
        self.client.set_terminated(self.id(output), status)
        data_budget.end(self.client, self.uri, self.id(output), output)

    def __call__(self, done, planned=None, status="FINISHED", **tags):
        """A whole run, that did what it had planned, or less."""
        output = self.begin(planned or done, **tags)
        write_run(output / LEDGER, done)
        self.end(output, status)
        return output

    def id(self, output):
        return (output / RUN).read_text()

    def tag(self, output):
        return self.client.get_run(self.id(output)).data.tags[COUNTS_AS]

    def artifact(self, output, name):
        return self.folder / "artifacts" / self.id(output) / "artifacts" / name

    def charges(self):
        return costs_in(self.uri, self.data_id)

    def account(self, *more, uri=None):
        return account([f"data.id={self.data_id}", f"uri={uri or self.uri}", *more])


@pytest.fixture
def run_on(store, request):
    return Runs(store, re.sub(r"\W", "_", request.node.name))


def lengths(costs):
    """How many rounds each run counts as; None if that is unknown."""
    return [None if cost.ledger is None else len(cost.ledger) for cost in costs]


def words(capsys):
    """What was printed, in one line."""
    return " ".join(capsys.readouterr().out.split())


def first_lines(path, count):
    """Cuts a file off after so many lines."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


# What a run counts as


def test_runs_that_closed_their_ledgers_count_as_them_however_they_ended_and_wherever_they_are(run_on):
    """One that failed before its first round, too."""
    ended = enumerate(("FAILED", "FINISHED", "FAILED", "KILLED"))
    outputs = [run_on(rounds(5.0, k), rounds(5.0, 10), status) for k, status in ended]
    run_on.client.delete_run(run_on.id(outputs[2]))
    shutil.rmtree(outputs[3])
    outputs[1].rename(outputs[1].with_name(f"{outputs[1].name} moved"))
    charges = run_on.charges()
    assert lengths(charges) == [0, 1, 2, 3] and not any(charge.note for charge in charges)
    assert all("  ann  " in charge.shown for charge in charges)


def test_a_run_that_did_not_end_counts_as_its_plan_whatever_the_store_and_its_folder_say(run_on):
    """It is running, or was killed by SIGKILL, or another container with the same host name saw no such process."""
    for status in ("RUNNING", "KILLED", "FINISHED"):
        output = run_on.begin(rounds(5.0, 10))
        write_run(output / LEDGER, rounds(5.0, 3), close=False)
        run_on.client.update_run(run_on.id(output), status)
        if status == "KILLED":
            shutil.rmtree(output)
    charges = run_on.charges()
    assert lengths(charges) == [10] * 3 and all("it counts as its plan" in charge.note for charge in charges)


@pytest.mark.parametrize("lost", [None, LEDGER, END, "a closing line", "the end file"])
def test_a_run_counts_as_its_ledger_only_once_the_store_has_it_closed(run_on, lost):
    """A server that is gone, or full, does not take all files."""
    output = run_on.begin(rounds(5.0, 10))
    write_run(output / LEDGER, rounds(5.0, 3))
    if lost == "a closing line":
        first_lines(output / LEDGER, -1)
    elif lost == "the end file":
        (output / END).unlink()
    run_on.end(output, sent={LEDGER, END} - {lost})
    assert run_on.tag(output) == (PLANNED_LEDGER if lost else LEDGER)
    assert lengths(run_on.charges()) == [10 if lost else 3]


def test_a_resumed_run_is_one_run_and_counts_as_its_new_plan_until_it_ends(run_on, monkeypatch):
    """On any machine."""
    output = run_on(rounds(5.0, 3), rounds(5.0, 10), "KILLED")
    there = output.rename(output.with_name(f"{output.name} on another machine"))
    for module in ("client", "provenance"):
        monkeypatch.setattr(f"dpexp.tracking.{module}.HOST", "another machine")
    run_on.begin(rounds(5.0, 12), there, run_on.client.get_run(run_on.id(there)))
    assert lengths(run_on.charges()) == [12] and run_on.tag(there) == PLANNED_LEDGER
    write_run(there / LEDGER, rounds(5.0, 8), resume=True)
    run_on.end(there, sent=())
    assert lengths(run_on.charges()) == [12], "of a round that no store knows"
    run_on.end(there)
    assert lengths(run_on.charges()) == [11] and run_on.tag(there) == LEDGER


@pytest.mark.parametrize("name, end_lost", [(PLANNED_LEDGER, False), (LEDGER, False), (LEDGER, True)])
def test_a_lost_artifact_counts_as_unknown_and_never_as_nothing(run_on, name, end_lost):
    """Edited, cut off after any line, without the file of its end, or missing. Put back, it counts."""
    output = run_on.begin(rounds(4.0, 10))
    if name == LEDGER:
        for resume in (False, True):
            write_run(output / LEDGER, rounds(4.0, 2), resume=resume)
        run_on.end(output)
    path = run_on.artifact(output, name)
    lines = path.read_bytes().splitlines(keepends=True)
    wrong = [b"".join(lines[:k]) for k in range(len(lines) + end_lost)]
    if end_lost:
        end_of(path).unlink()
    for content in (*wrong, path.read_bytes().replace(b"4.0", b"9.0")):
        path.write_bytes(content)
        (charge,) = run_on.charges()
        assert charge.ledger is None and name in charge.note and "/tmp" not in charge.note
    path.unlink()
    assert lengths(run_on.charges()) == [None]
    for back in (name, END) if end_lost else (name,):
        run_on.client.log_artifact(run_on.id(output), str(output / back))
    assert lengths(run_on.charges()) == [4 if name == LEDGER else 10]


@pytest.mark.parametrize("said", [None, "../ledger.jsonl", "config.yaml"])
def test_a_run_that_names_no_artifact_is_unknown(run_on, said):
    """As one of an earlier version."""
    run_id = run_on.id(run_on(rounds(5.0, 3)))
    if said is None:
        run_on.client.delete_tag(run_id, COUNTS_AS)
    else:
        run_on.client.set_tag(run_id, COUNTS_AS, said)
    (charge,) = run_on.charges()
    assert charge.ledger is None and "its tag dpexp.counts_as names no ledger" in charge.note


def test_a_run_that_was_never_named_is_none_of_the_data_set(run_on, monkeypatch):
    """Its plan is there before its name: a run that has released something is never without."""
    sent = []
    monkeypatch.setattr(MlflowClient, "log_artifact", lambda *given, **named: sent.append("plan"))
    monkeypatch.setattr(MlflowClient, "set_tag", lambda self, run_id, key, value: sent.append(key))
    run_on.begin(rounds(5.0, 3))
    assert sent == ["plan", COUNTS_AS, DATA_ID]


def test_runs_of_many_experiments_are_found(run_on, monkeypatch):
    """Stores tell of so many experiments at a time."""
    run_on(rounds(5.0, 3))
    run_on.client.create_experiment("later")
    search = MlflowClient.search_experiments
    monkeypatch.setattr(MlflowClient, "search_experiments", lambda *args, **kw: search(*args, **kw, max_results=1))
    assert lengths(run_on.charges()) == [3]


# Folders and files


def test_a_folder_counts_as_its_closed_ledger_else_as_its_plan_else_as_unknown(run_on, tmp_path):
    output = run_on.begin(rounds(5.0, 10))
    (output / "config.yaml").write_text("privacy: {delta: 1.0e-6, budget: {epsilon: 4, delta: 1.0e-5}}")
    file, charge = output / LEDGER, cost_at(output)
    assert len(charge.ledger) == 10 and "as its plan" in charge.note
    assert (charge.delta, charge.budget, charge.identity) == (1e-6, KEPT, run_on.id(output))
    write_run(file, rounds(5.0, 3), close=False)
    assert lengths(map(cost_at, (output, file))) == [10, 10]
    write_run(file, rounds(5.0, 3), resume=True)
    assert lengths(map(cost_at, (output, file))) == [6, 6]
    first_lines(file, 5)
    assert lengths([cost_at(output)]) == [10]
    (output / PLANNED_LEDGER).unlink()
    assert lengths(map(cost_at, (output, tmp_path / "nowhere.jsonl"))) == [None, None]
    (output / "config.yaml").write_text("privacy: {enabled: false}")
    assert "not private" in cost_at(output).note


def test_a_run_that_was_found_twice_counts_once_as_the_most_that_is_said():
    small, large, other = (RunCost("a", "a", ledger=rounds(*what)) for what in ((5.0, 2), (5.0, 3), (6.0, 2)))
    lost = replace(small, ledger=None, note="it is lost")
    for costs, most, note in (
        ((small, large, other), concatenate([large.ledger, other.ledger]), ""),
        ((other, large, small, large), concatenate([large.ledger, other.ledger]), ""),
        ((small, lost), None, "it is lost"), ((lost, small), None, "it is lost"),
    ):  # fmt: skip
        (cost,) = distinct_runs(costs)
        assert (cost.ledger, cost.note) == (most, note)


# What they come to


def test_runs_of_several_stores_folders_and_files_are_composed_once_each_as_dp_accounting_does(
    run_on, tmp_path, capsys
):
    outputs = [run_on(rounds(5.0, 3)), run_on(rounds(3.0, 4))]
    another = f"sqlite:///{tmp_path}/other.db"
    client, experiment = open_store(Tracking(another, str(tmp_path / "artifacts"), "two"))
    Runs((another, client, experiment, tmp_path), run_on.data_id).begin(rounds(5.0, 2))  # which counts as its plan
    more = tmp_path / "more.jsonl"
    write_run(more, rounds(3.0, 5))
    found = run_on.account(
        "budget={epsilon: 3, delta: 1e-5, order: 8}", *map(str, (outputs[1], outputs[1] / LEDGER, more)),
        uri=f"{run_on.uri},{another},{run_on.uri}",
    )  # fmt: skip
    events = (sampled(5.0, Q), 5), (sampled(3.0, Q), 9)
    assert found["composed"] == pytest.approx(composed(pld.PLDAccountant(), *events).get_epsilon(1e-5), rel=2e-3)
    assert found["spent"] == pytest.approx(float(composed(rdp.RdpAccountant([8]), *events).rdp[0]), rel=1e-9)
    printed, percent = words(capsys), 100 * found["spent"] / found["limit"]
    assert percent <= float(re.search(r"([\d.]+) % is spent or reserved by 4 runs", printed)[1]) <= percent + 0.1
    for said in ("ε = at most", "fixed before the first was looked at", "Rényi filter of order 8"):
        assert said in printed


def test_a_run_that_is_unknown_or_not_private_leaves_no_budget(run_on, capsys):
    run_on(rounds(4.0, 2))
    run_on.artifact(run_on(rounds(4.0, 3)), LEDGER).unlink()
    run_on(rounds(4.0, 2), **{"dpexp.private": "no: trained without privacy"})
    found = run_on.account("budget={epsilon: 4, delta: 1e-5}")
    assert found["unknown"] == 2 and found["spent"] == pytest.approx(rho(rounds(4.0, 2), KEPT.order), rel=1e-12)
    known, lost, open_ = run_on.charges()
    not_private = "it is not private (trained without privacy), so that nothing bounds what it showed"
    printed = words(capsys)
    for said in ("What run 2 spent is unknown", not_private, "an unknown amount more", "cannot be kept any more"):
        assert said in printed
    for charge, said in (
        (lost, rf"run 2 spent is unknown .*artifact of the run {lost.identity}"),
        (open_, "not private"),
    ):
        with pytest.raises(ConfigError, match=said):
            budget_used([known, charge], KEPT, run_on.data_id)


def test_different_adjacencies_are_refused_by_name(run_on):
    for adjacency in ("add_remove", "replace_null"):
        run_on(rounds(5.0, 3, adjacency))
    with pytest.raises(ConfigError, match=r"different adjacencies \(add_remove, replace_null\) cannot be composed"):
        run_on.account("delta=1e-5")
    with pytest.raises(ConfigError, match="different adjacencies"):
        budget_used(run_on.charges(), KEPT, run_on.data_id)


def test_another_budget_than_the_one_that_was_kept_is_said(run_on, capsys):
    kept = budget({"epsilon": 3, "delta": 1e-5})
    run_on(rounds(1.0, 9), **{BUDGET: json.dumps(asdict(kept))})
    found = run_on.account("budget={epsilon: 90, delta: 1e-5}")
    printed = words(capsys)
    assert found["spent"] < found["limit"] and f"Not the budget that the jobs kept, which is {kept}" in printed
    assert printed.index(f"Budget of {kept}") < printed.index("It is overdrawn") < printed.index("Budget of ε = 90")
    assert ": 1 run; ε by pld" in printed
