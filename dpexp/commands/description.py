"""How a run is described: its name, tags and parameters, of its configuration."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from dpexp.commands.command_line import compose
from dpexp.commands.validate import not_private_reason, replaced, values_of
from dpexp.config import BY_GROUP, COMMAND
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.tracking.job_folder import PLANNED_LEDGER, RECORD
from dpexp.tracking.provenance import MAX_NAME, PARENT, provenance, valid_name, without_passwords

_ALWAYS_SHOWN = ("data.n", "privacy.epsilon", "privacy.delta")
_MAX_PARAM = 6000  # characters of a parameter's value
_PRIVACY_GROUPS = ("group", "clip_norm", "alpha", "mechanism", "clip_rule", "allocation")
_NAMED_BY_VALUE = ("data", "model", "group", "mechanism", "sampling", "experiment")
_SHARED = ("data", "model", "experiment", "train")
_SHORT = {"privacy.epsilon": "ε", "privacy.delta": "δ", "privacy.noise_multiplier": "z"}
_NOT_IN_NAMES = ("sweep=", "tracking", "hydra", "checkpoint", "data.id", "privacy.budget")
_NOT_IN_HASH = ("tracking", "logger", "rounds", "checkpoint", "register", "verbose")  # cannot change the result


def facts(cfg: DictConfig, plan: PrivacyPlan | None, accountants: Sequence[str]) -> dict[str, Any]:
    """What `dpexp.tracking.record.Record` keeps of a job before its first round."""
    budget = cfg.privacy.budget and values_of(cfg.privacy.budget)
    others = replaced(cfg)
    given = {f"replaced.{key}" if key in others else key: value for key, value in _flat(values_of(cfg)).items()}
    return {
        "name": run_name(cfg),
        "start": int(time.time() * 1000),
        "tags": tags(cfg, plan),
        "params": _shown(given) | (_planned(plan) if plan else {}),
        "configuration": given,
        "data": {
            "name": choices().get("data", "data"),
            "digest": f"n={cfg.data.n}",
            "source_type": "code",
            "source": json.dumps({"module": cfg.data.module.get("_target_")}),
            "profile": json.dumps({"n": cfg.data.n}),
        },
        "files": [RECORD, "config.yaml", "overrides.yaml", "plan.json", PLANNED_LEDGER],
        "store": {name: text and without_passwords(text) for name, text in values_of(cfg.tracking).items()},
        "delta": cfg.privacy.delta,
        "accountants": [*accountants],
        "spends": None if cfg.data.id is None else {"data_id": cfg.data.id, "budget": budget, "trains": cfg.train},
    }


def choices() -> dict[str, str]:
    """The chosen option of each configuration group."""
    return dict(HydraConfig.get().runtime.choices)


def parent_id() -> str | None:
    """The run id of the sweep that this trial belongs to."""
    return os.environ.get(PARENT) if HydraConfig.get().mode == RunMode.MULTIRUN else None


def config_hash(cfg: DictConfig) -> str:
    """A hash of the resolved configuration: equal for the same trial of a sweep, wherever it is tracked."""
    content = values_of(cfg)
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
    for name in BY_GROUP if cfg.privacy.enabled else ():
        if cfg[name] and "by_group" in cfg[name]:
            found[f"dpexp.{name}"] = ", ".join(f"{group}: {option}" for group, option in cfg[name].by_group.items())
    reason = not_private_reason(cfg)
    found |= provenance() | {"dpexp.private": f"no: {reason}" if reason else "yes"}
    found |= {"dpexp.config_hash": config_hash(cfg), "dpexp.seed": str(cfg.seed)}
    if plan is not None:
        found |= {"dpexp.adjacency": plan.adjacency, "dpexp.privacy_unit": str(plan.privacy_unit)}
        found |= {"dpexp.calibrate": cfg.calibrate}
    parent = parent_id()
    return found | ({"mlflow.parentRunId": parent} if parent else {})


_default_job = cache(compose)  # once for all trials of a process


def _shown(given: Mapping[str, str]) -> dict[str, str]:
    """The values of a configuration that a run shows as parameters; all values are in config.yaml.

    Shown are those that are not the default job's, those that the sweep varies, and a few that are shown in any case.
    """
    default = _flat(values_of(_default_job()))
    swept = _swept()
    return {
        key: value for key, value in given.items() if value != default.get(key) or key in swept or key in _ALWAYS_SHOWN
    }


def _flat(node: Any, prefix: str = "") -> dict[str, str]:
    """The values of a nested section by their dotted names, without passwords."""
    if isinstance(node, dict) and node:
        dot = f"{prefix}." if prefix else ""
        return {key: value for name, child in node.items() for key, value in _flat(child, f"{dot}{name}").items()}
    if node is None:
        return {}
    text = json.dumps(node) if isinstance(node, list | dict) else str(node)
    return {valid_name(prefix): without_passwords(text)[:_MAX_PARAM]}


def _planned(plan: PrivacyPlan) -> dict[str, str]:
    """The figures of a plan as parameters of the run."""
    values = {"z": plan.noise_multiplier, "q": plan.sampling.q}
    if len(plan.bands) > 1:
        values["bands"] = len(plan.bands)
    for group in plan.groups:
        name = valid_name(group.name)
        values |= {f"S.{name}": group.S, f"sigma.{name}": group.sigma, f"share.{name}": group.share}
    return {f"plan.{name}": f"{value:.6g}" for name, value in values.items()}


def run_name(cfg: DictConfig) -> str:
    """The model, and the overrides in short, without those that calibration replaced."""
    if cfg.tracking.run_name:
        return str(cfg.tracking.run_name)[:MAX_NAME]
    swept = _swept()
    left_out = {"model", *({*replaced(cfg)} - swept)}
    given = [word for word in map(str, HydraConfig.get().overrides.task) if _key(word) not in left_out]
    model, others = choices().get("model", "model"), short_name(given, swept)
    return f"{model}, {others}"[:MAX_NAME] if others else f"{model} on {choices().get('data')}"


def _swept() -> set[str]:
    """The keys and groups that the sweep of a trial varies, and its draw."""
    if not parent_id():
        return {"draw"}
    overrides = [word for word in shlex.split(os.environ.get(COMMAND, "")) if "=" in word and word[0] != "-"]
    return {"draw"} | swept_keys(overrides, HydraConfig.get().sweeper)


def short_name(overrides: Sequence[str], swept: Set[str]) -> str:
    """A name such as `lr=0.4, ε=1, logistic`.

    MLflow's list of runs cuts names off. So what a sweep varies comes first, and what many runs share last.
    """
    shown = [word for word in overrides if not word.startswith(_NOT_IN_NAMES) and not word.endswith("=null")]
    shown.sort(key=lambda word: (_key(word) not in swept, _key(word).startswith(_SHARED), _key(word) == "seed"))
    short = [_in_short(_key(word), word.partition("=")[2]) for word in shown]
    keys = [one.partition("=")[0] for one in short]
    names = [one if keys.count(key) == 1 else word for one, key, word in zip(short, keys, shown, strict=True)]
    return without_passwords(", ".join(names))[:MAX_NAME]


def _in_short(key: str, value: str) -> str:
    """An override as a run's name has it: without its section, or the value alone if it names the choice."""
    if f"{key}={value.lower()}" in ("privacy.enabled=false", "privacy.epsilon=inf"):
        return "not private"
    return value if key in _NAMED_BY_VALUE else f"{_SHORT.get(key, key.rpartition('.')[2])}={value}"


def _key(override: str) -> str:
    """The key or group of an override, without a plus or tilde."""
    return override.partition("=")[0].lstrip("+~")


def swept_keys(overrides: Sequence[str], sweeper: DictConfig) -> set[str]:
    """The keys and groups that a sweep varies."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = {str(override.key_or_group) for override in parsed if override.is_sweep_override()}
    return swept | {str(key).lstrip("+~") for key in sweeper.get("params") or {}}
