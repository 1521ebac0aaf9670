"""The attack risk of a job, in what it prints, its result, its card, MLflow, and `account`."""

import math

import pytest
from jobs import result_of, store_of

from dpexp.accounting.ledger import read_ledger
from dpexp.accounting.risk import FIGURES, in_words, risk
from dpexp.accounting.rounding import up
from dpexp.commands.account import account


@pytest.mark.usefixtures("bare")
def test_a_job_shows_it_everywhere(dpexp_job, capsys):
    """With its privacy unit."""
    output = dpexp_job(
        "model=logistic", "privacy_unit=user", "sampling.epochs=null", "sampling.steps=5",
        "privacy.max_tpr_at_fpr={0.01: 0.05}", "trainer.num_evaluations=0",
    )  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    expected = risk(read_ledger(output / "ledger.jsonl")).figures()
    assert set(expected) == set(FIGURES) and 0.0499 < expected["tpr_at_fpr_0.01"] <= 0.05
    result = result_of(output)
    assert result["risk"] == expected and result["epsilon"]["pld"] > 0
    assert (result["unit"], result["n"]) == ("user", 200)
    words = in_words(expected, "user")
    client = store_of(output.parents[2])
    (run,) = client.search_runs(["1"])
    assert {name: run.data.metrics[f"with {name}"] for name in FIGURES} == {
        name: float(up(value, 5)) for name, value in expected.items()
    }
    assert run.data.tags["dpexp.privacy_unit"] == "user"
    assert run.data.metrics["tried tpr"] <= 1.01 and "epsilon" in run.data.metrics
    assert "which costs TPR at FPR 0.01 = 0.0" in printed and f"In words: {words}" in printed
    changed = up(math.exp(result["epsilon"]["pld"]), 3)
    assert f"One user changes the probability of any result at most {changed}-fold, plus 0.0001." in printed
    assert printed.count("noise_multiplier = ") == 1 and "z = " not in printed and "The step is" not in printed
    card = (output / "card.md").read_text()
    assert "for adding or removing one user" in card
    assert f"In words: {words}" in card and f"μ = {up(expected['mu'], 4)}" in card
    account([run.info.run_id])
    assert f"by pld: {words}" in " ".join(capsys.readouterr().out.split())
