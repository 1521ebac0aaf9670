"""Correlated noise against DP-SGD: predicted errors.

    python benchmarks/banded.py    # half a minute

Predicted: z ‖A C⁻¹‖_F/√T over b, relative to b = 1, for n = 50 000, ten epochs, δ = 1e-5; what auto takes is in bold.
"Whole parts": 1/q parts, of which each record is in every one of its rounds, so that nothing is amplified.
"""

from collections.abc import Iterator
from itertools import product

from report import head, row
from torch import nn

from dpexp import Banded, CyclicPoisson, Target, make_plan
from dpexp.privacy.noise.correlated import candidates, error

N, EPOCHS, DELTA, EPSILONS, MOMENTUM = 50_000, 10, 1e-5, (3.0, 8.0), 0.9
MOST = len([*candidates(512 / N, N)])  # columns


def predicted(batch: int, epsilon: float, noise: Banded, parts: int | None = None) -> float:
    size = {"expected_batch_size": batch} if parts is None else {"sampling_rate": 1 / parts}
    plan = make_plan(
        nn.Linear(1, 1), n=N, sampling=CyclicPoisson(**size, partitions=parts, epochs=EPOCHS),
        target=Target(epsilon=epsilon, delta=DELTA), noise=noise,
    )  # fmt: skip
    return plan.noise_multiplier * error(plan.bands, plan.rounds, noise.momentum)


def cells(tried: list[int], batch: int, epsilon: float, kind: str, momentum: float) -> Iterator[str]:
    base = predicted(batch, epsilon, Banded(1, kind, momentum))
    found = [predicted(batch, epsilon, Banded(b, kind, momentum)) / base for b in tried]
    for one in found:
        yield f"**{one:.3f}**" if one == min(found) else f"{one:.3f}"
    yield from [""] * (MOST - len(found))
    whole = round(N / batch)
    yield f"{predicted(batch, epsilon, Banded(whole, kind, momentum), whole) / base:.3f}"


def errors() -> None:
    print(head("ε", "B", "momentum", "bands", *(f"b = {b}" for b in candidates(512 / N, N)), "whole parts"))
    for epsilon, batch in product(EPSILONS, (512, 1024, 4096)):
        for momentum, kind in ((0.0, "sqrt"), (0.0, "optimal"), (MOMENTUM, "optimal")):
            found = cells([*candidates(batch / N, N)], batch, epsilon, kind, momentum)
            print(row(f"{epsilon:g}", batch, f"{momentum:g}", kind, *found), flush=True)


if __name__ == "__main__":
    errors()
