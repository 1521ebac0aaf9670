"""Runs that are killed at any point, by benchmarks/kills.py, which forks them all from one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def kills(*arguments):
    """The exit status, and how many ledgers were left with how many rounds more than releases."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kills.py", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    surplus = re.findall(r"^ *(\d+) ledgers with ([-+]\d+) rounds", done.stdout, re.MULTILINE)
    return done.returncode, {int(rounds): int(count) for count, rounds in surplus}, done.stdout + done.stderr


def test_no_kill_leaves_a_ledger_with_fewer_rounds_than_were_released():
    status, surplus, printed = kills("20")
    assert status == 0, printed
    assert sum(surplus.values()) == 20 and min(surplus) >= 0
    assert re.search(r"20 kills, [1-9]\d* of them of resumed runs", printed)


@pytest.mark.whole
def test_a_writer_that_wrote_after_the_release_would_be_found_out():
    status, surplus, printed = kills("8", "late")
    assert status == 1 and min(surplus) < 0, printed
