"""Folders that tests make instead of running a job are like those that a job leaves."""

import json

import pytest
from made import TESTED, made_job
from omegaconf import OmegaConf

from dpexp.accounting.ledger import read_ledger
from dpexp.tracking.job_folder import LEDGER, METRICS, PLANNED_LEDGER, RECORD, STATUS

END = "ledger.end.json"
ONLY_OF_JOBS = {"card.md", "mlflow_model", "plan.json", "weights.safetensors", "mirror.json", "mlflow_run_id"}


def names_in(folder):
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


# What a job has of its own
OWN = {"metrics", "seconds", "mlflow_run_id", "configuration", "name", "start", "starts", "digest", "source", "time",
       "dpexp.pid", "dpexp.output", "dpexp.start"}  # fmt: skip


def assert_like(made, job):
    """A made file's JSON has no other keys and values than that of the job."""
    if isinstance(made, dict):
        assert made.keys() <= job.keys()
        for key in made.keys() - OWN:
            assert_like(made[key], job[key])
    else:
        assert {*made} <= {*job} if isinstance(made, list) else made == job


def test_a_made_folder_is_like_that_of_a_job(trained, job, tmp_path):
    """In its files, its options, and what its JSON has; so that what reads the one can read the other."""
    _, *words = OmegaConf.load(job / "overrides.yaml")
    made = made_job(tmp_path / "made", *words, ledger=read_ledger(job / LEDGER))
    assert names_in(job) - names_in(made) == ONLY_OF_JOBS and names_in(made) < names_in(job)
    assert names_in(job / ".hydra") - names_in(made / ".hydra") == {"hydra.yaml"}
    for name in ("overrides.yaml", "config.yaml"):
        assert (made / name).read_text() == (job / name).read_text().replace(str(trained), str(tmp_path))
    for name in (LEDGER, PLANNED_LEDGER):
        assert read_ledger(made / name) == read_ledger(job / name)
        ours, theirs = (json.loads((folder / name).open().readline()) for folder in (made, job))
        assert ours.keys() == theirs.keys() and ours["sampling"] == theirs["sampling"]
    for name, more in (("result.json", {"learning_rate"}), (RECORD, {"model"}), (STATUS, set())):
        texts = ((folder / name).read_text() for folder in (made, job))
        ours, theirs = (json.loads(text.replace(str(trained), str(tmp_path))) for text in texts)
        assert_like(ours, theirs)
        assert theirs.keys() - ours.keys() == more
    assert TESTED.keys() <= json.loads((job / "result.json").read_text())["metrics"].keys()
    ours, theirs = ([json.loads(line) for line in (folder / METRICS).open()] for folder in (made, job))
    assert all(row.keys() == theirs[0].keys() for row in ours)
    assert {row["step"] for row in ours} == {0, 4} <= {row["step"] for row in theirs}


@pytest.mark.parametrize("words, lacks", [
    (["train=false"], {LEDGER, END, "epsilon.png"}),
    (["tracking=none", "privacy.epsilon=inf"],
     {LEDGER, END, "epsilon.png", PLANNED_LEDGER}),
])  # fmt: skip
def test_a_made_folder_lacks_what_a_job_does_not_write(words, lacks, tmp_path, dpexp_job):
    quick = ("model=logistic", "sampling.steps=1", "trainer.num_evaluations=0", *words)
    whole, made = names_in(made_job(tmp_path / "whole")), names_in(made_job(tmp_path / "made", *words))
    assert whole - made == lacks
    of_job = names_in(dpexp_job(*quick))
    assert made <= of_job <= (made | ONLY_OF_JOBS)
