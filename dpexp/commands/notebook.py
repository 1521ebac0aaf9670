"""Composes a configuration and its privacy plan without running a job, for notebooks and scripts."""

from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dpexp import config
from dpexp.commands.overrides import check, sentence
from dpexp.errors import ConfigError

if TYPE_CHECKING:  # importing it needs torch, which composing does not
    from dpexp.privacy.plan.plan import PrivacyPlan


def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """The configuration that `python -m dpexp` would have with these overrides.

    Args:
        config_dir: a folder with options of your own, as with `--config-dir`.

    Raises:
        ConfigError: an override whose key or option does not exist.
    """
    config.register()
    arguments = list(overrides)
    if config_dir is not None:
        arguments.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
    check([*(["--config-dir", str(config_dir)] if config_dir is not None else []), *overrides])
    try:
        with initialize_config_dir(str(config.CONF), version_base="1.3"):
            return compose_by_hydra("config", arguments)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error


def plan(cfg: DictConfig) -> "PrivacyPlan":
    """The privacy plan of a configuration's job; nothing is trained.

    Raises:
        ConfigError: for any choice that cannot be honoured, or a job without privacy.
    """
    from dpexp.commands import build, validate

    validate.check(cfg)
    if not cfg.privacy.enabled:
        raise ConfigError("privacy.enabled=false has no privacy plan.")
    return build.plan_for(cfg, build.module_of(cfg))
