"""Checks of a configuration that need no torch, whose import takes seconds."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unicodedata import is_normalized

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from dpexp.accounting.coverage import NAMES, check_covered, check_delta, check_names, is_bound
from dpexp.config import Config, Trainer, not_private_reason
from dpexp.errors import ConfigError
from dpexp.privacy.plan.options import Noise, Sampling, Schedules, Target, resolve_adjacency
from dpexp.privacy.sampling.policies import policy_class
from dpexp.privacy.sampling.privacy_unit import Example, make_privacy_unit
from dpexp.tracking.job_folder import BEGUN, RESERVED, RUN

CANARIES = ("dirac", "mislabelled")
MIN_TRAININGS = {"target_models": 1, "shadow_models": 4}  # of an audit with mislabelled canaries
DIAGNOSTICS = ("none", "unsafe")
OBJECTS = (
    "data.module", "model", "optimizer", "scheduler", "group", "clip_norm", "mechanism", "clip_rule", "allocation",
)  # fmt: skip
MAX_ID_LENGTH = 250
OF_A_RUN = ("config.yaml", "ledger.jsonl", "result.json", "multirun.yaml", RUN, RESERVED, BEGUN)


def check(cfg: DictConfig) -> None:
    """Checks the values of a configuration.

    Raises:
        ConfigError: names the first value that is missing, out of range or contradicts another.
    """
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except InterpolationToMissingValueError as error:
        raise ConfigError(f"{str(error).splitlines()[0].rpartition(' ')[2]} must be given.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given.")
    for key in _nan_keys(values):
        raise ConfigError(f"{key}=nan is not a number.")
    _check_keys(cfg)
    _check_objects(cfg)
    if cfg.diagnostics not in DIAGNOSTICS:
        raise ConfigError(f"diagnostics={cfg.diagnostics} is unknown; choose one of {', '.join(DIAGNOSTICS)}.")
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} must lie between 0 and 2^32 - 1.")
    if cfg.data.classes is not None and cfg.data.classes < 1:
        raise ConfigError(f"data.classes={cfg.data.classes} must be at least 1.")
    _check_class_weights(cfg)
    if any(length < 1 for length in cfg.data.shape or ()):
        raise ConfigError(f"data.shape={cfg.data.shape} must hold integers of at least 1.")
    if cfg.register is not None and cfg.tracking.uri is None:
        raise ConfigError(f"register={cfg.register} needs MLflow's registry; choose tracking=mlflow.")
    _check_augment(cfg.augment)
    _check_trainer(cfg.trainer)
    _check_accountants(list(cfg.accountant.names))
    check_delta(cfg.privacy.delta)
    _check_privacy(cfg)
    if cfg.audit is not None:
        _check_audit(cfg)
    _check_data_id(cfg.data.id)
    if cfg.privacy.budget is not None:
        _check_budget(cfg)


def reported(cfg: DictConfig) -> str:
    """The accountant whose ε is reported and calibrated."""
    return str(cfg.accountant.names[0]) if cfg.accountant.names[0] != "all" else "pld"


def privacy_unit_of(cfg: DictConfig) -> Example:
    return make_privacy_unit(**_values(cfg.privacy_unit))


def noise_of(cfg: DictConfig) -> Noise:
    return Noise(**_values(cfg.noise))


def target_of(cfg: DictConfig, **changes: Any) -> Target:
    """The target of a configuration; `changes` replace some of its values."""
    names = ("epsilon", "delta", "max_advantage", "max_tpr_at_fpr", "noise_multiplier")
    values = {name: value for name, value in _values(cfg.privacy).items() if name in names}
    return Target(**values | changes, accountant=reported(cfg))


def sampling_of(cfg: DictConfig) -> Sampling:
    return Sampling(**_values(cfg.sampling))


def schedules_of(cfg: DictConfig) -> Schedules:
    return Schedules(**_values(cfg.schedule))


def _values(section: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(section, resolve=True)  # type: ignore[return-value]


def refuse_taken(folder: Path) -> None:
    """Refuses a folder with another run's files."""
    if found := taken(folder):
        raise ConfigError(
            f"{folder} already holds a run, with its {found[0]}; choose another hydra.run.dir, or delete it."
        )


def taken(folder: Path) -> list[str]:
    """The files of a run that are in a folder."""
    return [name for name in OF_A_RUN if (folder / name).exists()]


