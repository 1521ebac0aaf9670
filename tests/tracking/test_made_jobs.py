"""Folders that tests make instead of running a job are like those that a job leaves."""

import json

import pytest
from made import made_job
from omegaconf import OmegaConf

from dpexp.accounting.ledger import read_ledger
from dpexp.tracking.job_folder import LEDGER, METRICS, PLANNED_LEDGER, RECORD, STATUS

END = "ledger.end.json"
ONLY_OF_JOBS = {"card.md", "mlflow_model", "plan.json", "weights.safetensors", "mirror.json", "mlflow_run_id"}


def names_in(folder):
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def json_of(name, *folders, but=()):
    """The content of a file of several folders, without some of its keys."""
    contents = (json.loads((folder / name).read_text()) for folder in folders)
    return [{key: value for key, value in content.items() if key not in but} for content in contents]


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

    own = ("metrics", "seconds", "mlflow_run_id", "configuration", "learning_rate")
    result, of_job = json_of("result.json", made, job, but=own)
    assert result == of_job
    result, of_job = json_of("result.json", made, job)
    assert of_job.keys() - result.keys() == {"learning_rate"} and of_job["metrics"].keys() >= result["metrics"].keys()

    record, of_job = json_of(RECORD, made, job)
    assert record.keys() == of_job.keys() - {"model"} and {*record["files"]} <= {*of_job["files"]}
    assert record["data"].keys() <= of_job["data"].keys() and record["params"].items() <= of_job["params"].items()
    tags = record["tags"].items() - of_job["tags"].items()
    assert {tag for tag, _ in tags} <= {"dpexp.pid", "dpexp.output", "dpexp.start"} < {*of_job["tags"]}
    status, of_job = json_of(STATUS, made, job, but=["time"])
    assert status == of_job
    rows, of_job = ([json.loads(line) for line in (folder / METRICS).open()] for folder in (made, job))
    assert all(row.keys() == of_job[0].keys() for row in rows)
    assert {row["step"] for row in rows} == {0, 4} <= {row["step"] for row in of_job}


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
