"""Jobs: fixtures that run them, in this process or in one of their own, and what they leave behind.

Hydra and MLflow are imported by the fixtures that need them, so that tests without jobs load neither.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import warnings
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest


def result_of(output):
    return json.loads((output / "result.json").read_text())


def store_of(folder):
    """A client of the store of the jobs that were run in a folder."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder}/outputs/mlflow.db")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """The file of an empty store. MLflow makes one by all of its migrations, which takes seconds: every other store
    begins as a copy of the first."""
    from mlflow.store.db import utils
    from sqlalchemy import create_engine

    path = tmp_path_factory.mktemp("store") / "empty.db"
    engine = create_engine(f"sqlite:///{path}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils._initialize_tables(engine)
    engine.dispose()
    with copies_of(path):
        yield path


@pytest.fixture(scope="session")
def composed_once():
    """Hydra composes a job's options a first time only to read `hydra.mode`, which no test sets."""
    from hydra._internal.hydra import Hydra

    with mock.patch.object(Hydra, "get_mode", lambda *_, **__: None):
        yield


def copies_of(path):
    """Lets MLflow begin each store as a copy of this file."""
    from mlflow.store.db import utils

    def copied(engine):
        with closing(sqlite3.connect(path)) as empty, closing(sqlite3.connect(engine.url.database)) as new:
            empty.backup(new)

    return mock.patch.object(utils, "_initialize_tables", copied)


@pytest.fixture(scope="session")
def jobs_in(empty_store, composed_once):
    """Runs `python -m dpexp` in this process and a folder: a function of the arguments that returns a job's folder."""
    from dpexp.__main__ import main

    @contextmanager
    def jobs(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)

            def run(*arguments: str) -> Path:
                patch.setattr(sys, "argv", ["dpexp", *arguments])
                main()
                found = (folder / "outputs").glob("*/*")
                found = [path for path in found if path.parent.name != "mlartifacts"]
                return max(found, key=lambda path: path.stat().st_mtime, default=folder)

            yield run

    return jobs


@pytest.fixture
def dpexp_job(tmp_path, jobs_in):
    """Runs `python -m dpexp` with the given arguments in this process and an empty folder; returns the output
    directory of the job."""
    with jobs_in(tmp_path) as run:
        yield run


def refusal_of(cfg, overrides, folder):
    """The one sentence by which a job is refused that has other values than a composed configuration.

    To compose one takes longer than all that refuses a value; another option of a group must be composed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from dpexp.commands import validate
    from dpexp.commands.job import Job
    from dpexp.errors import ConfigError

    cfg = cfg.copy()
    for override in OverridesParser.create().parse_overrides([*overrides]):
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
    with pytest.raises(ConfigError) as raised:
        validate.check(cfg)
        Job.of(cfg, folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, jobs_in):
    """A folder in which a job was run, for all tests that only read what a job leaves; its MLflow store names files
    there. Where nothing trained is read, tests make folders (tests/made.py)."""
    home = tmp_path_factory.mktemp("home")
    with jobs_in(home) as run:
        run(
            "model=logistic", "sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0",
            "group=per_layer", "accountant=all", "register=digits", "tracking.run_name='<b>&'",
            "tracking.uri=sqlite:///outputs/mlflow.db",
        )  # fmt: skip
    return home


@pytest.fixture
def job(trained, dpexp_job, tmp_path):
    """A copy of that job's folder, in the test's own folder."""
    shutil.copytree(trained / "outputs", tmp_path / "outputs")
    (output,) = (path.parent for path in (tmp_path / "outputs").glob("*/*/result.json"))
    return output


def signal_after(rounds: int, number: int):
    """Lets a job of this process send itself a signal after so many rounds, if it has at least one more to do."""
    from dpexp.privacy.callback import PrivacyCallback  # zoo.images has to import torchvision before Lightning

    end = PrivacyCallback.on_train_batch_end

    def then_signal(self, *args):
        end(self, *args)
        if self.rounds_done == rounds < self.plan.rounds:
            os.kill(os.getpid(), number)

    PrivacyCallback.on_train_batch_end = then_signal


# Forks come from a server that has imported what is slow, and has trained nothing: PyTorch for CUDA refuses to train in
# a process that was forked from one that has.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "dpexp.commands.train", "dpexp.tracking.run", "dpexp.tracking.sweep_run", "git", "IPython",
    "mlflow.store.db.utils", "mlflow.store.tracking.sqlalchemy_store", "transformers.modeling_utils",
])  # fmt: skip


class Forked(FORKS.Process):
    """A job in a process of its own, in which nothing slow is imported again."""

    def __init__(self, folder, arguments, first, store):
        super().__init__()
        self.printed = folder / f"{self.name}.txt"
        self._job = folder, ["dpexp", *arguments], first, store, {**os.environ}

    def run(self):
        folder, sys.argv, first, store, environment = self._job
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.stdout = sys.stderr = self.printed.open("w", buffering=1)
        os.chdir(folder)
        if first:
            first[0](*first[1:])
        from dpexp.__main__ import main

        with copies_of(store):
            main()

    def send_signal(self, number):
        if self.is_alive():
            os.kill(self.pid, number)

    def ended(self) -> str:
        """What it has printed when it has ended."""
        self.join(300)
        self.send_signal(signal.SIGABRT)  # a job that hangs shows where
        self.join()
        return self.printed.read_text()


@pytest.fixture
def forked(tmp_path, monkeypatch, empty_store):
    """Starts `python -m dpexp` with the given arguments in a folder; none outlives the test. Each calls a function
    before, if `first` is one and its arguments."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    jobs = []

    def start(*arguments: str, folder: Path = tmp_path, first=()) -> Forked:
        jobs.append(Forked(folder, arguments, first, empty_store))
        jobs[-1].start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.send_signal(signal.SIGKILL)


@pytest.fixture
def bare(monkeypatch):
    """Jobs draw no figures and export no model to MLflow, which tests without this fixture check."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).touch())
    monkeypatch.setattr("dpexp.tracking.registered_model.save_as_mlflow", lambda *arguments: None)
