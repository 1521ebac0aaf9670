"""The Lightning callback that carries out a privacy plan."""

from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from dpexp._lightning_compat import TrainerFn, pl, refuse_mixed, replace_training_loader, training_loader
from dpexp.errors import ConfigError, checks_arguments
from dpexp.privacy import refusals
from dpexp.privacy.distributed import Processes, disable_gradient_averaging, restore_strategy
from dpexp.privacy.gradients.training_step import StandIn, TrainingStep
from dpexp.privacy.lightning_loop import LightningLoop, unmute
from dpexp.privacy.sampling.loader import SealedSample
from dpexp.privacy.training import PrivateTraining


@checks_arguments
class PrivacyCallback(PrivateTraining, pl.Callback):
    """Trains any LightningModule by DP-SGD, as `plan` says.

    In each *round*, as a step of the Trainer is called here, the plan's sampling draws a *sample* of *records* (by
    default a record is an example). The gradient of each record is clipped, noise is added to their sum, and what comes
    out is *released*: the optimizer may use it. Each release is written to the *ledger* first, from which (ε, δ) is
    computed: how much all outputs of the training together can tell of one record. docs/glossary.md has these words.

    What your code has to keep (the contract; docs/guarantee.md has it in full):

    - `training_step` is a function of one record, the weights and random numbers. It gets a batch of one record.
    - Its Python runs only while it is traced, on a copy of the module (a step that cannot be traced: for each record,
      on a copy of its own). A value that it reads besides, such as an attribute, is read then; what it stores in the
      copy is dropped.
    - The data set gives record i from row i and the global random generators alone.

    Then all that a fit gives away (weights, released metrics, checkpoints, logs) satisfies the (ε, δ) of its ledger;
    running times are not covered. A step that the trace shows to break the contract is refused, or runs one record at a
    time.

    In the order of Lightning's hooks:

    - `on_fit_start` opens the ledger, and replaces the training loader by the plan's samples. They are sealed: only the
      step sees records;
    - `on_train_start` runs private preprocessing, if there is any: the first releases;
    - `training_step` sums up the clipped gradients of the round's sample, and returns a constant;
    - from `on_before_optimizer_step` on, `p.grad` is the noisy average;
    - `on_train_batch_end` counts the round, and logs released metrics as `private/…`, which `estimates` keeps.

    Several processes (strategy ddp) train the same model as one process would.

    Examples:
        >>> import dpexp, torch
        >>> from pytorch_lightning import Trainer
        >>> sampling, target = dpexp.Poisson(sampling_rate=0.1, steps=5), dpexp.Target(epsilon=1.0, delta=1e-5)
        >>> plan = dpexp.make_plan(torch.nn.Linear(3, 1), n=100, sampling=sampling, target=target)
        >>> trainer = Trainer(callbacks=[dpexp.PrivacyCallback(plan, "ledger.jsonl")], logger=False, max_epochs=-1)

    Args:
        plan: from `make_plan`, for this module.
        ledger: path of the ledger file; must not exist unless the fit resumes from a checkpoint.
        delta: log the spent `epsilon` at this δ, by default the plan's, after 1, 2, 4, 8, … rounds and about 20 times a
            run. Progress bars show ε as of the next of these rounds.
        accountant: name of the accountant of this `epsilon`.
        max_physical_batch_size: records processed at once; affects memory and speed only. None: on a GPU, as many as
            fit.
        compile: compile a traced step by torch's inductor; None: if that saves at least three times its cost, in a
            single process.
        memory: "low" runs a traced step twice, with recomputation and not compiled: slower, and the same sums.
        noise_seed: makes sampling and noise reproducible, and not private towards anyone who knows the seed.
        unsafe_diagnostics: log training loss, norms, clip fractions and sample sizes, which are private.
        not_private_reason: why ε does not cover all that the run shows, for the ledger; by default, that the seed is
            known or diagnostics are unsafe, if so.
        pad_to: public lengths, to the next of which each record is padded by a `collate_fn` that pads, so that records
            are processed together; by default, for models of transformers, powers of two up to their positions.
    """

    _loop: LightningLoop  # of the present fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._loop = LightningLoop(trainer, pl_module, self.plan, self.options.memory == "low")
            refuse_mixed("trainer", trainer)
            refusals.refuse_callbacks(trainer)
            steps = refusals.rounds_to_train(trainer, self.plan)
            self._until_closed.enter_context(patch.object(type(trainer), "estimated_stepping_batches", steps))
            disable_gradient_averaging(trainer, pl_module)
            self._replace_step(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fit = self._begin(
            pl_module, training_loader(trainer), Processes.of(trainer), self._loop, trainer.ckpt_path,
            lambda: refusals.refuse_settings(trainer, pl_module, self.plan.rounds),
        )  # fmt: skip
        replace_training_loader(trainer, fit.samples)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._loop.validated = {*trainer.callback_metrics}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._fit
        with self._fit.processes.fail_together():
            refusals.refuse_optimizers(trainer, pl_module)
        self._loop.warn_of_early_end(self.rounds_done, self.readings)
        self._fit.preprocess()
        self._loop.mute()
        trainer.should_stop = trainer.should_stop or self.rounds_done >= self.plan.rounds

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} was set during training, so that "
                "not every round would release its average; remove the GradientAccumulationScheduler."
            )
        assert self._fit
        self._fit.begin_round()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._fit
        self._fit.release()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._fit
        present = self._fit.present
        if not present.released:
            raise ConfigError(
                f"round {self.rounds_done} released no average, because the optimizer did not step through Lightning's "
                "hooks; let optimizer_step call optimizer.step(closure), and use no other Trainer on the module."
            )
        self._fit.end_round()
        done = self.rounds_done >= self.plan.rounds
        if self.readings and self.readings.due(self.rounds_done):
            self._read_epsilon(trainer)
            self._loop.log_released("epsilon", self.readings.shown, prog_bar=True, logger=False)
        for logger in trainer.loggers if present.metrics else ():
            logger.log_metrics(present.metrics, step=self.rounds_done)
        for name, value in present.metrics.items():
            if name.endswith("_moving_average"):
                self._loop.log_released(name, value, prog_bar=True, logger=False)
        if self.options.unsafe_diagnostics:
            self._loop.log_diagnostics(self._fit.engine)
        trainer.should_stop = trainer.should_stop or done

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        unmute(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs ε at the same steps as validation metrics, so that charts can use it as x axis."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._loop.mute()
        if self.readings and self.rounds_done != self.readings.read_at:
            self._read_epsilon(trainer)

    def _read_epsilon(self, trainer: pl.Trainer) -> None:
        assert self._ledger and self.readings
        self.readings.read(self._ledger.ledger, self.rounds_done)
        for logger in trainer.loggers:
            logger.log_metrics({"epsilon": self.readings.epsilon}, step=self.rounds_done)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        restore_strategy(trainer)
        self._close()
        unmute(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()
        unmute(pl_module)
        if "multiple optimizers" in str(exception):  # Lightning recommends what is refused
            exception.add_note(f"dpexp: {refusals.ONE_OPTIMIZER}")

    def _replace_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replaces training_step, until the fit ends, by one that sums up a sample's clipped gradients."""
        training_step = pl_module.training_step
        bound = getattr(training_step, "__self__", None) is pl_module
        unbound: Any = training_step.__func__ if bound else training_step  # type: ignore[attr-defined]

        @wraps(training_step)
        def private_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.validating or trainer.sanity_checking:
                return training_step(batch, *args, **kwargs)
            if not isinstance(batch, SealedSample):
                raise ConfigError("training_step was called outside the plan's rounds; each call would be a release.")
            loop = self._loop
            loop.args = [*args]
            convert = trainer.precision_plugin.convert_input

            def call(own: StandIn, record: Any) -> Any:
                """The loss of one record, by a copy of the module."""
                given = [own.module] if bound else []
                return unbound(*given, convert(record), *loop.args, **kwargs)

            self._sum_sample(TrainingStep(call, pl_module, pl_module, unbound, logged=loop.logged))
            # Lightning calls backward() of a loss; the gradients are set in on_before_optimizer_step.
            return torch.zeros((), device=pl_module.device, requires_grad=True)

        self._until_closed.enter_context(patch.object(pl_module, "training_step", private_step))
