"""What a membership attacker gets from models of digits, beside what ε allows.

    PYTHONPATH=. python benchmarks/membership.py [MODELS] [FIGURE.png]

300 records of the training set get a wrong label, and each is included in a training by a fair coin: the easiest to
find out about. The attacker sees the final model alone, as a black box: the loss of each of them. For every ε several
models are trained. Each is attacked with the others as reference models, by likelihood ratio (Carlini et al. 2022,
arXiv 2112.03570, its online attack): of log(p/(1-p)), with p the probability that a model gives the wrong label, a
Gaussian is fitted to the reference models that had the record, and one to those that had not.
"""

import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.accountants import delta
from dpexp.accounting.tradeoff import type_two_errors
from dpexp.commands.building import module_of
from dpexp.training.data.digits import Digits

CANARIES, STEPS, BATCH = 300, 100, 512
EPSILONS = (1.0, 8.0, np.inf)


def mislabelled():
    """The records that stay, and those that may join, with a wrong label."""
    x, y = Digits().train.tensors
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    wrong = (y + torch.randint(1, 10, y.shape, generator=torch.Generator().manual_seed(1))) % 10
    few, others = chosen[:CANARIES], chosen[CANARIES:]
    return (x[others], y[others]), (x[few], wrong[few])


def trained(cfg, plan, included, stay, join):
    """log(p/(1-p)) of each canary's wrong label [CANARIES], by a model that met the included ones."""
    data = TensorDataset(torch.cat([stay[0], join[0][included]]), torch.cat([stay[1], join[1][included]]))
    module = module_of(cfg)
    with tempfile.TemporaryDirectory() as folder:
        private = [dpexp.PrivacyCallback(plan, Path(folder) / "ledger.jsonl", physical_batch=2048)] if plan else []
        pl.Trainer(
            accelerator="cpu", max_epochs=-1, max_steps=STEPS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=private,
        ).fit(module, DataLoader(data, BATCH, shuffle=True))  # fmt: skip
    module.eval()
    with torch.no_grad():
        log_p = module(join[0]).double().log_softmax(1).gather(1, join[1][:, None])[:, 0]
    return (log_p - torch.log(-torch.expm1(log_p.clamp(max=-1e-12)))).numpy()


def likelihood_ratios(found, coins):
    """[models, CANARIES] scores, each model's by the other models."""
    scores = np.empty_like(found)
    for k in range(len(found)):
        others = np.arange(len(found)) != k
        logs = []
        for had in (True, False):
            seen = np.where((coins == had)[others], found[others], np.nan)
            mean = np.nanmean(seen, 0)
            sd = np.sqrt(np.nanmean((seen - mean) ** 2))  # one for all canaries: there are few reference models
            logs.append(-(((found[k] - mean) / sd) ** 2) / 2 - np.log(sd))
        scores[k] = logs[0] - logs[1]
    return scores


def main():
    models = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    stay, join = mislabelled()
    rng = np.random.default_rng(0)
    coins = np.array([rng.permutation(models) < models / 2 for _ in range(CANARIES)]).T  # each in half of the models
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="type I error", ylabel="type II error")
    alpha = np.concatenate([np.geomspace(1e-3, 0.05, 40), np.linspace(0.05, 1, 100)])
    for color, epsilon in zip(("C0", "C1", "C3"), EPSILONS, strict=True):
        began = time.perf_counter()
        private = np.isfinite(epsilon)
        called = f"ε = {epsilon:g}" if private else "without privacy"
        asked = [f"privacy.epsilon={epsilon}"] if private else ["privacy.enabled=false"]
        cfg = dpexp.compose("model=mlp", f"sampling.steps={STEPS}", "privacy.delta=1e-4", *asked)
        plan = dpexp.plan(cfg) if private else None
        found = []
        for k, included in enumerate(coins):
            pl.seed_everything(k, verbose=False)
            found.append(trained(cfg, plan, torch.from_numpy(included), stay, join))
        scores = likelihood_ratios(np.array(found), coins)
        yes, no = scores[coins], scores[~coins]
        right = ((yes > 0).sum() + (no <= 0).sum()) / scores.size
        at = {rate: (yes > np.quantile(no, 1 - rate)).mean() for rate in (0.01, 0.1)}
        thresholds = np.quantile(scores, np.linspace(0, 1, 200))
        errors = np.array([[(no > t).mean(), (yes <= t).mean()] for t in thresholds])
        axes.plot(*errors.T, ".", markersize=3, color=color, label=f"the attacker, {called}")
        allowed = ""
        if plan is not None:
            curve = type_two_errors(plan.ledger(), alpha.tolist())
            axes.plot(alpha, curve, color=color, label=f"no attacker below, {called}")
            tenth = {rate: 1 - type_two_errors(plan.ledger(), [rate])[0] for rate in at}
            allowed = f" (allowed {(1 + delta(plan.ledger(), 0.0)) / 2:.1%}; {tenth[0.01]:.1%}, {tenth[0.1]:.1%})"
        print(
            f"{called}: {right:.1%} of {scores.size} coins guessed right; found {at[0.01]:.1%} at 1 % and "
            f"{at[0.1]:.1%} at 10 % false alarms{allowed}; {models} models in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    axes.plot([0, 1], [1, 0], ":", color="grey", linewidth=0.8, label="guessing")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    if len(sys.argv) > 2:
        figure.savefig(sys.argv[2], dpi=150)


if __name__ == "__main__":
    main()
