"""Prints a table on the digits from MLflow, and draws docs/digits.png. Run first:

python -m dpexp -m sweep=digits
python -m dpexp -m privacy.enabled=false 'seed=range(3)'
python benchmarks/digits_table.py
"""

from pathlib import Path

import mlflow
from matplotlib.figure import Figure
from pandas import Series
from report import DOCS, head, row

GROUPS = ("flat", "per_layer", "conv_fc")
ALPHAS = {"uniform": "separate", "dimension": "joint, α by dimension", "adaptive": "joint, learnt α"}
TARGETS = ("2.0", "8.0")


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/outputs/mlflow.db")
    query = "attributes.status = 'FINISHED' and tags.dpexp.data = 'digits'"
    runs = mlflow.search_runs(experiment_names=["dpexp"], filter_string=query)
    accuracy = runs["metrics.test_accuracy"]
    private = runs["params.privacy.enabled"] == "True"
    twin = accuracy[~private]
    print(f"Non-private: {shown(twin)} ({len(twin)} seeds)\n")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = dict(zip(TARGETS, figure.subplots(1, len(TARGETS), sharey=True), strict=True))
    columns = [(target, alpha) for target in TARGETS for alpha in ALPHAS]
    print(head("`group`", *(f"ε = {float(target):g}, {ALPHAS[alpha]}" for target, alpha in columns)))
    for i, group in enumerate(GROUPS):
        own, cells = private & (runs["tags.dpexp.group"] == group), []
        for target, alpha in columns:
            is_alike = (runs["tags.dpexp.alpha"] == alpha) & (runs["params.privacy.epsilon"] == target)
            chosen, style = accuracy[own & is_alike], [*ALPHAS].index(alpha)
            cells.append(shown(chosen))
            given = {"color": f"C{style}", "label": ALPHAS[alpha] if i == 0 else None, "yerr": chosen.std()}
            panels[target].bar(i + (style - 1) / 4, chosen.mean(), 0.22, **given)
        print(row(f"`{group}`", *cells))
    for target, axes in panels.items():
        axes.axhline(twin.mean(), color="black", linestyle=":", label="without privacy")
        axes.set(title=f"ε = {float(target):g}, δ = 1e-4", xticks=range(len(GROUPS)), xticklabels=GROUPS, ylim=(0.6, 1))
        axes.grid(axis="y", alpha=0.3)
    panels[TARGETS[0]].set_ylabel("test accuracy on digits")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(DOCS / "digits.png", dpi=110)


def shown(accuracies: Series) -> str:
    return f"{accuracies.mean():.1%} ± {accuracies.std():.1%}"


if __name__ == "__main__":
    main()
