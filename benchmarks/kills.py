"""Does a ledger ever hold fewer rounds than were released? Training runs are killed, with SIGKILL, to find out.

    python benchmarks/kills.py [KILLS]

Each process trains through `pl.Trainer` with a `PrivacyCallback`, and a second callback writes one byte to a file of
its own the moment that a noisy average is visible, as a preparation does when its sum is, before the first round. It is
killed by itself before, in or after a chosen call, or from outside at a random time; the run is then resumed from its
last checkpoint and killed again, until it finishes. After every kill the ledger must be readable and hold at least as
many rounds as there are bytes. It may hold one more a kill.

`python benchmarks/kills.py KILLS late` does the same to a writer that writes a round only after its release, to show
that what is looked for would be found.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from quiet import quiet, trainer
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp import Poisson, Target, make_plan
from dpexp.accounting.ledger import LedgerWriter, ledger_so_far
from dpexp.errors import ConfigError
from dpexp.privacy.preprocessing_methods import PreprocessedModel, Standardize

N, ROUNDS, CHECKPOINT_EVERY = 40, 30, 4
LONGEST = 0.5  # seconds until a kill from outside
TOO_LONG = 60  # seconds after which a process hangs
AT_RANDOM = "at a random time"


class Seen(Standardize):
    """A preparation that is seen when it is released."""

    def __init__(self, seen: int) -> None:
        super().__init__([2], noise_multiplier=1.0)
        self._seen = seen

    def fit(self, noisy: torch.Tensor, n: int) -> None:
        super().fit(noisy, n)
        os.write(self._seen, b".")


class Model(pl.LightningModule):
    def __init__(self, seen: int) -> None:
        super().__init__()
        self.layer = PreprocessedModel({"seen": Seen(seen)}, torch.nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Before(pl.Callback):
    """Stands before the privacy callback: gradients are clipped, and nothing is released."""

    def on_before_optimizer_step(self, *args: Any) -> None: ...


class Witness(pl.Callback):
    """Stands behind the privacy callback: the noisy average is in `p.grad`."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "last.ckpt"
        self.seen = os.open(folder / "seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert all(p.grad is not None for p in pl_module.parameters())
        os.write(self.seen, b".")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % CHECKPOINT_EVERY == 0:
            trainer.save_checkpoint(self.checkpoint.with_suffix(".new"))
            os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)


def train(folder: Path) -> None:
    """Begins a run, or resumes the one that was killed."""
    witness = Witness(folder)
    module = Model(witness.seen)
    plan = make_plan(
        module, n=N, sampling=Poisson(sampling_rate=0.2, steps=ROUNDS), target=Target(noise_multiplier=1.0)
    )
    privacy = dpexp.PrivacyCallback(plan, folder / "ledger.jsonl")
    data = DataLoader(TensorDataset(torch.randn(N, 2), torch.zeros(N)))
    resumed = {"ckpt_path": witness.checkpoint, "weights_only": False} if witness.checkpoint.exists() else {}
    trainer(Before(), privacy, witness).fit(module, data, **resumed)


# Where a process kills itself: before or after a call, or with half of its bytes written.

OF_LEDGER = (b"[", b"{")


