"""The price of privacy in a training round, against a plain Lightning fit of the same module, and Opacus.

    python benchmarks/step.py                          # every model; prints what is found, and then a table
    python benchmarks/step.py logistic lora --rounds 20 --repeat 2
    python benchmarks/step.py --write                  # the table to docs/speed.md, a figure to docs/step_cpu.png

A fit is warmed up, and then measured from the end of one round to that of a later one: fetching the batch, the step,
the optimizer, callbacks and the ledger, in CPU time of the process on one thread (on a GPU: benchmarks/gpu.py). The
candidates are measured in turn (A B C D …) while the others wait, so that the machine's drift hits all alike, and each
fit is in a process of its own, forked after the imports: what malloc has learnt from other fits changes an LSTM's time
by a third.

Plain is a `pl.Trainer` with a shuffled DataLoader of batches of B; dpexp is the same with a `PrivacyCallback`, Poisson
samples of B expected records and a physical batch of 2 B; Opacus is a plain loop over the same batches of B, without
Lightning, which favours it. A table's entries are ratios of medians; notes say where Opacus needs another model, or
cannot run.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from quiet import quiet, trainer
from report import DOCS, Result, append, parser, table, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS, Workload

from dpexp import Poisson, PrivacyCallback, Target, make_plan

FORK = multiprocessing.get_context("fork")  # after imports, before CUDA
WARM_UP, REPEAT, SECONDS = 60, 5, 10  # of a fit on a CPU
OPACUS_WARM_UP = 2
ROUNDS = 100_000  # more than are measured
LR, Z = 0.01, 1.0
ON_PAGE = ("logistic", "mlp", "cnn", "lstm", "bert", "gpt2", "llama", "lora", "wrn")  # the figure has all
LATE = "out of time"
COMPILED, HOOKS, GHOST = "dpexp, compiled", "Opacus hooks", "Opacus ghost"


@dataclass(frozen=True)
class Pace:
    """How a fit is measured.

    Args:
        warm_up: rounds before the first turn; skipped: of each turn before its measured ones, at least 1.
        least, most: measured rounds of a turn, which ends after so many seconds if it has the least.
    """

    device: str
    warm_up: int
    skipped: int
    least: int
    most: float
    seconds: float


def clock(device: str) -> float:
    """CPU seconds of this process; on a GPU seconds, once it has done its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Turns(pl.Callback):
    """Measures rounds whenever the other end of the connection says so, until the process is killed."""

    def __init__(self, pace: Pace, connection: Connection) -> None:
        self.pace, self.connection = pace, connection
        self.done, self.of_turn, self.began = 0, 0, time.monotonic()

    def on_train_batch_end(self, trainer: Any = None, *_: object) -> None:
        self.done += 1
        self.of_turn += 1
        measured = self.of_turn - self.pace.skipped
        if self.done < self.pace.warm_up:
            return
        if self.done == self.pace.warm_up:
            clock(self.pace.device)
            callbacks = trainer.callbacks if trainer else []
            told = [one.progress.why_compiled for one in callbacks if isinstance(one, PrivacyCallback)]
            self._say(beginning=time.monotonic() - self.began, compiling="".join(told))
        elif measured == 0:
            self.clock, self.turn = clock(self.pace.device), time.monotonic()
        elif measured >= self.pace.most or (measured >= self.pace.least and self._is_late()):
            ms = 1000 * (clock(self.pace.device) - self.clock) / measured
            self._say(ms=ms, rounds=measured, gib=peak(self.pace.device))

    def _is_late(self) -> bool:
        return time.monotonic() - self.turn > self.pace.seconds

    def _say(self, **found: Any) -> None:
        """And waits, without memory that others may need."""
        if self.pace.device == "cuda":
            torch.cuda.empty_cache()
        self.connection.send(found)
        self.connection.recv()
        self.of_turn = 0


