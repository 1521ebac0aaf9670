"""The Lightning callback that carries out a privacy plan."""

import math
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from dpexp.accounting.accountants import check_delta, check_names, epsilon
from dpexp.accounting.claims import check_claim
from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError
from dpexp.privacy.engine.engine import Engine, records
from dpexp.privacy.noise import GaussianNoise, derived_seed
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.refusals import refuse_mixing_layers, refuse_mixing_modules
from dpexp.privacy.sampling import Chunk, RoundSampler

_NEVER = sys.maxsize
EPSILON_READINGS = 20


class PrivacyCallback(pl.Callback):
    """Trains any LightningModule privately, as `plan` says.

    It replaces the training loader's sampler by the plan's, `training_step`'s gradients by the mechanisms'
    releases, and writes each round to the ledger before its result is used. What `training_step` logs is
    dropped, since it was computed from single records without noise. The noisy average is in `p.grad` from
    `on_before_optimizer_step` on: whatever optimizer, scheduler or gradient clipping follows is post-processing.

    Args:
        plan: made by `make_plan` for this module.
        ledger: path of the ledger file; must not exist, unless the fit resumes from a checkpoint.
        delta: with it, `epsilon` spent so far is logged (and shown in the progress bar)
            after 1, 2, 4, 8, … rounds and about 20 times a run.
        accountant: which one computes it.
        physical_batch: records processed at once. Memory and speed only; changes nothing that is computed.
        noise_seed: makes sampling and noise reproducible, which voids privacy towards whoever knows the seed.
        unsafe_diagnostics: log training loss, norms, clip fractions and sample sizes, which are private.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: str | Path,
        *,
        delta: float | None = None,
        accountant: str = "pld",
        physical_batch: int = 256,
        noise_seed: int | None = None,
        unsafe_diagnostics: bool = False,
    ) -> None:
        if physical_batch < 1:
            raise ConfigError(f"trainer.physical_batch={physical_batch} must be at least 1.")
        if delta is not None:
            check_delta(delta)
            check_names([accountant])
            check_claim(plan.sampling.name, plan.adjacency, accountant)
        self.plan = plan
        self.ledger_path = Path(ledger)
        self.delta = delta
        self.accountant = accountant
        self.physical_batch = physical_batch
        self.unsafe_diagnostics = unsafe_diagnostics
        self.epsilon = 0.0
        self.completed = 0
        self._noise_seed = noise_seed
        self._reading_every = math.ceil(plan.rounds / EPSILON_READINGS)
        self._read_at = 0
        self._rounds_undone = 0  # rounds in the ledger that the checkpoint resumed from does not know
        self._chunk: Chunk | None = None
        self._unprocessed: Chunk | None = None
        self._mixing_tried = False
        self._sampler: RoundSampler | None = None
        self._ledger: LedgerWriter | None = None
        self._engine: Engine | None = None

    # Before training

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_settings(trainer, pl_module)
        refuse_mixing_layers(pl_module)
        sampler_generator = torch.Generator()
        if self._noise_seed is None:
            sampler_generator.seed()
        else:
            sampler_generator.manual_seed(derived_seed(self._noise_seed, "sampling", self.completed))
        noise_seed = None if self._noise_seed is None else derived_seed(self._noise_seed, "noise", self.completed)
        self._engine = Engine(self.plan, pl_module, GaussianNoise(noise_seed), observe=self.unsafe_diagnostics)
        # Lightning asks its data source for the loader after this hook; there is no public way to replace it.
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        self._sampler = _sampler_for(loader, self.plan, self.physical_batch, sampler_generator)
        self._sampler.completed = self.completed
        source.instance, source.name = _with_sampler(loader, self._sampler), ""
        self._ledger = LedgerWriter(
            self.ledger_path, self.plan.adjacency, self.plan.sampling_events(), resume=trainer.ckpt_path is not None
        )
        self._rounds_undone = len(self._ledger.ledger) - self.completed
        if self._rounds_undone < 0:
            raise ConfigError(
                f"ledger={self.ledger_path} holds {len(self._ledger.ledger)} rounds, but the checkpoint was made after "
                f"{self.completed}; resume with the ledger of the run that made it."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_optimizers(trainer, pl_module)
        self._replace_step(pl_module)
        _silence(pl_module)

    # One round

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._sampler and self._ledger and self._engine
        if self.completed >= self.plan.rounds:
            raise ConfigError(f"the plan's {self.plan.rounds} rounds are spent; training beyond them is refused.")
        if not self._sampler.pending:
            raise ConfigError("the training batch did not come from the plan's sampler.")
        self._chunk = self._unprocessed = self._sampler.pending.popleft()
        if self._chunk.first:
            epoch = self._chunk.epoch + self._rounds_undone
            self._ledger.sample(self.plan.at(self.completed).sampling.event(self.plan.n, epoch))
            self._engine.start(self.completed)
        trainer.accumulate_grad_batches = 1 if self._chunk.last else _NEVER

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._ledger and self._engine and self._chunk
        if not self._chunk.last:
            raise ConfigError("Lightning stepped in the middle of a sample; every sample gets one step.")
        released = self._engine.release(self._ledger)
        for name, parameter in pl_module.named_parameters():
            parameter.grad = released[name].to(parameter.dtype) if name in released else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._sampler and self._ledger and self._engine and self._chunk
        if not self._chunk.last:
            return
        self.completed = self._sampler.completed = self.completed + 1
        done = self.completed >= self.plan.rounds
        early = self.completed.bit_count() == 1
        if self.delta is not None and (early or done or self.completed % self._reading_every == 0):
            self._read_epsilon(trainer)
            type(pl_module).log(
                pl_module, "epsilon", self.epsilon, on_step=True, on_epoch=False, prog_bar=True, logger=False
            )
        if self.unsafe_diagnostics:
            _log_diagnostics(pl_module, self._engine)
        trainer.should_stop = trainer.should_stop or done

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("log", None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """ε is logged at the same steps as validation metrics, so that a chart can have it as its x axis."""
        if trainer.state.fn == TrainerFn.FITTING:
            _silence(pl_module)
        if self.delta is not None and self.completed != self._read_at:
            self._read_epsilon(trainer)

    def _read_epsilon(self, trainer: pl.Trainer) -> None:
        assert self._ledger and self.delta is not None
        self._read_at = self.completed
        self.epsilon = epsilon(self._ledger.ledger, self.delta, self.accountant)
        for logger in trainer.loggers:
            logger.log_metrics({"epsilon": self.epsilon}, step=self.completed)

    # Afterwards

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self._ledger is not None:
            self._ledger.sync()  # no checkpoint may outlive the rounds that it knows of
        return {"completed": self.completed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.completed = state_dict["completed"]

    def _replace_step(self, pl_module: pl.LightningModule) -> None:
        training_step = pl_module.training_step
        engine = self._engine
        assert engine

        @wraps(training_step)
        def private_step(batch: Any, *args: Any, **kwargs: Any) -> Tensor:
            chunk, self._unprocessed = self._unprocessed, None
            if chunk is None:
                raise ConfigError(
                    "the optimizer evaluates training_step more than once a step, and each time would be another "
                    "release; choose one that does not, unlike LBFGS."
                )
            leaves, structure = records(batch, chunk.size)
            if chunk.size > 1 and not self._mixing_tried:
                self._mixing_tried = True
                two = tree_unflatten([leaf if leaf is None else leaf[:2] for leaf in leaves], structure)
                refuse_mixing_modules(pl_module, lambda part: training_step(part, *args, **kwargs), two)
            engine.accumulate(
                lambda record: _loss(training_step(record, *args, **kwargs)), batch, chunk.size, chunk.empty
            )
            return torch.zeros((), device=pl_module.device, requires_grad=True)

        pl_module.training_step = private_step  # type: ignore[method-assign]

    def _close(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("training_step", None)
        pl_module.__dict__.pop("log", None)
        trainer.accumulate_grad_batches = 1
        if self._ledger is not None:
            self._ledger.close()


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(f"training_step must return a loss for every record; it returned {loss!r}.")
    return loss


def _silence(pl_module: pl.LightningModule) -> None:
    """What the module's training hooks log was computed from records without noise."""
    pl_module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]


