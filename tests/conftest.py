"""What every test may use."""

import json
import os
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: the tests' processes share the cores
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a forked job would wait for its parent's threads

import pytest

pytest_plugins = ["jobs"]


@pytest.fixture(autouse=True)
def same_environment():
    """What a test's libraries leave in the environment (MLflow: where to track) would reach the jobs of the next."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def read_lines():
    """A ledger's lines, read without dpexp."""
    return lambda path: [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def printed(capsys):
    """What was printed since it was last asked for, with single blanks between its words."""
    return lambda: " ".join(capsys.readouterr().out.split())
