"""noise=discrete_gaussian beside ordinary noise: time per number, time per record, and accuracy on the digits at the
same ε.

    python benchmarks/exact_noise.py                # all of it, about ten minutes
    python benchmarks/exact_noise.py --seeds 0      # times alone

Times are the least of several turns, taken in turn (A B A B …), by one thread.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

import dpexp
from dpexp import Noise, Sampling, Target, make_plan
from dpexp.accounting.ledger import read_ledger
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.discrete_gaussian import SIGMA2, DiscreteGaussian
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.round import PrivateRound
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits
from dpexp.training.models import mlp

N, Q, ROUNDS, EPSILON, DELTA = 1437, 512 / 1437, 113, 3.0, 1e-4
TURNS = 7
KINDS = ("gaussian", "discrete_gaussian")


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp((1, 8, 8), 10)


def least(*works: Callable[[], object]) -> list[float]:
    """Seconds of each."""
    found = []
    for _ in range(TURNS):
        for work in works:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return [min(found[k :: len(works)]) for k in range(len(works))]


def per_number() -> None:
    started = time.perf_counter()
    exact, ordinary = DiscreteGaussian(SIGMA2, KeyStream()), GaussianNoise()
    print(f"tables: {1e3 * (time.perf_counter() - started):.0f} ms, once")
    print(f"{'numbers':>10} {'exact, ns each':>15} {'ordinary':>9} {'ratio':>6}")
    for count in (1_000, 10_000, 100_000, 1_000_000):
        total = torch.zeros(count)
        a, b = least(lambda count=count: exact.draw(count), lambda total=total: ordinary.add_to([(total, 1.0)]))
        print(f"{count:10,} {1e9 * a / count:15.1f} {1e9 * b / count:9.1f} {a / b:6.1f}")


def per_record() -> None:
    module, size = model_of(0), 64
    batch = torch.randn(size, 1, 1, 8, 8), torch.randint(10, (size, 1))
    engines = {
        kind: PrivateRound(
            make_plan(
                module,
                n=N,
                sampling=Sampling(sampling_rate=Q, steps=1),
                target=Target(noise_multiplier=1.0),
                noise=Noise(kind),
            ),
            module,
            GaussianNoise(),
        )
        for kind in KINDS
    }

    def work(engine: PrivateRound) -> None:
        engine.begin()
        engine.add_chunk(lambda one: F.cross_entropy(module(one[0]), one[1]), batch, size)

    times = least(*(lambda engine=engine: work(engine) for engine in engines.values()))
    for kind, seconds in zip(engines, times, strict=True):
        print(f"{kind}: {1e3 * seconds / size:.3f} ms a record of the MLP 64-128-10, in a chunk of {size}")


def trained(kind: str, seed: int) -> tuple[float, float, float]:
    """Test accuracy, ε and seconds."""
    module = Classifier(model_of(seed), lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9))
    torch.seed()  # samples and noise do not follow from the seed
    plan = make_plan(
        module,
        n=N,
        sampling=Sampling(sampling_rate=Q, steps=ROUNDS),
        target=Target(epsilon=EPSILON, delta=DELTA),
        noise=Noise(kind),
    )
    data = Digits()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ledger = Path(folder) / "ledger.jsonl"
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=-1, limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[dpexp.PrivacyCallback(plan, ledger)],
        )  # fmt: skip
        started = time.perf_counter()
        trainer.fit(module, data)
        seconds = time.perf_counter() - started
        (found,) = trainer.test(module, data, verbose=False)
        return found["test_accuracy"], dpexp.epsilon(read_ledger(ledger), DELTA), seconds


def accuracy(seeds: int) -> None:
    for kind in KINDS:
        runs = [trained(kind, seed) for seed in range(seeds)]
        accuracies = [run[0] for run in runs]
        spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
        shown = ", ".join(f"{a:.2%}" for a in accuracies)
        print(
            f"{kind}: {statistics.mean(accuracies):.2%} ± {spread:.2%} ({shown}) at ε = {runs[0][1]:.6f}, "
            f"{statistics.mean(run[2] for run in runs):.1f} s"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    per_number()
    per_record()
    if options.seeds:
        accuracy(options.seeds)
