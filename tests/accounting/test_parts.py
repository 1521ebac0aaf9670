"""Runs on parts of one data set: which of them one record may be in, and what all of them cost."""

import json
from dataclasses import replace

import pytest
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_accountants import directly, ledger

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.ledger import LedgerWriter, Part, concatenate, read_ledger, write_ledger
from dpexp.accounting.ledger.integrity import Chain
from dpexp.accounting.multiple_runs import runs_of_one_record
from dpexp.accounting.risk import risk
from dpexp.accounting.rounding import up
from dpexp.commands.account import account, with_earlier
from dpexp.commands.train import _on_these_data
from dpexp.config import register
from dpexp.errors import ConfigError

RULE, OTHER = "sha256 of 'name' in data.id='people'", "sha256 of 'name' in data.id='others'"


def on(low, high, rule=RULE, z=2.0, rounds=30, adjacency="add_remove"):
    """A run on a part; None: on all of the data."""
    part = None if low is None else Part(rule, low, high)
    return replace(ledger(z, 0.1, rounds), part=part, adjacency=adjacency)


ALL = (None, None)
SETS = [  # parts, and the sets of them that one record may be in
    ([(0, 0.5), (0.5, 1)], [[0], [1]]),
    ([(0.5, 1), (0, 0.5)], [[1], [0]]),
    ([(0, 0.5), (0, 0.5)], [[0, 1]]),
    ([(0, 0.6), (0.5, 1)], [[0, 1]]),
    ([(0, 0.5), (0.5, 1), ALL], [[0, 2], [1, 2]]),
    ([(0, 0.5), (0.25, 0.75), (0.5, 1)], [[0, 1], [1, 2]]),
    ([(0, 1), (0.2, 0.3), (0.3, 0.4)], [[0, 1], [0, 2]]),
    ([(0, 0.5), (0.5, 1, OTHER)], [[0, 1]]),
    ([(0, 0.5), (0.5, 1), (0, 0.5, OTHER), (0.5, 1, OTHER)], [[0, 2, 3], [1, 2, 3]]),  # one rule counts
    ([ALL, ALL], [[0, 1]]),
    ([], [[]]),
]


@pytest.mark.parametrize("parts, expected", SETS, ids=str)
def test_runs_share_a_record_if_their_ranges_of_one_rule_overlap(parts, expected):
    found = runs_of_one_record([on(*part) for part in parts])
    assert sorted(found) == sorted(expected)


ENDS = st.integers(0, 8).map(lambda k: k / 8)
PARTS = st.lists(st.tuples(ENDS, ENDS, st.sampled_from([RULE, OTHER])).filter(lambda p: p[0] < p[1]), max_size=5)


