"""What a membership attacker gets from models of digits and of Adult, beside what ε allows: audits of six jobs.

    PYTHONPATH=. python benchmarks/membership.py [ADULT] [OUTPUT]

ADULT is a folder with adult.data, adult.test and adult.names of the UCI repository; without it, digits alone. OUTPUT
is for the jobs' folders, with a figure each; by default outputs/membership.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from dpexp.training.data import TensorData

EPSILONS = (1.0, 8.0, math.inf)
JOBS = {  # δ, and what else is not the default
    "digits": (1e-4, "data=digits", "sampling.steps=100", "audit.target_models=8"),
    "Adult": (
        1e-4, "data=adult", "sampling.steps=400", "sampling.expected_batch_size=512", "audit.target_models=4",
        "audit.num_canaries=500", "optimizer=adam", "optimizer.lr=0.003", "model.hidden=[256,256]",
    ),
}  # fmt: skip
CONFIGURATION = """\
n: 4000
shape: [{width}]
classes: 2
module: {{_target_: membership.Adult, root: {root}, records: 4000}}
"""
# Public constants by which numbers are divided; those of capital after a logarithm.
SCALES = {
    "age": 100, "fnlwgt": 1.5e6, "education-num": 16, "capital-gain": 12, "capital-loss": 9, "hours-per-week": 100,
}  # fmt: skip


class Adult(TensorData):
    """The first so many of the training and of the test records of UCI's census income, categories as adult.names lists
    them: so few that a model without privacy learns some by heart."""

    def __init__(self, root: str, records: int, batch_size: int = 256, workers: int = 0) -> None:
        fields = categories(Path(root))
        train, test = (self.read(Path(root) / f"adult.{part}", fields, records) for part in ("data", "test"))
        super().__init__(train, test, batch_size, workers)

    @staticmethod
    def read(path: Path, fields: dict[str, list[str]], records: int) -> tuple[Tensor, Tensor]:
        lines = [line for line in path.read_text().splitlines() if line.count(",") == 14]
        rows = [line.strip(" .").split(", ") for line in lines[:records]]
        return torch.tensor([numbers(row, fields) for row in rows]), torch.tensor(
            [int(row[-1] == ">50K") for row in rows]
        )


def categories(root: Path) -> dict[str, list[str]]:
    """Those of each field, in the order of the fields; none of a number."""
    found = {}
    for line in (root / "adult.names").read_text().splitlines():
        name, colon, values = line.partition(":")
        if colon and not line.startswith("|"):
            found[name] = [] if "continuous" in values else values.strip(" .").split(", ")
    return found


def numbers(row: list[str], fields: dict[str, list[str]]) -> list[float]:
    """A record; what is unknown (?) is in no category."""
    found = []
    for value, (name, known) in zip(row, fields.items(), strict=False):
        if known:
            found += [float(value == category) for category in known]
        else:
            number = math.log1p(float(value)) if name.startswith("capital") else float(value)
            found.append(number / SCALES[name])
    return found


def audited(folder: Path, configurations: Path, *overrides: str) -> dict[str, float]:
    """The audit's result, of a job of its own."""
    command = [
        sys.executable, "-m", "dpexp", "audit", "--config-dir", str(configurations), "audit=mislabelled", "model=mlp",
        "tracking=none", "+trainer.enable_progress_bar=false", f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip
    found_here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=found_here)
    return json.loads((folder / "result.json").read_text())["audit"]


def main() -> None:
    adult = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    output = Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/membership").resolve()
    configurations = output / "conf"
    (configurations / "data").mkdir(parents=True, exist_ok=True)
    if adult is not None:
        width = sum(max(1, len(known)) for known in categories(adult).values())
        (configurations / "data" / "adult.yaml").write_text(CONFIGURATION.format(width=width, root=adult))
    print("| | | coins guessed right | allowed | found at 1 % false alarms | allowed | ε at least | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (delta, *overrides) in JOBS.items():
        for epsilon in EPSILONS if name == "digits" or adult else ():
            began = time.perf_counter()
            folder = output / f"{name.lower()}-{epsilon:g}"
            found = audited(folder, configurations, *overrides, f"privacy.delta={delta}", f"privacy.epsilon={epsilon}")
            private = math.isfinite(epsilon)
            allowed = [found[f"{key}_allowed"] for key in ("share_right", "tpr_at_fpr_0.01")]
            most = [f"{value:.1%}" if private else "" for value in allowed]
            least = found[f"epsilon_lower_bound/delta_{delta:g}"]
            print(
                f"| {name} | {f'ε = {epsilon:g}' if private else 'not private'} | {found['share_right']:.1%} "
                f"({found['share_right_low']:.1%} to {found['share_right_high']:.1%}) | {most[0]} "
                f"| {found['tpr_at_fpr_0.01']:.1%} | {most[1]} | {least:.2g} | {time.perf_counter() - began:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
