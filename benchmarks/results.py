"""Runs the experiments of docs/results.md, and writes its table and figure from their MLflow runs.

    python benchmarks/results.py run DATA [NAME …] [KEY=VALUE …]   # each at its seeds; what was run is not run again
    python benchmarks/results.py write      # docs/results.csv, docs/results.md between its two marks, docs/curves.png
    python benchmarks/results.py texts      # likewise, with docs/texts.png in place of docs/curves.png

DATA holds the folders mnist, fashion_mnist, cifar10, adult, shakespeare and debian. NAMEs are those of ROWS, all if
none is given; overrides are for all of them, such as trainer.threads=1. Runs are in the experiments results/NAME of
$MLFLOW_TRACKING_URI, or of outputs/mlflow.db here.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlflow
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat, read_csv
from report import DOCS, cells_of, head, passage, spread, write
from report import row as line

from dpexp.accounting.rounding import up
from dpexp.config import tracking_uri
from dpexp.tracking.read import trials

RUNS = DOCS / "results.csv"
BEGIN = "<!-- written by benchmarks/results.py -->"
CURVE = (1, 2, 3, 8)
TORCH = "tags.dpexp.torch"
COMMIT, DIRTY = "tags.dpexp.commit", "tags.dpexp.dirty"  # "none": run where there is no git


@dataclass(frozen=True)
class Row:
    """An experiment: the command that runs it, how often, and what others report for it.

    Args:
        command: what follows `python -m dpexp`.
        folder: of DATA; None: it needs none.
        files: keys of the command -> what they are given of the folder; "": the folder itself.
        published: at each ε, the best test accuracy that others report, in per cent, and who.
        seeds: so many, from 0 on.
        epsilons: it is run at each; (): at that of the command.
        tested: number of test records.
        title: of its curve in the figure.
        always: test accuracy of always giving the most frequent class, in per cent, for the figure of texts; None: it
            is not there.
    """

    command: str
    folder: str | None
    published: Mapping[float, tuple[float, str]] = field(default_factory=dict)
    seeds: int = 3
    epsilons: tuple[float, ...] = ()
    tested: int = 10_000
    title: str = ""
    always: float | None = None
    files: Mapping[str, str] = field(default_factory=lambda: {"data.root": ""})


DPSUR, SCATTERING = "DPSUR, 2024", "Tramèr & Boneh, 2021"
DEBIAN: dict[str, Any] = {
    "tested": 6061, "always": 11.04, "files": {"data.path": "train.jsonl", "data.test_path": "test.jsonl"}
}  # fmt: skip
ROWS = {
    "digits": Row("group=conv_fc mechanism=joint", None, tested=360),
    "pca_mlp": Row("experiment=pca_mlp", "mnist", {2: (95, "Abadi et al., 2016")}, epsilons=(2,)),
    "mnist_scattering": Row("experiment=mnist_scattering", "mnist", {3: (98.7, SCATTERING)}),
    "fashion_scattering": Row("experiment=fashion_scattering", "fashion_mnist", {3: (89.7, SCATTERING)}),
    "mnist_frontier": Row(
        "experiment=mnist_frontier", "mnist", {1: (98.17, DPSUR), 2: (98.74, DPSUR), 3: (98.95, DPSUR)}, 5, CURVE,
        title="MNIST",
    ),
    "fashion_frontier": Row(
        "experiment=fashion_frontier", "fashion_mnist", {1: (88.38, DPSUR), 2: (89.34, DPSUR), 3: (89.90, DPSUR)}, 5,
        CURVE, title="Fashion-MNIST",
    ),
    "cifar10_features": Row(  # no published figure beside it: its images are a JPEG copy
        "experiment=cifar10_features", "cifar10", epsilons=(1, 3, 8),
        title="CIFAR-10, pretrained features",
    ),
    "cifar10_scattering": Row(
        "experiment=cifar10_scattering", "cifar10", epsilons=CURVE,
        title="CIFAR-10, no public data",
    ),
    "adult": Row(
        "experiment=adult", "adult", {0.07: (81.3, "S-GBDT, 2023"), 0.5: (82.9, "S-GBDT, 2023, at ε = 0.54")},
        5, (0.07, 0.1, 0.5, 1, 3), tested=16_281, title="Adult: incomes, a table",
    ),
    "mnist_users": Row("experiment=mnist_users", "mnist"),
    "shakespeare_users": Row("experiment=shakespeare_users", "shakespeare", seeds=1, tested=0),
    "text_features": Row(
        "experiment=text_features data.n=53951 privacy.delta=1e-6", "debian", epsilons=(1, 3, 8),
        title="linear, on embeddings", **DEBIAN,
    ),
    "text_lora": Row(
        "experiment=text_lora data.n=53951 privacy.delta=1e-6", "debian", epsilons=(1, 3, 8), title="LoRA",
        **DEBIAN,
    ),
}  # fmt: skip


SPEED = ("trainer.compile", "trainer.threads", "trainer.max_physical_batch_size", "trainer.num_workers")
COPIES = ("data.encoder", "model.name")  # of what the hub has
ASIDE = ("tracking.", *(f"{key}=" for key in ("data.root", "data.cache", *COPIES, *SPEED)))  # what changes no figure


def run(name: str, data: Path, *aside: str) -> None:
    """Trains one row's experiment at its seeds.

    Args:
        aside: overrides beside the row's, as ASIDE has them.
    """
    row = ROWS[name]
    given = [*row.command.split(), f"seed=range({row.seeds})", f"tracking.experiment=results/{name}", *aside]
    if row.folder is not None:
        given += [f"{key}={data / row.folder / name}" for key, name in row.files.items()]
    if row.epsilons:
        given.append(f"privacy.epsilon={','.join(map(str, row.epsilons))}")
    subprocess.run([sys.executable, "-m", "dpexp", "-m", *given], check=True)


def found() -> DataFrame:
    """The finished private runs of all rows, in the columns of RUNS."""
    uri = tracking_uri()
    mlflow.set_tracking_uri(uri)
    there = {experiment.name for experiment in mlflow.search_experiments()}
    frames = [runs_of(name, uri) for name in ROWS if f"results/{name}" in there]
    return concat(frames) if frames else DataFrame()


def runs_of(name: str, uri: str) -> DataFrame:
    own = trials(uri, [f"results/{name}"])
    own = own[(own["status"] == "FINISHED") & (own["private"] == "yes")].dropna(subset=["test_accuracy", "epsilon"])
    raw = mlflow.search_runs(experiment_names=[f"results/{name}"])
    for tag in (COMMIT, DIRTY, TORCH):
        raw[tag] = raw[tag].fillna("none") if tag in raw else "none"
    runs = own.merge(raw.drop(columns="status"), on="run_id").sort_values("start_time")
    return DataFrame({
        "experiment": name,
        "target": runs["params.privacy.epsilon"].astype(float),
        "seed": runs["seed"].astype(int),
        "epsilon": runs["epsilon"].round(7),
        "accuracy": runs["test_accuracy"].round(5),
        "minutes": ((runs["end_time"] - runs["start_time"]).dt.total_seconds() / 60).round(1),
        "settings": settings_of(runs),
        "commit": runs[COMMIT].str[:7] + runs[DIRTY].ne("no").map({True: "+", False: ""}),
    })  # fmt: skip


def settings_of(runs: DataFrame) -> list[str]:
    """A digest of each run's configuration, of its Trainer but for what changes speed alone, and of torch's version."""
    speed = [f"params.{key}" for key in SPEED]
    trainers = runs.filter(regex="^params.trainer").drop(columns=speed, errors="ignore")
    digests = []
    for (_, trainer), configuration, torch in zip(trainers.iterrows(), runs["configuration"], runs[TORCH], strict=True):
        given = " ".join(f"{key}={value}" for key, value in trainer.dropna().sort_index().items())
        digests.append(sha256(f"{_but_for_places(configuration)}{given}{torch}".encode()).hexdigest()[:8])
    return digests


def _but_for_places(configuration: str) -> str:
    """Without where data, features and checkpoints are kept."""
    settings = json.loads(configuration)
    places = (
        "data.root", "data.module.root", "data.cache", "data.id", "checkpoint.", "data.path", "data.test_path",
        "data.module.path", "data.module.test_path", *COPIES, "data.module.tokenizer", "data.features_of.name",
    )  # fmt: skip
    return json.dumps({key: value for key, value in settings.items() if not key.startswith(places)}, sort_keys=True)


HEAD = (
    "`python -m dpexp …`", "ε, at most", "here, %", "published, %", "margin, points", "minutes",
)  # fmt: skip


def lines_of(runs: DataFrame) -> list[str]:
    """A row for each experiment and ε, of the runs that have the settings and the version of torch of the last one."""
    lines = []
    for (name, target), alike in runs.groupby(["experiment", "target"], sort=False):
        own, row = alike[alike["settings"] == alike["settings"].iloc[-1]], ROWS[name]
        accuracy = 100 * own["accuracy"]
        best, who = row.published.get(target, (math.nan, ""))
        command = f"{row.command} privacy.epsilon={target:g}" if row.epsilons else row.command
        lines.append(line(
            f"`{command}`", up(own["epsilon"].max(), 4), spread(accuracy, 2).replace(" ", "\u00a0"),
            f"{best:g}, {who}" if who else "", margin(accuracy, best, row.tested) if who else "",
            f"{own['minutes'].median():.1f}",
        ))  # fmt: skip
    return lines


def margin(accuracy: Series, published: float, tested: int) -> str:
    """How far the mean accuracy is from a published one, in points. *Above*: by more than 2 standard errors of the mean
    over runs, and more than 1 of an accuracy on so many test records."""
    points, of_seeds = accuracy.mean() - published, accuracy.std() / len(accuracy) ** 0.5  # NaN of one seed
    of_test = (accuracy.mean() * (100 - accuracy.mean()) / tested) ** 0.5
    above = ", **above**" if points > max(2 * of_seeds, of_test) and len(accuracy) > 1 else ""
    return f"{points:+.2f}{above}"


def row_of(command: str) -> str:
    """The name of the row that a cell of the table's first column is of."""
    without_epsilon = re.sub(r" privacy\.epsilon=.*", "", command.strip("`"))
    return next(name for name, row in ROWS.items() if row.command == without_epsilon)


