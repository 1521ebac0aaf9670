"""What else a round releases besides gradients, on the digits with the default job's rounds.

    python benchmarks/releases.py metrics    [SEEDS]   # private training accuracy and its band; what it costs
    python benchmarks/releases.py batchnorm  [SEEDS]   # one small residual network, three choices, ε = 3 and 8
    python benchmarks/releases.py adaptive   [SEEDS]   # clipping norms from 0.01 and 100
    python benchmarks/releases.py joint      [SEEDS]   # joint clipping with learnt scales

Each choice has the learning rates that are printed, of which the one with the best mean is shown: that choice was made
on the test set, alike for all, and costs privacy that is not counted here.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

import dpexp
from dpexp import Clipping, Sampling, Target, make_plan
from dpexp.privacy.normalization import FrozenBatchNorm, GroupNormalization, PrivateBatchNorm
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.clipping import DimensionClipNorm, FixedClipNorm, Joint, Separate, UniformClipNorm
from dpexp.privacy.plan.groups import per_layer
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits
from dpexp.training.models import cnn, mlp, resnet

SGD = partial(torch.optim.SGD, momentum=0.9)
N, Q, ROUNDS, DELTA = 1437, 512 / 1437, 113, 1e-4


def small() -> nn.Module:
    return cnn((1, 8, 8), 10)


def trained(
    make: Callable[[], nn.Module],
    seed: int,
    rate: float,
    epsilon: float | None = 3.0,
    observe: Any = None,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **choices: Any,
) -> tuple[float, float, dpexp.PrivacyCallback]:
    """Test accuracy, seconds a round, and the callback."""
    torch.manual_seed(seed)
    module = Classifier(make(), partial(optimizer, lr=rate))
    torch.seed()  # samples and noise do not follow from the seed
    plan = make_plan(
        module,
        n=N,
        sampling=Sampling(sampling_rate=Q, steps=ROUNDS),
        target=Target(epsilon=epsilon, delta=DELTA),
        **choices,
    )
    data = Digits()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = dpexp.PrivacyCallback(plan, Path(folder) / "ledger.jsonl")
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=-1, limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[callback, *([observe] if observe else [])],
        )  # fmt: skip
        started = time.monotonic()
        trainer.fit(module, data)
        seconds = (time.monotonic() - started) / ROUNDS
        (found,) = trainer.test(module, data, verbose=False)
        return found["test_accuracy"], seconds, callback


def best(make: Callable[[], nn.Module], rates: tuple[float, ...], seeds: int, **choices: Any) -> str:
    runs = {rate: [trained(make, seed, rate, **choices) for seed in range(seeds)] for rate in rates}
    means = {rate: statistics.mean(accuracy for accuracy, _, _ in found) for rate, found in runs.items()}
    rate = max(means, key=lambda one: means[one])
    spread = statistics.stdev(accuracy for accuracy, _, _ in runs[rate]) if seeds > 1 else 0.0
    seconds = statistics.median(seconds for found in runs.values() for _, seconds, _ in found)
    return f"{means[rate]:.1%} ± {spread:.1%} (lr {rate:g}) | {1000 * seconds:.0f} ms"


class Truth(pl.Callback):
    """The sums without noise, of each round. It stands behind the PrivacyCallback, whose engine it looks into."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (privacy,) = [one for one in trainer.callbacks if isinstance(one, dpexp.PrivacyCallback)]
        engine = privacy._engine
        release = engine.release

        def watched(ledger: Any) -> Any:
            self.sums.append(float(engine._sums[".value train_accuracy"]) / (Q * N))
            return release(ledger)

        engine.release = watched


def metrics(seeds: int) -> None:
    asked = {
        "train_loss": {"clip_norm": 4, "budget_share": 0.01},
        "train_accuracy": {"clip_norm": 1, "budget_share": 0.01},
    }
    within: list[bool] = []
    for seed in range(seeds):
        truth = Truth()
        _, _, callback = trained(small, seed, 0.2, observe=truth, private_metrics=asked)
        found = callback.estimates.history["train_accuracy"]
        within += [abs(one - true) <= 2 * sd for (_, one, sd), true in zip(found, truth.sums, strict=True)]
    print(
        f"{len(within)} releases of the training accuracy, sd {found[0][2]:.4f}: {sum(within) / len(within):.1%} "
        "within two standard deviations of the sum without noise (a normal distribution: 95.4 %)"
    )
    print("\n| released | noise of gradients at ε = 3 | test accuracy | a round |\n|---|---|---|---|")
    for name, release in (("nothing", {}), ("loss and accuracy, 1 % each", asked)):
        plan = make_plan(
            small(),
            n=N,
            sampling=Sampling(sampling_rate=Q, steps=ROUNDS),
            target=Target(epsilon=3.0, delta=DELTA),
            private_metrics=release,
        )
        print(f"| {name} | {plan.groups[0].sigma:.4f} | {best(small, (0.2,), seeds, private_metrics=release)} |")
    plan = make_plan(
        small(), n=N, sampling=Sampling(sampling_rate=Q, steps=ROUNDS), target=Target(epsilon=3.0, delta=DELTA)
    )
    sigma = plan.groups[0].sigma
    z = sigma * 0.98**0.5
    more = make_plan(
        small(),
        n=N,
        sampling=Sampling(sampling_rate=Q, steps=ROUNDS),
        target=Target(delta=DELTA, noise_multiplier=z),
        private_metrics=asked,
    )
    print(
        f"\nAt the same noise of gradients ({more.groups[0].sigma:.4f}): ε = {dpexp.epsilon(plan.ledger(), DELTA):.4f} "
        f"without, {dpexp.epsilon(more.ledger(), DELTA):.4f} with both"
    )


