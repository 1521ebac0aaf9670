"""The training step of a private round: it processes the sample record by record and returns a zero loss.

The default physical batch size is fixed on a CPU, and on a GPU the largest power of two that fits into memory. It is
found before the first round's sample is processed, with copies of one record of the validation set, which is public.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpexp._lightning_compat import validation_loader
from dpexp.accounting.ledger import LedgerWriter
from dpexp.privacy import muted_logging, refusals
from dpexp.privacy.distributed import Processes, SharedLedger, digest_of_plan
from dpexp.privacy.dry_run import dry_run
from dpexp.privacy.gradients.chunk import LossOf
from dpexp.privacy.gradients.per_example import loss_of_step
from dpexp.privacy.gradients.step import TRACED
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import own_randomness
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.batches import FailedRecord, RecordBatch, flattened
from dpexp.privacy.sampling.loader import RoundLoader
from dpexp.privacy.state_checks import StateFound, digest_of_weights


class PrivateTrainingStep:
    """Called once per round in place of `training_step`, which it applies to each record.

    Args:
        ledger: gets the sampling events.
        rounds_lost: rounds in the ledger that the resumed checkpoint does not contain.
        search_batch_size: find the largest physical batch that fits, in the first round.
        logged, validated: names logged by training_step, filled meanwhile, and by the validation before training.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        module: pl.LightningModule,
        engine: PrivateRound,
        rounds: RoundLoader,
        ledger: LedgerWriter | SharedLedger,
        processes: Processes,
        rounds_lost: int,
        search_batch_size: bool,
        logged: set[str],
        validated: set[str],
    ) -> None:
        self._plan, self._module, self._engine, self._rounds = plan, module, engine, rounds
        self._ledger, self._processes, self._rounds_lost = ledger, processes, rounds_lost
        self._search_batch_size, self._logged, self._validated = search_batch_size, logged, validated

    def __call__(self, training_step: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """Adds up the sample's clipped gradients. args: of training_step after the batch; kwargs: its keyword ones."""
        trainer, module, engine, step_digest = self._module.trainer, self._module, self._engine, 0
        with (
            self._state_recorded(),
            self._processes.fail_together(),
            muted_logging.collectives_refused(),
            muted_logging.loggers_muted(trainer),
        ):
            convert, current_args, epoch_begins = trainer.precision_plugin.convert_input, [*args], args[:1] == [0]

            def loss_of(record: Any) -> Tensor:
                return loss_of_step(lambda: training_step(convert(record), *current_args, **kwargs))

            if self._search_batch_size:
                largest = largest_fitting_batch(self._plan, module, loss_of, trainer)
                self._rounds.sampler.max_physical_batch_size = largest
                self._search_batch_size = False
            if engine.step.mode is None:
                self._dry_run(loss_of, current_args)
                step_digest = engine.step.digest
            else:
                engine.step.trace_again(loss_of, self._t, epoch_begins=epoch_begins)
            random = engine.step.mode != TRACED or engine.step.is_random or not self._rounds.only_rows
            with own_randomness(module.device, self._rounds.randomness) if random else nullcontext():
                sample_digest = self._process_sample(loss_of)
                engine.check_state()
        with self._state_recorded(), self._processes.fail_together():
            engine.end()
        if not self._processes.is_single:
            self._processes.assert_equal(
                plan=digest_of_plan(engine.current_plan), step=step_digest, sample=sample_digest,
                weights=digest_of_weights(module),
            )  # fmt: skip
        return torch.zeros((), device=module.device, requires_grad=True)

    @property
    def _t(self) -> int:
        return self._rounds.sampler.completed

    def _dry_run(self, loss_of: LossOf, args: list[Any]) -> None:
        trainer, module, step = self._module.trainer, self._module, self._engine.step
        attributes, step.public = refusals.kept_numbers(module), public_record(trainer)
        refusals.refuse_hooks(module)
        last_position = self._rounds.sampler.last_position()
        last_round = muted_logging.as_in_round(trainer, self._plan.rounds - 1, last_position, args)
        with muted_logging.signals_deferred(trainer):
            dry_run(step, self._rounds, loss_of, module, last_round)
        refusals.refuse_kept_losses(module, attributes, step.mode != TRACED)
        refusals.refuse_monitors(trainer, module, self._logged, self._validated)

    @contextmanager
    def _state_recorded(self) -> Iterator[None]:
        """Records in the ledger that the training step kept state, which voids the guarantee."""
        try:
            yield
        except StateFound as found:
            if self._t:
                since = f"the bound may not have held since round {found.last_clean_round + 1}"
                self._ledger.not_private(f"{since} ({found})")
            raise

    def _process_sample(self, loss_of: LossOf) -> int:
        """Adds this process's part of the sample; returns the sample's digest."""
        engine, device = self._engine, self._module.device
        for position, parts in self._rounds.sample(device, engine.step.graphs.versions):
            if position.first:
                epoch = position.epoch + self._rounds_lost
                self._ledger.sample(self._plan.at_round(self._t).sampling.event(self._plan.n, epoch))
                engine.begin(self._t)
            for records in parts:
                if isinstance(records, FailedRecord):
                    engine.skip(1, records.reason)
                    continue
                try:
                    records = records.to(device)
                except Exception as error:
                    engine.skip(records.size, error)
                else:
                    with muted_logging.signals_deferred(self._module.trainer):
                        engine.add_chunk(loss_of, records.batch, records.size)
        return position.digest


CPU_BATCH = 640
FIRST_ON_GPU = 16  # also the result where no other size can be tried
_LARGEST_SAMPLE = 1.25  # times q·n; a larger chunk is of no use
_MAX_MEMORY = 0.8  # of a GPU's, since records vary and optimizers allocate their state later


def first_batch(device: torch.device) -> int:
    return FIRST_ON_GPU if device.type == "cuda" else CPU_BATCH


def largest_fitting_batch(
    plan: PrivacyPlan, module: pl.LightningModule, loss_of: Callable[[Any], Tensor], trainer: pl.Trainer
) -> int:
    """The largest power of two of records, up to a sample's size, whose pass fits into memory."""
    record = public_record(trainer)
    if record is None:
        return FIRST_ON_GPU
    leaves, structure = flattened(record)
    limit = math.ceil(_LARGEST_SAMPLE * plan.sampling.q * plan.n)

    def attempt(size: int) -> None:
        engine = PrivateRound(plan, module, GaussianNoise(None), compiled=False)  # type: ignore[arg-type]
        engine.begin()
        copies = [leaf.expand(size, *leaf.shape).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        records = RecordBatch(size, structure.unflatten(copies)).to(module.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.add_chunk(loss_of, records.batch, size)
        if torch.cuda.max_memory_allocated(module.device) > _MAX_MEMORY * torch.cuda.mem_get_info(module.device)[1]:
            raise torch.OutOfMemoryError

    try:
        return double_while_fitting(attempt, limit)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def double_while_fitting(attempt: Callable[[int], None], limit: int) -> int:
    """The last size of 16, 32, …, until `limit` is reached, for which `attempt` does not run out of memory; 16 if an
    attempt fails for another reason."""
    size = FIRST_ON_GPU
    try:
        attempt(size)
        while size < limit:
            attempt(2 * size)
            size *= 2
    except torch.OutOfMemoryError:
        return size
    except Exception:  # the validation set's records are not those of training_step
        return FIRST_ON_GPU
    return size


def public_record(trainer: pl.Trainer) -> Any:
    """The first record of the validation set, as a batch of one; None: there is none."""
    try:
        loader = validation_loader(trainer)
        if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.collate_fn is None:
            return None
        return loader.collate_fn([loader.dataset[0]])
    except Exception:  # the set is empty, or a batch of one cannot be collated
        return None