def points_of(lines: list[str]) -> dict[str, dict[float, tuple[float, float]]]:
    """Of each experiment: ε -> test accuracy, and its standard deviation."""
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for command, epsilon, here, *_ in map(cells_of, lines):
        mean, _, spread = here.partition("±")
        points.setdefault(row_of(command), {})[float(epsilon)] = float(mean), float(spread or 0)
    return points


def panel(axes: Axes, curve: dict[float, tuple[float, float]], label: str) -> None:
    """A curve of accuracies against ε, with their standard deviations."""
    axes.errorbar([*curve], *zip(*curve.values(), strict=True), marker="o", capsize=3, label=label)
    axes.set_xscale("log")
    axes.set_xticks([*curve], [f"{epsilon:.2g}" for epsilon in curve])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def texts(lines: list[str], path: Path) -> None:
    """Accuracy against ε of the classifiers of texts."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name, curve in points_of(lines).items():
        if ROWS[name].always is not None:
            panel(axes, curve, ROWS[name].title)
    axes.axhline(DEBIAN["always"], color="gray", linestyle=":", label="the most frequent section")
    axes.set_ylim(0)
    axes.set(xlabel="ε at δ = 1e-6", ylabel="test accuracy, %")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=200)


def curves(lines: list[str], path: Path) -> None:
    """Accuracy against ε of the other experiments that have several rows, with what others report."""
    points = points_of(lines).items()
    shown = {name: curve for name, curve in points if ROWS[name].always is None and len(curve) > 1}
    names = [*shown, *[*shown][-1:] * (len(shown) % 2)]  # of an odd number the last has a row of its own
    grid = [names[k : k + 2] for k in range(0, len(names), 2)]
    figure = Figure(figsize=(6, 2.3 * len(grid)), layout="constrained")  # so narrow that a phone shows it whole
    for name, axes in figure.subplot_mosaic(grid).items():
        row = ROWS[name]
        panel(axes, shown[name], "dpexp")
        for marker, source in zip("*^v", dict.fromkeys(who for _, who in row.published.values()), strict=False):
            best = {epsilon: best for epsilon, (best, who) in row.published.items() if who == source}
            axes.plot([*best], [*best.values()], marker, color="black", markersize=9, label=source)
        axes.set_title(row.title, fontsize="medium")
        axes.set(xlabel="ε at δ = 1e-5", ylabel="test accuracy, %")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=200)


def place(line: str) -> tuple[int, float]:
    """Where a row stands in the table."""
    command, epsilon, *_ = cells_of(line)
    return [*ROWS].index(row_of(command)), float(epsilon)


def write_table() -> list[str]:
    """Adds the runs to RUNS, and replaces the rows of the page's table; rows without runs stay."""
    kept = read_csv(RUNS, dtype={"settings": str, "commit": str}) if RUNS.exists() else DataFrame()
    runs = concat([kept, found()]).drop_duplicates(["experiment", "target", "seed", "commit"], keep="last")
    runs.to_csv(RUNS, index=False)
    new = lines_of(runs)
    made = {cells_of(line)[0] for line in new}
    old = [line for line in passage("results.md", BEGIN).splitlines() if line.startswith("| ")][1:]
    lines = sorted([*new, *(line for line in old if cells_of(line)[0] not in made)], key=place)
    write("\n".join([head(*HEAD), *lines]), "results.md", BEGIN)
    return lines


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", data, *names]:
            overrides = [name for name in names if "=" in name]
            if wrong := [override for override in overrides if not override.startswith(ASIDE)]:
                sys.exit(f"{wrong[0]} would be another experiment; {', '.join(ASIDE)} may be given.")
            for name in [name for name in names if "=" not in name] or ROWS:
                run(name, Path(data).resolve(), *overrides)
        case ["write"]:
            curves(write_table(), DOCS / "curves.png")
        case ["texts"]:
            texts(write_table(), DOCS / "texts.png")
        case _:
            sys.exit(__doc__)
