"""`python -m dpexp report`: the page, and the figures on it."""

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from dpexp.report import Spent, _costs, _groups, report
from mlflow import MlflowClient
from pandas import DataFrame

import dpexp
from dpexp import figures
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.bounds import Dimension
from dpexp.privacy.groups import conv_fc
from dpexp.privacy.mechanisms import Joint
from dpexp.report import Spent, _costs, _groups, report
from dpexp.showing.terminal import plan_json
from dpexp.tracking import read
from dpexp.training.models import cnn
from tests.test_accountants import ledger

QUICK = ("model=logistic", "sampling.steps=4", "trainer.evaluations=0", "privacy.noise_multiplier=2")


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
    client.log_metric(parent.info.run_id, "selection/all_composed", 12.5)
    failed = client.create_run("1", run_name="<script>alert(1)</script>", tags={"dpexp.error": "q < 0 & so on"})
    client.set_terminated(failed.info.run_id, "FAILED")
    for run in [*runs, failed]:
        client.set_tag(run.info.run_id, "mlflow.parentRunId", parent.info.run_id)

    path = report([parent.info.run_id])
    assert path == Path("outputs/report/report.html")
    page = path.read_text()
    assert not re.search(r"https?:|<script|<link|url\(", page) and set(re.findall(r'src="(\w+:)', page)) == {"data:"}
    inline = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', page)]
    files = [path.with_name(f"{name}.png") for name in ("frontier", "noise", "shares", "epsilon", "accountants")]
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
        assert shown[key]["ε"] == f"{result['epsilon']['pld']:.4g}" and shown[key]["noise multiplier z"] == "2"
    assert [list(row.values()) for row in selection] == [["all trials composed: covers any choice among them", "12.5"]]
    means = {
        mechanism: np.mean([r["metrics"]["test_accuracy"] for (m, _), r in results.items() if m == mechanism])
        for mechanism in ("separate", "joint")
    }
    winner = max(means, key=means.get)
    assert best[0]["configuration"] == f"flat · {winner} · proportional"
    assert best[0]["test accuracy"].startswith(f"{means[winner]:.2%}")
    spent = read_ledger(jobs["joint", 0] / "ledger.jsonl")
    assert {row["run"].split(" · ")[1] for row in accountants} == {"separate", "joint"}
    assert accountants[0]["rdp"] == f"{epsilon(spent, 1e-4, 'rdp'):.4g}"
    assert accountants[0]["gdp (approximation, no bound)"] == f"{epsilon(spent, 1e-4, 'gdp'):.4g}"
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
    assert [row["run"].split(" · ")[1] for row in records(Tables(page).tables[3])] == ["separate"]


def test_sources_are_experiments_parents_and_runs(client, monkeypatch):
    uri = f"sqlite:///{Path.cwd()}/outputs/mlflow.db"
    experiment = client.create_experiment("mine")
    parent = client.create_run(experiment, tags={"dpexp.sweep": "key"}).info.run_id
    empty = client.create_run(experiment, tags={"dpexp.sweep": "other"}).info.run_id
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


def frame(*rows):
    """Trials by hand: what a row does not say is as in the first line."""
    default = {
        "data": "digits", "model": "cnn", "group": "flat", "mechanism": "separate", "bound": "uniform",
        "allocation": "proportional", "sampling": "poisson", "status": "FINISHED", "private": "yes", "epsilon": 1.0,
        "test_accuracy": 0.5, "delta": 1e-5,
    }  # fmt: skip
    return DataFrame([default | {"run_id": str(k), "seed": str(k)} | row for k, row in enumerate(rows)])


TWIN = {"private": "no: trained without privacy", "epsilon": math.nan, "configuration": "twin"}


