"""A private training, whichever loop runs it: what lasts from its first fit to its last.

Read `dpexp.privacy.fit` next: it has the rounds of one fit.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from dpexp._transformers_compat import trained_privately
from dpexp.errors import ConfigError
from dpexp.privacy import refusals
from dpexp.privacy.distributed import Processes
from dpexp.privacy.fit import Fit, FitOptions, Progress
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.loop import TrainingLoop
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.privacy.running_epsilon import RunningEpsilon


class PrivateTraining:
    """Carries out a plan in one fit or more; see `PrivacyCallback` and `Private`, which run it, for the arguments."""

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: str | Path,
        *,
        delta: float | None = None,
        accountant: str = "pld",
        max_physical_batch_size: int | None = 256,
        compile: bool | None = None,
        memory: str = "usual",
        noise_seed: int | None = None,
        unsafe_diagnostics: bool = False,
        not_private_reason: str | None = None,
        pad_to: Sequence[int] | None = None,
    ) -> None:
        self.options = FitOptions(
            max_physical_batch_size, memory, noise_seed, unsafe_diagnostics, not_private_reason, pad_to
        )
        if memory == "low" and compile:
            raise ConfigError("trainer.memory=low does not compile the step; leave trainer.compile at auto or false.")
        delta = plan.delta if delta is None else delta
        self.plan, self.delta, self.accountant = plan, delta, accountant
        self.ledger_path = Path(ledger)
        self.readings = RunningEpsilon(plan, delta, accountant) if delta is not None else None
        self.progress = Progress.at_start(plan, compile)
        self._ledger: Any = None  # the last fit's, closed or not; None: none began since a checkpoint was loaded
        self._fit: Fit | None = None  # the present one
        self._until_closed = ExitStack()  # closes ledger and fit, and gives back what was replaced

    @property
    def rounds_done(self) -> int:
        """Completed rounds. After a crash the ledger has more: their weights are lost, and what they cost is not."""
        return self.progress.rounds

    @property
    def estimates(self) -> MetricEstimates:
        """The released metrics."""
        return self.progress.estimates

    @property
    def current_plan(self) -> PrivacyPlan:
        """The plan of the current round, or of the next one between rounds."""
        plan, adaptive = self.plan.at_round(self.rounds_done), self.progress.adaptive
        return adaptive.plan_of_round(plan) if adaptive else plan

    @property
    def ledger_opened(self) -> bool:
        """Whether a ledger was opened."""
        return self._ledger is not None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume, by the keys that checkpoints have; its rounds are on disk."""
        progress, position = self.progress, self.progress.position
        if self._ledger is not None:
            self._ledger.sync()
            position = self._ledger.position
        multipliers = progress.adaptive.multipliers if progress.adaptive else []
        return {
            "completed": progress.rounds, "prepared": progress.preprocessed, "ledger": position, "bounds": multipliers,
            "values": progress.estimates.history, "compiled": progress.compile,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from what `state_dict` returned, in the next fit.

        Raises:
            ConfigError: a fit is running. Its samples and noise continue from the rounds that it has done. The
                accountant of a policy whose samples have an order, as partitions have, would then be wrong.
        """
        if self._fit is not None:
            raise ConfigError(
                "load_state_dict was called while rounds are running; end their loop first, by break or by close() of "
                "what private.rounds returned."
            )
        progress = self.progress
        progress.rounds, progress.position = state_dict["completed"], state_dict.get("ledger")
        progress.preprocessed = state_dict["prepared"]
        progress.estimates = MetricEstimates(state_dict["values"])
        if progress.adaptive:
            progress.adaptive.restore(state_dict["bounds"])
        if progress.compile is None:
            progress.compile = state_dict["compiled"]
        self._ledger = None

    def _begin(
        self,
        module: nn.Module,
        loader: Any,
        processes: Processes,
        loop: TrainingLoop,
        checkpoint: Any,
        check: Callable[[], None],
    ) -> Fit:
        """Opens the ledger and prepares the rounds; nothing is released.

        Args:
            checkpoint: the one that was loaded, for messages; None: none was.
            check: refuses more, in all processes together.
        """
        # A fit begins a training, or resumes it: after a checkpoint, or where an earlier fit of this object ended.
        after_checkpoint = checkpoint is not None
        after_earlier_fit = not after_checkpoint and self._ledger is not None
        if after_earlier_fit:
            self.progress.position = self._ledger.position
        self._until_closed.enter_context(trained_privately(module))
        refusals.warn_of_compiled(module)
        refusals.warn_of_noise(self.plan)

        def check_all() -> None:
            check()
            if after_checkpoint and self.progress.position is None:
                raise ConfigError(refusals.NO_POSITION.format(checkpoint=checkpoint, ledger=self.ledger_path))

        fit = Fit(self.plan, self.options, self.progress, loop, module, loader, processes, check_all)
        self._fit = fit
        self._until_closed.callback(fit.close)
        done_before = self.rounds_done  # `open` may raise it: a sampling policy may not go on within an epoch
        self._ledger = fit.open(self.ledger_path, resumes=after_checkpoint or after_earlier_fit)
        self._until_closed.callback(self._ledger.close)
        refusals.warn_of_lost_rounds(self.plan, self.rounds_done - done_before, self.rounds_done)
        if after_earlier_fit:
            refusals.warn_of_no_rounds(self.plan, self.rounds_done)
        if self.readings:
            self.readings.begin(self._ledger.ledger, self.rounds_done)
        fit.prepare()
        return fit

    def _sum_sample(self, step: TrainingStep) -> None:
        assert self._fit
        if self._fit.plan is not self.plan:
            raise ConfigError("the plan was replaced during training; begin another training with the other plan.")
        self._fit.sum_sample(step)

    def _close(self) -> None:
        self._fit = None
        self._until_closed.close()  # calls each of its callbacks, also after one was interrupted