@dataclass(frozen=True)
class Point:
    name: str
    owner: Any
    call: str
    when: str
    latest: int = 8  # the call at which it may happen, from 1 on
    resumed: bool = False  # it only happens in resumed runs

    @property
    def title(self) -> str:
        return f"{self.when} {self.name}"

    def arm(self, nth: int) -> None:
        """From now on the nth call is the process's last."""
        real, calls = getattr(self.owner, self.call), 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if self.call == "write" and not args[1].startswith(OF_LEDGER):
                return real(*args, **kwargs)
            calls += 1
            if calls == nth and self.when == "before":
                die()
            if calls == nth and self.when == "half-way through":
                real(args[0], args[1][: len(args[1]) // 2])
                die()
            result = real(*args, **kwargs)
            if calls == nth:
                die()
            return result

        setattr(self.owner, self.call, call)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(name: str, owner: Any, call: str, latest: int = 8, resumed: bool = False, half: bool = False) -> list[Point]:
    """Before and after a call, and half-way through if its bytes can be halved."""
    whens = ("before", "half-way through", "after") if half else ("before", "after")
    return [Point(name, owner, call, when, latest, resumed) for when in whens]


POINTS = [
    *around("the draw", LedgerWriter, "sample"),
    *around("the clipped sum", Before, "on_before_optimizer_step"),
    *around("the commit", LedgerWriter, "commit"),
    *around("the write", os, "write", half=True),
    *around("its first write", os, "write", latest=1, half=True),
    *around("the preprocessing", Seen, "fit", latest=1),
    *around("the release", Witness, "on_before_optimizer_step"),
    *around("the step", Witness, "on_train_batch_end"),
    *around("the checkpoint", os, "replace", latest=3),
    *around("fsync", os, "fsync", latest=3),
    *around("resumption", os, "ftruncate", latest=1, resumed=True),
    *around("the closing line", LedgerWriter, "close", latest=1),
]


def write_late() -> None:
    """A writer that puts each round on disk when the next is drawn."""
    commit, sample = LedgerWriter.commit, LedgerWriter.sample

    def sample_late(self: LedgerWriter, event: Any) -> None:
        if self._queries:
            commit(self)
        sample(self, event)

    LedgerWriter.commit, LedgerWriter.sample = (lambda self: None), sample_late  # type: ignore[method-assign]


# Killing


def forked(work: Callable[[], None]) -> int:
    """The id of a new process that does the work."""
    child = os.fork()
    if child == 0:
        signal.alarm(TOO_LONG)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def was_killed(child: int, folder: Path) -> bool:
    """Waits for the end of a process, which must be one by SIGKILL or without an error."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        raise RuntimeError(f"a process ended with status {status}, in {folder}.")
    return False


@dataclass
class Run:
    folder: Path
    kills: int = 0

    @property
    def resumable(self) -> bool:
        return (self.folder / "last.ckpt").exists()

    def live(self, prepare: Callable[[], None], seconds: float | None) -> bool:
        """Trains in a forked process, which is killed after so many seconds if any; whether it was killed."""

        def work() -> None:
            prepare()
            train(self.folder)

        child = forked(work)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        killed = was_killed(child, self.folder)
        self.kills += killed
        return killed


@dataclass
class Findings:
    kills: Counter[str] = field(default_factory=Counter)
    surplus: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    finished: int = 0

    def compare(self, folder: Path, name: str, most: int, killed: bool) -> None:
        """Compares the rounds in a run's ledger with the releases that its processes saw.

        Args:
            name: of how it was killed, or was to be.
            most: so many rounds more are allowed.
        """
        released = max((path.stat().st_size for path in folder.glob("seen*")), default=0)
        ledger, rounds, error = folder / "ledger.jsonl", 0, ""
        if ledger.exists() and b"\n" in ledger.read_bytes():  # else it was killed before the header was written
            try:
                rounds = len(ledger_so_far(ledger))
            except ConfigError as refused:
                rounds, error = -1, str(refused)
        if error or not released <= rounds <= released + most:
            self.wrong.append(f"killed {name}: {error or f'{released} releases, {rounds} rounds'}")
        if killed:
            self.kills[name] += 1
            self.surplus[rounds - released] += 1
        else:
            self.finished += 1

    def show(self, said: str) -> None:
        for name, count in sorted(self.kills.items()):
            print(f"{count:5} {name}")
        print(f"{self.kills.total():5} kills, {said}; {self.finished} runs finished")
        for surplus, count in sorted(self.surplus.items()):
            print(f"{count:5} ledgers with {surplus:+d} rounds beside the releases seen")
        for failure in self.wrong:
            print(f"FAILED {failure}")
        print(f"{len(self.wrong)} failed")


def kill(times: int, prepare: Callable[[], None], folder: Path) -> Findings:
    """Kills runs so many times, and prints what it finds."""
    chance, found, run = random.Random(0), Findings(), Run(folder / "0")
    points: list[Point | None] = []
    runs, resumed_kills = 1, 0
    run.folder.mkdir()
    while found.kills.total() < times:
        if not points:
            points = [*POINTS, *[None] * (len(POINTS) // 2)]
            chance.shuffle(points)
        point = points.pop()
        resumed = run.resumable
        if point is not None and point.resumed and not resumed:
            point = None

        def armed(point: Point | None = point, nth: int = chance.randint(1, point.latest) if point else 0) -> None:
            prepare()
            if point is not None:
                point.arm(nth)

        killed = run.live(armed, None if point else chance.uniform(0, LONGEST))
        found.compare(run.folder, point.title if point else AT_RANDOM, run.kills, killed)
        resumed_kills += killed and resumed
        if not killed or not run.resumable:
            run = Run(folder / str(runs))
            runs += 1
            run.folder.mkdir()
    found.show(f"{resumed_kills} of them of resumed runs")
    return found


def main(kill: Callable[[int, Callable[[], None], Path], Findings], times: int) -> None:
    """Kills as often as the command line says, or so many times, and exits with 1 if a ledger is wrong."""
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet()
    times = next((int(word) for word in sys.argv[1:] if word.isdigit()), times)
    with tempfile.TemporaryDirectory() as folder:
        found = kill(times, write_late if "late" in sys.argv else lambda: None, Path(folder))
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main(kill, 300)
