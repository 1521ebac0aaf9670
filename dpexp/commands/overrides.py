"""Mistakes on the command line, each as one sentence.

What Hydra says itself takes several lines, and its advice for a misspelt group is to add it as a new one.
"""

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dpexp.config import CONF, Config
from dpexp.errors import ConfigError


def check(arguments: Sequence[str]) -> None:
    """Refuses an override whose key or option does not exist, naming the nearest that does.

    Raises:
        ConfigError: names the override and what would be accepted.
    """
    roots = [CONF, *_config_dirs(arguments)]
    groups = sorted({path.name for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()})
    keys = sorted({*groups, *(f.name for f in fields(Config)), "hydra"})
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or argument.startswith(("-", "+", "~")):
            continue
        head = key.partition(".")[0].partition("/")[0].partition("@")[0]
        if head not in keys:
            raise ConfigError(f"{argument}: there is no {head!r}{_nearest(head, keys)}")
        if key in groups:
            options = sorted({path.stem for root in roots for path in (root / key).glob("*.yaml")})
            for option in value.split(","):
                if option not in {*options, "null"} and option.replace("_", "").isalnum():
                    raise ConfigError(f"{argument}: {key} has no option {option!r}{_nearest(option, options)}")


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    dirs = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            dirs.append(Path(value or following))
    return dirs


def sentence(error: HydraException | OmegaConfBaseException) -> str:
    """What Hydra or OmegaConf refused, and what they would accept."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        section = str(cause.full_key).rpartition(".")[0]
        known = [str(key) for key in cause.parent_node]
        advice = f" To add one that its _target_ takes, write +{cause.full_key}." if "_target_" in known else ""
        return f"{cause.full_key}: {section} has no key {cause.key!r}{_nearest(str(cause.key), known)}{advice}"
    override = str(error).splitlines()[0].removeprefix("Error merging override ")
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key if cause is error else override}: {str(cause).splitlines()[0]}."
    return f"{override}."


def _nearest(word: str, known: Sequence[str]) -> str:
    """The end of a sentence that says what would be accepted."""
    near = get_close_matches(word, known, n=1)
    return (f"; did you mean {near[0]!r}? " if near else ". ") + f"Known: {', '.join(known)}."
