"""Tables of one's own: schemas, encoding, training, prediction."""

import bz2
import csv
import gzip
import math
import shlex
import warnings
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from files import save
from hypothesis import given
from hypothesis import strategies as st
from jobs import refusal_of, result_of
from pages import composed
from pyarrow import parquet
from sensitivity import moved_by
from sklearn.metrics import f1_score, r2_score, roc_auc_score

from dpexp.accounting.ledger import read_ledger
from dpexp.commands.saved_jobs import predict
from dpexp.commands.table_schema import schema
from dpexp.errors import ConfigError, RecordError
from dpexp.training.classifier import _metrics_of_all
from dpexp.training.data import Table
from dpexp.training.data.raw import rows_of, text_of, texts_of
from dpexp.training.data.tables import facts_of, numbers_of

COLUMNS = {
    "age": {"kind": "number", "min": 0, "max": 100},
    "colour": {"kind": "category", "values": ["red", "blue"]},
    "name": {"kind": "ignored"},
    "ill": {"kind": "category", "values": ["no", "yes"]},
}
AGE, DAY = COLUMNS["age"], {"kind": "date", "min": "2020-01-01", "max": "2020-12-31"}
CSV = ("data=csv", "data.path=train.csv", "data.test_path=test.csv", "data.schema=schema.yaml", "data.target=ill",
       "data.person=row", "model=logistic", "trainer.num_evaluations=0")  # fmt: skip
QUICK = ("privacy.noise_multiplier=1.0", "sampling.steps=3", "sampling.sampling_rate=0.3", "accountant=moments")


