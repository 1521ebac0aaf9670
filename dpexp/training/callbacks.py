"""Learning-rate schedules, and Lightning callbacks: checkpoints, averaged weights, signals, early failure."""

import copy
import math
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpexp._lightning_compat import TrainerFn, checkpoint_of, is_overridden, isolate_rng, pl, validation_loader
from dpexp.errors import ConfigError


def cosine(optimizer: Optimizer, rounds: int, warmup: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's learning rate to 0, after a linear warm-up over the fraction `warmup` of the
    rounds, in [0, 1)."""
    rise = _warmup_rounds(rounds, warmup)

    def factor(t: int) -> float:
        return (t + 1) / (rise + 1) if t < rise else (1 + math.cos(math.pi * (t - rise) / max(1, rounds - rise))) / 2

    return LambdaLR(optimizer, factor)


def linear_warmup(optimizer: Optimizer, rounds: int, warmup: float = 0.1) -> LambdaLR:
    """A linear warm-up over the fraction `warmup` of the rounds, then the optimizer's learning rate."""
    rise = _warmup_rounds(rounds, warmup)
    return LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / (rise + 1)))


def _warmup_rounds(rounds: int, warmup: float) -> int:
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must lie in [0, 1)")
    return math.floor(warmup * rounds)


SIGNAL_NAMES = {
    signal.SIGINT: "the keyboard",
    signal.SIGTERM: "SIGTERM, which schedulers send before they kill a job",
}
if hasattr(signal, "SIGHUP"):  # not on Windows
    SIGNAL_NAMES[signal.SIGHUP] = "SIGHUP, which a terminal sends when it is closed"
    SIGNAL_NAMES[signal.SIGUSR1] = "SIGUSR1, which schedulers send before they kill a job"
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
NAN_EVALUATIONS = 2  # in a row
_WEIGHT_CHECKS = 100  # about as many in one training


class Checkpoints(pl.Callback):
    """Saves a checkpoint every `every` rounds (None: never), and when the training is interrupted. Must come after the
    callback that counts the rounds."""

    def __init__(self, path: Path, every: int | None) -> None:
        self._path = path
        self._every = every

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._every and trainer.global_step % self._every == 0:
            save(trainer, self._path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt | SystemExit)
        if interrupted and trainer.state.fn == TrainerFn.FITTING and trainer.global_step:
            save(trainer, self._path)


