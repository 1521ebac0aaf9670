"""Prints test accuracy at equal ε, and the time of a round, for K views of each record (augment=flip_crop), or none.

    python benchmarks/augment.py data.root=data/cifar10 [SEEDS] [OVERRIDE ...]

CIFAR-10 with a small network of 10 000 weights and few rounds, so that all of it takes minutes on one core: it shows
what K does to accuracy and to time, not what can be reached. Every K has the same noise, rounds and learning rate.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torch import nn

VIEWS = (None, 1, 4, 16)
JOB = (
    "data=cifar10", "model._target_=augment.small", "privacy.epsilon=8", "sampling.expected_batch_size=512",
    "sampling.steps=200", "trainer.max_physical_batch_size=64", "trainer.threads=1", "trainer.num_evaluations=0",
    "tracking=none",
)  # fmt: skip


def small(shape: list[int], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh(),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, classes),
    )  # fmt: skip


def run(views: int | None, seed: int, overrides: list[str]) -> dict:
    augment = ["augment=flip_crop", f"augment.multiplicity={views}"] if views else []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "dpexp", *JOB, *augment, f"seed={seed}", f"hydra.run.dir={folder}/job", *overrides],
            check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )  # fmt: skip
        return json.loads((Path(folder) / "job" / "result.json").read_text())


def main(seeds: int, overrides: list[str]) -> None:
    print("| views K of a record | ε | rounds | test accuracy | seconds a round | seeds |")
    print("|---|---|---|---|---|---|")
    for views in VIEWS:
        results = [run(views, seed, overrides) for seed in range(seeds)]
        accuracies = [100 * result["metrics"]["test_accuracy"] for result in results]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if seeds > 1 else ""
        spent = max(result["epsilon"]["pld"] for result in results)
        rounds = results[0]["rounds"]
        seconds = min(result["seconds"] / rounds for result in results)
        print(
            f"| {views or 'no augmentation'} | {spent:.3f} | {rounds} | {statistics.mean(accuracies):.1f}{spread} % | "
            f"{seconds:.2f} | {seeds} |",
            flush=True,
        )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(next((int(word) for word in given if word.isdigit()), 1), [word for word in given if not word.isdigit()])