def rows(count, seed=0):
    """People, of whom the old ones in red are mostly ill; three rows a name."""
    random = np.random.default_rng(seed)
    age, colour = random.integers(0, 101, count), random.choice(["red", "blue"], count)
    ill = np.where(age + 30 * (colour == "red") + random.normal(0, 10, count) > 65, "yes", "no")
    return pd.DataFrame({"age": age, "colour": colour, "name": [f"n{k // 3}" for k in range(count)], "ill": ill})


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A folder with train.csv, test.csv and schema.yaml."""
    rows(240).to_csv(tmp_path / "train.csv", index=False)
    rows(60, seed=1).to_csv(tmp_path / "test.csv", index=False)
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"rows": 240, "persons": 80, "columns": COLUMNS}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns(**changed):
    return COLUMNS | changed


def of(columns=COLUMNS, path="train.csv", target="ill", person="row", test="test.csv"):
    return Table(path, columns, target, person, test)


def test_values_are_encoded_by_public_facts_alone(table):
    x = of().encode(
        pd.DataFrame({"age": ["25", "", "x", "130", "inf"], "colour": ["red", "blue", " red", "", "green"]})
    )
    expected = [[-0.5, 0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert x.tolist() == expected


# How a schema says that numbers are written -> texts, and the numbers that they are.
NUMBERS = {
    "{kind: number}": "1,234 € = nan; (5) = nan; 5 = 5; 1e3 = 1000",
    "{kind: number, thousands: ','}": (
        "1,234 = 1234; 7,5 = nan; 1.234 = 1.234; -1,234,567 = -1234567; 1.234,5 = nan; 1,234.5 = 1234.5; 12,34 = nan; "
        " 5  = 5; 1e3 = 1000; 1,23,456 = nan; $12 = nan; 12% = nan;  = nan; 1.234,567 = nan; 1,2345 = nan"
    ),
    "{kind: number, decimal: ','}": (
        "1,234 = 1.234; 7,5 = 7.5; 1.234 = nan; -1,234,567 = nan; 1.234,5 = nan; 1,234.5 = nan; 12,34 = 12.34; "
        " 5  = 5; 1e3 = 1000; 1,23,456 = nan; $12 = nan; 12% = nan;  = nan; 1.234,567 = nan; 1,2345 = 1.2345"
    ),
    "{kind: number, thousands: ., decimal: ','}": (
        "1,234 = 1.234; 7,5 = 7.5; 1.234 = 1234; -1,234,567 = nan; 1.234,5 = 1234.5; 1,234.5 = nan; 12,34 = 12.34; "
        " 5  = 5; 1e3 = 1000; 1,23,456 = nan; $12 = nan; 12% = nan;  = nan; 1.234,567 = 1234.567; 1,2345 = 1.2345"
    ),
    "{kind: number, thousands: ' '}": "1 234 = 1234; 1\u202f234 = 1234; 1\u202f234.5 = 1234.5; 1  = 1",
    "{kind: number, thousands: ’}": "1’234 = 1234; 1’234.5 = 1234.5",
    '{kind: number, thousands: "\'"}': "1'234 = 1234; 1'234.5 = 1234.5",
    "{kind: number, thousands: ',', unit: €, negative: ()}": (
        "1,234.5 € = 1234.5; €1,234.5 = 1234.5; -€5 = -5; €-5 = -5; - 5\u00a0€ = -5; (€5) = -5; (1,234.56) = -1234.56; "
        "€(5) = -5; (5 €) = -5; (5) € = -5; 5 = 5; 5 $ = nan; € = nan; (5 = nan; 5) = nan; (-5) = nan; 1€50 = nan; "
        "() = nan;  = nan; ( = nan"
    ),
    "{kind: number, decimal: ',', unit: '%'}": "94,7 % = 94.7; 94,7% = 94.7",
}


@pytest.mark.parametrize("facts", NUMBERS)
def test_numbers_are_read_as_the_schema_says_that_they_are_written_whatever_the_others_are(facts):
    for pair in NUMBERS[facts].split("; "):
        text, number = pair.split(" = ")
        for others in ([], ["x", "", "1"], ["9,9", "9.9"]):
            found = numbers_of(pd.Series([text, *others]), yaml.safe_load(facts))[0]
            np.testing.assert_equal(found, float(number), text)


def test_a_number_of_a_file_that_has_numbers_is_no_text():
    assert numbers_of(pd.Series([1234.5, None]), {"kind": "number", "thousands": " ", "decimal": ","})[0] == 1234.5


def test_dates_are_days_months_and_weekdays(table):
    facts = {"kind": "date", "min": "2020-01-01", "max": "2021-01-01"}
    written, german = (of({"day": day, "ill": COLUMNS["ill"]}) for day in (facts, facts | {"format": "%d.%m.%Y"}))
    wednesday, thursday, tuesday = ([math.sin(k * math.tau / 7), math.cos(k * math.tau / 7)] for k in (2, 3, 1))
    expected = [
        [-1, 0, 0, 1, *wednesday], [0, 0, 0, -1, *thursday], [1, 0, 1, 0, *tuesday], [0, 1, *[0] * 4], [0, 1, *[0] * 4],
    ]  # fmt: skip
    days = pd.DataFrame({"day": pd.to_datetime(["2020-01-01", "2020-07-02", "2022-04-05", None, None])})
    for data, inputs in (
        (written, {"day": ["2020-01-01", "2020-07-02 00:00:00", "2022-04-05T06:00+02:00", "31.12.2020", ""]}),
        (german, {"day": ["01.01.2020", "2.7.2020", "5.4.2022", "2020-01-01", None]}),
        (german, days),
        (german, german.read_inputs(Path(save(days, "days.parquet")))),
    ):
        np.testing.assert_allclose(data.encode(pd.DataFrame(inputs)), expected, atol=1e-6)


AS_WRITTEN = ["1", "007", "007.0", "1e5", "1.10", "1.00", "nan", "2.5", "1e+9999", "12345678901234567890", "-0", "tRUE"]
FORMS = [  # values, with the one form of each
    *zip(AS_WRITTEN, AS_WRITTEN, strict=True), *{
        "1.0": "1", "-3.0": "-3", " 1 ": "1", "-0.0": "0", "0.0": "0", "1e+16": "1" + "0" * 16,
        "1.5e+16": "15" + "0" * 15, "1e+23": "1" + "0" * 23, "12345678901234567.0": "12345678901234567",
        "1" * 5000 + ".0": "1" * 5000, "true": "True", "FALSE ": "False", "U\u0308": "Ü", "Å": "Å",
    }.items(),
    (1e23, "1" + "0" * 23), (1e16, "1" + "0" * 16), (1.0, "1"), (1, "1"), (2.5, "2.5"), (True, "True"), (None, ""),
    (math.nan, ""), (b"\xff", "b'\\xff'"),
]  # fmt: skip


@pytest.mark.parametrize("others", [[], ["x"], [None], [1.5], ["1.0", "2"]], ids=str)
def test_a_value_has_one_form_whatever_others_are(others):
    for value, form in FORMS:
        assert texts_of(pd.Series([value, *others], dtype=object))[0] == form
        if isinstance(value, str):
            assert texts_of(pd.Series([value, *map(str, others)], dtype="str"))[0] == form


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_categories_and_persons_that_were_written_as_floats_are_the_same(table, suffix):
    facts = columns(ward={"kind": "category", "values": ["0", "1", "2"]})
    some = rows(40).assign(ward=lambda t: t.index % 3, name=lambda t: t.index // 2)
    odd = pd.concat([some, some[:2].assign(ward=[None, 7], name=None, age=[None, 1e308])])
    assert (odd["ward"].dtype, odd["name"].dtype) != (some["ward"].dtype, some["name"].dtype)
    whole, more = (of(facts, save(frame, f"some.{suffix}"), person="name").train for frame in (some, odd))
    (left, _), (right, _) = whole.tensors, more.tensors
    assert torch.equal(left, right[:40]) and left[:, -3:].sum(1).eq(1).all() and not right[40:, -3:].any()
    assert torch.equal(left, of(facts).encode(some)) and torch.equal(right, of(facts).encode(odd))
    assert torch.equal(whole.user_of, more.user_of[:40]) and len(whole.user_of.unique()) == 20
    assert more.user_of[40:].tolist() == [-1, -1]


def test_values_of_test_rows_that_cannot_be_read_are_counted_and_those_of_training_rows_are_not(table):
    odd = rows(60, seed=1).astype({"age": str})
    odd.loc[:6, "age"], odd.loc[8, "colour"], odd.loc[9, "colour"] = "1,234", "NaN", "green"
    odd.to_csv("test.csv", index=False)
    with pytest.warns(UserWarning) as told:
        _ = of().test
    (said,) = {str(one.message) for one in told if "data.test_path" in str(one.message)}
    assert (
        "data.test_path=test.csv: in 7 of 60 rows age is not a number: '1,234'; in 1 of 60 rows colour is not one "
        in said
    )
    assert "of red, blue: 'green'. " in said and said.endswith("or says how they are written.")
    with pytest.warns(UserWarning, match="data: in 7 of 60 rows age is not a number"):
        of().encode(of().read_inputs(table / "test.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        x = of(path="test.csv").train.tensors[0]  # as private rows
        _ = of(columns(age=AGE | {"thousands": ","}, colour={"kind": "ignored"})).test
    assert x[:7, 1].eq(1).all() and not x[7:, 1].any()


GUESSES = [  # texts of a column, and its schema; null: to be filled in
    ("1,234.5 | 7", "{kind: number, thousands: ','}"),
    ("1,234 | 7", "{kind: number, thousands: null}"),
    ("7,5 | 1,25", "{kind: number, decimal: ','}"),
    ("1.234,5 | 7", "{kind: number, decimal: ',', thousands: .}"),
    ("1 234 | 7", "{kind: number, thousands: ' '}"),
    ("1'234.5 | 7", '{kind: number, thousands: "\'"}'),
    ("2020-01-31 | 2020-02-01T10:00", "{kind: date}"),
    ("31.01.2020 | ", "{kind: date, format: '%d.%m.%Y'}"),
    ("31/01/2020 | 01/02/2020", "{kind: date, format: '%d/%m/%Y'}"),
    ("01/02/2020 | 03/04/2020", "{kind: date, format: null}"),
    (" | ", "{kind: ignored}"),
    ("NaN | ", "{kind: ignored}"),
    ("   | null", "{kind: ignored}"),
    ("1.0 | nan", "{kind: number}"),
    ("True | False", "{kind: category}"),
    ("same | same", "{kind: category}"),
    ("$1 | $2", "{kind: number, unit: $}"),
    ("94.7% | 5 %", "{kind: number, unit: '%'}"),
    ("(1,234.56) | 7", "{kind: number, thousands: ',', negative: ()}"),
    ("($1,234) | $7.5", "{kind: number, thousands: ',', unit: $, negative: ()}"),
    ("1.234,5 € | -7 €", "{kind: number, decimal: ',', thousands: ., unit: €}"),
    ("01067 | 80331", "{kind: category}"),
    ("a (1) | b (2)", "{kind: category}"),
    ("5 | 5", "{kind: number}"),
    ("0 | 1.0", "{kind: category}"),
]


def test_a_schema_guesses_kinds_and_says_what_it_ignores_or_asks(table, capsys):
    texts = {f"c{k}": given.split(" | ") * 20 for k, (given, _) in enumerate(GUESSES)}
    pd.DataFrame(texts | {"id": [f"n{k}" for k in range(40)]}).to_csv("many.csv.gz", index=False)
    made = schema(["data.path=many.csv.gz"])
    needed = {"number": ["min", "max"], "date": ["min", "max"], "category": ["values"], "ignored": []}
    for k, (_, facts) in enumerate(GUESSES):
        expected = yaml.safe_load(facts)
        assert made["columns"][f"c{k}"] == dict.fromkeys(needed[expected["kind"]]) | expected
    printed = capsys.readouterr().out
    assert "Ignored, since most texts differ or all are missing: c10, c11, c12, id." in printed
    assert "Two ways to read them fit; write the right one into decimal, thousands or format: c1, c9." in printed
    filled = schema(["data.path=many.csv.gz", "out=clear.yaml", "unsafe=true"])
    ranges = {name: (facts["min"], facts["max"]) for name, facts in filled["columns"].items() if "min" in facts}
    expected = {"c0": (7, 1234.5), "c7": ("2020-01-31", "2020-02-01"), "c16": (1, 2), "c18": (-1234.56, 7),
                "c19": (-1234, 7.5), "c23": (5, 6)}  # fmt: skip
    assert ranges | expected == ranges and filled["columns"]["c21"]["values"] == ["01067", "80331"]
    assert made["rows"] is None and filled["rows"] == 40
    with pytest.raises(ConfigError, match=r"many\.yaml exists already"):
        schema(["data.path=many.csv.gz"])


def test_a_schema_of_the_test_file_quotes_it_and_one_of_training_rows_no_row(table, capsys):
    rows(60).assign(name="private", age="1,234").to_csv("train.csv", index=False)
    rows(60).assign(name=[f"public {k}" for k in range(60)], age="5,678").to_csv("test.csv", index=False)
    made = schema(["data.path=train.csv", "data.test_path=test.csv", "data.person=ill"])
    printed = capsys.readouterr().out
    assert (
        "differ or all are missing: name ('public 0')." in printed and "thousands or format: age ('5,678')." in printed
    )
    assert made["columns"]["ill"] == {"kind": "ignored"} and made["persons"] is None
    schema(["data.path=train.csv", "out=other.yaml"])
    assert "private" not in capsys.readouterr().out and "1,234" not in (table / "other.yaml").read_text()
    assert schema(["data.test_path=test.csv"])["columns"]["name"] == {"kind": "ignored"}
    for options in (["data.person=ill"], ["data.test_path=test.csv", "unsafe=true", "out=x.yaml"]):
        with pytest.raises(ConfigError, match=r"schema needs data\.path"):
            schema(options)


@pytest.mark.parametrize(
    "name, pack, sep", [("a.csv", bytes, ";"), ("a.csv.gz", gzip.compress, "\t"), ("a.csv.bz2", bz2.compress, ",")]
)
def test_files_are_read_as_they_come(table, name, pack, sep):
    some = rows(9).assign(name="Müller")
    (table / name).write_bytes(pack(some.to_csv(index=False, sep=sep).encode("utf-8-sig")))
    assert torch.equal(of(path=name).train.tensors[0], of().encode(some))
    assert of(path=name).read_inputs(table / name)["name"].eq("Müller").all()
    assert [*schema([f"data.path={name}"])["columns"]] == ["age", "colour", "name", "ill"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_two_spellings_are_one_category_column_and_person(table, suffix):
    """Unicode's forms NFC and NFD, the truth values of spreadsheets and pandas, and blanks around a name."""
    street, ill = ({"kind": "category", "values": values} for values in (["\u00dcbung", "U"], ["TRUE", "false"]))
    facts = {"Stra\u00dfe u\u0308": street, "ill": ill, "who": {"kind": "ignored"}}
    facts = facts_of(str(written(table, facts)), "ill", "row")["columns"]
    spellings = ["\u00dcbung", "U\u0308bung", "U\u0308bung ", "U"]
    for name in ("Stra\u00dfe \u00fc", " Stra\u00dfe u\u0308 "):
        some = pd.DataFrame({name: spellings, "ill": ["True", "true", "TRUE", "FALSE"], "who": spellings})
        path = save(some, f"some.{suffix}")
        data = of(facts, path, person="who", test=path)
        for part in (data.train, data.test):
            assert part.tensors[0].tolist() == [[1, 0]] * 3 + [[0, 1]] and part.tensors[1].tolist() == [0, 0, 0, 1]
        assert data.train.usable.all() and data.train.user_of.tolist() == [1, 1, 1, 0]
    old = of(facts | {"x": {"kind": "category", "values": ["TRUE"]}})  # as an earlier model has it
    new = old.encode(pd.DataFrame({"Stra\u00dfe \u00fc": ["U"], "x": [True]}).rename(columns=text_of))
    assert new.tolist() == [[0, 1, 1]]


