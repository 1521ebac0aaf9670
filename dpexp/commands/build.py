"""Makes the objects of a composed configuration: module, privacy plan, callback."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from dpexp.accounting.coverage import CLAIMS
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.releases import applicable_accountants, releases
from dpexp.commands.initial_weights import MODEL_ARGUMENT, refuse_non_private_weights, weights_of
from dpexp.commands.validate import check, noise_of, privacy_unit_of, sampling_of, schedules_of, target_of
from dpexp.config import not_private_reason
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.normalization import PrivateBatchNorm
from dpexp.privacy.plan.allocation import Explicit
from dpexp.privacy.plan.clipping import Joint, same_as_separate
from dpexp.privacy.plan.make import Clipping, make_plan
from dpexp.privacy.plan.options import AUTO, Noise, Target
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import ClassCounts, PreprocessedModel, preprocessing_of
from dpexp.privacy.private_metrics import BATCHNORM
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.training.classifier import Classifier
from dpexp.training.pretrained import head_parameters, load_initial_weights


def planned(cfg: DictConfig) -> PrivacyPlan:
    """The plan of a private job, without training.

    Raises:
        ConfigError: a choice that cannot be honoured, or a job that is not private.
    """
    check(cfg)
    if not is_private(cfg):
        raise ConfigError(
            f"it is not private with privacy.enabled={cfg.privacy.enabled}, "
            f"privacy.noise_seed={cfg.privacy.noise_seed} and diagnostics={cfg.diagnostics}."
        )
    return plan_for(cfg, module_of(cfg))


def plan_for(cfg: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
    """The privacy plan of a configuration."""
    return _plan(cfg, module, cfg.calibrate, noise_of(cfg), target_of(cfg))


def uncalibrated_plan(cfg: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
    """The plan at an arbitrary noise, which takes no time to make: it checks all but the calibration."""
    explicit = cfg.allocation._target_.endswith(".Explicit")
    for preprocessing in preprocessing_of(module).values():
        preprocessing.budget_share, preprocessing.noise_multiplier = None, 1.0
    noise = noise_of(cfg)
    if noise.bands == AUTO:
        noise = replace(noise, bands=1)
    none = dict.fromkeys(("epsilon", "max_advantage", "max_tpr_at_fpr"))
    target = target_of(cfg, **none, noise_multiplier=None if explicit else 1.0)
    return _plan(cfg, module, "noise_multiplier", noise, target)


def _plan(cfg: DictConfig, module: pl.LightningModule, calibrate: str, noise: Noise, target: Target) -> PrivacyPlan:
    clipping = {name: make(name, cfg[name]) for name in ("group", "mechanism", "clip_norm", "clip_rule")}
    return make_plan(
        module,
        n=cfg.data.n,
        sampling=sampling_of(cfg),
        target=target,
        clipping=Clipping(**clipping, vectors=cfg.vectors),
        allocation=make("allocation", cfg.allocation),
        noise=noise,
        schedules=schedules_of(cfg),
        private_metrics=_private_metrics(cfg, module),
        privacy_unit=privacy_unit_of(cfg),
        users=cfg.data.users,
        adjacency=cfg.privacy.adjacency,
        calibrate=calibrate,
    )


def joint_note(cfg: DictConfig, plan: PrivacyPlan | None) -> str:
    """A sentence that `mechanism=joint` makes no difference here, and which options would; "" if it makes one."""
    if plan is None:
        return ""
    mechanism, clip_norm, allocation = (
        make(section, cfg[section]) for section in ("mechanism", "clip_norm", "allocation")
    )
    if not isinstance(mechanism, Joint) or not same_as_separate(plan, clip_norm, isinstance(allocation, Explicit)):
        return ""
    same = "mechanism=joint equals mechanism=separate here"
    groups = [group.vectors for group in plan.groups if not group.is_metric]
    if all(len(vectors) == 1 for vectors in groups):
        return (
            f"{same}, since each group is one vector; with several, clip_norm=dimension or clip_norm=adaptive differ."
        )
    options = ["clip_norm=dimension"] * any(len({vector.d for vector in vectors}) > 1 for vectors in groups)
    options = [*options, "clip_norm=adaptive"] if mechanism.alpha is None else ["a list of scales in mechanism.alpha"]
    return f"{same}, since the scales α of a group are equal; {' or '.join(options)} would make a difference."


def _batchnorm(cfg: DictConfig) -> Any:
    return make("batchnorm", cfg.batchnorm) if cfg.batchnorm else None


def _private_metrics(cfg: DictConfig, module: pl.LightningModule) -> dict[str, Any]:
    """The values that are released in addition to gradients."""
    metrics = _plain(cfg.private_metrics.release) or {}
    normalise = _batchnorm(cfg)
    if not isinstance(normalise, PrivateBatchNorm):
        return metrics
    if BATCHNORM in metrics:
        raise ConfigError(
            f"private_metrics.release: batchnorm=private releases under the name {BATCHNORM}; choose another."
        )
    return metrics | normalise.release(module)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def accountants(cfg: DictConfig, plan: PrivacyPlan) -> list[str]:
    """The configured accountants, the reported one first; `all`: every one that has a bound for the plan's claim.

    Raises:
        ConfigError: a configured one cannot compose a preprocessing release.
    """
    before = Ledger(plan.adjacency, {round_: 1 for round_ in plan.ledger().rounds if round_.one_time_query is not None})
    if "all" not in cfg.accountant.names:
        for name in cfg.accountant.names:
            releases(before, name)
        return list(cfg.accountant.names)
    composing = applicable_accountants(before)
    return [name for name in CLAIMS[plan.sampling.name][plan.adjacency] if name in composing or not before.rounds]


def is_private(cfg: DictConfig) -> bool:
    """Whether the (ε, δ) of the run covers all of its outputs."""
    return not_private_reason(cfg) is None


def make(section: str, node: Any, **arguments: Any) -> Any:
    """Instantiates a `_target_` section; a mistake in it becomes a ConfigError."""
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        cause = error.__cause__ or str(error).splitlines()[0]
        target = node.get("_target_") if node else None
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        if unknown and unknown[1] in node:
            key = f"{section}.{unknown[1]}"
            raise ConfigError(
                f"{key}={node[unknown[1]]} is no option of {target}; if an experiment sets it, remove it with ~{key}."
            ) from error
        raise ConfigError(f"{section}: {target} cannot be made: {' '.join(str(cause).split())}.") from error


def module_of(cfg: DictConfig, load_weights: bool = True) -> pl.LightningModule:
    """The LightningModule of a configuration.

    Args:
        load_weights: load the configured initial weights; False where others are loaded anyway.
    """
    weights = weights_of(cfg)
    model = make("model", cfg.model if weights is MODEL_ARGUMENT else _without(cfg, "model", "weights"))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model: {cfg.model._target_} gives an object of type {type(model).__name__}, not a torch.nn.Module."
        )
    normalise = _batchnorm(cfg)
    if normalise is not None and (cfg.privacy.enabled or not isinstance(normalise, PrivateBatchNorm)):
        model = normalise(model)
    tuning = make("fine_tuning", cfg.fine_tuning)
    if load_weights and isinstance(weights, Path):
        load_initial_weights(model, weights, head_parameters(model, getattr(tuning, "head", None)))
    if load_weights and cfg.privacy.enabled:
        refuse_non_private_weights(cfg)
    model = tuning(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"fine_tuning={type(tuning).__name__}: no parameter of the model is trainable.")
    if cfg.privacy.enabled:
        refuse_mixing_layers(model)
    preprocessing = cfg.preprocessing
    if isinstance(model, pl.LightningModule):
        if preprocessing:
            raise ConfigError(
                f"preprocessing={list(preprocessing)} changes the inputs of a plain model, and "
                f"model={cfg.model._target_} is a LightningModule; use PreprocessedModel of "
                "dpexp.privacy.preprocessing_methods within it, and leave preprocessing out."
            )
        if _augment(cfg) is not None:
            raise ConfigError(
                f"augment={cfg.augment._target_} augments the records of a plain model, and model={cfg.model._target_} "
                "is a LightningModule; let its training_step begin with batch = dpexp.views(batch, augment, K), and "
                "leave augment out."
            )
        if OmegaConf.select(cfg, "data.class_weights") is not None:
            raise ConfigError(
                f"data.class_weights weighs the records of a plain model, and model={cfg.model._target_} is a "
                "LightningModule; let its training_step call dpexp.weigh(w[y].mean() / w.max()), and leave it out."
            )
        return model
    optimizer = make("optimizer", cfg.optimizer, _partial_=True)
    augment = _augment(cfg)
    model = _preprocessed(cfg, model) if preprocessing else model
    return Classifier(
        model, optimizer, augment=augment, multiplicity=cfg.augment.multiplicity if augment else 1,
        class_weights=_class_weights(cfg, model),
    )  # fmt: skip


def _class_weights(cfg: DictConfig, model: torch.nn.Module) -> torch.Tensor | Callable[[], torch.Tensor] | None:
    """The weight of each class, or a function that returns them once counts are released; None: unweighted."""
    weights = _plain(cfg.data.class_weights)
    if weights != "counts":
        return None if weights is None else torch.tensor(weights, dtype=torch.float32)
    (counts,) = (one for one in preprocessing_of(model).values() if isinstance(one, ClassCounts))
    if counts.d != cfg.data.classes:
        raise ConfigError(f"data.class_weights=counts needs data.classes={cfg.data.classes} counts, not {counts.d}.")
    return counts.weights


def _without(cfg: DictConfig, section: str, key: str) -> DictConfig:
    """A section without one of its keys."""
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    cfg[section].pop(key, None)
    return cfg[section]


def _augment(cfg: DictConfig) -> Any:
    """The function from one example's x to a view of it; None: no augmentation."""
    if not cfg.augment or cfg.augment._target_ is None:
        return None
    augment = make("augment", _without(cfg, "augment", "multiplicity"))
    if not callable(augment):
        raise ConfigError(f"augment: {cfg.augment._target_} gives a {type(augment).__name__}, not a function of x.")
    return augment


