"""Runs the private preprocessing of a module before the first round, in one pass over all records for each step."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._lightning_compat import pl, training_loader
from dpexp.accounting.ledger import LedgerWriter, OneTimeQueryEvent
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import Processes, SharedLedger
from dpexp.privacy.gradients.layer_gradients import DenseGradient, outer_products
from dpexp.privacy.mechanism import clip_factors
from dpexp.privacy.noise.continuous import GaussianNoise, add_laplace
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.plan.clipping import Abadi
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import Preprocessing, preprocessing_of, upper
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch
from dpexp.privacy.sampling.fetching import all_records, attempt, sampled_dataset


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
    """An iterator that fits each preprocessing step to its noisy sum, and yields after each.

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
    queries = (query for round_ in plan.before_training for query in round_.queries)
    events = [query for query in queries if isinstance(query, OneTimeQueryEvent)]
    planned = ", ".join(map(_described, events))
    own = ", ".join(_described(step.query(name, plan.adjacency, 1.0)) for name, step in steps.items())
    if planned != own:
        raise ConfigError(
            f"the plan was made for a module with the preprocessing {planned or 'none'}, and this one has "
            f"{own or 'none'}; make the plan for the module that is trained."
        )
    for step, event in zip(steps.values(), events, strict=True):
        step.sd = event.scale * (math.sqrt(2) if event.noise == "laplace" else 1)

    def in_turn() -> Iterator[None]:
        for k, (name, step) in [*enumerate(steps.items())][done:]:
            event, earlier = events[k], [*steps.values()][:k]
            total = torch.zeros(step.d, dtype=torch.float64)
            with processes.fail_together(), own_randomness(next(module.parameters()).device, randomness):
                if processes.is_main:
                    total = _total(name, step, earlier, loader, physical_batch, randomness)
            ledger.sample(plan.before_training[k].sampling)
            ledger.query(event)
            ledger.commit()
            if processes.is_main and event.noise == "laplace":
                add_laplace([(total, event.scale)], noise)
            elif processes.is_main:
                GaussianNoise(noise).add_to([(total, event.scale)])
            processes.broadcast({name: total})
            step.fit(total.float(), plan.n)
            yield

    return in_turn()


def _described(event: OneTimeQueryEvent) -> str:
    return f"{event.query} ({event.noise}, S = {event.S}, replaced {event.S_replaced})"


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
    from rich.progress import track

    before = nn.Sequential(*(copy.deepcopy(one).double() for one in earlier))
    total, used = torch.zeros(step.d, dtype=torch.float64), 0
    failed: FailedRecord | None = None
    chunks = math.ceil(len(sampled_dataset(loader)) / physical_batch)  # type: ignore[arg-type]
    with torch.no_grad():
        fetched = all_records(loader, physical_batch, randomness)
        for records in track(fetched, f"preprocessing.{name}", chunks, transient=True, disable=chunks < 10):
            some = records if isinstance(records, FailedRecord) else attempt(_inputs, records)
            found = [some] if isinstance(some, FailedRecord) else [
                attempt(lambda pair: _vector(step, before, *pair), pair) for pair in zip(*some, strict=True)
            ]  # fmt: skip
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for one in found:
                if isinstance(one, FailedRecord):
                    failed = one
                else:
                    by_shape.setdefault(one[1].shape, []).append(one)
            for vectors in by_shape.values():
                total += _clipped_sum(step, *map(torch.stack, zip(*vectors, strict=True)))
                used += len(vectors)
    if not used:
        reason = failed.reason if failed else ConfigError("there are none")
        raise ConfigError(f"preprocessing.{name}: no record can be used: {reason}") from reason
    if failed is not None:
        warnings.warn(f"preprocessing.{name}: some records cannot be used; they contribute nothing: {failed.reason!r}")
    return total


def _vector(step: Preprocessing, earlier: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """v [k] and o [T, m] of one record, which no other record can change (see `Preprocessing.vector`)."""
    x = x.double()
    if len(earlier):
        x = earlier(x[None].to(next(earlier.buffers(), x).device))[0].cpu()
    found = step.vector(x, y)
    v, o = found if isinstance(found, tuple) else (found, x.new_zeros(0, 0))
    v, o = v.double().flatten(), o.double()
    if step.noise == "laplace" and o.numel():
        raise ConfigError("with Laplace noise, vector must return v alone.")
    if (count := len(v) + math.comb(o.shape[1] + 1, 2)) != step.d:
        raise ConfigError(f"vector returned {count} numbers instead of d={step.d}.")
    return v, o


def _clipped_sum(step: Preprocessing, v: Tensor, o: Tensor) -> Tensor:
    """Σ of the vectors of B records [B, ...], each clipped to S as a gradient is (see `dpexp.privacy.mechanism`): in L2
    norm, and for Laplace noise in L1 norm."""
    gradients = DenseGradient(v), outer_products(o, o)
    if step.noise == "laplace":
        norms = v.abs().sum(1) * (1 + (v.shape[1] + 2) * 2.0**-53)
    else:
        norms = (gradients[0].squared_norms() + gradients[1].squared_norms()).sqrt() * (1 + 2.0**-50)
    c = clip_factors(Abadi(), norms, torch.tensor(step.S, dtype=torch.float64), torch.float64)
    for gradient in gradients:
        gradient.mask_out(c == 0)
    return torch.cat([gradients[0].weighted_sum(c), upper(gradients[1].weighted_sum(c))])


def _inputs(records: RecordBatch) -> tuple[Tensor, Tensor]:
    """[B, …] inputs and [B, …] labels."""
    match records.batch:
        case [Tensor() as x, Tensor() as y, *_] if x.shape[:2] == y.shape[:2] == (records.size, 1):
            return x[:, 0], y[:, 0]
    raise ConfigError("training batches must be tensors (x, y) with one input and one label per record.")