HEADERS = ['"a, b";"c, d, e"', '\n\n"a;b";"c\nd,,,"', '\ufeff"a,b";c', '"a ""b, c""";d', "a|b|c,d", '"a,b"\t"c,d,e"\tf']


@pytest.mark.parametrize("header, names", zip(HEADERS, (2, 2, 2, 2, 3, 3), strict=True))
def test_a_file_is_cut_at_the_sign_that_its_header_has_outside_quotes(table, header, names):
    sign = {"|": "|", "\t": "\t"}.get(next((c for c in header if c in "|\t"), ""), ";")
    (table / "some.csv").write_text(header + "\n" + sign.join("1" * names) + "\n")
    for named in (None, {}):
        assert rows_of("data.path", "some.csv", named=named).to_numpy().tolist() == [["1"] * names]


def test_rows_without_a_target_contribute_nothing(table):
    train = of(path=save(rows(5).assign(ill=["yes", None, "maybe", "no", " yes"]), "some.csv")).train
    assert train.usable.tolist() == [True, False, False, True, True]
    assert train.tensors[1][train.usable].tolist() == [1, 0, 1]
    with pytest.raises(RecordError, match="a row has no known target"):
        train[1]


def written(folder, columns):
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump({"rows": 9, "columns": columns}))
    return path