def save(trainer: pl.Trainer, path: Path) -> None:
    """Saves a checkpoint atomically."""
    partial = path.with_suffix(".part")
    try:
        if trainer.world_size == 1:
            trainer.save_checkpoint(partial)
        elif trainer.is_global_zero:  # does not wait for the other processes: one may have been interrupted elsewhere
            trainer.strategy.save_checkpoint(checkpoint_of(trainer), partial)
        else:
            return
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class LastCheckpoint(pl.Callback):
    """Saves a checkpoint of the last round, before a later callback replaces the weights by an average. The job deletes
    it once the model is saved."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            save(trainer, self._path)
        except (OSError, RuntimeError) as error:  # full disk: the weights may still fit
            warnings.warn(f"no checkpoint of the last round could be written: {error}")


class LastWeights(pl.Callback):
    """Copies the weights of the last round, before a later callback replaces them by an average."""

    weights: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}


class WarmAveraging(pl.callbacks.WeightAveraging):
    """Exponential moving average of the weights with a warm-up (De et al. 2022, arXiv 2204.13650, section 3.2).

    After n averaged rounds the decay is min(decay, (1 + n)/(10 + n)), so that also short trainings forget their initial
    weights. `decay` is in [0, 1).
    """

    def __init__(self, decay: float) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(f"callbacks.warm_ema.decay={decay} must be at least 0 and below 1.")

        def averaged(average: Tensor, new: Tensor, n: Tensor | int) -> Tensor:
            decay_now = min(decay, (1 + int(n)) / (10 + int(n)))
            return decay_now * average + (1 - decay_now) * new

        super().__init__(avg_fn=averaged)


class Stop(pl.Callback):
    """Remembers the first signal that asks the job to stop, and raises KeyboardInterrupt. The next round raises it
    again, since Python drops an exception that is raised during garbage collection."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def installed(self) -> Iterator["Stop"]:
        """Handles the signals that have no other handler. After one, raises SystemExit with a shell's exit status."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNAL_NAMES if is_main}
        own = [number for number, handler in before.items() if handler in _DEFAULT]
        for number in own:
            signal.signal(number, self._received)
        try:
            yield self
        except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
            if self.number is None:
                raise
            raise SystemExit(128 + self.number) from None
        finally:
            for number in own:
                signal.signal(number, before[number])

    def on_train_batch_start(self, *_: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt

    def _received(self, number: int, _: Any) -> None:
        self.number = self.number or number
        raise KeyboardInterrupt

    @property
    def name(self) -> str:
        """Description of the signal, for messages."""
        return SIGNAL_NAMES[signal.Signals(self.number or signal.SIGINT)]


class Watch(pl.Callback):
    """Stops a training whose evaluation fails, whose weights are not finite, or whose validation loss is NaN in
    NAN_EVALUATIONS evaluations in a row.

    One batch of each evaluation is tried before the first round. Weights are checked after rounds 1, 2, 4, 8, …, and
    about a hundred times more.

    Args:
        on_validated: gets the names that the validation logs, if they are known.
    """

    def __init__(self, rounds: int, on_validated: Callable[[set[str]], None]) -> None:
        self._on_validated = on_validated
        self._every = math.ceil(rounds / _WEIGHT_CHECKS)
        self._nan_evaluations = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tries the evaluations, once the training loader is made: `setup("test")` may change what makes it."""
        data: pl.LightningDataModule = trainer.datamodule  # type: ignore[attr-defined]

        def test_loader() -> Any:
            data.setup("test")
            return data.test_dataloader()

        if trainer.enable_validation:
            self._on_validated(_names_logged(trainer, pl_module, "validation", lambda: validation_loader(trainer)))
        if is_overridden("test_step", pl_module) and is_overridden("test_dataloader", data):
            _names_logged(trainer, pl_module, "test", test_loader)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step
        if done.bit_count() == 1 or done % self._every == 0:
            _check_weights(pl_module, done)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _check_weights(pl_module, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics.items()
        nan = [name for name, value in metrics if name.endswith("loss") and bool(torch.isnan(value).any())]
        self._nan_evaluations = self._nan_evaluations + 1 if nan else 0
        if self._nan_evaluations >= NAN_EVALUATIONS:
            raise ConfigError(
                f"{nan[0]} was NaN at {NAN_EVALUATIONS} evaluations in a row, the last after {trainer.global_step} "
                "rounds: the model's loss is NaN for some records of the validation set. Lower the learning rate "
                "(optimizer.lr), or check the model and the loss. Training stops."
            )


def _check_weights(module: pl.LightningModule, rounds: int) -> None:
    for name, weights in module.named_parameters():
        if weights.requires_grad and not bool(weights.isfinite().all()):
            raise ConfigError(
                f"after {rounds} rounds the weights {name} are not finite; lower the learning rate "
                "(optimizer.lr), or choose trainer.precision=32-true. Training stops."
            )


def _names_logged(trainer: pl.Trainer, module: pl.LightningModule, kind: str, load: Callable[[], Any]) -> set[str]:
    """What a copy of the module logs in one public batch of a `validation` or `test`; empty if it cannot be copied, or
    there is no such loader.

    Neither the module nor a random state changes, and no logger gets anything. Raises ConfigError if it fails.
    """
    once = pl.Trainer(
        accelerator=trainer.accelerator, strategy=pl.strategies.SingleDeviceStrategy(trainer.strategy.root_device),
        precision=trainer.precision, inference_mode=trainer.test_loop.inference_mode, limit_val_batches=1,
        limit_test_batches=1, logger=pl.loggers.logger.DummyLogger(), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data, step = trainer.datamodule, f"{kind}_step"  # type: ignore[attr-defined]
    with isolate_rng():
        try:
            copied = copy.deepcopy(module, {id(trainer): None, id(data): data})
        except Exception:
            return set()
        copied.on_test_epoch_end = lambda: None  # type: ignore[method-assign]  # it may need all batches
        try:
            if (loader := load()) is None:
                return set()
            (once.test if kind == "test" else once.validate)(copied, dataloaders=loader, verbose=False)
        except Exception as error:
            called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
            failed = f"{type(module).__name__}.{step}" if step in called else "loading it"
            raise ConfigError(
                f"the first batch of the {kind} set: {failed} fails ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}); data.shape and data.classes, or the model's own arguments, "
                "must fit it."
            ) from error
    return {*once.callback_metrics}
