"""The price of privacy in a training round, against a plain Lightning fit of the same module, and Opacus.

    python benchmarks/step.py                          # every model; prints a table
    python benchmarks/step.py logistic lora --rounds 20 --repeat 2
    python benchmarks/step.py --write                  # a short table to docs/speed.md, a figure to docs/step_cpu.png

A fit is warmed up, and then measured from the end of one round to that of a later one: fetching the batch, the step,
the optimizer, callbacks and the ledger, in CPU time of the process on one thread (on a GPU: benchmarks/gpu.py). The
candidates fit in turn (A B C D A B C D …), so that the machine's drift hits all alike, and each fit is in a process of
its own, forked after the imports: what malloc has learnt from other fits changes an LSTM's time by a third.

Plain is a `pl.Trainer` with a shuffled DataLoader of batches of B; dpexp is the same with a `PrivacyCallback`, Poisson
samples of B expected records and a physical batch of 2 B; Opacus is a plain loop over the same batches of B, without
Lightning, which favours it.
"""

import argparse
import gc
import json
import logging
import math
import multiprocessing
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path

import pytorch_lightning as pl
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS, Workload

from dpexp import Poisson, PrivacyCallback, Target, make_plan

DEVICE = "cpu"  # benchmarks/gpu.py sets it
WARM_UP, REPEAT = 60, 5
OPACUS_WARM_UP, OPACUS_SECONDS = 2, 5  # at most: of an Opacus fit, the rounds before, and how long it is measured
LR, Z = 0.01, 1.0
ON_PAGE = ("logistic", "mlp", "cnn", "lstm", "bert", "gpt2", "llama", "lora", "wrn")  # the figure has all
SHOWN = [name for name in WORKLOADS if name != "wide"]  # that one shows memory, by --peak-of


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


def seconds() -> float:
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Clock(pl.Callback):
    """Read at the start, after `warm_up` rounds, and after `rounds` more or those of `limit` seconds."""

    def __init__(self, warm_up: int, rounds: int, limit: float = math.inf) -> None:
        self.warm_up, self.rounds, self.limit, self.done = warm_up, rounds, limit, 0
        self.read = [seconds()]

    @property
    def total(self) -> int:
        return self.warm_up + self.rounds

    def on_train_batch_end(self, *_: object) -> None:
        self.done += 1
        if self.done > self.warm_up + 1 and seconds() - self.read[1] > self.limit:
            self.rounds = self.done - self.warm_up
        if self.done in (self.warm_up, self.total):
            self.read.append(seconds())


def plain(work: Workload, data: TensorDataset, clock: Clock) -> None:
    fit(Module(work.build()), work, data, clock)


class AtOnce(TensorDataset):
    """Of which all rows of a batch are fetched and collated at once, as dpexp does."""

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        return [tensor.index_select(0, torch.tensor(rows)) for tensor in self.tensors]


def plain_at_once(work: Workload, data: TensorDataset, clock: Clock) -> None:
    fit(Module(work.build()), work, AtOnce(*data.tensors), clock, collate_fn=list)


def plain_compiled(work: Workload, data: TensorDataset, clock: Clock) -> None:
    fit(Module(torch.compile(work.build())), work, data, clock)  # type: ignore[arg-type]


def ours(work: Workload, data: TensorDataset, clock: Clock, compile: bool = False) -> str:
    """Returns what is said of compiling."""
    module = Module(work.build())
    plan = make_plan(
        module,
        n=len(data),
        sampling=Poisson(sampling_rate=work.batch / len(data), steps=clock.total),
        target=Target(noise_multiplier=Z),
    )
    with tempfile.TemporaryDirectory() as folder:
        privacy = PrivacyCallback(
            plan, Path(folder) / "ledger.jsonl", max_physical_batch_size=2 * work.batch, compile=compile
        )
        fit(module, work, data, clock, privacy)
    return privacy.progress.why_compiled


def fit(
    module: Module, work: Workload, data: TensorDataset, clock: Clock, *privacy: pl.Callback, **loader: object
) -> None:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator=DEVICE, devices=1, max_epochs=-1, max_steps=clock.total, precision=work.precision,
        callbacks=[*privacy, clock], **dict.fromkeys(off, False),
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, work.batch, shuffle=True, **loader))  # type: ignore[arg-type]


