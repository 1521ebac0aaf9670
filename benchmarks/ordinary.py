"""Ordinary Lightning modules, as their authors wrote them: does each train privately, how, and at what price?

    python benchmarks/ordinary.py --write          # all: prints a table, and puts its summary into docs/speed.md
    python benchmarks/ordinary.py "MNIST convnet"  # those whose names begin so

Each module trains for some steps of about 32 records: plainly, and with a `PrivacyCallback`. *Plain* is the CPU time of
a step without privacy, *over plain* that of a private one divided by it, both in the second half of the steps.
"""

import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from quiet import quiet, trainer
from report import Result, answer, cells_of, head, parser, row, table, write
from torch.utils.data import DataLoader

import dpexp

B, N, STEPS = 32, 512, 160
PAGES = ("classifiers", "images", "tables", "sequences", "tuning", "steps")
MODES = ("traced", "one at a time", "refused", "crashed", "FAILED")
Built = tuple[pl.LightningModule, Any, dict[str, Any]]  # a module, its data set, and options of the DataLoader


@dataclass(frozen=True)
class Case:
    """An ordinary module with its data.

    Attributes:
        source: the public repository whose structure it copies; empty: none.
        changed: what was changed for dpexp and for the plain training that it is compared with; empty: nothing.
    """

    name: str
    source: str
    build: Callable[[], Built]
    changed: str = ""

    def built(self) -> Built:
        torch.manual_seed(0)
        module, data, options = self.build()
        if self.changed == GROUP_NORM:
            module = dpexp.GroupNormalization()(module)
        return module, data, options


CASES: dict[str, Case] = {}
GROUP_NORM = "dpexp.GroupNormalization()(module)"  # in place of BatchNorm, which mixes records


def case(name: str, source: str = "", changed: str = "") -> Callable:
    """Adds a function that builds a module to the table."""

    def add(build: Callable) -> Callable:
        CASES[name] = Case(name, source, build, changed)
        return build

    return add


class Clock(pl.Callback):
    """CPU seconds at the beginning of each step, and how the last private one ran."""

    def __init__(self, privacy: dpexp.PrivacyCallback | None = None) -> None:
        self.times: list[float] = []
        self.found: Result = {}
        self.privacy = privacy

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.privacy:
            step = self.privacy._fit.engine.step
            self.found = {"mode": step.mode, "reason": step.reason}

    def result(self) -> Result:
        """Seconds of a step, without the first half, in which shapes are seen for the first time."""
        later = self.times[len(self.times) // 2 :]
        return self.found | {"step": (later[-1] - later[0]) / (len(later) - 1)}


def plainly(one: Case, steps: int) -> Result:
    module, data, options = one.built()
    clock = Clock()
    trainer(clock, max_steps=steps).fit(module, DataLoader(data, B, shuffle=True, **options))
    return clock.result()


def privately(one: Case, steps: int) -> Result:
    """A refusal is a ConfigError; any other exception is a crash."""
    privacy = None
    try:
        module, data, options = one.built()
        sampling = dpexp.Poisson(sampling_rate=B / N, steps=steps)
        plan = dpexp.make_plan(module, n=N, sampling=sampling, target=dpexp.Target(noise_multiplier=1.0))
        ledger = Path(tempfile.mkdtemp()) / "ledger.jsonl"
        privacy = dpexp.PrivacyCallback(plan, ledger, noise_seed=1, compile=False)
        clock = Clock(privacy)
        trainer(clock, privacy).fit(module, DataLoader(data, B, shuffle=True, **options))
        return clock.result()
    except Exception as error:  # the table says which
        traceback.print_exc()
        mode = "refused" if isinstance(error, dpexp.ConfigError) else "crashed"
        rounds = privacy.rounds_done if privacy else 0
        return {"mode": mode, "reason": f"after {rounds} rounds: {type(error).__name__}: {error}"}


def cells(one: Case, plain: Result, private: Result) -> tuple[str, ...]:
    """A line of the table: what was changed, how the rounds ran, and at what price."""
    price = f"{private['step'] / plain['step']:.2f}" if "step" in private else ""
    reason = (private["reason"] or "").replace("|", "/").replace("\n", " ")[:250]
    return one.name, one.source, one.changed, private["mode"], f"{1e3 * plain['step']:.1f}", price, reason


def apart(name: str, steps: int) -> tuple[str, ...]:
    """The line of one module, which trains in a process of its own."""
    found = answer([sys.executable, __file__, "--one", "--steps", str(steps), name])
    if "error" in found:
        return name, CASES[name].source, "", "FAILED", "", "", found["error"][:200]
    return tuple(found["cells"])


def summary(lines: list[str]) -> str:
    """How many modules of the table run in which way, and at what price."""
    rows = []
    for mode in MODES:
        of_mode = [cells for cells in map(cells_of, lines) if cells[3] == mode]
        prices = [float(cells[5]) for cells in of_mode if cells[5]]
        paid = f"{min(prices):.1f}, {statistics.median(prices):.1f}, {max(prices):.1f}" if prices else ""
        if of_mode:
            rows.append((mode, len(of_mode), paid))
    return table(("", "modules", "least, median and most time over plain"), rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", default=[""])
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--one", action="store_true", help="trains one module in this process, with its traceback")
    options.add_argument("--write", action="store_true", help="the summary, to docs/speed.md")
    given = options.parse_args()
    sys.path[:0] = [str(Path(__file__).parent / "ordinary_modules")]
    for page in PAGES:
        import_module(page)
    if given.one:
        quiet()
        one = CASES[given.names[0]]
        print(json.dumps({"cells": cells(one, plainly(one, given.steps), privately(one, given.steps))}))
        return
    print(head("module", "structure of", "changed", "mode", "plain, ms", "over plain", "reason"))
    lines = []
    for name in [name for name in CASES if name.startswith(tuple(given.names))]:
        lines.append(row(*apart(name, given.steps)))
        print(lines[-1], flush=True)
    if given.write:
        write(summary(lines), "speed.md", "<!-- written by benchmarks/ordinary.py -->")


if __name__ == "__main__":
    sys.modules["ordinary"] = sys.modules["__main__"]
    main()
