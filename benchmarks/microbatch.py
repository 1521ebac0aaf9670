"""A private step on units of k examples, against a plain one of PyTorch: ratios of minima, taken by turns.

python benchmarks/microbatch.py
"""

import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from dpexp import Sampling, Target, make_plan
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.privacy_unit import Microbatch
from dpexp.training.models import cnn

B, TURNS = 512, 15


def step_of(model, x, y, k):
    """One round's gradients of a batch of B examples; k = 0: without privacy."""

    def loss_of(module, batch):
        return F.cross_entropy(module(batch[0]), batch[1])

    if k == 0:

        def plain():
            model.zero_grad()
            loss_of(model, (x, y)).backward()

        return plain
    record = Microbatch(k)
    plan = make_plan(
        model,
        n=B,
        sampling=Sampling(policy="full_batch", sampling_rate=1.0, steps=1),
        target=Target(noise_multiplier=1.0),
        privacy_unit=record,
    )
    engine = PrivateRound(plan, model, GaussianNoise(KeyStream()))
    units = [part.unflatten(0, (B // k, k)) for part in (x, y)]

    class Nowhere:
        query = commit = lambda self, *_: None

    def private():
        engine.begin()
        engine.add_chunk(loss_of, units, B // k)
        engine.end()
        engine.release(Nowhere())

    return private


def main():
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    workloads = {
        "MLP 784-1000-10": nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10)),
        "CNN of Papernot et al.": cnn([1, 28, 28], 10),
    }
    print(
        f"B = {B} examples, {torch.get_num_threads()} threads; fastest of {TURNS} turns, in ms, and ratios", flush=True
    )
    for name, model in workloads.items():
        x, y = torch.randn(B, 1, 28, 28), torch.randint(10, (B,))
        steps = {k: step_of(model, x, y, k) for k in (0, 1, 8, 32)}
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(TURNS):
            for k, step in steps.items():
                started = time.perf_counter()
                step()
                best[k] = min(best[k], time.perf_counter() - started)
        told = ", ".join(f"k = {k}: {1e3 * best[k]:.1f} ({best[k] / best[0]:.2f})" for k in steps if k)
        print(f"{name}: plain {1e3 * best[0]:.1f}, {told}", flush=True)


if __name__ == "__main__":
    main()
