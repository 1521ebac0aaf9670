"""What must hold on a GPU, and what privacy costs there, in parts of limited time, the most informative first.

    bash benchmarks/cuda.sh                                              # all parts, within 14 minutes
    bash benchmarks/cuda.sh --parts sizes tiny --only vit cnn            # some; with OUT set, beside earlier results
    bash benchmarks/cuda.sh --device cpu --small                         # tries the script
    python benchmarks/gpu.py --write outputs/cuda/.../cuda.jsonl         # docs/speed.md from results, on any machine

    rules      tests/adversarial.py by the graph and compiled, also where TF32 is allowed
    sizes      rounds of models of real sizes: plain Lightning, dpexp by the graph and compiled, Opacus
    tiny       the same for the models of benchmarks/step.py
    noise      its speed
    otherwise  whole jobs by the command line, supported models (docs/zoo.md), two processes

Each candidate is a process of its own with a limit. Results are appended to $OUT/cuda.jsonl at once, also what ran out
of time; without OUT, it is in a new folder of outputs/cuda. Checks run several at once. The fits of a group begin
together, and are then measured in turns, A B C A B C …, while the others wait: two rounds, and then those of a fraction
of a second, which are measured by the clock. No run finds compiled code of an earlier one.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import step
import torch
from step import COMPILED, GHOST, HOOKS, line, table
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, Workload, real_sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gradients"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from adversarial import RULES

ROOT = Path(__file__).resolve().parents[1]
FORK = multiprocessing.get_context("fork")  # after imports, before CUDA
BUDGET = 800  # seconds, of which a part has these, and what earlier ones leave
LIMITS = {"rules": 130, "sizes": 370, "tiny": 200, "noise": 30, "otherwise": 90}
LATE = "out of time"
WAYS = "plain", "dpexp", COMPILED, HOOKS, GHOST
TURNS, TURN = 5, 0.3  # turns of each fit, and the least seconds of one
WARM_UP, SKIPPED, LEAST = 5, 2, 3  # rounds before the first turn, of each turn before its measured ones, and of those
TINY = ("cnn", "wrn", "logistic", "tabular", "mlp", "lstm", "gpt2", "bert", "lora", "llama", "probe")
MIN_LEFT = 30  # seconds for which no fit begins
TOGETHER = 3  # tiny models whose fits begin together

Result = dict[str, Any]


@dataclass
class Run:
    """Starts processes, and saves what they find."""

    file: Path
    scratch: Path
    results: list[Result] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    ends: float = 0.0  # of the part

    def save(self, part: str, name: str, how: str = "", **found: Any) -> None:
        self.results.append({"part": part, "name": name, "how": how, **found})
        with self.file.open("a") as file:
            file.write(json.dumps(self.results[-1]) + "\n")
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in self.results[-1].items()}
        print(*(f"{key}: {value}" for key, value in shown.items() if value != ""), sep=", ", flush=True)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

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


def alone(log: Path, work: Callable[..., None], *arguments: Any) -> None:
    """In a forked process."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(*arguments)


def script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(str(ROOT / path), run_name="__main__")


def command(*arguments: str) -> None:
    sys.exit(subprocess.run([sys.executable, *arguments]).returncode)


# What must hold: (name, what is done, its arguments)
Check = tuple[str, Callable[..., None], tuple[str, ...]]


def check(run: Run, part: str, checks: Iterable[Check], at_once: int) -> None:
    """Saves the exit status, the output's end, and the seconds of each."""
    waiting, running = [*checks], dict[int, Any]()
    while waiting or running:
        while waiting and len(running) < at_once and run.left > 0:
            name, work, arguments = waiting.pop(0)
            log = run.scratch / re.sub(r"\W+", "_", f"{part}_{name}.txt")
            process = run.start(log, work, *arguments)
            running[process.sentinel] = name, log, process, time.monotonic()
        ended = wait([*running], max(0, run.left)) if running else []
        for name, log, process, began in [running.pop(sentinel) for sentinel in ended]:
            process.join()
            run.stop(process)
            seconds = round(time.monotonic() - began)
            run.save(part, name, exit=process.exitcode, seconds=seconds, said=log.read_text()[-1500:])
        if run.left <= 0:
            for name, log, *_ in running.values():
                run.save(part, name, failed=LATE, said=log.read_text()[-1500:])
            for name, *_ in waiting:
                run.save(part, name, failed=LATE)
            break
    run.stop()


