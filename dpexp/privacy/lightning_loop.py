"""What private rounds need of a Lightning Trainer: muted logging, and a way to look as in another round."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from dpexp._lightning_compat import pl
from dpexp.accounting.rounding import up
from dpexp.privacy import refusals
from dpexp.privacy.gradients.training_step import TrainingStep, log_privately
from dpexp.privacy.loop import TrainingLoop, later_settings
from dpexp.privacy.physical_batch import largest_fitting_batch, public_record
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.round import RoundEngine
from dpexp.privacy.running_epsilon import RunningEpsilon


class LightningLoop(TrainingLoop):
    """A Trainer and its module, for one fit (see `dpexp.privacy.loop`).

    Attributes:
        logged: names that training_step logged, whose values are dropped.
        validated: names that the validation before training logged.
        args: of training_step after the batch, in the present round.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, plan: PrivacyPlan, low_memory: bool) -> None:
        super().__init__()
        self._trainer, self._module, self._plan, self._low_memory = trainer, module, plan, low_memory
        self.logged: set[str] = set()
        self.validated: set[str] = set()
        self.args: list[Any] = []
        self._log = partial(log_privately, self.logged)  # the same each time: a step is traced again if it changes

    def mute(self) -> None:
        """Replaces the module's `log` until `unmute`, so that what hooks log of a round is dropped.

        `training_step` runs on copies of the module, whose `log` drops values as well; the metrics of torchmetrics that
        it updates are theirs, and those of the module itself stay empty.
        """
        self._module.log = self._log  # type: ignore[method-assign]

    def log_released(self, name: str, value: float, **options: Any) -> None:
        """Logs a released or unsafe value by the `log` of the module's class, since its own is muted."""
        type(self._module).log(self._module, name, value, on_step=True, on_epoch=False, **options)

    def log_diagnostics(self, engine: RoundEngine) -> None:
        """Logs the last sample's size, mean loss, median norms and fractions clipped, all of them not private."""
        observed = engine.observations
        sizes = sum(len(chunk["loss"]) for chunk in observed)
        values: dict[str, float] = {"unsafe/sample_size": float(sizes)}
        if sizes:
            values["unsafe/train_loss"] = float(torch.cat([chunk["loss"] for chunk in observed]).float().mean())
        for group in engine.current_plan.groups:
            norms = [chunk[key] for chunk in observed if (key := f"norm/{group.name}") in chunk]
            if norms:
                joined = torch.cat(norms)
                values[f"unsafe/median_norm/{group.name}"] = float(joined.median())
                values[f"unsafe/clip_fraction/{group.name}"] = float((joined > group.S).float().mean())
        for name, value in values.items():
            self.log_released(name, value)

    def warn_of_early_end(self, done: int, readings: RunningEpsilon | None) -> None:
        """Warns if the Trainer ends before the plan's rounds are done, of which `done` were before this fit."""
        trainer, plan = self._trainer, self._plan
        earlier = done - trainer.global_step  # by another Trainer, whose count of steps is not this one's
        rounds = min(plan.rounds, earlier + refusals.rounds_to_train(trainer, plan))
        if rounds < plan.rounds:
            epsilon = up(readings.after(rounds), 4) if readings else "unknown without a delta"
            warnings.warn(
                f"trainer.max_epochs={trainer.max_epochs} with max_steps={trainer.max_steps} ends the training after "
                f"{rounds} of the plan's {plan.rounds} rounds, at ε = {epsilon}. The noise was calibrated for all of "
                "them: plan fewer, which need less noise, unless the training will go on."
            )

    def in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        return partial(_as_in_round, self._trainer, t, place, self.args)

    def public_record(self) -> Any:
        return public_record(self._trainer)

    def largest_fitting_batch(self, step: TrainingStep) -> int | None:
        return largest_fitting_batch(self._plan, step, self._trainer, self._low_memory)

    def readers(self) -> list[tuple[Any, Sequence[str]]]:
        callbacks: Sequence[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        foreign = [one for one in callbacks if not type(one).__module__.startswith(refusals.OURS)]
        return [(one, refusals.HOOKS) for one in (self._module, *foreign)]

    def refuse_monitors(self) -> None:
        refusals.refuse_monitors(self._trainer, self._module, self.logged, self.validated)


def unmute(module: pl.LightningModule) -> None:
    """Gives a module its own `log` back."""
    module.__dict__.pop("log", None)


@contextmanager
def _as_in_round(trainer: pl.Trainer, t: int, place: tuple[int, int], args: list[Any]) -> Iterator[None]:
    """Within, the Trainer looks as in round `t` at (epoch, batch index).

    All that differs in another round is changed, so that a step whose trace depends on it is noticed: the counters,
    whether the batch is an epoch's last, the optimizers' settings, and batch_idx, the first of `args`, which are those
    of training_step after the batch.
    """
    loop, (epoch, batch) = trainer.fit_loop, place
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    batches = loop.epoch_loop.batch_progress.current
    counts = [(loop.epoch_progress.current, epoch), (steps, t), (batches, batch)]
    before = [dict(vars(count)) for count, _ in counts]
    original_args, is_last = [*args], loop.epoch_loop.batch_progress.is_last_batch
    try:
        for count, number in counts:
            vars(count).update(dict.fromkeys(vars(count), number))
        loop.epoch_loop.batch_progress.is_last_batch = not is_last
        args[:1] = [batch] if args else []
        with later_settings(trainer.optimizers):
            yield
    finally:
        for (count, _), was in zip(counts, before, strict=True):
            vars(count).update(was)
        loop.epoch_loop.batch_progress.is_last_batch = is_last
        args[:] = original_args
