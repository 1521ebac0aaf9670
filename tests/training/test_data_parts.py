"""data.part: the records of a part, by a public hash of each record's own id, and jobs on parts."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from files import save
from hypothesis import given
from hypothesis import strategies as st
from jobs import refusal_of, result_of, store_of
from made import made_job
from pages import composed
from runs import ledger
from sensitivity import moved_by
from test_tables import COLUMNS, CSV, rows, table

from dpexp.accounting.ledger import Part, read_ledger
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.training.data import Table
from dpexp.training.data.raw import hash_of, in_part

__all__ = ["table"]  # a fixture
pytestmark = pytest.mark.usefixtures("bare")
FIRST, SECOND = "data.part={column:name,low:0,high:0.5}", "data.part={column:name,low:0.5,high:1}"
QUICK = ("data.id=people", "privacy.noise_multiplier=1.0", "sampling.steps=3", "sampling.sampling_rate=0.3")
ALONE = ("tracking=none", "accountant=moments")
IDS = st.one_of(st.text(max_size=5), st.integers(), st.floats(), st.none(), st.sampled_from(["\ud800", "1.0", " 1"]))


def chosen(ids, low, high):
    """The positions of the rows in a part."""
    table = pd.DataFrame({"id": pd.Series(ids, dtype=object), "row": range(len(ids))})
    return in_part("x.csv", table, {"column": "id", "low": low, "high": high})["row"].tolist()


@given(st.lists(IDS, max_size=5), st.lists(IDS, max_size=3), st.floats(0, 1))
def test_other_rows_never_move_a_row_and_parts_that_cover_have_each_row_once(ids, others, cut):
    assert sorted(chosen(ids, 0, cut) + chosen(ids, cut, 1)) == [*range(len(ids))]
    for low, high in ((0, cut), (cut, 1)):
        together = [k for k in chosen(ids + others, low, high) if k < len(ids)]
        assert together == chosen(ids, low, high) == [k for k in range(len(ids)) if chosen([ids[k]], low, high)]


SAME = [
    ("1", "1.0", 1, 1.0, " 1 ", np.int64(1)),
    ("", None, math.nan, pd.NA, " "),
    ("007", " 007"),
    ("\u00dcbung", "U\u0308bung "),
    (1e16, "1" + "0" * 16),
]


@pytest.mark.parametrize("ids", SAME, ids=str)
def test_one_id_in_any_form_has_one_hash(ids):
    own = hash_of(str(ids[0] if ids[0] != 1e16 else 10**16))
    assert chosen(ids, own, own + 2**-53) == [*range(len(ids))]
    assert not chosen(["7", "1.00", "x"], own, own + 2**-53)


def test_the_rule_is_public_and_stays():
    """Otherwise parts of runs of two versions could overlap."""
    digits = {"1": 0x6B86B273FF34FCE1, "": 0xE3B0C44298FC1C14}  # of SHA-256, as FIPS 180-4 has them
    assert {text: hash_of(text) for text in digits} == {text: (k >> 11) / 2**53 for text, k in digits.items()}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_parts_of_a_table_divide_its_training_rows_and_no_test_rows(table, suffix):
    some = rows(240).assign(name=lambda t: t.index // 3)
    path, tested, positions = f"some.{suffix}", {"column": "name", "fraction": 0.2}, []
    for frame in (some, some.assign(name=[None, *some["name"][1:]])):  # then a column of floats
        save(frame, path)
        whole, *halves = (
            Table(
                path, COLUMNS, "ill", "name", None, tested, part and {"column": "name", "low": part[0], "high": part[1]}
            )
            for part in (None, (0, 0.5), (0.5, 1))
        )
        names, *parts = ({*data._split("data.path", path, False)["name"].dropna()} for data in (whole, *halves))
        assert len(whole.test) == len(halves[0].test) == len(halves[1].test) > 20
        assert parts[0] | parts[1] == names and not parts[0] & parts[1] and all(20 < len(one) < 45 for one in parts)
        trained = [data.train for data in (whole, *halves)]
        assert len(trained[1]) + len(trained[2]) == len(trained[0])
        users = [len(train.user_of.unique()) for train in trained]
        assert users[1] + users[2] == users[0]
        chosen = whole._split("data.path", path, True), *(half._split("data.path", path, False) for half in halves)
        positions.append([{*rows.index} - {0} for rows in chosen])
    assert positions[0] == positions[1], "of all rows but that whose name is missing then"


def test_a_row_more_moves_no_other_part(table, dpexp_job):
    def with_one_more():
        pd.concat([pd.DataFrame([{"age": 99, "colour": "red", "name": "new", "ill": "yes"}]), rows(240)]).to_csv(
            "train.csv", index=False
        )

    def of_other_part():
        low = 0.5 if own == FIRST else 0
        part = {"column": "name", "low": low, "high": low + 0.5}
        return Table("train.csv", COLUMNS, "ill", "row", "test.csv", None, part).train.tensors

    own = FIRST if hash_of("new") < 0.5 else SECOND
    before = of_other_part()
    assert 0.01 < moved_by(with_one_more, dpexp_job, 120, *CSV, "data.id=people", "data.n=120", own) <= 1.0001
    assert all(torch.equal(*both) for both in zip(before, of_other_part(), strict=True))


def test_jobs_on_both_halves_cost_the_worse_one(table, dpexp_job, capsys):
    outputs = [dpexp_job(*CSV, *QUICK, part, f"sampling.steps={k}") for part, k in ((FIRST, 3), (SECOND, 4))]
    ledgers = [read_ledger(output / "ledger.jsonl") for output in outputs]
    assert ledgers[0].part == Part("sha256 of 'name' in data.id='people'", 0, 0.5) and ledgers[1].part.low == 0.5
    assert all(round_.sampling.n == 120 for ledger in ledgers for round_ in ledger.rounds)  # half of 240
    printed = " ".join(capsys.readouterr().out.split())
    assert "Only training records of part [0.5, 1) by sha256 of 'name' in data.id='people' are used." in printed
    assert "Only training records of part [0.5, 1) by sha256" in (outputs[1] / "card.md").read_text()
    (alone,) = account([str(outputs[1])]).values()
    uri = f"sqlite:///{table}/outputs/mlflow.db"
    assert account(["data.id=people", f"uri={uri}"])["composed"] == alone == account([*map(str, outputs)])["pld"]
    assert result_of(outputs[1])["all_runs"].startswith("with 1 earlier run")
    runs = store_of(table).search_runs(["1"])
    assert {run.data.params["data.part.low"] for run in runs} == {"0", "0.5"}


def test_users_have_parts_by_their_own_column(table, dpexp_job):
    user = ("data.person=name", "privacy_unit=user", "privacy_unit.max_examples=3")
    ledger = read_ledger(dpexp_job(*CSV, *QUICK, *user, FIRST, *ALONE) / "ledger.jsonl")
    assert ledger.part.high == 0.5 and {round_.sampling.n for round_ in ledger.rounds} == {40}


def test_several_data_sets_are_said_to_add_up(tmp_path, capsys):
    jobs = []
    for name, low in (("a", 0), ("b", 0.5)):
        part = Part(f"sha256 of 'name' in data.id='{name}'", low, low + 0.5)
        jobs.append(str(made_job(tmp_path / name, f"data.id={name}", ledger=replace(ledger(), part=part))))
    both = account(jobs)["pld"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "The data sets differ (a, b): ε adds up what a person loses who may be in all of them." in printed
    assert "In sequence" in printed and both > 1.1 * account(jobs[:1])["pld"]


REFUSED = [
    (f"{FIRST} data.id=null", "needs data.id, the name of the data set"),
    ("data.part=0.5", "data.part=0.5 must be {column: NAME, low: 0, high: 0.5}"),
    ("data.part={column:[name],low:0,high:0.5}", "must be {column: NAME, low: 0, high: 0.5}"),
    ("data.part={column:name,low:0}", "must be {column: NAME, low: 0, high: 0.5}"),
    ("data.part={column:name,low:0.5,high:0.5}", "low=0.5 and high=0.5 must be numbers, 0 <= low < high <= 1"),
    ("data.part={column:name,low:0,high:x}", "data.part: low=0 and high=x must be numbers"),
    (f"{FIRST} privacy.adjacency=replace_one", "with replace_one, a record may change its part"),
    (f"{FIRST} data.module.part=null", "is no option of dpexp.training.data.Table"),
]
REFUSED_JOBS = [  # with other options, or refused when the table is read
    ("data.part={column:id,low:0,high:0.5}", "train.csv has no column id, which data.part.column names"),
    (f"{FIRST} sampling=fixed_size", "needs adjacency=add_remove"),
    (f"{FIRST} privacy_unit=microbatch privacy_unit.size=2", "needs privacy_unit=example"),
    ("data.part={column:age,low:0,high:0.5} data.person=name privacy_unit=user", "and its column, name"),
    (f"{FIRST} data.person=name privacy_unit=user privacy_unit.user_attribute=x", "needs privacy_unit=example"),
]


@pytest.fixture(scope="module")
def options():
    return composed([*CSV, *QUICK, "tracking=none"])


@pytest.mark.parametrize("overrides, said", REFUSED)
def test_options_of_a_part_are_refused_in_one_sentence(table, options, overrides, said):
    assert said in refusal_of(options, overrides.split(), table)


@pytest.mark.parametrize("overrides, said", REFUSED_JOBS)
def test_a_part_that_is_no_function_of_the_privacy_unit_is_refused_in_one_sentence(table, dpexp_job, overrides, said):
    with pytest.raises((SystemExit, ConfigError)) as raised:
        dpexp_job(*CSV, *QUICK, "tracking=none", *overrides.split())
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_data_without_an_id_have_no_parts(dpexp_job):
    with pytest.raises((SystemExit, ConfigError), match=r"data\.part=.* no such key, as data=csv"):
        dpexp_job("data=digits", FIRST, "data.id=d")
