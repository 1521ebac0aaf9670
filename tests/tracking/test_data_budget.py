"""What is spent on a data set, and a budget for all its runs."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from filelock import FileLock
from jobs import store_of
from mlflow import MlflowClient

from dpexp.__main__ import main
from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SamplingEvent,
    SumQueryEvent,
    concatenate,
    read_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.tracking.client import open_store
from dpexp.tracking.data_budget import budget_used, lock_of
from dpexp.tracking.job_folder import RESERVED, RUN, is_running
from dpexp.tracking.provenance import HOST
from dpexp.tracking.run_costs import BUDGET, costs_in, distinct_runs, reserve

FORK = multiprocessing.get_context("fork")
KEPT = "privacy.budget={epsilon: 4, delta: 1e-5}"
QUICK = (
    "model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "data.id=digits",
    "sampling.expected_batch_size=512",
)  # fmt: skip
Q, EVENT = 0.25, SamplingEvent("poisson", 0.25, 1000)


def rounds(z, count, adjacency="add_remove"):
    return Ledger(adjacency, {Round(EVENT, (SumQueryEvent("all", 1.0, z),)): count} if count else {})


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
        client.log_artifact(run.info.run_id, str(output / RESERVED))
        if count is not None:
            writer = LedgerWriter(output / "ledger.jsonl", adjacency)
            for _ in range(count):
                writer.sample(EVENT)
                writer.query(SumQueryEvent("all", 1.0, z))
                writer.commit()
            writer.close()
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
    return store[3] / "artifacts" / output.name / "artifacts" / RESERVED


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


@pytest.mark.parametrize("count", [9, 10])
def test_a_killed_run_costs_no_more_than_its_reservation(run_on, count):
    killed_ledger(run_on(count=count, planned=10, status="KILLED"))
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 10


def test_a_killed_run_may_have_been_in_any_kind_of_round_that_its_plan_has_left(run_on, store):
    output = run_on(z=5.0, count=3, status="KILLED")
    killed_ledger(output)
    reserve(output, concatenate([rounds(5.0, 3), rounds(2.0, 4), rounds(1.0, 1)]))
    store[1].log_artifact(output.name, str(output / RESERVED))
    (charge,) = run_on.charges()
    assert charge.ledger.rounds == concatenate([rounds(5.0, 3), rounds(2.0, 1), rounds(1.0, 1)]).rounds


@pytest.mark.parametrize("status", ["RUNNING", "FINISHED", "KILLED"])
def test_a_run_of_another_machine_counts_as_its_reservation(run_on, status):
    """A folder of the same path here may be a copy, of which the other machine's has gone on."""
    run_on(count=3, planned=10, status=status, **{"dpexp.host": "elsewhere"})
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 10 and "its folder is not here" in charge.note


@pytest.mark.parametrize("how", ["missing", "edited", "empty", "cut", "without its end"])
def test_a_lost_ledger_counts_as_the_reservation_and_never_as_nothing(run_on, how, store, capsys):
    output = run_on(z=4.0, count=3, planned=10)
    path = output / "ledger.jsonl"
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
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
    LedgerWriter(tmp_path / "far.jsonl").close()
    another = f"sqlite:///{tmp_path}/other.db"
    client, experiment = open_store(another, "two", str(tmp_path / "artifacts"))
    tags = {"dpexp.data_id": run_on.data_id, "dpexp.output": str(outputs[0]), "dpexp.private": "yes"}
    again = client.create_run(experiment, tags=tags).info.run_id  # of the first run's folder, which says otherwise
    client.log_artifact(again, str(outputs[0] / "ledger.jsonl"))
    client.set_terminated(again)
    both = f"uri={store[0]},{another}"
    found = account(
        [f"data.id={run_on.data_id}", both, str(outputs[1]), str(outputs[1] / "ledger.jsonl"), "delta=1e-5"]
    )
    assert found["composed"] == run_on.account("delta=1e-5")["composed"]
    far = LedgerWriter(tmp_path / "more.jsonl")
    for _ in range(5):
        far.sample(EVENT)
        far.query(SumQueryEvent("all", 1.0, 5.0))
        far.commit()
    far.close()
    more = account([f"data.id={run_on.data_id}", both, str(tmp_path / "more.jsonl"), "delta=1e-5"])
    plain = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(5.0))
    plain.compose(dp_accounting.SelfComposedDpEvent(event, 12))
    assert more["composed"] == pytest.approx(plain.get_epsilon(1e-5), rel=2e-3)
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


