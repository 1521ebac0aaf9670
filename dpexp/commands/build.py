"""Makes the objects that a composed configuration names: module, data module, privacy plan, and optimizer.

`Job.of` calls these functions in order. Each refuses, as a ConfigError with the key that is to blame, what cannot be
made or would not be honoured.
"""

import logging
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import MisconfigurationException, pl, refuse_mixed
from dpexp.accounting.releases import applicable_accountants, releases
from dpexp.commands.objects import cannot_be_made, made_of, numbers_of_texts
from dpexp.commands.validate import check, noise_of, privacy_unit_of, reported, sampling_of, target_of, values_of
from dpexp.config import BY_GROUP, CONF, part_of
from dpexp.errors import ConfigError, in_one_line, place_of
from dpexp.privacy.normalization import PrivateBatchNorm
from dpexp.privacy.plan.make import Clipping, make_plan
from dpexp.privacy.plan.options import AUTO, Banded, Gaussian, Schedules, Target
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import ClassCounts, PreprocessedModel, preprocessing_of
from dpexp.privacy.private_metrics import BATCHNORM
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.training.classifier import Classifier, noisy_learning_rate
from dpexp.training.data.features import Features, as_map
from dpexp.training.data.hugging_face import is_hugging_face
from dpexp.training.data.raw import files_of
from dpexp.training.language import LanguageModel, is_causal
from dpexp.training.pretrained import head_parameters, load_initial_weights, read_metadata


def plan(cfg: DictConfig) -> PrivacyPlan:
    """Checks a configuration and returns the privacy plan of its job; nothing is trained.

    Examples:
        >>> import dpexp
        >>> plan = dpexp.plan(dpexp.compose("model=logistic", "privacy.epsilon=2", "sampling.epochs=1"))
        >>> dpexp.epsilon(plan.ledger(), plan.delta) <= 2
        True

    Raises:
        ConfigError: for any choice that cannot be honoured, or a job without privacy.
    """
    check(cfg)
    if not cfg.privacy.enabled:
        raise ConfigError("privacy.enabled=false has no privacy plan.")
    return plan_for(cfg, module_of(cfg))


