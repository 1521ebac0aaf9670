"""What `account` and jobs say of runs on parts of one data set: what all of them cost."""

import pytest
from dp_accounting import pld
from omegaconf import OmegaConf
from runs import composed, ledger, sampled
from test_parts import ALL, OTHER, RULE, on

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.ledger import concatenate, write_ledger
from dpexp.accounting.risk import risk
from dpexp.accounting.rounding import up
from dpexp.commands.account import account, with_earlier
from dpexp.commands.train import _on_these_data
from dpexp.config import register
from dpexp.errors import ConfigError


@pytest.fixture
def accounted(tmp_path, capsys):
    """Accounts for runs; returns their costs, and what is printed."""

    def accounted(*runs, **options):
        paths = [tmp_path / f"{k}.jsonl" for k in range(len(runs))]
        for path, run in zip(paths, runs, strict=True):
            write_ledger(path, run)
        options = {"delta": "1e-5"} | options
        costs = account([*map(str, paths), *(f"{name}={value}" for name, value in options.items())])
        return costs, " ".join(capsys.readouterr().out.split())

    return accounted


def by_pld(*rounds):
    """ε of rounds of (z, number), by dp-accounting."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    return composed(accountant, *((sampled(z, 0.1), count) for z, count in rounds)).get_epsilon(1e-5)


def attack(run):
    return f"at most {up(100 * risk(run).advantage, 3)} percentage points"


def test_account_takes_the_worst_of_disjoint_parts(accounted):
    runs = on(0, 0.5), on(0.5, 1, z=1.0), on(0.5, 0.75, z=3.0)
    costs, printed = accounted(*runs, accountant="pld,rdp", epsilon=1)
    assert costs["pld"] == pytest.approx(by_pld((1.0, 30), (3.0, 30)), rel=2e-3)
    worst = concatenate(runs[1:])
    assert costs == {name: epsilon(worst, 1e-5, name) for name in ("pld", "rdp")}
    for said in (
        f"a record is at most in the runs of part [0, 0.5) by {RULE}; or of part [0.5, 1) by {RULE} and",
        "In parallel", "90 rounds", up(delta(worst, 1.0), 4), attack(worst),
    ):  # fmt: skip
        assert said in printed


def test_words_are_of_the_worst_part_for_each_figure(accounted):
    """One part costs more ε at this δ, the other allows for the larger advantage."""
    rare, often = on(0, 0.5, z=0.5, rounds=1), on(0.5, 1, z=2.0, rounds=60)
    assert epsilon(rare, 1e-9) > epsilon(often, 1e-9) and risk(rare).advantage < risk(often).advantage
    costs, printed = accounted(rare, often, delta="1e-9")
    assert costs["pld"] == epsilon(rare, 1e-9) and attack(often) in printed


@pytest.mark.parametrize("second", [(0.4, 1), (0.5, 1, OTHER), ALL])
def test_account_adds_up_parts_that_overlap_or_have_other_rules(accounted, second):
    costs, printed = accounted(on(0, 0.5), on(*second))
    assert costs["pld"] == epsilon(ledger(2.0, 0.1, 60), 1e-5) == pytest.approx(by_pld((2.0, 60)), rel=2e-3)
    assert "In sequence: all costs add up" in printed


def test_account_adds_up_parts_where_a_record_is_replaced(accounted):
    costs, _ = accounted(on(0, 0.5), on(0.5, 1), adjacency="replace_null")
    assert costs["pld"] == epsilon(ledger(2.0, 0.1, 60, adjacency="replace_null"), 1e-5)
    assert "In sequence" not in accounted(on(*ALL), on(*ALL))[1]


def test_a_figure_of_disjoint_parts_is_refused(accounted, tmp_path):
    with pytest.raises(ConfigError, match=r"figure=.*shows one composition"):
        accounted(on(0, 0.5), on(0.5, 1), figure=tmp_path / "x.png")


def test_a_run_tells_what_it_costs_with_earlier_ones_on_other_parts():
    one, other = on(0, 0.5), on(0.5, 1, z=1.0)
    cost = f"ε = {up(epsilon(other, 1e-5), 4)}"
    assert with_earlier([one], other, 1e-5) == f"with 1 earlier run on these data, {cost}"
    covered = f"{cost} (1 not covered: without privacy, or without a ledger)"
    assert with_earlier([one, None], other, 1e-5) == f"with 2 earlier runs on these data, {covered}"


def test_a_job_says_how_its_data_are_known():
    register()
    by_path = OmegaConf.create({"data": {"path": "/a[b]/rows.csv", "id": "${resolved:${data.path}}"}})
    path = "Earlier runs are known by the path /a[b]/rows.csv; data.id names the data wherever they are."
    assert [*_on_these_data(by_path, "")] == [path]
    earlier = [*_on_these_data(by_path, "with 1 earlier run, ε = 4")]
    assert earlier == ["After this job, with 1 earlier run, ε = 4.", path]
    by_path.data.id = "rows"
    assert [*_on_these_data(by_path, "")] == []
