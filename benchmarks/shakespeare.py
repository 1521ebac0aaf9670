"""Next characters of tiny Shakespeare by users: accuracy against ε of DP-FedAvg and DP-FedAdam, beside the same
trainings with next to no noise and a clipping norm that clips nothing.

    python benchmarks/shakespeare.py data.root=… [OVERRIDE ...]

Each training is one job, `python -m dpexp experiment=shakespeare_users …`, on one thread, two at a time; a quarter of
an hour. It prints a table and writes shakespeare.png and shakespeare.jsonl here; what the latter has is not run again.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib import pyplot as plt

EPSILONS = (2, 4, 8, 16, 32)
FOUND = Path("shakespeare.jsonl")
SERVERS = {
    "DP-FedAvg": [],
    "DP-FedAdam": ["optimizer=adam", "optimizer.lr=0.03", "~optimizer.momentum"],
}
PLAIN = ["privacy.epsilon=null", "privacy.noise_multiplier=1e-5", "clip_norm.value=1000"]


def job(overrides: list[str]) -> tuple[float, float]:
    """Accuracy and seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dpexp", "experiment=shakespeare_users", "tracking=none"]
        command += ["trainer.num_evaluations=0", f"hydra.run.dir={folder}", *overrides, *sys.argv[1:]]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result = json.loads((Path(folder) / "result.json").read_text())
    return result["metrics"]["test_accuracy"], result["seconds"]


def draw(rows: list[dict]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for k, server in enumerate(SERVERS):
        own = [row for row in rows if row["server"] == server]
        private = sorted((row["epsilon"], row["accuracy"]) for row in own if row["epsilon"])
        axes.plot(*zip(*private, strict=True), "o-", color=f"C{k}", label=server)
        for row in own:
            if not row["epsilon"]:
                label = f"{server.removeprefix('DP-')}, no privacy"
                axes.axhline(row["accuracy"], color=f"C{k}", linestyle="--", linewidth=1, label=label)
    axes.set(xscale="log", xlabel="ε at δ = 1e-3, for users", ylabel="next characters found")
    axes.set_xticks(EPSILONS, [str(epsilon) for epsilon in EPSILONS], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False)
    figure.savefig("shakespeare.png", dpi=150)


def main() -> None:
    rows = [json.loads(line) for line in FOUND.read_text().splitlines()] if FOUND.exists() else []
    known = {(row["server"], row["epsilon"]) for row in rows}
    cases = {(server, None): [*extra, *PLAIN] for server, extra in SERVERS.items()}
    cases |= {
        (server, epsilon): [*extra, f"privacy.epsilon={epsilon}"]
        for epsilon in reversed(EPSILONS)
        for server, extra in SERVERS.items()
    }
    left = {case: overrides for case, overrides in cases.items() if case not in known}
    with ThreadPoolExecutor(2) as pool, FOUND.open("a") as file:
        for (server, epsilon), (accuracy, seconds) in zip(left, pool.map(job, left.values()), strict=True):
            rows.append({"server": server, "epsilon": epsilon, "accuracy": accuracy, "seconds": seconds})
            print(json.dumps(rows[-1]), file=file, flush=True)
    for row in rows:
        print(f"{row['server']}, ε = {row['epsilon'] or '∞'}: {row['accuracy']:.1%}, {row['seconds']:.0f} s")
    draw(rows)


if __name__ == "__main__":
    main()