FAR_OFF = [  # types of which Python has not all values, a second value beside 1 or 0, and one that Python has not
    (pa.date32(), 2, 2**31 - 1), (pa.date32(), 2, -800_000), (pa.date64(), 86_400_000, 2**60),
    (pa.timestamp("ms", "Europe/Berlin"), 2, 253402300799999), (pa.timestamp("us"), 2, 2**63 - 1),
    (pa.duration("s"), 2, 2**62), (pa.time32("s"), 2, 200_000),
]  # fmt: skip
ODD = {
    "list": pa.array([[1], [2], [1, 2]]), "bytes": pa.array([b"1", b"2", b"\xff"]),
    "text": pa.array([b"1", b"2", b"\xff"]).view(pa.string()), "view": pa.array(["1", "2", None], pa.string_view()),
} | {
    f"{kind} {odd}": pa.array([0, second, odd], {32: pa.int32(), 64: pa.int64()}[kind.bit_width]).view(kind)
    for kind, second, odd in FAR_OFF
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("facts", [DAY, AGE, {"kind": "category", "values": ["1", "[1]"]}], ids=lambda f: f["kind"])
def test_a_value_of_a_parquet_file_that_python_has_not_is_missing(table, facts, name):
    found = []
    for count in (2, 3):
        rows = pa.table({"age": ODD[name][:count], "ill": ["yes", "no", "yes"][:count]})
        parquet.write_table(rows, "odd.parquet", store_schema="time32" not in name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(of({"age": facts, "ill": COLUMNS["ill"]}, "odd.parquet").train.tensors[0])
    assert len(found[1]) == 3 and torch.equal(found[0], found[1][:2])


def test_test_rows_are_chosen_by_a_hash_so_that_a_row_moves_no_other(table):
    def names_in_test(count):
        data = Table("train.csv", COLUMNS, "ill", "name", test_hash={"column": "name", "fraction": 0.3})
        some = rows(240).assign(name=lambda t: t["name"] + np.where(t.index % 2, "", " "))  # one person, written twice
        some.iloc[240 - count :].to_csv("train.csv", index=False)
        users = {*data.train.user_of.tolist()}
        return len(users), len(data.test), {*data._split("data.path", "train.csv", True)["name"].str.strip()}

    (users, tested, names), (fewer_users, fewer_tested, fewer) = names_in_test(240), names_in_test(237)
    assert (users - fewer_users, tested - fewer_tested) in {(1, 0), (0, 3)}
    assert names - {"n0"} == fewer - {"n0"} and 10 < len(names) < 40


def test_a_table_trains_is_registered_and_predicts_raw_rows(table, dpexp_job):
    job = (*CSV, "privacy.epsilon=8", "sampling.expected_batch_size=120", "sampling.steps=30", "optimizer.lr=4")
    metrics = result_of(output := dpexp_job(*job))["metrics"]
    assert metrics["test_accuracy"] > 0.7 and metrics["test_auc"] > 0.8
    new = rows(7, seed=2).drop(columns="ill")

    def predicted(rows):
        return predict([str(output), save(rows, "new.csv")])

    found = predicted(new)
    assert [*pd.read_csv("predictions.csv")] == [*new, "prediction", "p_no", "p_yes"] == [*found]
    served = mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(new)
    np.testing.assert_allclose(served[["p_no", "p_yes"]].to_numpy(), found[["p_no", "p_yes"]].to_numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["p_no"] + found["p_yes"], 1, rtol=1e-6)
    assert [*served["prediction"]] == [("no", "yes")[int(p > 0.5)] for p in served["p_yes"]]
    card = (output / "card.md").read_text()
    assert " rows.csv\n```\n\nOne input: a row with the columns " in card and "ill" not in card.split("One input")[1]
    assert (predicted(new[["name", "colour", "age"]])["p_no"] == found["p_no"]).all(), "the order of columns"
    for wrong, said in (
        (new.assign(age=1000.0 * new["age"]), r"rows age is far from .* its range in data\.schema"),
        (new.drop(columns="age"), "no column age"),
    ):
        with pytest.raises(ConfigError, match=said):
            predicted(wrong)
    with pytest.raises(ConfigError, match="holds an array; this model takes inputs as its card"):
        predict([str(output), "new.npy"])


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("privacy", ["sampling=fixed_size", "privacy.enabled=false"])
def test_a_job_with_rows_that_cannot_be_used_trains_without_them(table, dpexp_job, recwarn, privacy):
    """Privately they are records that contribute nothing; without privacy they are left out."""
    lines = (table / "train.csv").read_text().splitlines()
    lines[3], lines[5], lines[7:9] = "", lines[5].rpartition(",")[0] + ",", [f"{line},more" for line in lines[7:9]]
    (table / "train.csv").write_text("\n".join(lines) + "\n")
    job = (*CSV, *QUICK, privacy, "sampling.sampling_rate=0.5", "sampling.steps=4", "tracking=none", "accountant=pld")
    result = result_of(dpexp_job(*job))
    assert result["rounds"] == 4 and result["metrics"]["test_accuracy"] > 0.5
    said = "they contribute nothing: RecordError: data: a row has no known target"
    assert any(said in str(one.message) for one in recwarn) == (privacy == "sampling=fixed_size")


FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=6)


@given(st.lists(st.lists(FIELDS, min_size=3, max_size=3), min_size=1, max_size=5), st.sampled_from(",;\t|"))
def test_a_csv_file_is_read_as_it_was_written(tmp_path_factory, some, delimiter):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    frame = pd.DataFrame(some, columns=["a", "b", "c"])
    frame.to_csv(path, index=False, sep=delimiter, quoting=csv.QUOTE_ALL)
    for named in (None, {"a": "data.schema"}):
        assert rows_of("data.path", str(path), named=named).to_numpy().tolist() == some


def test_lines_that_are_no_rows_are_records_and_no_rows_of_the_test_set(table):
    path = table / "one.csv"
    path.write_bytes(b"age\n1\n\n3,4\n\xff\n" + b"5" * 200_000)
    assert rows_of("data.path", "one.csv", named={})["age"].str[:9].tolist() == ["1", "", "", "\ufffd", "5" * 9]
    assert schema(["data.path=one.csv", "unsafe=true", "out=one.yaml"])["rows"] == 5
    path.write_text("age\n1\n\n3")
    assert rows_of("data.test_path", "one.csv")["age"].tolist() == ["1", "3"]
    (table / "one.jsonl").write_text('{"age": 1}\n\n[2]\n{"other": 3}\n')
    assert rows_of("data.path", "one.jsonl", named={"age": ""})["age"].isna().tolist() == [False, True, True, True]
    assert len(rows_of("data.test_path", "one.jsonl")) == 3


def test_rows_without_an_id_are_training_rows(table):
    rows(240).assign(name=lambda t: t["name"].where(t.index % 10 > 0)).to_csv("train.csv", index=False)
    data = Table("train.csv", COLUMNS, "ill", "name", test_hash={"column": "name", "fraction": 0.99})
    assert (data.train.user_of == -1).sum() == 24 and not data.train.usable[data.train.user_of == -1].any()
    assert len(data.train) + len(data.test) == 240


@pytest.mark.usefixtures("bare")
def test_numbers_are_predicted_in_their_own_unit(table, dpexp_job):
    options = ("data.target=age", "sampling.steps=60", "optimizer.lr=0.1", "privacy.enabled=false", "tracking=none")
    output = dpexp_job(*CSV, *QUICK, *options)
    assert result_of(output)["metrics"]["test_r2"] > 0.2
    found = predict([str(output), "test.csv"])
    assert np.corrcoef(found["prediction"], found["age"].astype(float))[0, 1] > 0.5 and found["prediction"].mean() > 20


@pytest.mark.usefixtures("bare")
def test_a_person_less_moves_the_released_sum_by_at_most_s(table, dpexp_job):
    def without_the_first():
        rows(240)[3:].to_csv("train.csv", index=False)

    job = (*CSV, "data.person=name", "privacy_unit=user")
    assert 0.01 < moved_by(without_the_first, dpexp_job, 80, *job) <= 1.0001


def test_the_configuration_of_a_table_is_shown_with_its_texts_as_they_are(table, dpexp_job, capsys):
    content = {"rows": 240, "columns": columns(colour={"kind": "category", "values": ["${data.n}", "???"]})}
    (table / "schema.yaml").write_text(yaml.safe_dump(content))
    dpexp_job("--cfg", "job", *CSV)
    shown = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (shown["n"], shown["shape"]) == (240, [4]) and shown["module"]["columns"] == content["columns"]


def test_a_job_that_is_only_checked_leaves_nothing(table, dpexp_job, capsys):
    dpexp_job(*CSV, *QUICK, "check=true", "hydra.run.dir=checked")
    printed = capsys.readouterr().out
    assert "Nothing was released" in printed and "protects a record of train.csv; test records are not" in printed
    assert [path.name for path in (table / "checked").iterdir()] == [".hydra"] and not (table / "outputs").exists()


def test_metrics_of_a_whole_test_set_are_those_of_sklearn():
    scores, y = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    scores[torch.arange(200), y] += 1
    p, numbers = scores.softmax(1).numpy(), torch.linspace(-1, 1, 200)
    confidence, right = p.max(1), p.argmax(1) == y.numpy()
    bins = [(confidence * 15).astype(int) == k for k in range(15)]
    expected = {
        "test_auc": roc_auc_score(y, p, multi_class="ovr"), "test_macro_f1": f1_score(y, p.argmax(1), average="macro"),
        "test_calibration_error": sum(abs(confidence[one].sum() - right[one].sum()) for one in bins) / 200,
        "test_r2": r2_score(numbers, numbers + scores[:, 0] / 9),
    }  # fmt: skip
    found = _metrics_of_all(scores, y) | _metrics_of_all(numbers + scores[:, 0] / 9, numbers)
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, abs=1e-5)


