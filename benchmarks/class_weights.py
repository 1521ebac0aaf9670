"""Recall of a rare class under differential privacy, by where its weight stands.

    python benchmarks/class_weights.py

Two Gaussian clusters in 10 dimensions, of which one has 5 % of the records, and logistic regression at ε = 8. A weight
of 19 for the rare class is taken away by the mean over a batch of one, or, as a factor of the loss, by clipping; as a
factor of the clipped gradient (`data.class_weights`, `dpexp.weigh`) it does what it does without privacy.
"""

import tempfile
from pathlib import Path

import torch
from quiet import quiet, trainer
from report import head, row
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp import Clipping, Poisson, Target, make_plan
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.training.classifier import Classifier

N, D, RARE, APART = 20_000, 10, 0.05, 1.4
EPSILON, BATCH, ROUNDS, S = 8.0, 1000, 200, 0.25
LR = {True: 0.2, False: 0.5}  # private or not
W = torch.tensor([1.0, 19.0])
SEEDS = range(3)


class MeanOfBatch(Classifier):
    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y, weight=W.to(x))


class FactorOfLoss(Classifier):
    def training_step(self, batch):
        x, y = batch
        return (W.to(x)[y] * F.cross_entropy(self(x), y, reduction="none")).mean()


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=generator) < RARE).long()
    x = torch.randn(n, D, generator=generator)
    x[:, 0] += APART * (y - 0.5)
    return x, y


def trained(kind, seed):
    """The model."""
    torch.manual_seed(seed)
    weighs = kind in ("data.class_weights", "not private")
    cls = {"cross_entropy(weight=w)": MeanOfBatch, "w times the loss": FactorOfLoss}.get(kind, Classifier)
    mean = float(1 - RARE + RARE * W[1]) / float(W[1])  # weight, by which gradients are shorter
    lr = LR[kind != "not private"] / (mean if kind == "data.class_weights" else 1)
    module = cls(nn.Linear(D, 2), lambda p: torch.optim.SGD(p, lr=lr), class_weights=W if weighs else None)
    loader = DataLoader(TensorDataset(*data(N, seed)), batch_size=BATCH, shuffle=True)
    callbacks = []
    if kind != "not private":
        sampling = Poisson(expected_batch_size=BATCH, steps=ROUNDS)
        clipping = Clipping(clip_norm=FixedClipNorm(S))
        plan = make_plan(module, n=N, sampling=sampling, target=Target(epsilon=EPSILON, delta=1e-5), clipping=clipping)
        ledger = Path(tempfile.mkdtemp()) / "ledger.jsonl"
        callbacks = [dpexp.PrivacyCallback(plan, ledger, max_physical_batch_size=1000)]
    trainer(*callbacks, max_steps=ROUNDS).fit(module, loader)
    return module.model


def measured(model, seed):
    """Recall and specificity on other records, and the share of the rare class's gradients that are longer than S."""
    x, y = data(2 * N, seed + 100)
    with torch.no_grad():
        scores = model(x)
        right = scores.argmax(1) == y
        residual = (scores.softmax(1) - F.one_hot(y, 2)).norm(dim=1)
        clipped = residual * (x.square().sum(1) + 1).sqrt() > S
    return right[y == 1].float().mean(), right[y == 0].float().mean(), clipped[y == 1].float().mean()


def main():
    quiet()
    print(f"ε = {EPSILON:g}, S = {S:g}, {RARE:.0%} rare, w = {W.tolist()}, means and ranges of {len(SEEDS)} seeds\n")
    print(head("weights", "recall of the rare class", "of the other", "rare records clipped, at the end"))
    for kind in ("none", "cross_entropy(weight=w)", "w times the loss", "data.class_weights", "not private"):
        found = torch.tensor([measured(trained(kind, seed), seed) for seed in SEEDS])
        recall, other, clipped = found.mean(0).tolist()
        low, high = found[:, 0].aminmax()
        print(row(kind, f"{recall:.3f} ({low:.3f} to {high:.3f})", f"{other:.3f}", f"{clipped:.0%}"), flush=True)


if __name__ == "__main__":
    main()