# Jobs


def job(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dpexp", *QUICK, *arguments])
    main()


def test_a_budget_is_kept_from_job_to_job(dpexp_job, tmp_path, monkeypatch, capsys):
    output = dpexp_job(*QUICK, KEPT, "privacy.epsilon=2")
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    assert run.data.params["data.id"] == "digits" and run.data.tags["dpexp.data_id"] == "digits"
    assert "id: digits" in (output / "config.yaml").read_text() and "budget" not in run.info.run_name
    with pytest.raises(SystemExit, match=r"by 1 run, 5[34]\S* % is left.*asks for 132 %"):
        job(monkeypatch, KEPT, "privacy.epsilon=3")
    with pytest.raises(SystemExit, match=r"not the one that .* kept for data.id=digits, which is ε = 4 at"):
        job(monkeypatch, "privacy.budget={epsilon: 5, delta: 1e-5}", "privacy.epsilon=1")
    with pytest.raises(
        SystemExit, match=r"data.id=digits: runs for different adjacencies \(add_remove, replace_null\)"
    ):
        job(monkeypatch, KEPT, "privacy.epsilon=1", "privacy.adjacency=replace_null")
    with pytest.raises(SystemExit, match=r"this job's plan asks for"):
        job(monkeypatch, KEPT, "privacy.epsilon=3", "train=false")
    assert len(client.search_runs(["1"])) == 1
    job(monkeypatch, KEPT, "privacy.epsilon=1")
    job(monkeypatch, "privacy.epsilon=5")  # nobody stops a job that keeps no budget; but it counts
    found = account(["data.id=digits", f"uri=sqlite:///{tmp_path}/outputs/mlflow.db"])
    ledgers = [read_ledger(path) for path in tmp_path.glob("outputs/*/*/ledger.jsonl")]
    assert len(ledgers) == 3 and found["spent"] == pytest.approx(sum(rho(ledger, 6.1) for ledger in ledgers))
    assert "It is overdrawn" in capsys.readouterr().out


def racing(barrier, results, number, *arguments):
    """Begins a job at the same moment as others; what came of it."""
    from dpexp.tracking import run

    opened = run.open_store

    def together(*args):
        found = opened(*args)
        barrier.wait(60)
        return found

    run.open_store = together
    sys.argv = ["dpexp", *QUICK, *arguments]
    try:
        main()
        results.put((number, "ran"))
    except SystemExit as error:
        results.put((number, str(error)))


def test_of_processes_that_race_for_the_last_of_a_budget_exactly_one_runs(dpexp_job, tmp_path):
    dpexp_job(*QUICK, KEPT, "privacy.epsilon=1")  # the store is there
    count = 2
    barrier, results = FORK.Barrier(count), FORK.Queue()
    asked = (KEPT, "privacy.epsilon=2.2")  # one of which is left, and no two
    processes = [FORK.Process(target=racing, args=(barrier, results, k, *asked)) for k in range(count)]
    for process in processes:
        process.start()
    came_of = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    ran = [number for number, result in came_of.items() if result == "ran"]
    assert len(ran) == 1, came_of
    refused = [result for number, result in came_of.items() if number not in ran]
    assert all("is spent or reserved by 2 runs" in result for result in refused)
    ledgers = [read_ledger(path) for path in sorted(tmp_path.glob("outputs/*/*/ledger.jsonl"))]
    assert len(ledgers) == 2
    kept = budget({"epsilon": 4, "delta": 1e-5})
    spent = sum(rho(ledger, kept.order) for ledger in ledgers)
    assert kept.holds(spent) and not kept.holds(2 * spent - rho(ledgers[0], kept.order))


def killed_in_round(number, *arguments):
    commits, commit = 0, LedgerWriter.commit

    def counted(self):
        nonlocal commits
        commit(self)
        commits += 1
        if commits == number:
            os.kill(os.getpid(), signal.SIGKILL)

    LedgerWriter.commit = counted
    sys.argv = ["dpexp", *QUICK, *arguments]
    main()


def killed(folder, number, *arguments):
    """The folder of a job that was killed as it wrote a round."""
    process = FORK.Process(target=killed_in_round, args=(number, *arguments, "checkpoint.every_n_rounds=1"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (checkpoint,) = folder.glob("outputs/*/*/last.ckpt")
    return checkpoint.parent


def test_a_crashed_job_gives_back_what_it_did_not_release_and_asks_again_when_resumed(dpexp_job, tmp_path, monkeypatch):
    dpexp_job(*QUICK, KEPT, "privacy.epsilon=0.5")
    folder = killed(tmp_path, 2, KEPT, "privacy.epsilon=2")
    uri, kept = f"sqlite:///{tmp_path}/outputs/mlflow.db", budget({"epsilon": 4, "delta": 1e-5})
    before, crashed = costs_in(uri, "digits")
    assert len(crashed.ledger) == 3 and "ends early" in crashed.note
    promised = read_ledger(folder / "reserved_ledger.jsonl")
    left = kept.limit - rho(before.ledger, kept.order) - rho(crashed.ledger, kept.order)
    assert len(promised) == 4 and rho(promised, kept.order) > rho(crashed.ledger, kept.order)
    # The second round was written and not finished, so that a resumed job does it again: three more, five in all.
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup)
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
    main()
    assert len(read_ledger(folder / "reserved_ledger.jsonl")) == 5
    _, resumed = costs_in(uri, "digits")
    assert len(resumed.ledger) == 5 and not resumed.note
    spent = rho(resumed.ledger, kept.order) - rho(crashed.ledger, kept.order)
    assert 0 < spent < left
    # The folder is put back to before: what its job has done meanwhile would count nowhere.
    done = (folder / "ledger.jsonl").read_bytes()
    shutil.rmtree(folder)
    for now in (backup, folder):
        if now == folder:
            backup.rename(folder)
        monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(now)])
        with pytest.raises(SystemExit, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
            main()
        _, charge = costs_in(uri, "digits")
        assert len(charge.ledger) == 5
    (folder / "ledger.jsonl").write_bytes(done)
    main()
    assert len(read_ledger(folder / "ledger.jsonl")) == 8


def test_a_resumed_job_is_refused_what_others_have_taken_meanwhile(dpexp_job, tmp_path, monkeypatch):
    dpexp_job(*QUICK, KEPT, "privacy.epsilon=0.5")
    folder = killed(tmp_path, 2, KEPT, "privacy.epsilon=2")
    promised = (folder / "reserved_ledger.jsonl").read_bytes()
    job(monkeypatch, KEPT, "privacy.epsilon=2.2")
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
    with pytest.raises(SystemExit, match="is spent or reserved by 2 runs"):
        main()
    assert (folder / "reserved_ledger.jsonl").read_bytes() == promised


def test_another_job_in_a_folder_that_was_half_cleared_is_another_job(dpexp_job, tmp_path, monkeypatch):
    output = dpexp_job(*QUICK, KEPT, "privacy.epsilon=2.5")
    for name in ("config.yaml", "ledger.jsonl", "result.json"):
        (output / name).unlink()
    with pytest.raises(SystemExit, match="already holds a run, with its mlflow_run_id"):
        job(monkeypatch, KEPT, "privacy.epsilon=2.5", f"hydra.run.dir={output}")
    monkeypatch.setattr("dpexp.commands.validate.OF_A_RUN", ())
    with pytest.raises(SystemExit, match=r"8[0-9]* % is spent or reserved by 1 run"):
        job(monkeypatch, KEPT, "privacy.epsilon=2.5", f"hydra.run.dir={output}")


def test_a_store_has_one_lock_whatever_it_is_called(tmp_path):
    names = (
        "sqlite:///{}/s.db",
        "sqlite+pysqlite:///{}/s.db",
        "sqlite:///{}/../{}/s.db",
        "sqlite:///{}/s.db?timeout=9",
    )
    (lock,) = {lock_of(name.format(tmp_path, tmp_path.name), "a") for name in names}
    assert lock.parent == tmp_path and lock != lock_of(names[0].format(tmp_path), "b")
    assert lock_of("http://one", "a") == lock_of("http://127.0.0.1:5000", "a") != lock


@pytest.mark.parametrize("before, counts", [("set_tag", 0), ("log_artifact", 0), ("log_inputs", 4)])
def test_a_job_killed_as_it_starts_counts_as_its_reservation_from_when_it_may_train(
    dpexp_job, tmp_path, monkeypatch, before, counts
):
    """`before` a request; a run that no budget knows has not begun to train."""

    def killed_before():
        monkeypatch.setattr(MlflowClient, before, lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL))
        sys.argv = ["dpexp", *QUICK, KEPT, "privacy.epsilon=1"]
        main()

    dpexp_job(*QUICK, "train=false")
    process = FORK.Process(target=killed_before)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    charges = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert sum(len(charge.ledger) for charge in charges) == counts


