"""Several processes that train as one: what a kill leaves.

    python benchmarks/processes.py [KILLS]      # default 50
    python benchmarks/processes.py KILLS late   # a ledger that is written late, to show that it would be found

A fit in two or three processes is begun, and one of them killed by SIGKILL: by itself before or after a chosen
call, or from outside at a random time after they have connected (one that dies before is the business of whatever
started them, which then ends the others). Every process writes a byte to a file of its own the moment that it has a
release. Afterwards the ledger must hold at least as many rounds as any process has seen releases, at most one more, and
all others must have stopped within seconds.
"""

import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from kills import AT_RANDOM, Findings, Point, around, forked, main, was_killed
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from quiet import trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp import Poisson, Target, make_plan
from dpexp.accounting.ledger import LedgerWriter
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


CALLS = (
    (RoundEngine, "begin"), (RoundEngine, "add_chunk"), (RoundEngine, "release"), (SharedLedger, "commit"),
    (LedgerWriter, "commit"), (Processes, "gathered"), (Processes, "reduce_to_main"), (Processes, "broadcast"),
    (round, "add_noise"),
)  # fmt: skip
POINTS = [
    point for owner, call in CALLS for point in around(f"{owner.__name__.rpartition('.')[2]}.{call}", owner, call, 12)
]
OF_THE_FIRST = {"LedgerWriter.commit", "round.add_noise"}


def train(folder: Path, rank: int, count: int) -> None:
    torch.manual_seed(0)
    module = Classifier(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    sampling = Poisson(sampling_rate=0.2, steps=ROUNDS)
    plan = make_plan(module, n=N, sampling=sampling, target=Target(noise_multiplier=1.0))
    privacy = dpexp.PrivacyCallback(plan, folder / "ledger.jsonl")
    data = DataLoader(TensorDataset(torch.randn(N, 2), torch.zeros(N, dtype=torch.long)))
    options = {"strategy": "ddp", "devices": count, "plugins": [TorchElasticEnvironment()]}
    trainer(privacy, Witness(folder, rank), **options).fit(module, data)


@dataclass(frozen=True)
class Group:
    """Processes that train as one, of which one is killed: at its nth call of a point, or from outside."""

    folder: Path
    count: int
    port: int
    victim: int
    point: Point | None
    nth: int

    def member(self, rank: int, prepare: Callable[[], None]) -> None:
        """What the process of a rank does."""
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.count, "MASTER_PORT": self.port}
        os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
        with (self.folder / f"said{rank}").open("w") as said:
            os.dup2(said.fileno(), 2), os.dup2(said.fileno(), 1)
        prepare()
        if self.point and rank == self.victim:
            self.point.arm(self.nth)
        train(self.folder, rank, self.count)

    def kill_at(self, seconds: float, child: int) -> None:
        """From outside, so long after all have connected."""
        until = time.monotonic() + TOO_LONG
        while len([*self.folder.glob("connected*")]) < self.count and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)


def still_there(children: list[int]) -> list[int]:
    """Those that have not ended within TOO_LONG seconds, and are killed."""
    until = time.monotonic() + TOO_LONG
    while children and time.monotonic() < until:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return children


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def kill(times: int, prepare: Callable[[], None], whole: Path) -> Findings:
    chance, found, seconds = random.Random(0), Findings(), []
    while found.kills.total() < times:
        folder = whole / str(found.kills.total() + found.finished)
        folder.mkdir()
        count = chance.choice((2, 3))
        point = chance.choice([*POINTS, *[None] * (len(POINTS) // 2)])
        victim = 0 if point and point.name in OF_THE_FIRST else chance.randrange(count)
        group = Group(folder, count, free_port(), victim, point, chance.randint(1, 12))
        children = [forked(partial(group.member, rank, prepare)) for rank in range(count)]
        if point is None:
            group.kill_at(chance.uniform(0, LONGEST), children[victim])
        killed = was_killed(children.pop(victim), folder)
        died = time.monotonic()
        for _ in still_there(children):
            found.wrong.append(f"a process was still there after {TOO_LONG:.0f} s, in {folder}")
        if killed:
            seconds.append(time.monotonic() - died)
        found.compare(folder, point.title if point else AT_RANDOM, 1, killed)
    found.show("each of one of two or three processes")
    print(f"the others had stopped after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)")
    return found


if __name__ == "__main__":
    main(kill, 50)