def peak(device: str) -> float:
    """GiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    kib = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    return int(kib) / 2**20


# The ways to fit a model


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2).float(), y.flatten())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor]) -> Tensor:
        *x, y = batch
        return loss_of(self.model(*x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def train(module: Module, work: Workload, data: TensorDataset, turns: Turns, *privacy: pl.Callback) -> None:
    options = {"accelerator": turns.pace.device, "devices": 1, "max_steps": ROUNDS, "precision": work.precision}
    trainer(*privacy, turns, **options).fit(module, DataLoader(data, work.batch, shuffle=True))


def plain(work: Workload, data: TensorDataset, turns: Turns) -> None:
    train(Module(work.build()), work, data, turns)


def ours(work: Workload, data: TensorDataset, turns: Turns, compile: bool = False) -> None:
    module = Module(work.build())
    sampling = Poisson(sampling_rate=work.batch / len(data), steps=ROUNDS)
    plan = make_plan(module, n=len(data), sampling=sampling, target=Target(noise_multiplier=Z))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        privacy = PrivacyCallback(plan, ledger, max_physical_batch_size=2 * work.batch, compile=compile)
        train(module, work, data, turns, privacy)


def compiled(work: Workload, data: TensorDataset, turns: Turns) -> None:
    ours(work, data, turns, compile=True)


def hooks(work: Workload, data: TensorDataset, turns: Turns, ghost: bool = False) -> None:
    device = turns.pace.device
    turns.pace = replace(turns.pace, warm_up=min(turns.pace.warm_up, OPACUS_WARM_UP))
    module = (work.opacus or work.build)().to(device).train()
    noise = {"noise_multiplier": Z, "expected_batch_size": work.batch, "max_grad_norm": 1.0}
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd(module), **noise)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    else:
        wrapped, optimizer, loss = GradSampleModule(module), DPOptimizer(sgd(module), **noise), nn.CrossEntropyLoss()
    loader = DataLoader(data, work.batch, shuffle=True)
    for *x, y in (batch for _ in count() for batch in loader):
        x, y = [t.to(device) for t in x], y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=work.precision == "bf16-mixed"):
            scores = wrapped(*x)
        shape = {"shape": y.shape} if ghost and y.dim() == 2 else {}  # a record is a sequence
        loss(scores.flatten(0, -2).float(), y.flatten(), **shape).backward()
        optimizer.step()
        turns.on_train_batch_end()


def ghost(work: Workload, data: TensorDataset, turns: Turns) -> None:
    hooks(work, data, turns, ghost=True)


WAYS = {"plain": plain, "dpexp": ours, COMPILED: compiled, HOOKS: hooks, GHOST: ghost}


def fit(work: Workload, way: str, pace: Pace, connection: Connection) -> None:
    """In a process of its own, until it is killed."""
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what was imported, of which one collection takes 0.3 s, in whichever round it falls
    try:
        if pace.device == "cuda":
            connection.send({"device": torch.cuda.get_device_name()})
        WAYS[way](work, TensorDataset(*work.data(work.batches * work.batch)), Turns(pace, connection))
    except Exception as error:
        why = str(error).partition("\n")[0][:90]
        connection.send({"failed": f"does not run: {type(error).__name__}: {why}"})
        raise


# Processes and what they find


def alone(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    """In a forked process."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(*arguments)


@dataclass
class Run:
    """Starts processes, and saves what they find.

    Args:
        file: of results, one a line; scratch: a folder for what processes print.
        ends: when the present part must end, by `time.monotonic`.
    """

    file: Path
    scratch: Path
    ends: float = math.inf
    results: list[Result] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def save(self, part: str, name: str, how: str = "", **found: Any) -> None:
        result = {"part": part, "name": name, "how": how, **found}
        self.results.append(result)
        append(self.file, result)
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in result.items()}
        print(*(f"{key}: {value}" for key, value in shown.items() if value != ""), sep=", ", flush=True)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def log(self, *names: str) -> Path:
        return self.scratch / re.sub(r"\W+", "_", f"{'_'.join(names)}.txt")

    def start(self, log: Path, work: Callable[..., None], *arguments: Any) -> Any:
        process = FORK.Process(target=alone, args=(log, work, *arguments))
        process.start()
        self.processes.append(process)
        return process

    def stop(self, *some: Any) -> None:
        """Some processes that were started, or all; and those that they started."""
        for process in some or [*self.processes]:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            self.processes.remove(process)


class Fits:
    """Fits of some models that are measured in turns."""

    def __init__(self, run: Run, part: str, pace: Pace, limit: float = math.inf) -> None:
        self.run, self.part, self.pace = run, part, pace
        self.limit = min(limit, run.left)
        self.ends = time.monotonic() + self.limit
        self.fits: dict[Connection, tuple[str, str, Any]] = {}

    def start(self, name: str, work: Workload, way: str) -> Connection:
        ours, theirs = FORK.Pipe()
        process = self.run.start(self.run.log(name, way), fit, work, way, self.pace, theirs)
        theirs.close()
        self.fits[ours] = name, way, process
        return ours

    def hear(self, connection: Connection, ends: float, **more: Any) -> bool:
        """Saves what is said next; whether the fit has begun. One that failed has no further turn."""
        left = None if ends == math.inf else max(0, ends - time.monotonic())
        try:
            found = connection.recv() if connection.poll(left) else {"failed": LATE}
        except (EOFError, OSError):
            found = {"failed": "was killed"}
        name, way, process = self.fits[connection]
        self.run.save(self.part, name, way, **more, **found)
        if "failed" in found:
            self.run.stop(process)
            del self.fits[connection]
        return "beginning" in found

    def begin_together(self) -> None:
        """Hears from each that it has begun, or that it has not within three quarters of the time."""
        begun: list[Connection] = []
        latest = self.ends - self.limit / 4
        while waiting := [one for one in self.fits if one not in begun]:
            heard = wait(waiting, max(0, latest - time.monotonic())) or waiting
            begun += [connection for connection in heard if self.hear(connection, 0)]

    def measure(self, turns: int) -> None:
        for turn in range(turns):
            for connection in [*self.fits]:
                with contextlib.suppress(BrokenPipeError):
                    connection.send(turn)
                self.hear(connection, self.ends, turn=turn)
        self.run.stop()


# The table

