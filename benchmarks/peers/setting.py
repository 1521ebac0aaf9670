"""What every library is given: the data, the initial weights and a clock. Nothing here is counted as user code.

A script is started as `python with_….py WORK SEED FOLDER DATA`.
"""

import gzip
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

N, BATCH, EPOCHS = 60_000, 400, 2  # q = 1/150 and 300 rounds, which every interface can express
ROUNDS = EPOCHS * N // BATCH
EPSILON, DELTA, BOUND = 3.0, 1e-5, 0.1
LR, MOMENTUM = 1.0, 0.9
KINDS = ("images-idx3", "labels-idx1")
_ticks: list[tuple[float, float]] = []


def images(part: str, data: str) -> tuple[np.ndarray, np.ndarray]:
    """x [N, 1, 28, 28] in [-1, 1] and y [N] of MNIST's standard files; `part`: train or t10k."""
    content = (gzip.decompress((Path(data) / f"{part}-{kind}-ubyte.gz").read_bytes()) for kind in KINDS)
    x, y = (np.frombuffer(c, np.uint8, offset=offset) for c, offset in zip(content, (16, 8), strict=True))
    return x.reshape(-1, 1, 28, 28).astype(np.float32) / 127.5 - 1, y.astype(np.int64)


def initial(work: str, seed: str, folder: str) -> dict[str, np.ndarray]:
    """Weights by their names in torch: [p, d] of linear layers, [p, d, H, W] of convolutions."""
    with np.load(Path(folder) / f"{work}-{seed}.npz") as weights:
        return dict(weights)


def tick() -> None:
    """A round is over."""
    _ticks.append((time.perf_counter(), time.process_time()))


def rounds() -> dict[str, float]:
    """How many there were, and the medians of their seconds: of the clock, and of the processor's."""
    seconds = ([after - before for before, after in pairwise(times)] for times in zip(*_ticks, strict=True))
    return {"rounds": len(_ticks)} | dict(zip(("round", "round_cpu"), map(statistics.median, seconds), strict=True))


def report(version: str, accuracy: float, z: float, epsilon: float) -> None:
    """Prints what the script found, as its last line. `epsilon`: what the library itself says was spent."""
    found = {"version": version, "accuracy": accuracy, "z": z, "epsilon": epsilon}
    print(json.dumps(found | rounds()))


def arguments() -> list[str]:
    """WORK, SEED, FOLDER and DATA."""
    return sys.argv[1:5]
