"""Runs the private preprocessing of a module before the first round, in one pass over all records for each step."""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._lightning_compat import pl, training_loader
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
    module: nn.Module,
    plan: PrivacyPlan,
    loader: Any,
    physical_batch: int,
    ledger: LedgerWriter | SharedLedger,
    noise: KeyStream,
    randomness: KeyStream,
    done: int = 0,
    processes: Processes | None = None,
) -> Iterator[None]:
    """Fits each preprocessing step to its noisy sum, and yields after each.

    A step's query is in the ledger before its noise is drawn. Noise is added in float64; the released sum is rounded
    to float32.

    Args:
        plan: made for `module`.
        loader: the user's training loader; its data set and collate function are used.
        done: number of steps released in an earlier start, whose results are in the checkpoint.
        processes: the main one sums, adds the noise, and broadcasts the released sum.
    """
    processes = processes or Processes()
    steps = preprocessing_of(module)
    events = plan.preprocessing, [step.query(name, plan.adjacency, 1.0) for name, step in steps.items()]
    planned, own = (
        [(e.query, [(part.noise, part.S, part.S_replaced) for part in parts_of(e)]) for e in some] for some in events
    )
    if planned != own:
        raise ConfigError(
            f"the plan was made for a module with the preprocessing {_described(planned)}, and this one has "
            f"{_described(own)}; make the plan for the module that is trained."
        )
    for step, event in zip(steps.values(), plan.preprocessing, strict=True):
        one = parts_of(event)[0]
        step.sd = one.scale * (math.sqrt(2) if one.noise == "laplace" else 1)
    for k, (name, step) in [*enumerate(steps.items())][done:]:
        event, earlier = plan.preprocessing[k], [*steps.values()][:k]
        total = torch.zeros(step.d, dtype=torch.float64)
        with processes.fail_together(), own_randomness(next(module.parameters()).device, randomness):
            if processes.is_main:
                total = _total(name, step, earlier, loader, physical_batch, randomness)
        ledger.sample(SamplingEvent("all", 1.0, plan.n))
        ledger.query(event)
        ledger.commit()
        parts = parts_of(event)
        sums = [(part, query.scale) for part, query in zip(total.chunk(len(parts)), parts, strict=True)]
        if processes.is_main and event.noise == "laplace":
            add_laplace(sums, noise)
        elif processes.is_main:
            GaussianNoise(noise).add_to(sums)
        processes.broadcast({name: total})
        step.fit(total.float(), plan.n)
        yield


def _described(steps: Iterable[tuple[str, list[tuple[str, float, float]]]]) -> str:
    return ", ".join(f"{name} ({noise}, S = {S:g})" for name, ((noise, S, _), *_) in steps) or "none"


class NonPrivatePreprocessing(pl.Callback):
    """The same without noise, for the non-private baseline."""

    def __init__(self, n: int, physical_batch: int) -> None:
        self._n, self._physical_batch = n, physical_batch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = preprocessing_of(pl_module)
        if not steps or trainer.ckpt_path is not None:
            return
        loader = training_loader(trainer)
        for k, (name, step) in enumerate(steps.items()):
            earlier = [*steps.values()][:k]
            step.fit(_total(name, step, earlier, loader, self._physical_batch, KeyStream()).float(), self._n)


def _total(
    name: str,
    step: Preprocessing,
    earlier: Sequence[Preprocessing],
    loader: Any,
    physical_batch: int,
    randomness: KeyStream,
) -> Tensor:
    """Σ of all records' vectors [d], in float64. A record that raises an error contributes nothing."""
    earlier = [copy.deepcopy(one).double() for one in earlier]
    total, used = torch.zeros(step.d, dtype=torch.float64), 0
    reason: Exception | None = None

    def add(records: RecordBatch) -> None:
        nonlocal used, reason
        try:
            x, y = _inputs(records)
            for one in earlier:
                x = _apply(one, x.double())
            total.add_(_checked(step.sums(x, y), step.d))
            used += records.size
        except Exception as error:
            if records.size == 1:
                reason = error
            else:  # each record by itself
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


def _apply(step: Preprocessing, x: Tensor) -> Tensor:
    """Applies a step to each record by itself, since rounding in a batch depends on the other records."""
    device = next(step.buffers(), x).device
    return torch.cat([step(one.to(device)) for one in x.split(1)]).cpu()


def _checked(total: Any, d: int) -> Tensor:
    if not isinstance(total, Tensor) or total.shape != (d,) or not total.is_floating_point():
        found = f"{total.dtype} of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError(f"sums returned {found} instead of a real tensor of shape [{d}].")
    if not total.isfinite().all():
        raise ConfigError("sums returned numbers that are not finite.")
    return total.detach().double().cpu()


def _inputs(records: RecordBatch) -> tuple[Tensor, Tensor]:
    """[B, …] inputs and [B, …] labels."""
    match records.batch:
        case [Tensor() as x, Tensor() as y, *_] if x.shape[:2] == y.shape[:2] == (records.size, 1):
            return x[:, 0], y[:, 0]
    raise ConfigError("training batches must be tensors (x, y) with one input and one label per record.")
