"""Do optimizers that know of the noise pay? Simulates them in plain PyTorch, on equal seeds, and prints a table.

    python benchmarks/noise_aware.py DATA [TASK …]   # DATA holds the folders adult, fashion_mnist and shakespeare

`sgd` has momentum 0.9. `adam_bc` is DP-AdamBC (arXiv 2312.14334), with a floor g in units of the noise's variance.
`scale` is scale-then-privatise (arXiv 2507.01129, algorithm 8): each coordinate is divided by sqrt(v̂) + ε_s before
clipping and noise, and multiplied by it after; r is the noise over these scales, and S that of the first round.

Settings were found by hill climbing on a grid (factors of 2 for the learning rate, of `finer` √2; 3 for S and r, 10 for
g), on a fifth of the training records, at most 10 000, with seeds from 1000: by accuracy, on text by loss. S is in
units of the median norm of a gradient at the initial weights.
"""

import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from joint import noise_multiplier
from report import head, paired, row
from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.training.data.datasets import CHARACTERS, Adult, FashionMnist

# The model's widths, expected batch size, rounds, ε and seeds; and of each optimizer lr, S and r or g.
TASKS = {
    "adult": ([105, 32, 2], 512, 300, 1.0, 10, {
        "sgd": (16.0, 0.3, 0), "adam": (0.04, 0.9, 0), "adam, finer": (0.04 / 2**0.5, 2.7, 0),
        "adam_bc": (0.01, 0.9, 0.1), "scale": (0.02, 0.9, 0.3)}),
    "fashion": ([784, 64, 10], 1024, 300, 1.0, 10, {
        "sgd": (1.0, 0.3, 0), "adam": (0.01, 0.3, 0), "adam_bc": (0.0025, 0.9, 0.1), "scale": (0.005, 0.3, 0.3)}),
    "characters": ([520, 128, 65], 1024, 400, 3.0, 5, {
        "sgd": (16.0, 0.3, 0), "adam": (0.01, 2.7, 0), "adam, finer": (0.01 / 2**0.5, 2.7, 0),
        "adam_bc": (0.0025, 2.7, 0.1), "scale": (0.01, 2.7, 0.1)}),
    "words": ([1500, 48, 500], 1024, 300, 3.0, 5, {
        "sgd": (32.0, 0.3, 0), "adam": (0.01, 2.7, 0), "adam_bc": (0.005, 2.7, 0.1)}),
}  # fmt: skip
BETA1, BETA2 = 0.9, 0.999