def test_configurations_are_means_over_seeds_of_what_finished():
    found = figures.configurations(
        frame(
            {"configuration": "a", "epsilon": 1.999, "test_accuracy": 0.8},
            {"configuration": "a", "epsilon": 2.001, "test_accuracy": 0.9},
            {"configuration": "b", "epsilon": 2.0, "test_accuracy": 0.7},
            {"configuration": "c", "epsilon": 8.0, "test_accuracy": 0.6},
            {"configuration": "c", "epsilon": 1.0, "test_accuracy": 0.99, "status": "KILLED"},
            TWIN,
        )
    ).set_index("configuration")
    assert found["epsilon"].to_dict() == pytest.approx({"a": 2.0, "b": 2.0, "c": 8.0})
    assert found["accuracy"].to_dict() == pytest.approx({"a": 0.85, "b": 0.7, "c": 0.6})
    assert found["spread"].to_dict() == pytest.approx({"a": 0.1 / math.sqrt(2), "b": 0.0, "c": 0.0})
    assert found["seeds"].to_dict() == {"a": 2, "b": 1, "c": 1}
    assert found["best"].to_dict() == {"a": True, "b": False, "c": True}


def test_the_frontier_joins_the_best_configurations_below_the_non_private_ceiling():
    rows = [
        {"configuration": f"{mechanism} {e} {lr}", "mechanism": mechanism, "epsilon": e, "test_accuracy": lr + e / 10}
        for mechanism in ("separate", "joint")
        for e in (1.0, 8.0)
        for lr in (0.1, 0.05)
    ]
    twins = [TWIN | {"test_accuracy": accuracy} for accuracy in (0.95, 0.97)]
    (axes,) = figures.frontier(frame(*rows, *twins)).axes
    drawn = {bar.get_label(): bar.lines[0].get_data() for bar in axes.containers}
    assert sorted(drawn) == ["flat · joint · proportional", "flat · separate · proportional"]
    for x, y in drawn.values():
        assert list(x) == [1.0, 8.0] and list(y) == pytest.approx([0.2, 0.9])
    pale = [line for line in axes.lines if line.get_alpha() == 0.3]
    assert [list(line.get_ydata()) for line in pale] == [pytest.approx([0.15, 0.85])] * 2
    (ceiling,) = (line for line in axes.lines if line.get_label() == "without privacy")
    assert list(ceiling.get_ydata()) == pytest.approx([0.96, 0.96])
    assert axes.get_xscale() == "log"


def test_many_lines_get_a_panel_a_group_and_say_what_else_differs():
    rows = [
        {"configuration": f"{group} {bound} {mechanism}", "group": group, "bound": bound, "mechanism": mechanism}
        for group in ("flat", "per_layer")
        for bound in ("uniform", "dimension")
        for mechanism in ("separate", "joint")
    ]
    figure = figures.frontier(frame(*rows, TWIN))
    assert [axes.get_title() for axes in figure.axes] == ["flat", "per_layer"]
    (legend,) = figure.legends
    labels = {text.get_text() for text in legend.get_texts()}
    assert len(labels) == 5 and "joint · proportional · bound=dimension" in labels
    assert figures.frontier(frame(TWIN)).axes[0].lines


def plan(**choices):
    made = dpexp.make_plan(cnn([1, 8, 8], 10), n=1000, q=0.1, steps=5, noise_multiplier=2.0, group=conv_fc(), **choices)
    return made, _groups(json.loads(plan_json(made)))


def test_noise_and_signal_per_coordinate():
    made, rows = plan()
    for group, row in zip(made.groups, rows, strict=True):
        assert row["noise"] == pytest.approx(group.sigma / 100)
        assert row["record"] == pytest.approx(group.S / 100 / math.sqrt(group.d))
        assert row["average"] == pytest.approx(100 * row["record"])
        assert row["noise"] / row["record"] == pytest.approx(2 * math.sqrt(group.d / row["share"]))
    made, rows = plan(mechanism=Joint(), bound=Dimension(1.0))
    for group, row in zip(made.groups, rows, strict=True):
        noise = sum(
            v.d * (alpha * group.sigma / 100) ** 2 for v, alpha in zip(group.vectors, group.alphas, strict=True)
        )
        assert group.d * row["noise"] ** 2 == pytest.approx(noise)
        assert row["record"] == pytest.approx(max(group.alphas) * group.S / 100 / math.sqrt(group.d))

    lines = [{"line": f"run {k}"} | row for k in range(3) for row in rows]
    (axes,) = figures.noise_and_signal(DataFrame(lines)).axes
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert texts == [text for k in range(3) for text in (f"run {k}", *(row["group"] for row in rows))]
    _, record, noises, _ = axes.collections
    assert record.get_offsets()[:, 0].tolist() == pytest.approx([row["record"] for row in lines])
    assert noises.get_offsets()[:, 1].tolist() == [k for k, text in enumerate(texts) if "run" not in text]
    (axes,) = figures.noise_and_signal(DataFrame([{"line": f"run {k}"} | rows[0] for k in range(90)])).axes
    assert axes.get_title() == "30 of 90 runs"


