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

import importlib.util
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from quiet import quiet
from report import Result, parser, read, write
from step import COMPILED, LATE, WAYS, Fits, Pace, Run, of_models, save_versions
from workloads import WORKLOADS, Workload, real_sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gradients"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from adversarial import RULES

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 800  # seconds, of which a part has these, and what earlier ones leave
LIMITS = {"rules": 130, "sizes": 370, "tiny": 200, "noise": 30, "otherwise": 90}
TURNS = 5  # of each fit
TINY = ("cnn", "wrn", "logistic", "tabular", "mlp", "lstm", "gpt2", "bert", "lora", "llama", "probe")
MIN_LEFT = 30  # seconds for which no fit begins
MODEL_LIMIT = 100  # seconds of fits that begin together
TOGETHER = {"sizes": 1, "tiny": 3}  # models whose fits begin together


# What must hold: (name, what is done, its arguments)
Check = tuple[str, Callable[..., None], tuple[str, ...]]


def script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(str(ROOT / path), run_name="__main__")


def command(*arguments: str) -> None:
    sys.exit(subprocess.run([sys.executable, *arguments]).returncode)


def check(run: Run, part: str, checks: Iterable[Check], at_once: int) -> None:
    """Saves the exit status, the output's end, and the seconds of each."""
    waiting, running = [*checks], dict[int, Any]()
    while waiting or running:
        while waiting and len(running) < at_once and run.left > 0:
            name, work, arguments = waiting.pop(0)
            log = run.log(part, name)
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


def measure(run: Run, part: str, works: dict[str, Workload], given: Namespace) -> None:
    """The fits of some models that begin together."""
    seconds = 0.0 if given.small else 0.3
    fits = Fits(
        run, part, Pace(given.device, warm_up=5, skipped=2, least=3, most=math.inf, seconds=seconds), MODEL_LIMIT
    )
    for name, work in works.items():
        for way in WAYS:
            if given.small and part == "sizes" and way == COMPILED:
                continue
            if run.left < MIN_LEFT:
                run.save(part, name, way, failed=LATE)
            else:
                fits.start(name, work, way)
    fits.begin_together()
    fits.measure(2 if given.small else TURNS)


def wrong(results: list[Result]) -> list[str]:
    """What did not hold: a check failed, or a fit of ours ended."""
    return [called(one) for one in results if one.get("exit") or is_ended_fit(one)]


def is_ended_fit(one: Result) -> bool:
    return one["how"] in ("plain", "dpexp", COMPILED) and one.get("failed", LATE) != LATE


def called(one: Result) -> str:
    return f"{one['part']}: {one['name']} {one['how']}".strip()


def of_checks(results: list[Result]) -> str:
    last = {called(one): one for one in results}
    late = [name for name, one in last.items() if one.get("failed") == LATE]
    ended = sum("exit" in one for one in results)
    failed = "; ".join(wrong(results)) or "none"
    return f"{ended} checks ended. Wrong: {failed}. Out of time: {'; '.join(late) or 'none'}."


# The parts


def rules(given: Namespace) -> list[Check]:
    records = "10" if given.small else "300"
    checks: list[Check] = []
    for kind, more in (("", ()), (", TF32 allowed", ("--tf32",))):
        for rule in RULES:
            arguments = ("benchmarks/adversarial.py", "--records", records, "--device", given.device, rule, *more)
            checks.append((f"{rule}{kind}", script, arguments))
    return checks[:1] if given.small else checks


def noise(given: Namespace) -> list[Check]:
    numbers = "1e6" if given.small else "1e8"
    return [("speed", script, ("benchmarks/noise.py", "--device", given.device, "--numbers", numbers))]


JOBS = {
    "default": [],
    "auto batch size": ["trainer.max_physical_batch_size=auto"],
    "compiled": ["trainer.compile=true"],
    "half precision": ["trainer.precision=bf16-mixed"],
    "two processes": ["trainer.strategy=ddp", "trainer.devices=2"],
}


def otherwise(run: Run, given: Namespace) -> Iterable[Check]:
    """Whole jobs, and models of docs/zoo.md."""
    steps = 20 if given.small else 470
    for name, some in [*JOBS.items()][: 1 if given.small else None]:
        folder = run.scratch / name.replace(" ", "_")
        tracked = [f"tracking.uri=sqlite:///{folder}.db", f"hydra.run.dir={folder}", f"sampling.steps={steps}"]
        trainer = f"trainer={'gpu' if given.device == 'cuda' else 'cpu'}"
        if name == "two processes" and given.device == "cuda" and torch.cuda.device_count() < 2:
            run.save("otherwise", f"job, {name}", failed="not run: one GPU")
        else:
            yield f"job, {name}", command, ("-m", "dpexp", trainer, *tracked, *some)
    families = ["written", "sequences", "text", "adapters", *(["images"] if importlib.util.find_spec("timm") else [])]
    for family in families if not given.small else []:
        yield f"models, {family}", command, ("tests/gradients/test_models.py", given.device, family)


def run_part(run: Run, part: str, given: Namespace) -> None:
    at_once = 2 if given.small else len(os.sched_getaffinity(0))
    if part == "rules":
        check(run, part, rules(given), at_once)
    elif part == "noise":
        check(run, part, noise(given), 1)
    elif part == "otherwise":
        check(run, part, otherwise(run, given), at_once)
    else:
        works = works_of(given.small)[part]
        names = given.only or ([*[*works][:1], "tabular"] if given.small else [*works])
        chosen = [name for name in works if name in names]
        for k in range(0, len(chosen), TOGETHER[part]):
            measure(run, part, {name: works[name] for name in chosen[k : k + TOGETHER[part]]}, given)
        print(of_models(part, works, run.results), flush=True)


def works_of(small: bool) -> dict[str, dict[str, Workload]]:
    return {"sizes": real_sizes(small), "tiny": {name: WORKLOADS[name] for name in TINY}}


def write_tables(file: Path) -> None:
    results = read(file)
    for part, works in works_of(small=False).items():
        if any(one["part"] == part for one in results):
            write(of_models(part, works, results), "speed.md", f"<!-- written by benchmarks/gpu.py: {part} -->")
    write(of_checks(results), "speed.md", "<!-- written by benchmarks/gpu.py: checks -->")


def run_parts(given: Namespace) -> bool:
    """Whether all holds."""
    began = ends = time.monotonic()
    folder = Path(os.environ.get("OUT") or ROOT / "outputs" / "cuda" / time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(folder / "cuda.jsonl", scratch)
    try:
        save_versions(run, given.device)
        for part in given.parts:
            ends += LIMITS[part]
            run.ends = min(ends, began + given.budget)
            print(f"== {part}, {run.left:.0f} s", flush=True)
            run_part(run, part, given)
    finally:
        run.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(of_checks(run.results), f"{time.monotonic() - began:.0f} s; {run.file}", sep="\n")
    return not wrong(run.results)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--small", action="store_true", help="few records, rounds and candidates, of shrunk models")
    options.add_argument("--parts", nargs="+", default=[*LIMITS], choices=LIMITS)
    known = [*real_sizes(True), *TINY]
    options.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of {', '.join(known)}")
    options.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    options.add_argument("--write", type=Path, metavar="RESULTS", help="only writes docs/speed.md")
    given = options.parse_args()
    if given.write:
        write_tables(given.write)
    else:
        quiet()
        sys.exit(not run_parts(given))


if __name__ == "__main__":
    main()
