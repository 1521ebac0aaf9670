"""Clip rules beside one another: test accuracy on the digits at ε = 3, with the default job's CNN and rounds.

    python benchmarks/clip_rules.py [SEEDS]     # 5 seeds: a quarter of an hour

Every rule has each learning rate in turn. The one in bold has the best mean over the seeds, so that comparing the bold
ones favours none of the rules; that choice was made on the test set, and costs privacy that is not counted here.
"""

import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch

import dpexp
from dpexp import Clipping, Sampling, Target, make_plan
from dpexp.accounting.ledger import Ledger, read_ledger
from dpexp.privacy.plan.clipping import Abadi, Automatic, ClipRule, Global, Psac, describe
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits
from dpexp.training.models import cnn

N, Q, ROUNDS, EPSILON, DELTA = 1437, 512 / 1437, 113, 3.0, 1e-4
RULES = (Abadi(), Automatic(), Psac(), Global(8.0), Global(16.0))
RATES = (0.05, 0.1, 0.2, 0.4)


def trained(clip: ClipRule, rate: float, seed: int, **noise: float) -> tuple[float, dpexp.PrivacyPlan, Ledger]:
    """Test accuracy, and what was planned and done."""
    torch.manual_seed(seed)
    module = Classifier(cnn((1, 8, 8), 10), lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9))
    torch.seed()  # samples and noise do not follow from the seed
    plan = make_plan(
        module,
        n=N,
        sampling=Sampling(sampling_rate=Q, steps=ROUNDS),
        target=Target(**noise),
        clipping=Clipping(clip_rule=clip),
    )  # one group, S = 1
    data = Digits()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ledger = Path(folder) / "ledger.jsonl"
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=-1, limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[dpexp.PrivacyCallback(plan, ledger)],
        )  # fmt: skip
        trainer.fit(module, data)
        (found,) = trainer.test(module, data, verbose=False)
        return found["test_accuracy"], plan, read_ledger(ledger)


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    _, plan, ledger = trained(Abadi(), 0.2, 0, epsilon=EPSILON, delta=DELTA)
    z = plan.noise_multiplier
    print(f"z = {z:.4f}: ε = {dpexp.epsilon(ledger, DELTA):.4f} at δ = {DELTA:g}; {seeds} seeds\n")
    print("| `clip` | " + " | ".join(f"lr = {rate:g}" for rate in RATES) + " |")
    print("|---|" + "---|" * len(RATES))
    for clip in RULES:
        runs = [[trained(clip, rate, seed, noise_multiplier=z)[0] for seed in range(seeds)] for rate in RATES]
        means = [statistics.mean(found) for found in runs]
        cells = [f"{mean:.1%} ± {statistics.stdev(found):.1%}" for mean, found in zip(means, runs, strict=True)]
        cells[means.index(max(means))] = f"**{cells[means.index(max(means))]}**"
        print(f"| {describe(clip)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
