"""The Lightning callback that carries out a privacy plan."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn

from dpexp._lightning_compat import replace_training_loader, training_loader
from dpexp.accounting.coverage import check_covered, check_delta, check_names
from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError, positive_integer
from dpexp.privacy import muted_logging, refusals
from dpexp.privacy.distributed import (
    Processes,
    SharedLedger,
    digest_of_plan,
    disable_gradient_averaging,
    ledger_of,
    restore_strategy,
)
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.normalization import (
    RunningNorm,
    power_iteration,
    private_norm_layers,
    refuse_unreleased,
    spectral_norms,
)
from dpexp.privacy.plan.adaptive_clipping import AdaptiveState
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import prepare
from dpexp.privacy.private_metrics import UNCLIPPED, GradientSignal, MetricEstimates
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.running_epsilon import RunningEpsilon
from dpexp.privacy.sampling.loader import RoundLoader, SealedSample
from dpexp.privacy.training_step import PrivateTrainingStep, first_batch


class PrivacyCallback(pl.Callback):
    """Trains any LightningModule by DP-SGD, as `plan` says.

    The outputs of a fit (weights, released metrics, checkpoints, logs) satisfy the (ε, δ) of its ledger; running times
    are not covered. Training code is trusted to be honest but may contain mistakes: a step found to carry information
    from one record to another is refused.

    The training loader yields the plan's samples, and from `on_before_optimizer_step` on `p.grad` is the noisy average.
    Each round is in the ledger before its release is used. Released metrics are logged as `private/…` and kept in
    `estimates`; `signals` has the signal-to-noise history of the gradients. Private preprocessing runs before the first
    round. Several processes (strategy ddp) train the same model as one process would.

    Args:
        plan: from `make_plan`, for this module.
        ledger: path of the ledger file; must not exist unless the fit resumes from a checkpoint.
        delta: log the spent `epsilon` at this δ after 1, 2, 4, 8, … rounds and about 20 times a run. Progress bars
            show ε as of the next of these rounds.
        accountant: name of the accountant of this `epsilon`.
        max_physical_batch_size: records processed at once; affects memory and speed only. None: on a GPU, as many as
            fit.
        compile: compile a traced step by torch's inductor; None: if that saves at least three times its cost.
        noise_seed: makes sampling and noise reproducible, and not private towards anyone who knows the seed.
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
            positive_integer("trainer.max_physical_batch_size", max_physical_batch_size)
        if delta is not None:
            check_delta(delta)
            check_names([accountant])
            check_covered(plan.sampling.name, plan.adjacency, accountant)
        self.plan = plan
        self.ledger_path = Path(ledger)
        self.readings = RunningEpsilon(plan, delta, accountant) if delta is not None else None
        self.max_physical_batch_size = max_physical_batch_size
        self.compile, self.compiling = compile, ""  # the decision and its reason
        self.unsafe_diagnostics = unsafe_diagnostics
        self.estimates = MetricEstimates()
        self.signals = GradientSignal()
        self.adaptive_state = AdaptiveState(plan.adaptive) if plan.adaptive else None
        self.rounds_done = 0
        self._noise_seed = noise_seed
        self._position: dict[str, Any] | None = None  # in the ledger, of the checkpoint resumed from
        self._preprocessed = 0  # completed preprocessing steps
        self._preprocessing: Iterator[None] = iter(())
        self._sample_pending = False  # a sample was drawn but not processed
        self._released = False  # in this round
        self._logged: set[str] = set()  # names logged by training_step
        self._validated: set[str] = set()  # names logged by the validation before training
        self._until_closed = ExitStack()  # undoes replacements
        self._metrics: dict[str, float] = {}  # released in this round
        self._indicators = torch.zeros(0)  # released averages for adaptive clipping
        self._norm_layers: list[RunningNorm] = []
        self._spectral: list[Any] = []
        self._rounds: RoundLoader | None = None
        self._ledger: LedgerWriter | SharedLedger | None = None
        self._processes = Processes()
        self._engine: PrivateRound | None = None
        self._step: PrivateTrainingStep | None = None

    @property
    def current_plan(self) -> PrivacyPlan:
        """The plan of the current round, or of the next one between rounds."""
        plan = self.plan.at_round(self.rounds_done)
        return self.adaptive_state.plan_of_round(plan) if self.adaptive_state else plan

    @property
    def ledger_opened(self) -> bool:
        """Whether a ledger was opened."""
        return self._ledger is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refusals.refuse_callbacks(trainer)
            steps = refusals.check_length(trainer, self.plan)
            self._until_closed.enter_context(patch.object(type(trainer), "estimated_stepping_batches", steps))
            disable_gradient_averaging(trainer, pl_module)
            self._replace_step(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._processes = processes = Processes.of(trainer)
        sampling, dealing, noise, randomness = streams = [KeyStream() for _ in range(4)]
        resume = trainer.ckpt_path is not None
        max_records = self.max_physical_batch_size or first_batch(pl_module.device)
        with processes.fail_together():
            refusals.refuse_settings(trainer, pl_module, self.plan.rounds)
            if self.unsafe_diagnostics:
                processes.refuse_several_processes("diagnostics=unsafe shows one process's records")
            refuse_unreleased(pl_module, self.plan)
            refusals.refuse_other_sizes(pl_module, self.plan)
            self._norm_layers, self._spectral = [*private_norm_layers(pl_module)], spectral_norms(pl_module)
            loader = training_loader(trainer)
            rounds = RoundLoader(loader, self.plan, max_records, sampling, randomness, processes, dealing)
            self._engine = PrivateRound(
                self.plan, pl_module, GaussianNoise(noise), self.unsafe_diagnostics, self.adaptive_state, processes,
                max(1, max_records // self.plan.privacy_unit.max_examples_in_round), rounds.training_data.memory,
                self.compile if self.compile is not None or processes.is_single else False,
            )  # fmt: skip
            if resume and self._position is None:
                raise ConfigError(refusals.NO_POSITION.format(checkpoint=trainer.ckpt_path, ledger=self.ledger_path))
        processes.assert_equal(plan=digest_of_plan(self.plan), records=rounds.digest)
        header = (
            self.plan.adjacency, self.plan.sampling_events(), resume, self._position, self._not_private_reason(),
            self.plan.privacy_unit.to_header(),
        )  # fmt: skip
        self._ledger = ledger_of(processes, lambda: LedgerWriter(self.ledger_path, *header))
        begun = self._ledger.ledger.training_rounds
        if self.readings:
            self.readings.begin(self._ledger.ledger, self.rounds_done)
        if self._noise_seed is not None:
            own = "randomness" if processes.is_main else f"randomness of process {processes.rank}"
            for purpose, stream in zip(("sampling", "dealing", "noise", own), streams, strict=True):
                stream.key = KeyStream.known(self._noise_seed, purpose, begun).key
        processes.share(sampling)
        processes.share(dealing)
        if self.plan.preprocessing:
            self._preprocessing = prepare(
                pl_module, self.plan, loader, max_records, self._ledger, noise, randomness, self._preprocessed,
                processes,
            )  # fmt: skip
        self._rounds, rounds.sampler.completed = rounds, self.rounds_done
        self._step = PrivateTrainingStep(
            self.plan, pl_module, self._engine, rounds, self._ledger, processes, begun - self.rounds_done,
            self.max_physical_batch_size is None and pl_module.device.type == "cuda", self._logged, self._validated,
        )  # fmt: skip
        replace_training_loader(trainer, rounds)

    def _not_private_reason(self) -> str | None:
        if self._noise_seed is not None:
            return "the noise seed is known"
        return "unsafe diagnostics" if self.unsafe_diagnostics else None

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated.clear()
        self._validated.update(trainer.callback_metrics)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._processes.fail_together():
            refusals.refuse_optimizers(trainer, pl_module)
        for _ in self._preprocessing:
            self._preprocessed += 1
        muted_logging.mute(pl_module, self._logged)
        trainer.should_stop = trainer.should_stop or self.rounds_done >= self.plan.rounds

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.rounds_done >= self.plan.rounds:
            raise ConfigError(f"the plan's {self.plan.rounds} rounds are spent; training beyond them is refused.")
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} was set during training, so that "
                "not every round would release its average; remove the GradientAccumulationScheduler."
            )
        self._sample_pending, self._released = True, False
        if self._spectral:
            power_iteration(self._spectral)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._ledger and self._engine
        released = self._engine.release(self._ledger)
        self._metrics = self.estimates.add(self._engine.current_plan, self.rounds_done + 1, released)
        self.signals.add(self._engine.current_plan, self.rounds_done + 1, released)
        if self.adaptive_state:
            self._indicators = released[value_key(UNCLIPPED)]
        for layer in self._norm_layers:
            if (key := value_key(str(layer.metric_name))) in released:
                layer.update(released[key])
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
            self._metrics |= self.adaptive_state.record_and_update(
                self._engine.current_plan, self._indicators, self.rounds_done + 1, history
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
        """Logs ε at the same steps as validation metrics, so that charts can use it as x axis."""
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
        restore_strategy(trainer)
        self._close(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self._ledger is not None:
            self._ledger.sync()  # a checkpoint's rounds must be on disk before it is
        position = self._ledger.position if self._ledger is not None else self._position
        multipliers = self.adaptive_state.multipliers if self.adaptive_state else []
        return {
            "completed": self.rounds_done, "prepared": self._preprocessed, "ledger": position, "bounds": multipliers,
            "values": self.estimates.history, "signals": self.signals.history, "compiled": self.compile,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds_done, self._position = state_dict["completed"], state_dict.get("ledger")
        self._preprocessed = state_dict["prepared"]
        self.estimates = MetricEstimates(state_dict["values"])
        self.signals = GradientSignal(state_dict["signals"])
        if self.adaptive_state:
            self.adaptive_state.restore(state_dict["bounds"])
        if self.compile is None:
            self.compile = state_dict["compiled"]
        self._ledger = None

    def _replace_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        training_step = pl_module.training_step

        @wraps(training_step)
        def private_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.validating or trainer.sanity_checking:
                return training_step(batch, *args, **kwargs)
            if not isinstance(batch, SealedSample) or not self._sample_pending:
                raise ConfigError(
                    "training_step was called outside the plan's rounds, or twice in one; each would be a release."
                )
            self._sample_pending = False
            assert self._step and self._engine
            first = self._engine.step.mode is None
            loss = self._step(training_step, [*args], kwargs)
            if first:
                compiling = self._engine.step.graphs.compiling
                self.compile, self.compiling = compiling.decided, compiling.reason
            return loss

        self._until_closed.enter_context(patch.object(pl_module, "training_step", private_step))

    def _close(self, pl_module: pl.LightningModule) -> None:
        self._until_closed.close()
        muted_logging.unmute(pl_module)
        if self._ledger is not None:
            self._ledger.close()
        if self._rounds is not None:
            self._rounds.close()
        if self._engine is not None:
            self._engine.close()
        self._rounds = self._engine = self._step = None
