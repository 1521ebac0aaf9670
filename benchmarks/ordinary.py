"""Ordinary Lightning modules, as their authors wrote them: does each train privately, how, and at what price?

python benchmarks/ordinary.py --write    # all: prints a table, and puts its summary into docs/speed.md
python benchmarks/ordinary.py "VAE"      # those whose names begin so
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import dpexp

B, N, STEPS = 32, 512, 160
SLOW = 2.5  # times a plain step
PAGES = ("classifiers", "images", "tables", "sequences", "tuning", "steps")


@dataclass(frozen=True)
class Case:
    """An ordinary module with its data.

    Attributes:
        source: the public repository whose structure it copies; empty: none.
        build: returns (module, data set, options of its DataLoader).
        changed: what was changed for dpexp and for the plain training that it is compared with; empty: nothing.
    """

    name: str
    source: str
    build: Callable[[], tuple[pl.LightningModule, Any, dict[str, Any]]]
    changed: str = ""


CASES: dict[str, Case] = {}


def case(name: str, source: str = "", changed: str = "") -> Callable:
    """Adds a function that builds a module to the table."""

    def add(build: Callable) -> Callable:
        CASES[name] = Case(name, source, build, changed)
        return build

    return add


GROUP_NORM = "dpexp.GroupNormalization()(module)"  # in place of BatchNorm, which mixes records


def built(one: Case) -> tuple[pl.LightningModule, Any, dict[str, Any]]:
    module, data, options = one.build()
    return dpexp.GroupNormalization()(module) if one.changed == GROUP_NORM else module, data, options


class Clock(pl.Callback):
    """CPU seconds at the beginning of each step, and whether a slow training was announced before the first release."""

    def __init__(self, caught: list[Any] | None = None) -> None:
        self.times: list[float] = []
        self.announced: bool | None = None
        self._caught = [] if caught is None else caught

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.announced is None:
            self.announced = any(
                re.search("slow|is padded|noise of a round take", str(w.message)) for w in self._caught
            )


def seconds_a_step(times: list[float]) -> float:
    """Without the first half, in which shapes are seen for the first time."""
    first = len(times) // 2
    return (times[-1] - times[first]) / (len(times) - 1 - first)


def quiet(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def plainly(one: Case) -> dict[str, Any]:
    module, data, options = built(one)
    clock = Clock()
    quiet(callbacks=[clock], max_steps=STEPS, max_epochs=-1).fit(module, DataLoader(data, B, shuffle=True, **options))
    return {"step": seconds_a_step(clock.times)}


def privately(one: Case) -> dict[str, Any]:
    """Trains with a PrivacyCallback. A refusal is a ConfigError; any other exception is a crash."""
    module, data, options = built(one)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clock, start, privacy = Clock(caught), time.monotonic(), None
        try:
            target = dpexp.Target(noise_multiplier=1.0)
            sampling = dpexp.Poisson(sampling_rate=B / N, steps=STEPS)
            plan = dpexp.make_plan(module, n=N, sampling=sampling, target=target)
            path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
            privacy = dpexp.PrivacyCallback(plan, path, noise_seed=1, compile=False)
            end = privacy.on_train_batch_end

            def seen(*args: Any) -> None:
                step = privacy._fit.engine.step
                found.update(mode=step.mode, reason=step.reason)
                end(*args)

            privacy.on_train_batch_end = seen
            loader = DataLoader(data, B, shuffle=True, **options)
            quiet(callbacks=[clock, privacy], max_epochs=-1).fit(module, loader)
            found |= {"step": seconds_a_step(clock.times), "job": time.monotonic() - start}
        except Exception as error:  # the table says which
            kind = "refused" if isinstance(error, dpexp.ConfigError) else "crashed"
            rounds = privacy.rounds_done if privacy else 0
            found |= {"mode": kind, "error": f"{type(error).__name__}: {error}", "rounds": rounds}
            if "-v" in sys.argv:
                raise
    return found | {"announced": clock.announced}


def by_opacus(one: Case) -> dict[str, Any]:
    """The quicker of Opacus' ways with the same step: hooks, or functorch."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    found: dict[str, Any] = {}
    for way in ("hooks", "functorch"):
        try:
            module, data, options = built(one)
            module.log = module.log_dict = lambda *_, **__: None
            optimizer = module.configure_optimizers()
            optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
            while isinstance(optimizer, list | tuple):
                optimizer = optimizer[0]
            module.train()
            wrapped = GradSampleModule(module, force_functorch=way == "functorch", strict=True)
            optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=B)
            times: list[float] = []
            while len(times) <= STEPS:
                for k, batch in enumerate(DataLoader(data, B, shuffle=True, drop_last=True, **options)):
                    times.append(time.process_time())
                    loss = wrapped._module.training_step(batch, k)
                    (loss["loss"] if isinstance(loss, dict) else loss).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found["step"] = min(found.get("step", float("inf")), seconds_a_step(times))
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}".splitlines()[0][:150]
            if "-v" in sys.argv:
                print(way, found[way], file=sys.stderr)
    return found