def test_any_path_works_in_all_commands(table, dpexp_job, capsys, monkeypatch):
    name = 'it\'s "ü" (1) a,b=[c] $x; ~#& {a}'
    paths = {key: f"{name} {key}.csv" for key in ("train", "test", "out")} | {"schema": f"{name}.yaml"}
    here = table / "what? 50%20 #1 ü"
    here.mkdir()
    monkeypatch.chdir(here)
    for key in ("train", "test"):
        (table / f"{key}.csv").rename(paths[key])
    schema([f"data.path={paths['train']}", f"out={paths['schema']}", "unsafe=true"])
    dpexp_job(*CSV, *QUICK, f"data.path={paths['train']}", f"data.test_path={paths['test']}", f"hydra.run.dir={name}",
              f"data.schema={paths['schema']}", f"data.id={name}")  # fmt: skip
    ledger = read_ledger(here / name / "ledger.jsonl")
    assert len(ledger) == 3 and "without noise" in ledger.not_private_reason  # the schema's ranges
    dpexp_job("predict", name, paths["test"], f"out={paths['out']}")
    assert len(pd.read_csv(here / paths["out"])) == 60
    for command in ("evaluate", "account"):
        dpexp_job(command, name)
    dpexp_job("account", f"data.id={name}")
    command = next(line for line in capsys.readouterr().out.splitlines() if "mlflow ui" in line)
    assert shlex.split(command.partition(", then")[0])[-1].endswith("/outputs/mlflow.db")
    assert {path.name for path in here.glob("outputs/*")} >= {"mlflow.db", "mlartifacts"}
    assert {path.name for path in table.iterdir()} == {here.name, "schema.yaml"}