def test_a_job_that_fails_before_its_first_round_spends_nothing(dpexp_job, tmp_path, monkeypatch):
    from dpexp.privacy.callback import PrivacyCallback

    def broken(*args):
        raise RuntimeError("no data")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(PrivacyCallback, "on_fit_start", broken)
        dpexp_job(*QUICK, KEPT, "privacy.epsilon=2")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert charge.status == "FAILED" and len(charge.ledger) == 0 and not charge.ledger_missing
    assert read_ledger(*tmp_path.glob("outputs/*/*/ledger.jsonl")) == Ledger("add_remove", {})


def test_the_trials_of_a_sweep_are_counted_and_held_to_the_budget(dpexp_job, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"70\.4 % is spent or reserved by 2 runs"):
        dpexp_job("-m", *QUICK, KEPT, "privacy.epsilon=1,2.2,2")
    statuses = [charge.status for charge in costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")]
    assert statuses == ["FINISHED", "FINISHED"]
    assert "3 trials, 2 finished" in capsys.readouterr().out
    assert len(list(tmp_path.glob("outputs/multirun/*/*/*/ledger.jsonl"))) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["data.id=", KEPT], "data.id='' must be a name"),
        (["data.id=' a'"], "without blanks at its ends"),
        ([KEPT], "privacy.budget needs data.id"),
        (["data.id=d", KEPT, "tracking=none"], "privacy.budget with tracking.uri=null: no later job could know"),
        (["data.id=d", KEPT, "debug=true"], "privacy.budget with debug=true"),
        (["data.id=d", KEPT, "privacy.enabled=false"], "not private .trained without privacy."),
        (["data.id=d", KEPT, "privacy.noise_seed=1"], "not private .the noise seed is known."),
        (["data.id=d", "privacy.budget=8"], "privacy.budget=8 is not understood; give"),
        (
            ["data.id=d", KEPT, "sampling=truncated_poisson", "sampling.max_batch_size=700"],
            "sampling=truncated_poisson under adjacency=replace_null has no bound; choose sampling=poisson",
        ),
        (["data.id=d", KEPT, "privacy.adjacency=replace_one"], "sampling=poisson under adjacency=replace_one has no"),
        (["account", "data.id=d"], "does not exist, so there are no runs to read"),
        (["account", "data.id=d", "acountant=rdp"], "did you mean 'accountant'"),
        (["account", "data.id=d", "accountant=gdp"], "an approximation, no bound"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "argv", ["dpexp", *arguments])
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        main()


def test_a_lock_that_was_cleared_away_does_not_end_a_run(run_on):
    output = run_on(count=1, status="RUNNING")
    process = held(output)
    (output / f"{RUN}.lock").unlink()
    (charge,) = run_on.charges()
    process.kill()
    assert len(charge.ledger) == 10 and charge.status == "RUNNING"
