"""Prints a table on the digits from MLflow, and draws docs/digits.png. Run first:

python -m dpexp -m sweep=digits
python -m dpexp -m privacy.enabled=false 'seed=range(3)'
python benchmarks/digits_table.py
"""

from pathlib import Path

import mlflow
from matplotlib.figure import Figure

GROUPS = ("flat", "per_layer", "conv_fc")
ALPHAS = {"uniform": "separate", "dimension": "joint, α by dimension", "adaptive": "joint, learnt α"}
TARGETS = ("2.0", "8.0")


def main() -> None:
    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/outputs/mlflow.db")
    runs = mlflow.search_runs(
        experiment_names=["dpexp"], filter_string="attributes.status = 'FINISHED' and tags.dpexp.data = 'digits'"
    )
    accuracy = runs["metrics.test_accuracy"]
    twin = accuracy[runs["params.privacy.enabled"] == "False"]
    print(f"Non-private: {twin.mean():.1%} ± {twin.std():.1%} ({len(twin)} seeds)\n")
    columns = [(target, alpha) for target in TARGETS for alpha in ALPHAS]
    print("| `group` | " + " | ".join(f"ε = {float(t):g}, {ALPHAS[a]}" for t, a in columns) + " |")
    print("|---|" + "---|" * len(columns))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(TARGETS), sharey=True)
    for i, group in enumerate(GROUPS):
        cells = []
        for target, alpha in columns:
            chosen = accuracy[
                (runs["tags.dpexp.group"] == group)
                & (runs["tags.dpexp.alpha"] == alpha)
                & (runs["params.privacy.epsilon"] == target)
                & (runs["params.privacy.enabled"] == "True")
            ]
            cells.append(f"{chosen.mean():.1%} ± {chosen.std():.1%}")
            style = [*ALPHAS].index(alpha)
            panels[TARGETS.index(target)].bar(
                i + (style - 1) / 4, chosen.mean(), 0.22, yerr=chosen.std(), color=f"C{style}",
                label=ALPHAS[alpha] if i == 0 else None,
            )  # fmt: skip
        print(f"| `{group}` | " + " | ".join(cells) + " |")
    for target, axes in zip(TARGETS, panels, strict=True):
        axes.axhline(twin.mean(), color="black", linestyle=":", label="without privacy")
        axes.set(title=f"ε = {float(target):g}, δ = 1e-4", xticks=range(len(GROUPS)), xticklabels=GROUPS, ylim=(0.6, 1))
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("test accuracy on digits")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    Path("docs").mkdir(exist_ok=True)
    figure.savefig("docs/digits.png", dpi=110)


if __name__ == "__main__":
    main()