def test_shares_are_one_bar_a_grouping_and_allocation():
    def rows(line, allocation, *shares):
        return [
            {"line": line, "grouping": "conv_fc", "allocation": allocation, "group": group, "share": share}
            for group, share in zip(("conv", "fc"), shares, strict=True)
        ]

    bars = [*rows("a", "proportional", 0.5, 0.5), *rows("b", "proportional", 0.5, 0.5),
            *rows("c", "min_variance", 0.7, 0.3), *rows("d", "min_variance", 0.6, 0.4)]  # fmt: skip
    (axes,) = figures.budget_shares(DataFrame(bars)).axes
    assert {label.get_text() for label in axes.get_yticklabels()} == {"c", "d", "conv_fc · proportional"}
    widths = {}
    for patch in axes.patches:
        widths.setdefault(round(patch.get_y(), 6), []).append(patch.get_width())
    assert sorted(widths.values()) == [pytest.approx(pair) for pair in ([0.5, 0.5], [0.6, 0.4], [0.7, 0.3])]
    assert {"conv 60%", "fc 30%"} <= {text.get_text() for text in axes.texts}


def test_epsilon_over_rounds_draws_runs_that_cost_the_same_once():
    first, second = ledger(2.0, 0.05, 300), ledger(3.0, 0.05, 40)
    runs = {"a": (first, 1e-5, "pld"), "b": (ledger(2.0 + 1e-12, 0.05, 300), 1e-5, "pld"), "c": (second, 1e-5, "rdp")}
    figure = figures.epsilon_of_runs(runs)
    lines = {line.get_label(): line.get_data() for line in figure.axes[0].lines if line.get_marker() != "o"}
    assert list(lines) == ["a\nand 1 that cost the same", "c"]
    x, y = lines["c"]
    assert (x[0], y[0]) == (0, 0) and (x[-1], y[-1]) == (40, epsilon(second, 1e-5, "rdp"))
    assert y[1] == epsilon(ledger(3.0, 0.05, 1), 1e-5, "rdp")
    assert figure.axes[0].get_ylabel() == "ε at δ = 1e-05"
    many = {str(k): (ledger(2.0 + k, 1.0, 1), 1e-5, "pld") for k in range(15)}
    assert len(figures.epsilon_of_runs(many).legends[0].get_texts()) == 12


def test_every_accountant_that_has_a_bound_and_no_other():
    poisson = ledger(2.0, 0.05, 30)
    fixed = {replace(r, sampling=replace(r.sampling, policy="fixed_size")): c for r, c in poisson.rounds.items()}
    costs = DataFrame.from_dict(
        {
            "poisson": _costs(Spent(poisson, 1e-5, "pld")),
            "again": _costs(Spent(poisson, 1e-5, "pld")),
            "fixed": _costs(Spent(replace(poisson, adjacency="replace_one", rounds=fixed), 1e-5, "rdp")),
        },
        orient="index",
    )
    assert costs.loc["fixed"].dropna().index.tolist() == ["pld", "rdp"]
    assert costs.loc["poisson"].to_dict() == {name: epsilon(poisson, 1e-5, name) for name in costs.columns}
    (axes,) = figures.epsilon_by_accountant(costs).axes
    bars = {bar.get_label(): [patch.get_width() for patch in bar] for bar in axes.containers}
    assert bars["rdp"] == pytest.approx([costs["rdp"]["poisson"], costs["rdp"]["fixed"]])
    assert "gdp (approximation, no bound)" in bars and math.isnan(bars["moments"][1])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["poisson\nand 1 that cost the same", "fixed"]
