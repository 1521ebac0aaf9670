"""Does joint clipping pay? Trains with several ways to clip, on equal seeds, and draws docs/joint.png.

    python benchmarks/joint.py DATA [TASK …]     # DATA holds the folders adult, fashion_mnist and mnist

Prints a table for each task: the test accuracy of separate clipping of one group, and how much the others differ from
it, with standard errors and p-values of the paired differences. What outputs/joint.jsonl has is not run again.

The lengths m_j of the vectors, from which scales and clipping norms follow, are medians over 512 public records at the
initial weights. Clipping norms are multiples of the (scaled) norm of a record with these lengths. The multiple and the
learning rate of each way, in `Task.ways`, were found on seeds from 1000, which are not compared: of 0.1, 0.3, 1 and 3,
and 0.25 to 16 times the rate of `optimizer.lr=auto`.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from report import DOCS, Result, kept, row
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dpexp
from dpexp.privacy.plan.groups import owners, vectors
from dpexp.training.data.datasets import COLUMNS, Adult, Digits, FashionMnist, Mnist
from dpexp.training.models import cnn, mlp
from dpexp.training.pretrained import Lora

FOUND = Path("outputs/joint.jsonl")
SEPARATE = "separate, one group"
Records = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A training to compare.

    Args:
        title: in the figure; records: training, test and public records, of the folder of data sets.
        model: a model with initial weights, of the folder; size, rounds, epsilon: of the plan.
        seeds: how many; ways: by name, the multiple of the norm and of the learning rate.
    """

    title: str
    records: Callable[[Path], tuple[Records, Records, Records]]
    model: Callable[[Path], nn.Module]
    size: int
    rounds: int
    epsilon: float
    seeds: int
    ways: Mapping[str, tuple[float, float]]


def some(records: Records, shape: tuple[int, ...] | None = None) -> Records:
    """512 of the records, of images resized."""
    x, y = records
    which = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))[:512]
    x = x[which]
    return (F.interpolate(x, size=shape, mode="bilinear", antialias=True) if shape else x), y[which]


@cache
def digits(root: Path) -> tuple[Records, Records, Records]:
    """The public ones are MNIST's, of which the middle 20 × 20 pixels hold the digit."""
    x, y = Mnist(root / "mnist").train.tensors
    return Digits().train.tensors, Digits().test.tensors, some((x[:, :, 4:24, 4:24], y), (8, 8))


@cache
def adult(root: Path) -> tuple[Records, Records, Records]:
    """The public ones are rows of random values of the columns, with random labels."""
    generator = torch.Generator().manual_seed(5)
    columns = []
    for values in COLUMNS.values():
        kinds = len(values) if isinstance(values, tuple) else 0
        drawn = torch.randint(kinds, (512,), generator=generator) if kinds else torch.rand(512, 1, generator=generator)
        columns.append(F.one_hot(drawn, kinds).float() if kinds else drawn)
    data = Adult(root / "adult")
    return data.train.tensors, data.test.tensors, (torch.cat(columns, 1), torch.randint(2, (512,), generator=generator))


@cache
def mnist(root: Path) -> tuple[Records, Records, Records]:
    """The public ones are Fashion-MNIST's."""
    data = Mnist(root / "mnist")
    return data.train.tensors, data.test.tensors, some(FashionMnist(root / "fashion_mnist").train.tensors)


@cache
def fashion(root: Path) -> tuple[Records, Records, Records]:
    """The public ones are MNIST's."""
    data = FashionMnist(root / "fashion_mnist")
    return data.train.tensors, data.test.tensors, some(Mnist(root / "mnist").train.tensors)