class Turns(step.Clock):
    """Measures rounds whenever the other end of the connection says so, until the process is killed."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(WARM_UP, rounds=100_000)
        self.connection, self.began, self.of_turn = connection, time.monotonic(), 0

    def on_train_batch_end(self, trainer: Any = None, *_: object) -> None:
        self.done += 1
        self.of_turn += 1
        if self.done == self.warm_up:
            step.seconds()  # waits for the GPU
            told = [getattr(callback, "compiling", "") for callback in (trainer.callbacks if trainer else [])]
            self._say(beginning=time.monotonic() - self.began, compiling="".join(told))
        elif self.done > self.warm_up and self.of_turn == SKIPPED:
            self.clock, self.turn = step.seconds(), time.monotonic()
        elif self.of_turn >= SKIPPED + LEAST and time.monotonic() - self.turn > TURN:
            rounds = self.of_turn - SKIPPED
            cuda = step.DEVICE == "cuda"
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else step.resident("VmHWM") / 1024
            self._say(ms=1000 * (step.seconds() - self.clock) / rounds, rounds=rounds, gib=peak)

    def _say(self, **found: Any) -> None:
        """And waits, without memory that others may need."""
        if step.DEVICE == "cuda":
            torch.cuda.empty_cache()
        self.connection.send(found)
        self.connection.recv()
        self.of_turn = 0


def fit(work: Workload, way: str, connection: Connection) -> None:
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what was imported, of which one collection takes 0.3 s, in whichever round it falls
    try:
        if step.DEVICE == "cuda":
            connection.send({"device": torch.cuda.get_device_name()})
        step.WAYS[way](work, TensorDataset(*work.data(work.batches * work.batch)), Turns(connection))
    except Exception as error:
        why = str(error).partition("\n")[0][:90]
        connection.send({"failed": f"does not run: {type(error).__name__}: {why}"})
        raise


def measure(run: Run, part: str, works: dict[str, Workload], ways: Iterable[str], limit: float) -> None:
    """The fits of some models, in turns, within seconds."""
    limit = min(limit, run.left)
    ends = time.monotonic() + limit
    fits: dict[Connection, tuple[str, str, Any]] = {}
    for name, way in [(name, way) for name in works for way in ways]:
        if run.left < MIN_LEFT:
            run.save(part, name, way, failed=LATE)
            continue
        ours, theirs = FORK.Pipe()
        process = run.start(run.scratch / re.sub(r"\W+", "_", f"{name}_{way}.txt"), fit, works[name], way, theirs)
        theirs.close()
        fits[ours] = name, way, process

    def hear(connection: Connection, seconds: float, **more: Any) -> bool:
        """Saves what is said next; whether the fit has begun. One that failed has no further turn."""
        try:
            found = connection.recv() if connection.poll(max(0, seconds)) else {"failed": LATE}
        except (EOFError, OSError):
            found = {"failed": "was killed"}
        name, way, process = fits[connection]
        run.save(part, name, way, **more, **found)
        if "failed" in found:
            run.stop(process)
            del fits[connection]
        return "beginning" in found

    begun: list[Connection] = []
    while waiting := [one for one in fits if one not in begun]:
        heard = wait(waiting, max(0, ends - limit / 4 - time.monotonic())) or waiting
        begun += [connection for connection in heard if hear(connection, 0)]
    for turn in range(TURNS):
        for connection in [*fits]:
            with contextlib.suppress(BrokenPipeError):
                connection.send(turn)
            hear(connection, ends - time.monotonic(), turn=turn)
    run.stop()


# The tables
HEAD = (
    "B records a round", "plain, ms", "dpexp; compiled", "Opacus: hooks; ghost", "dpexp over hooks; compiled",
    "GiB: plain, dpexp, compiled, hooks, ghost", "compiling, s",
)  # fmt: skip


def of_models(part: str, works: dict[str, Workload], results: list[Result]) -> str:
    """Ratios of medians, or why there is none."""
    found: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        if one["part"] == part:
            found.setdefault((one["name"], one["how"]), []).append(one)

    def every(name: str, way: str, what: str) -> list[Any]:
        return [one[what] for one in found.get((name, way), []) if what in one]

    def median(name: str, way: str) -> float:
        return statistics.median(every(name, way, "ms") or [float("nan")])

    def over(name: str, way: str, base: str) -> str:
        return f"{median(name, way) / median(name, base):.2f}".replace("nan", "–")

    def to_plain(name: str, way: str) -> str:
        why = [*every(name, way, "failed"), "not run"][0]
        return over(name, way, "plain") if every(name, way, "ms") else why

    rows = []
    for name in [name for name in works if any(name == one for one, _ in found)]:
        work, took = works[name], re.findall(r"compiling took (\d+) s", "".join(every(name, COMPILED, "compiling")))
        told = [one for one in every(name, COMPILED, "compiling") if one.startswith("not")]
        rows.append(
            line(
                f"{work.title}, B {work.batch}",
                f"{median(name, 'plain'):.2f}",
                f"{to_plain(name, 'dpexp')}; {to_plain(name, COMPILED)}",
                f"{to_plain(name, HOOKS)}; {to_plain(name, GHOST)}" + (f" ({work.differs})" if work.differs else ""),
                f"{over(name, 'dpexp', HOOKS)}; {over(name, COMPILED, HOOKS)}",
                ", ".join(f"{max(every(name, way, 'gib'), default=float('nan')):.1f}" for way in WAYS),
                "".join(took[-1:]) + "".join(f" ({one})" for one in told[-1:]),
            ).replace("nan", "–")
        )
    devices = {one["device"] for one in results if one["part"] == part and "device" in one}
    about = next(one for one in reversed(results) if one["part"] == "about")
    turns = max((one["turn"] + 1 for one in results if one["part"] == part and "turn" in one), default=0)
    head = f"{', '.join(devices) or 'CPU'}, torch {about['torch']}, Opacus {about['opacus']}; medians of {turns} turns"
    return f"{head}\n\n{table(HEAD, rows)}"


def wrong(results: list[Result]) -> list[str]:
    """What did not hold: a check failed, or a fit of ours ended."""
    return [
        called(one)
        for one in results
        if one.get("exit") or (one["how"] in ("plain", "dpexp", COMPILED) and one.get("failed", LATE) != LATE)
    ]


def called(one: Result) -> str:
    return f"{one['part']}: {one['name']} {one['how']}".strip()


def of_checks(results: list[Result]) -> str:
    last = {called(one): one for one in results}
    late = [name for name, one in last.items() if one.get("failed") == LATE]
    ended = sum("exit" in one for one in results)
    found = {"Wrong": wrong(results), "Out of time": late}
    said = [f"{what}: {'; '.join(some) or 'none'}." for what, some in found.items()]
    return " ".join([f"{ended} checks ended.", *said])


def jobs(run: Run, device: str, small: bool) -> Iterable[Check]:
    steps = 20 if small else 470
    options = {
        "default": [],
        "auto batch size": ["trainer.max_physical_batch_size=auto"],
        "compiled": ["trainer.compile=true"],
        "half precision": ["trainer.precision=bf16-mixed"],
        "two processes": ["trainer.strategy=ddp", "trainer.devices=2"],
    }
    for name, some in [*options.items()][: 1 if small else None]:
        folder = run.scratch / name.replace(" ", "_")
        tracked = [f"tracking.uri=sqlite:///{folder}.db", f"hydra.run.dir={folder}", f"sampling.steps={steps}"]
        trainer = f"trainer={'gpu' if device == 'cuda' else 'cpu'}"
        if name == "two processes" and device == "cuda" and torch.cuda.device_count() < 2:
            run.save("otherwise", f"job, {name}", failed="not run: one GPU")
        else:
            yield f"job, {name}", command, ("-m", "dpexp", trainer, *tracked, *some)
    families = ["written", "sequences", "text", "adapters", *(["images"] if importlib.util.find_spec("timm") else [])]
    for family in families if not small else []:
        yield f"models, {family}", command, ("tests/gradients/test_models.py", device, family)


def main() -> None:
    global TURNS, TURN
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="few records, rounds and candidates, of shrunk models")
    parser.add_argument("--parts", nargs="+", default=[*LIMITS], choices=LIMITS)
    known = [*real_sizes(True), *TINY]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of {', '.join(known)}")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--write", type=Path, metavar="RESULTS", help="only writes docs/speed.md")
    arguments = parser.parse_args()
    device, small = arguments.device, arguments.small
    sizes, tiny = real_sizes(small), {name: WORKLOADS[name] for name in TINY}
    if arguments.write:
        results = [json.loads(one) for one in arguments.write.read_text().splitlines()]
        for part, works in (("sizes", sizes), ("tiny", tiny)):
            if any(one["part"] == part for one in results):
                step.write(f"benchmarks/gpu.py: {part}", of_models(part, works, results))
        return step.write("benchmarks/gpu.py: checks", of_checks(results))

    began = time.monotonic()
    step.DEVICE = device
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder = Path(os.environ.get("OUT") or ROOT / "outputs" / "cuda" / time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(folder / "cuda.jsonl", scratch)
    run.save("about", device, torch=torch.__version__, opacus=version("opacus"), small=small)
    records, at_once, numbers = (10, 2, "1e6") if small else (300, len(os.sched_getaffinity(0)), "1e8")
    if small:
        TURNS, TURN = 2, 0.0
    names = arguments.only or ([*[*sizes][:1], "tabular"] if small else [*sizes, *tiny])
    of_rule = ["benchmarks/adversarial.py", "--records", str(records), "--device", device]
    rules = [
        (f"{rule}{', TF32 allowed' if more else ''}", script, (*of_rule, rule, *more))
        for more in ((), ("--tf32",))
        for rule in RULES
    ]
    ends = began
    try:
        for part in arguments.parts:
            ends += LIMITS[part]
            run.ends = min(ends, began + arguments.budget)
            print(f"== {part}, {run.left:.0f} s", flush=True)
            if part == "rules":
                check(run, part, rules[: 1 if small else None], at_once)
            elif part == "noise":
                noise = "benchmarks/noise.py", "--device", device, "--numbers", numbers
                check(run, part, [("speed", script, noise)], 1)
            elif part == "otherwise":
                check(run, part, jobs(run, device, small), at_once)
            else:
                works, together = (sizes, 1) if part == "sizes" else (tiny, TOGETHER)
                ways = [way for way in WAYS if not (small and part == "sizes" and way == COMPILED)]
                chosen = [name for name in works if name in names]
                for k in range(0, len(chosen), together):
                    measure(run, part, {name: works[name] for name in chosen[k : k + together]}, ways, 100)
                print(of_models(part, works, run.results), flush=True)
    finally:
        run.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(of_checks(run.results), f"{time.monotonic() - began:.0f} s; {run.file}", sep="\n")
    sys.exit(bool(wrong(run.results)))


if __name__ == "__main__":
    main()
