"""Runs that are killed at any point, by benchmarks/kills.py, which forks them all from one process."""

import re
import runpy
import sys
from pathlib import Path

from jobs import FORKS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def kill(printed, count):
    """Runs benchmarks/kills.py in a process that has imported what is slow."""
    sys.argv = ["kills.py", str(count)]
    sys.path.insert(0, str(BENCHMARKS))
    with printed.open("w") as sys.stdout:
        runpy.run_path(str(BENCHMARKS / "kills.py"), run_name="__main__")


def test_no_kill_leaves_a_ledger_with_fewer_rounds_than_were_released(tmp_path):
    """`python benchmarks/kills.py 12 late` shows that one which a round reached too late would be found."""
    process = FORKS.Process(target=kill, args=(tmp_path / "printed.txt", 12))
    process.start()
    process.join(300)
    printed = (tmp_path / "printed.txt").read_text()
    found = re.findall(r"^ *(\d+) ledgers with ([-+]\d+) rounds", printed, re.MULTILINE)
    surplus = {int(rounds): int(count) for count, rounds in found}
    assert process.exitcode == 0, printed
    assert sum(surplus.values()) == 12 and min(surplus) >= 0
    assert re.search(r"12 kills, [1-9]\d* of them of resumed runs", printed)
