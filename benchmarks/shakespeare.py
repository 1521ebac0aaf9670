"""Measures the accuracy of DP-FedAvg and DP-FedAdam against ε, on the next characters of tiny Shakespeare by users.

    python benchmarks/shakespeare.py data.root=… [OVERRIDE ...]

Beside them are the same trainings with next to no noise and a clipping norm that clips nothing. It prints a table and
draws docs/shakespeare.png, in half an hour; see comparisons.py.
"""

import statistics
import sys

from comparisons import Comparison, epsilons, run, shown
from matplotlib import pyplot as plt
from report import DOCS, Result

EPSILONS = (2, 4, 8, 16, 32)
SHAKESPEARE = Comparison(
    "experiment=shakespeare_users",
    {"DP-FedAvg": "", "DP-FedAdam": "optimizer=adam optimizer.lr=0.03 ~optimizer.momentum"},
    {"no privacy": "privacy.epsilon=null privacy.noise_multiplier=1e-5 clip_norm.value=1000"} | epsilons(*EPSILONS),
)


def draw(results: list[Result]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for k, server in enumerate(SHAKESPEARE.rows):
        plain, *private = [
            statistics.mean(one["accuracy"] for one in results if (one["row"], one["column"]) == (server, column))
            for column in SHAKESPEARE.columns
        ]
        axes.plot(EPSILONS, private, "o-", color=f"C{k}", label=server)
        label = f"{server.removeprefix('DP-')}, no privacy"
        axes.axhline(plain, color=f"C{k}", linestyle="--", linewidth=1, label=label)
    axes.set(xscale="log", xlabel="ε at δ = 1e-3, for users", ylabel="next characters found")
    axes.set_xticks(EPSILONS, [str(epsilon) for epsilon in EPSILONS], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False)
    figure.savefig(DOCS / "shakespeare.png", dpi=150)


if __name__ == "__main__":
    found = run("shakespeare", SHAKESPEARE, "", 1, sys.argv[1:])
    print(shown("shakespeare", SHAKESPEARE, found))
    draw(found)
