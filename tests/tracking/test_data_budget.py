"""A budget for all runs on a data set: who is admitted, by which of two rules, and that no job gets past it.

A job is admitted by its whole plan before any result, or by the Rényi filter over all rounds.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import asdict

import dp_accounting
import pytest
from conftest import FORKS
from dp_accounting import pld, rdp
from jobs import store_of
from mlflow import MlflowClient
from omegaconf import OmegaConf
from test_run_costs import EVENT, held, rounds, run_on, store

from dpexp.__main__ import main
from dpexp.accounting.calibration import solve
from dpexp.accounting.ledger import (
    Ledger,
    LedgerWriter,
    Round,
    SumQueryEvent,
    concatenate,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.risk import Epsilon
from dpexp.accounting.sampling import sampling_event
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import budget_used, lock_of, reserved
from dpexp.tracking.job_folder import RESERVED_LEDGER
from dpexp.tracking.run_costs import costs_in

__all__ = ["run_on", "store"]  # fixtures
pytestmark = pytest.mark.usefixtures("bare")
SMALL = {"epsilon": 0.5, "delta": 1e-5}
TAG = {"dpexp.budget": json.dumps(asdict(budget(SMALL)))}
PLANNED = 40


def plan_of(epsilon, count=PLANNED):
    """Rounds that cost ε by pld, and not more than a thousandth less."""
    return solve("noise_multiplier", lambda z: rounds(z, count), Epsilon(epsilon, 1e-5), start=5.0).value


Z = plan_of(0.5)


@pytest.fixture
def ask(run_on, tmp_path):
    """Whether a job that plans `asked` is admitted, and by what it says."""
    client = MlflowClient(run_on.uri)

    def ask(asked, output=tmp_path / "job", resume=False, given=SMALL):
        output.mkdir(exist_ok=True)
        cfg = OmegaConf.create({
            "data": {"id": run_on.data_id}, "privacy": {"budget": given}, "tracking": {"uri": run_on.uri},
            "checkpoint": {"resume": resume}, "train": True,
        })  # fmt: skip
        with reserved(cfg, client, asked, output):
            pass

    return ask


@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_a_budget_allows_the_plan_that_costs_it(ask, epsilon, capsys):
    given, z = {"epsilon": epsilon, "delta": 1e-5}, plan_of(epsilon)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    event = dp_accounting.PoissonSampledDpEvent(EVENT.q, dp_accounting.GaussianDpEvent(z))
    accountant.compose(event, PLANNED)
    assert epsilon * 0.99 <= accountant.get_epsilon(1e-5) <= epsilon * 1.005
    kept = budget(given)
    assert not kept.holds(rho(rounds(z, PLANNED), kept.order)), "the filter alone would refuse it"
    ask(rounds(z, PLANNED), given=given)
    printed = " ".join(capsys.readouterr().out.split())
    assert "its whole plan admits this job" in printed and "gives nothing back if it stops early" in printed
    with pytest.raises(ConfigError, match="this job's plan asks for"):
        ask(rounds(z, PLANNED + 1), given=given)


def test_a_budget_and_an_adjacency_are_those_of_the_runs_before(run_on, ask):
    output = run_on(z=4.0, count=1, planned=1, **TAG)
    ask(rounds(4.0, 1))
    with pytest.raises(ConfigError, match=r"not the one that z=4.0 kept for data.id=.*, which is ε = 0.5 at"):
        ask(rounds(4.0, 1), given={"epsilon": 5, "delta": 1e-5})
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(rounds(4.0, 1, "replace_null"))
    with pytest.raises(ConfigError, match="is spent or reserved by 1 run"):  # a folder that was half cleared
        ask(rounds(4.0, 4), output)


def test_the_second_run_is_planned_from_the_first_ones_result(run_on, ask, capsys):
    """The first fits the filter: what its rounds showed decides about the second, and the filter over all of them
    about how much that may do."""
    kept, first = budget(SMALL), rounds(60.0, 3)
    ask(first)
    assert "the Rényi filter over all rounds admits this job" in " ".join(capsys.readouterr().out.split())
    run_on(z=60.0, count=3, planned=3, **TAG)
    seen = 0.3  # what was released
    z = 40.0 if seen > 0.2 else 80.0
    most = next(n for n in range(1, 10**4) if not kept.holds(rho(concatenate([first, rounds(z, n)]), kept.order))) - 1
    renyi = rdp.RdpAccountant([kept.order])
    for noise, count in ((60.0, 3), (z, most)):
        renyi.compose(dp_accounting.PoissonSampledDpEvent(EVENT.q, dp_accounting.GaussianDpEvent(noise)), count)
    assert most >= 1 and float(renyi.rdp[0]) <= kept.limit * 1.001
    ask(rounds(z, most))
    with pytest.raises(ConfigError, match=r"by 1 run, \S+ % is left"):
        ask(rounds(z, most + 1))
    alone = rounds(Z, PLANNED)  # which costs the budget by pld, and would have been admitted as the first
    with pytest.raises(ConfigError, match="by 1 run"):
        ask(alone)


@pytest.mark.parametrize("done, status", [(PLANNED, "FINISHED"), (7, "FAILED"), (1, "KILLED")])
def test_a_whole_plan_gives_nothing_back(run_on, ask, done, status, capsys):
    output = run_on(z=Z, count=done, planned=PLANNED, status=status, **TAG)
    (charge,) = run_on.charges()
    assert len(charge.ledger) == PLANNED and not charge.ledger_missing and "its whole plan was admitted" in charge.note
    for plan in (rounds(1e7, 1), rounds(Z, 1), rounds(Z, PLANNED)):
        with pytest.raises(ConfigError, match="the first run's whole plan takes it, with ε"):
            ask(plan)
    found = run_on.account()
    assert 0.495 < found["whole"] <= 0.5
    printed = " ".join(capsys.readouterr().out.split())
    assert "the first run's whole plan takes it" in printed and "overdrawn" not in printed
    (output / RESERVED_LEDGER).unlink()  # without its plan, nobody knows how it was admitted
    (charge,) = run_on.charges()
    assert len(charge.ledger) == PLANNED


def test_who_runs_or_has_reserved_a_plan_may_have_shown_a_result(run_on, ask):
    output = run_on(z=1e6, count=None, planned=1, status="RUNNING")
    process = held(output)
    with pytest.raises(ConfigError, match="by 1 run, 99"):
        ask(rounds(Z, PLANNED))
    process.kill()
    process.join()
    with pytest.raises(ConfigError, match="by 1 run, 99"):  # it may have lost its ledger
        ask(rounds(Z, PLANNED))
    write_ledger(output / "ledger.jsonl", rounds(1e6, 0))
    ask(rounds(Z, PLANNED))  # it ended before its first round, and said so


def test_what_costs_next_to_nothing_has_shown_a_result_too(run_on, ask):
    event = sampling_event("poisson", 1e-12, 1000)
    nothing = Ledger("add_remove", {Round(event, (SumQueryEvent("all", 1.0, 1e8),)): 1})
    assert rho(nothing, budget(SMALL).order) == 0
    output = run_on(z=1e8, count=1, planned=1)
    write_ledger(output / "ledger.jsonl", nothing)
    end_of(output / "ledger.jsonl").unlink()
    (charge,) = run_on.charges()
    assert len(charge.ledger) == 1
    with pytest.raises(ConfigError, match="this job's plan asks for"):
        ask(rounds(Z, PLANNED))


def test_a_run_that_keeps_no_budget_ends_what_a_whole_plan_was_good_for(run_on, ask, capsys):
    run_on(z=Z, count=PLANNED, planned=PLANNED, **TAG)
    run_on(z=Z, count=2, planned=2)
    assert "whole" not in run_on.account() and "It is overdrawn" in capsys.readouterr().out


def test_a_whole_plan_of_which_only_the_store_knows(run_on):
    output = run_on(z=Z, count=3, planned=PLANNED, status="KILLED", **TAG)
    output.rename(output.with_name("away"))
    (charge,) = run_on.charges()
    assert len(charge.ledger) == PLANNED
    assert budget_used([charge], budget(SMALL), run_on.data_id).whole is not None


def resumable(run_on, z, planned, done):
    return run_on(z=z, count=done, planned=planned, status="KILLED", **TAG)


def test_a_resumed_job_does_the_rest_of_its_whole_plan_and_no_other(run_on, ask, capsys):
    output = resumable(run_on, Z, PLANNED, 7)
    ask(rounds(Z, PLANNED), output, resume=True)
    assert "its whole plan admits this job" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match=r"by pld\), so ask for less"):
        ask(rounds(Z, PLANNED + 5), output, resume=True)  # five rounds that a kill lost are done again
    slack = resumable(run_on, Z, PLANNED, 7)
    with pytest.raises(ConfigError, match="this job's plan asks for"):
        ask(rounds(Z, PLANNED), slack, resume=True)  # another run has released something meanwhile


def test_a_copy_of_a_jobs_folder_is_not_resumed_as_the_job(run_on, ask, tmp_path):
    shutil.copytree(resumable(run_on, Z, PLANNED, 7), tmp_path / "copy")
    with pytest.raises(ConfigError, match="this job's plan asks for"):
        ask(rounds(Z, PLANNED), tmp_path / "copy", resume=True)


def test_what_a_kill_lost_is_done_again_where_the_budget_has_room(run_on, ask):
    z = plan_of(0.49)
    output = resumable(run_on, z, PLANNED, 7)
    ask(rounds(z, PLANNED + 1), output, resume=True)
    assert len(read_ledger(output / RESERVED_LEDGER)) == PLANNED + 1
    other = concatenate([rounds(z, PLANNED), rounds(2 * z, 1)])
    with pytest.raises(ConfigError, match="which its whole plan did not have"):
        ask(other, output, resume=True)


def test_a_job_that_the_filter_admitted_is_resumed_by_the_filter(run_on, ask):
    """Whoever has seen its rounds may not turn it into a whole plan."""
    kept = budget(SMALL)
    most = next(n for n in range(1, 10**4) if not kept.holds(rho(rounds(60.0, n), kept.order))) - 1
    output = resumable(run_on, 60.0, most, 2)
    with pytest.raises(ConfigError, match="this job's plan asks for"):
        ask(rounds(60.0, most + 1), output, resume=True)
    ask(rounds(60.0, most), output, resume=True)
    run_on(z=60.0, count=1, planned=1)  # another takes some meanwhile
    promised = (output / RESERVED_LEDGER).read_bytes()
    with pytest.raises(ConfigError, match="is spent or reserved by 1 run"):
        ask(rounds(60.0, most), output, resume=True)
    assert (output / RESERVED_LEDGER).read_bytes() == promised


# Jobs

KEPT = "privacy.budget={epsilon: 4, delta: 1e-5}"
QUICK = (
    "model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "data.id=digits",
    "sampling.expected_batch_size=512",
)  # fmt: skip


def job(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dpexp", *QUICK, *arguments])
    main()


def test_a_budget_is_kept_from_job_to_job(dpexp_job, tmp_path, monkeypatch):
    output = dpexp_job(*QUICK, KEPT, "privacy.epsilon=2")
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    assert run.data.params["data.id"] == "digits" and run.data.tags["dpexp.data_id"] == "digits"
    assert "id: digits" in (output / "config.yaml").read_text() and "budget" not in run.info.run_name
    with pytest.raises(SystemExit, match=r"by 1 run, 5[34]\S* % is left.*asks for 132 %"):
        job(monkeypatch, KEPT, "privacy.epsilon=3", "train=false")
    assert len(client.search_runs(["1"])) == 1
    for name in ("config.yaml", "ledger.jsonl", "result.json"):
        (output / name).unlink()
    with pytest.raises(SystemExit, match="already holds a run, with its mlflow_run_id"):
        job(monkeypatch, KEPT, "privacy.epsilon=2.5", f"hydra.run.dir={output}")


def race(barrier):
    """Lets a job of this process begin at the same moment as others."""
    from dpexp.tracking import run

    opened = run.open_store

    def together(*args):
        found = opened(*args)
        barrier.wait(60)
        return found

    run.open_store = together


def test_of_processes_that_race_for_the_last_of_a_budget_exactly_one_runs(forked, tmp_path):
    barrier = FORKS.Barrier(2)
    asked = (*QUICK, KEPT, "privacy.epsilon=2.2")  # for one of which there is room, and for no two
    jobs = [forked(*asked, first=(race, barrier)) for _ in range(2)]
    said = {job.ended(): job.exitcode for job in jobs}
    (refused,) = [words for words, code in said.items() if code]
    assert len(said) == 2 and "is spent or reserved by 1 run" in refused
    (path,) = tmp_path.glob("outputs/*/*/ledger.jsonl")
    kept = budget({"epsilon": 4, "delta": 1e-5})
    spent = rho(read_ledger(path), kept.order)
    assert kept.holds(spent) and not kept.holds(2 * spent)


def kill_in_round(number):
    commits, commit = 0, LedgerWriter.commit

    def counted(self):
        nonlocal commits
        commit(self)
        commits += 1
        if commits == number:
            os.kill(os.getpid(), signal.SIGKILL)

    LedgerWriter.commit = counted


@pytest.fixture
def killed(forked, tmp_path):
    """Gives the folder of a job that was killed as it wrote a round."""

    def start(number, *arguments):
        job = forked(*QUICK, *arguments, "checkpoint.every_n_rounds=1", first=(kill_in_round, number))
        said = job.ended()
        assert job.exitcode == -signal.SIGKILL, said
        (checkpoint,) = tmp_path.glob("outputs/*/*/last.ckpt")
        return checkpoint.parent

    return start


def test_a_crashed_job_gives_back_what_it_did_not_release_and_asks_again_when_resumed(
    tmp_path, monkeypatch, dpexp_job, killed
):
    folder = killed(2, KEPT, "privacy.epsilon=2")
    uri, kept = f"sqlite:///{tmp_path}/outputs/mlflow.db", budget({"epsilon": 4, "delta": 1e-5})
    (crashed,) = costs_in(uri, "digits")
    assert len(crashed.ledger) == 3 and "ends early" in crashed.note
    promised = read_ledger(folder / RESERVED_LEDGER)
    assert len(promised) == 4 and rho(promised, kept.order) > rho(crashed.ledger, kept.order)
    # The second round was written and not finished, so that a resumed job does it again: three more, five in all.
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup)
    (began,) = store_of(tmp_path).search_runs(["1"])
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
    main()
    (run,) = store_of(tmp_path).search_runs(["1"])
    may_change = {"dpexp.pid", "mlflow.note.content", *(t for t in run.data.tags if "resumed" in t)}
    changed = {tag for tag, _ in run.data.tags.items() ^ began.data.tags.items()} - may_change
    assert not changed and run.data.tags["dpexp.resumed.command"] == f"dpexp resume {folder}"
    assert len(read_ledger(folder / RESERVED_LEDGER)) == 5
    (resumed,) = costs_in(uri, "digits")
    assert len(resumed.ledger) == 5 and not resumed.note
    # The folder is put back to before: what its job has done meanwhile would count nowhere.
    shutil.rmtree(folder)
    for now in (backup, folder):
        if now == folder:
            backup.rename(folder)
        monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(now)])
        with pytest.raises(SystemExit, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
            main()
        (charge,) = costs_in(uri, "digits")
        assert len(charge.ledger) == 5


def test_a_killed_job_of_a_whole_plan_leaves_nothing(tmp_path, monkeypatch, dpexp_job, killed):
    asked = ("privacy.budget={epsilon: 1, delta: 1e-4}", "privacy.epsilon=1")
    killed(2, *asked)
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(charge.ledger) == 4 and "its whole plan was admitted" in charge.note
    with pytest.raises(SystemExit, match="the first run's whole plan takes it"):
        job(monkeypatch, asked[0], "privacy.epsilon=0.01")


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


def kill_before(request):
    setattr(MlflowClient, request, lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("before, counts", [("set_tag", 0), ("log_artifact", 0), ("log_inputs", 4)])
def test_a_job_killed_as_it_starts_counts_as_its_reservation_from_when_it_may_train(forked, tmp_path, before, counts):
    """`before` a request; a run that no budget knows has not begun to train."""

    job = forked(*QUICK, KEPT, "privacy.epsilon=1", first=(kill_before, before))
    said = job.ended()
    assert job.exitcode == -signal.SIGKILL, said
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
    with pytest.raises(SystemExit, match=r"5[34]\S* % is left"):
        dpexp_job("-m", *QUICK, KEPT, "privacy.epsilon=2,3")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert charge.status == "FINISHED" and "2 trials, 1 finished" in capsys.readouterr().out
    assert len(list(tmp_path.glob("outputs/multirun/*/*/*/ledger.jsonl"))) == 1


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
        (["account", "data.id=d", "accountant=gdp"], "gdp is gone: its ε was an approximation"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "argv", ["dpexp", *arguments])
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        main()
