"""`python -m dpexp report`: the page."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.report import report
from dpexp.errors import ConfigError
from dpexp.reporting.wording import up
from dpexp.tracking import read

QUICK = ("model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "privacy.noise_multiplier=2")


class Tables(HTMLParser):
    """The page's tables, as rows of texts."""

    def __init__(self, page):
        super().__init__()
        self.tables, self._cell = [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self._cell = ""

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.tables[-1][-1].append(self._cell)
            self._cell = None


def records(table):
    return [dict(zip(table[0], row, strict=True)) for row in table[1:]]


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Of the store that `report` reads by default."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir(exist_ok=True)
    return MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")


def test_the_page_shows_the_runs_and_stands_alone(dpexp_job, client, tmp_path):
    jobs = {
        (mechanism, seed): dpexp_job(*QUICK, f"mechanism={mechanism}", f"seed={seed}", f"privacy.noise_seed={seed}")
        for mechanism, seed in [("separate", 0), ("separate", 1), ("joint", 0)]
    }
    dpexp_job(*QUICK[:-1], "privacy.enabled=false")
    runs = client.search_runs(["1"])
    parent = client.create_run("1", run_name="a & b")
    client.log_metric(parent.info.run_id, "selection/all_runs_epsilon", 12.5)
    failed = client.create_run("1", run_name="<script>alert(1)</script>", tags={"dpexp.error": "q < 0 & so on"})
    client.set_terminated(failed.info.run_id, "FAILED")
    for run in [*runs, failed]:
        client.set_tag(run.info.run_id, "mlflow.parentRunId", parent.info.run_id)

    path = report([parent.info.run_id])
    assert path == Path("outputs/report/report.html")
    page = path.read_text()
    assert not re.search(r"https?:|<script|<link|url\(", page) and set(re.findall(r'src="(\w+:)', page)) == {"data:"}
    inline = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', page)]
    files = [path.with_name(f"{name}.png") for name in ("accuracy", "noise", "shares", "epsilon", "accountants")]
    assert inline == [file.read_bytes() for file in files]

    trials, selection, best, accountants = (records(table) for table in Tables(page).tables)
    assert [row["status"] for row in trials].count("FINISHED") == 4 and len(trials) == 5
    assert trials[-1]["run"] == "<script>alert(1)</script>" and trials[-1]["error"] == "q < 0 & so on"
    accuracies = [float(row["test accuracy"][:-1]) for row in trials[:-1]]
    assert accuracies == sorted(accuracies, reverse=True)
    results = {key: json.loads((job / "result.json").read_text()) for key, job in jobs.items()}
    shown = {
        (row["mechanism"], int(row["seed"])): row for row in trials if row["private"] == "no: the noise seed is known"
    }
    for key, result in results.items():
        assert shown[key]["test accuracy"] == f"{result['metrics']['test_accuracy']:.2%}"
        assert shown[key]["ε"] == up(result["epsilon"]["pld"], 4) and shown[key]["noise multiplier z"] == "2"
    assert [list(row.values()) for row in selection] == [["all trials composed: covers any choice among them", "12.5"]]
    means = {
        mechanism: np.mean([r["metrics"]["test_accuracy"] for (m, _), r in results.items() if m == mechanism])
        for mechanism in ("separate", "joint")
    }
    winner = max(means, key=means.get)
    assert best[0]["configuration"] == f"mechanism={winner}"
    assert best[0]["test accuracy"] == f"{means[winner]:.2%}" and "the only other" in best[0]["certainty"]
    assert (
        f"Best on digits: mechanism={winner} ({best[0]['certainty']}), with test accuracy {means[winner]:.2%}" in page
    )
    spent = read_ledger(jobs["joint", 0] / "ledger.jsonl")
    assert [row["configuration"] for row in accountants] == ["all 2 configurations"]
    assert accountants[0]["rdp"] == up(epsilon(spent, 1e-4, "rdp"), 4)
    assert accountants[0]["gdp (approximation, no bound)"] == up(epsilon(spent, 1e-4, "gdp"), 4)
    assert "5 trials: 4 finished, 1 failed." in page and "Each ε is that of one trial by itself." in page
    assert "3 of the trials show more than their (ε, δ) covers" in page

    (damaged,) = (run for run in runs if run.data.tags.get("dpexp.mechanism") == "joint")
    left = Path(damaged.info.artifact_uri) / "ledger.jsonl"
    left.write_text(left.read_text().rpartition('{"line"')[0])
    page = report([f"out={tmp_path}/early"]).read_text()
    assert f"({damaged.info.run_id}) ends early, after {len(spent)} rounds." in page and "Left out" not in page
    left.write_text("{}\n")
    page = report([f"out={tmp_path}/again"]).read_text()
    left_out = re.findall(r"Left out: [^<]*", page)
    assert len(left_out) == 1, (left_out, trials)
    assert damaged.info.run_id in left_out[0] and "is not a dpexp ledger" in left_out[0]
    assert [row["configuration"] for row in records(Tables(page).tables[3])] == ["the only configuration"]


def test_sources_are_experiments_parents_and_runs(client, monkeypatch):
    uri = f"sqlite:///{Path.cwd()}/outputs/mlflow.db"
    experiment = client.create_experiment("mine")
    parent = client.create_run(experiment, tags={"dpexp.sweep_hash": "key"}).info.run_id
    empty = client.create_run(experiment, tags={"dpexp.sweep_hash": "other"}).info.run_id
    tags = {"dpexp.group": "flat", "mlflow.parentRunId": parent}
    children = [client.create_run(experiment, tags=tags).info.run_id for _ in range(3)]
    single = client.create_run(experiment, tags={"dpexp.group": "flat"}).info.run_id
    params = {"privacy.delta": "1e-06", "calibrate": "steps", "accountant.names": '["rdp"]', "tracking.uri": "x"}
    for k, run_id in enumerate(children):
        for key, value in (params | {"seed": str(k), "optimizer.lr": str(k // 2)}).items():
            client.log_param(run_id, key, value)
    client.log_metric(children[1], "test_accuracy", 0.5)
    client.log_metric(children[2], "test_accuracy", 0.75)
    client.log_metric(children[1], "steps", 70)
    monkeypatch.setattr(read, "PAGE", 2)
    frame = read.trials(uri, [parent])
    assert list(frame["run_id"]) == [children[2], children[1], children[0]]
    assert set(frame["parent_id"]) == {parent} and set(frame["accountant"]) == {"rdp"} and set(frame["delta"]) == {1e-6}
    assert frame["knob_value"].tolist()[1] == 70 and math.isnan(frame["test_accuracy"][2])
    configuration = frame.set_index("seed")["configuration"]
    assert configuration["0"] == configuration["1"] != configuration["2"]
    assert set(read.trials(uri, ["mine"])["run_id"]) == {*children, single}
    assert set(read.trials(uri, [single, children[0]])["run_id"]) == {single, children[0]}
    assert read.trials(uri, [empty]).empty and list(read.trials(uri, [empty]).columns) == list(read.TRIAL)
    with pytest.raises(ConfigError, match=r"^there are no runs in .*, so there is nothing to report\.$"):
        report([empty])
    with pytest.raises(ConfigError, match=r"^dpexp is neither an experiment nor a run of sqlite[^\n]*$"):
        report([])
    with pytest.raises(ConfigError, match=r"^out=.* cannot be written \(.*\)\.$"):
        report(["mine", "out=outputs/mlflow.db"])
    page = report(["mine"]).read_text()  # nothing was ever released: a page without figures
    assert "No finished trial has both" in page and "<img" not in page


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "does not exist, so there are no runs"),
        (["outt=x"], "did you mean 'out'"),
        (["uri=x:y"], "uri=x:y cannot be"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^[^\n]*{message}[^\n]*$"):
        report(arguments)
    assert not list(tmp_path.iterdir())
