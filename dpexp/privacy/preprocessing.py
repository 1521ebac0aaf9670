"""Runs the private preprocessing of a module before the first round, in one pass over all records for each step."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpexp._lightning_compat import pl, training_loader
from dpexp.accounting.ledger import LedgerWriter, OneTimeQueryEvent, ParallelQueryEvent, SamplingEvent
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import Processes, SharedLedger
from dpexp.privacy.gradients.layer_gradients import DenseGradient, outer_products
from dpexp.privacy.mechanism import clip_factors
from dpexp.privacy.noise.continuous import GaussianNoise, add_laplace
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.plan.clipping import Abadi
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import Preprocessing, parts_of, preprocessing_of, upper
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch
from dpexp.privacy.sampling.fetching import all_records, attempt


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
    planned, own = (", ".join(map(_described, some)) for some in events)
    if planned != own:
        raise ConfigError(
            f"the plan was made for a module with the preprocessing {planned or 'none'}, and this one has "
            f"{own or 'none'}; make the plan for the module that is trained."
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


def _described(event: OneTimeQueryEvent | ParallelQueryEvent) -> str:
    one = parts_of(event)[0]
    return f"{event.query} ({one.noise}, S = {one.S}, replaced {one.S_replaced}, {len(parts_of(event))} parts)"


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
    """Σ of all records' clipped vectors [d], in float64. A record that raises an error contributes nothing."""
    earlier = [copy.deepcopy(one).double() for one in earlier]
    total, used = torch.zeros(step.d, dtype=torch.float64), 0
    reason: Exception | None = None
    with torch.no_grad():
        for records in all_records(loader, physical_batch, randomness):
            try:
                if isinstance(records, FailedRecord):
                    raise records.reason
                x, y = _inputs(records)
                x, y = _after(earlier, x.double(), y) if earlier else (x.double(), y)
                total += _clipped_sum(step, x, y)
                used += len(x)
            except Exception as error:
                reason = error
    if not used:
        raise ConfigError(f"preprocessing.{name}: no record can be used: {reason}") from reason
    if reason is not None:
        warnings.warn(f"preprocessing.{name}: some records cannot be used; they contribute nothing: {reason!r}")
    return total


def _after(earlier: Sequence[Preprocessing], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What earlier steps make of each record by itself, since rounding in a batch depends on its size. Without records
    for which they fail, or give another shape than for zeros."""
    steps = nn.Sequential(*earlier)
    device = next(steps.buffers(), x).device
    shape = steps(torch.zeros_like(x[:1], device=device)).shape
    found = [attempt(steps, one.to(device)) for one in x.split(1)]
    kept = [k for k, one in enumerate(found) if isinstance(one, Tensor) and one.shape == shape]
    return torch.cat([found[k] for k in kept]).cpu(), y[kept]


def _clipped_sum(step: Preprocessing, x: Tensor, y: Tensor) -> Tensor:
    """Σ of the vectors of records of one shape, each clipped as a gradient is (see `dpexp.privacy.mechanism`).

    `vmap` lifts the vector of one record: no record can change another's, or decide whether it has one.
    """
    found = vmap(step.vector)(x, y)
    v, o = found if isinstance(found, tuple) else (found, x.new_zeros(len(x), 0, 0))
    gradients = DenseGradient(v.double().flatten(1)), outer_products(o.double(), o.double())
    sums = x.new_zeros(v[0].numel()), x.new_zeros(o.shape[2], o.shape[2])
    if (count := len(sums[0]) + len(upper(sums[1]))) != step.d:
        raise ConfigError(f"vector returned {count} numbers instead of d={step.d}.")
    norms = (gradients[0].squared_norms() + gradients[1].squared_norms()).sqrt()
    c = clip_factors(Abadi(), norms, torch.tensor(step.S, dtype=torch.float64), torch.float64)
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.mask_out(c == 0)
        gradient.add_weighted_sum(c, total)
    return torch.cat([sums[0], upper(sums[1])])


def _inputs(records: RecordBatch) -> tuple[Tensor, Tensor]:
    """[B, …] inputs and [B, …] labels."""
    match records.batch:
        case [Tensor() as x, Tensor() as y, *_] if x.shape[:2] == y.shape[:2] == (records.size, 1):
            return x[:, 0], y[:, 0]
    raise ConfigError("training batches must be tensors (x, y) with one input and one label per record.")