@cache
def pretrained(root: Path) -> dict[str, Tensor]:
    """Weights of an MLP trained on MNIST without privacy."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model, (x, y) = mlp((1, 28, 28), 10, [256, 256]), Mnist(root / "mnist").train.tensors
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        for _ in range(500):
            sample = torch.randint(len(x), (512,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[sample]), y[sample]).backward()
            optimizer.step()
    return model.state_dict()


def adapters(root: Path) -> nn.Module:
    """Low-rank adapters of the pretrained MLP, with a new head."""
    model = mlp((1, 28, 28), 10, [256, 256])
    model.load_state_dict({k: v for k, v in pretrained(root).items() if not k.startswith("5.")}, strict=False)
    return Lora()(model)


def lengths(model: nn.Module, records: Records) -> tuple[Tensor, Tensor]:
    """m_j and d_j [k] of the model's vectors; m_j is at least 1 % of the largest: a LoRA's ∂A is 0 at first."""
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), chunk_size=128)(weights, *records)
    found = vectors(model, list(owners(model)))
    m = torch.stack([
        torch.cat([gradients[name].flatten(1) for name in vector.parameters], 1).norm(dim=1).median()
        for vector in found
    ])  # fmt: skip
    return m.clamp(min=0.01 * m.max().item()), torch.tensor([float(vector.d) for vector in found])


def clipping(way: str, m: Tensor, d: Tensor, names: list[str], multiple: float) -> tuple[dpexp.Clipping, Any]:
    """How a way clips, and the allocation."""
    kind, _, what = way.partition(", ")
    if kind == "separate" and what == "one group":
        return dpexp.Clipping(clip_norm=dpexp.FixedClipNorm(multiple * m.norm().item())), dpexp.Proportional()
    if kind == "separate":
        equal = torch.full_like(m, m.norm().item() / math.sqrt(len(m)))
        norms = multiple * (m if "S by m" in what else equal)
        by_name = dpexp.FixedClipNorm(dict(zip(names, norms.tolist(), strict=True)))
        return dpexp.Clipping(group=dpexp.per_layer(), clip_norm=by_name), dpexp.MinVariance()
    if what == "learnt α":
        norm = dpexp.FixedClipNorm(multiple * math.sqrt(len(m)))
        joint = dpexp.Joint(dpexp.AdaptiveClipNorm())
        return dpexp.Clipping(mechanism=joint, clip_norm=norm), dpexp.Proportional()
    scales = {"α = m": m, "least noise": m.sqrt() / d**0.25}[what]
    S = multiple * (m / scales).norm().item()
    joint = dpexp.Joint(dpexp.FixedClipNorm((scales * S / math.sqrt(len(m))).tolist()))  # with S = √k
    return dpexp.Clipping(mechanism=joint), dpexp.Proportional()


@cache
def noise_multiplier(n: int, size: int, rounds: int, epsilon: float) -> float:
    """z, at the largest power of ten below 1/n as δ."""
    target = dpexp.Target(epsilon=epsilon, delta=10.0 ** -math.ceil(math.log10(n + 1)))
    sampling = dpexp.Poisson(expected_batch_size=size, steps=rounds)
    return dpexp.make_plan(nn.Linear(1, 1), n=n, sampling=sampling, target=target).noise_multiplier


def learning_rate(plan: dpexp.PrivacyPlan, m: Tensor) -> float:
    """That of `optimizer.lr=auto` with the norm, after clipping, of a record whose vectors have the lengths m."""
    square, first = 0.0, 0
    for group in (one for one in plan.groups if not one.is_metric):
        own, scales = m[first : first + len(group.vectors)], torch.tensor(group.alphas)
        first += len(group.vectors)
        square += (own.norm().item() * min(1.0, group.S / (own / scales).norm().item())) ** 2
        noise = group.sigma / (plan.sampling.q * plan.n)
        square += sum(v.d * (alpha * noise) ** 2 for v, alpha in zip(group.vectors, group.alphas, strict=True))
    return 0.1 * 20 / math.sqrt(square * plan.rounds)


def train(task: Task, root: Path, way: str, multiple: float, rate: float, seed: int) -> dict[str, float]:
    """Test accuracy in % and test loss."""
    training, test, public = task.records(root)
    n = len(training[0])
    torch.manual_seed(seed)
    model = task.model(root)
    m, d = lengths(model, public)
    names = [vector.name for vector in vectors(model, list(owners(model)))]
    how, allocation = clipping(way, m, d, names, multiple)
    sampling = dpexp.Poisson(expected_batch_size=task.size, steps=task.rounds)
    z = dpexp.Target(noise_multiplier=noise_multiplier(n, task.size, task.rounds, task.epsilon))
    plan = dpexp.make_plan(model, n=n, sampling=sampling, target=z, clipping=how, allocation=allocation)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], rate * learning_rate(plan, m), momentum=0.9
    )
    with tempfile.TemporaryDirectory() as folder:
        private = dpexp.Private(model, optimizer, plan, Path(folder) / "ledger.jsonl", compile=False, noise_seed=seed)
        for sample in private.rounds(TensorDataset(*training)):
            private.step(lambda model, record: F.cross_entropy(model(record[0]), record[1]), sample)
    with torch.no_grad():
        scores = torch.cat([model.eval()(part) for part in test[0].split(1000)])
    loss = F.cross_entropy(scores, test[1]).item()
    return {"accuracy": 100 * (scores.argmax(1) == test[1]).float().mean().item(), "loss": loss}


LEAST, BY_LENGTH, LEARNT = "joint, least noise", "joint, α = m", "joint, learnt α"
PER_LAYER, PER_LAYER_BY_LENGTH = "separate, per layer", "separate, per layer, S by m"
TASKS = {
    "digits": Task(
        "digits, CNN, ε = 3", digits, lambda root: cnn((1, 8, 8), 10), 359, 161, 3, 20,
        {SEPARATE: (1, 1), PER_LAYER: (1, 1), LEAST: (0.3, 1), BY_LENGTH: (3, 1), LEARNT: (1, 1)},
    ),
    "digits_mlp": Task(
        "digits, MLP 1024, ε = 1", digits, lambda root: mlp((1, 8, 8), 10, [1024]), 359, 161, 1, 10,
        {SEPARATE: (0.1, 2), PER_LAYER: (0.3, 1), PER_LAYER_BY_LENGTH: (0.1, 1), LEAST: (0.3, 1), BY_LENGTH: (0.3, 1),
         LEARNT: (0.3, 0.25)},
    ),
    "adult": Task(
        "Adult, MLP, ε = 0.5", adult, lambda root: mlp((105,), 2), 512, 200, 0.5, 5,
        {SEPARATE: (1, 2), PER_LAYER: (3, 0.5), LEAST: (3, 1), BY_LENGTH: (3, 2), LEARNT: (1, 4)},
    ),
    "mnist": Task(
        "MNIST, CNN, ε = 0.5", mnist, lambda root: cnn((1, 28, 28), 10), 256, 150, 0.5, 5,
        {SEPARATE: (1, 1), PER_LAYER: (1, 1), LEAST: (0.3, 1), BY_LENGTH: (1, 1), LEARNT: (1, 1)},
    ),
    "lora": Task(
        "Fashion-MNIST, LoRA, ε = 0.5", fashion, adapters, 512, 200, 0.5, 5,
        {SEPARATE: (0.3, 2), PER_LAYER: (1, 1), LEAST: (1, 8), BY_LENGTH: (1, 16), LEARNT: (1, 4)},
    ),
}  # fmt: skip


def run(name: str, root: Path) -> list[Result]:
    """What each training of a task reached, those of earlier calls too."""
    task, results = TASKS[name], []
    for way, (multiple, rate) in task.ways.items():
        for seed in range(task.seeds):
            which = {"task": name, "way": way, "multiple": multiple, "rate": rate, "seed": seed}
            results.append(kept(FOUND, which, partial(train, task, root, way, multiple, rate, seed)))
    return results


def differences(results: list[Result], way: str, what: str) -> tuple[float, float, float]:
    """Mean, standard error and p-value of the paired differences from separate clipping of one group."""
    own, base = ([one[what] for one in results if one["way"] == each] for each in (way, SEPARATE))
    found = [a - b for a, b in zip(own, base, strict=True)]
    mean, error = statistics.mean(found), statistics.stdev(found) / math.sqrt(len(found))
    return mean, error, 2 * student.sf(abs(mean) / error, len(found) - 1)


def shown(task: Task, results: list[Result]) -> str:
    accuracies = [one["accuracy"] for one in results if one["way"] == SEPARATE]
    lines = [f"{task.title}, {task.seeds} seeds: {SEPARATE} {statistics.mean(accuracies):.2f} %"]
    for way in list(task.ways)[1:]:
        mean, error, p = differences(results, way, "accuracy")
        loss, of_loss, _ = differences(results, way, "loss")
        lines.append(row(way, f"{mean:+.2f} ± {error:.2f}", f"p = {p:.2g}", f"loss {loss:+.4f} ± {of_loss:.4f}"))
    return "\n".join(lines)


def draw(found: Mapping[str, list[Result]], path: Path) -> None:
    """Paired differences with 95 % intervals."""
    ways = list(dict.fromkeys(way for name in found for way in TASKS[name].ways if way != SEPARATE))
    figure = Figure(figsize=(2.4 * len(found) + 1.5, 3.4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (name, results) in zip(panels, found.items(), strict=True):
        task = TASKS[name]
        half = student.isf(0.025, task.seeds - 1)
        for way in (one for one in ways if one in task.ways):
            mean, error, _ = differences(results, way, "accuracy")
            colour = "C1" if way.startswith("joint") else "C0"
            axes.errorbar(mean, ways.index(way), xerr=half * error, fmt="o", color=colour, capsize=3, markersize=5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(f"{task.title}\n{task.seeds} seeds", fontsize="small")
        axes.set_yticks(range(len(ways)), ways)
        axes.grid(alpha=0.3)
    axes.invert_yaxis()
    figure.supxlabel("points of test accuracy more than separate clipping of one group", fontsize="small")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [data, *names] if TASKS.keys() >= set(names):
            found = {name: run(name, Path(data).resolve()) for name in names or TASKS}
            for name, results in found.items():
                print(shown(TASKS[name], results))
            draw(found, DOCS / "joint.png")
        case _:
            sys.exit(f"{__doc__}\nTASKs are {', '.join(TASKS)}.")
