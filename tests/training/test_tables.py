"""Tables of one's own: schemas, encoding, private release of a schema's facts, training, prediction."""

import json
import math

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from sklearn.metrics import f1_score, r2_score, roc_auc_score

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.saved_jobs import predict
from dpexp.commands.schema import schema
from dpexp.errors import ConfigError
from dpexp.privacy.table_ranges import TableRanges
from dpexp.training.classifier import _metrics_of_all
from dpexp.training.data import Table
from dpexp.training.data.tables import facts_of

COLUMNS = {
    "age": {"kind": "number", "min": 0, "max": 100},
    "colour": {"kind": "category", "values": ["red", "blue"]},
    "name": {"kind": "ignored"},
    "ill": {"kind": "category", "values": ["no", "yes"]},
}
CSV = ("data=csv", "data.path=train.csv", "data.test_path=test.csv", "data.schema=schema.yaml", "data.target=ill",
       "data.person=row", "model=logistic", "trainer.num_evaluations=0")  # fmt: skip
QUICK = ("privacy.noise_multiplier=1.0", "sampling.steps=3", "sampling.sampling_rate=0.3")


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


def of(columns=COLUMNS, path="train.csv", target="ill", person="row", test="test.csv"):
    return Table(path, columns, target, person, test)


def output_of(folder):
    return max((path.parent for path in folder.glob("outputs/*/*/result.json")), key=lambda path: path.name)


