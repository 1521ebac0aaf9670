"""The same private training by dpexp and by other libraries, each through the interface that its documentation shows.

    python benchmarks/peers.py DATA --fastdp PYTHON --jax PYTHON --tf PYTHON --opake PYTHON --pfl PYTHON

DATA is a folder with MNIST's four standard files. What is trained, and how, is in benchmarks/peers/: one script a
library. dpexp and Opacus run in this interpreter, the others in those that are given, or not at all. Each run is a
process of its own on one core, one after another, the libraries in turn (A B C A B C …). Runs are appended to
--results, from which the table in docs/peers.md is made: what is there already is not run again. A library without
a run there keeps the row that the page has.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

from report import Result, cells_of, kept, parser, passage, read, spread, table, write

PEERS = Path(__file__).with_suffix("")
MARKS = "peers.md", "<!-- made -->", "<!-- end -->"
WORKS = {"cnn": "CNN", "mlp": "MLP"}
SCRIPTS = {
    "dpexp, YAML": "experiment/peers.yaml",
    "dpexp, library": "with_dpexp.py",
    "Opacus": "with_opacus.py",
    "Opacus, ghost": "with_opacus_ghost.py",
    "fastDP": "with_fastdp.py",
    "JAX Privacy": "with_jax_privacy.py",
    "TensorFlow Privacy": "with_tf_privacy.py",
    "Opake": "with_opake.py",
    "pfl": "with_pfl.py",
}
OTHERS = {"fastdp": "fastDP", "jax": "JAX Privacy", "tf": "TensorFlow Privacy", "opake": "Opake", "pfl": "pfl"}
SHUFFLED = ("fastDP", "TensorFlow Privacy", "pfl")
OF_WORK = ("accuracy, % (runs)", "ms a round; s; MiB")
HEAD = ["", "z; ε, said; ε, PLD", *(f"{title}: {what}" for title in WORKS.values() for what in OF_WORK), "lines"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("data", help="folder of MNIST's files")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    for name in OTHERS:
        options.add_argument(f"--{name}", help="an interpreter that has it")
    options.add_argument("--results", type=Path, default="outputs/peers.jsonl")
    given = options.parse_args()
    pythons = dict.fromkeys(SCRIPTS, sys.executable) | {OTHERS[name]: getattr(given, name) for name in OTHERS}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for seed, work, name in product(range(given.seeds), WORKS, SCRIPTS):
        if pythons[name]:
            which = {"name": name, "work": work, "seed": seed}
            print(kept(given.results, which, partial(trained, name, pythons[name], work, str(seed), given.data)))
    write(of_libraries(read(given.results), passage(*MARKS)), *MARKS)


def trained(name: str, python: str, work: str, seed: str, data: str) -> Result:
    """What one process found, its seconds from start to end and its peak memory in MiB; or its error."""
    here = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    is_job = name == "dpexp, YAML"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [work, seed, folder, data]
        subprocess.run([sys.executable, PEERS / "initial.py", *arguments], env=here, check=True)
        command: list[str | Path] = [python, PEERS / SCRIPTS[name], *arguments]
        if is_job:
            here["PYTHONPATH"] = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
            command = [python, "-m", "dpexp", *job(*arguments)]
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        with stdout.open("w") as out, stderr.open("w") as err:
            began = time.perf_counter()
            process = subprocess.Popen(command, env=here, stdout=out, stderr=err, cwd=folder)
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
        if status:
            return {"error": (stderr.read_text().splitlines() or [f"exit status {status}"])[-1]}
        told = from_job(Path(folder)) if is_job else json.loads(stdout.read_text().splitlines()[-1])
    return told | {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "MiB": used.ru_maxrss / 1024}


def job(work: str, seed: str, folder: str, data: str) -> list[str]:
    """Arguments of `python -m dpexp`: the experiment and its MLP; and where things lie, and the clock."""
    return [
        f"--config-dir={PEERS}", "experiment=peers", *{"cnn": [], "mlp": ["model=mlp", "model.hidden=[256]"]}[work],
        f"data.root={data}", f"model.weights={folder}/{work}-{seed}.safetensors", "trainer.threads=1",
        f"hydra.run.dir={folder}/run", f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "+callbacks.tick._target_=ticking.Tick", f"+callbacks.tick.path={folder}/ticks.json",
    ]  # fmt: skip


def from_job(folder: Path) -> Result:
    """As `report` of setting.py says it, from the files that a job of dpexp leaves."""
    result, clock = (json.loads((folder / name).read_text()) for name in ("run/result.json", "ticks.json"))
    told = {"accuracy": result["metrics"]["test_accuracy"], "z": result["noise_multiplier"]}
    return clock | told | {"epsilon": result["epsilon"]["pld"]}


def of_libraries(runs: list[Result], was: str) -> str:
    """The table of `runs`; and of `was`, the table before, for what was not run."""
    before = {cells[0].partition(" (")[0]: cells for cells in map(cells_of, was.splitlines())}
    rows = []
    for name in SCRIPTS:
        row = before.get(name, [name] + [""] * (len(HEAD) - 1))
        row = with_runs(name, [run for run in runs if run["name"] == name], row)
        if any(row[1:]):
            rows.append(row)
    return table(HEAD, rows)


def with_runs(name: str, runs: list[Result], row: list[str]) -> list[str]:
    """A library's row with what its runs found."""
    done = [run for run in runs if "error" not in run]
    if done:
        z, said = (statistics.median(run[key] for run in done) for key in ("z", "epsilon"))
        tight = independent_epsilon(z, shuffled=name in SHUFFLED)
        lines = lines_of(PEERS / SCRIPTS[name]) + (name == "dpexp, YAML")  # and its command
        row = [f"{name} ({done[-1]['version']})", f"{z:.4f}; {said:.3f}; {tight:.3f}", *row[2:-1], str(lines)]
    for k, work in enumerate(WORKS):
        if of_work := [run for run in runs if run["work"] == work]:
            row[2 + 2 * k : 4 + 2 * k] = found(of_work)
    return row


def found(runs: list[Result]) -> list[str]:
    """Accuracy, times and memory of one library on one model."""
    done = [run for run in runs if "error" not in run]
    if not done:
        return [runs[-1]["error"], ""]
    ms, cpu, mib = (statistics.median(run[key] for run in done) for key in ("round_cpu", "cpu", "MiB"))
    accuracy = spread((100 * run["accuracy"] for run in done), 2)
    return [f"{accuracy} ({len(done)})", f"{1000 * ms:.0f}; {cpu:.0f}; {mib:.0f}"]


def independent_epsilon(z: float, shuffled: bool) -> float:
    """ε at δ by dp-accounting's PLD, for adding or removing one record: of as many Poisson samples as there are rounds;
    or of as many Gaussians as there are epochs, in each of which a record meets one batch, whatever the order."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    sys.path.insert(0, str(PEERS))
    from setting import BATCH, DELTA, EPOCHS, ROUNDS, N

    accountant = PLDAccountant()
    if shuffled:
        accountant.compose(GaussianDpEvent(z), EPOCHS)
    else:
        accountant.compose(PoissonSampledDpEvent(BATCH / N, GaussianDpEvent(z)), ROUNDS)
    return accountant.get_epsilon(DELTA)


def lines_of(path: Path) -> int:
    """Lines of user code: neither blank, nor a comment, nor a docstring of one line, nor there for the measurement."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(bool(line) and not line.startswith(("#", '"""')) and not line.endswith("# measured") for line in lines)


if __name__ == "__main__":
    main()
