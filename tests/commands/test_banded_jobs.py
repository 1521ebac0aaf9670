"""Jobs with correlated noise, from the command line."""

import pytest
from jobs import result_of, store_of

from dpexp.accounting.ledger import read_ledger
from dpexp.accounting.releases import releases

pytestmark = pytest.mark.usefixtures("bare")
SMALL = ("model=logistic", "trainer.num_evaluations=0", "sampling.expected_batch_size=64")


def test_noise_banded_is_all_that_a_job_needs(dpexp_job, tmp_path, capsys):
    output = dpexp_job(*SMALL, "noise=banded", "sampling.steps=40", "noise.momentum=0")
    result = result_of(output)
    ledger = read_ledger(output / "ledger.jsonl")
    ((round_, count),) = ledger.rounds.items()
    b = round_.bands
    assert (
        b > 1
        and count == 40
        and round_.sampling.policy.partitions == b
        and round_.sampling.policy.name == "cyclic_poisson"
    )
    assert sum(releases(ledger).values()) == -(-40 // b)
    assert result["bands"] == list(round_.queries[0].bands) and result["epsilon"]["pld"] <= 3.0
    assert f"noise correlated over b = {b} rounds, c = (" in (output / "card.md").read_text()
    assert f"noise correlated over {b} rounds" in capsys.readouterr().out
    run = store_of(tmp_path).get_run(result["mlflow_run_id"])
    assert run.data.params["plan.bands"] == str(b) and run.data.params["noise.bands"] == "auto"


def test_a_number_of_bands_with_a_noise_that_is_given(dpexp_job):
    output = dpexp_job(
        *SMALL, "noise=banded", "noise.bands=3", "sampling.partitions=5", "sampling.steps=12", "tracking=none",
        "privacy.noise_multiplier=1.0", "optimizer=adam",
    )  # fmt: skip
    ((round_, _),) = read_ledger(output / "ledger.jsonl").rounds.items()
    assert (round_.bands, round_.sampling.policy.partitions) == (3, 5)
