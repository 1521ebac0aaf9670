"""Correlated noise against DP-SGD: predicted errors.

    python benchmarks/banded.py    # half a minute

Predicted: z ‖A C⁻¹‖_F/√T over b, relative to b = 1, for n = 50 000, ten epochs, δ = 1e-5; what auto takes is in bold.
"Whole parts": 1/q parts, of which each record is in every one of its rounds, so that nothing is amplified.
"""

from torch import nn

from dpexp import Banded, CyclicPoisson, Target, make_plan
from dpexp.privacy.noise.correlated import candidates, error

N, EPOCHS, DELTA, EPSILONS, MOMENTUM = 50_000, 10, 1e-5, (3.0, 8.0), 0.9


def predicted(batch: int, epsilon: float, noise: Banded, parts: int | None = None) -> float:
    size = {"expected_batch_size": batch} if parts is None else {"sampling_rate": 1 / parts}
    plan = make_plan(
        nn.Linear(1, 1), n=N, sampling=CyclicPoisson(**size, partitions=parts, epochs=EPOCHS),
        target=Target(epsilon=epsilon, delta=DELTA), noise=noise,
    )  # fmt: skip
    return plan.noise_multiplier * error(plan.bands, plan.rounds, noise.momentum)


def errors() -> None:
    print("| ε | B | momentum | bands | " + " | ".join(f"b = {b}" for b in candidates(512 / N, N)) + " | whole parts |")
    print("|---|---|---|---|" + "---|" * (1 + len([*candidates(512 / N, N)])))
    for epsilon in EPSILONS:
        for batch in (512, 1024, 4096):
            tried = [*candidates(batch / N, N)]
            for momentum, kind in ((0.0, "sqrt"), (0.0, "optimal"), (MOMENTUM, "optimal")):
                base = predicted(batch, epsilon, Banded(1, kind, momentum))
                row = [predicted(batch, epsilon, Banded(b, kind, momentum)) / base for b in tried]
                whole = predicted(batch, epsilon, Banded(round(N / batch), kind, momentum), round(N / batch)) / base
                cells = [f"**{one:.3f}**" if one == min(row) else f"{one:.3f}" for one in row] + [""] * (7 - len(row))
                print(
                    f"| {epsilon:g} | {batch} | {momentum:g} | {kind} | {' | '.join(cells)} | {whole:.3f} |", flush=True
                )


if __name__ == "__main__":
    errors()