HEAD = (
    "B records a round", "plain, ms", "dpexp; compiled", "Opacus: hooks; ghost", "dpexp over hooks; compiled",
    "GiB: plain, dpexp, compiled, hooks, ghost", "compiling, s",
)  # fmt: skip


@dataclass
class Found:
    """What the fits of one model found, by way."""

    results: list[Result]

    def every(self, way: str, what: str) -> list[Any]:
        return [one[what] for one in self.results if one["how"] == way and what in one]

    def median(self, way: str) -> float:
        return statistics.median(self.every(way, "ms") or [math.nan])

    def over(self, way: str, base: str) -> str:
        return shown(self.median(way) / self.median(base))

    def to_plain(self, way: str) -> str:
        """A ratio, or why there is none."""
        why = [*self.every(way, "failed"), "not run"][0]
        return self.over(way, "plain") if self.every(way, "ms") else why

    def compiling(self) -> str:
        """The seconds that it took, or why it was not done."""
        told = self.every(COMPILED, "compiling")
        took = [*re.findall(r"compiling took (\d+) s", "".join(told))][-1:]
        return " ".join([*took, *[f"({one})" for one in told if one.startswith("not")][-1:]])

    def cells(self, work: Workload) -> list[str]:
        opacus = f"{self.to_plain(HOOKS)}; {self.to_plain(GHOST)}"
        return [
            f"{work.title}, B {work.batch}",
            shown(self.median("plain")),
            f"{self.to_plain('dpexp')}; {self.to_plain(COMPILED)}",
            f"{opacus} ({work.differs})" if work.differs else opacus,
            f"{self.over('dpexp', HOOKS)}; {self.over(COMPILED, HOOKS)}",
            ", ".join(shown(max(self.every(way, "gib"), default=math.nan), 1) for way in WAYS),
            self.compiling(),
        ]


def shown(number: float, digits: int = 2) -> str:
    return "–" if math.isnan(number) else f"{number:.{digits}f}"


def found_of(part: str, works: Iterable[str], results: list[Result]) -> dict[str, Found]:
    """Of each model of a part that was tried."""
    own = [one for one in results if one["part"] == part]
    found = {name: Found([one for one in own if one["name"] == name]) for name in works}
    return {name: one for name, one in found.items() if one.results}


def of_models(part: str, works: dict[str, Workload], results: list[Result]) -> str:
    """The versions, and a table."""
    found = found_of(part, works, results)
    devices = {one["device"] for one in results if one["part"] == part and "device" in one}
    about = next(one for one in reversed(results) if one["part"] == "about")
    said = f"{', '.join(devices) or 'CPU'}, torch {about['torch']}, Opacus {about['opacus']}"
    return f"{said}\n\n{table(HEAD, [one.cells(works[name]) for name, one in found.items()])}"


def save_versions(run: Run, device: str) -> None:
    run.save("about", device, torch=torch.__version__, opacus=version("opacus"))


def draw(everything: dict[str, Found], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.add_subplot(ylabel="time of a round / plain Lightning's", yscale="log")
    for i, way in enumerate(("dpexp", COMPILED, HOOKS, GHOST)):
        heights = [found.median(way) / found.median("plain") for found in everything.values()]
        bars = axes.bar([k + (i - 1.5) / 5 for k in range(len(heights))], heights, 0.19, label=way)
        axes.bar_label(bars, ["" if math.isnan(h) else f"{h:.1f}" for h in heights], fontsize="x-small")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(everything)), list(everything))
    axes.set_yticks(ticks := [0.5, 1, 2, 5, 10, 20, 50, 100], map(str, ticks))
    axes.minorticks_off()
    axes.set_ylim(0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", fontsize="small", ncols=5)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=[*WORKLOADS], help=f"of {', '.join(WORKLOADS)}")
    options.add_argument(
        "--rounds", type=int, help="that are measured of each fit; default: more, the quicker they are"
    )
    options.add_argument("--warm-up", type=int, default=WARM_UP, help="rounds before those")
    options.add_argument("--repeat", type=int, default=REPEAT, help="fits of each candidate")
    options.add_argument("--write", action="store_true", help="docs/speed.md between its marks, and docs/step_cpu.png")
    given = options.parse_args()
    if unknown := {*given.workloads} - {*WORKLOADS}:
        options.error(f"no such workload: {', '.join(unknown)}")
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "results.jsonl", Path(folder))
        save_versions(run, "cpu")
        for name in given.workloads:
            work = WORKLOADS[name]
            pace = Pace("cpu", given.warm_up, skipped=1, least=2, most=given.rounds or work.rounds, seconds=SECONDS)
            for _ in range(given.repeat):
                fits = Fits(run, "step", pace)
                for way in WAYS:  # one after another, so that each compiles alone
                    fits.hear(fits.start(name, work, way), math.inf)
                fits.measure(turns=1)
    print(of_models("step", WORKLOADS, run.results))
    if given.write:
        text = of_models("step", {name: WORKLOADS[name] for name in ON_PAGE}, run.results)
        write(text, "speed.md", "<!-- written by benchmarks/step.py -->")
        draw(found_of("step", WORKLOADS, run.results), DOCS / "step_cpu.png")


if __name__ == "__main__":
    main()
