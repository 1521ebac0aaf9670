"""The price of privacy in a training step, against plain SGD and Opacus.

    python benchmarks/step.py                  # every workload: times, then peak memory; a table and a figure
    python benchmarks/step.py mlp cnn          # some of them, without the figure

Every candidate takes a step on the same batch in turn (A B C A B C …), so that the machine's drift hits all alike.
The ratio to plain SGD is minimum over minimum, and the median of the ratios of steps taken in the same turn. Peak
memory is that of a process of its own per candidate: of the whole process, and of what it holds beyond its imports.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TURNS, WARM_UP = 15, 3
LR, Z = 0.01, 1.0


class Gpt(nn.Module):
    """4 pre-norm layers of width 256 with 4 heads over 128 positions, vocabulary 512."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 256)
        self.positions = nn.Embedding(128, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, 4, 64)).unbind(-3)
        mixed = F.scaled_dot_product_attention(*(t.transpose(-3, -2) for t in (q, k, v)), is_causal=True)
        h = h + self.out(mixed.transpose(-3, -2).flatten(-2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class WideResNet(nn.Module):
    """WRN-16-4 with GroupNorm in place of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 64, 64, 128, 128, 256, 256]
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            *(Residual(a, b, 2 if i in (2, 4) else 1) for i, (a, b) in enumerate(pairwise(widths)))
        )
        self.norm = nn.GroupNorm(16, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, d: int, p: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, d), nn.GroupNorm(16, p)
        self.conv1 = nn.Conv2d(d, p, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(p, p, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(d, p, 1, stride, bias=False) if d != p or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        return self.skip(h) + self.conv2(F.relu(self.norm2(self.conv1(h))))


class Recurrent(nn.Module):
    """A 2-layer LSTM of width 256 over 64 positions."""

    def __init__(self, lstm: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def opacus_recurrent() -> nn.Module:
    from opacus.layers import DPLSTM

    return Recurrent(DPLSTM)


def images(b: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, *shape), torch.randint(10, (b,))


def small_cnn() -> nn.Module:
    from dpexp.training.models import cnn

    return cnn([1, 28, 28], 10)


Workload = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]
WORKLOADS: dict[str, Workload] = {
    "logistic": (lambda: nn.Sequential(nn.Linear(784, 10)), lambda: images(2048, 784)),
    "mlp": (lambda: nn.Sequential(nn.Linear(784, 1000), nn.Tanh(), nn.Linear(1000, 10)), lambda: images(600, 784)),
    "cnn": (small_cnn, lambda: images(512, 1, 28, 28)),
    "wrn": (WideResNet, lambda: images(32, 3, 32, 32)),
    "gpt": (Gpt, lambda: (torch.randint(512, (16, 128)), torch.randint(512, (16, 128)))),
    "lstm": (Recurrent, lambda: images(32, 64, 64)),
    "wide": (
        lambda: nn.Sequential(nn.Linear(784, 4096), nn.Tanh(), nn.Linear(4096, 10)),
        lambda: images(4096, 784),
    ),  # for memory
}
FOR_OPACUS = {"lstm": opacus_recurrent}  # what it does not take as it is
DRAWN = [name for name in WORKLOADS if name != "wide"]
Step = Callable[[], None]


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


def plain(name: str, noise: bool = False) -> Step:
    module, (x, y) = built(name)
    optimizer = torch.optim.SGD(module.parameters(), LR)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        if noise:
            for p in module.parameters():
                p.grad.add_(torch.randn_like(p), alpha=1e-3)  # type: ignore[union-attr]
        optimizer.step()

    return step


def ours(name: str, grouping: str) -> Step:
    from dpexp import make_plan
    from dpexp.accounting.ledger import LedgerWriter
    from dpexp.privacy import groups
    from dpexp.privacy.engine.engine import Engine
    from dpexp.privacy.mechanisms import Joint, Separate
    from dpexp.privacy.noise import GaussianNoise

    module, (x, y) = built(name)
    first = next(iter(dict(module.named_parameters()))).rpartition(".")[0]
    two = groups.Groups({"first": groups.Match(parameters=[first + ".*"]), "others": groups.Match(rest=True)})
    plan = make_plan(
        module,
        n=100 * len(x), q=0.01, steps=10**6, noise_multiplier=Z,
        group={"flat": groups.flat(), "per_layer": groups.per_layer(), "two": two}[grouping],
        mechanism=Joint(alpha=1.0) if grouping == "two" else Separate(),
    )  # fmt: skip
    engine = Engine(plan, module, GaussianNoise())
    ledger = LedgerWriter(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    optimizer = torch.optim.SGD(module.parameters(), LR)

    def step() -> None:
        ledger.sample(plan.sampling.event(plan.n))
        engine.start()
        engine.accumulate(lambda one: loss_of(module(one[0]), one[1]), (x.unsqueeze(1), y.unsqueeze(1)), len(x))
        released = engine.release(ledger)
        for parameter, p in module.named_parameters():
            p.grad = released[parameter]
        optimizer.step()

    return step


def opacus(name: str, mode: str, clipping: str = "flat") -> Step:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module, (x, y) = built(name, FOR_OPACUS.get(name))
    sgd = torch.optim.SGD(module.parameters(), LR)
    noise = {"noise_multiplier": Z, "expected_batch_size": len(x)}
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd, max_grad_norm=1.0, **noise)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    else:
        wrapped = GradSampleModule(module)
        count = len(list(module.parameters()))
        optimizer = (
            DPOptimizer(sgd, max_grad_norm=1.0, **noise)
            if clipping == "flat"
            else DPPerLayerOptimizer(sgd, max_grad_norm=[1.0] * count, **noise)
        )
        loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        scores = wrapped(x)
        shape = {"shape": y.shape} if mode == "ghost" and y.dim() == 2 else {}  # a record is a sequence
        value = loss(scores.flatten(0, -2), y.flatten(), **shape)
        value.backward()
        optimizer.step()

    return step


CANDIDATES: dict[str, Callable[[str], Step]] = {
    "plain SGD": plain,
    "plain SGD + noise": lambda name: plain(name, noise=True),
    "dpexp flat": lambda name: ours(name, "flat"),
    "dpexp per_layer": lambda name: ours(name, "per_layer"),
    "dpexp two groups, joint": lambda name: ours(name, "two"),
    "Opacus hooks, flat": lambda name: opacus(name, "hooks"),
    "Opacus hooks, per layer": lambda name: opacus(name, "hooks", "per_layer"),
    "Opacus ghost, flat": lambda name: opacus(name, "ghost"),
}


def built(name: str, build: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module, data = WORKLOADS[name]
    return (build or module)().to(DEVICE), tuple(t.to(DEVICE) for t in data())  # type: ignore[return-value]


def timed(step: Step) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def times(name: str, turns: int) -> dict[str, list[float] | str]:
    """Milliseconds of each turn, or why a candidate does not run."""
    steps: dict[str, Step] = {}
    results: dict[str, list[float] | str] = {}
    for candidate, make in CANDIDATES.items():
        try:
            step = make(name)
            for _ in range(WARM_UP):
                step()
            steps[candidate], results[candidate] = step, []
        except Exception as error:
            results[candidate] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    for _ in range(turns):
        for candidate, step in steps.items():
            gc.disable()
            results[candidate].append(timed(step))  # type: ignore[union-attr]
            gc.enable()
    return results


def memory(name: str, candidate: str) -> dict[str, float]:
    """MiB at the peak of five steps, in this process."""
    import opacus  # noqa: F401  # every candidate has the same imports

    import dpexp.privacy.engine.engine  # noqa: F401

    if DEVICE == "cuda":
        step = CANDIDATES[candidate](name)
        for _ in range(5):
            step()
        return {"beyond imports": torch.cuda.max_memory_allocated() / 2**20}
    before = resident("VmRSS")
    step = CANDIDATES[candidate](name)
    for _ in range(5):
        step()
    peak = resident("VmHWM")
    return {"whole process": peak, "beyond imports": peak - before}


def resident(field: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def memories(name: str, device: str) -> dict[str, dict[str, float]]:
    results = {}
    for candidate in CANDIDATES:
        command = [sys.executable, __file__, name, "--peak-of", candidate, "--device", device]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            results[candidate] = json.loads(done.stdout.splitlines()[-1])
    return results


def table(name: str, measured: dict[str, list[float] | str], peaks: dict[str, dict[str, float]]) -> str:
    base = measured["plain SGD"]
    parts = list(peaks.get("plain SGD", {}))
    lines = [
        f"### {name}\n",
        "| | ms (min) | min / min | median of pairs | "
        + " | ".join(f"MiB, {p}" for p in parts)
        + (" | " if parts else "")
        + " | ".join(f"ratio, {p}" for p in parts)
        + " |",
        "|---|---|---|---|" + "---|---|" * len(parts),
    ]
    for candidate, values in measured.items():
        if isinstance(values, str):
            lines.append(f"| {candidate} | does not run: {values} |" + " |" * (2 + 2 * len(parts)))
            continue
        pairs = statistics.median(a / b for a, b in zip(values, base, strict=True))  # type: ignore[arg-type]
        peak = peaks.get(candidate, {})
        cells = [f"{peak[p]:.0f}" if peak else "" for p in parts]
        cells += [f"{peak[p] / peaks['plain SGD'][p]:.2f}" if peak else "" for p in parts]
        ratios = f"{min(values) / min(base):.2f} | {pairs:.2f}"  # type: ignore[type-var]
        lines.append(f"| {candidate} | {min(values):.1f} | {ratios} | " + " | ".join(cells) + (" |" if cells else ""))
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict[str, list[float] | str]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot(ylabel="step time / plain SGD (minima)", yscale="log")
    candidates = [c for c in CANDIDATES if c != "plain SGD"]
    for i, candidate in enumerate(candidates):
        heights = []
        for measured in results.values():
            values, base = measured[candidate], measured["plain SGD"]
            heights.append(float("nan") if isinstance(values, str) else min(values) / min(base))  # type: ignore[type-var]
        positions = [k + (i - len(candidates) / 2) / (len(candidates) + 1) for k in range(len(results))]
        axes.bar(positions, heights, 1 / (len(candidates) + 2), label=candidate)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50, 100], map(str, ticks))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", ncols=4)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DRAWN)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    warnings.simplefilter("ignore")
    if arguments.peak_of:
        print(json.dumps(memory(arguments.workloads[0], arguments.peak_of)))
        sys.exit()
    measurements = {}
    print(f"torch {torch.__version__}, {DEVICE}, {torch.get_num_threads()} threads\n")
    for workload in arguments.workloads:
        measurements[workload] = times(workload, arguments.turns)
        peaks = {} if arguments.no_memory else memories(workload, DEVICE)
        print(table(workload, measurements[workload], peaks), flush=True)
    if {*measurements} >= {*DRAWN}:
        draw(measurements, Path(__file__).with_name(f"step_{DEVICE}.png"))
