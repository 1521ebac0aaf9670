"""The same private training by dpexp and by other libraries, each through the interface that its documentation shows.

    python benchmarks/peers.py DATA --fastdp PYTHON --jax PYTHON --tf PYTHON --opake PYTHON --pfl PYTHON

DATA is a folder with MNIST's four standard files. What is trained, and how, is in benchmarks/peers/: one script a
library. dpexp and Opacus run in this interpreter, the others in those that are given, or not at all. Each run is a
process of its own on one core, one after another, the libraries in turn (A B C A B C …). Runs are appended to
--results, from which the table in docs/peers.md is made: what is there already is not run again. A library without
a run there keeps the row that the page has.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PEERS = Path(__file__).with_suffix("")
PAGE = PEERS.parent.parent / "docs" / "peers.md"
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
SHUFFLED = ("fastDP", "TensorFlow Privacy", "pfl")
OF_WORK = ("accuracy, % (runs)", "ms a round; s; MiB")
HEAD = ["", "z; ε, said; ε, PLD", *(f"{title}: {what}" for title in WORKS.values() for what in OF_WORK), "lines"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of MNIST's files")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    for name in ("fastdp", "jax", "tf", "opake", "pfl"):
        parser.add_argument(f"--{name}", help="an interpreter that has it")
    parser.add_argument("--results", default="outputs/peers.jsonl")
    given = parser.parse_args()
    pythons = dict.fromkeys(SCRIPTS, sys.executable)
    pythons |= {"fastDP": given.fastdp, "JAX Privacy": given.jax, "TensorFlow Privacy": given.tf}
    pythons |= {"Opake": given.opake, "pfl": given.pfl}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = Path(given.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    for seed in range(given.seeds):
        for work in WORKS:
            for name in (name for name, python in pythons.items() if python):
                which = {"name": name, "work": work, "seed": seed}
                if any(which.items() <= run.items() for run in read(results)):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    run = which | trained(name, pythons[name], work, str(seed), folder, given.data)
                print(run, flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(run) + "\n")
    before, made, after = re.split("(?<=<!-- made -->\n)(.*)(?=<!-- end -->)", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(f"{before}\n{table(read(results), made)}\n{after}")


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def trained(name: str, python: str, work: str, seed: str, folder: str, data: str) -> dict:
    """What one process found, its seconds from start to end and its peak memory in MiB; or its error."""
    here = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    arguments = [work, seed, folder, data]
    subprocess.run([sys.executable, PEERS / "initial.py", *arguments], env=here, check=True)
    command: Sequence[str | Path] = [python, PEERS / SCRIPTS[name], *arguments]
    if name == "dpexp, YAML":
        here["PYTHONPATH"] = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
        command = [python, "-m", "dpexp", *job(work, seed, folder, data)]
    stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
    with stdout.open("w") as out, stderr.open("w") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=here, stdout=out, stderr=err, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    if status:
        return {"error": [*stderr.read_text().splitlines(), f"exit status {status}"][-2]}
    found = from_job(Path(folder)) if name == "dpexp, YAML" else json.loads(stdout.read_text().splitlines()[-1])
    return found | {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "MiB": used.ru_maxrss / 1024}


def job(work: str, seed: str, folder: str, data: str) -> list[str]:
    """Arguments of `python -m dpexp`: the experiment and its MLP; and where things lie, and the clock."""
    return [
        f"--config-dir={PEERS}", "experiment=peers", *{"cnn": [], "mlp": ["model=mlp", "model.hidden=[256]"]}[work],
        f"data.root={data}", f"model.weights={folder}/{work}-{seed}.safetensors", "trainer.threads=1",
        f"hydra.run.dir={folder}/run", f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "+callbacks.tick._target_=ticking.Tick", f"+callbacks.tick.path={folder}/ticks.json",
    ]  # fmt: skip


def from_job(folder: Path) -> dict:
    """As `report` says it, from the files that a job of dpexp leaves."""
    result, clock = (json.loads((folder / name).read_text()) for name in ("run/result.json", "ticks.json"))
    found = {"accuracy": result["metrics"]["test_accuracy"], "z": result["noise_multiplier"]}
    return clock | found | {"epsilon": result["epsilon"]["pld"]}


def table(runs: list[dict], was: str) -> str:
    """Of `runs`; and of `was`, the table before, for what was not run."""
    before = [[cell.strip() for cell in line.split("|")[1:-1]] for line in was.splitlines() if line.startswith("|")]
    kept = {cells[0].partition(" (")[0]: cells for cells in before}
    rows = [HEAD, ["---"] * len(HEAD)]
    for name in SCRIPTS:
        mine = [run for run in runs if run["name"] == name]
        if row := with_runs(name, mine, kept.get(name, [name] + [""] * (len(HEAD) - 1))):
            rows.append(row)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def with_runs(name: str, runs: list[dict], row: list[str]) -> list[str]:
    """A library's row with what its runs found; empty if there is nothing."""
    done = [run for run in runs if "error" not in run]
    if done:
        z, said = (statistics.median(run[key] for run in done) for key in ("z", "epsilon"))
        tight = independent_epsilon(z, shuffled=name in SHUFFLED)
        lines = lines_of(PEERS / SCRIPTS[name]) + (name == "dpexp, YAML")  # and its command
        row = [f"{name} ({done[-1]['version']})", f"{z:.4f}; {said:.3f}; {tight:.3f}", *row[2:-1], str(lines)]
    for k, work in enumerate(WORKS):
        if of_work := [run for run in runs if run["work"] == work]:
            row[2 + 2 * k : 4 + 2 * k] = found(of_work)
    return row if any(row[1:]) else []


def found(runs: list[dict]) -> list[str]:
    """Accuracy, times and memory of one library on one model."""

    def median(key: str) -> float:
        return statistics.median(run[key] for run in done)

    done = [run for run in runs if "error" not in run]
    if not done:
        return [runs[-1]["error"], ""]
    percent = [100 * run["accuracy"] for run in done]
    spread = f" ± {statistics.stdev(percent):.2f}" if len(done) > 1 else ""
    return [
        f"{statistics.mean(percent):.2f}{spread} ({len(done)})",
        f"{1000 * median('round_cpu'):.0f}; {median('cpu'):.0f}; {median('MiB'):.0f}",
    ]


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
