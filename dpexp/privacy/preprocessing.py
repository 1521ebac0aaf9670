"""Carries out the preparations of a module: one pass over all records for each, before the first round."""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from dpexp._lightning_compat import training_loader
from dpexp._torch_compat import tree_map
from dpexp.accounting.ledger import LedgerWriter, SamplingEvent
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import Processes, SharedLedger
from dpexp.privacy.noise.continuous import GaussianNoise, add_laplace
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import Preprocessing, parts_of, preprocessing_of
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch
from dpexp.privacy.sampling.fetching import all_records


def prepare(
    module: pl.LightningModule,
    plan: PrivacyPlan,
    loader: Any,
    physical_batch: int,
    ledger: LedgerWriter | SharedLedger,
    noise: KeyStream,
    randomness: KeyStream,
    done: int = 0,
    processes: Processes | None = None,
) -> Iterator[None]:
    """Releases each preparation's sum, which is in the ledger before the noise is drawn, lets it be used, and yields.

    The noise is added in float64, and what is released is rounded to float32, once.

    Args:
        plan: made for `module`.
        loader: the user's, of which data set and collation are kept.
        done: so many need not be released again, since `module` holds them.
        processes: of which the first sums and adds the noise, and hands out what is released.
    """
    processes = processes or Processes()
    found = preprocessing_of(module)
    events = plan.preprocessing, [one.query(name, plan.adjacency, 1.0) for name, one in found.items()]
    # How far a record moves each part, whatever its noise.
    planned, own = (
        [(e.query, [(part.noise, part.S, part.S_replaced) for part in parts_of(e)]) for e in those] for those in events
    )
    if planned != own:
        raise ConfigError(
            f"the plan was made for a module with the preparations {_told(planned)}, and this one has {_told(own)}; "
            "make the plan for the module that is trained."
        )
    for preparation, event in zip(found.values(), plan.preprocessing, strict=True):
        one = parts_of(event)[0]
        preparation.sd = one.scale * (math.sqrt(2) if one.noise == "laplace" else 1)
    for k, (name, preparation) in [*enumerate(found.items())][done:]:
        event, before = plan.preprocessing[k], [*found.values()][:k]
        total = torch.zeros(preparation.d, dtype=torch.float64)
        with processes.fail_together(), own_randomness(module.device, randomness):
            if processes.is_main:
                total = _total(name, preparation, before, loader, physical_batch, randomness)
        ledger.sample(SamplingEvent("all", 1.0, plan.n))
        ledger.query(event)
        ledger.commit()
        parts = parts_of(event)  # of each a number, or of the one all
        sums = [(part, query.scale) for part, query in zip(total.chunk(len(parts)), parts, strict=True)]
        if processes.is_main and event.noise == "laplace":
            add_laplace(sums, noise)
        elif processes.is_main:
            GaussianNoise(noise).add_to(sums)
        processes.broadcast({name: total})
        preparation.fit(total.float(), plan.n)
        yield


def _told(preparations: Iterable[tuple[str, list[tuple[str, float, float]]]]) -> str:
    return ", ".join(f"{name} ({noise}, S = {S:g})" for name, ((noise, S, _), *_) in preparations) or "none"


class NonPrivatePreprocessing(pl.Callback):
    """The same without noise, for the twin that is trained without privacy."""

    def __init__(self, n: int, physical_batch: int) -> None:
        self._n, self._physical_batch = n, physical_batch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = preprocessing_of(pl_module)
        if not found or trainer.ckpt_path is not None:
            return
        loader = training_loader(trainer)
        for k, (name, preparation) in enumerate(found.items()):
            before = [*found.values()][:k]
            total = _total(name, preparation, before, loader, self._physical_batch, KeyStream())
            preparation.fit(total.float(), self._n)


def _total(
    name: str,
    preparation: Preprocessing,
    before: Sequence[Preprocessing],
    loader: Any,
    physical_batch: int,
    randomness: KeyStream,
) -> Tensor:
    """Σ of all records' vectors [d], in float64. A record of which nothing can be made contributes nothing."""
    before = [copy.deepcopy(earlier).double() for earlier in before]
    total, used = torch.zeros(preparation.d, dtype=torch.float64), 0
    reason: Exception | None = None

    def add(records: RecordBatch) -> None:
        nonlocal used, reason
        try:
            x, y = _inputs(records)
            for earlier in before:
                x = _through(earlier, x.double())
            total.add_(_checked(preparation.sums(x, y), preparation.d))
            used += records.size
        except Exception as error:
            if records.size == 1:
                reason = error
            else:  # one of them must not take the others with it
                for k in range(records.size):
                    one = tree_map(
                        lambda leaf, k=k: leaf[k : k + 1] if isinstance(leaf, Tensor) else leaf, records.batch
                    )
                    add(RecordBatch(1, one))

    with torch.no_grad():
        for records in all_records(loader, physical_batch, randomness):
            if isinstance(records, FailedRecord):
                reason = records.reason
            else:
                add(records)
    if not used:
        raise ConfigError(f"preprocessing.{name}: no record can be used: {reason}") from reason
    if reason is not None:
        warnings.warn(f"preprocessing.{name}: some records cannot be used; they contribute nothing: {reason!r}")
    return total


def _through(preparation: Preprocessing, x: Tensor) -> Tensor:
    """Each record by itself: in company its last digits could be others, and those of a number that all but cancels are
    all that a later preparation sees of it."""
    like = next(preparation.buffers(), x)
    return torch.cat([preparation(one.to(like.device)) for one in x.split(1)]).cpu()


def _checked(own: Any, d: int) -> Tensor:
    if not isinstance(own, Tensor) or own.shape != (d,) or not own.is_floating_point():
        told = f"{own.dtype} of shape {list(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
        raise ConfigError(f"sums gave {told} instead of {d} real numbers.")
    if not own.isfinite().all():
        raise ConfigError("sums gave numbers that are not finite.")
    return own.detach().double().cpu()


def _inputs(records: RecordBatch) -> tuple[Tensor, Tensor]:
    """[B, …] inputs and [B, …] labels, one of each of a record."""
    match records.batch:
        case [Tensor() as x, Tensor() as y, *_] if x.shape[:2] == y.shape[:2] == (records.size, 1):
            return x[:, 0], y[:, 0]
    raise ConfigError("training batches must be (x, y), tensors with one input and one label for a record.")
