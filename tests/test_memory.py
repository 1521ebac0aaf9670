"""What a private step takes: a wide MLP at a large batch, and a decoder as docs/memory.md computes it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
STEP = BENCHMARKS / "step.py"


def peak(candidate):
    """MiB beyond its imports and data, of MLP 784-4096-10 at 4 096 records, in a process of its own."""
    done = subprocess.run(
        [sys.executable, STEP, "wide", "--warm-up", "2", "--rounds", "3", "--peak-of", candidate],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.whole
def test_a_wide_mlp_takes_less_than_one_and_a_half_times_plain_sgds_memory():
    """Held densely, its per-record gradients would take 50 GiB."""
    assert peak("dpexp") < 1.5 * peak("plain")


@pytest.mark.whole
def test_a_decoder_of_ten_million_parameters_takes_what_is_computed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    memory = importlib.import_module("memory")
    computed = memory.computed(*memory.built("10M", "all", "meta"), "momentum", 16)["all"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "memory.py", "10M", "--peak-of", "all", "16"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 0.9 * computed < int(done.stdout.split()[-1]) < 1.3 * computed
