"""Checks of a configuration before anything is made. They need no torch, whose import takes seconds."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import is_normalized

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from dpexp.accounting.coverage import NAMES, check_covered, check_delta, coverage
from dpexp.accounting.sampling import Policy
from dpexp.commands.objects import made_of
from dpexp.config import BY_GROUP, CONF, Trainer, options_by_key, part_of, refusal_of_interpolation
from dpexp.errors import ConfigError, exactly_one, made_from
from dpexp.privacy.plan.options import Gaussian, Schedules, Target
from dpexp.privacy.sampling.privacy_unit import Example, User
from dpexp.tracking.job_folder import LEDGER, PLANNED_LEDGER, RUN
from dpexp.tracking.provenance import without_passwords

Made = TypeVar("Made")
OBJECTS = (
    "data.module", "model", "optimizer", "scheduler", "group", "clip_norm", "alpha", "mechanism", "clip_rule",
    "allocation", "data.features_of", "batchnorm", "sampling", "noise", "privacy_unit",
)  # fmt: skip
# Keys of data that are read whatever its module is, and data.root, which sweeps over several data sets give for all
OF_ALL_DATA = (
    "data.id", "data.n", "data.users", "data.shape", "data.classes", "data.class_weights", "data.pad_to", "data.unsafe",
    "data.features_of", "data.cache", "data.module", "data.root",
)  # fmt: skip
OF_A_RUN = ("config.yaml", LEDGER, "result.json", "multirun.yaml", RUN, PLANNED_LEDGER)
# Options of Lightning's Trainer that are refused -> what to give instead, or why
_REFUSED = {
    ("max_epochs", "min_epochs", "max_steps", "min_steps"):
        "the plan determines the number of rounds; give sampling.steps or sampling.epochs",
    ("use_distributed_sampler", "limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs"):
        "sampling determines each round's sample, from all of the training set",
    ("check_val_every_n_epoch", "val_check_interval"): "give trainer.num_evaluations",
    ("sync_batchnorm",): "it mixes the records of all processes",
    ("logger",): "choose tracking, or logger at the top level",
    ("callbacks",): "choose callbacks, at the top level",
    ("fast_dev_run",): "give debug=true",
    ("accumulate_grad_batches",): "trainer.max_physical_batch_size splits a sample",
    ("enable_checkpointing",): "give checkpoint.every_n_rounds",
    ("default_root_dir",): "give hydra.run.dir",
    ("profiler",): "its counts and times depend on the size of each round's sample, which is private",
    ("barebones",): "it would leave out the callback that makes training private",
    ("plugins",): "give trainer.precision",
    ("model_registry",): "give register",
    ("enable_autolog_hparams",): "the whole configuration is logged",
}  # fmt: skip
REFUSED = {name: why for names, why in _REFUSED.items() for name in names}


def check(cfg: DictConfig) -> None:
    """Refuses the first value that is missing, out of range or contradicts another."""
    _check_complete(cfg)
    _check_keys(cfg)
    _check_objects(cfg)
    _check_single_values(cfg)
    _check_class_weights(cfg)
    _check_part(cfg)
    _check_accountants(list(cfg.accountant.names))
    for delta in (cfg.privacy.delta, *(cfg.audit.deltas if cfg.audit else ())):
        check_delta(delta)
    _check_privacy(cfg)
    _check_budget(cfg)


def reported(cfg: DictConfig) -> str:
    """The accountant whose ε is reported and calibrated."""
    return str(cfg.accountant.names[0]) if cfg.accountant.names[0] != "all" else "pld"


def privacy_unit_of(cfg: DictConfig) -> Example:
    return _made_as(Example, "privacy_unit", cfg)


def target_of(cfg: DictConfig) -> Target:
    names = ("epsilon", "delta", "max_advantage", "max_tpr_at_fpr", "noise_multiplier")
    values = {name: value for name, value in values_of(cfg.privacy).items() if name in names}
    with made_from("privacy"):
        return Target(**values, accountant=reported(cfg))


def sampling_of(cfg: DictConfig) -> Policy:
    """The sampling policy, its rate and length as they are given."""
    return _made_as(Policy, "sampling", cfg)  # type: ignore[type-abstract]


def noise_of(cfg: DictConfig) -> Gaussian:
    return _made_as(Gaussian, "noise", cfg)


def _made_as(kind: type[Made], section: str, cfg: DictConfig) -> Made:
    """The object of a section, which must be of a kind."""
    made = made_of(section, cfg[section])
    if not isinstance(made, kind):
        raise ConfigError(f"{section}: {cfg[section]._target_} is no subclass of {kind.__module__}.{kind.__name__}.")
    return made


def values_of(section: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(section, resolve=True)  # type: ignore[return-value]


def not_private_reason(cfg: DictConfig) -> str | None:
    """Why the (ε, δ) of a run does not cover all of its outputs; None if it does."""
    # The job gives this reason to its callback, so that the ledger has it, too. FitOptions.why_not_private looks for a
    # reason only if it is given none: for users of the callback, who have no configuration.
    if not cfg.privacy.enabled:
        return "trained without privacy"
    reasons = {
        "the noise seed is known": cfg.privacy.noise_seed is not None,
        "data.schema was filled in from the rows without noise": cfg.data.unsafe,
        "unsafe diagnostics": cfg.diagnostics == "unsafe",
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


_RATE = ("sampling.sampling_rate", "sampling.expected_batch_size")
_REPLACED = {  # by what is calibrated: the keys whose values a calibration replaces
    "sampling_rate": (*_RATE, "privacy.noise_multiplier", "allocation.sigma"),
    "sampling_rate_at_fixed_noise": (*_RATE, "allocation.sigma_of_average"),
    "steps": ("sampling.steps", "sampling.epochs"),
    "clip_norm": ("privacy.noise_multiplier",),
}


def replaced(cfg: DictConfig) -> dict[str, Any]:
    """The configured values that calibration replaces, by key."""
    keys = _REPLACED.get(cfg.calibrate, ()) if cfg.privacy.enabled else ()
    return {key: value for key in keys if (value := OmegaConf.select(cfg, key)) is not None}


def taken(folder: Path) -> list[str]:
    """The files of a run that are in a folder."""
    return [name for name in OF_A_RUN if (folder / name).exists()]


def _check_complete(cfg: DictConfig) -> None:
    """Refuses a value that is missing, cannot be resolved or is NaN."""
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except InterpolationToMissingValueError as error:
        raise ConfigError(f"{str(error).splitlines()[0].rpartition(' ')[2]} must be given.") from error
    except OmegaConfBaseException as error:
        refusal = refusal_of_interpolation(error)
        raise ConfigError(refusal or f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given.")
    for key in _nan_keys(values):
        raise ConfigError(f"{key}=nan is not a number.")


def _nan_keys(node: Any, key: str = "") -> Iterator[str]:
    """The keys of a nested section whose values are NaN."""
    if isinstance(node, float) and math.isnan(node):
        yield key
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    for name, child in children:
        yield from _nan_keys(child, f"{key}.{name}" if key else str(name))


def _check_keys(cfg: DictConfig) -> None:
    """Refuses a key that a plus has added to a section of known keys, and a key that the chosen data does not read."""
    for name in map(str, cfg):
        section = OmegaConf.get_type(cfg, name)
        if not is_dataclass(section) or section is Trainer:
            continue
        known = [field.name for field in fields(section)]
        for key in cfg[name]:
            if key not in known:
                raise ConfigError(f"{name}.{key}: {name} has no key {key!r}; known: {', '.join(known)}.")
    written = OmegaConf.to_yaml(cfg)
    # What the data module reads is seen by its references to keys of data, as ${data.path}. The configuration of a
    # finished job is written without references, and was checked before.
    if "${" not in written:
        return
    for key, options in options_by_key().items():
        if not key.startswith("data.") or key in OF_ALL_DATA:
            continue
        value = OmegaConf.select(cfg, key)
        if value is not None and f"${{{key}}}" not in written:
            raise ConfigError(f"{key}={value}: the chosen data has no such key, as {' or '.join(options)} has.")


def _check_objects(cfg: DictConfig) -> None:
    """Refuses a section that names no class or function to make."""
    for key in (*OBJECTS, *(f"preprocessing.{name}" for name in cfg.preprocessing or ())):
        node = OmegaConf.select(cfg, key)
        if not node and key in ("scheduler", "clip_norm", "alpha", "data.features_of", "batchnorm"):
            continue
        if key in BY_GROUP and isinstance(node, DictConfig) and "by_group" in node:
            _check_by_group(key, node.by_group)
            continue
        if not isinstance(node, DictConfig) or not isinstance(node.get("_target_"), str):
            shown = "null" if node is None else str(node)
            advice = f"choose an option of that group, or give '{key}={{_target_: package.Name}}' with its arguments"
            if key.startswith("preprocessing."):
                advice += f"; if an experiment sets its arguments, remove them with '~{key}'"
            raise ConfigError(f"{key}={shown} does not name what to make; {advice}.")


def _check_by_group(section: str, options: Any) -> None:
    """Refuses a `by_group` that does not give each group an option of the section, or a section of its own."""
    known = sorted({path.stem for path in (CONF / section).glob("*.yaml")} - {"by_group"})
    if not isinstance(options, DictConfig):
        raise ConfigError(f"{section}.by_group={options} must be {{group: option}}, with one of {', '.join(known)}.")
    for group, option in options.items():
        is_section = isinstance(option, DictConfig) and isinstance(option.get("_target_"), str)
        if not is_section and option not in known and not (option is None and section == "clip_norm"):
            raise ConfigError(
                f"{section}.by_group.{group!s}={option} must be one of {', '.join(known)}; or "
                "{_target_: package.Name} with its arguments."
            )


def _check_single_values(cfg: DictConfig) -> None:
    """Checks the values whose range depends on at most one other value."""
    at_once, name, audit = cfg.trainer.max_physical_batch_size, cfg.data.id, cfg.audit
    every = cfg.checkpoint.every_n_rounds
    augmentation, views = (cfg.augment.get("_target_"), cfg.augment.get("multiplicity")) if cfg.augment else (None, 1)
    is_printable = name is None or (name == name.strip() and name.isprintable() and is_normalized("NFC", name))
    is_name = is_printable and (name is None or 0 < len(name) <= 250)
    momentum = OmegaConf.select(cfg, "optimizer.momentum")
    is_momentum = not isinstance(momentum, int | float) or 0 <= momentum < 1  # other types are refused by the optimizer
    names_people = cfg.data.person not in (None, "row")
    keeps_people_together = not names_people or isinstance(privacy_unit_of(cfg), User) or not cfg.privacy.enabled
    is_batch_size = at_once == "auto" or (isinstance(at_once, int) and at_once >= 1)
    for key, holds, wanted in (
        ("optimizer.momentum", is_momentum, "must lie in [0, 1)"),
        ("diagnostics", cfg.diagnostics in ("none", "unsafe"), "is unknown; choose one of none, unsafe"),
        ("seed", 0 <= cfg.seed < 2**32, "must lie between 0 and 2^32 - 1"),
        ("data.classes", cfg.data.classes is None or cfg.data.classes >= 1, "must be at least 1"),
        ("data.shape", all(length >= 1 for length in cfg.data.shape or ()), "must hold integers of at least 1"),
        ("data.id", is_name,
         "must be a name of 1 to 250 printable characters in Unicode's form NFC, without blanks at its ends"),
        ("data.id", name is None or without_passwords(name) == name,
         "has a password, which would be shown with each run; name the data without it"),
        ("data.person", keeps_people_together,
         "identifies people, whose rows belong together; add privacy_unit=user, or give the word row"),
        ("register", cfg.register is None or cfg.tracking.uri is not None,
         "needs MLflow's registry; choose tracking=mlflow"),
        ("trainer.max_physical_batch_size", is_batch_size, "must be an integer of at least 1, or auto"),
        ("trainer.compile", cfg.trainer.compile in ("auto", True, False), "must be true, false or auto"),
        ("trainer.memory", cfg.trainer.memory in ("usual", "low"), "must be usual or low"),
        ("trainer.threads", cfg.trainer.threads is None or 1 <= cfg.trainer.threads <= 1024,
         "must be between 1 and 1024"),
        ("checkpoint.every_n_rounds", every is None or every >= 1, "must be at least 1, or null"),
        ("trainer.num_evaluations", cfg.trainer.num_evaluations >= 0, "must be at least 0"),
        ("trainer.num_workers", cfg.trainer.num_workers >= 0, "must be at least 0"),
        ("augment.multiplicity", isinstance(views, int) and views >= 1,
         "must be an integer of at least 1, the number of views of each record"),
        ("augment.multiplicity", augmentation is not None or views == 1,
         "with augment=none would repeat each record; choose flip_crop"),
        ("audit.num_canaries", audit is None or audit.num_canaries >= 100, "must be at least 100"),
        ("audit.confidence", audit is None or 0 < audit.confidence < 1, "must lie strictly between 0 and 1"),
        ("privacy.enabled", audit is None or cfg.privacy.enabled,
         "leaves audit=dirac no claim to test; set audit=null"),
    ):  # fmt: skip
        if not holds:
            value = OmegaConf.select(cfg, key)
            raise ConfigError(f"{key}={repr(value) if key == 'data.id' else value} {wanted}.")


def _check_part(cfg: DictConfig) -> None:
    """Refuses a data.part for which runs on disjoint parts would have to add up.

    What part a record is in must follow from the record alone, and be the same in neighbouring data sets.
    """
    part, module, unit = cfg.data.get("part"), cfg.data.module, privacy_unit_of(cfg)
    if part_of(part, cfg.data.id) is None:
        return
    adjacency = check_covered(type(sampling_of(cfg)), cfg.privacy.adjacency)
    person, by_person = module.get("person", module.get("user")), getattr(unit, "user_attribute", None) == "user_of"
    has_one_part = unit == Example() or (by_person and part.column == person)
    for holds, wanted in (
        (module.get("part") == part, f"is no option of {module._target_}; choose data=csv or data=documents"),
        (cfg.data.id is not None, "needs data.id, the name of the data set that all parts are of"),
        (has_one_part,
         f"needs privacy_unit=example, in which a row has one id, or privacy_unit=user and its column, {person}"),
        (adjacency == "add_remove", f"needs adjacency=add_remove: with {adjacency}, a record may change its part"),
    ):  # fmt: skip
        if not holds:
            raise ConfigError(f"data.part={part} {wanted}.")


def _check_class_weights(cfg: DictConfig) -> None:
    """Refuses class weights that are no public numbers of the classes, or do not fit the way records are clipped."""
    weights, classes = cfg.data.class_weights, cfg.data.classes
    if weights is None:
        return
    key = f"data.class_weights={weights}"
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
    numbers = list(weights) if OmegaConf.is_list(weights) else []
    are_weights = all(isinstance(w, int | float) and 0 <= w < math.inf for w in numbers) and any(numbers)
    if not are_weights or len(numbers) != classes:
        raise ConfigError(
            f"{key} must be a list of {classes} public numbers, one per class, none negative and not all 0, or counts."
        )


def _check_accountants(names: list[str]) -> None:
    if not names:
        raise ConfigError(f"accountant.names={names} must be among {', '.join(NAMES)}; or [all].")
    for name in names:
        if name != "all":
            coverage(name)  # refuses an unknown one


def _check_privacy(cfg: DictConfig) -> None:
    """Checks how sampling, target, allocation, noise and schedules go together; without privacy, the sampling alone."""
    privacy, unit = cfg.privacy, privacy_unit_of(cfg)
    records = unit.num_records(cfg.data.n, cfg.data.users) if privacy.enabled else None
    sampling = sampling_of(cfg)
    policy, rounds = sampling.resolve(cfg.data.n, records)
    if not privacy.enabled:
        return
    target = target_of(cfg)
    allocation = cfg.allocation._target_
    if allocation == "dpexp.Explicit":
        exactly_one("allocation", **{key: cfg.allocation.get(key) for key in ("sigma", "sigma_of_average")})
    if allocation.startswith("dpexp."):  # another allocation may fix the noise itself
        target.check(cfg.calibrate, allocation.endswith(".Explicit"))
    check_covered(type(policy), privacy.adjacency, target.accountant)
    noise_of(cfg).check(policy, cfg.calibrate, bool(target.given))
    schedules = Schedules(**values_of(cfg.schedule))
    schedules.check(sampling, cfg.calibrate)
    schedules.over(rounds)


def _check_budget(cfg: DictConfig) -> None:
    """Refuses a budget that cannot be kept at all. The tracking store decides how much of it remains."""
    node = cfg.privacy.budget
    if node is None:
        return
    from dpexp.accounting.multiple_runs import budget, check_rdp_covered

    budget(node)
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
    policy = type(sampling_of(cfg))
    check_rdp_covered(policy, check_covered(policy, cfg.privacy.adjacency))
