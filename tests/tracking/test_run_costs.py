"""What each run on a data set counts as, and what all of them come to."""

import json
import math
import multiprocessing
import re
import shutil
import time
from dataclasses import asdict

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from filelock import FileLock
from mlflow import MlflowClient

from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SumQueryEvent, concatenate
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.sampling import sampling_event
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.tracking.client import open_store
from dpexp.tracking.data_budget import budget_used
from dpexp.tracking.job_folder import RESERVED_LEDGER, RUN, is_running
from dpexp.tracking.provenance import HOST
from dpexp.tracking.run_costs import BUDGET, costs_in, distinct_runs, reserve

FORK = multiprocessing.get_context("fork")
Q, EVENT = 0.25, sampling_event("poisson", 0.25, 1000)


def rounds(z, count, adjacency="add_remove"):
    return Ledger(adjacency, {Round(EVENT, (SumQueryEvent("all", 1.0, z),)): count} if count else {})


def written(path, z, count, adjacency="add_remove"):
    writer = LedgerWriter(path, adjacency)
    for _ in range(count):
        writer.sample(EVENT)
        writer.query(SumQueryEvent("all", 1.0, z))
        writer.commit()
    writer.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    client, experiment = open_store(uri, "one", str(folder / "artifacts"))
    return uri, client, experiment, folder


@pytest.fixture
def run_on(store, request):
    """Begins runs on a data set of the test's own, as jobs do, and does `count` rounds of each."""
    uri, client, experiment, folder = store
    data_id = request.node.name

    def begin(z=5.0, count=3, planned=10, status="FINISHED", adjacency="add_remove", **tags):
        tags = {"dpexp.data_id": data_id, "dpexp.private": "yes", "mlflow.user": "ann", "dpexp.host": HOST} | tags
        run = client.create_run(experiment, tags=tags, run_name=f"z={z}")
        output = folder / run.info.run_id
        output.mkdir()
        client.set_tag(run.info.run_id, "dpexp.output", str(output))
        (output / RUN).write_text(run.info.run_id)
        reserve(output, rounds(z, planned, adjacency))
        client.log_artifact(run.info.run_id, str(output / RESERVED_LEDGER))
        if count is not None:
            written(output / "ledger.jsonl", z, count, adjacency)
        if status != "RUNNING":
            client.set_terminated(run.info.run_id, status)
        return output

    begin.data_id, begin.uri = data_id, uri
    begin.charges = lambda: costs_in(uri, data_id)
    begin.account = lambda *more: account([f"data.id={data_id}", f"uri={uri}", *more])
    return begin


def held(output):
    """A process that holds the job's lock, as one that trains does."""
    ready = FORK.Event()

    def hold():
        lock = FileLock(output / f"{RUN}.lock")
        lock.acquire()
        ready.set()
        time.sleep(60)

    process = FORK.Process(target=hold, daemon=True)
    process.start()
    assert ready.wait(20)
    return process


# What a run counts as


def killed_ledger(output, lines=None):
    """Leaves a ledger as a kill does: without its closing line, or with so many lines."""
    path = output / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: lines or -1]))
    end_of(path).unlink(missing_ok=True)


def sent_reservation(store, output):
    return store[3] / "artifacts" / output.name / "artifacts" / RESERVED_LEDGER


def test_runs_that_closed_their_ledgers_count_as_them_however_they_ended(run_on, store):
    outputs = [run_on(count=k, status=status) for k, status in enumerate(("FINISHED", "FAILED", "KILLED"), 1)]
    store[1].delete_run(outputs[1].name)
    charges = run_on.charges()
    assert [len(charge.ledger) for charge in charges] == [1, 2, 3]
    assert not any(charge.ledger_missing for charge in charges) and {charge.user for charge in charges} == {"ann"}