def _nan_keys(node: Any, key: str = "") -> Iterator[str]:
    if isinstance(node, float) and math.isnan(node):
        yield key
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from _nan_keys(child, f"{key}.{name}" if key else str(name))


def _check_keys(cfg: DictConfig) -> None:
    """Refuses keys that a plus has added to a section of which every key is known."""
    for name, declared in get_type_hints(Config).items():
        section = next((kind for kind in (declared, *get_args(declared)) if is_dataclass(kind)), None)
        if section is None or section is Trainer or not cfg.get(name):
            continue
        known = [field.name for field in fields(section)]
        for key in cfg[name]:
            if key not in known:
                raise ConfigError(f"{name}.{key}: {name} has no key {key!r}; known: {', '.join(known)}.")


def _check_objects(cfg: DictConfig) -> None:
    for key in (*OBJECTS, *(f"preprocessing.{name}" for name in cfg.preprocessing or ())):
        node = OmegaConf.select(cfg, key)
        if not node and key == "scheduler":
            continue
        if not isinstance(node, DictConfig) or not isinstance(node.get("_target_"), str):
            shown = "null" if node is None else str(node)
            raise ConfigError(
                f"{key}={shown} does not name what to make; choose an option of that group, or give "
                f"'{key}={{_target_: package.Name}}' with its arguments."
            )


def _check_class_weights(cfg: DictConfig) -> None:
    weights = cfg.data.class_weights
    if weights is None:
        return
    key, classes = f"data.class_weights={weights}", cfg.data.classes
    if classes is None:
        raise ConfigError(f"{key} needs data with classes, and data.classes is null; set data.class_weights=null.")
    if cfg.privacy.enabled and privacy_unit_of(cfg).local_training is not None:
        raise ConfigError(
            f"{key} weighs a record's gradient, and with privacy_unit.local_training a user has many, clipped "
            "together; set data.class_weights=null, or privacy_unit.local_training=null."
        )
    if weights == "counts":
        if not any(str(one.get("_target_")).endswith(".ClassCounts") for one in (cfg.preprocessing or {}).values()):
            raise ConfigError(f"{key} needs released counts; add preprocessing=[class_counts], or give a list.")
        return
    numbers = OmegaConf.to_container(weights) if OmegaConf.is_list(weights) else None
    plain = isinstance(numbers, list) and all(isinstance(w, int | float) and math.isfinite(w) for w in numbers)
    if not plain or len(numbers) != classes or min(numbers) < 0 or max(numbers) == 0:  # type: ignore[arg-type]
        raise ConfigError(
            f"{key} must be a list of {classes} public numbers, one per class, none negative and not all 0, or counts."
        )


def _check_augment(augment: DictConfig | None) -> None:
    if not augment:
        return
    views = augment.get("multiplicity")
    if not isinstance(views, int) or views < 1:
        raise ConfigError(
            f"augment.multiplicity={views} must be an integer of at least 1, the number of views of each record."
        )
    if augment.get("_target_") is None and views > 1:
        raise ConfigError(f"augment.multiplicity={views} with augment=none would repeat each record; choose flip_crop.")


def _check_trainer(trainer: DictConfig) -> None:
    at_once = trainer.max_physical_batch_size
    if at_once != "auto" and (not isinstance(at_once, int) or at_once < 1):
        raise ConfigError(f"trainer.max_physical_batch_size={at_once} must be an integer of at least 1, or auto.")
    if trainer.compile not in ("auto", True, False):
        raise ConfigError(f"trainer.compile={trainer.compile} must be true, false or auto.")
    for name, least in (("threads", 1), ("num_evaluations", 0), ("num_workers", 0)):
        if trainer[name] is not None and trainer[name] < least:
            raise ConfigError(f"trainer.{name}={trainer[name]} must be at least {least}.")


def _check_audit(cfg: DictConfig) -> None:
    audit = cfg.audit
    if audit.canary_type not in CANARIES:
        raise ConfigError(f"audit.canary_type={audit.canary_type} is unknown; known: {', '.join(CANARIES)}.")
    if audit.num_canaries < 100:
        raise ConfigError(f"audit.num_canaries={audit.num_canaries} must be at least 100.")
    if not 0 < audit.confidence < 1:
        raise ConfigError(f"audit.confidence={audit.confidence} must lie strictly between 0 and 1.")
    for delta in audit.deltas:
        check_delta(delta)
    if audit.canary_type == "mislabelled":
        return _check_mislabelled(cfg)
    if not cfg.privacy.enabled:
        raise ConfigError("audit=dirac tests a claim, and with privacy.enabled=false there is none; set audit=null.")
    for key in MIN_TRAININGS:
        if audit[key] is not None:
            raise ConfigError(f"audit.{key}={audit[key]} applies to audit=mislabelled only; leave it out.")