def _log_diagnostics(pl_module: pl.LightningModule, engine: Engine) -> None:
    observed = engine.observations
    sizes = sum(len(chunk["loss"]) for chunk in observed)
    values: dict[str, float] = {"unsafe/sample_size": float(sizes)}
    if sizes:
        values["unsafe/train_loss"] = float(torch.cat([chunk["loss"] for chunk in observed]).float().mean())
    for group in engine.now.groups:
        norms = [chunk[key] for chunk in observed if (key := f"norm/{group.name}") in chunk]
        if norms:
            joined = torch.cat(norms)
            values[f"unsafe/median_norm/{group.name}"] = float(joined.median())
            values[f"unsafe/clip_fraction/{group.name}"] = float((joined > group.S).float().mean())
    for name, value in values.items():
        type(pl_module).log(pl_module, name, value, on_step=True, on_epoch=False)


def _sampler_for(loader: Any, plan: PrivacyPlan, physical_batch: int, generator: torch.Generator) -> RoundSampler:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"data: the training loader is a {type(loader).__name__}; sampling needs one DataLoader over "
            "a data set that can be indexed."
        )
    plain = (SequentialSampler, RandomSampler)
    if type(loader.sampler) not in plain or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigError(
            f"data: the training loader has a sampler of its own ({type(loader.sampler).__name__}), which the plan's "
            "would replace; choose records with torch.utils.data.Subset instead."
        )
    _refuse_mixing_collation(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    if plan.sampling.relies_on_n and size != plan.n:
        raise ConfigError(
            f"data.n={plan.n}, but the training set holds {size} records; sampling={plan.sampling.name} is only what "
            "is accounted if they are equal."
        )
    return RoundSampler(lambda t: plan.at(t).sampling, size, plan.rounds, physical_batch, generator)


def _refuse_mixing_collation(loader: DataLoader) -> None:
    """A record's row must not depend on the records that are collated beside it."""
    if len(loader.dataset) < 2 or loader.collate_fn is default_collate:  # type: ignore[arg-type]
        return
    first, second = loader.dataset[0], loader.dataset[1]
    alone, again, beside = (
        tree_leaves(loader.collate_fn(items)) for items in ([first], [first], [first, second])
    )  # fmt: skip
    for one, same, both in zip(alone, again, beside, strict=False):
        if not isinstance(one, Tensor) or not torch.equal(one, same):
            continue
        if one.shape != both[:1].shape or not torch.equal(one, both[:1]):
            raise ConfigError(
                "data: the training loader's collate_fn gives a record another row alone than beside others, so that "
                "clipping single rows would not bound it; collate each record by itself, to one fixed length."
            )


def _with_sampler(loader: DataLoader, sampler: RoundSampler) -> DataLoader:
    """The user's loader with its own data set, collation and workers, but the plan's samples."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _refuse_settings(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    if not pl_module.automatic_optimization:
        raise ConfigError(
            f"model: {type(pl_module).__name__} optimizes by hand (automatic_optimization=False), so a sample "
            "cannot be tied to one release; use automatic optimization."
        )
    for owner in (pl_module, getattr(trainer, "datamodule", None)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if owner is not None and is_overridden(hook, owner):
                raise ConfigError(
                    f"data: {type(owner).__name__}.{hook} sees whole batches, and may mix their records; do what it "
                    "does in the data set or in training_step, which see one record."
                )
    if trainer.world_size > 1:
        raise ConfigError(
            f"trainer.devices={trainer.world_size}: private training on several devices is not supported; use 1."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1: a sample is taken "
            "apart by trainer.physical_batch."
        )
    if trainer.precision == "16-mixed":
        raise ConfigError("trainer.precision=16-mixed scales gradients by the data; use bf16-mixed or 32-true.")
    limit = trainer.limit_train_batches
    whole = limit is None or (isinstance(limit, float) and limit == 1.0)
    if not whole or trainer.overfit_batches or trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigError(
            "limit_train_batches, overfit_batches and fast_dev_run would cut samples short; "
            "give sampling.steps instead."
        )


def _refuse_optimizers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    known = {id(parameter) for parameter in pl_module.parameters()}
    for optimizer in trainer.optimizers:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "optimizer: it holds a parameter that is not among the module's own, so no group releases it; "
                "register the layer that owns it as an attribute of the module."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer: LBFGS evaluates the loss several times a step, each of which would be another release; "
                "choose SGD, Adam or another that does so once."
            )
