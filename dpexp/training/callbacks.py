"""Lightning callbacks: checkpoints, averages of weights, signals, and the end of training that cannot work."""

import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dpexp._lightning_compat import checkpoint_of
from dpexp.errors import ConfigError
from dpexp.training.classifier import Classifier


def cosine(optimizer: Optimizer, rounds: int, warmup: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's rate to 0, after a linear rise over the first part of the rounds.

    Args:
        warmup: that part, in [0, 1).
    """
    rise = _rise(rounds, warmup)

    def factor(t: int) -> float:
        return (t + 1) / (rise + 1) if t < rise else (1 + math.cos(math.pi * (t - rise) / max(1, rounds - rise))) / 2

    return LambdaLR(optimizer, factor)


def linear_warmup(optimizer: Optimizer, rounds: int, warmup: float = 0.1) -> LambdaLR:
    """A linear rise over the first part of the rounds to the optimizer's rate, which then stays."""
    rise = _rise(rounds, warmup)
    return LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / (rise + 1)))


def step(optimizer: Optimizer, rounds: int, at: list[float], factor: float = 0.1) -> LambdaLR:
    """Times a factor after each of some parts of the rounds.

    Args:
        at: parts, in (0, 1).
    """
    return LambdaLR(optimizer, lambda t: factor ** sum(t >= part * rounds for part in at))


def _rise(rounds: int, warmup: float) -> int:
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must lie in [0, 1)")
    return math.floor(warmup * rounds)


NAMES = {
    signal.SIGINT: "the keyboard",
    signal.SIGTERM: "SIGTERM, which schedulers send before they kill",
}
if hasattr(signal, "SIGHUP"):  # not on Windows
    NAMES[signal.SIGHUP] = "SIGHUP, which a terminal sends that is closed"
    NAMES[signal.SIGUSR1] = "SIGUSR1, which schedulers send before they kill"
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
IN_A_ROW = 2  # evaluations
_LOOKS = 100  # at the weights, during one training


class Checkpoints(pl.Callback):
    """Keeps the last state of a training.

    It is saved every so many rounds and when the training is interrupted, behind the callback that counts the rounds.

    Args:
        every: rounds; None for interruptions only.
    """

    def __init__(self, path: Path, every: int | None) -> None:
        self._path = path
        self._every = every

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._every and trainer.global_step % self._every == 0:
            save(trainer, self._path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt | SystemExit):
            return
        if trainer.state.fn == TrainerFn.FITTING and trainer.global_step:
            save(trainer, self._path)


def save(trainer: pl.Trainer, path: Path) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    try:
        if trainer.world_size == 1:
            trainer.save_checkpoint(beside)
        elif trainer.is_global_zero:  # without waiting for the others, of which one may be interrupted elsewhere
            trainer.strategy.save_checkpoint(checkpoint_of(trainer), beside)
        else:
            return
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


