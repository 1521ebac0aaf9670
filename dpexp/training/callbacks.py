"""Learning-rate schedules, and Lightning callbacks: checkpoints, averaged weights, signals, early failure."""

import copy
import math
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, random_split

from dpexp._lightning_compat import (
    TrainerFn,
    checkpoint_of,
    is_overridden,
    pl,
    replace_training_loader,
    training_loader,
)
from dpexp.errors import ConfigError, between, checks_arguments, in_one_line
from dpexp.training.classifier import Classifier


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
    """Saves a checkpoint atomically. Does not wait for other processes: one may have been interrupted elsewhere."""
    partial = path.with_suffix(".part")
    if not trainer.is_global_zero:
        return
    try:
        with partial.open("wb") as file:  # Lightning would first hold all of it in memory
            torch.save(checkpoint_of(trainer), file)
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(partial)
        raise
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


class HeldOut(pl.callbacks.EarlyStopping):
    """Ends a classifier's training without privacy when the loss of a tenth of its training records, held out, has not
    fallen for ten epochs, and keeps the weights of the lowest.

    Only for dpexp's own data modules, whose loaders shuffle their records and do nothing else.
    """

    def __init__(self) -> None:
        super().__init__("held_out_loss", patience=10, check_on_train_epoch_end=True)
        self.best: dict[str, Any] = {}  # its weights and its round

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader = training_loader(trainer)
        count = max(1, len(loader.dataset) // 10)
        sizes = [count, len(loader.dataset) - count]
        held_out, rest = random_split(loader.dataset, sizes, torch.Generator().manual_seed(0))
        size = min(loader.batch_size, len(rest))
        self._loader = DataLoader(held_out, size)
        replace_training_loader(
            trainer, DataLoader(rest, size, shuffle=True, drop_last=True, num_workers=loader.num_workers)
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        pl_module.eval()
        total = 0.0
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for batch in self._loader:
                loss, _ = pl_module.training_loss(_on_device(trainer, pl_module, batch))
                total += float(loss) / len(self._loader)
        pl_module.train()
        pl_module.log(self.monitor, total)
        super().on_train_epoch_end(trainer, pl_module)
        if not self.wait_count:
            self.best = {"weights": copy.deepcopy(pl_module.state_dict()), "round": trainer.global_step}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.best["weights"])
        warnings.warn(
            "without privacy, training ends when the loss of a tenth of its records, held out, no longer falls: "
            f"the model is that of round {self.best['round']} of {trainer.max_steps}."
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.best = state_dict["best"]


class LastWeights(pl.Callback):
    """Copies the weights of the last round, before a later callback replaces them by an average."""

    weights: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}


@checks_arguments
class WarmAveraging(pl.callbacks.WeightAveraging):
    """Exponential moving average of the weights with a warm-up (De et al. 2022, arXiv 2204.13650, section 3.2).

    After n averaged rounds the decay is min(decay, (1 + n)/(10 + n)), so that also short trainings forget their initial
    weights. `decay` is in [0, 1).
    """

    def __init__(self, decay: Annotated[float, between(0, 1, "[)")]) -> None:
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
    """Stops a training whose model does not fit the public records, or whose weights are not finite.

    Weights are checked after rounds 1, 2, 4, 8, …, and about a hundred times more.

    Attributes:
        is_validating_first: Lightning's validation before the training is running.
    """

    def __init__(self, rounds: int) -> None:
        self._every = math.ceil(rounds / _WEIGHT_CHECKS)
        self.is_validating_first = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tries a classifier on one batch of each evaluation; not of a test set that needs a `setup` of its own, which
        may change the training set."""
        data: pl.LightningDataModule = trainer.datamodule  # type: ignore[attr-defined]
        kinds = ["validation", "test"][: 1 if is_overridden("setup", data) else 2]
        for kind, hook in zip(kinds, ("val_dataloader", "test_dataloader"), strict=False):
            if isinstance(pl_module, Classifier) and is_overridden(hook, data):
                _check_model(trainer, pl_module, kind, getattr(data, hook)())

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.is_validating_first = True

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.is_validating_first = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step
        if done.bit_count() == 1 or done % self._every == 0:
            _check_weights(pl_module, done)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _check_weights(pl_module, trainer.global_step)


def _check_weights(module: pl.LightningModule, rounds: int) -> None:
    for name, weights in module.named_parameters():
        if weights.requires_grad and not bool(weights.isfinite().all()):
            raise ConfigError(
                f"after {rounds} rounds the weights {name} are not finite; lower the learning rate "
                "(optimizer.lr), or choose trainer.precision=32-true. Training stops."
            )


def _on_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    data: pl.LightningDataModule = trainer.datamodule  # type: ignore[attr-defined]
    batch = data.on_before_batch_transfer(batch, 0)
    batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), module.device)
    return data.on_after_batch_transfer(batch, 0)


_TRIED = 2  # records on which a model is tried


def _check_model(trainer: pl.Trainer, module: Classifier, kind: str, loader: Any) -> None:
    """Runs the classifier on two records of the validation or test set, which is taken as public, and compares the
    labels of a batch with its output."""
    if not isinstance(loader, DataLoader):
        return
    was_training, shape = module.training, "unknown"
    module.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
            batch = _on_device(trainer, module, next(iter(loader)))
            if isinstance(batch, Mapping):
                shape = ", ".join(f"{name} {list(value.shape[1:])}" for name, value in batch.items())
                module.loss_and_scores({name: value[:_TRIED] for name, value in batch.items()})
                return
            x, y = batch
            shape = str(list(x.shape[1:]))
            scores, y = module(x[:_TRIED]), y.masked_fill(y == -100, 0)  # which has no loss
            smallest, largest = int(y.min()), int(y.max())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model: it cannot process the {kind} set's records, of shape {shape}; data.shape, or the model's own "
            f"arguments, must fit them: {in_one_line(error)[:200]}."
        ) from error
    finally:
        module.train(was_training)
    if y.is_floating_point():
        return
    if scores.dim() < 2 or largest >= scores.shape[1]:
        raise ConfigError(
            f"model: its output for {len(x[:_TRIED])} records has shape {list(scores.shape)}, but the {kind} set has a "
            f"label {largest}; data.classes, or the model's own arguments, must give at least {largest + 1} classes."
        )
    if smallest < 0:
        raise ConfigError(f"data.module: the {kind} set has a label {smallest}; labels must be 0, 1, ….")
