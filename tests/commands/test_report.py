"""A page of runs or of a sweep."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from jobs import result_of
from made import made_job
from runs import ledger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import concatenate, read_ledger
from dpexp.accounting.risk import in_words
from dpexp.accounting.rounding import up
from dpexp.commands.report import report
from dpexp.errors import ConfigError


class Page(HTMLParser):
    """A page's text, rows of its tables, and tags."""

    def __init__(self, path):
        super().__init__()
        self.text, self.rows, self.tags = "", [], set()
        self.feed(path.read_text())
        self.text = " ".join(self.text.split())
        self.rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.in_cell = tag in ("td", "th") or (tag == "a" and self.in_cell)

    def handle_data(self, data):
        self.text += data
        if self.rows and self.in_cell:
            self.rows[-1][-1] += data


def test_a_page_of_a_run_says_what_it_guarantees(job, dpexp_job, tmp_path):
    result = result_of(job)
    dpexp_job("report", str(job), "out=of_the_folder.html")
    job.rename("elsewhere")
    dpexp_job("report", result["mlflow_run_id"], "out=page.html")
    assert (tmp_path / "page.html").read_text() == (tmp_path / "of_the_folder.html").read_text()
    page = Page(tmp_path / "page.html")
    assert "Linear" not in page.text and "logistic on Digits" in page.text
    assert "4 rounds, each on about 359 of 1437 records." in page.text
    assert f"In words: {in_words(result['risk'])}." in page.text
    costs = ", ".join(f"{up(cost, 4)} by {name}" for name, cost in result["epsilon"].items())
    assert f"ε = {costs}, δ = 0.0001, for adding or removing one record" in page.text
    metrics, ((name, group),) = result["metrics"], result["groups"].items()
    majority = f"{metrics['test_majority_accuracy']:.2%} (majority accuracy)"
    assert ["test_accuracy", f"{metrics['test_accuracy']:.2%}", majority] in page.rows
    assert [name, f"{group['S']:.4g}", f"{group['sigma']:.4g}", "1"] in page.rows
    assert "choosing this model by looking at several private runs" in page.text
    source = (tmp_path / "page.html").read_text()
    assert "<b>&" not in source and "&lt;b&gt;&amp;" in source
    assert source.count("data:image/png;base64,iVBOR") == 1 and not page.tags & {"script", "link", "iframe"}
    assert not re.search("https?://", source)


def test_a_page_of_a_sweep_has_its_runs_and_what_they_cost_together(dpexp_job, tmp_path):
    folder = tmp_path / "outputs" / "multirun" / "a"
    for number, epsilon_asked in enumerate((1, math.inf, 8)):
        made_job(folder / str(number), "tracking=none", f"privacy.epsilon={epsilon_asked}", sigma=9.0 / (number + 1))
    (folder / "2" / "result.json").unlink()  # as if it had been killed
    (folder / "curve.png").write_bytes(b"\x89PNG")
    (folder / "summary.csv").write_text("ε,test accuracy,± (95 %),runs\n1,80.00%,1.00%,3\nnot private,90.00%,,1\n")
    dpexp_job("report", str(folder))
    page = Page(tmp_path / "report.html")
    table = {row[0].partition("privacy.epsilon=")[2]: row for row in page.rows if "privacy.epsilon=" in row[0]}
    assert table["1"][1] == up(result_of(folder / "0")["epsilon"]["pld"], 4) and table["1"][3] == "3"
    assert table["1"][4] == f"{result_of(folder / '0')['metrics']['test_accuracy']:.2%}"
    assert table["inf"][1:4] == ["not private", "", "3"] and table["8"][1:] == ["not finished", "", "", "", ""]
    ledgers = [read_ledger(folder / name / "ledger.jsonl") for name in ("0", "2")]
    together = up(epsilon(concatenate(ledgers), 1e-4), 4)
    assert f"with 1 earlier run on these data, ε = {together} at δ = 0.0001. It covers no run that is" in page.text
    assert page.text.count("No ε covers what this run shows.") == 1 and "This run has not finished." in page.text
    assert (tmp_path / "report.html").read_text().count('alt="curve"') == 1
    assert page.rows[:3] == [
        ["ε", "test accuracy", "± (95 %)", "runs"], ["1", "80.00%", "1.00%", "3"], ["not private", "90.00%", "", "1"]
    ]  # fmt: skip


def test_claims_at_other_deltas_and_of_runs_that_are_not_private_are_told_apart(dpexp_job, tmp_path):
    made_job(tmp_path / "0", "sampling=fixed_size", ledger=ledger(policy="fixed_size", adjacency="replace_one"))
    shows_more = replace(ledger(policy="poisson", adjacency="add_remove"), not_private_reason="diagnostics=unsafe")
    made_job(tmp_path / "1", "privacy.delta=1e-6", "diagnostics=unsafe", ledger=shows_more)
    dpexp_job("copy", "model=logistic", "train=false", "my.yaml")
    dpexp_job("my.yaml", "seed=1", f"hydra.run.dir={tmp_path}/2")
    dpexp_job("report", *(str(tmp_path / number) for number in "01"), (tmp_path / "2" / "mlflow_run_id").read_text())
    page = Page(tmp_path / "report.html")
    (third, first, second) = (row for row in page.rows[1:4])  # what was fetched comes first
    assert first[1].endswith("at δ = 0.0001, replace_one") and third[1].endswith("at δ = 0.0001, add_remove")
    assert second[1].endswith("at δ = 1e-06, add_remove not private")
    assert "It covers no run that is not private." in page.text
    assert "python -m dpexp my.yaml seed=1" in page.text and third[0] == "my.yaml seed=1"
    (tmp_path / "0" / "result.json").write_text("{")
    with pytest.raises(ConfigError, match="0 has a damaged file of its job"):
        report([str(tmp_path / "0")])
    dpexp_job("report", str(tmp_path / "1"), "out=new/x.html")
    with pytest.raises(SystemExit, match=r"^dpexp: out=new cannot be read or written: Is a directory"):
        dpexp_job("report", str(tmp_path / "1"), "out=new")
    with pytest.raises(SystemExit, match=r"^dpexp: out=/proc/x\.html cannot be read or written: No such file"):
        dpexp_job("report", str(tmp_path / "1"), "out=/proc/x.html")


def test_a_report_of_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for arguments in ([], ["empty"], ["empty", "out=x.html"]):
        with pytest.raises(ConfigError, match="name folders of jobs or sweeps, or MLflow run ids"):
            report(arguments)
    with pytest.raises(ConfigError, match="nowhere is no file or folder here, and no run of"):
        report(["nowhere"])
    assert not [*tmp_path.glob("*.html")]
