"""Draws docs/joint.png, test accuracy by mechanism, group, clip_norm and allocation, from the runs of sweep=joint:

    python -m dpexp -m sweep=joint data=mnist data.root=…
    python -m dpexp -m sweep=joint data=fashion_mnist data.root=…
    python -m dpexp -m sweep=joint data=adult model=mlp group=flat,per_layer data.root=…
    python benchmarks/joint.py

Of each setting the better rate of the sweep counts, which favours no mechanism. It prints the best setting of each
mechanism, and what chance does: how far apart runs of one and the same mechanism are.
"""

from itertools import product
from pathlib import Path

import mlflow
from matplotlib.figure import Figure
from pandas import DataFrame

from dpexp.config import tracking_uri

SETTING = ["group", "mechanism", "clip_norm", "allocation"]
ALLOCATIONS = {"proportional": "o", "dimension_adjusted": "s", "min_variance": "^"}
COLOURS = {"separate": "C0", "joint": "C1"}


def settings(runs: DataFrame) -> DataFrame:
    """Test accuracy of each data set and setting, at the better rate."""
    frame = runs.rename(columns={f"tags.dpexp.{name}": name for name in ("data", *SETTING)})
    by_rate = frame.groupby(["data", *SETTING, "params.optimizer.lr"])["metrics.test_accuracy"].mean()
    return by_rate.groupby(["data", *SETTING]).max().rename("accuracy").reset_index()


def same(row) -> tuple:
    """What a setting is: alike where two settings are one mechanism."""
    allocation = "any" if row.group == "flat" else row.allocation
    # One vector to a group, or vectors of equal scales: joint clipping is separate clipping.
    if row.group == "per_layer" or row.clip_norm == "uniform":
        return row.data, row.group, "either", row.clip_norm, allocation
    return row.data, row.group, row.mechanism, row.clip_norm, allocation


def draw(frame: DataFrame, path: Path) -> None:
    names = [*frame["data"].unique()]
    rows = [*product(("flat", "conv_fc", "per_layer"), ("uniform", "dimension", "adaptive"))]
    figure = Figure(figsize=(4.2 * len(names), 4.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        own = frame[frame["data"] == name]
        for row in own.itertuples():
            y = rows.index((row.group, row.clip_norm)) + (0.16 if row.mechanism == "joint" else -0.16)
            marker = ALLOCATIONS[row.allocation]
            axes.plot(100 * row.accuracy, y, marker, color=COLOURS[row.mechanism], alpha=0.75, markersize=6)
        axes.set(title=name, xlabel="test accuracy, %")
        axes.set_yticks(range(len(rows)), [f"{group}, {norm}" for group, norm in rows])
        axes.grid(alpha=0.3)
    axes.invert_yaxis()
    for mechanism, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=mechanism)
    for allocation, marker in ALLOCATIONS.items():
        axes.plot([], [], marker, color="grey", label=allocation)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=130)


def tell(frame: DataFrame) -> None:
    frame = frame.assign(same=[same(row) for row in frame.itertuples()])
    spreads = frame.groupby("same")["accuracy"].agg(["std", "count"]).query("count > 1")
    chance = (spreads["std"].pow(2) * (spreads["count"] - 1)).sum() / (spreads["count"] - 1).sum()
    print(f"standard deviation of runs that are one mechanism: {100 * chance**0.5:.2f} points")
    for name, own in frame.groupby("data"):
        kinds = {"only separate": "separate", "only joint": "joint", "either": "either"}
        for told, mechanism in kinds.items():
            among = own[[one[2] == mechanism for one in own["same"]]]
            by = among.groupby("same")["accuracy"].mean()
            print(f"{name}, {told}: best {by.max():.2%} ({by.idxmax()[1:]}), median {by.median():.2%}")


if __name__ == "__main__":
    mlflow.set_tracking_uri(tracking_uri())
    runs = mlflow.search_runs(experiment_names=["joint"], filter_string="attributes.status = 'FINISHED'")
    found = settings(runs.dropna(subset="metrics.test_accuracy"))
    tell(found)
    draw(found, Path("docs/joint.png"))
