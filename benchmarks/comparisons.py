"""Starts jobs that differ by a choice, and prints the table of what they reach: test accuracy, ε, seconds a round.

    python benchmarks/comparisons.py DATA NAME [SEEDS] [KEY=VALUE …]

NAMEs are those of COMPARISONS; DATA holds the folders fashion_mnist and mnist; overrides are for all jobs.
What outputs/comparisons.jsonl has is not run again. Of several learning rates the one with the best mean is shown: that
choice is made on the test set, alike for all, and costs privacy that is not counted here.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from report import Result, kept, spread, table

FOUND = Path("outputs/comparisons.jsonl")


@dataclass(frozen=True)
class Comparison:
    """Overrides of `python -m dpexp`, where DATA is the folder given and WEIGHTS are those of the first job.

    Args:
        common: of all jobs.
        rows, columns: of the choices, by their names in the table; each pair is a cell.
        rates: learning rates, each tried in each cell; (): that of the job.
        first: of a job without privacy that is run before all.
    """

    common: str
    rows: dict[str, str]
    columns: dict[str, str] = field(default_factory=lambda: {"": ""})
    rates: tuple[float, ...] = ()
    first: str = ""


DIGITS = "sampling.expected_batch_size=512 sampling.steps=113"


def epsilons(*values: float) -> dict[str, str]:
    return {f"ε = {value:g}": f"privacy.epsilon={value:g}" for value in values}


def adaptive(initial: float = 1.0, quantile: float = 0.5, rate: float = 0.2) -> str:
    of = f"clip_norm.target_quantile={quantile:g} clip_norm.learning_rate={rate:g}"
    return f"clip_norm=adaptive clip_norm.initial={initial:g} {of}"


COMPARISONS = {
    "adaptive": Comparison(
        DIGITS,
        {f"fixed {value:g}": f"clip_norm=fixed clip_norm.value={value:g}" for value in (0.1, 0.3, 1, 3)}
        | {f"adaptive from {value:g}": adaptive(value) for value in (0.01, 1, 100)}
        | {
            "adaptive from 1, quantile 0.1": adaptive(quantile=0.1),
            "adaptive from 100, rate 0.5, quantile 0.1": adaptive(100, 0.1, 0.5),
        },
        rates=(0.02, 0.04, 0.08, 0.1, 0.2, 0.4),
    ),
    "banded": Comparison(
        "experiment=mnist_scattering data.root=DATA/mnist sampling.expected_batch_size=512 sampling.epochs=10",
        {"independent": "noise=gaussian", "correlated": "noise=banded"},
        epsilons(3, 8),
        (1, 2, 4),
    ),
    "batchnorm": Comparison(
        f"{DIGITS} model=resnet",
        {choice: f"batchnorm={choice}" for choice in ("groupnorm", "private", "freeze")},
        epsilons(3, 8),
        (0.25, 0.5, 1.0),
    ),
    "transfer_mnist": Comparison(
        "experiment=transfer data=fashion_mnist data.root=DATA/fashion_mnist",
        {
            "from scratch": "model.weights=null",
            "pretrained, head tuned": "model.weights=WEIGHTS fine_tuning=head",
            "pretrained, all tuned": "model.weights=WEIGHTS",
        },
        epsilons(0.5, 1, 2, 8),
        first="experiment=transfer data=mnist data.root=DATA/mnist privacy.enabled=false model.weights=null "
        "sampling.steps=350 optimizer.lr=0.05",
    ),
}


def job(folder: Path, *overrides: str) -> Result:
    """The result of `python -m dpexp`, which leaves its files in a folder."""
    aside = ("tracking=none", "trainer.num_evaluations=0", "trainer.threads=1", f"hydra.run.dir={folder}")
    command = [sys.executable, "-m", "dpexp", *overrides, *aside]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text())


def reached(comparison: Comparison, which: Result, data: str, folder: Path) -> Result:
    """What the job of a cell, a rate and a seed reaches."""
    words = f"{comparison.common} {comparison.rows[which['row']]} {comparison.columns[which['column']]}"
    words = f"{words} seed={which['seed']}".replace("DATA", data)
    if which["rate"]:
        words += f" optimizer.lr={which['rate']:g}"
    if "WEIGHTS" in words:
        weights = folder / "first" / "weights.safetensors"
        if not weights.exists():
            job(weights.parent, *comparison.first.replace("DATA", data).split())
        words = words.replace("WEIGHTS", str(weights))
    found = job(Path(tempfile.mkdtemp(dir=folder)), *words.split(), *which["given"])
    accuracy, epsilon = found["metrics"]["test_accuracy"], found["epsilon"]["pld"]
    return {"accuracy": accuracy, "epsilon": epsilon, "seconds": found["seconds"] / found["rounds"]}


def run(name: str, comparison: Comparison, data: str, seeds: int, given: list[str]) -> list[Result]:
    """What each job of a comparison reached, those of earlier calls with the same overrides too."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for row, column in product(comparison.rows, comparison.columns):
            for rate, seed in product(comparison.rates or (None,), range(seeds)):
                which = {"name": name, "row": row, "column": column, "rate": rate, "seed": seed, "given": given}
                results.append(kept(FOUND, which, partial(reached, comparison, which, data, Path(folder))))
    return results


def cell(results: list[Result]) -> str:
    """Of the learning rate with the best mean: accuracy, ε and seconds a round."""
    by_rate = [[one for one in results if one["rate"] == rate] for rate in {one["rate"] for one in results}]
    best = max(by_rate, key=lambda some: statistics.mean(one["accuracy"] for one in some))
    accuracy = spread(100 * one["accuracy"] for one in best)
    rate = f" (rate {best[0]['rate']:g})" if best[0]["rate"] else ""
    spent, seconds = max(one["epsilon"] for one in best), statistics.median(one["seconds"] for one in best)
    return f"{accuracy} %{rate}, ε {spent:.4f}, {seconds:.2f} s"


def shown(name: str, comparison: Comparison, results: list[Result]) -> str:
    rows = []
    for row in comparison.rows:
        of_row = [one for one in results if one["row"] == row]
        cells = [cell([one for one in of_row if one["column"] == column]) for column in comparison.columns]
        rows.append((row, *cells))
    return table((name, *comparison.columns), rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [data, name, *rest] if name in COMPARISONS:
            seeds = next((int(word) for word in rest if word.isdigit()), 1)
            overrides = [word for word in rest if not word.isdigit()]
            found = run(name, COMPARISONS[name], str(Path(data).resolve()), seeds, overrides)
            print(shown(name, COMPARISONS[name], found))
        case _:
            sys.exit(f"{__doc__}\nNAME is among {', '.join(COMPARISONS)}.")
