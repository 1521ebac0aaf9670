"""Name, tags and parameters of a run, from its configuration."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp.config import COMMAND, not_private_reason
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.tracking.provenance import provenance, without_passwords

PARENT = "DPEXP_PARENT_RUN"  # an environment variable, which reaches the processes of every launcher
MAX_NAME = 250  # characters of a run's name
_MAX_PARAM = 6000  # characters of a parameter's value
_PRIVACY_GROUPS = ("group", "clip_norm", "mechanism", "clip_rule", "allocation")
_NOT_IN_NAMES = ("sweep=", "tracking", "hydra", "checkpoint", "data.id", "privacy.budget")
_NOT_IN_HASH = ("tracking", "rounds", "checkpoint", "register", "verbose")  # cannot change the result
_SETS_ALL_SECTIONS = ("experiment", "sweep")  # groups whose options set keys of every section
_SET_BY_TRIAL = ("hydra", "rounds", "checkpoint")  # sections that each trial fills in itself


def parent_id() -> str | None:
    """The run id of the sweep that this trial belongs to."""
    return os.environ.get(PARENT) if HydraConfig.get().mode == RunMode.MULTIRUN else None


def config_hash(cfg: DictConfig) -> str:
    """A hash of the resolved configuration: equal for the same trial of a sweep, wherever it is tracked."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    skipped = [*_NOT_IN_HASH]
    if not cfg.privacy.enabled:  # one baseline for all private configurations
        skipped += [*_PRIVACY_GROUPS, "privacy", "privacy_unit", "accountant", "calibrate", "schedule"]
    content = {section: value for section, value in content.items() if section not in skipped}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def tags(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, str]:
    """A run's tags: the chosen options, privacy, seed, provenance."""
    chosen = choices()
    privacy = (*_PRIVACY_GROUPS, "noise", "sampling") if cfg.privacy.enabled else ()
    found = {f"dpexp.{name}": str(chosen.get(name)) for name in ("data", "model", *privacy)}
    reason = not_private_reason(cfg)
    found |= provenance() | {"dpexp.private": f"no: {reason}" if reason else "yes", "dpexp.pid": str(os.getpid())}
    found |= {"dpexp.config_hash": config_hash(cfg), "dpexp.seed": str(cfg.seed)}
    if plan is not None:
        found |= {"dpexp.adjacency": plan.adjacency, "dpexp.privacy_unit": str(plan.privacy_unit)}
        found |= {"dpexp.calibrate": cfg.calibrate}
    parent = parent_id()
    return found | ({"mlflow.parentRunId": parent} if parent else {})


def run_name(cfg: DictConfig) -> str:
    """The overrides, those that a sweep varies first, since the list of runs cuts names off."""
    if cfg.tracking.run_name:
        return str(cfg.tracking.run_name)[:MAX_NAME]
    shown = [word for word in map(str, HydraConfig.get().overrides.task) if not word.startswith(_NOT_IN_NAMES)]
    if parent_id():
        overrides = [word for word in shlex.split(os.environ.get(COMMAND, "")) if "=" in word and word[0] != "-"]
        swept = swept_keys(overrides, HydraConfig.get().sweeper)
        shown.sort(key=lambda override: (_key(override) not in swept, _key(override) == "seed"))
    keys = [_key(override).rpartition(".")[2] for override in shown]
    short = [word[word.index(key) :] if keys.count(key) == 1 else word for word, key in zip(shown, keys, strict=True)]
    groups = [choices().get(name) for name in ("data", "model", "group", "mechanism")]
    return without_passwords(", ".join(short))[:MAX_NAME] or " ".join(map(str, groups))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def choices() -> dict[str, str]:
    """The chosen option of each configuration group."""
    return dict(HydraConfig.get().runtime.choices)


def params(values: Any) -> dict[str, str]:
    """A configuration as MLflow's parameters, without passwords."""
    return {valid_name(key): without_passwords(str(value))[:_MAX_PARAM] for key, value in _flatten(values).items()}


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {prefix: json.dumps(node) if isinstance(node, list | dict) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def valid_name(name: str) -> str:
    """Drops the characters that MLflow allows in no name."""
    return re.sub(r"[^\w.\- :/]", "", name)


def swept_keys(overrides: Sequence[str], sweeper: DictConfig) -> set[str]:
    """The keys and groups that a sweep varies."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = {str(override.key_or_group) for override in parsed if override.is_sweep_override()}
    return swept | {str(key).lstrip("+~") for key in sweeper.get("params") or {}}


def shared_values(cfg: DictConfig) -> dict[str, Any]:
    """The values that all trials of a sweep share, by key.

    Left out are the swept keys, the groups whose option is swept, and whatever is interpolated from them.
    """
    swept = swept_keys([str(override) for override in cfg.hydra.overrides.task], cfg.hydra.sweeper)
    if swept.intersection(_SETS_ALL_SECTIONS):
        return {}
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in _SET_BY_TRIAL])
    OmegaConf.set_struct(own, False)
    for key in swept:
        OmegaConf.update(own, key, "???", merge=False)
    return dict(_resolvable(own))


def _resolvable(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in map(str, node):
        if OmegaConf.is_missing(node, name):
            continue
        try:
            child = node[name]
            if isinstance(child, DictConfig):
                yield from _resolvable(child, f"{prefix}{name}.")
                continue
            if isinstance(child, ListConfig):
                child = OmegaConf.to_container(child, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException:  # interpolated from a swept key
            continue
        yield f"{prefix}{name}", child
