"""Runs the experiments of docs/results.md, and writes its table and figure from their MLflow runs.

    python benchmarks/results.py run DATA [NAME …] [KEY=VALUE …]   # each at its seeds; what was run is not run again
    python benchmarks/results.py write      # docs/results.md between its two marks, and docs/curves.png

DATA holds the folders mnist, fashion_mnist, adult and shakespeare. NAMEs are those of the table's first column, all if
none is given; overrides are for all of them, such as trainer.threads=1. Runs are in the experiments results/NAME of
$MLFLOW_TRACKING_URI, or of outputs/mlflow.db here.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlflow
from matplotlib.figure import Figure
from pandas import DataFrame

from dpexp.accounting.rounding import up
from dpexp.config import tracking_uri
from dpexp.tracking.read import trials

PAGE = Path("docs/results.md")
BEGIN, END = "<!-- written by benchmarks/results.py -->", "<!-- until here -->"
CURVE = (0.5, 1, 2, 3, 8)
TORCH = "tags.dpexp.torch"
COMMIT, DIRTY = "tags.dpexp.commit", "tags.dpexp.dirty"  # "none": run where there is no git


@dataclass(frozen=True)
class Row:
    """An experiment: the command that runs it, how often, and what others report for it.

    Args:
        command: what follows `python -m dpexp`.
        folder: of DATA, which the command is given as data.root; None: it needs none.
        published: their test accuracy, ε and source.
        at: their figure as a point of the curve: (ε, accuracy).
        seeds: so many, from 0 on.
        epsilons: it is run at each; (): at that of the command.
    """

    command: str
    folder: str | None
    published: str = ""
    seeds: int = 3
    epsilons: tuple[float, ...] = ()
    at: tuple[float, float] | None = None


ROWS = {
    "digits": Row("group=conv_fc mechanism=joint", None),
    "pca_mlp": Row(
        "experiment=pca_mlp", "mnist", "95 % at ε = 2, Abadi et al. 2016", epsilons=(2,), at=(2, 0.95),
    ),
    "mnist_scattering": Row(
        "experiment=mnist_scattering", "mnist", "98.7 % at ε = 3, Tramèr & Boneh 2021", seeds=1, at=(3, 0.987)
    ),
    "fashion_scattering": Row(
        "experiment=fashion_scattering", "fashion_mnist", "89.7 % at ε = 3, Tramèr & Boneh 2021", seeds=1, at=(3, 0.897)
    ),
    "mnist_frontier": Row(
        "experiment=mnist_frontier", "mnist", "98.7 % at ε = 3, Tramèr & Boneh 2021", 5, CURVE, (3, 0.987)
    ),
    "fashion_frontier": Row(
        "experiment=fashion_frontier", "fashion_mnist", "89.7 % at ε = 3, Tramèr & Boneh 2021", 5, CURVE, (3, 0.897)
    ),
    "adult": Row("experiment=adult", "adult"),
    "mnist_users": Row("experiment=mnist_users", "mnist"),
    "shakespeare_users": Row("experiment=shakespeare_users", "shakespeare", seeds=1),
}  # fmt: skip


SPEED = ("trainer.threads", "trainer.max_physical_batch_size", "trainer.num_workers")
ASIDE = ("tracking.", "data.root=", "data.cache=", *(f"{key}=" for key in SPEED))  # what changes no figure


def run(name: str, data: Path, *aside: str) -> None:
    """Trains one row's experiment at its seeds.

    Args:
        aside: overrides beside the row's, as ASIDE has them.
    """
    row = ROWS[name]
    given = [*row.command.split(), f"seed=range({row.seeds})", f"tracking.experiment=results/{name}", *aside]
    if row.folder is not None:
        given.append(f"data.root={data / row.folder}")
    if row.epsilons:
        given.append(f"privacy.epsilon={','.join(map(str, row.epsilons))}")
    subprocess.run([sys.executable, "-m", "dpexp", "-m", *given], check=True)


def found(names: Iterable[str]) -> dict[str, DataFrame]:
    """The finished private runs of each row, one a seed and ε: the last.

    Raises:
        ValueError: at one ε there are runs of several settings, commits or versions of torch.
    """
    uri, runs = tracking_uri(), {}
    mlflow.set_tracking_uri(uri)
    there = {experiment.name for experiment in mlflow.search_experiments()}
    for name in [name for name in names if f"results/{name}" in there]:
        own = trials(uri, [f"results/{name}"])
        own = own[(own["status"] == "FINISHED") & (own["private"] == "yes")].dropna(subset=["test_accuracy", "epsilon"])
        if own.empty:
            continue
        raw = mlflow.search_runs(experiment_names=[f"results/{name}"])
        raw = raw.assign(**{tag: raw[tag].fillna("none") if tag in raw else "none" for tag in (COMMIT, DIRTY, TORCH)})
        frame = own.merge(raw.drop(columns="status"), on="run_id").sort_values("start_time")
        frame["target"] = frame["params.privacy.epsilon"].astype(float)
        frame = frame.drop_duplicates(["target", "seed"], keep="last")
        for target, alike in frame.groupby("target"):
            trainers = alike.filter(regex="^params.trainer").drop(
                columns=[f"params.{key}" for key in SPEED], errors="ignore"
            )
            settings = alike["configuration"].map(_but_for_places) + trainers.fillna("").astype(str).agg(
                " ".join, axis=1
            )
            several = settings.nunique(), alike[[COMMIT, DIRTY, TORCH]].drop_duplicates().shape[0]
            if several != (1, 1):
                raise ValueError(
                    f"results/{name} at ε = {target:g} has runs of {several[0]} settings and {several[1]} commits or "
                    "versions of torch. "
                    "Delete those that the page is not about, or run all of them into another MLFLOW_TRACKING_URI."
                )
        runs[name] = frame
    return runs


def _but_for_places(configuration: str) -> str:
    """Without where data, features and checkpoints are kept."""
    settings = json.loads(configuration)
    places = ("data.root", "data.module.root", "data.cache", "data.id", "checkpoint.")
    return json.dumps({key: value for key, value in settings.items() if not key.startswith(places)})


def table(runs: dict[str, DataFrame]) -> list[str]:
    lines = [
        "| | published | here | ε, at most | δ | seeds | minutes | `python -m dpexp …` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, frame in runs.items():
        row = ROWS[name]
        for target, own in frame.groupby("target"):
            told = row.published if row.at is None or target == row.at[0] else ""
            command = row.command + (f" privacy.epsilon={target:g}" if row.epsilons else "")
            minutes = ((own["end_time"] - own["start_time"]).dt.total_seconds() / 60).median()
            lines.append(
                f"| {name} | {told} | {_percent(own['test_accuracy'])} | {up(own['epsilon'].max(), 4)} | "
                f"{own['delta'].max():g} | "
                f"{len(own)} | {minutes:.1f} | `{command}` |"
            )
    return lines


def _percent(accuracy) -> str:
    spread = f" ± {100 * accuracy.std():.2f}" if len(accuracy) > 1 else ""
    return f"{100 * accuracy.mean():.2f}{spread} %"


def versions(runs: dict[str, DataFrame]) -> str:
    """Of what the runs were made."""

    def all_of(tag: str) -> str:
        column = f"tags.dpexp.{tag}"
        values = {value for frame in runs.values() if column in frame for value in frame[column].dropna()}
        return ", ".join(sorted(value[:10] for value in values))

    dirty = any((frame[DIRTY] != "no").any() for frame in runs.values())
    changed = " with changes that no commit has" if dirty else ""
    return (
        f"dpexp at commit {all_of('commit')}{changed}, torch {all_of('torch')}, "
        f"lightning {all_of('lightning')}, dp-accounting {all_of('accounting')}, Python {all_of('python')}."
    )


def curves(runs: dict[str, DataFrame], path: Path) -> None:
    """Accuracy against ε of the rows that have several, with what others report."""
    shown = {name: frame for name, frame in runs.items() if frame["target"].nunique() > 1}
    figure = Figure(figsize=(4.6 * max(1, len(shown)), 3.6), layout="constrained")
    for axes, (name, frame) in zip(
        figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown.items(), strict=False
    ):
        own = frame.assign(target=frame["params.privacy.epsilon"].astype(float)).groupby("target")[
            "metrics.test_accuracy"
        ]
        axes.errorbar(
            [*own.mean().index], 100 * own.mean(), 100 * own.std().fillna(0), marker="o", capsize=3, label="here"
        )
        if ROWS[name].at:
            epsilon, accuracy = ROWS[name].at
            axes.plot([epsilon], [100 * accuracy], "k*", markersize=10, label=ROWS[name].published.split(", ")[-1])
        axes.set_xscale("log")
        axes.set_xticks([*own.mean().index], [f"{target:g}" for target in own.mean().index])
        axes.minorticks_off()
        axes.set(title=name, xlabel="ε at δ = 1e-5", ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)


def write(runs: dict[str, DataFrame], page: Path) -> None:
    """Replaces what stands between the page's two marks.

    Raises:
        ValueError: it has no marks.
    """
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no {BEGIN} … {END}.")
    text = "\n".join([BEGIN, "", *table(runs), "", versions(runs), "", END])
    page.write_text(before + text + after)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", data, *names]:
            overrides = [name for name in names if "=" in name]
            if wrong := [override for override in overrides if not override.startswith(ASIDE)]:
                sys.exit(f"{wrong[0]} would be another experiment; {', '.join(ASIDE)} may be given.")
            for name in [name for name in names if "=" not in name] or ROWS:
                run(name, Path(data).resolve(), *overrides)
        case ["write"]:
            runs = found(ROWS)
            write(runs, PAGE)
            curves(runs, PAGE.parent / "curves.png")
        case _:
            sys.exit(__doc__)
