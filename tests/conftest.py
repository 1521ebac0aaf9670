"""What every test may use."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: the tests' processes share the cores

import pytest

from dpexp.__main__ import main


@pytest.fixture(autouse=True)
def same_environment():
    """What a test's libraries leave in the environment (MLflow: where to track) would reach the jobs of the next."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def dpexp_job(tmp_path, monkeypatch):
    """Runs `python -m dpexp` with the given arguments in this process and an empty folder; returns the output
    directory of the job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["dpexp", *arguments])
        main()
        folders = [
            path for path in (tmp_path / "outputs").glob("*/*") if path.parent.name not in ("mlartifacts", "unsent")
        ]
        return max(folders, key=lambda path: path.stat().st_mtime, default=tmp_path)

    return run


@pytest.fixture
def read_lines():
    """A ledger's lines, read without dpexp."""
    return lambda path: [json.loads(line) for line in Path(path).read_text().splitlines()]
