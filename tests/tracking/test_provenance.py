"""Where runs came from, what they are called, and where their list is."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from jobs import store_of
from mlflow import MlflowClient

from dpexp.commands.description import short_name
from dpexp.tracking.provenance import provenance, without_passwords

pytestmark = pytest.mark.usefixtures("bare")
QUICK = ("sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0", "model=logistic")


def runs(folder):
    return store_of(folder).search_runs(["1"])


def git(*arguments):
    who = ("-c", "user.name=somebody", "-c", "user.email=some@body")
    return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A work tree with one commit."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    Path("records.csv").write_text("name\n")
    Path(".gitignore").write_text("outputs\n")
    Path("within").mkdir()
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


def test_a_run_says_where_it_came_from_and_neither_its_data_nor_a_password_go_with_it(
    dpexp_job, repository, tmp_path, monkeypatch
):  # fmt: skip
    assert provenance()["dpexp.dirty"] == "no"
    git("remote", "add", "origin", "https://hunter2@host/x")
    Path("records.csv").write_text("name\nSmith, John\n")
    monkeypatch.chdir("within")
    dpexp_job(*QUICK, "train=false", "hydra.run.dir=../outputs/a/b", "data.root=http://me:hunter2@host/x")
    (found,) = MlflowClient(f"sqlite:///{tmp_path}/within/outputs/mlflow.db").search_runs(["1"])
    tags = found.data.tags
    expected = {
        "mlflow.source.git.commit": repository, "dpexp.commit": repository, "dpexp.dirty": "yes",
        "mlflow.source.name": "dpexp", "mlflow.source.type": "LOCAL", "dpexp.torch": version("torch"),
        "dpexp.python": sys.version.split()[0], "dpexp.host": os.uname().nodename,
    }  # fmt: skip
    assert expected.items() <= tags.items() and tags["dpexp.version"] and tags["mlflow.user"]
    assert re.fullmatch("dpexp .* data.root=http://me:…@host/x", tags["dpexp.command"])
    assert "hunter2" not in str(found.to_dictionary()), "in an address of the repository or of data"
    logged, kept = (files_in(tmp_path / folder) for folder in ("within/outputs/mlartifacts", "outputs"))
    assert {"config.yaml", "overrides.yaml"} <= {path.name for path in logged}
    assert not any(b"hunter2" in content for content in logged.values())
    assert not any(b"Smith" in content for content in (logged | kept).values())


@pytest.mark.parametrize("address, masked", [
    ("tracking.uri=postgresql://me:hunter2@db/x data.root=s3://a/b:c",
     "tracking.uri=postgresql://me:…@db/x data.root=s3://a/b:c"),
    ("postgresql://me@corp:hunter2@db/x", "postgresql://me@corp:…@db/x"),
    ("postgresql://me:hun@ter2@db/x", "postgresql://me:…@db/x"),
    ("postgresql://db/x?user=me&password=hunter2&a=b", "postgresql://db/x?user=me&password=…&a=b"),
    ("https://hunter2@host/x", "https://:…@host/x"),
    ("http://host:5000/x ssh://git@host", "http://host:5000/x ssh://git@host"),
])  # fmt: skip
def test_passwords_in_addresses_are_masked(address, masked):
    assert without_passwords(address) == masked


def test_without_git_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "dpexp.commit" not in provenance()
    monkeypatch.setenv("PATH", "")
    assert "dpexp.commit" not in provenance()


def test_trials_are_named_by_what_differs_and_their_sweep_has_the_parameters_that_they_share(dpexp_job, tmp_path):
    dpexp_job("-m", "train=false", *QUICK, "seed=1,2", "data.root=http://me:hunter2@host/x")
    found = runs(tmp_path)
    assert "hunter2" not in str([one.to_dictionary() for one in found])
    (parent,) = [one for one in found if "dpexp.sweep_hash" in one.data.tags]
    assert parent.info.run_name.startswith("seed=1,2, ") and "root=http://me:…@host/x" in parent.info.run_name
    found.remove(parent)
    (*first, rest), (*second, other) = sorted(one.info.run_name.split(", ", 2) for one in found)
    assert (first, second) == (["logistic", "seed=1"], ["logistic", "seed=2"])
    assert rest == other and "steps=4, z=1.0, " in rest
    assert parent.data.params.items() == found[0].data.params.items() & found[1].data.params.items()
    assert parent.data.params["sampling.steps"] == "4" and "seed" not in parent.data.params


@pytest.mark.parametrize(
    "overrides, swept, name",
    [
        ("model=logistic privacy.enabled=false", "", "not private, logistic"),
        ("privacy.epsilon=inf group=flat", "group", "flat, not private"),
        ("model=cnn group=per_layer mechanism=joint optimizer.lr=0.4 privacy.epsilon=1", "",
         "per_layer, joint, lr=0.4, ε=1, cnn"),
        ("data=mnist privacy.epsilon=null privacy.noise_multiplier=2 seed=3", "seed", "seed=3, z=2, mnist"),
        ("model.a.lr=1 optimizer.lr=2 draw=1", "draw optimizer.lr", "optimizer.lr=2, draw=1, model.a.lr=1"),
        ("sampling=poisson noise=banded +trainer.max_time=00:01", "sampling", "poisson, noise=banded, max_time=00:01"),
        ("tracking=none hydra.job.num=1", "", ""),
    ],
)  # fmt: skip
def test_names_are_short_and_begin_with_what_differs(overrides, swept, name):
    assert short_name(overrides.split(), {*swept.split()}) == name


def test_mlflows_own_variable_is_honoured_where_nothing_else_is_given(dpexp_job, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    for name, given in (("elsewhere", ()), ("given", (f"tracking.uri=sqlite:///{tmp_path}/given.db",))):
        dpexp_job(*QUICK, "train=false", *given)
        client = MlflowClient(f"sqlite:///{tmp_path}/{name}.db")
        (run,) = client.search_runs(["1"])
        assert "planned_ledger.jsonl" in {item.path for item in client.list_artifacts(run.info.run_id)}
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
