"""Ordinary Lightning modules, as their authors wrote them: does each train privately, how, and at what price?

    python benchmarks/ordinary.py               # all, as a table
    python benchmarks/ordinary.py "VAE"         # those whose names begin so

Each module trains twice, in a process of its own: plainly, then with a PrivacyCallback, on as many records a step. The
price is the ratio of CPU times of a step, without the first ones.
"""

import argparse
import json
import logging
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

B, N, STEPS, WARM_UP = 32, 512, 30, 10
PAGES = ("steps",)


@dataclass(frozen=True)
class Case:
    """An ordinary module with its data.

    Attributes:
        source: the public repository whose structure it copies; empty: none.
        build: returns (module, data set, options of its DataLoader).
        changed: what was changed for dpexp; empty: nothing.
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


class Clock(pl.Callback):
    """CPU seconds at the beginning of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())

    @property
    def step(self) -> float:
        times = self.times[WARM_UP:]
        return (times[-1] - times[0]) / (len(times) - 1)


def fit(one: Case, private: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data, options = one.build()
    clock, found = Clock(), {}
    callbacks: list[pl.Callback] = [clock]
    if private:
        target = dpexp.Target(noise_multiplier=1.0)
        sampling = dpexp.Sampling(sampling_rate=B / N, steps=STEPS)
        plan = dpexp.make_plan(module, n=N, sampling=sampling, target=target)
        path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
        privacy = dpexp.PrivacyCallback(plan, path, noise_seed=1, compile=False)
        callbacks.append(privacy)
        begin = privacy.on_train_batch_end

        def seen(*args: Any) -> None:
            found.update(mode=privacy._engine.mode, reason=privacy._engine.reason)
            begin(*args)

        privacy.on_train_batch_end = seen
    steps = {"max_epochs": -1} if private else {"max_steps": STEPS}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(callbacks=callbacks, accelerator="cpu", num_sanity_val_steps=0, **steps, **quiet)
    trainer.fit(module, DataLoader(data, B, shuffle=True, **options))
    return {"step": clock.step, "rounds": privacy.rounds_done if private else trainer.global_step, **found}


def run(name: str) -> dict[str, Any]:
    """Trains one module plainly and privately."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    result: dict[str, Any] = {}
    for way in ("plain", "private"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result[way] = fit(CASES[name], way == "private")
            except Exception as error:  # the table says which
                result[way] = {"error": f"{type(error).__name__}: {error}"}
                if "-v" in sys.argv:
                    raise
        result[way]["warnings"] = [str(w.message)[:300] for w in caught if "dpexp" in w.filename]
    return result


if __name__ == "__main__":
    sys.modules["ordinary"] = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--one", action="store_true")
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent / "ordinary_modules")]
    for page in PAGES:
        import_module(page)
    if arguments.one:
        print(json.dumps(run(arguments.names[0])))
        raise SystemExit
    for name in [name for name in CASES if name.startswith(tuple(arguments.names))]:
        call = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True)
        try:
            got = json.loads(call.stdout.splitlines()[-1])
        except Exception:
            got = {"plain": {"error": call.stderr[-300:]}, "private": {}}
        plain, private = got["plain"], got["private"]
        price = f"{private['step'] / plain['step']:.2f}" if "step" in private and "step" in plain else "–"
        note = plain.get("error") or private.get("error") or private.get("reason") or ""
        mode, said = private.get("mode", "refused"), "; ".join(private.get("warnings", []))[:400]
        print(f"| {name} | {CASES[name].source} | {mode} | {price} | {note[:400]} | {said} |", flush=True)
