"""docs/results.md is what benchmarks/results.py makes of runs: one is run again; the commands are still ones."""

import dataclasses
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(
    r"\| (\w+) \| [^|]*\| ([\d.]+)(?: ± ([\d.]+))? % \| ([\d.]+) \| [-e\d.]+ \| (\d+) \| [\d.]+ \| `([^`]+)` \|"
)


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("results")


def lines(page: Path, results) -> list[tuple[str, ...]]:
    """(name, accuracy, its spread, ε, seeds, command) of each row between the page's marks."""
    table = page.read_text().partition(results.BEGIN)[2].partition(results.END)[0]
    found = LINE.findall(table)
    assert len(found) == sum(line.startswith("| ") and "published" not in line for line in table.splitlines())
    return found


def test_every_experiment_is_on_the_page_at_no_more_than_its_target(results, dpexp_job, capsys):
    page = lines(ROOT / "docs" / "results.md", results)
    assert {name for name, *_ in page} == set(results.ROWS) and len(results.ROWS) >= 10
    for _, _, _, epsilon, _, command in page:
        dpexp_job(*command.split(), "--cfg", "job", "--package", "privacy")
        target = re.search(r"epsilon: ([\d.]+)", capsys.readouterr().out)
        assert float(epsilon) <= float(target.group(1))


def test_a_small_one_gives_again_what_the_page_has(results, tmp_path, monkeypatch):
    """One seed, and the bound is four standard deviations of the seeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(results.ROWS, "digits", dataclasses.replace(results.ROWS["digits"], seeds=1))
    results.run("digits", tmp_path)
    runs = results.found(["digits", "adult"])
    assert list(runs) == ["digits"]
    copy = tmp_path / "page.md"
    copy.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    results.write(runs, copy)
    text = copy.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "torch 2" in text
    [(_, accuracy, _, epsilon, seeds, command)] = lines(copy, results)
    [(_, before, spread, epsilon_before, _, before_command)] = [
        line for line in lines(ROOT / "docs" / "results.md", results) if line[0] == "digits"
    ]
    assert (seeds, command, epsilon) == ("1", before_command, epsilon_before)
    assert abs(float(accuracy) - float(before)) <= 4 * max(float(spread), 1.0)