@cache
def records(task: str, root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """x [n, d] and y [n] for training and test. A record of a text is a character with the 8 before it, or a word with
    the 3 before it; the last tenth is the test set."""
    if task in ("adult", "fashion"):
        data = Adult(root / "adult") if task == "adult" else FashionMnist(root / "fashion_mnist")
        return tuple((x.flatten(1), y) for x, y in (data.train.tensors, data.test.tensors))
    text = (root / "shakespeare" / "input.txt").read_text()
    if task == "characters":
        found = torch.tensor([CHARACTERS.index(one) for one in text]).unfold(0, 9, 5)
        x, y = F.one_hot(found[:, :8], 65), found[:, 8]
    else:
        words = re.findall(r"[a-z']+|[.,;:!?\n]", text.lower())
        code = {word: k + 1 for k, (word, _) in enumerate(Counter(words).most_common(499))}
        found = torch.tensor([code.get(word, 0) for word in words]).unfold(0, 4, 1)
        x, y = F.one_hot(found[:, :3], 500), found[:, 3]
    x, cut = x.flatten(1).to(torch.uint8), int(0.9 * len(x))
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def scores(weights: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Class scores of a tanh network whose weights [out, in + 1] include biases; each layer's inputs [B, in + 1]."""
    inputs = []
    for k, weight in enumerate(weights):
        inputs.append(torch.cat([torch.tanh(x) if k else x, x.new_ones(len(x), 1)], 1))
        x = inputs[-1] @ weight.T
    return x, inputs


def factors(weights: list[Tensor], x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(g, x) of each layer, whose gradient of record i is g_i x_iᵀ."""
    out, inputs = scores(weights, x)
    g = out.softmax(1) - F.one_hot(y, out.shape[1])
    found = [(g, inputs[-1])]
    for weight, own, before in zip(weights[:0:-1], inputs[:0:-1], inputs[-2::-1], strict=True):
        g = (g @ weight[:, :-1]) * (1 - own[:, :-1] ** 2)
        found.append((g, before))
    return found[::-1]


class Layer:
    """A layer's weights, and the optimizer that `how` names.

    Args:
        lr, third: the learning rate, and r or g.
        variance: of the noise of an average; first: the scale of all coordinates in the first round.
    """

    def __init__(self, how: str, weight: Tensor, lr: float, third: float, variance: float, first: float) -> None:
        self.how, self.weight, self.lr, self.third, self.variance, self.first = how, weight, lr, third, variance, first
        self.m, self.v, self.t = torch.zeros_like(weight), torch.zeros_like(weight), 0
        self.scale = torch.full_like(weight, first)

    def step(self, gradient: Tensor) -> None:
        self.t += 1
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.lerp_(gradient**2, 1 - BETA2)
        mean, square = self.m / (1 - BETA1**self.t), self.v / (1 - BETA2**self.t)
        if self.how == "sgd":
            change = self.m
        elif self.how == "adam_bc":
            change = mean / (square - self.variance).clamp(min=self.third * self.variance).sqrt()
        else:
            change = mean / (square.sqrt() + 1e-8)
        self.weight.sub_(self.lr * change)
        if self.how == "scale":
            self.scale = square.sqrt() + self.first


def train(task: str, root: Path, how: str, seed: int) -> tuple[float, float]:
    """Test accuracy in % and test loss."""
    widths, size, rounds, epsilon, _, settings = TASKS[task]
    lr, multiple, third = settings[how]
    (x, y), (test_x, test_y) = records(task, root)
    n, z = len(x), noise_multiplier(len(x), size, rounds, epsilon)
    torch.manual_seed(seed)
    layers = [nn.Linear(d, p) for d, p in pairwise(widths)]
    weights = [torch.cat([layer.weight, layer.bias[:, None]], 1).detach() for layer in layers]
    generator = torch.Generator().manual_seed(seed + 500_000)
    squares = sum((g.norm(dim=1) * h.norm(dim=1)) ** 2 for g, h in factors(weights, x[:512].float(), y[:512]))
    S, first = multiple * squares.sqrt().median().item(), 1.0
    if how == "scale":
        S, first = third * size / z, S * z / (third * size)
    own = [Layer(how, weight, lr, third, (z * S / size) ** 2, first) for weight in weights]
    for _ in range(rounds):
        sample = (torch.rand(n, generator=generator) < size / n).nonzero()[:, 0]
        found = factors(weights, x[sample].float(), y[sample])
        squares = sum(((g**2 @ one.scale**-2) * h**2).sum(1) for (g, h), one in zip(found, own, strict=True))
        c = (S / squares.sqrt().clamp(min=1e-30)).clamp(max=1)
        for (g, h), one in zip(found, own, strict=True):
            noise = one.scale * z * S * torch.randn(one.weight.shape, generator=generator)
            one.step(((g * c[:, None]).T @ h + noise) / size)
    out = torch.cat([scores(weights, part.float())[0] for part in test_x.split(5000)])
    return 100 * (out.argmax(1) == test_y).float().mean().item(), F.cross_entropy(out, test_y).item()


def shown(task: str, found: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Rows: the mean accuracy and loss of each optimizer, and how far they are from those of `sgd` and `adam`."""
    for how, results in found.items():
        for k, what in enumerate(("accuracy", "loss")):
            own, cells = [result[k] for result in results], []
            for base in ("sgd", "adam"):
                mean, error, _ = paired(own, [result[k] for result in found[base]])
                cells.append(f"{mean:+.3f} ± {error:.3f}")
            yield row(task, how, what, f"{statistics.mean(own):.3f}", *cells)


def main(data: str, *tasks: str) -> None:
    print(head("task", "optimizer", "", "mean", "less sgd's", "less adam's"))
    for task in tasks or TASKS:
        *_, seeds, settings = TASKS[task]
        found = {how: [train(task, Path(data), how, seed) for seed in range(seeds)] for how in settings}
        for line in shown(task, found):
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