def opacus(work: Workload, data: TensorDataset, clock: Clock, ghost: bool = False) -> None:
    clock.warm_up, clock.limit = min(clock.warm_up, OPACUS_WARM_UP), OPACUS_SECONDS
    module = (work.opacus or work.build)().to(DEVICE).train()
    noise = {"noise_multiplier": Z, "expected_batch_size": work.batch, "max_grad_norm": 1.0}
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(module, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd(module), **noise)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    else:
        wrapped, optimizer, loss = GradSampleModule(module), DPOptimizer(sgd(module), **noise), nn.CrossEntropyLoss()
    loader = DataLoader(data, work.batch, shuffle=True)
    for *x, y in (batch for _ in count() for batch in loader):
        x, y = [t.to(DEVICE) for t in x], y.to(DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=work.precision == "bf16-mixed"):
            scores = wrapped(*x)
        shape = {"shape": y.shape} if ghost and y.dim() == 2 else {}  # a record is a sequence
        loss(scores.flatten(0, -2).float(), y.flatten(), **shape).backward()
        optimizer.step()
        clock.on_train_batch_end()
        if clock.done == clock.total:
            return


COMPILED, HOOKS, GHOST = "dpexp, compiled", "Opacus hooks", "Opacus ghost"
AT_ONCE, PLAIN_COMPILED = "plain, rows at once", "plain, compiled"
WAYS: dict[str, Callable[[Workload, TensorDataset, Clock], str | None]] = {
    "plain": plain, AT_ONCE: plain_at_once, PLAIN_COMPILED: plain_compiled,
    "dpexp": ours, COMPILED: lambda *a: ours(*a, compile=True),
    HOOKS: opacus, GHOST: lambda *a: opacus(*a, ghost=True),
}  # fmt: skip


@dataclass
class Timing:
    round: float  # seconds
    before: float  # seconds that the beginning took beyond as many later rounds
    peak: float  # MiB beyond imports and data
    said: str  # of compiling


def measured(name: str, way: str, warm_up: int, rounds: int | None) -> Timing:
    """Of one fit, in this process."""
    work = WORKLOADS[name]
    torch.manual_seed(0)
    data = TensorDataset(*work.data(work.batches * work.batch))
    gc.collect()
    gc.freeze()  # what was imported, of which one collection takes 0.3 s, in whichever fit it falls
    base, clock = resident("VmRSS"), Clock(warm_up, rounds or work.rounds)
    said = WAYS[way](work, data, clock) or ""
    start, warm, end = clock.read
    each = (end - warm) / clock.rounds
    return Timing(each, warm - start - clock.warm_up * each, resident("VmHWM") - base, said)


def resident(row: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(row)]
    return int(line.split()[1]) / 1024


Results = dict[str, list[Timing] | str]


def in_turn(name: str, repeat: int, warm_up: int, rounds: int | None) -> Results:
    """What each fit took, or why a candidate does not run."""
    results: Results = {way: [] for way in WAYS}
    for way in [*WAYS] * repeat:
        if isinstance(done := results[way], list):
            try:
                with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
                    done.append(process.submit(measured, name, way, warm_up, rounds).result())
            except Exception as error:
                results[way] = f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return results


def mean(results: Results, way: str, of: str = "round") -> float:
    done = results[way]
    return float("nan") if isinstance(done, str) else statistics.fmean(getattr(one, of) for one in done)


def ratio(results: Results, way: str, to: str = "plain") -> str:
    """Of means, and the standard deviation of the turns' ratios; or why there is none."""
    done, base = results[way], results[to]
    if isinstance(done, str) or isinstance(base, str):
        return str(done)
    turns = [a.round / b.round for a, b in zip(done, base, strict=True)]
    spread = f" ± {statistics.stdev(turns):.2f}" if len(turns) > 1 else ""
    return f"{mean(results, way) / mean(results, to):.2f}{spread}"


def compiling(results: Results) -> tuple[str, str, str]:
    """The pass alone, in ms, by the graph and compiled; the seconds that compiling took by the clock; after how many
    rounds it has paid."""
    done = results[COMPILED]
    said = (
        [re.findall(r"\d[\d.]*(?:e[+-]?\d+)?", one.said) for one in done if one.said.startswith("compiled")]
        if done
        else []
    )
    if isinstance(done, str) or not said:
        return (done if isinstance(done, str) else done[0].said), "", ""
    after, before, took = (statistics.fmean(map(float, numbers)) for numbers in zip(*said, strict=True))
    pays = f"{1000 * took / (before - after):.0f}" if after < before else "never"
    return f"{before:.2f}, {after:.2f}", f"{took:.0f}", pays