def _check_mislabelled(cfg: DictConfig) -> None:
    for key, least in MIN_TRAININGS.items():
        if cfg.audit[key] is None or cfg.audit[key] < least:
            raise ConfigError(
                f"audit.{key}={cfg.audit[key]} must be at least {least} for audit.canary_type=mislabelled."
            )
    if cfg.draw is not None:
        raise ConfigError(
            "audit=mislabelled shows results of every trial, and hydra/sweeper=private_selection only covers showing "
            "the best one; audit that one afterwards."
        )
    if privacy_unit_of(cfg) != Example():
        raise ConfigError(
            f"audit=mislabelled includes or excludes single examples, and privacy_unit={cfg.privacy_unit.kind} makes "
            f"the claim for a {privacy_unit_of(cfg)}; choose audit=dirac."
        )
    policy, adjacency = cfg.sampling.policy, cfg.privacy.adjacency
    if (
        cfg.privacy.enabled
        and policy_class(policy).needs_exact_n
        and resolve_adjacency(policy_class(policy).name, adjacency) == "replace_null"
    ):
        raise ConfigError(
            f"audit=mislabelled has no null record to replace a canary by, as sampling={policy} with "
            "adjacency=replace_null requires; choose sampling=poisson, or audit=dirac."
        )


def _check_accountants(names: list[str]) -> None:
    if not names:
        raise ConfigError(f"accountant.names={names} must be among {', '.join(NAMES)}; or [all].")
    check_names([name for name in names if name != "all"])
    if names[0] != "all" and not is_bound(names[0]):
        raise ConfigError(
            f"accountant.names={names}: {names[0]} is an approximation, which may lie below the true ε, so it cannot "
            "be the reported one; put another first."
        )


def _check_privacy(cfg: DictConfig) -> None:
    privacy, unit = cfg.privacy, privacy_unit_of(cfg)
    records = unit.num_records(cfg.data.n, cfg.data.users) if privacy.enabled else None
    policy, rounds = sampling_of(cfg).resolve(cfg.data.n, records)
    if not privacy.enabled:
        return
    target = target_of(cfg)
    adjacency = resolve_adjacency(policy.name, privacy.adjacency)
    allocation = cfg.allocation._target_
    if allocation.startswith("dpexp."):  # another allocation may fix the noise itself
        target.check(cfg.calibrate, allocation.endswith(".Explicit"))
    check_covered(policy.name, adjacency, target.accountant)
    noise_of(cfg).check(policy.name, cfg.calibrate, bool(target.given), cfg.sampling.partitions)
    schedules = schedules_of(cfg)
    schedules.check(policy.name, cfg.calibrate)
    schedules.over(rounds)


def _check_data_id(name: str | None) -> None:
    plain = name is None or (name == name.strip() and name.isprintable() and is_normalized("NFC", name))
    if name is not None and not (plain and 0 < len(name) <= MAX_ID_LENGTH):
        raise ConfigError(
            f"data.id={name!r} must be a name of 1 to {MAX_ID_LENGTH} printable characters in Unicode's form NFC, "
            "without blanks at its ends."
        )


def _check_budget(cfg: DictConfig) -> None:
    """Whether a budget can be kept at all; the tracking store decides how much of it remains."""
    from dpexp.accounting.multiple_runs import budget, check_rdp_covered

    node = cfg.privacy.budget
    budget(OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
    if cfg.data.id is None:
        raise ConfigError("privacy.budget needs data.id, the name of the data set for which it is kept.")
    if cfg.tracking.uri is None or cfg.debug:
        untracked = "debug=true" if cfg.debug else "tracking.uri=null"
        raise ConfigError(
            f"privacy.budget with {untracked}: no later job could know what this one spends; choose tracking=mlflow "
            "without debug, or leave the budget out."
        )
    reason = not_private_reason(cfg)
    if reason is not None:
        raise ConfigError(
            f"privacy.budget cannot be kept by a run that is not private ({reason}); remove that, or the budget."
        )
    policy = policy_class(cfg.sampling.policy).name
    check_rdp_covered(policy, resolve_adjacency(policy, cfg.privacy.adjacency))
