"""A budget for a data set whose runs are on parts of it: each record's own runs must keep it."""

from dataclasses import replace

import pytest
from test_data_budget import KEPT, TAG, ask, most
from test_run_costs import rounds, run_on, store, words

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Part
from dpexp.accounting.multiple_runs import rho
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import budget_used

__all__ = ["ask", "run_on", "store"]  # fixtures
RULE = "sha256 of 'id' in data.id='people'"
TWO_THIRDS = most(60.0) * 2 // 3


def part(low, high, count=TWO_THIRDS, rule=RULE):
    return replace(rounds(60.0, count), part=Part(rule, low, high))


def test_each_part_of_the_data_has_the_whole_budget(run_on, ask, capsys):
    first, other = part(0, 0.5), part(0.5, 1)
    run_on(first, **TAG)
    for overlapping in (first, rounds(60.0, TWO_THIRDS), part(0.4, 1), part(0.5, 1, rule="another")):
        with pytest.raises(ConfigError, match="by 1 run, "):
            ask(overlapping)
    ask(other)
    assert "and fits" in words(capsys)
    run_on(other, **TAG)
    spent, description = budget_used(run_on.charges(), KEPT, "people")
    assert spent == rho(rounds(60.0, TWO_THIRDS), KEPT.order)
    assert "by 1 run (others are on disjoint parts)" in description
    found = run_on.account("delta=1e-5")
    assert found["composed"] == epsilon(first, 1e-5) and found["spent"] == spent
    assert "In parallel: a record is at most in the runs of" in words(capsys)
    run_on(part(0.75, 1, count=1), **TAG)
    with pytest.raises(ConfigError, match="by 2 runs, "):  # the worst of both parts, and more
        ask(part(0.7, 0.8))


def test_a_run_that_is_not_private_or_unknown_bounds_nothing_of_any_part(run_on, ask):
    run_on(part(0, 0.5), **TAG | {"dpexp.private": "no: the noise seed is known"})
    with pytest.raises(ConfigError, match=r"cannot be kept: what the run run 1 spent is unknown .it is not private"):
        ask(part(0.5, 1))


def test_parts_for_several_adjacencies_are_refused(run_on, ask):
    run_on(part(0, 0.5), **TAG)
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(replace(part(0.5, 1), adjacency="replace_null"))
