"""A page of runs or of a sweep."""

import html
import math
import re
from dataclasses import replace

from jobs import result_of
from made import made_job
from runs import ledger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import concatenate, read_ledger
from dpexp.accounting.risk import in_words
from dpexp.accounting.rounding import up


def text_of(source):
    return " ".join(html.unescape(re.sub("<[^>]*>", "", source)).split())


def rows_of(source):
    """The cells of each row of a page's tables."""
    rows = re.findall("<tr>(.*?)(?=<tr>|</table>)", source, re.DOTALL)
    return [[text_of(cell) for cell in re.split("<t[dh]>", row)[1:]] for row in rows]


def test_a_page_of_a_run_says_what_it_guarantees(job, dpexp_job, tmp_path):
    result = result_of(job)
    dpexp_job("report", str(job), "out=new/of_the_folder.html")
    job.rename("elsewhere")
    dpexp_job("report", result["mlflow_run_id"], "out=page.html")
    source = (tmp_path / "page.html").read_text()
    assert source == (tmp_path / "new" / "of_the_folder.html").read_text()
    costs = ", ".join(f"{up(cost, 4)} by {name}" for name, cost in result["epsilon"].items())
    for words in (
        "logistic on Digits", "4 rounds, each on about 359 of 1437 records.", f"In words: {in_words(result['risk'])}.",
        f"ε = {costs}, δ = 0.0001, for adding or removing one record",
        "choosing this model by looking at several private runs",
    ):  # fmt: skip
        assert words in text_of(source)
    metrics, ((name, group),) = result["metrics"], result["groups"].items()
    majority = f"{metrics['test_majority_accuracy']:.2%} (majority accuracy)"
    assert ["test_accuracy", f"{metrics['test_accuracy']:.2%}", majority] in rows_of(source)
    assert [name, f"{group['S']:.4g}", f"{group['sigma']:.4g}", "1"] in rows_of(source)
    assert "<b>&" not in source and "&lt;b&gt;&amp;" in source and source.count("data:image/png;base64,iVBOR") == 1
    assert not re.search("https?://|<(script|link|iframe)", source)


def test_a_page_of_a_sweep_has_its_runs_and_what_they_cost_together(dpexp_job, tmp_path):
    folder = tmp_path / "outputs" / "multirun" / "a"
    for number, target in enumerate((1, math.inf, 8)):
        made_job(folder / str(number), "tracking=none", f"privacy.epsilon={target}", sigma=9.0 / (number + 1))
    (folder / "2" / "result.json").unlink()  # as if it had been killed
    (folder / "curve.png").write_bytes(b"\x89PNG")
    (folder / "summary.csv").write_text("ε,test accuracy,± (95 %),runs\n1,80.00%,1.00%,3\nnot private,90.00%,,1\n")
    dpexp_job("report", str(folder))
    source, first = (tmp_path / "report.html").read_text(), result_of(folder / "0")
    *means, _, private, baseline, killed = rows_of(source)[:7]
    assert [",".join(row) for row in means] == (folder / "summary.csv").read_text().splitlines()
    accuracy = f"{first['metrics']['test_accuracy']:.2%}"
    assert private[1:] == [up(first["epsilon"]["pld"], 4), f"{first['noise_multiplier']:.4g}", "3", accuracy, "0.900"]
    assert baseline[1:4] == ["not private", "", "3"] and killed[1:] == ["not finished", "", "", "", ""]
    assert [row[0].partition("epsilon=")[2] for row in (private, baseline, killed)] == ["1", "inf", "8"]
    together = concatenate([read_ledger(folder / name / "ledger.jsonl") for name in ("0", "2")])
    cost, text = up(epsilon(together, 1e-4), 4), text_of(source)
    assert f"with 1 earlier run on these data, ε = {cost} at δ = 0.0001. It covers no run that is not private" in text
    assert text.count("No ε covers what this run shows.") == 1 and "This run has not finished." in text
    assert source.count('alt="curve"') == 1


def test_claims_at_other_deltas_and_of_runs_that_are_not_private_are_told_apart(dpexp_job, tmp_path):
    made_job(tmp_path / "0", "sampling=fixed_size", ledger=ledger(policy="fixed_size", adjacency="replace_one"))
    shows_more = replace(ledger(), not_private_reason="diagnostics=unsafe")
    made_job(tmp_path / "1", "privacy.delta=1e-6", "diagnostics=unsafe", ledger=shows_more)
    dpexp_job("copy", "model=logistic", "train=false", "my.yaml")
    dpexp_job("my.yaml", "seed=1", f"hydra.run.dir={tmp_path}/2")
    dpexp_job("report", *(str(tmp_path / number) for number in "01"), (tmp_path / "2" / "mlflow_run_id").read_text())
    source = (tmp_path / "report.html").read_text()
    third, first, second = rows_of(source)[1:4]  # what was fetched comes first
    assert first[1].endswith("at δ = 0.0001, replace_one") and third[1].endswith("at δ = 0.0001, add_remove")
    assert second[1].endswith("at δ = 1e-06, add_remove not private")
    assert third[0] == "my.yaml seed=1" and "python -m dpexp my.yaml seed=1" in source
    assert "It covers no run that is not private." in source