WRONG_SCHEMAS = [
    (f"columns: {COLUMNS}", "rows=None must be the published number"),
    (f"rows: 0\ncolumns: {COLUMNS}", "rows=0 must be"),
    ("- 1", "has no columns"),
    ("a: [", "cannot be read"),
    (f"rows: 9\nreleased: {{ranges: 1}}\ncolumns: {COLUMNS}", "is no longer accounted for; fill in public facts"),
]
WRONG_COLUMNS = [
    ("age: {kind: number, min: null, max: 1}", "columns.age: min must be filled in"),
    ("age: {kind: number, min: 0, max: null, thousands: null}", "age: max and thousands must be filled"),
    ("age: {kind: number, min: 0, max: 9, unit: 5€}", "age: unit=5€ must be a word or a sign"),
    ("age: {kind: number, min: 0, max: 9, negative: '-'}", "and negative, if given, ()"),
    ("age: {kind: number, min: 2, max: 1}", "min=2 and max=1 must be numbers"),
    ("age: {kind: number, min: 0, max: .inf}", "must be numbers"),
    ("age: {kind: integer}", "columns.age.kind=integer must be one of number, category, date, ignored"),
    ("age: {kind: number, min: 0, max: 9, thousands: .}", "decimal=. and thousands=. must be two signs"),
    ("age: {kind: number, min: 0, max: 9, decimal: '5'}", "decimal=5 and thousands= must be two signs"),
    ("age: {kind: date, min: 2020-01-01, max: 2020-12-31, format: null}", "columns.age: format must be filled in"),
    ("age: {kind: date, min: 2021, max: 2020-12-31}", "min=2021 and max=2020-12-31 must be dates"),
    ("colour: {kind: category}", "columns.colour: values must be filled in"),
    ("colour: {kind: category, values: red}", "must be a list of texts"),
    ("colour: {kind: category, values: [[1]]}", "must be a list of texts"),
    ("colour: {kind: category, values: [1.0, '1']}", "must be different texts"),
    ("ill: {kind: category, values: ['no']}", "at least two different texts"),
    ("ill: {kind: ignored}", "columns.ill.kind=ignored must be number or category."),
    ("{age: {kind: ignored}, colour: {kind: ignored}}", "all columns but the target are ignored"),
]