@pytest.mark.parametrize("status", ["RUNNING", "KILLED"])
def test_a_running_job_counts_as_its_reservation_and_a_killed_one_as_its_ledger_and_a_round_more(run_on, status):
    """Whatever the store says: another container with the same host name saw no such process."""
    output = run_on(count=3, planned=10, status=status)
    killed_ledger(output)
    process = held(output)
    assert is_running(output) is True
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 10 and "it is running" in charge.note and not charge.ledger_missing
    process.kill()
    process.join()
    (charge,) = run_on.charges()
    assert is_running(output) is False and len(charge.ledger) == 4 and charge.status == "KILLED"
    killed_ledger(output, lines=1)  # before the first round's line was on disk
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 1


def test_a_killed_run_may_have_been_in_any_kind_of_round_that_its_plan_has_left(run_on, store):
    output = run_on(z=5.0, count=3, status="KILLED")
    killed_ledger(output)
    for planned, counted in (
        ([rounds(5.0, 3), rounds(2.0, 4), rounds(1.0, 1)], [rounds(5.0, 3), rounds(2.0, 1), rounds(1.0, 1)]),
        ([rounds(5.0, 4)], [rounds(5.0, 4)]),
        ([rounds(5.0, 3)], [rounds(5.0, 3)]),  # it costs no more than its reservation
    ):
        reserve(output, concatenate(planned))
        store[1].log_artifact(output.name, str(output / RESERVED_LEDGER))
        (charge,) = run_on.charges()
        assert charge.ledger.rounds == concatenate(counted).rounds


@pytest.mark.parametrize("status", ["RUNNING", "FINISHED", "KILLED"])
def test_a_run_of_another_machine_counts_as_its_reservation(run_on, status):
    """A folder of the same path here may be a copy, of which the other machine's has gone on."""
    run_on(count=3, planned=10, status=status, **{"dpexp.host": "elsewhere"})
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 10 and "its folder is not here" in charge.note


@pytest.mark.parametrize(
    "how", ["missing", "edited", "empty", "cut", "killed and cut", "without its end", "cut at a closing line"]
)
def test_a_lost_ledger_counts_as_the_reservation_and_never_as_nothing(run_on, how, store, capsys):
    output = run_on(z=4.0, count=3, planned=10, status="KILLED" if how == "killed and cut" else "FINISHED")
    path = output / "ledger.jsonl"
    if how == "missing":
        path.unlink()
    elif "cut" in how:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    elif how == "cut at a closing line":  # of a resumed run, with an end file that would say so
        end_of(path).unlink()
    elif how == "without its end":
        killed_ledger(output, lines=3)
    else:
        path.write_bytes(path.read_bytes().replace(b"4.0", b"9.0") if how == "edited" else b"")
    reserve(output, rounds(4.0, 1))  # of an earlier copy of the folder: the store knows better
    (charge,) = run_on.charges()
    assert charge.ledger_missing and len(charge.ledger) == 10
    found = run_on.account("budget={epsilon: 4, delta: 1e-5}")
    assert found["spent"] == pytest.approx(rho(rounds(4.0, 10), 6.1), rel=1e-9)
    printed = " ".join(capsys.readouterr().out.split())
    assert "What z=4.0 spent is unknown" in printed and "counted as its whole plan" in printed
    assert "ε = unknown, at most" in printed
    sent_reservation(store, output).unlink()
    (charge,) = run_on.charges()
    assert charge.ledger_missing and charge.ledger is None
    run_on(z=4.0, count=2)
    found = run_on.account("budget={epsilon: 4, delta: 1e-5}")
    printed = " ".join(capsys.readouterr().out.split())
    assert found["unknown"] == 1 and "more than" in printed and "cannot be kept any more" in printed
    with pytest.raises(ConfigError, match=r"what the run z=4.0 spent is unknown"):
        budget_used(run_on.charges(), budget({"epsilon": 4, "delta": 1e-5}), run_on.data_id)