def _preprocessed(cfg: DictConfig, model: torch.nn.Module) -> PreprocessedModel:
    """The model after its private preprocessing, which must accept one another's output shapes."""
    preprocessed = PreprocessedModel(
        {name: make(f"preprocessing.{name}", node) for name, node in cfg.preprocessing.items()}, model
    )
    if cfg.data.shape is not None:
        x = torch.zeros(1, *cfg.data.shape)
        modes = {layer: layer.training for layer in model.modules()}
        try:
            with torch.no_grad():
                for name, step in preprocessed.preprocessing.items():
                    x = _apply(name, step, x)
                model.eval()(x)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"model={cfg.model._target_} does not accept inputs of shape {list(x.shape[1:])}, which "
                f"preprocessing={list(cfg.preprocessing)} makes of {list(cfg.data.shape)}; try "
                f"model.shape={list(x.shape[1:])} ({' '.join(str(error).split())[:200]})."
            ) from error
        finally:
            for layer, training in modes.items():
                layer.training = training
    return preprocessed


def _apply(name: str, step: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return step(x)
    except Exception as error:
        shape = list(x.shape[1:])
        raise ConfigError(
            f"preprocessing.{name} does not accept inputs of shape {shape}, as it gets them here; try "
            f"preprocessing.{name}.shape={shape} ({' '.join(str(error).split())[:200]})."
        ) from error


def make_small(cfg: DictConfig) -> None:
    """debug=true: shortens a job to three rounds without MLflow."""
    cfg.sampling.steps, cfg.sampling.epochs, cfg.tracking.uri = 3, None, None
    OmegaConf.update(cfg, "trainer.detect_anomaly", True, force_add=True)


def add_scheduler(cfg: DictConfig, module: pl.LightningModule, rounds: int) -> None:
    """Adds the configured learning rate schedule to a classifier, once the number of rounds is known.

    Raises:
        ConfigError: optimizer or scheduler cannot be made, or are chosen for a module that has its own.
    """
    cfg.rounds = rounds
    if not isinstance(module, Classifier):
        chosen = [o for o in HydraConfig.get().overrides.task if re.match(r"[+~]*(optimizer|scheduler)\b", o)]
        if chosen:
            raise ConfigError(f"{chosen[0]} would be ignored: {type(module).__name__} configures its own.")
        return
    if cfg.scheduler:
        module.scheduler = make("scheduler", cfg.scheduler, _partial_=True)
    try:
        module.configure_optimizers()
    except (TypeError, ValueError) as error:
        sections = {section: {**cfg[section]} for section in ("optimizer", "scheduler") if cfg[section]}
        values = [f"{section}.{key}={value}" for section, node in sections.items() for key, value in node.items()]
        raise ConfigError(f"optimizer or scheduler cannot be made of {', '.join(values)}: {error}.") from error


def check_device(cfg: DictConfig) -> None:
    """Refuses a device or precision that Lightning does not support here."""
    options = cfg.trainer
    try:
        pl.Trainer(
            accelerator=options.accelerator, devices=1, precision=options.precision, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    except Exception as error:  # Lightning raises many types for a wrong value
        raise ConfigError(
            f"trainer.accelerator={options.accelerator} with trainer.precision={options.precision} is not available "
            f"here: {' '.join(str(error).split())}"
        ) from error


def callback_for(cfg: DictConfig, plan: PrivacyPlan, ledger: Path) -> PrivacyCallback:
    return PrivacyCallback(
        plan,
        ledger,
        delta=cfg.privacy.delta,
        accountant=accountants(cfg, plan)[0],
        max_physical_batch_size=(
            None if cfg.trainer.max_physical_batch_size == "auto" else cfg.trainer.max_physical_batch_size
        ),
        compile=None if cfg.trainer.compile == "auto" else cfg.trainer.compile,
        noise_seed=cfg.privacy.noise_seed,
        unsafe_diagnostics=cfg.diagnostics == "unsafe",
    )


def rounds_of(cfg: DictConfig) -> int:
    return sampling_of(cfg).resolve(cfg.data.n)[1]


def set_batch_size(cfg: DictConfig, data: pl.LightningDataModule) -> None:
    """Sets the batch size of a data module for a training without privacy, whose loader draws the samples."""
    if hasattr(data, "batch_size"):
        policy, _ = sampling_of(cfg).resolve(cfg.data.n)
        data.batch_size = max(1, round(policy.q * cfg.data.n))


def silence_lightning() -> None:
    """Silences Lightning's advice, which is about the training loop."""
    import logging

    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    advice = "many workers", "LeafSpec", "GPU available but not used", "sync_dist=True"
    for message in (f".*{words}.*" for words in advice):
        warnings.filterwarnings("ignore", message)
