"""The two rules that admit a job under a budget: its whole plan before any result, and the Rényi filter after one."""

import json
from dataclasses import asdict

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from mlflow import MlflowClient
from omegaconf import OmegaConf
from test_data_budget import EVENT, QUICK, held, job, killed, rounds, run_on, store

from dpexp.accounting.calibration import solve
from dpexp.accounting.ledger import (
    Ledger,
    Round,
    SamplingEvent,
    SumQueryEvent,
    concatenate,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.risk import Epsilon
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import budget_used, reserved
from dpexp.tracking.job_folder import RESERVED
from dpexp.tracking.run_costs import costs_in

__all__ = ["run_on", "store"]  # fixtures
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
    (output / RESERVED).unlink()  # without its plan, nobody knows how it was admitted
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
    event = SamplingEvent("poisson", 1e-12, 1000)
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


def test_what_a_kill_lost_is_done_again_where_the_budget_has_room(run_on, ask):
    z = plan_of(0.49)
    output = resumable(run_on, z, PLANNED, 7)
    ask(rounds(z, PLANNED + 1), output, resume=True)
    assert len(read_ledger(output / RESERVED)) == PLANNED + 1
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


def test_a_killed_job_of_a_whole_plan_leaves_nothing_and_goes_on(dpexp_job, tmp_path, monkeypatch, capfd):
    asked = ("privacy.budget={epsilon: 1, delta: 1e-4}", "privacy.epsilon=1")
    dpexp_job(*QUICK, "data.id=other")
    killed(tmp_path, 2, *asked)
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    (charge,) = costs_in(uri, "digits")
    assert len(charge.ledger) == 4 and "its whole plan was admitted" in charge.note
    with pytest.raises(SystemExit, match="the first run's whole plan takes it"):
        job(monkeypatch, asked[0], "privacy.epsilon=0.01")
