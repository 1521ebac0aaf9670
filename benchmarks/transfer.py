"""Draws accuracy against ε with and without public pretraining (experiment=transfer), as docs/transfer.md has it:
Fashion-MNIST as public and MNIST as private data, and the reverse.

    python benchmarks/transfer.py ROOT [OVERRIDE ...]

ROOT holds the folders mnist and fashion_mnist. It prints a table, and writes transfer.png and transfer.jsonl here; what
transfer.jsonl has is not run again. Five to twenty minutes on one core.
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

from matplotlib import pyplot as plt

from dpexp.__main__ import main as dpexp

PAIRS = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}  # private: public
EPSILONS = (0.5, 1, 2, 8)
WAYS = {"from scratch": None, "pretrained, head tuned": "head", "pretrained, all tuned": "all"}
NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}


def job(root: Path, folder: Path, data: str, *overrides: str) -> dict:
    given = (
        "experiment=transfer", f"data={data}", f"data.root={root / data}", "tracking=none", "trainer.num_evaluations=0",
        f"hydra.run.dir={folder}", *overrides,
    )  # fmt: skip
    with mock.patch.object(sys, "argv", ["dpexp", *given]):
        dpexp()
    return json.loads((folder / "result.json").read_text())


def measure(root: Path, found: Path, overrides: list[str]) -> None:
    done = {(one["private"], one["way"], one["target"]) for one in read(found)}
    with tempfile.TemporaryDirectory() as name:
        for private, public in PAIRS.items():
            folder = Path(name) / public
            first = ("privacy.enabled=false", "model.weights=null", "sampling.steps=350", "optimizer.lr=0.05")
            job(root, folder, public, *first)  # three epochs
            for k, (target, way) in enumerate((target, way) for target in EPSILONS for way in WAYS):
                if (private, way, target) in done:
                    continue
                weights = folder / "weights.safetensors" if WAYS[way] else "null"
                given = (f"privacy.epsilon={target}", f"fine_tuning={WAYS[way] or 'all'}", f"model.weights={weights}")
                result = job(root, Path(name) / f"{private}{k}", private, *given, *overrides)
                row = {"private": private, "way": way, "target": target, "epsilon": result["epsilon"]["pld"],
                       "accuracy": result["metrics"]["test_accuracy"], "rounds": result["rounds"]}  # fmt: skip
                assert row["epsilon"] <= target
                with found.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def read(found: Path) -> list[dict]:
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def draw(rows: list[dict], path: Path) -> None:
    figure, panels = plt.subplots(1, len(PAIRS), figsize=(9, 3.8), layout="constrained")
    for panel, (private, public) in zip(panels, PAIRS.items(), strict=True):
        for way in WAYS:
            points = sorted(
                (r["epsilon"], 100 * r["accuracy"]) for r in rows if (r["private"], r["way"]) == (private, way)
            )
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=way)
        panel.set_xscale("log")
        panel.set_xticks(EPSILONS, [f"{target:g}" for target in EPSILONS])
        panel.minorticks_off()
        panel.set_title(f"{NAMES[private]} private, {NAMES[public]} public")
        panel.set_xlabel("ε")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    panels[-1].legend()
    figure.savefig(path, dpi=150)


def table(rows: list[dict]) -> None:
    print("| private | ε | " + " | ".join(WAYS) + " |\n|---|---|" + "---|" * len(WAYS))
    for private in PAIRS:
        for target in EPSILONS:
            by = {r["way"]: r["accuracy"] for r in rows if (r["private"], r["target"]) == (private, target)}
            cells = [f"{100 * by[way]:.1f} %" if way in by else "" for way in WAYS]
            print(f"| {NAMES[private]} | {target:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    found = Path("transfer.jsonl").resolve()
    measure(Path(sys.argv[1]).resolve(), found, sys.argv[2:])
    table(read(found))
    draw(read(found), Path("transfer.png"))
