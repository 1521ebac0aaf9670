"""Fits in several processes at once. Starting processes takes seconds, so each start runs several fits."""

import faulthandler
import os
import socket
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.ledger import LedgerWriter
from dpexp.privacy import normalization
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.options import Banded
from dpexp.privacy.preprocessing_methods import PreprocessedModel, Standardize
from dpexp.privacy.round import RoundEngine

N, ROUNDS = 23, 9


class Net(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def layers(start=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(start, 5), nn.Tanh(), nn.Linear(5, 3))


def with_batchnorm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


class Seen(pl.Callback):
    """Records the release of each round."""

    def __init__(self):
        self.released = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.released.append([p.grad.clone() for p in pl_module.parameters()])


@contextmanager
def sizes_counted():
    """Yields a list that gets the number of this process's records in each round."""
    begin, add_chunk, sizes = RoundEngine.begin, RoundEngine.add_chunk, []

    def counted_begin(private_round, t=0):
        sizes.append(0)
        begin(private_round, t)

    def counted_add_chunk(private_round, loss_of, batch, size):
        sizes[-1] += size
        add_chunk(private_round, loss_of, batch, size)

    with mock.patch.multiple(RoundEngine, begin=counted_begin, add_chunk=counted_add_chunk):
        yield sizes


def _module_and_options(what):
    if what == "batchnorm":
        private = normalization.PrivateBatchNorm()
        net = private(with_batchnorm())
        return Net(net), {"private_metrics": private.release(net)}
    if what == "prepared":
        return Net(PreprocessedModel({"standard": Standardize([4], noise_multiplier=2.0)}, layers())), {}
    return Net(layers()), {
        "plain": {},
        "adaptive": {"clip_norm": AdaptiveClipNorm(initial=0.3)},
        "metrics": {"private_metrics": {"train_loss": {"clip_norm": 4.0, "budget_share": 0.1, "every_n_rounds": 2}}},
        "banded": {"sampling": "cyclic_poisson", "noise": Banded(3, "sqrt")},
        "shuffled": {"sampling": "shuffle", "q": 3 / N},
        "allocated": {"sampling": "random_allocation", "q": 0.2, "num_selected": 1},
    }[what]


def data(rank=0):
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(N, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (N,), generator=generator))


def trainer_of(count, *callbacks):
    options = {"strategy": "ddp", "devices": count, "plugins": [TorchElasticEnvironment()]} if count > 1 else {}
    return trainer(*callbacks, **options)


def fit(what, count, folder, rank=0, resume=None, steps=ROUNDS, dataset=None, seed=7):
    """Trains, and returns all releases and other results that must not depend on the number of processes."""
    module, options = _module_and_options(what)
    plan = plan_of(module, **{"n": N, "q": 0.07, "steps": steps, "noise_multiplier": 0.8} | options)
    seen = Seen()
    privacy = dpexp.PrivacyCallback(
        plan, folder / f"{what}.jsonl", delta=1e-3, max_physical_batch_size=2, noise_seed=seed,
        accountant="pld" if what == "allocated" else "rdp",
    )  # fmt: skip
    run = trainer_of(count, privacy, seen)
    loader = DataLoader(data() if dataset is None else dataset, batch_size=4, shuffle=True)
    with warnings.catch_warnings(), sizes_counted() as sizes:
        warnings.simplefilter("ignore")
        with mock.patch("dpexp.accounting.ledger.writer.os.urandom", lambda n: bytes(n)):  # the ledger's random number
            run.fit(module, loader, ckpt_path=resume, weights_only=False if resume else None)
    run.save_checkpoint(folder / f"{what}.ckpt")
    return {
        "released": seen.released,
        "weights": [tensor.clone() for tensor in module.state_dict().values()],
        "figures": [
            privacy.readings.epsilon, privacy.rounds_done, dict(privacy.estimates.history),
            privacy.current_plan.groups[0].S,
        ],
        "sizes": sizes,
    }  # fmt: skip


def all_of(rank, count, folder, kinds):
    found = {what: fit(what, count, folder, rank) for what in kinds}
    torch.save(found, folder / f"{rank}.pt")


def mistaken(rank, count, folder):
    """The sentence of each process for each mistake, and how many rounds its ledger has; and a fit that is resumed."""
    found = {}

    def noted(what, **options):
        try:
            fit("plain", count, folder / what, rank, **options)
        except dpexp.ConfigError as error:
            found[what] = str(error)

    commit, calls = LedgerWriter.commit, []

    def fails(writer):
        calls.append(writer)
        if len(calls) == 4:
            raise dpexp.ConfigError("ledger: no space is left.")
        commit(writer)

    def drifts(callback, trainer, module, *args):
        if rank and trainer.global_step == 3:
            module.net[0].bias.data.add_(1e-7)

    def breaks(engine, loss_of, batch, size):
        if rank:
            raise dpexp.ConfigError("model: it breaks.")

    for name in ("records", "plan", "commit", "weights", "step", "resumed"):
        (folder / name).mkdir(exist_ok=True)
    noted("records", dataset=data(rank))
    noted("plan", steps=ROUNDS + rank)
    with mock.patch.object(LedgerWriter, "commit", fails):
        noted("commit")
    with mock.patch.object(Seen, "on_train_batch_end", drifts):
        noted("weights")
    with mock.patch.object(RoundEngine, "add_chunk", breaks):
        noted("step")
    first = fit("plain", count, folder / "resumed", rank, steps=4)
    found["resumed"] = (
        first["released"],
        fit("plain", count, folder / "resumed", rank, resume=folder / "resumed" / "plain.ckpt")["released"],
    )
    torch.save(found, folder / f"{rank}.pt")


def start(what, count, folder, *arguments):
    """Runs `what(rank, count, folder, …)` in `count` processes; returns what each left."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    if count == 1:
        what(0, 1, folder, *arguments)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.start_processes(
            _process, (what, count, folder, port, arguments), nprocs=count, start_method="forkserver"
        )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _process(rank, what, count, folder, port, arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)
    what(rank, count, folder, *arguments)
