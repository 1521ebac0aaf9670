"""Several processes that train as one: what a kill leaves.

    python benchmarks/processes.py [KILLS]      # default 50
    python benchmarks/processes.py KILLS late   # a ledger that is written late, to show that it would be found

A fit in two or three processes is begun, and one of them killed by SIGKILL: by itself before or after a chosen
call, or from outside at a random time after they have connected (one that dies before is the business of whatever
started them, which then ends the others). Every process writes a byte to a file of its own the moment that it has a
release. Afterwards the ledger must hold at least as many rounds as any process has seen releases, at most one more, and
all others must have stopped within seconds.
"""

import logging
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from kills import Point, write_late
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp import Poisson, Target, make_plan
from dpexp.accounting.ledger import LedgerWriter, ledger_so_far
from dpexp.privacy import round
from dpexp.privacy.distributed import Processes, SharedLedger
from dpexp.privacy.round import RoundEngine
from dpexp.training.classifier import Classifier

N, ROUNDS, LONGEST, TOO_LONG = 40, 30, 1.5, 30.0


class Witness(pl.Callback):
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._seen = os.open(folder / f"seen{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        (self._folder / f"connected{self._rank}").touch()

    def on_before_optimizer_step(self, *args: Any) -> None:
        os.write(self._seen, b".")


POINTS = [
    Point(f"{owner.__name__.rpartition('.')[2]}.{call}", owner, call, when, latest=12)
    for owner, call in (
        (RoundEngine, "begin"), (RoundEngine, "add_chunk"), (RoundEngine, "release"), (SharedLedger, "commit"),
        (LedgerWriter, "commit"), (Processes, "gathered"), (Processes, "reduce_to_main"), (Processes, "broadcast"),
        (round, "add_noise"),
    )
    for when in ("before", "after")
]  # fmt: skip
OF_THE_FIRST = {"LedgerWriter.commit", "round.add_noise"}


def train(folder: Path, rank: int, count: int) -> None:
    torch.manual_seed(0)
    module = Classifier(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    plan = make_plan(
        module, n=N, sampling=Poisson(sampling_rate=0.2, steps=ROUNDS), target=Target(noise_multiplier=1.0)
    )
    privacy = dpexp.PrivacyCallback(plan, folder / "ledger.jsonl")
    data = DataLoader(TensorDataset(torch.randn(N, 2), torch.zeros(N, dtype=torch.long)))
    pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=count, plugins=[TorchElasticEnvironment()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=-1,
        callbacks=[privacy, Witness(folder, rank)],
    ).fit(module, data)  # fmt: skip


def fork(folder: Path, rank: int, count: int, port: int, prepare: Any) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        with (folder / f"said{rank}").open("w") as said:
            os.dup2(said.fileno(), 2), os.dup2(said.fileno(), 1)
            prepare()
            train(folder, rank, count)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def kills(times: int, late: bool) -> bool:
    chance, named, surplus, seconds, failures = random.Random(0), Counter[str](), Counter[int](), [], []
    finished = 0
    with tempfile.TemporaryDirectory() as whole:
        while named.total() < times:
            folder = Path(whole) / str(named.total() + finished)
            folder.mkdir()
            count = chance.choice((2, 3))
            point = chance.choice([*POINTS, *[None] * (len(POINTS) // 2)])
            victim = 0 if point and point.name in OF_THE_FIRST else chance.randrange(count)
            nth = chance.randint(1, 12)

            def prepare(rank: int, point: Point | None = point, victim: int = victim, nth: int = nth) -> None:
                if late:
                    write_late()
                if point and rank == victim:
                    point.arm(nth)

            port = free_port()
            children = [fork(folder, rank, count, port, lambda rank=rank: prepare(rank)) for rank in range(count)]
            if point is None:
                until = time.monotonic() + TOO_LONG
                while len([*folder.glob("connected*")]) < count and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(chance.uniform(0, LONGEST))
                os.kill(children[victim], signal.SIGKILL)
            _, status = os.waitpid(children[victim], 0)
            died, others = time.monotonic(), [child for child in children if child != children[victim]]
            while others and time.monotonic() - died < TOO_LONG:
                others = [child for child in others if os.waitpid(child, os.WNOHANG) == (0, 0)]
                time.sleep(0.01)
            for child in others:
                failures.append(f"a process was still there after {TOO_LONG:.0f} s, in {folder}")
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                finished += 1
                continue
            seconds.append(time.monotonic() - died)
            name = f"{point.when} {point.name}" if point else "at a random time"
            named[name] += 1
            seen = [path.stat().st_size for path in folder.glob("seen*")]
            ledger = folder / "ledger.jsonl"
            rounds = len(ledger_so_far(ledger)) if ledger.exists() and b"\n" in ledger.read_bytes() else 0
            more = rounds - max(seen, default=0)
            surplus[more] += 1
            if not 0 <= more <= 1:
                failures.append(f"killed {name}: {max(seen, default=0)} releases, {rounds} rounds")
    for name, number in sorted(named.items()):
        print(f"{number:5} {name}")
    print(f"{named.total():5} kills of one of two or three processes; {finished} runs finished before theirs")
    for more, number in sorted(surplus.items()):
        print(f"{number:5} ledgers with {more:+d} rounds beside the releases that any process saw")
    print(f"the others had stopped after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(failures)} failed")
    return not failures


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    sys.exit(0 if kills(int(sys.argv[1]) if len(sys.argv) > 1 else 50, "late" in sys.argv) else 1)
