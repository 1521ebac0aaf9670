"""A budget for a data set whose runs are on parts of it: each record's own runs must keep it."""

from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import rdp
from test_data_budget import KEPT, TAG, ask, most
from test_run_costs import EVENT, rounds, run_on, store

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Part
from dpexp.accounting.multiple_runs import rho
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import budget_used

__all__ = ["ask", "run_on", "store"]  # fixtures
RULE = "sha256 of 'id' in data.id='people'"


def part(low, high, z=60.0, count=3, rule=RULE):
    return replace(rounds(z, count), part=Part(rule, low, high))


TWO_THIRDS = most(60.0) * 2 // 3


@pytest.fixture
def ran(run_on):
    """A finished run of a ledger, which it had planned."""
    return lambda ledger, **tags: run_on.ran(ledger, **TAG | tags)


def test_each_part_of_the_data_has_the_whole_budget(run_on, ran, ask, capsys):
    two_thirds = part(0, 0.5, count=TWO_THIRDS)
    ran(two_thirds)
    with pytest.raises(ConfigError, match="by 1 run, "):
        ask(two_thirds)
    for overlapping in (
        rounds(60.0, TWO_THIRDS),
        part(0.4, 1, count=TWO_THIRDS),
        part(0.5, 1, count=TWO_THIRDS, rule="another"),
    ):
        with pytest.raises(ConfigError, match="by 1 run, "):
            ask(overlapping)
    other = part(0.5, 1, count=TWO_THIRDS)
    ask(other)
    assert "and fits" in " ".join(capsys.readouterr().out.split())
    ran(other)
    spent, description = budget_used(run_on.charges(), KEPT, "people")
    renyi = rdp.RdpAccountant([KEPT.order])
    renyi.compose(dp_accounting.PoissonSampledDpEvent(EVENT.q, dp_accounting.GaussianDpEvent(60.0)), TWO_THIRDS)
    assert spent == rho(two_thirds, KEPT.order) == pytest.approx(float(renyi.rdp[0]), rel=1e-9)
    assert "by 1 run (others are on disjoint parts)" in description
    found = run_on.account("delta=1e-5")
    assert found["composed"] == epsilon(two_thirds, 1e-5) and found["spent"] == spent
    assert "In parallel: a record is at most in the runs of" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="by 2 runs, "):  # the worst of both parts, and more
        ran(part(0.75, 1, count=1))
        ask(part(0.7, 0.8, count=TWO_THIRDS))


def test_a_run_that_is_not_private_or_unknown_bounds_nothing_of_any_part(run_on, ran, ask):
    ran(part(0, 0.5), **{"dpexp.private": "no: the noise seed is known"})
    with pytest.raises(ConfigError, match="is not private"):
        ask(part(0.5, 1))


def test_parts_for_several_adjacencies_are_refused(ran, ask):
    ran(part(0, 0.5))
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(replace(part(0.5, 1), adjacency="replace_null"))