class LastCheckpoint(pl.Callback):
    """Keeps the state of the last round, for as long as the model is not kept, before a callback behind it replaces
    the weights by an average."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            save(trainer, self._path)
        except (OSError, RuntimeError) as error:  # of a full disk; the weights come next
            warnings.warn(f"no checkpoint of the last round could be written: {error}")


class LastWeights(pl.Callback):
    """Keeps the weights of the last round, before a callback behind it replaces them by an average."""

    weights: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}


class WarmAveraging(WeightAveraging):
    """The exponential average of the weights after each round, in which the factor of what was averaged before grows to
    `decay`: with n rounds before, min(decay, (1 + n)/(10 + n)), as De et al. 2022 have it (arXiv 2204.13650, section
    3.2), so that the beginning is forgotten also where there are fewer rounds than 1/(1 - decay).

    Args:
        decay: in [0, 1).

    Raises:
        ConfigError: another decay.
    """

    def __init__(self, decay: float) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(f"callbacks.warm_ema.decay={decay} must be at least 0 and below 1.")

        def averaged(before: Tensor, now: Tensor, n: Tensor | int) -> Tensor:
            kept = min(decay, (1 + int(n)) / (10 + int(n)))
            return kept * before + (1 - kept) * now

        super().__init__(avg_fn=averaged)


class Stop(pl.Callback):
    """Notes which signal came first, and raises KeyboardInterrupt.

    It is raised again at the next round, since Python drops what is raised while an object is collected.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def heeded(self) -> Iterator["Stop"]:
        """Meanwhile; but not of signals that somebody else has a handler for.

        Raises:
            SystemExit: after such a signal, with the status that a shell gives a process which it ended.
        """
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in NAMES if main}
        own = [number for number, handler in before.items() if handler in _DEFAULT]
        for number in own:
            signal.signal(number, self._came)
        try:
            yield self
        except (KeyboardInterrupt, SystemExit):  # Lightning makes one of the other
            if self.number is None:
                raise
            raise SystemExit(128 + self.number) from None
        finally:
            for number in own:
                signal.signal(number, before[number])

    def on_train_batch_start(self, *_: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt

    def _came(self, number: int, _: Any) -> None:
        self.number = self.number or number
        raise KeyboardInterrupt

    @property
    def name(self) -> str:
        return NAMES[signal.Signals(self.number or signal.SIGINT)]


class Watch(pl.Callback):
    """Stops a training whose model does not take the validation set's records, whose weights are no numbers any more,
    or whose validation loss is none at IN_A_ROW evaluations.

    Args:
        rounds: of the training; the weights are looked at after 1, 2, 4, 8, … of them, and about a hundred times.
    """

    def __init__(self, rounds: int) -> None:
        self._every = math.ceil(rounds / _LOOKS)
        self._without_loss = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, Classifier):
            _check_model(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step
        if done.bit_count() == 1 or done % self._every == 0:
            _check_weights(pl_module, done)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _check_weights(pl_module, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = {name: value for name, value in trainer.callback_metrics.items() if name.endswith("loss")}
        nan = [name for name, value in losses.items() if bool(torch.isnan(value).any())]
        self._without_loss = self._without_loss + 1 if nan else 0
        if self._without_loss >= IN_A_ROW:
            raise ConfigError(
                f"{nan[0]} was NaN at {IN_A_ROW} evaluations in a row, the last after {trainer.global_step} rounds: "
                "the model gives no numbers for some records of the validation set. Lower the learning rate "
                "(optimizer.lr), or look at the model or the loss. Training stops."
            )


def _check_weights(module: pl.LightningModule, rounds: int) -> None:
    trained = ((name, weights) for name, weights in module.named_parameters() if weights.requires_grad)
    broken = next((name for name, weights in trained if not bool(weights.isfinite().all())), None)
    if broken is not None:
        raise ConfigError(
            f"after {rounds} rounds the weights {broken} are no finite numbers any more; lower the learning rate "
            "(optimizer.lr), or choose trainer.precision=32-true. Training stops."
        )


def _check_model(trainer: pl.Trainer, module: Classifier) -> None:
    """Asks the classifier for its scores of a batch of the validation set, which is taken as public."""
    data: pl.LightningDataModule = trainer.datamodule  # type: ignore[attr-defined]
    loader = data.val_dataloader() if is_overridden("val_dataloader", data) else None
    if not isinstance(loader, DataLoader):
        return
    was, shape = module.training, "unknown"
    module.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
            batch = data.on_before_batch_transfer(next(iter(loader)), 0)
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), module.device)
            batch = data.on_after_batch_transfer(batch, 0)
            if isinstance(batch, Mapping):
                shape = ", ".join(f"{name} {list(held.shape[1:])}" for name, held in batch.items())
                module.loss_and_scores(batch)
                return
            x, y = batch
            shape = str(list(x.shape[1:]))
            scores, most = module(x), int(y.max())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model: it cannot score the validation set's records, of shape {shape}; data.shape, or the model's own "
            f"arguments, must fit them: {' '.join(str(error).split())[:200]}."
        ) from error
    finally:
        module.train(was)
    if scores.dim() < 2 or most >= scores.shape[1]:
        raise ConfigError(
            f"model: its scores of {len(x)} records have the shape {list(scores.shape)}, but the validation set has a "
            f"label {most}; data.classes, or the model's own arguments, must give at least {most + 1} classes."
        )
