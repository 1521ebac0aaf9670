"""What the scripts print and keep: Markdown tables, passages of pages, and results that need not be found again."""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
END = "<!-- until here -->"

Result = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    """A script's options; its help is the script's docstring, as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


# Tables


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: object) -> str:
    return f"{row(*cells)}\n{'|---' * len(cells)}|"


def table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([head(*columns), *(row(*cells) for cells in rows)])


def cells_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Mean ± standard deviation; of one value, the value."""
    values = [*values]
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


# Pages


def passage(page: str, begin: str, end: str = END) -> str:
    """What stands between two marks of a page of docs/."""
    _, found, rest = (DOCS / page).read_text().partition(begin)
    between, ended, _ = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"docs/{page} has no {begin} … {end}.")
    return between


def write(text: str, page: str, begin: str, end: str = END) -> None:
    """Puts a text between two marks of a page of docs/."""
    old = begin + passage(page, begin, end) + end
    path = DOCS / page
    path.write_text(path.read_text().replace(old, f"{begin}\n\n{text}\n\n{end}"))


# Results


def read(path: Path) -> list[Result]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def kept(path: Path, which: Result, find: Callable[[], Result]) -> Result:
    """The result in a JSONL file that has all items of `which`; found now, and added to the file, if none has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for result in read(path):
        if which.items() <= result.items():
            return result
    result = which | find()
    append(path, result)
    return result


def answer(command: Iterable[str | Path], **environment: str) -> Result:
    """What a process of its own prints as JSON on its last line; `error` is the last that it says if it fails."""
    ran = subprocess.run([*command], env=os.environ | environment, capture_output=True, text=True)
    if ran.returncode:
        return {"error": (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1]}
    return json.loads(ran.stdout.splitlines()[-1])