def test_values_are_encoded_by_public_facts_alone(table):
    x = of().encode(
        pd.DataFrame({"age": ["25", "", "x", "130", "inf"], "colour": ["red", "blue", " red", "", "green"]})
    )
    expected = [[-0.5, 0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert x.tolist() == expected


def test_each_row_is_encoded_by_itself(table):
    data, inputs = of(), of().read_inputs(table / "train.csv")
    for k in range(0, 240, 17):
        assert data.encode(inputs.iloc[[k]]).tolist() == data.train.tensors[0][[k]].tolist()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_without_a_target_contribute_nothing(table, suffix):
    some = rows(5).assign(ill=["yes", None, "maybe", "no", " yes"])
    some.to_csv("some.csv", index=False) if suffix == "csv" else some.to_parquet("some.parquet")
    assert of(path=f"some.{suffix}").train.tensors[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("target", ["ill", "age"])
def test_a_null_in_a_parquet_file_changes_no_other_row(table, target):
    """pandas makes a column of integers one of floats if a value is missing."""
    facts = {
        "age": {"kind": "number", "min": 0, "max": 100},
        "ward": {"kind": "category", "values": [0, 1, 2]},
        "ill": {"kind": "category", "values": ["0", "1"]},
    }
    facts = facts_of(str(written(table, facts)), target, "row")["columns"]
    some = pd.DataFrame({"age": [30, 40, 50], "ward": [0, 1, 2], "ill": [1, 0, 1]})
    odd = {"age": [None, 1e308], "ward": [None, 7], "ill": [None, 1]}
    some.to_parquet("some.parquet")
    pd.concat([some.astype("Int64"), pd.DataFrame(odd, dtype=object).astype("Float64")]).to_parquet("odd.parquet")
    left, right = (of(facts, path, target).train.tensors for path in ("some.parquet", "odd.parquet"))
    assert len(left[0]) == 3 and all(torch.equal(a, b[:3]) for a, b in zip(left, right, strict=True))
    new = pd.DataFrame({"age": [30.0, None], "ward": [1.0, None], "ill": [True, None]})  # as pandas reads a CSV file
    assert torch.equal(of(facts, target=target).encode(new[:1]), left[0][:1] * 0 + of(facts, target=target).encode(
        pd.DataFrame({"age": ["30"], "ward": ["1"], "ill": ["True"]})))  # fmt: skip


def written(folder, columns):
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump({"rows": 9, "columns": columns}))
    return path


def test_a_person_is_in_one_part_however_the_name_is_written(table):
    some = rows(240).assign(name=lambda t: t["name"] + np.where(t.index % 2, "", " "))
    some.to_csv("train.csv", index=False)
    data = Table("train.csv", COLUMNS, "ill", "name", test_hash={"column": "name", "fraction": 0.3})
    parts = [{*pd.concat(data._split("data.path", "train.csv", side))["name"].str.strip()} for side in (True, False)]
    assert all(parts) and parts[0].isdisjoint(parts[1])


@pytest.mark.parametrize("kind", ["int64", "float64", "string"])
def test_ids_that_are_missing_move_no_other_row_across(table, kind):
    ids = pd.Series(range(400), dtype="Int64")
    some = pd.concat([rows(400).assign(name=ids.astype(kind)), rows(1).assign(name=pd.NA)])
    sides = []
    for table_ in (some[:400], some):
        table_.to_parquet("train.parquet")
        data = Table("train.parquet", COLUMNS, "ill", "row", test_hash={"column": "name", "fraction": 0.3})
        sides.append(pd.concat(data._split("data.path", "train.parquet", True)).reset_index(drop=True)["age"].tolist())
    assert sides[0] == sides[1][: len(sides[0])] and 80 < len(sides[0]) < 160


def test_a_delimiter_and_a_byte_order_mark_are_recognised(table):
    (table / "semi.csv").write_bytes(b"\xef\xbb\xbf" + rows(9).to_csv(index=False, sep=";").encode())
    assert torch.equal(of(path="semi.csv").train.tensors[0], of().encode(rows(9)))


def test_test_rows_are_chosen_by_a_hash_so_that_a_row_moves_no_other(table):
    def names_in_test(count):
        data = Table("train.csv", COLUMNS, "ill", "name", test_hash={"column": "name", "fraction": 0.3})
        rows(240).iloc[240 - count :].to_csv("train.csv", index=False)
        users = {*data.train.user_of.tolist()}
        return len(users), len(data.test), {*next(data._split("data.path", "train.csv", True))["name"]}

    (users, tested, names), (fewer_users, fewer_tested, fewer) = names_in_test(240), names_in_test(237)
    assert (users - fewer_users, tested - fewer_tested) in {(1, 0), (0, 3)}
    assert names - {"n0"} == fewer - {"n0"} and 10 < len(names) < 40


def test_a_table_trains_is_registered_and_predicts_raw_rows(table, dpexp_job):
    dpexp_job(*CSV, "privacy.epsilon=8", "sampling.expected_batch_size=120", "sampling.steps=60", "optimizer.lr=4")
    output = output_of(table)
    result = json.loads((output / "result.json").read_text())
    assert result["metrics"]["test_accuracy"] > 0.7 and result["metrics"]["test_auc"] > 0.8
    new = rows(7, seed=2).drop(columns="ill")
    new.to_csv("new.csv", index=False)
    found = predict([str(output), "new.csv"])
    assert [*pd.read_csv("predictions.csv")] == [*new, "prediction", "p_no", "p_yes"] == [*found]
    served = mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(new)
    np.testing.assert_allclose(served[["p_no", "p_yes"]].to_numpy(), found[["p_no", "p_yes"]].to_numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["p_no"] + found["p_yes"], 1, rtol=1e-6)
    assert [*served["prediction"]] == [("no", "yes")[int(p > 0.5)] for p in served["p_yes"]]


def test_numbers_are_predicted_in_their_own_unit(table, dpexp_job):
    dpexp_job(*CSV, *QUICK, "data.target=age", "sampling.steps=60", "optimizer.lr=0.1",
              "privacy.enabled=false")  # fmt: skip
    output = output_of(table)
    assert json.loads((output / "result.json").read_text())["metrics"]["test_r2"] > 0.2
    found = predict([str(output), "test.csv"])
    assert np.corrcoef(found["prediction"], found["age"].astype(float))[0, 1] > 0.5 and found["prediction"].mean() > 20


@pytest.mark.parametrize("person", ["row", "name"])
def test_a_row_or_a_person_more_moves_the_released_sum_by_at_most_s(table, dpexp_job, person):
    content = {"rows": 240, "persons": 80, "columns": COLUMNS}
    unit = ("privacy_unit=user",) if person == "name" else ()
    if person == "row":
        content["released"] = {"ranges": 1, "noise_multiplier": 3.0}
    (table / "schema.yaml").write_text(yaml.safe_dump(content))
    weights = []
    for first in (0, 1 if person == "row" else 3):
        rows(240).iloc[first:].to_csv("train.csv", index=False)
        dpexp_job(*CSV, f"data.person={person}", *unit, "privacy.noise_multiplier=1e-6", "privacy.noise_seed=1",
                  "sampling.sampling_rate=1.0", "sampling.steps=1", "optimizer.lr=1", "optimizer.momentum=0",
                  "sampling.expected_batch_size=null", "tracking=none", "privacy.delta=1e-5",
                  f"hydra.run.dir=out{first}")  # fmt: skip
        weights.append(load_file(table / f"out{first}" / "weights.safetensors"))
    moved = math.sqrt(sum(float((weights[0][name] - weights[1][name]).double().square().sum()) for name in weights[0]))
    n = 240 if person == "row" else 80
    assert 0.01 < moved * n <= 1.0001


def test_a_released_schema_begins_the_ledger_of_each_job_with_it(table, dpexp_job):
    schema(["data.path=train.csv", "out=mine.yaml"])
    content = schema(["data.path=train.csv", "data.schema=mine.yaml", "epsilon=0.5"])
    before = read_ledger(table / "mine.ledger.jsonl")
    with pytest.raises(ConfigError, match="epsilon needs"):
        schema(["data.path=train.csv", "epsilon=0.5"])
    assert epsilon(before, 1e-6) == pytest.approx(0.5, rel=1e-4) and epsilon(before, 1e-6) <= 0.5
    assert abs(content["rows"] - 240) < 80 and content["columns"]["ill"]["values"] is None
    content["columns"] = COLUMNS | {"age": content["columns"]["age"]}
    (table / "mine.yaml").write_text(yaml.safe_dump(content))
    dpexp_job(*CSV, "data.schema=mine.yaml", "sampling.steps=3", "privacy.delta=1e-5", "sampling.sampling_rate=0.2")
    ledger = read_ledger(output_of(table) / "ledger.jsonl")
    (ours,), (theirs,) = ([r.one_time_query for r in one.rounds if r.one_time_query] for one in (ledger, before))
    assert (ours.S, ours.scale, ours.query) == (theirs.S, theirs.scale, "schema")
    assert abs(ours.S - 2**0.5) < 1e-12
    assert 2.9 < epsilon(ledger, 1e-5) <= 3


def test_a_row_moves_the_counts_of_a_release_by_its_sensitivity():
    random, step = np.random.default_rng(0), TableRanges(3, noise_multiplier=1.0)
    values = random.normal(size=(3, 50)) * 10.0 ** random.integers(-4, 12, (3, 50))
    values[0, :5] = [math.nan, math.inf, 0, -1, 1e300]
    total = step.sums_of([*values], 50)
    for k in range(49):
        less = step.sums_of([*np.delete(values, k, 1)], 49)
        other = step.sums_of([*np.delete(values, k + 1, 1)], 49)
        assert (total - less).norm() <= step.S + 1e-9 and (less - other).norm() <= step.replace_sensitivity + 1e-9
    assert step.ranges(step.sums_of([np.full(50, 37.0), np.full(50, -3.0), np.zeros(50)], 50), 1.0) == [
        (32.0, 64.0), (-4.0, -2.0), (0.0, 2.0**-10),
    ]  # fmt: skip


def test_a_new_schema_is_empty_and_one_of_the_rows_is_not_private(table, dpexp_job):
    content = schema(["data=csv", "data.path=train.csv", "out=empty.yaml"])
    assert content["rows"] is None and content["columns"]["age"] == {"kind": "number", "min": None, "max": None}
    assert content["columns"]["colour"] == {"kind": "category", "values": None}
    with pytest.raises(ConfigError, match="exists already"):
        schema(["data.path=train.csv", "out=empty.yaml"])
    filled = schema(["data.path=train.csv", "out=clear.yaml", "unsafe=true"])
    assert filled["rows"] == 240 and filled["columns"]["colour"]["values"] == ["blue", "red"]
    dpexp_job(*CSV, *QUICK, "data.schema=clear.yaml")
    assert json.loads((output_of(table) / "result.json").read_text())["private"] is False


def test_a_job_that_is_only_checked_leaves_nothing(table, dpexp_job, capsys):
    dpexp_job(*CSV, *QUICK, "check=true", "hydra.run.dir=checked")
    printed = capsys.readouterr().out
    assert "Nothing was released" in printed and "protects a record of train.csv; test records are not" in printed
    assert [path.name for path in (table / "checked").iterdir()] == [".hydra"] and not (table / "outputs").exists()


def test_metrics_of_a_whole_test_set_are_those_of_sklearn():
    scores, y = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    scores[torch.arange(200), y] += 1
    found, p = _metrics_of_all(scores, y), scores.softmax(1).numpy()
    assert float(found["test_auc"]) == pytest.approx(roc_auc_score(y, p, multi_class="ovr"), abs=1e-5)
    assert float(found["test_f1"]) == pytest.approx(f1_score(y, p.argmax(1), average="macro"), abs=1e-5)
    confidence, right = p.max(1), p.argmax(1) == y.numpy()
    bins = np.minimum((confidence * 15).astype(int), 14)
    error = sum(abs(confidence[bins == k].sum() - right[bins == k].sum()) for k in range(15)) / 200
    assert float(found["test_calibration_error"]) == pytest.approx(error, abs=1e-5)
    numbers = torch.linspace(-1, 1, 200)
    assert float(_metrics_of_all(numbers + scores[:, 0] / 9, numbers)["test_r2"]) == pytest.approx(
        r2_score(numbers, numbers + scores[:, 0] / 9), abs=1e-5
    )


def columns(**changed):
    return COLUMNS | changed


WRONG_SCHEMAS = [
    ({"columns": COLUMNS}, "rows=None must be the published number"),
    ({"rows": 0, "columns": COLUMNS}, "rows=0 must be"),
    ({"rows": 9.5, "columns": COLUMNS}, "rows=9.5 must be"),
    ({"rows": 9}, "has no columns"),
    ("- 1", "has no columns"),
    ("a: [", "cannot be read"),
    ({"rows": 9, "columns": columns(age={"kind": "number", "min": None, "max": 1})}, "columns.age.min is empty"),
    ({"rows": 9, "columns": columns(age={"kind": "number", "min": 2, "max": 1})}, "min=2 and max=1 must be numbers"),
    ({"rows": 9, "columns": columns(age={"kind": "number", "min": "a", "max": 1})}, "must be numbers"),
    ({"rows": 9, "columns": columns(age={"kind": "number", "min": 0, "max": math.inf})}, "must be numbers"),
    (
        {"rows": 9, "columns": columns(age={"kind": "integer"})},
        "columns.age.kind=integer must be one of number, category, ignored",
    ),
    ({"rows": 9, "columns": columns(age=None)}, "columns.age.kind=None"),
    ({"rows": 9, "columns": columns(colour={"kind": "category"})}, "columns.colour.values is empty"),
    ({"rows": 9, "columns": columns(colour={"kind": "category", "values": []})}, "must be different texts"),
    ({"rows": 9, "columns": columns(colour={"kind": "category", "values": "red"})}, "must be a list of texts"),
    ({"rows": 9, "columns": columns(colour={"kind": "category", "values": [True]})}, "quote yes, no"),
    ({"rows": 9, "columns": columns(colour={"kind": "category", "values": [1, "1"]})}, "must be different texts"),
    ({"rows": 9, "columns": columns(ill={"kind": "category", "values": ["no"]})}, "at least two different texts"),
    ({"rows": 9, "columns": columns(ill={"kind": "ignored"})}, "columns.ill.kind=ignored must be number or category."),
    ({"rows": 9, "columns": {"ill": COLUMNS["ill"]}}, "all columns but the target are ignored"),
]


@pytest.mark.parametrize("content, said", WRONG_SCHEMAS, ids=[said for _, said in WRONG_SCHEMAS])
def test_a_mistake_in_a_schema_is_named(tmp_path, content, said):
    path = tmp_path / "schema.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"schema\.yaml") as raised:
        facts_of(str(path), "ill", "row")
    assert said in str(raised.value)


LINES = rows(6).to_csv(index=False)
WRONG_TABLES = [
    ("", "is empty"),
    (LINES.splitlines()[0], "has no row whose ill is one of no, yes"),
    (LINES.replace("age", "years"), "has no column age, which data.schema names; its columns are years"),
    (LINES.replace("ill", "sick"), "has no column ill, which data.target names"),
    (LINES.replace("name", "age"), "each column must have a name of its own, and age occurs twice"),
    (LINES.replace("name", ""), "each column must have a name of its own, and one has no name"),
    (LINES.replace("yes", "1").replace("no", "0"), "has no row whose ill is one of no, yes"),
    (LINES.replace("red", "Red").replace("blue", "Blue"), "in no row is colour one of red, blue"),
    (pd.DataFrame(rows(6)).assign(age="1,5").to_csv(index=False), "in no row is age a number, as 1.5"),
    (LINES + "1,red,n,yes,more\n", "Expected 4 fields"),
    (LINES + '1,"red,n,yes\n', "cannot be read as a table"),
    (LINES.encode("utf-16"), "is not in UTF-8"),
    (LINES.replace("red", "rouge é").encode("latin1"), "is not in UTF-8"),
    (b"PAR1 no parquet", "has no column age"),
    (LINES.replace(",", " "), "has no column age"),
]


@pytest.mark.parametrize("content, said", WRONG_TABLES, ids=[said for _, said in WRONG_TABLES])
def test_a_table_that_does_not_fit_its_schema_is_refused(table, content, said):
    (table / "test.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"data\.test_path=test\.csv") as raised:
        _ = of().train_dataloader()
    assert said in str(raised.value)


REFUSED = [
    (["data=csv"], "data.schema must be given"),
    (["data.path=none.csv"], "data.path=none.csv cannot be read as a table: No such file"),
    (["data.path=none.parquet"], "data.path=none.parquet cannot be read as a table: Failed to open"),
    (["data.schema=none.yaml"], "data.schema=none.yaml cannot be read: No such file"),
    (["data.target=sick"], "data.target=sick is no column of schema.yaml"),
    (["data.person=id"], "data.person=id is no column of schema.yaml"),
    (["data.person=null"], "data.person must be given"),
    (["data.test_path=null"], "data.test_path or data.test_hash must be given"),
    (["data.test_path=null", "data.test_hash={column: id, fraction: 0.5}"], "data.test_hash.column=id is no column"),
    (["data.test_path=null", "data.test_hash={column: name, fraction: 2}"], "data.test_hash="),
    (["data.test_path=null", "data.test_hash={column: age, fraction: 0.5}", "data.person=name", "privacy_unit=user"],
     "data.test_hash.column=age must be the person, name"),
    (["data.person=name"], "data.person=name"),
    (["model=cnn"], "model=cnn takes images"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, said", REFUSED, ids=[said for _, said in REFUSED])
def test_a_job_on_a_table_is_refused_in_one_sentence(table, dpexp_job, overrides, said):
    given = ["data=csv"] if overrides == ["data=csv"] else [*CSV, *QUICK, *overrides]
    with pytest.raises((SystemExit, ConfigError)) as raised:
        dpexp_job(*given)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not [*table.glob("outputs/*/*/ledger.jsonl")] or not read_ledger(*table.glob("outputs/*/*/ledger.jsonl"))