def test_runs_of_many_experiments_are_found(run_on, monkeypatch):
    """Stores tell of so many experiments at a time."""
    run_on(count=3)
    for number in range(3):
        MlflowClient(run_on.uri).create_experiment(f"later {number}")
    search = MlflowClient.search_experiments
    monkeypatch.setattr(MlflowClient, "search_experiments", lambda *args, **kw: search(*args, **kw, max_results=1))
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 3


def test_a_folder_that_is_gone_or_moved_counts_as_its_reservation(run_on, store):
    known, unknown, other = run_on(count=3), run_on(count=4), run_on(count=5)
    (other / RUN).write_text("another")  # a folder of the same name, with another run
    sent_reservation(store, unknown).unlink()
    known.rename(known.with_name("moved"))
    shutil.rmtree(unknown)
    first, second, third = run_on.charges()
    assert len(first.ledger) == len(third.ledger) == 10 and not first.ledger_missing
    assert second.ledger is None and second.ledger_missing and "its plan is missing too" in second.note


def test_a_run_without_privacy_leaves_no_budget(run_on, capsys):
    run_on(count=3)
    run_on(count=None, **{"dpexp.private": "no: trained without privacy"})
    run_on(count=2, **{"dpexp.private": "no: the noise seed is known"})
    assert run_on.account("delta=1e-5")["unknown"] == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("No ε covers what") == 2 and "more than" in printed
    with pytest.raises(ConfigError, match=r"is not private \(trained without privacy\)"):
        budget_used(run_on.charges(), budget({"epsilon": 4, "delta": 1e-5}), run_on.data_id)


def test_a_lock_that_was_cleared_away_does_not_end_a_run(run_on):
    output = run_on(count=1, status="RUNNING")
    process = held(output)
    (output / f"{RUN}.lock").unlink()
    (charge,) = run_on.charges()
    process.kill()
    assert len(charge.ledger) == 10 and charge.status == "RUNNING"


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
    client, experiment = open_store(another, "two", str(tmp_path / "artifacts"))
    tags = {"dpexp.data_id": run_on.data_id, "dpexp.output": str(outputs[0]), "dpexp.private": "yes"}
    again = client.create_run(experiment, tags=tags).info.run_id  # of the first run's folder, which says otherwise
    client.set_terminated(again)
    written(tmp_path / "more.jsonl", 5.0, 5)
    found = account(
        [f"data.id={run_on.data_id}", f"uri={store[0]},{another}", "delta=1e-5", str(outputs[1]),
         str(outputs[1] / "ledger.jsonl"), str(tmp_path / "more.jsonl")]
    )  # fmt: skip
    plain = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(5.0))
    plain.compose(dp_accounting.SelfComposedDpEvent(event, 12))
    assert found["composed"] == pytest.approx(plain.get_epsilon(1e-5), rel=2e-3) and found["unknown"] == 1
    assert len(distinct_runs(run_on.charges() * 2)) == 2


def test_different_adjacencies_are_refused_by_name(run_on):
    run_on()
    run_on(adjacency="replace_null")
    with pytest.raises(ConfigError, match=r"different adjacencies \(add_remove, replace_null\) cannot be composed"):
        run_on.account("delta=1e-5")
    with pytest.raises(ConfigError, match="different adjacencies"):
        budget_used(run_on.charges(), budget({"epsilon": 4, "delta": 1e-5}), run_on.data_id)


def test_another_budget_than_the_one_that_was_kept_is_said(run_on, capsys):
    kept = budget({"epsilon": 3, "delta": 1e-5})
    run_on(z=1.0, count=9, **{BUDGET: json.dumps(asdict(kept))})
    found = run_on.account("budget={epsilon: 90, delta: 1e-5}")
    printed = " ".join(capsys.readouterr().out.split())
    assert found["spent"] < found["limit"] and f"Not the budget that the jobs kept, which is {kept}" in printed
    assert printed.index(f"Budget of {kept}") < printed.index("It is overdrawn") < printed.index("Budget of ε = 90")
    assert ": 1 run; ε by pld" in printed
