"""Jobs with random allocation, from the command line."""

import signal

import pytest
from jobs import result_of, signal_after

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.releases import releases
from dpexp.tracking.job_folder import PLANNED_LEDGER
from dpexp.training.models import logistic

JOB = (
    "model=logistic", "trainer.num_evaluations=0", "sampling=random_allocation", "sampling.expected_batch_size=300",
    "sampling.steps=22", "privacy.noise_multiplier=2", "data.id=digits", "checkpoint.every_n_rounds=3",
)  # fmt: skip


def test_a_killed_job_is_shorter_and_costs_what_was_planned(dpexp_job, forked, tmp_path, capsys):
    """Of five epochs, of five rounds but the last, the second breaks off after one; the checkpoint is of round 3."""
    folder = tmp_path / "job"
    forked(*JOB, f"hydra.run.dir={folder}", first=(signal_after, 6, signal.SIGKILL)).ended()
    assert sum(releases(ledger_so_far(folder / "ledger.jsonl")).values()) == 2
    with pytest.warns(UserWarning, match="so 7 rounds are lost; a new epoch begins, and 12 rounds are left"):
        dpexp_job("resume", str(folder))
    said = " ".join(capsys.readouterr().out.split())
    assert "each record in 1 of an epoch's 5 rounds; an epoch (the last one, too, of only 2 rounds) costs all" in said
    result, ledger = result_of(folder), read_ledger(folder / "ledger.jsonl")
    assert (result["rounds"], len(ledger)) == (15, 18) and not (folder / "last.ckpt").exists()
    plan = dpexp.make_plan(
        logistic([64], 10), n=1437,
        sampling=dpexp.RandomAllocation(expected_batch_size=300, steps=22),
        target=dpexp.Target(noise_multiplier=2.0),
    ).ledger()  # fmt: skip
    assert len(plan) == 22 and sum(releases(plan).values()) == 5
    assert result["epsilon"]["pld"] == dpexp.epsilon(ledger, 1e-4) == dpexp.epsilon(plan, 1e-4)
    assert dpexp.epsilon(read_ledger(folder / PLANNED_LEDGER), 1e-4) == dpexp.epsilon(plan, 1e-4)
    with pytest.raises(SystemExit, match="has finished; there is nothing to resume"):
        dpexp_job("resume", str(folder))
