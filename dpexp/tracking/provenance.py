"""The description of a run: its name, tags and parameters, and its provenance (versions, code, user, machine).

Errors in finding the provenance never fail a job.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import socket
from collections.abc import Sequence, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp import __version__
from dpexp.config import BY_GROUP, COMMAND, not_private_reason, replaced
from dpexp.privacy.plan.plan import PrivacyPlan

PARENT = "DPEXP_PARENT_RUN"  # an environment variable, which reaches the processes of every launcher
MAX_NAME = 250  # characters of a run's name
_MAX_PARAM = 6000  # characters of a parameter's value
_PRIVACY_GROUPS = ("group", "clip_norm", "alpha", "mechanism", "clip_rule", "allocation")
_NAMED_BY_VALUE = ("data", "model", "group", "mechanism", "sampling", "experiment")
_SHARED = ("data", "model", "experiment", "train")
_SHORT = {"privacy.epsilon": "ε", "privacy.delta": "δ", "privacy.noise_multiplier": "z"}
_NOT_IN_NAMES = ("sweep=", "tracking", "hydra", "checkpoint", "data.id", "privacy.budget")
_NOT_IN_HASH = ("tracking", "logger", "rounds", "checkpoint", "register", "verbose")  # cannot change the result
HOST = socket.gethostname()


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
    for name in BY_GROUP if cfg.privacy.enabled else ():
        if cfg[name] and "by_group" in cfg[name]:
            found[f"dpexp.{name}"] = ", ".join(f"{group}: {option}" for group, option in cfg[name].by_group.items())
    reason = not_private_reason(cfg)
    found |= provenance() | {"dpexp.private": f"no: {reason}" if reason else "yes", "dpexp.pid": str(os.getpid())}
    found |= {"dpexp.config_hash": config_hash(cfg), "dpexp.seed": str(cfg.seed)}
    if plan is not None:
        found |= {"dpexp.adjacency": plan.adjacency, "dpexp.privacy_unit": str(plan.privacy_unit)}
        found |= {"dpexp.calibrate": cfg.calibrate}
    parent = parent_id()
    return found | ({"mlflow.parentRunId": parent} if parent else {})


def run_name(cfg: DictConfig) -> str:
    """The overrides in short, without those that calibration replaced; or if there are none, the main options."""
    if cfg.tracking.run_name:
        return str(cfg.tracking.run_name)[:MAX_NAME]
    swept = {"draw"}
    if parent_id():
        overrides = [word for word in shlex.split(os.environ.get(COMMAND, "")) if "=" in word and word[0] != "-"]
        swept |= swept_keys(overrides, HydraConfig.get().sweeper)
    main = [choices().get(name) for name in ("data", "model", "group", "mechanism")]
    given = [word for word in map(str, HydraConfig.get().overrides.task) if _key(word) not in {*replaced(cfg)} - swept]
    return short_name(given, swept) or " ".join(map(str, main))


def short_name(overrides: Sequence[str], swept: Set[str]) -> str:
    """A name such as `lr=0.4, ε=1, logistic`. The list of runs cuts names off, so that what a sweep varies comes first,
    and what many runs share last."""
    shown = [word for word in overrides if not word.startswith(_NOT_IN_NAMES) and not word.endswith("=null")]
    shown.sort(key=lambda word: (_key(word) not in swept, _key(word).startswith(_SHARED), _key(word) == "seed"))
    short = [_in_short(_key(word), word.partition("=")[2]) for word in shown]
    keys = [one.partition("=")[0] for one in short]
    names = [one if keys.count(key) == 1 else word for one, key, word in zip(short, keys, shown, strict=True)]
    return without_passwords(", ".join(names))[:MAX_NAME]


def _in_short(key: str, value: str) -> str:
    if f"{key}={value.lower()}" in ("privacy.enabled=false", "privacy.epsilon=inf"):
        return "not private"
    return value if key in _NAMED_BY_VALUE else f"{_SHORT.get(key, key.rpartition('.')[2])}={value}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def choices() -> dict[str, str]:
    """The chosen option of each configuration group."""
    return dict(HydraConfig.get().runtime.choices)


def params(node: Any, prefix: str = "") -> dict[str, str]:
    """What a configuration sets, as MLflow's parameters, without passwords."""
    if isinstance(node, dict) and node:
        dot = f"{prefix}." if prefix else ""
        return {key: value for name, child in node.items() for key, value in params(child, f"{dot}{name}").items()}
    if node is None:
        return {}
    text = json.dumps(node) if isinstance(node, list | dict) else str(node)
    return {valid_name(prefix): without_passwords(text)[:_MAX_PARAM]}


def valid_name(name: str) -> str:
    """Drops the characters that MLflow allows in no name."""
    return re.sub(r"[^\w.\- :/]", "", name)


def swept_keys(overrides: Sequence[str], sweeper: DictConfig) -> set[str]:
    """The keys and groups that a sweep varies."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = {str(override.key_or_group) for override in parsed if override.is_sweep_override()}
    return swept | {str(key).lstrip("+~") for key in sweeper.get("params") or {}}


def provenance() -> dict[str, str]:
    """A run's provenance tags, with those that MLflow finds for its columns Source and Created by."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    command = os.environ.get(COMMAND, "dpexp")
    packages = {"torch": "torch", "lightning": "pytorch-lightning", "accounting": "dp-accounting"}
    found = {f"dpexp.{name}": version(package) for name, package in packages.items()}
    found |= {"dpexp.version": __version__, "dpexp.python": platform.python_version(), "dpexp.host": HOST}
    found |= {"dpexp.command": without_passwords(command), "mlflow.source.name": "dpexp"}
    ignored: Any = [GitRunContext]  # it looks where dpexp lies, and quotes the repository's address
    return resolve_tags(found | commit(), ignored)


def commit(folder: Path | None = None) -> dict[str, str]:
    """The commit of a checkout, by default of the working directory, and whether files that git knows differ."""
    try:
        from git import Repo  # fails if there is no git

        with Repo(folder, search_parent_directories=folder is None) as repository:
            found = repository.head.commit.hexsha
            dirty = "yes" if repository.is_dirty() else "no"
    except Exception:
        return {}
    return {"mlflow.source.git.commit": found, "dpexp.commit": found, "dpexp.dirty": dirty}


def provenance_of_resume() -> dict[str, str]:
    """Provenance tags of a resume, under `dpexp.resumed`; the tags of the first start stay.

    Host and process id are replaced: they show whether the run is alive.
    """
    found = {key.removeprefix("dpexp.").removeprefix("mlflow."): value for key, value in provenance().items()}
    own = {f"dpexp.resumed.{key}": value for key, value in found.items() if not key.startswith("source.")}
    return own | {"dpexp.host": HOST, "dpexp.pid": str(os.getpid())}


def without_passwords(text: str) -> str:
    """Masks the passwords of addresses."""
    return re.sub(r"(://[^/@:\s]*):[^@\s]*@", r"\1:…@", text)
