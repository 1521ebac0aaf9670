"""Redraws figures of docs/, each by its commands, and writes these and the figure's words into the file.

    python benchmarks/figures.py DATA NAME …   # PYTHONPATH=.:tests for audit_power.png

DATA holds the folders fashion_mnist, mnist, adult, shakespeare and debian. Runs of sweeps and of docs/results.md that
outputs/mlflow.db has here are not run again. tests/project/test_documented_options.py reads what is written.
"""

import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.text import Text
from report import DOCS

COMMANDS = {  # figure: its commands, of which the last draws it, with about how long they take on two cores
    "audit.png": ["dpexp audit"],  # a minute
    "released.png": [  # half a minute
        "dpexp 'private_metrics.release={train_loss: {clip_norm: 4, budget_share: 0.01}, "
        "train_accuracy: {clip_norm: 1, budget_share: 0.01}}'",
    ],
    "noise_cost.png": ["dpexp -m sweep=noise_cost data.root=DATA/fashion_mnist"],  # 5 minutes
    "batch_size.png": ["dpexp -m sweep=batch_size data.root=DATA/fashion_mnist"],  # 90 seconds
    "progress.png": ["dpexp -m sweep=progress data.root=DATA/fashion_mnist"],  # 70 seconds
    "digits.png": [  # 15 minutes
        "dpexp -m sweep=digits", "dpexp -m privacy.enabled=false 'seed=range(3)'", "benchmarks/digits_table.py"
    ],
    "joint.png": ["benchmarks/joint.py DATA"],  # half an hour
    "curves.png": [  # 3 hours
        "benchmarks/results.py run DATA mnist_frontier fashion_frontier cifar10_features adult",
        "benchmarks/results.py write",
    ],
    "texts.png": ["benchmarks/results.py run DATA text_features text_lora", "benchmarks/results.py texts"],  # 2 hours
    "figure2.png": ["benchmarks/figure2.py"],  # half a minute
    "shakespeare.png": ["benchmarks/shakespeare.py data.root=DATA/shakespeare"],  # half an hour
    "audit_power.png": ["benchmarks/audit.py power 20"],  # hours
    "step_cpu.png": ["benchmarks/step.py --write"],  # an hour
}  # fmt: skip
DRAWN = dict.fromkeys(("noise_cost.png", "batch_size.png"), "test_accuracy_by_epsilon.png")  # where they differ


def description(commands: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """The PNG's metadata: the commands, an empty line, and the words."""
    return {"Description": "\n".join([*commands, "", *words])}


def redraw(name: str, data: str) -> None:
    save, is_drawn = Figure.savefig, False

    def savefig(figure: Figure, path: Path | str, **options) -> None:
        nonlocal is_drawn
        if Path(path).name != DRAWN.get(name, name):
            return save(figure, path, **options)
        is_drawn = True
        figure.draw_without_rendering()
        texts = [text.get_text() for text in figure.findobj(Text)]
        words = [text for text in dict.fromkeys(texts) if any(letter.isalpha() for letter in text)]
        if Path(path).parent.exists():
            save(figure, path, **options)
        save(figure, DOCS / name, **options, metadata=description(COMMANDS[name], words))

    for command in COMMANDS[name]:
        program, *arguments = shlex.split(command.replace("DATA", data))
        with mock.patch.object(Figure, "savefig", savefig), mock.patch.object(sys, "argv", [program, *arguments]):
            if program == "dpexp":
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
    if not is_drawn:
        sys.exit(f"{name}: its commands drew no {DRAWN.get(name, name)}.")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [data, *names] if names and {*names} <= {*COMMANDS}:
            for name in names:
                redraw(name, str(Path(data).resolve()))
        case _:
            sys.exit(f"{__doc__}\nNAME is among {', '.join(COMMANDS)}.")
