"""A budget for a data set whose runs are on parts of it: each record's own runs must keep it."""

from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import rdp
from mlflow import MlflowClient
from test_data_budget import PLANNED, SMALL, TAG, Z, ask, plan_of
from test_run_costs import EVENT, rounds, run_on, store

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Part, write_ledger
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import budget_used
from dpexp.tracking.job_folder import RESERVED_LEDGER

__all__ = ["ask", "run_on", "store"]  # fixtures
KEPT = budget(SMALL)
RULE = "sha256 of 'id' in data.id='people'"


def part(low, high, z=60.0, count=3, rule=RULE):
    return replace(rounds(z, count), part=Part(rule, low, high))


HALF = next(n for n in range(1, 10**4) if not KEPT.holds(rho(rounds(60.0, n), KEPT.order))) * 2 // 3


@pytest.fixture
def ran(run_on):
    """A finished run of a ledger, which it had planned."""

    def ran(ledger, **tags):
        output = run_on(count=None, **TAG | tags)
        for name in (RESERVED_LEDGER, "ledger.jsonl"):
            write_ledger(output / name, ledger)
        MlflowClient(run_on.uri).log_artifact(output.name, str(output / RESERVED_LEDGER))

    return ran


def test_each_part_of_the_data_has_the_whole_budget(run_on, ran, ask, capsys):
    two_thirds = part(0, 0.5, count=HALF)
    ran(two_thirds)
    with pytest.raises(ConfigError, match="by 1 run, "):
        ask(two_thirds)
    for overlapping in (rounds(60.0, HALF), part(0.4, 1, count=HALF), part(0.5, 1, count=HALF, rule="another")):
        with pytest.raises(ConfigError, match="by 1 run, "):
            ask(overlapping)
    other = part(0.5, 1, count=HALF)
    ask(other)
    assert "the Rényi filter over all rounds admits this job" in " ".join(capsys.readouterr().out.split())
    ran(other)
    used = budget_used(run_on.charges(), KEPT, "people")
    renyi = rdp.RdpAccountant([KEPT.order])
    renyi.compose(dp_accounting.PoissonSampledDpEvent(EVENT.q, dp_accounting.GaussianDpEvent(60.0)), HALF)
    assert used.spent == rho(two_thirds, KEPT.order) == pytest.approx(float(renyi.rdp[0]), rel=1e-9)
    assert "by 1 run (others are on disjoint parts)" in used.description
    found = run_on.account("delta=1e-5")
    assert found["composed"] == epsilon(two_thirds, 1e-5) and found["spent"] == used.spent
    assert "In parallel: a record is at most in the runs of" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="by 2 runs, "):  # the worst of both parts, and more
        ran(part(0.75, 1, count=1))
        ask(part(0.7, 0.8, count=HALF))


def test_a_whole_plan_is_admitted_where_nothing_was_released(run_on, ran, ask, capsys):
    whole = part(0.5, 1, z=Z, count=PLANNED)
    assert not KEPT.holds(rho(whole, KEPT.order))
    ran(part(0, 0.5))
    ask(whole)
    assert "its whole plan admits this job" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="by 1 run"):
        ask(part(0.4, 1, z=Z, count=PLANNED))
    ran(whole)
    ask(part(0, 0.5))
    for overlapping in (part(0.9, 1, count=1), rounds(60.0, 1)):
        with pytest.raises(ConfigError, match=r"100 %|whole plan takes it"):
            ask(overlapping)
    used = budget_used(run_on.charges(), KEPT, "people")
    assert used.whole == epsilon(whole, 1e-5) <= 0.5
    assert "whole plan takes it (others are on disjoint parts), with ε = 0.4998 by pld" in used.description


def test_what_is_overdrawn_is_not_hidden_by_a_whole_plan_that_took_more(run_on, ran):
    whole = part(0.5, 1, z=plan_of(0.49), count=PLANNED)
    once = part(0, 0.5, count=HALF)
    for ledger in (whole, once, once):
        ran(ledger)
    assert not KEPT.holds(rho(whole, KEPT.order)) and not KEPT.holds(2 * rho(once, KEPT.order))
    used = budget_used(run_on.charges(), KEPT, "people")
    assert used.whole is None and used.spent == 2 * rho(once, KEPT.order)


def test_a_run_that_is_not_private_or_unknown_bounds_nothing_of_any_part(run_on, ran, ask):
    ran(part(0, 0.5), **{"dpexp.private": "no: the noise seed is known"})
    with pytest.raises(ConfigError, match="is not private"):
        ask(part(0.5, 1))


def test_parts_for_several_adjacencies_are_refused(ran, ask):
    ran(part(0, 0.5))
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(replace(part(0.5, 1), adjacency="replace_null"))
