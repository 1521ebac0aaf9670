"""Per-record clipping without per-record gradients: a wide MLP at a large batch."""

import json
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).parent.parent / "benchmarks" / "step.py"


def peak(candidate):
    """MiB beyond its imports, of MLP 784-4096-10 at 4 096 records, in a process of its own."""
    done = subprocess.run(
        [sys.executable, STEP, "wide", "--peak-of", candidate], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])["beyond imports"]


def test_a_wide_mlp_takes_less_than_one_and_a_half_times_plain_sgds_memory():
    """Held densely, its per-record gradients would take 50 GiB."""
    assert peak("dpexp flat") < 1.5 * peak("plain SGD")
