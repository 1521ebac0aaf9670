"""The noise that each sampling policy needs: a table, of which docs/results.md has a part.

    python benchmarks/sampling.py    # ten minutes

σ̃/S at the same ε, sampling rate 1/t and rounds E·t, with t and E as in docs/results.md. Under shuffle
a record is replaced with null, under fixed_size with another (the sum moves by 2S); otherwise one is added or removed.
"""

from report import head, row
from torch import nn

from dpexp import Target, make_plan
from dpexp.accounting import sampling

EXPERIMENTS = {  # n, t, epochs, δ
    "digits": (1437, 4, 25, 1e-4),
    "adult": (30_162, 29, 10, 1e-5),
    "mnist_frontier": (60_000, 7, 29, 1e-5),
    "mnist_scattering": (60_000, 15, 40, 1e-5),
    "pca_mlp": (60_000, 29, 15, 1e-5),
    "mnist_cnn": (60_000, 59, 40, 1e-5),
    "cifar10_wrn": (50_000, 12, 205, 1e-5),
}
OPTIONS = {
    "poisson": {}, "random_allocation": {}, "shuffle": {}, "fixed_size": {}, "cyclic_poisson": {"partitions": 2},
}  # fmt: skip


def ratio(n: int, t: int, epochs: int, delta: float, epsilon: float, policy: str) -> float:
    """σ̃/S; n is rounded to a multiple of t, for whole batches."""
    n, kind = round(n / t) * t, sampling.POLICIES[policy]
    plan = make_plan(
        nn.Linear(1, 1), n=n, sampling=kind(sampling_rate=1 / t, steps=epochs * t, **OPTIONS[policy]),
        target=Target(epsilon=epsilon, delta=delta),
    )  # fmt: skip
    (group,) = plan.groups
    return group.sigma / group.S


def main() -> None:
    names = [name.replace("_", " ") for name in OPTIONS]
    print(head("", "t", "epochs", "ε", *names, "random allocation against Poisson"))
    for name, (n, t, epochs, delta) in EXPERIMENTS.items():
        for epsilon in (1.0, 3.0, 8.0):
            found = {policy: ratio(n, t, epochs, delta, epsilon, policy) for policy in OPTIONS}
            less = found["random_allocation"] / found["poisson"] - 1
            cells = [f"{value:.4g}" for value in found.values()]
            print(row(name, t, epochs, f"{epsilon:g}", *cells, f"{less:+.1%}"), flush=True)


if __name__ == "__main__":
    main()
