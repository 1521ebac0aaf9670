"""The Lightning Trainer of a job: which of its options are honoured, and which are refused because something else has
their place."""

import inspect
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.plugins.environments import TorchElasticEnvironment

from dpexp.commands import processes, trial
from dpexp.commands.build import make, rounds_of
from dpexp.commands.validate import sampling_of
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.gradients.physical_batch import CPU_BATCH
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import NonPrivatePreprocessing
from dpexp.reporting.terminal import RoundBar
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, LastWeights, Watch

OWN = (
    "max_physical_batch_size",
    "compile",
    "num_workers",
    "threads",
    "num_evaluations",
)  # keys of `trainer` that are not Lightning's
_ROUNDS = "the plan says how many rounds there are; give sampling.steps or sampling.epochs"
_SAMPLES = "each round's sample is drawn as sampling says, from all of the training set"
REFUSED = {
    "sync_batchnorm": "it mixes the records of all processes",
    "use_distributed_sampler": _SAMPLES,
    "logger": "choose tracking",
    "callbacks": "choose callbacks, at the top level",
    "fast_dev_run": "give debug=true",
    "max_epochs": _ROUNDS,
    "min_epochs": _ROUNDS,
    "max_steps": _ROUNDS,
    "min_steps": _ROUNDS,
    "limit_train_batches": _SAMPLES,
    "overfit_batches": _SAMPLES,
    "reload_dataloaders_every_n_epochs": _SAMPLES,
    "accumulate_grad_batches": "a sample is taken apart by trainer.max_physical_batch_size",
    "check_val_every_n_epoch": "give trainer.num_evaluations",
    "val_check_interval": "give trainer.num_evaluations",
    "enable_checkpointing": "give checkpoint.every_n_rounds",
    "default_root_dir": "give hydra.run.dir",
    "profiler": "what it counts and times follows the size of each round's sample, which is private",
    "barebones": "it would leave out the callback that makes training private",
    "plugins": "give trainer.precision",
    "model_registry": "give register",
    "enable_autolog_hparams": "the whole configuration is logged",
}


def trainer_for(
    cfg: DictConfig, plan: PrivacyPlan | None, privacy: PrivacyCallback | None, output: Path
) -> pl.Trainer:  # fmt: skip
    """A Trainer with the options and callbacks that a configuration asks for.

    Raises:
        ConfigError: names the option that cannot be honoured.
    """
    options, count = _options(cfg), processes.asked(cfg)
    policy = plan.sampling if plan else sampling_of(cfg).resolve(cfg.data.n)[0]
    rounds = plan.rounds if plan else rounds_of(cfg)
    per_epoch = max(1, round(policy.rounds_per_epoch))
    at_once = CPU_BATCH if cfg.trainer.max_physical_batch_size == "auto" else cfg.trainer.max_physical_batch_size
    private: pl.Callback = privacy or NonPrivatePreprocessing(cfg.data.n, at_once)
    callbacks: list[pl.Callback] = [Watch(rounds), private, LastCheckpoint(output / CHECKPOINT)]
    chosen = callbacks_of(cfg)
    if any(isinstance(callback, AVERAGING) for callback in chosen):
        callbacks.append(LastWeights())
    callbacks += [*chosen, Checkpoints(output / CHECKPOINT, cfg.checkpoint.every_n_rounds)]
    among = trial.current(cfg)
    bar = options.pop("enable_progress_bar", True) and (among is None or among.alone) and processes.rank() == 0
    if bar:
        callbacks.append(RoundBar(rounds, privacy, among.place if among else None))
    defaults = {
        "limit_val_batches": 1.0 if cfg.trainer.num_evaluations else 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    }
    try:
        trainer = pl.Trainer(
            max_epochs=-1,
            max_steps=rounds,
            check_val_every_n_epoch=max(1, rounds // (per_epoch * max(1, cfg.trainer.num_evaluations))),
            logger=False,
            callbacks=callbacks,
            default_root_dir=output,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            **defaults | options | _placed(cfg, count),
        )
    except Exception as error:  # Lightning raises many types for what is always a wrong value
        raise ConfigError(f"trainer: {error}") from error
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.Timer):  # of max_time, which a resumed job has anew; and no time is kept
            callback.state_dict = dict  # type: ignore[method-assign]
    return trainer


def sentence(error: Exception) -> str | None:
    """What an error of Lightning's or torch's means for a job; None: it is none that is known."""
    told = next((told for words, told in _MEANS.items() if words in str(error)), None)
    if told is None and isinstance(error, MisconfigurationException):
        return f"trainer or callbacks: {' '.join(str(error).split())}"
    return told


_MEANS = {
    "Training with multiple optimizers": "optimizer: configure_optimizers gives several optimizers, and a round is one "
    "release, of which one takes a step; give one, with a group of parameters for each learning rate.",
    "num_samples should be a positive integer": "data.module: the training set is empty.",
    "`train_dataloader` must be implemented": "data.module: it has no train_dataloader; let it give one DataLoader.",
}
CHECKPOINT = "last.ckpt"
# EMAWeightAveraging and its base came with Lightning 2.6.
AVERAGING = tuple(
    getattr(pl.callbacks, name)
    for name in ("WeightAveraging", "StochasticWeightAveraging")
    if hasattr(pl.callbacks, name)
)


def callbacks_of(cfg: DictConfig) -> list[pl.Callback]:
    """The configuration's own callbacks."""
    found = []
    for name, node in (cfg.callbacks or {}).items():
        callback = make(f"callbacks.{name}", node)
        if not isinstance(callback, pl.Callback):
            raise ConfigError(f"callbacks.{name}: {node.get('_target_')} gives no Lightning callback.")
        found.append(callback)
    return found


def _options(cfg: DictConfig) -> dict[str, Any]:
    """Those of `trainer` that Lightning is given."""
    given: dict[str, Any] = OmegaConf.to_container(cfg.trainer, resolve=True)  # type: ignore[assignment]
    options = {str(name): value for name, value in given.items() if name not in OWN}
    known = inspect.signature(pl.Trainer).parameters
    for name, value in options.items():
        if name in REFUSED:
            raise ConfigError(f"trainer.{name}={value} cannot be honoured: {REFUSED[name]}.")
        if name not in known:
            raise ConfigError(f"trainer.{name}={value} is no option of Lightning's Trainer.")
    return options


def _placed(cfg: DictConfig, count: int) -> dict[str, Any]:
    """Where a job trains: in several processes, each of which evaluates on whole validation and test sets, or on one
    device. Trials of a sweep take turns among several GPUs."""
    if count > 1:
        found = [TorchElasticEnvironment()] if processes.begun() else None  # else there is only a check
        return {"plugins": found, "use_distributed_sampler": False}
    return {"strategy": "auto", "devices": _devices(cfg), "num_nodes": 1}


def _devices(cfg: DictConfig) -> int | list[int]:
    hydra = HydraConfig.get()
    if cfg.trainer.accelerator in ("gpu", "cuda") and hydra.mode == RunMode.MULTIRUN and torch.cuda.device_count() > 1:
        return [hydra.job.num % torch.cuda.device_count()]
    return 1
