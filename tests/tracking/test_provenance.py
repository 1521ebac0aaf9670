"""Where runs came from, what they are called, and where their list is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import store_of
from mlflow import MlflowClient

from dpexp import config
from dpexp.tracking.provenance import provenance, short_name

QUICK = ("sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0", "model=logistic")


def runs(folder):
    return store_of(folder).search_runs(["1"])


def git(*arguments):
    who = ("-c", "user.name=somebody", "-c", "user.email=some@body")
    return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A work tree with one commit; the working directory lies inside it."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    Path("model.py").write_text("width = 1\n")
    Path("records.csv").write_text("name\n")
    Path(".gitignore").write_text("outputs\n")
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "kept.txt").write_text("")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


def test_a_run_says_where_it_came_from(dpexp_job, repository, tmp_path):
    import torch

    dpexp_job(*QUICK, "train=false")
    (found,) = runs(tmp_path)
    tags = found.data.tags
    assert tags["mlflow.source.git.commit"] == tags["dpexp.commit"] == repository and tags["dpexp.dirty"] == "no"
    assert tags["mlflow.source.name"] == "dpexp" and tags["mlflow.source.type"] == "LOCAL" and tags["mlflow.user"]
    assert tags["dpexp.torch"] == torch.__version__ and tags["dpexp.python"] == sys.version.split()[0]
    assert tags["dpexp.version"] and tags["dpexp.host"] == os.uname().nodename
    assert tags["dpexp.command"] == f"dpexp {' '.join(QUICK)} train=false"


def test_changed_code_is_told_and_no_data_goes_with_the_run(dpexp_job, repository, tmp_path):
    git("remote", "add", "origin", "https://hunter2@host/x")
    Path("model.py").write_text("width = 2\n")
    Path("records.csv").write_text("name\nSmith, John\n")
    os.chdir("within")
    dpexp_job(*QUICK, "train=false", "hydra.run.dir=../outputs/a/b")
    (found,) = MlflowClient(f"sqlite:///{tmp_path}/within/outputs/mlflow.db").search_runs(["1"])
    assert found.data.tags["dpexp.dirty"] == "yes" and found.data.tags["dpexp.commit"] == repository
    assert "hunter2" not in str(found.to_dictionary()), "in an address of the repository"
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert files and not any(b"Smith" in path.read_bytes() for path in files)


def test_without_git_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "dpexp.commit" not in provenance()
    monkeypatch.setenv("PATH", "")
    assert "dpexp.commit" not in provenance()


def test_passwords_of_addresses_are_not_logged(monkeypatch):
    monkeypatch.setenv(config.COMMAND, "dpexp tracking.uri=postgresql://me:hunter2@db/x data.root=s3://a/b:c")
    assert provenance()["dpexp.command"] == "dpexp tracking.uri=postgresql://me:…@db/x data.root=s3://a/b:c"


def test_nor_is_any_that_a_configuration_holds(dpexp_job, tmp_path, monkeypatch):
    """The tracking server's, which Hydra's own folder keeps for `resume`, and others; in jobs and in sweeps."""
    secret = "http://me:hunter2@host/x"
    dpexp_job(*QUICK, "train=false", f"data.root={secret}")
    dpexp_job("-m", *QUICK, "train=false", "seed=1,2", f"data.root={secret}")
    for one in runs(tmp_path):
        assert "hunter2" not in str(one.to_dictionary())
    logged = list((tmp_path / "outputs" / "mlartifacts").rglob("overrides.yaml"))
    assert len(logged) == 3 and not any("hunter2" in path.read_text() for path in logged)


def test_names_differ_where_runs_differ(dpexp_job, tmp_path):
    for more in ((), ("optimizer.lr=0.3",), ("optimizer.lr=0.4", "tracking.experiment=dpexp")):
        dpexp_job("train=false", *QUICK, *more)
    dpexp_job("-m", "model=logistic", "train=false", *QUICK[:2], "seed=1,2", "privacy.delta=1e-5,1e-6")
    names = [one.info.run_name for one in reversed(runs(tmp_path))]
    shared = "train=false, num_evaluations=0, logistic"
    assert names[:3] == [f"steps=4, z=1.0, {lr}{shared}" for lr in ("", "lr=0.3, ", "lr=0.4, ")]
    parent, trials = names[3], names[4:]
    assert parent.startswith("δ=1e-5,1e-6, seed=1,2, ")
    rest = "steps=4, z=1.0, logistic, train=False"
    assert sorted(trials) == [f"δ=1e-0{d}, seed={seed}, {rest}" for d in (5, 6) for seed in (1, 2)]


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


def test_a_sweep_has_the_parameters_that_its_trials_share(dpexp_job, tmp_path):
    dpexp_job("-m", "train=false", *QUICK[:3], "model=logistic,mlp", "data.n=1437,1500", "optimizer.lr=0.3")
    found = runs(tmp_path)
    (parent,) = [one for one in found if "dpexp.sweep_hash" in one.data.tags]
    trials = [one.data.params for one in found if one is not parent]
    shared = set.intersection(*(set(params.items()) for params in trials))
    params = dict(parent.data.params)
    assert params["optimizer.lr"] == "0.3" and params["data.classes"] == "10"
    assert "data.n" not in params and "privacy.delta" not in params, "the latter is worked out from the former"
    assert not [key for key in params if key.startswith("model")]
    assert set(params.items()) <= shared
    assert {key for key, _ in shared if not key.startswith("plan.")} - set(params) <= {
        *("model.classes", "model.shape", "model.weights", "privacy.delta"),
        *("rounds", "checkpoint.every_n_rounds", "checkpoint.resume"),
    }


def test_mlflows_own_variable_is_honoured_where_nothing_else_is_given(dpexp_job, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    dpexp_job(*QUICK, "train=false")
    assert len(MlflowClient(f"sqlite:///{tmp_path}/elsewhere.db").search_runs(["1"])) == 1
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
    dpexp_job(*QUICK, "train=false", f"tracking.uri=sqlite:///{tmp_path}/given.db")
    assert len(MlflowClient(f"sqlite:///{tmp_path}/given.db").search_runs(["1"])) == 1


STOP = """
from pathlib import Path
from pytorch_lightning import Callback
class Once(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 4 and not Path("stopped").exists():
            Path("stopped").touch()
            raise KeyboardInterrupt
"""


def test_a_resumed_run_keeps_where_it_started_and_says_where_it_went_on(dpexp_job, repository, tmp_path, monkeypatch):
    (tmp_path / "stop_for_origin.py").write_text(STOP)
    monkeypatch.syspath_prepend(tmp_path)
    Path("model.py").write_text("width = 2\n")
    job = ("sampling.steps=9", *QUICK[1:], "+callbacks.stop._target_=stop_for_origin.Once", "hydra.run.dir=outputs/a/b")
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        dpexp_job(*job)
    (first,) = runs(tmp_path)
    git("commit", "-q", "-a", "-m", "second")
    Path("model.py").write_text("width = 3\n")
    dpexp_job("resume", "outputs/a/b")
    (run_,) = runs(tmp_path)
    assert run_.info.run_id == first.info.run_id and run_.info.status == "FINISHED"
    tags, before = run_.data.tags, first.data.tags
    own = {key: value for key, value in tags.items() if key.startswith("dpexp.resumed.")}
    may_change = {"dpexp.pid", "dpexp.error", "mlflow.note.content", "mlflow.log-model.history"}
    assert {key for key in {**tags, **before} if tags.get(key) != before.get(key)} - {*own} <= may_change
    assert before["dpexp.commit"] == repository and own["dpexp.resumed.commit"] == git("rev-parse", "HEAD")
    assert (
        own["dpexp.resumed.command"] == "dpexp resume outputs/a/b" and own["dpexp.resumed.user"] == tags["mlflow.user"]
    )
    assert before["dpexp.dirty"] == tags["dpexp.dirty"] == "yes" and own["dpexp.resumed.dirty"] == "yes"