def plan_for(cfg: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
    """Calibrates the privacy plan of a configuration that has been checked."""
    return _plan_at(cfg, module, cfg.calibrate, noise_of(cfg), target_of(cfg))


def uncalibrated_plan(cfg: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
    """Makes a plan at an arbitrary noise in place of a calibrated one, only to refuse what cannot be planned."""
    explicit = cfg.allocation._target_.endswith(".Explicit")
    for preprocessing in preprocessing_of(module).values():
        preprocessing.budget_share, preprocessing.noise_multiplier = None, 1.0
    noise = noise_of(cfg)
    if isinstance(noise, Banded) and noise.bands == AUTO:
        noise = replace(noise, bands=1)
    target = Target(delta=cfg.privacy.delta, noise_multiplier=None if explicit else 1.0, accountant=reported(cfg))
    return _plan_at(cfg, module, "noise_multiplier", noise, target)


def _plan_at(
    cfg: DictConfig, module: pl.LightningModule, calibrate: str, noise: Gaussian, target: Target
) -> PrivacyPlan:  # fmt: skip
    """Makes the plan of a configuration; the parameter to calibrate, the noise and the target are the caller's."""
    if cfg.alpha:
        make("alpha", cfg.alpha)  # a wrong value is refused by its own key, not by that of the mechanism that has it
    clipping = {name: _by_group(cfg, name) for name in BY_GROUP}
    mechanisms = clipping["mechanism"].values() if isinstance(clipping["mechanism"], dict) else [clipping["mechanism"]]
    if cfg.alpha and not any(hasattr(mechanism, "alpha") for mechanism in mechanisms):
        raise ConfigError("alpha gives the scales of joint clipping; choose mechanism=joint too, or leave alpha out.")
    plan = make_plan(
        module,
        n=cfg.data.n,
        sampling=sampling_of(cfg),
        target=target,
        clipping=Clipping(make("group", cfg.group), **clipping, vectors=cfg.vectors),
        allocation=make("allocation", cfg.allocation),
        noise=noise,
        schedules=Schedules(**values_of(cfg.schedule)),
        private_metrics=_private_metrics(cfg, module),
        privacy_unit=privacy_unit_of(cfg),
        users=cfg.data.users,
        adjacency=cfg.privacy.adjacency,
        calibrate=calibrate,
    )
    return replace(plan, part=part_of(cfg.data.get("part"), cfg.data.id))


def _by_group(cfg: DictConfig, section: str) -> Any:
    """Makes the object of a section, or, if the section has `by_group`, one for each group of parameters.

    Returns:
        The object, None if the section is empty, or a dictionary of them by group. In `by_group` an object is given
        by the name of an option, or by a section of its own.
    """
    if not cfg[section] or "by_group" not in cfg[section]:
        return make(section, cfg[section]) if cfg[section] else None
    made, own = {}, cfg.copy()  # in which an option's interpolations are resolved
    for group, option in cfg[section].by_group.items():
        if isinstance(option, str):
            loaded: Any = OmegaConf.load(CONF / section / f"{option}.yaml")
            option = loaded.get(section, loaded)  # within it, if the file is for the package _global_
        own[section] = option
        made[str(group)] = make(f"{section}.by_group.{group}", own[section]) if option else None
    return made


def _batchnorm(cfg: DictConfig) -> Any:
    """What replaces the model's batch normalisation; None: nothing does."""
    return make("batchnorm", cfg.batchnorm) if cfg.batchnorm else None


def _private_metrics(cfg: DictConfig, module: pl.LightningModule) -> dict[str, Any]:
    """The values that are released in addition to gradients."""
    metrics = values_of(cfg.private_metrics)["release"] or {}
    normalise = _batchnorm(cfg)
    if not isinstance(normalise, PrivateBatchNorm):
        return metrics
    if BATCHNORM in metrics:
        raise ConfigError(
            f"private_metrics.release: batchnorm=private releases under the name {BATCHNORM}; choose another."
        )
    return metrics | normalise.release(module)


def accountants(cfg: DictConfig, plan: PrivacyPlan) -> list[str]:
    """The configured accountants, the reported one first. `all` stands for every one that has a bound for the plan."""
    ledger = plan.ledger()
    if "all" in cfg.accountant.names:
        return applicable_accountants(ledger)
    for name in cfg.accountant.names:
        releases(ledger, name)
    return list(cfg.accountant.names)


def make(section: str, node: Any, **arguments: Any) -> Any:
    """Makes the object of a `_target_` section, which may be of Lightning's."""
    if str(node.get("_target_")).startswith("pytorch_lightning."):  # the job may use the other of its two packages
        node = {**node, "_target_": node["_target_"].replace("pytorch_lightning", pl.__name__, 1)}
    made = made_of(section, node, **arguments)
    refuse_mixed(section, made)
    return made


def data_of(cfg: DictConfig) -> pl.LightningDataModule:
    """The data module; an error in its hooks, which read files, becomes a ConfigError."""
    data = make("data.module", cfg.data.module)
    if (by := features_map(cfg)) is not None:
        with _as_config_error("data.features_of", "a call", cfg.data.features_of._target_):
            data = Features(data, by, cfg.data.cache)
    for name in ("prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader"):
        if callable(hook := getattr(data, name, None)):
            setattr(data, name, _as_config_error("data.module", name, cfg.data.module._target_)(hook))
    return data


def check_files(cfg: DictConfig) -> None:
    """Refuses a file or folder of the user's that is not there, before what may not fit the data in it."""
    module = cfg.data.module
    if module._target_.startswith("dpexp.") and "test_path" in module:  # else a path may be a name on the hub
        for key in ("path", "test_path"):
            if module[key] is not None and not (files_of(module[key]) or is_hugging_face(module[key])):
                raise ConfigError(f"data.{key}={module[key]} cannot be read: No such file or directory.")


def features_map(cfg: DictConfig) -> Any:
    """The map from records to features, `data.features_of`; None: the records are trained on as they are."""
    if not cfg.data.features_of:
        return None
    with pl.utilities.seed.isolate_rng():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # weights that the map draws are the same in the job and where its model predicts
        by = as_map(make("data.features_of", cfg.data.features_of))
    for path in map(str, _values(OmegaConf.to_container(cfg.data.features_of), "weights")):
        if path.endswith(".safetensors"):  # else it is an argument of the network's own
            _refuse_non_private_weights(cfg, "data.features_of.weights", Path(path).expanduser())
    return by


def _values(node: Any, key: str) -> Iterator[Any]:
    """All values of a key in a nested section, at any depth, that are not null."""
    parts: Iterable[Any] = node if isinstance(node, list) else ()
    if isinstance(node, dict):
        if node.get(key) is not None:
            yield node[key]
        parts = node.values()
    for part in parts:
        yield from _values(part, key)


@contextmanager
def _as_config_error(key: str, hook: str, target: str) -> Iterator[None]:
    """Turns an error of the user's code into a ConfigError, so that it is reported without a traceback.

    An exception's text may contain a training record's values. So it is shown only for an import or a file that fails,
    and for the validation and test sets, which are taken as public; of other errors, only type and place are shown.

    Args:
        key: the option that names the code.
        hook: the method that is called.
        target: the class or function that has it.
    """
    try:
        yield
    except (ConfigError, MisconfigurationException):
        raise
    except Exception as error:
        is_about_files = isinstance(error, ImportError) or (isinstance(error, OSError) and error.strerror)
        is_public = is_about_files or hook in ("val_dataloader", "test_dataloader")
        said = f": {in_one_line(error)}" if is_public else ""
        raise ConfigError(f"{key}: {hook} of {target} failed ({place_of(error)}{said}).") from error


def set_loader_options(cfg: DictConfig, data: pl.LightningDataModule, plan: PrivacyPlan | None) -> None:
    """Sets the number of workers and, for some data modules, the batch size of their loaders.

    The batch size is the expected number of records in a round. Without privacy the loader draws the samples, so that
    any data module with a `batch_size` gets it. Private training draws its own samples, and only dpexp's own data
    modules get it, unless the configuration gives them one.
    """
    if hasattr(data, "num_workers"):
        data.num_workers = cfg.trainer.num_workers
    is_own = cfg.data.module._target_.startswith("dpexp.") and "batch_size" not in cfg.data.module
    if hasattr(data, "batch_size") and (plan is None or is_own):
        records = plan.sampling.q * plan.n if plan else sampling_of(cfg).resolve(cfg.data.n)[0].q * cfg.data.n
        data.batch_size = max(1, round(records))


def add_optimizer(cfg: DictConfig, module: pl.LightningModule, plan: PrivacyPlan | None) -> float | None:
    """Adds the configured optimizer and learning rate schedule to a classifier, once the number of rounds is known.

    Returns:
        What optimizer.lr=auto means; None if the learning rate is given.
    """
    if not isinstance(module, Classifier):
        chosen = [o for o in HydraConfig.get().overrides.task if re.match(r"[+~]*(optimizer|scheduler)\b", o)]
        if chosen:
            raise ConfigError(
                f"{chosen[0]} would be ignored: {type(module).__name__} configures its own; leave it out."
            )
        return None
    learning_rate = _default_learning_rate(cfg, plan)
    given = {} if learning_rate is None else {"lr": learning_rate}
    module.optimizer = make("optimizer", {**cfg.optimizer} | given, _partial_=True)
    optimizer = _tried(cfg, "optimizer", module.optimizer, module.parameters())
    if cfg.scheduler:
        module.scheduler = make("scheduler", cfg.scheduler, _partial_=True)
        _tried(cfg, "scheduler", module.scheduler, optimizer)
    return learning_rate


def _tried(cfg: DictConfig, section: str, making: Callable[[Any], Any], of: Any) -> Any:
    """Makes an optimizer of parameters, or a scheduler of an optimizer, and lets it make one step.

    Without gradients a step changes nothing; but only there some optimizers notice a wrong value.
    """
    try:
        made = making(of)
        made.step()
    except Exception as error:  # torch raises many types for a wrong value
        raise cannot_be_made(section, cfg[section], error) from error
    return made


def _default_learning_rate(cfg: DictConfig, plan: PrivacyPlan | None) -> float | None:
    """What optimizer.lr=auto means; None if the learning rate is given."""
    if cfg.optimizer.get("lr") != AUTO:
        return None
    numbers_of_texts("optimizer", cfg.optimizer._target_, {**cfg.optimizer, "lr": 1.0})
    norm = plan.gradient_norm if plan else 1.0
    return noisy_learning_rate(cfg.optimizer, cfg.rounds, norm)


def silence_lightning() -> None:
    """Silences Lightning's advice, which is about the training loop."""
    for package in ("pytorch_lightning", "lightning.pytorch"):
        for name in (package, f"{package}.utilities.rank_zero"):  # an import of the package sets the level of the first
            logging.getLogger(name).setLevel(logging.ERROR)
    for words in ("many workers", "LeafSpec", "GPU available but not used", "sync_dist=True", "with no optimizer"):
        warnings.filterwarnings("ignore", f".*{words}.*")


def module_of(cfg: DictConfig, load_weights: bool = True) -> pl.LightningModule:
    """The LightningModule of a configuration.

    Args:
        load_weights: load the configured initial weights; False where others are loaded anyway.
    """
    weights = cfg.model.get("weights")
    is_file = isinstance(weights, str) and weights.endswith(".safetensors")  # else it is an argument of the model's own
    model = make("model", _without(cfg, "model", "weights") if weights is None or is_file else cfg.model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model: {cfg.model._target_} gives an object of type {type(model).__name__}, not a torch.nn.Module."
        )
    if isinstance(model, pl.LightningModule):
        model.configure_model()  # which may make parameters, and does nothing when Lightning calls it again
    normalise = _batchnorm(cfg)
    if normalise is not None and (cfg.privacy.enabled or not isinstance(normalise, PrivateBatchNorm)):
        model = normalise(model)
    tuning = make("fine_tuning", cfg.fine_tuning)
    if load_weights and is_file:
        load_initial_weights(model, Path(weights).expanduser(), head_parameters(model, getattr(tuning, "head", None)))
        _refuse_non_private_weights(cfg, "model.weights", Path(weights).expanduser())
    model = tuning(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"fine_tuning={type(tuning).__name__}: no parameter of the model is trainable.")
    if cfg.privacy.enabled:
        refuse_mixing_layers(model)
    if isinstance(model, pl.LightningModule):
        _refuse_for_own_module(cfg)
        return model
    augment = _augment(cfg)
    model = _preprocessed(cfg, model) if cfg.preprocessing else model
    multiplicity = cfg.augment.multiplicity if augment else 1
    kind = LanguageModel if is_causal(model) else Classifier
    return kind(model, augment=augment, multiplicity=multiplicity, class_weights=_class_weights(cfg, model))


def _refuse_non_private_weights(cfg: DictConfig, key: str, path: Path) -> None:
    """Refuses, for a private job, a file that a job without privacy saved with the same `data.id`."""
    about = read_metadata(path)
    if cfg.privacy.enabled and about.get("private") == "False" and cfg.data.id and about.get("data_id") == cfg.data.id:
        raise ConfigError(
            f"{key}={path} come from a training without privacy on the records of data.id={cfg.data.id}; use "
            "weights trained on public data, or by a private job (whose ε is then spent as well)."
        )


def _refuse_for_own_module(cfg: DictConfig) -> None:
    """Refuses what dpexp's classifier does to a plain model, for a LightningModule of the user's."""
    weights = OmegaConf.select(cfg, "data.class_weights")
    for key, value, instead in (
        ("preprocessing", [*(cfg.preprocessing or [])] or None,
         "use PreprocessedModel of dpexp.privacy.preprocessing_methods within it"),
        ("augment", cfg.augment._target_ if cfg.augment else None,
         "let its training_step begin with batch = dpexp.views(batch, augment, K)"),
        ("data.class_weights", weights, "let its training_step call dpexp.weigh(w[y].mean() / w.max())"),
    ):  # fmt: skip
        if value is not None:
            raise ConfigError(
                f"{key}={value} is for a plain model, and model={cfg.model._target_} is a LightningModule; "
                f"{instead}, and leave {key} out."
            )


def _class_weights(cfg: DictConfig, model: torch.nn.Module) -> torch.Tensor | Callable[[], torch.Tensor] | None:
    """The weight of each class, or a function that returns them once counts are released; None: unweighted."""
    weights = cfg.data.class_weights
    if weights != "counts":
        return None if weights is None else torch.tensor(list(weights), dtype=torch.float32)
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
    """The model after its private preprocessing, whose steps must accept one another's output shapes."""
    chosen = {name: make(f"preprocessing.{name}", node) for name, node in cfg.preprocessing.items()}
    preprocessed = PreprocessedModel(chosen, model)
    if cfg.data.shape is None:
        return preprocessed
    x = torch.zeros(1, *cfg.data.shape)
    steps = {f"preprocessing.{name}": step for name, step in preprocessed.preprocessing.items()}
    for key, step in (steps | {"model": deepcopy(model).eval()}).items():
        try:
            with torch.no_grad():
                x = step(x)
        except ConfigError:
            raise
        except Exception as error:
            shape = list(x.shape[1:])
            raise ConfigError(
                f"{key} does not accept inputs of shape {shape}, as it gets them from data.shape="
                f"{list(cfg.data.shape)} with preprocessing={list(cfg.preprocessing)}; try {key}.shape={shape} "
                f"({in_one_line(error)[:200]})."
            ) from error
    return preprocessed