def run(name: str) -> dict[str, Any]:
    """Trains one module plainly, privately and by Opacus."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found = {}
    for way in (plainly, privately, by_opacus):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[way.__name__] = way(CASES[name])
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table: what was changed, how the rounds ran, and at what price."""
    plain, private, opacus = found["plainly"], found["privately"], found["by_opacus"]

    said = private.get("error") or private.get("reason") or ""
    if private.get("rounds"):
        said = f"after {private['rounds']} rounds: {said}"
    told = ("yes" if private["announced"] else "no") if float(price(private, plain) or 0) > SLOW else ""
    cells = [
        name, CASES[name].source, CASES[name].changed, private["mode"], f"{1e3 * plain['step']:.1f}",
        price(private, plain), price(private, opacus), f"{private['job']:.0f}" if "job" in private else "", told,
        said.replace("|", "/").replace("\n", " ")[:250],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def price(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{a['step'] / b['step']:.2f}" if "step" in a and "step" in b else ""


ABOUT = f"""\
Each module trained for {STEPS} steps of about {B} records: plainly, with a `PrivacyCallback`, and by Opacus, by hooks
or functorch, whichever was quicker and ran at all (whether its gradients are right was not examined). *Plain* is the
CPU time of a step without privacy; the two ratios are of CPU times of a step in the second half of the steps. *Said*
is whether a training above {SLOW:g} times had said so before its first round.

| module | structure of | changed | mode | plain, ms | over plain | over Opacus | job, s | said | reason |
|---|---|---|---|---|---|---|---|---|---|"""
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- written by benchmarks/ordinary.py -->", "<!-- until here -->"


def summary(rows: list[str]) -> str:
    """How many modules of the table run in which way, and at what price."""
    cells = [[cell.strip() for cell in one.strip().strip("|").split("|")] for one in rows]
    lines = ["| | modules | least, median and most time over plain |", "|---|---|---|"]
    for mode in ("traced", "one at a time", "refused", "crashed", "FAILED"):
        of_mode = [one for one in cells if one[3].startswith(mode)]
        prices = [float(one[5]) for one in of_mode if len(one) > 5 and one[5]]
        paid = f"{min(prices):.1f}, {statistics.median(prices):.1f}, {max(prices):.1f}" if prices else ""
        if of_mode:
            lines.append(f"| {mode} | {len(of_mode)} | {paid} |")
    return "\n".join(lines)


def write(rows: list[str]) -> None:
    before, found, after = PAGE.read_text().partition(f"{BEGIN}\n")
    PAGE.write_text(f"{before}{found}\n{summary(rows)}\n\n{END}{after.partition(END)[2]}")


if __name__ == "__main__":
    sys.modules["ordinary"] = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--one", action="store_true")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("--write", action="store_true", help="the summary, to docs/speed.md")
    arguments = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent / "ordinary_modules")]
    for page in PAGES:
        import_module(page)
    if arguments.one:
        print(json.dumps(run(arguments.names[0])))
        raise SystemExit
    print(ABOUT, flush=True)
    rows = []
    for name in [name for name in CASES if name.startswith(tuple(arguments.names))]:
        call = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True)
        if call.returncode:
            said = call.stderr.strip().splitlines()[-1][:200]
            rows.append(f"| {name} | {CASES[name].source} | | FAILED: {said} |")
        else:
            rows.append(row(name, json.loads(call.stdout.splitlines()[-1])))
        print(rows[-1], flush=True)
    if arguments.write:
        write(rows)
