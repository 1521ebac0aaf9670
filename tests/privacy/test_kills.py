"""Runs that are killed at any point, by benchmarks/kills.py, which forks them all from one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_kill_leaves_a_ledger_with_fewer_rounds_than_were_released():
    """`benchmarks/faults.py` shows that one which a round reached too late would be found."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kills.py", "12"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = re.findall(r"^ *(\d+) ledgers with ([-+]\d+) rounds", done.stdout, re.MULTILINE)
    surplus = {int(rounds): int(count) for count, rounds in found}
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(surplus.values()) == 12 and min(surplus) >= 0
    assert re.search(r"12 kills, [1-9]\d* of them of resumed runs", done.stdout)