def schema_with(changed):
    return yaml.safe_dump({"rows": 9, "columns": columns(**yaml.safe_load(changed))})


def test_all_that_is_open_in_a_schema_is_said_at_once_with_cells_of_the_test_file(table):
    rows(9).assign(age="private", colour="private").to_csv("train.csv", index=False)
    rows(9).assign(age="1,5", colour="rouge", name="bob").to_csv("test.csv", index=False)
    number, other = {"kind": "number", "min": None, "max": None}, {"kind": "number", "min": 0, "max": 9}
    path = written(table, COLUMNS | {"age": number, "name": other, "none": {"kind": "category"}})
    path.write_text(path.read_text().replace("rows: 9", "rows:"))
    with pytest.raises(ConfigError) as raised:
        facts_of(str(path), "ill", "row", "test.csv")
    assert str(raised.value) == (
        f"{path}: rows= must be the published number of training rows; columns.age: min and max must be filled in "
        "('1,5' in test.csv); in no row is colour one of red, blue, but 'rouge'; in no row is name a number, but 'bob';"
        " columns.none: values must be filled in. Correct it from public knowledge, not from the rows."
    )


def test_an_id_has_no_range_and_words_of_a_schema_are_texts(table):
    path = table / "words.yaml"
    path.write_text(
        "rows: 9\npersons: 3\nunsafe: false\ncolumns:\n  name: {kind: number, min: null, max: null}\n"
        "  2021: {kind: number, min: -1, max: 1.5, decimal: ',', unit: kr., negative: ()}\n"
        "  no: {kind: category, values: [01067, yes, 1.10, null, 2020-01-31, U\u0308]}\n"
        "  ill: {kind: category, values: [false, TRUE]}\n"
    )
    found = facts_of(str(path), "ill", "name")
    assert (found["n"], found["users"], found["unsafe"]) == (9, 3, False)
    columns = found["columns"]
    assert columns["name"] == {"kind": "ignored"} and (columns["2021"]["min"], columns["2021"]["max"]) == (-1, 1.5)
    assert columns["no"]["values"] == ["01067", "yes", "1.10", "null", "2020-01-31", "Ü"]
    assert columns["ill"]["values"] == ["False", "True"]


@pytest.mark.parametrize(
    "content, said", [*WRONG_SCHEMAS, *((schema_with(changed), said) for changed, said in WRONG_COLUMNS)]
)
def test_a_mistake_in_a_schema_is_named(tmp_path, content, said):
    path = tmp_path / "schema.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"schema\.yaml") as raised:
        facts_of(str(path), "ill", "row")
    assert said in str(raised.value)


