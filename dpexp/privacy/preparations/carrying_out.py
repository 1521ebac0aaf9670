"""Carries out the preparations of a module: one pass over all records for each, before the first round."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpexp.accounting.ledger import LedgerWriter, PartsEvent, SamplingEvent
from dpexp.errors import ConfigError
from dpexp.privacy.delivery import all_records
from dpexp.privacy.isolation.randomness import own_randomness
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.laplace_noise import add_laplace
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.preparations.preparation import Preparation, preparations_of
from dpexp.privacy.stacking import Failed, Records


def prepare(
    module: pl.LightningModule,
    plan: PrivacyPlan,
    loader: Any,
    physical_batch: int,
    ledger: LedgerWriter,
    noise: KeyStream,
    randomness: KeyStream,
) -> None:
    """Releases each preparation's sum, which is in the ledger before the noise is drawn, and lets it be used.

    The noise is added in float64, and what is released is rounded to float32, once.

    Args:
        plan: made for `module`.
        loader: the user's, of which data set and collation are kept.
    """
    found = preparations_of(module)
    planned = [event.query for event in plan.preparations]
    if planned != list(found):
        raise ConfigError(
            f"the plan was made for a module with the preparations {planned}, and this one has {list(found)}; make the "
            "plan for the module that is trained."
        )
    for (name, preparation), event in zip(found.items(), plan.preparations, strict=True):
        with own_randomness(module.device, randomness):
            total = _total(name, preparation, _before(found, name), loader, physical_batch, randomness)
        ledger.sample(SamplingEvent("all", 1.0, plan.n))
        ledger.query(event)
        ledger.commit()
        parts = event.queries if isinstance(event, PartsEvent) else (event,)  # of each a number, or of the one all
        sums = [(part, query.scale) for part, query in zip(total.chunk(len(parts)), parts, strict=True)]
        if event.noise == "laplace":
            add_laplace(sums, noise)
        else:
            GaussianNoise(noise).add_to(sums)
        preparation.use(total.float(), plan.n)


class PreparedPlainly(pl.Callback):
    """The same without noise, for the twin that is trained without privacy."""

    def __init__(self, n: int, physical_batch: int) -> None:
        self._n, self._physical_batch = n, physical_batch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = preparations_of(pl_module)
        if not found or trainer.ckpt_path is not None:
            return
        loader = trainer.fit_loop._data_source.dataloader()
        for name, preparation in found.items():
            total = _total(name, preparation, _before(found, name), loader, self._physical_batch, KeyStream())
            preparation.use(total.float(), self._n)


def _before(found: dict[str, Preparation], name: str) -> list[Preparation]:
    names = list(found)
    return [found[other] for other in names[: names.index(name)]]


def _total(
    name: str,
    preparation: Preparation,
    before: Sequence[Preparation],
    loader: Any,
    physical_batch: int,
    randomness: KeyStream,
) -> Tensor:
    """Σ of all records' vectors [d], in float64. A record of which nothing can be made contributes nothing.

    Raises:
        ConfigError: none contributed.
    """
    total: Tensor | None = None
    reason: Exception | None = None

    def add(records: Records) -> None:
        nonlocal total, reason
        try:
            x, y = _inputs(records)
            for earlier in before:
                x = earlier(x.to(next(earlier.buffers()))).cpu()
            own = preparation.sums(x, y)
        except Exception as error:
            if records.size > 1:  # one of them, which must not take the others with it
                for k in range(records.size):
                    add(_one(records, k))
            else:
                reason = error
            return
        total = own if total is None else total + own

    with torch.no_grad():
        for records in all_records(loader, physical_batch, randomness):
            if isinstance(records, Failed):
                reason = records.reason
            else:
                add(records)
    if total is None:
        raise ConfigError(f"prepare.{name}: no record can be used: {reason}")
    if reason is not None:
        warnings.warn(f"prepare.{name}: some records cannot be used; they contribute nothing: {reason!r}")
    return total


def _one(records: Records, k: int) -> Records:
    return Records(1, tree_map(lambda leaf: leaf[k : k + 1] if isinstance(leaf, Tensor) else leaf, records.batch))


def _inputs(records: Records) -> tuple[Tensor, Tensor]:
    """[B, …] inputs and [B] labels, one of each of a record."""
    match records.batch:
        case [Tensor() as x, Tensor() as y, *_] if x.shape[:2] == y.shape[:2] == (records.size, 1):
            return x[:, 0], y[:, 0]
    raise ConfigError("training batches must be (x, y), tensors with one input and one label for a record.")