def batchnorm(seeds: int) -> None:
    print("| ε | choice | test accuracy | a round |\n|---|---|---|---|")
    for epsilon in (3.0, 8.0):
        for name, choice in (
            ("private", PrivateBatchNorm()),
            ("groupnorm", GroupNormalization()),
            ("freeze", FrozenBatchNorm()),
        ):
            release = choice.release(choice(resnet((1, 8, 8), 10))) if isinstance(choice, PrivateBatchNorm) else {}
            make = lambda choice=choice: choice(resnet((1, 8, 8), 10))  # noqa: E731
            found = best(make, (0.25, 0.5, 1.0), seeds, epsilon=epsilon, private_metrics=release)
            print(f"| {epsilon:g} | {name} | {found} |", flush=True)


def adaptive(seeds: int) -> None:
    print("CNN, one group, ε = 3\n\n| clip_norm | test accuracy | a round |\n|---|---|---|")
    make, rates = small, (0.1, 0.2, 0.4)
    for name, norm in (
        ("fixed 0.1", FixedClipNorm(0.1)), ("fixed 0.3", FixedClipNorm(0.3)), ("fixed 1", FixedClipNorm(1.0)),
        ("fixed 3", FixedClipNorm(3.0)),
        ("adaptive from 0.01", AdaptiveClipNorm(0.01)), ("adaptive from 100", AdaptiveClipNorm(100.0)),
        ("adaptive from 1", AdaptiveClipNorm()), ("adaptive from 1, quantile 0.1",
        AdaptiveClipNorm(target_quantile=0.1)),
        ("adaptive from 0.01, rate 0.5, quantile 0.1", AdaptiveClipNorm(0.01, learning_rate=0.5, target_quantile=0.1)),
        ("adaptive from 100, rate 0.5, quantile 0.1", AdaptiveClipNorm(100.0, learning_rate=0.5, target_quantile=0.1)),
    ):  # fmt: skip
        tried = tuple(rate * f for rate in rates for f in ((1.0,) if "fixed" in name else (0.2, 1.0)))
        print(f"| {name} | {best(make, tried, seeds, clipping=Clipping(clip_norm=norm))} |", flush=True)
    print(
        "\nThe same with Adam, whose steps do not grow with the clipping norm\n\n"
        "| clip_norm | test accuracy | a round |\n|---|---|---|"
    )
    for name, norm in (("fixed 1", FixedClipNorm(1.0)), ("adaptive from 0.01", AdaptiveClipNorm(0.01)),
                        ("adaptive from 100", AdaptiveClipNorm(100.0)), ("adaptive from 1",
                        AdaptiveClipNorm())):  # fmt: skip
        clipping = Clipping(clip_norm=norm)
        found = best(make, (0.003, 0.01, 0.03), seeds, clipping=clipping, optimizer=torch.optim.Adam)
        print(f"| {name} | {found} |", flush=True)


def joint(seeds: int) -> None:
    print("ε = 2\n\n| model | groups | clipping | test accuracy | a round |\n|---|---|---|---|---|")
    for called, model in (("cnn", small), ("mlp", lambda: mlp((1, 8, 8), 10))):
        for groups, group in (("flat", {}), ("per layer", {"group": per_layer()})):
            for name, mechanism, norm in (
                ("separate, S total 1", Separate(), UniformClipNorm(1.0)),
                ("joint, by dimension", Joint(), DimensionClipNorm(1.0)),
                ("joint, learnt", Joint(), AdaptiveClipNorm()),
                ("joint, learnt, quantile 0.2", Joint(), AdaptiveClipNorm(target_quantile=0.2)),
                ("separate, learnt", Separate(), AdaptiveClipNorm()),
            ):
                clipping = Clipping(mechanism=mechanism, clip_norm=norm, **group)
                found = best(model, (0.05, 0.1, 0.2, 0.4), seeds, epsilon=2.0, clipping=clipping)
                print(f"| {called} | {groups} | {name} | {found} |", flush=True)


if __name__ == "__main__":
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    {"metrics": metrics, "batchnorm": batchnorm, "adaptive": adaptive, "joint": joint}[sys.argv[1]](
        int(sys.argv[2]) if len(sys.argv) > 2 else 5
    )
