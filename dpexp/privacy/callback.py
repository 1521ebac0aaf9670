"""The Lightning callback that carries out a privacy plan."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from dpexp._lightning_compat import replace_training_loader, training_loader
from dpexp.accounting.coverage import check_covered, check_delta, check_names
from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError, whole
from dpexp.privacy import muted_logging, unsupported
from dpexp.privacy.checks import StateFound, digest_of_weights
from dpexp.privacy.distributed import Processes, SharedLedger, digest_of_plan, give_back, ledger_of, take_over
from dpexp.privacy.dry_run import dry_run
from dpexp.privacy.gradients.per_example import loss_in
from dpexp.privacy.gradients.physical_batch import first_batch, largest_fitting_batch, public_record
from dpexp.privacy.gradients.step import TRACED
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.normalization import RunningNorm, iterate, private_norm_layers, refuse_unreleased, spectral_norms
from dpexp.privacy.plan.adaptive_clipping import AdaptiveState
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import prepare
from dpexp.privacy.private_metrics import UNCLIPPED, GradientSignal, MetricEstimates
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.running_epsilon import RunningEpsilon
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader, SealedSample


class PrivacyCallback(pl.Callback):
    """Trains any LightningModule privately, as `plan` says.

    Training code is taken to be honest, though mistaken perhaps: what is found to carry one record over to another is
    refused. Whoever sees what a fit gives away learns of one record no more than (ε, δ); times are not covered.

    The training loader gives the plan's samples, and `p.grad` is the noisy average from `on_before_optimizer_step` on;
    the ledger has each round before its result is used. Values that the plan releases are logged as `private/…` and
    kept in `estimates`; `signals` tells of the gradients. Preparations come before the first round, or from the
    checkpoint of a resumed fit. Several processes (strategy ddp) train as one would.

    Args:
        plan: made by `make_plan` for this module.
        ledger: path of the ledger file; must not exist, unless the fit resumes from a checkpoint.
        delta: for which the `epsilon` spent is logged after 1, 2, 4, 8, … rounds and about 20 times a run; progress
            bars show what will be spent at the next of these.
        accountant: which one computes it.
        max_physical_batch_size: records processed at once, for memory and speed only. None: on a GPU as many as fit.
        compile: whether a traced step is compiled (torch's inductor); None: where the plan's rounds save at least three
            times what that takes.
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
        max_physical_batch_size: int | None = 256,
        compile: bool | None = None,
        noise_seed: int | None = None,
        unsafe_diagnostics: bool = False,
    ) -> None:
        if max_physical_batch_size is not None:
            whole("trainer.max_physical_batch_size", max_physical_batch_size)
        if delta is not None:
            check_delta(delta)
            check_names([accountant])
            check_covered(plan.sampling.name, plan.adjacency, accountant)
        self.plan = plan
        self.ledger_path = Path(ledger)
        self.readings = RunningEpsilon(plan, delta, accountant) if delta is not None else None
        self.max_physical_batch_size = max_physical_batch_size
        self.compile, self.compiling = compile, ""  # whether; and why, once that is known
        self.unsafe_diagnostics = unsafe_diagnostics
        self.estimates = MetricEstimates()
        self.signals = GradientSignal()
        self.adaptive_state = AdaptiveState(plan.adaptive) if plan.adaptive else None
        self.rounds_done = 0
        self._noise_seed = noise_seed
        self._position: dict[str, Any] | None = None  # in the ledger, of the checkpoint resumed from
        self._rounds_undone = 0  # rounds in the ledger that the checkpoint resumed from does not know
        self._prepared = 0  # preparations that are done
        self._preparing: Iterator[None] = iter(())
        self._awaited = False  # a sample was begun and has not been processed
        self._released = False  # the round has
        self._fitted = True  # physical_batch is known
        self._logged: set[str] = set()  # names that training_step logs
        self._validated: set[str] = set()  # and that the validation before training did
        self._until_closed = ExitStack()  # what is put back in its place then
        self._metrics: dict[str, float] = {}  # of the values that the round released
        self._counts = torch.zeros(0)
        self._normalizing: list[RunningNorm] = []
        self._spectral: list[Any] = []
        self._rounds: RoundLoader | None = None
        self._ledger: LedgerWriter | SharedLedger | None = None
        self._processes = Processes()
        self._engine: PrivateRound | None = None

    @property
    def current_plan(self) -> PrivacyPlan:
        """The plan of the round that is under way, or comes next."""
        plan = self.plan.at_round(self.rounds_done)
        return self.adaptive_state.apply(plan) if self.adaptive_state else plan

    @property
    def ledger_opened(self) -> bool:
        """Whether a ledger was opened."""
        return self._ledger is not None

    # Before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            unsupported.refuse_callbacks(trainer)
            steps = unsupported.check_length(trainer, self.plan)
            self._until_closed.enter_context(patch.object(type(trainer), "estimated_stepping_batches", steps))
            take_over(trainer, pl_module)
            self._replace_step(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._processes = processes = Processes.of(trainer)
        sampling, dealing, noise, randomness = streams = [KeyStream() for _ in range(4)]
        resume = trainer.ckpt_path is not None
        at_once = self.max_physical_batch_size or first_batch(pl_module.device)
        self._fitted = self.max_physical_batch_size is not None or pl_module.device.type != "cuda"
        with processes.fail_together():
            unsupported.refuse_settings(trainer, pl_module, self.plan.rounds)
            if self.unsafe_diagnostics:
                processes.refuse_several_processes("diagnostics=unsafe shows one process's records")
            refuse_unreleased(pl_module, self.plan)
            unsupported.refuse_other_sizes(pl_module, self.plan)
            self._normalizing, self._spectral = [*private_norm_layers(pl_module)], spectral_norms(pl_module)
            loader = training_loader(trainer)
            rounds = RoundLoader(loader, self.plan, at_once, sampling, randomness, processes, dealing)
            self._engine = PrivateRound(
                self.plan, pl_module, GaussianNoise(noise), self.unsafe_diagnostics, self.adaptive_state, processes,
                max(1, at_once // self.plan.privacy_unit.max_examples_in_round), rounds.training_data.memory,
                self.compile if self.compile is not None or processes.is_single else False,
            )  # fmt: skip
            if resume and self._position is None:
                raise ConfigError(unsupported.NO_POSITION.format(checkpoint=trainer.ckpt_path, ledger=self.ledger_path))
        processes.assert_equal(plan=digest_of_plan(self.plan), records=rounds.digest)
        about = (
            self.plan.adjacency, self.plan.sampling_events(), resume, self._position, self._exposed(),
            self.plan.privacy_unit.to_header(),
        )  # fmt: skip
        self._ledger = ledger_of(processes, lambda: LedgerWriter(self.ledger_path, *about))
        begun = self._ledger.ledger.training_rounds
        self._rounds_undone = begun - self.rounds_done
        if self.readings:
            self.readings.begin(self._ledger.ledger, self.rounds_done)
        if self._noise_seed is not None:
            own = "randomness" if processes.is_main else f"randomness of process {processes.rank}"
            for purpose, stream in zip(("sampling", "dealing", "noise", own), streams, strict=True):
                stream.key = KeyStream.known(self._noise_seed, purpose, begun).key
        processes.share(sampling)
        processes.share(dealing)
        if self.plan.preprocessing:
            self._preparing = prepare(
                pl_module, self.plan, loader, at_once, self._ledger, noise, randomness, self._prepared, processes
            )
        self._rounds, rounds.sampler.completed = rounds, self.rounds_done
        replace_training_loader(trainer, rounds)

    def _exposed(self) -> str | None:
        if self._noise_seed is not None:
            return "the noise seed is known"
        return "unsafe diagnostics" if self.unsafe_diagnostics else None

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = {*trainer.callback_metrics}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._processes.fail_together():
            unsupported.refuse_optimizers(trainer, pl_module)
        for _ in self._preparing:
            self._prepared += 1
        muted_logging.mute(pl_module, self._logged)
        trainer.should_stop = trainer.should_stop or self.rounds_done >= self.plan.rounds

    # One round

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.rounds_done >= self.plan.rounds:
            raise ConfigError(f"the plan's {self.plan.rounds} rounds are spent; training beyond them is refused.")
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} came to be during training, so "
                "that not every round would release its average; remove the GradientAccumulationScheduler."
            )
        self._awaited, self._released = True, False
        if self._spectral:
            iterate(self._spectral)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._ledger and self._engine
        released = self._engine.release(self._ledger)
        self._metrics = self.estimates.add(self._engine.current_plan, self.rounds_done + 1, released)
        self.signals.add(self._engine.current_plan, self.rounds_done + 1, released)
        if self.adaptive_state:
            self._counts = released[value_key(UNCLIPPED)]
        for layer in self._normalizing:
            if (key := value_key(str(layer.given_as))) in released:
                layer.follow(released[key])
        for name, parameter in pl_module.named_parameters():
            parameter.grad = released[name].to(parameter.dtype) if name in released else None
        self._released = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._rounds and self._engine
        if not self._released:
            raise ConfigError(
                f"round {self.rounds_done} released no average, because the optimizer did not step through Lightning's "
                "hooks; let optimizer_step call optimizer.step(closure), and use no other Trainer on the module."
            )
        if self.adaptive_state:
            history = self.estimates.history
            self._metrics |= self.adaptive_state.move(
                self._engine.current_plan, self._counts, self.rounds_done + 1, history
            )
        self.rounds_done = self._rounds.sampler.completed = self.rounds_done + 1
        done = self.rounds_done >= self.plan.rounds
        if self.readings and self.readings.due(self.rounds_done):
            self._read_epsilon(trainer)
            muted_logging.log_released(pl_module, "epsilon", self.readings.shown, prog_bar=True, logger=False)
        for logger in trainer.loggers if self._metrics else ():
            logger.log_metrics(self._metrics, step=self.rounds_done)
        for name, value in self._metrics.items():
            if name.endswith("_moving_average"):
                muted_logging.log_released(pl_module, name, value, prog_bar=True, logger=False)
        if self.unsafe_diagnostics:
            muted_logging.log_diagnostics(pl_module, self._engine)
        trainer.should_stop = trainer.should_stop or done

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        muted_logging.unmute(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """ε is logged at the same steps as validation metrics, so that a chart can have it as its x axis."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        muted_logging.mute(pl_module, self._logged)
        if self.readings and self.rounds_done != self.readings.read_at:
            self._read_epsilon(trainer)

    def _read_epsilon(self, trainer: pl.Trainer) -> None:
        assert self._ledger and self.readings
        self.readings.read(self._ledger.ledger, self.rounds_done)
        for logger in trainer.loggers:
            logger.log_metrics({"epsilon": self.readings.epsilon}, step=self.rounds_done)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        give_back(trainer)
        self._close(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self._ledger is not None:
            self._ledger.sync()  # no checkpoint may outlive the rounds that it knows of
        position = self._ledger.position if self._ledger is not None else self._position
        factors = self.adaptive_state.multipliers if self.adaptive_state else []
        return {
            "completed": self.rounds_done, "prepared": self._prepared, "ledger": position, "bounds": factors,
            "values": self.estimates.history, "signals": self.signals.history, "compiled": self.compile,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds_done, self._position = state_dict["completed"], state_dict.get("ledger")
        self._prepared = state_dict.get("prepared", len(self.plan.preprocessing))
        self.estimates = MetricEstimates(state_dict.get("values"))
        self.signals = GradientSignal(state_dict.get("signals"))
        if self.adaptive_state:
            self.adaptive_state.restore(state_dict.get("bounds", []))
        if self.compile is None:
            self.compile = state_dict.get("compiled")
        self._ledger = None

    def _replace_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        training_step = pl_module.training_step

        @wraps(training_step)
        def private_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.validating or trainer.sanity_checking:
                return training_step(batch, *args, **kwargs)
            if not isinstance(batch, SealedSample) or not self._awaited:
                raise ConfigError(
                    "training_step was called outside the plan's rounds, or twice in one; each would be a release."
                )
            self._awaited = False
            assert self._rounds and self._engine
            engine_step, rounds, step = self._engine.step, self._rounds, 0
            with (
                self._noting_state(),
                self._processes.fail_together(),
                muted_logging.collectives_refused(),
                muted_logging.loggers_muted(trainer),
            ):
                converted, given = trainer.precision_plugin.convert_input, [*args]

                def loss_of(record: Any) -> Tensor:
                    return loss_in(lambda: training_step(converted(record), *given, **kwargs))

                if not self._fitted:
                    rounds.sampler.physical_batch = largest_fitting_batch(self.plan, pl_module, loss_of, trainer)
                    self._fitted = True
                if engine_step.mode is None:
                    kept, engine_step.public = unsupported.kept_numbers(pl_module), public_record(trainer)
                    unsupported.refuse_hooks(pl_module)
                    last = muted_logging.as_in_round(trainer, self.plan.rounds - 1, rounds.sampler.last_place(), given)
                    with muted_logging.signals_deferred(trainer):
                        dry_run(engine_step, rounds, loss_of, pl_module, last)
                    unsupported.refuse_kept_losses(pl_module, kept, engine_step.mode != TRACED)
                    unsupported.refuse_monitors(trainer, pl_module, self._logged, self._validated)
                    step = engine_step.digest
                    self.compile, self.compiling = engine_step.compiling.decided, engine_step.compiling.reason
                else:
                    engine_step.trace_again(loss_of, self.rounds_done, epoch_begins=bool(args) and args[0] == 0)
                draws = engine_step.mode != TRACED or engine_step.is_random or not rounds.only_rows
                with own_randomness(pl_module.device, rounds.randomness) if draws else nullcontext():
                    sample = self._process_sample(pl_module, loss_of)
                    self._engine.check_state()
            with self._noting_state(), self._processes.fail_together():
                self._engine.end()
            if not self._processes.is_single:
                now = digest_of_plan(self._engine.current_plan)
                self._processes.assert_equal(plan=now, step=step, sample=sample, weights=digest_of_weights(pl_module))
            return torch.zeros((), device=pl_module.device, requires_grad=True)

        self._until_closed.enter_context(patch.object(pl_module, "training_step", private_step))

    @contextmanager
    def _noting_state(self) -> Iterator[None]:
        """State that is found is noted in the ledger."""
        try:
            yield
        except StateFound as found:
            if self.rounds_done and self._ledger is not None:
                since = f"the bound may not have held since round {found.last_clean_round + 1}"
                self._ledger.not_private(f"{since} ({found})")
            raise

    def _process_sample(self, pl_module: pl.LightningModule, loss_of: Any) -> int:
        """Clips and adds up the sample's records, or this process's part of them; returns the sample's digest."""
        assert self._ledger and self._engine and self._rounds
        engine = self._engine
        for chunk, parts in self._rounds.sample(pl_module.device, engine.step.versions):
            if chunk.first:
                epoch = chunk.epoch + self._rounds_undone
                self._ledger.sample(self.plan.at_round(self.rounds_done).sampling.event(self.plan.n, epoch))
                engine.begin(self.rounds_done)
            for records in parts:
                if isinstance(records, FailedRecord):
                    engine.skip(1, records.reason)
                    continue
                try:
                    records = records.to(pl_module.device)
                except Exception as error:
                    engine.skip(records.size, error)
                else:
                    with muted_logging.signals_deferred(pl_module.trainer):
                        engine.add_chunk(loss_of, records.batch, records.size)
        return chunk.digest

    def _close(self, pl_module: pl.LightningModule) -> None:
        self._until_closed.close()
        muted_logging.unmute(pl_module)
        if self._ledger is not None:
            self._ledger.close()
        if self._rounds is not None:
            self._rounds.close()
        if self._engine is not None:
            self._engine.close()
        self._rounds = self._engine = None
