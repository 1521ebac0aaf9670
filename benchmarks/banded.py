"""Correlated noise against DP-SGD.

    python benchmarks/banded.py                             # predicted errors: half a minute
    python benchmarks/banded.py ROOT [SEEDS [RATE …]]       # accuracy on MNIST in ROOT: 2 to 3 minutes a training

Predicted: z ‖A C⁻¹‖_F/√T over b, relative to b = 1, for n = 50 000, ten epochs, δ = 1e-5; what auto takes is in bold.
"Whole parts": 1/q parts, of which each record is in every one of its rounds, so that nothing is amplified.

Accuracy: the CNN of experiment=mnist_cnn at B = 512, ten epochs, ε = 3 and 8, each noise at each learning rate. What is
in bold has the best mean over the seeds, so that comparing bold ones favours no noise; that choice was made on the test
set, and costs privacy that is not counted here.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

import dpexp
from dpexp import Clipping, Noise, Sampling, Target, make_plan
from dpexp.accounting.ledger import read_ledger
from dpexp.privacy.noise.correlated import candidates, error
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.training.classifier import Classifier
from dpexp.training.data import Mnist
from dpexp.training.models import cnn

N, EPOCHS, DELTA, EPSILONS, MOMENTUM = 50_000, 10, 1e-5, (3.0, 8.0), 0.9
BATCH, RATES = 512, (0.5, 1.0)


def predicted(batch: int, epsilon: float, noise: Noise, parts: int | None = None) -> float:
    size = {"expected_batch_size": batch} if parts is None else {"sampling_rate": 1 / parts}
    plan = make_plan(
        nn.Linear(1, 1), n=N, sampling=Sampling("cyclic_poisson", **size, partitions=parts, epochs=EPOCHS),
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
                base = predicted(batch, epsilon, Noise("banded", 1, kind, momentum))
                row = [predicted(batch, epsilon, Noise("banded", b, kind, momentum)) / base for b in tried]
                whole = (
                    predicted(batch, epsilon, Noise("banded", round(N / batch), kind, momentum), round(N / batch))
                    / base
                )
                cells = [f"**{one:.3f}**" if one == min(row) else f"{one:.3f}" for one in row] + [""] * (7 - len(row))
                print(
                    f"| {epsilon:g} | {batch} | {momentum:g} | {kind} | {' | '.join(cells)} | {whole:.3f} |", flush=True
                )


def trained(root: str, noise: Noise, epsilon: float, rate: float, seed: int) -> tuple[float, int, float]:
    """Test accuracy, how many bands, and ε."""
    torch.manual_seed(seed)
    module = Classifier(
        cnn((1, 28, 28), 10), lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)
    )
    torch.seed()  # samples and noise do not follow from the seed
    policy = "cyclic_poisson" if noise.kind == "banded" else "poisson"
    plan = make_plan(
        module, n=60_000, sampling=Sampling(policy, expected_batch_size=BATCH, epochs=EPOCHS),
        target=Target(epsilon=epsilon, delta=DELTA), clipping=Clipping(clip_norm=FixedClipNorm(0.1)), noise=noise,
    )  # fmt: skip
    data = Mnist(root)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ledger = Path(folder) / "ledger.jsonl"
        trainer = pl.Trainer(
            accelerator="auto", max_epochs=-1, limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[dpexp.PrivacyCallback(plan, ledger)],
        )  # fmt: skip
        trainer.fit(module, data)
        (found,) = trainer.test(module, data, verbose=False)
        return found["test_accuracy"], len(plan.bands), dpexp.epsilon(read_ledger(ledger), DELTA)


def accuracies(root: str, seeds: int, rates: tuple[float, ...]) -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    print("| ε | noise | " + " | ".join(f"lr = {rate:g}" for rate in rates) + " | ε spent | seconds each |")
    print("|---|---|" + "---|" * (len(rates) + 2))
    for epsilon in EPSILONS:
        for noise in (Noise(), Noise("banded", momentum=MOMENTUM)):
            started = time.monotonic()
            runs = [[trained(root, noise, epsilon, rate, seed) for seed in range(seeds)] for rate in rates]
            seconds = (time.monotonic() - started) / seeds / len(rates)
            means = [statistics.mean(accuracy for accuracy, _, _ in some) for some in runs]
            spreads = [statistics.stdev([a for a, _, _ in some]) if seeds > 1 else 0.0 for some in runs]
            cells = [f"{mean:.2%} ± {sd:.2%}" for mean, sd in zip(means, spreads, strict=True)]
            cells[means.index(max(means))] = f"**{cells[means.index(max(means))]}**"
            _, bands, spent = runs[0][0]
            name = "independent" if bands == 1 else f"b = {bands}"
            print(f"| {epsilon:g} | {name} | {' | '.join(cells)} | {spent:.3f} | {seconds:.0f} |", flush=True)


def main() -> None:
    if len(sys.argv) == 1:
        errors()
    else:
        root, seeds, *rates = sys.argv[1:] if len(sys.argv) > 2 else (sys.argv[1], "5")
        accuracies(root, int(seeds), tuple(map(float, rates)) or RATES)


if __name__ == "__main__":
    main()
