"""The Lightning Trainer of a job, which of its options are honoured, and which another setting replaces."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import MisconfigurationException, environment, pl
from dpexp.commands import processes
from dpexp.commands.build import make
from dpexp.commands.trial import trial_label
from dpexp.commands.validate import REFUSED, not_private_reason, sampling_of
from dpexp.errors import ConfigError, RecordError, in_one_line
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.fit import DryRunDone
from dpexp.privacy.physical_batch import CPU_BATCH
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import NonPrivatePreprocessing
from dpexp.privacy.refusals import ONE_OPTIMIZER
from dpexp.reporting.terminal import RoundBar
from dpexp.tracking.job_folder import CHECKPOINT
from dpexp.tracking.record import MetricsLogger
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, LastWeights, Watch

# Keys of `trainer` that are not Lightning's:
OWN = ("max_physical_batch_size", "compile", "memory", "num_workers", "threads", "num_evaluations")


def callback_for(cfg: DictConfig, plan: PrivacyPlan, accountant: str, ledger: Path) -> PrivacyCallback:
    """The callback that carries out a plan, with the configured options. `auto` leaves a choice to it."""

    def chosen(value: Any) -> Any:
        return None if value == "auto" else value

    return PrivacyCallback(
        plan,
        ledger,
        delta=cfg.privacy.delta,
        accountant=accountant,
        max_physical_batch_size=chosen(cfg.trainer.max_physical_batch_size),
        compile=chosen(cfg.trainer.compile),
        memory=cfg.trainer.memory,
        noise_seed=cfg.privacy.noise_seed,
        unsafe_diagnostics=cfg.diagnostics == "unsafe",
        not_private_reason=not_private_reason(cfg),
        pad_to=cfg.data.pad_to,
    )


def trainer_for(
    cfg: DictConfig, plan: PrivacyPlan | None, privacy: PrivacyCallback | None, output: Path, count: int
) -> pl.Trainer:  # fmt: skip
    """A Trainer with the configured options and callbacks.

    Args:
        privacy: the callback that makes the training private; None without privacy.
        output: the job's folder.
        count: the number of processes.
    """
    options = _options(cfg)
    policy = plan.sampling if plan else sampling_of(cfg).resolve(cfg.data.n)[0]
    rounds = cfg.rounds
    per_epoch = max(1, round(policy.rounds_per_epoch))
    max_batch = CPU_BATCH if cfg.trainer.max_physical_batch_size == "auto" else cfg.trainer.max_physical_batch_size
    private: pl.Callback = privacy or NonPrivatePreprocessing(cfg.data.n, max_batch)
    callbacks: list[pl.Callback] = [Watch(rounds), private, LastCheckpoint(output / CHECKPOINT)]
    configured = {name: make(f"callbacks.{name}", node) for name, node in (cfg.callbacks or {}).items()}
    for name, callback in configured.items():
        if not isinstance(callback, pl.Callback):
            raise ConfigError(f"callbacks.{name}: {cfg.callbacks[name].get('_target_')} gives no Lightning callback.")
    if any(isinstance(callback, AVERAGING) for callback in configured.values()):
        callbacks.append(LastWeights())
    callbacks += [*configured.values(), Checkpoints(output / CHECKPOINT, cfg.checkpoint.every_n_rounds)]
    label, launcher = trial_label(cfg), HydraConfig.get().runtime.choices.get("hydra/launcher", "basic")
    shows = not cfg.check and processes.rank() == 0 and (label is None or launcher == "basic")
    bar = options.pop("enable_progress_bar", True) and shows
    if bar:
        callbacks.append(RoundBar(rounds, privacy, label))
    defaults = {
        "limit_val_batches": 1.0 if cfg.trainer.num_evaluations else 0,
        "num_sanity_val_steps": min(1, cfg.trainer.num_evaluations),
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    }
    loggers = [*_loggers(cfg, output)] if cfg.logger and not processes.rank() else False
    try:
        trainer = pl.Trainer(
            max_epochs=-1,
            max_steps=rounds,
            check_val_every_n_epoch=max(1, rounds // (per_epoch * max(1, cfg.trainer.num_evaluations))),
            logger=loggers,
            callbacks=callbacks,
            default_root_dir=output,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            **defaults | options | _placement(cfg, count),
        )
    except Exception as error:  # Lightning raises many types for a wrong value
        where = f"trainer.accelerator={cfg.trainer.accelerator}, trainer.precision={cfg.trainer.precision}"
        advice = "without a GPU that torch finds, choose trainer=cpu"
        raise ConfigError(f"trainer: {in_one_line(error)} ({where}); {advice}.") from error
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.Timer):  # of max_time: no checkpoint stores the time used
            callback.state_dict = dict  # type: ignore[method-assign]
    return trainer


def _loggers(cfg: DictConfig, output: Path) -> Iterator[pl.loggers.logger.Logger]:
    """The configured Lightning loggers, each wrapped so that it gets only metrics."""
    for name, node in cfg.logger.items():
        kind = str(node.get("_target_")).rpartition(".")[2]
        if kind not in ("CSVLogger", "TensorBoardLogger"):
            raise ConfigError(f"logger.{name}: {kind} may write times, which are private; choose csv or tensorboard.")
        logger = make(f"logger.{name}", node, save_dir=str(output), name=name)
        send = logger.log_metrics if kind == "CSVLogger" else partial(_to_tensorboard, logger)
        yield MetricsLogger(send, name)


def _to_tensorboard(logger: Any, values: dict[str, float], step: int) -> None:
    """Writes values, each with the number of rounds in place of the time."""
    for name, value in values.items():
        logger.experiment.add_scalar(name, value, step, walltime=step)
    logger.experiment.flush()


@contextmanager
def explained(trainer: pl.Trainer) -> Iterator[None]:
    """Turns an error of Lightning, torch or the first validation into a ConfigError, if its meaning is known."""
    try:
        yield
    except Exception as error:
        words = f"{error} {error.__cause__}"
        message = next((meaning for known, meaning in _MEANINGS.items() if known in words), None)
        if message is None and isinstance(error, ConfigError | RecordError | DryRunDone):
            raise
        said = in_one_line(error)[:200]
        if any(isinstance(one, Watch) and one.is_validating_first for one in trainer.callbacks):  # type: ignore
            failed = f"model: the first batch of the validation set fails ({type(error).__name__}: {said})"
            message = f"{failed}; if it needs all batches, +trainer.num_sanity_val_steps=0 leaves this trial out."
        elif message is None and isinstance(error, MisconfigurationException):
            message = f"trainer or callbacks: {said}."
        if message is None:
            raise
        raise ConfigError(message) from error


_MEANINGS = {
    "Training with multiple optimizers": f"optimizer: {ONE_OPTIMIZER}",
    "num_samples should be a positive integer": "data.module: the training set is empty.",
    "`train_dataloader` must be implemented": "data.module: it has no train_dataloader; let it give one DataLoader.",
}
AVERAGING = pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging


def _options(cfg: DictConfig) -> dict[str, Any]:
    """The options in `trainer` for Lightning."""
    values: dict[str, Any] = OmegaConf.to_container(cfg.trainer, resolve=True)  # type: ignore[assignment]
    options = {str(name): value for name, value in values.items() if name not in OWN}
    known = inspect.signature(pl.Trainer).parameters
    for name, value in options.items():
        if name in REFUSED:
            raise ConfigError(f"trainer.{name}={value} cannot be honoured: {REFUSED[name]}.")
        if name not in known:
            raise ConfigError(f"trainer.{name}={value} is no option of Lightning's Trainer.")
    return options


def _placement(cfg: DictConfig, count: int) -> dict[str, Any]:
    """Options for several processes, each of which evaluates on the entire validation and test sets; or for one device.

    Trials of a sweep take turns among several GPUs."""
    if count > 1:
        started = processes.is_one_of_several()  # otherwise the job is only checked
        plugins = [environment("TorchElasticEnvironment")()] if started else None
        return {"plugins": plugins, "use_distributed_sampler": False}
    hydra = HydraConfig.get()
    devices: int | list[int] = 1
    if cfg.trainer.accelerator in ("gpu", "cuda") and hydra.mode == RunMode.MULTIRUN and torch.cuda.device_count() > 1:
        devices = [hydra.job.num % torch.cuda.device_count()]
    return {"strategy": "auto", "devices": devices, "num_nodes": 1}
