"""Trains the same model on the same data at the same (ε, δ) with dpexp and with Opacus.

    python benchmarks/accuracy_against_opacus.py

Shows, seed by seed, the test accuracy of the small CNN on scikit-learn's digits: once by `make_plan` and
`PrivacyCallback`, once by Opacus' `PrivacyEngine`. Both sides start from the same initialisation and have the same
sampling rate, number of rounds, noise multiplier, clipping norm, denominator and optimizer; their samples and noise
are fresh and independent. The two mean accuracies should differ by no more than seeds do, and the two ε agree up to
0.01, the error that Opacus' accountant adds to its estimate to give an upper bound.
"""

import argparse
import logging
import statistics
import tempfile
import warnings
from itertools import chain, islice, repeat
from pathlib import Path

import pytorch_lightning as pl
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.nn import functional as F

import dpexp
from dpexp import Clipping, Sampling, Target, make_plan
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits
from dpexp.training.models import cnn

N, EXPECTED_BATCH, ROUNDS = 1437, 512, 113
EPSILON, DELTA, BOUND = 3.0, 1e-4, 1.0


def initial_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = cnn((1, 8, 8), 10)
    torch.seed()  # samples and noise do not follow from the seed
    return model


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def by_dpexp(model: nn.Module, data: Digits, plan: dpexp.PrivacyPlan) -> tuple[float, float]:
    """Test accuracy and ε."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[dpexp.PrivacyCallback(plan, ledger)],
        )
        trainer.fit(Classifier(model, sgd), datamodule=data)
        return accuracy(model, data), dpexp.epsilon(dpexp.read_ledger(ledger), DELTA)


def by_opacus(model: nn.Module, data: Digits, plan: dpexp.PrivacyPlan) -> tuple[float, float]:
    """Test accuracy and ε."""
    q = plan.sampling.q
    loader = DPDataLoader(data.train, sample_rate=q)
    engine = PrivacyEngine(accountant="prv")
    private, optimizer, _ = engine.make_private(
        module=model,
        optimizer=sgd(model.parameters()),
        data_loader=loader,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=BOUND,
        poisson_sampling=True,
    )
    # make_private samples and accounts at 1/len(loader), and divides by int(n/len(loader)). No loader's length is
    # n/512, so its rate and denominator are replaced by the plan's, and its loader by one that samples at that rate.
    optimizer.expected_batch_size = EXPECTED_BATCH
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=q))
    for x, y in islice(chain.from_iterable(repeat(loader)), ROUNDS):
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return accuracy(private, data), engine.get_epsilon(DELTA)


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    x, y = data.test.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2 (default 5)")
    seeds = parser.parse_args().seeds
    if seeds < 2:
        parser.error("--seeds must be at least 2: the spread needs two.")
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec|Secure RNG|Full backward hook).*")

    data = Digits()
    assert len(data.train) == N
    plan = make_plan(
        Classifier(initial_model(0), sgd),
        n=N,
        sampling=Sampling(expected_batch_size=EXPECTED_BATCH, steps=ROUNDS),
        target=Target(epsilon=EPSILON, delta=DELTA),
        clipping=Clipping(clip_norm=FixedClipNorm(BOUND)),
    )
    print(f"z = {plan.noise_multiplier:.4f}, q = {plan.sampling.q:.4f}, T = {plan.rounds}, δ = {DELTA:g}")

    ours, theirs = [], []
    for seed in range(seeds):
        ours.append(by_dpexp(initial_model(seed), data, plan))
        theirs.append(by_opacus(initial_model(seed), data, plan))
        print(f"seed {seed}: dpexp {ours[-1][0]:.4f}, Opacus {theirs[-1][0]:.4f}", flush=True)

    means, deviations = [], []
    for name, results in (("dpexp", ours), ("Opacus", theirs)):
        accuracies, epsilons = zip(*results, strict=True)
        means.append(statistics.mean(accuracies))
        deviations.append(statistics.stdev(accuracies))
        print(f"{name}: mean {means[-1]:.4f}, standard deviation {deviations[-1]:.4f}, ε = {max(epsilons):.4f}")
    pooled = statistics.mean(s**2 for s in deviations) ** 0.5
    print(f"difference of the means {means[0] - means[1]:+.4f}, pooled standard deviation of the seeds {pooled:.4f}")


if __name__ == "__main__":
    main()