LINES = rows(6).to_csv(index=False)
WRONG_TABLES = [
    ("", "cannot be read: No columns"),
    (LINES.splitlines()[0], "in no row is ill one of no, yes"),
    (LINES.replace("age", "years"), "has no column age, which data.schema names"),
    (LINES.replace("ill", "sick"), "has no column ill, which data.target names"),
    (LINES.replace("name", "age"), "each column must have a name of its own, and age occurs twice"),
    (LINES.replace("name", ""), "each column must have a name of its own, and one has no name"),
    (LINES.replace("red", "Red").replace("blue", "Blue"), "in no row is colour one of red, blue"),
    (
        rows(6).assign(age="1,5", colour="").to_csv(index=False),
        "in no row is age a number, but '1,5'; in no row is colour one of red, blue, but all are missing; correct",
    ),
    (LINES + "1,red,n,yes,more\n", "Expected 4 fields"),
    (LINES.replace("ill\n", "ill\n1,red,n,yes,more\n"), "Expected 4 fields in line 2, saw 5"),
    (LINES + '1,"red,n,yes\n', "cannot be read: "),
    (LINES.encode("utf-16"), "is not in UTF-8; convert it, as by iconv -f utf-16 -t utf-8."),
    (b"\xfe\xff" + LINES.encode("utf-16-be"), "iconv -f utf-16 -t"),
    (LINES.replace("red", "rouge é").encode("latin1"), "convert it, as by iconv -f windows-1252 -t utf-8."),
    (b"PAR1 no parquet", "has no column age"),
]


@pytest.mark.parametrize(
    "name, lines, other",
    [
        ("a.csv", ['num;cat;x 5"', "1;b;2", "2;c;3"], 'a"b,,,,,,,'),
        ("a.csv", ['num;"c, d"', "1;b", "2;c"], '"x,y,z";,,,'),
        ("a.jsonl", ['{"num": 1}', '{"num": 2}'], "\udcff\udcfe"),
    ],
)
def test_no_record_changes_how_a_file_is_read(tmp_path, name, lines, other):
    read = []
    for changed in (lines, [*lines[:-2], other, lines[-1]]):
        (tmp_path / name).write_bytes("\n".join(changed).encode("utf-8", "surrogateescape"))
        read.append(rows_of("data.path", str(tmp_path / name), named={"num": "data.schema"}))
    assert read[0].columns.equals(read[1].columns) and len(read[0]) == len(read[1]) == 2
    assert read[0].iloc[-1].equals(read[1].iloc[-1])


@pytest.mark.parametrize("content, said", WRONG_TABLES, ids=[said for _, said in WRONG_TABLES])
def test_a_table_that_does_not_fit_its_schema_is_refused(table, content, said):
    (table / "test.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"data\.test_path=test\.csv") as raised:
        _ = of().train_dataloader()
    assert said in str(raised.value)


REFUSED = [
    ("data.path=none.csv", "data.path=none.csv cannot be read: No such file"),
    ("data.path=none.parquet", "data.path=none.parquet cannot be read: No such file"),
    ("data.schema=none.yaml", "data.schema=none.yaml cannot be read: No such file"),
    ("data.target=sick", "data.target=sick is no column of schema.yaml"),
    ("data.person=id", "data.person=id is no column of schema.yaml"),
    ("data.person=null", "data.person must be given"),
    ("data.test_path=null", "data.test_path or data.test_hash must be given"),
    ("data.test_path=null data.test_hash={column:name,fraction:2}", "data.test_hash="),
    ("data.person=name", "data.person=name"),
]
REFUSED_JOBS = [  # with other options, or refused when the table is read
    ("data=csv", "data.schema must be given"),
    ("data.path=none.csv model=cnn", "data.path=none.csv cannot be read: No such file"),
    ("data.test_path=none.csv model=cnn", "data.test_path=none.csv cannot be read: No such file"),
    ("data.test_path=null data.test_hash={column:id,fraction:0.5}", "train.csv has no column id"),
    ("data.test_path=null data.test_hash={column:age,fraction:0.5} data.person=name privacy_unit=user",
     "data.test_hash.column=age must be the person, name"),
    ("model=cnn", "model=cnn takes images"),
]  # fmt: skip


@pytest.fixture(scope="module")
def options():
    return composed([*CSV, *QUICK, "tracking=none"])


@pytest.mark.parametrize("overrides, said", REFUSED)
def test_options_of_a_table_are_refused_in_one_sentence(table, options, overrides, said):
    assert said in refusal_of(options, overrides.split(), table)


@pytest.mark.parametrize("overrides, said", REFUSED_JOBS)
def test_a_job_on_a_table_is_refused_in_one_sentence(table, dpexp_job, overrides, said):
    given = [] if overrides == "data=csv" else [*CSV, *QUICK]
    with pytest.raises((SystemExit, ConfigError)) as raised:
        dpexp_job(*given, "tracking=none", *overrides.split())
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not [*table.glob("outputs/*/*/ledger.jsonl")] or not read_ledger(*table.glob("outputs/*/*/ledger.jsonl"))