HEAD = """Each entry is the mean of {repeat} fits, with the standard deviation of the ratios. *Plain, rows at once*
fetches a batch by `index_select`, as dpexp does; *plain, compiled* is by `torch.compile`; the pass alone is a round's
forward and backward passes, norms and clipped sums, by the clock; *beginning* is the time from `fit` to the end of
{warm_up} rounds, less that of as many later ones; memory is the peak, without imports and data. Notes say where Opacus
needs another model, or cannot run.

torch {torch}, opacus {opacus}
"""
COLUMNS = (
    "", "B", "plain, ms", "dpexp", COMPILED, HOOKS, GHOST, "compiled to plain, rows at once",
    "compiled to plain, compiled", "pass alone, ms: graph, compiled", "compiling, s", "pays after rounds",
    "beginning, s: plain, dpexp, compiled",
)  # fmt: skip


def row(name: str, results: Results) -> str:
    work = WORKLOADS[name]
    theirs = [ratio(results, way) + (f" ({work.differs})" if work.differs else "") for way in (HOOKS, GHOST)]
    beginning = ", ".join(f"{mean(results, way, 'before'):.2f}" for way in ("plain", "dpexp", COMPILED))
    peaks = ", ".join(f"{mean(results, way, 'peak'):.0f}" for way in WAYS).replace("nan", "–")
    own = [f"{1000 * mean(results, 'plain'):.2f}", ratio(results, "dpexp"), ratio(results, COMPILED)]
    others = [ratio(results, COMPILED, to).partition(" ±")[0] for to in (AT_ONCE, PLAIN_COMPILED)]
    return line(work.title, f"{work.batch}", *own, *theirs, *others, *compiling(results), beginning, peaks)


SHORT = ("B records a round", "plain, ms", "dpexp; compiled", "Opacus: hooks; ghost", "compiling, s")


def short(name: str, results: Results) -> str:
    """A row of docs/speed.md: ratios to plain, without their spread."""
    work = WORKLOADS[name]
    ours, theirs = (
        "; ".join(ratio(results, way).partition(" ±")[0] for way in ways)
        for ways in (("dpexp", COMPILED), (HOOKS, GHOST))
    )
    theirs += f" ({work.differs})" if work.differs else ""
    return line(
        f"{work.title}, B {work.batch}", f"{1000 * mean(results, 'plain'):.2f}", ours, theirs, compiling(results)[1]
    )


DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- until here -->"


def write(by: str, text: str) -> None:
    """Puts a text between two marks of docs/speed.md."""
    page = DOCS / "speed.md"
    before, found, after = page.read_text().partition(f"<!-- written by {by} -->\n")
    if not found:
        raise SystemExit(f"{page} has no mark for {by}.")
    page.write_text(f"{before}{found}\n{text}\n\n{END}{after.partition(END)[2]}")


def table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([line(*head), line(*["---"] * len(head)), *rows])


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(everything: dict[str, Results], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.add_subplot(ylabel="time of a round / plain Lightning's", yscale="log")
    for i, way in enumerate(("dpexp", COMPILED, HOOKS, GHOST)):
        heights = [mean(results, way) / mean(results, "plain") for results in everything.values()]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, help="that are measured of each fit; default: more, the quicker they are")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="rounds before those")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="fits of each candidate")
    parser.add_argument("--write", action="store_true", help="docs/speed.md between its marks, and docs/step_cpu.png")
    parser.add_argument("--peak-of", choices=WAYS, help="only this candidate's memory, as JSON")
    arguments = parser.parse_args()
    names = arguments.workloads or SHOWN
    if unknown := {*names} - {*WORKLOADS}:
        parser.error(f"no such workload: {', '.join(unknown)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", ".*one at a time")
    logging.disable(logging.WARNING)
    fits = arguments.warm_up, arguments.rounds
    if arguments.peak_of:
        return print(json.dumps(measured(names[0], arguments.peak_of, *fits).peak))
    about = {"torch": torch.__version__, "opacus": version("opacus")}
    lines = [HEAD.format(repeat=arguments.repeat, warm_up=arguments.warm_up, **about)]
    columns = (*COLUMNS, "MiB: " + ", ".join(WAYS))
    lines += [line(*columns), line(*["---"] * len(columns))]
    print(*lines, sep="\n", flush=True)
    everything = {}
    for name in names:
        everything[name] = in_turn(name, arguments.repeat, *fits)
        lines.append(row(name, everything[name]))
        print(lines[-1], flush=True)
    if arguments.write:
        versions = "torch {torch}, Opacus {opacus}".format(**about)
        rows = [short(name, results) for name, results in everything.items() if name in ON_PAGE]
        write("benchmarks/step.py", f"{versions}\n\n{table(SHORT, rows)}")
        draw(everything, DOCS / "step_cpu.png")


if __name__ == "__main__":
    main()