@given(PARTS, st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_no_record_is_in_more_runs_than_a_set_has(parts, first, second):
    """And of the rule that most runs have, or the first, each set's ranges hold one hash."""
    at = {RULE: first, OTHER: second}
    runs = {k for k, (low, high, rule) in enumerate(parts) if low <= at[rule] < high}
    sets = runs_of_one_record([on(*part) for part in parts])
    assert any(runs <= {*one} for one in sets)
    rules = [rule for _, _, rule in parts]
    for one in sets:
        ranges = [parts[k][:2] for k in one if rules[k] == max(rules, key=rules.count)]
        assert not ranges or max(low for low, _ in ranges) < min(high for _, high in ranges)


@pytest.mark.parametrize("adjacency", ["replace_one", "replace_null"])
def test_a_replaced_record_may_be_in_two_parts(adjacency):
    assert runs_of_one_record([on(0, 0.5, adjacency=adjacency), on(0.5, 1, adjacency=adjacency)]) == [[0, 1]]


def test_runs_of_several_adjacencies_are_not_composed_even_on_disjoint_parts():
    with pytest.raises(ConfigError, match="different adjacencies"):
        runs_of_one_record([on(0, 0.5), on(0.5, 1, adjacency="replace_null")])


@pytest.fixture
def written(tmp_path):
    def write(*runs):
        paths = [tmp_path / f"{k}.jsonl" for k in range(len(runs))]
        for path, run in zip(paths, runs, strict=True):
            write_ledger(path, run)
        return [*map(str, paths)]

    return write


def by_pld(*rounds):
    """ε of rounds of (z, number), by dp-accounting."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    for z, count in rounds:
        found = directly(z, 0.1, count, 1e-5, accountant)
    return found


def test_account_takes_the_worst_of_disjoint_parts(written, capsys):
    runs = on(0, 0.5), on(0.5, 1, z=1.0), on(0.5, 0.75, z=3.0)
    costs = account([*written(*runs), "delta=1e-5", "accountant=pld,rdp", "epsilon=1"])
    assert costs["pld"] == pytest.approx(by_pld((1.0, 30), (3.0, 30)), rel=2e-3)
    worst = concatenate([runs[1], runs[2]])
    assert costs == {name: epsilon(worst, 1e-5, name) for name in ("pld", "rdp")}
    printed = " ".join(capsys.readouterr().out.split())
    assert f"a record is at most in the runs of part [0, 0.5) by {RULE}; or of part [0.5, 1) by {RULE} and" in printed
    assert "In parallel" in printed and "90 rounds" in printed and up(delta(worst, 1.0), 4) in printed
    assert f"at most {up(100 * risk(worst).advantage, 3)} percentage points" in printed


def test_words_are_of_the_worst_part_for_each_figure(written, capsys):
    """One part costs more ε at this δ, the other allows for the larger advantage."""
    rare, often = on(0, 0.5, z=0.5, rounds=1), on(0.5, 1, z=2.0, rounds=60)
    assert epsilon(rare, 1e-9) > epsilon(often, 1e-9) and risk(rare).advantage < risk(often).advantage
    assert account([*written(rare, often), "delta=1e-9"])["pld"] == epsilon(rare, 1e-9)
    assert f"at most {up(100 * risk(often).advantage, 3)} percentage points" in " ".join(
        capsys.readouterr().out.split()
    )


def test_account_adds_up_parts_that_overlap_or_have_other_rules(written, capsys):
    for pair in ([on(0, 0.6), on(0.5, 1)], [on(0, 0.5), on(0.5, 1, OTHER)], [on(0, 0.5), on(*ALL)]):
        cost = account([*written(*pair), "delta=1e-5"])["pld"]
        assert cost == epsilon(ledger(2.0, 0.1, 60), 1e-5) and cost == pytest.approx(by_pld((2.0, 60)), rel=2e-3)
        assert "In sequence: all costs add up" in capsys.readouterr().out
    cost = account([*written(on(0, 0.5), on(0.5, 1)), "delta=1e-5", "adjacency=replace_null"])["pld"]
    assert cost == epsilon(concatenate([on(*ALL, adjacency="replace_null")] * 2), 1e-5)
    capsys.readouterr()
    account([*written(on(*ALL), on(*ALL)), "delta=1e-5"])
    assert "In sequence" not in capsys.readouterr().out


def test_a_figure_of_disjoint_parts_is_refused(written, tmp_path):
    with pytest.raises(ConfigError, match=r"figure=.*shows one composition"):
        account([*written(on(0, 0.5), on(0.5, 1)), "delta=1e-5", f"figure={tmp_path}/x.png"])


def test_a_run_tells_what_it_costs_with_earlier_ones_on_other_parts():
    one, other = on(0, 0.5), on(0.5, 1, z=1.0)
    assert with_earlier([one], other, 1e-5) == f"with 1 earlier run on these data, ε = {up(epsilon(other, 1e-5), 4)}"
    covered = f"ε = {up(epsilon(other, 1e-5), 4)} (1 not covered: without privacy, or without a ledger)"
    assert with_earlier([one, None], other, 1e-5) == f"with 2 earlier runs on these data, {covered}"


def test_a_job_says_how_its_data_are_known():
    register()
    by_path = OmegaConf.create({"data": {"path": "/a[b]/rows.csv", "id": "${resolved:${data.path}}"}})
    path = "Earlier runs are known by the path /a[b]/rows.csv; data.id names the data wherever they are."
    assert [*_on_these_data(by_path, "")] == [path]
    assert [*_on_these_data(by_path, "with 1 earlier run, ε = 4")] == [
        "After this job, with 1 earlier run, ε = 4.",
        path,
    ]
    by_path.data.id = "rows"
    assert [*_on_these_data(by_path, "")] == []


def test_a_ledger_keeps_its_part_and_is_continued_only_on_it(tmp_path):
    run, path = on(0, 0.5), tmp_path / "a.jsonl"
    writer = LedgerWriter(path, part=run.part)
    ((round_, _),) = run.rounds.items()
    writer.sample(round_.sampling)
    writer.query(*round_.queries)
    writer.commit()
    assert writer.ledger.part == run.part
    writer.close()
    assert read_ledger(path).part == run.part
    assert json.loads(path.read_text().splitlines()[0])["part"] == {"rule": RULE, "low": 0, "high": 0.5}
    for other in (None, Part(RULE, 0, 0.25), Part(OTHER, 0, 0.5)):
        with pytest.raises(ConfigError, match=r"was begun for .* on part \[0, 0.5\) by .*, but the run"):
            LedgerWriter(path, part=other, resume=True)
    LedgerWriter(path, part=run.part, resume=True).close()
    assert concatenate([run, run]).part == run.part and concatenate([run, on(0.5, 1)]).part is None


FORGED = ["", [], {}, {"rule": RULE}, {"rule": 1, "low": 0, "high": 1}, {"rule": RULE, "low": "0", "high": 1},
          {"rule": RULE, "low": 0.5, "high": 0.5}, {"rule": RULE, "low": -1, "high": 0.5},
          {"rule": RULE, "low": 0, "high": 1.5}, {"rule": RULE, "low": False, "high": 1},
          {"rule": RULE, "low": 0, "high": float("nan")}, {"rule": RULE, "low": 0, "high": 1, "more": 1}]  # fmt: skip


@pytest.mark.parametrize("part", FORGED, ids=str)
def test_a_part_that_is_none_is_refused(tmp_path, part):
    path = tmp_path / "a.jsonl"
    path.write_bytes(Chain().header({"adjacency": "add_remove", "part": part}))
    with pytest.raises(ConfigError, match=r"the header's part .* is not understood"):
        read_ledger(path)
