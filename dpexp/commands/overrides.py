"""Mistakes on the command line, each as one sentence.

What Hydra says itself takes several lines, and its advice for a misspelt group is to add it as a new one.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dpexp._hydra_compat import get_args_parser
from dpexp.config import CONF, Config
from dpexp.errors import ConfigError

COMMANDS = ("account", "audit", "evaluate", "predict", "report", "resume", "version", "help")
# What comes with an extra: option of hydra/launcher or hydra/sweeper -> (extra, its distribution).
EXTRAS = {
    "joblib": ("joblib", "hydra-joblib-launcher"),
    "submitit_local": ("slurm", "hydra-submitit-launcher"),
    "submitit_slurm": ("slurm", "hydra-submitit-launcher"),
    "ray": ("ray", "hydra-ray-launcher"),
    "ray_aws": ("ray", "hydra-ray-launcher"),
    "optuna": ("optuna", "hydra-optuna-sweeper"),
}


def check(arguments: Sequence[str]) -> None:
    """Refuses a flag or an override whose key or option does not exist, naming the nearest that does.

    Raises:
        ConfigError: names the flag or the override, and what would be accepted.
    """
    given = parsed(arguments)
    if given.shell_completion:  # then install=bash and the like are no values
        if sys.argv[0].endswith(".py"):
            raise ConfigError(
                'the shell completes the installed command, not python -m dpexp: eval "$(dpexp -sc install=bash)".'
            )
        return
    if given.resolve and not given.cfg:
        raise ConfigError("--resolve goes with --cfg job, which it shows with every value worked out.")
    roots = roots_of(given)
    groups = sorted({path.name for root in roots for path in root.iterdir() if path.is_dir()})
    keys = sorted({*groups, *(f.name for f in fields(Config)), "hydra"})
    for argument in given.overrides:
        key, equals, value = argument.partition("=")
        if argument.startswith("~"):
            continue
        if not equals:
            raise ConfigError(
                f"{argument}: this is no key=value, and no command{nearest(argument, COMMANDS)} Values are key=value."
            )
        head = key.lstrip("+").partition(".")[0].partition("/")[0].partition("@")[0]
        if key.startswith("+") and not get_close_matches(head, keys, n=1, cutoff=0.8):
            continue  # something new
        if head not in keys:
            raise ConfigError(f"{argument}: there is no {head!r}{nearest(head, keys)}")
        if key == "rounds":
            raise ConfigError(f"{argument}: rounds is filled in from sampling; give sampling.steps={value}.")
        if key in groups:
            options = sorted({path.stem for root in roots for path in (root / key).glob("*.yaml")})
            for option in value.split(","):
                if option not in options and option.replace("_", "").isalnum():
                    raise ConfigError(f"{argument}: {key} has no option {option!r}{nearest(option, options)}")
        if key in ("hydra/launcher", "hydra/sweeper") and value in EXTRAS:
            extra, distribution = EXTRAS[value]
            try:
                version(distribution)
            except PackageNotFoundError:
                raise ConfigError(f"{argument} needs a plugin: pip install 'dpexp[{extra}]'.") from None


def as_audit(arguments: Sequence[str]) -> list[str]:
    """The arguments of the job that audits its plan and does nothing else."""
    chosen = [] if any(argument.startswith("audit=") for argument in arguments) else ["audit=dirac"]
    return [*arguments, *chosen, "train=false"]


def roots_of(given: Namespace) -> list[Path]:
    """The folders that hold groups: dpexp's, and the one that was named.

    Raises:
        ConfigError: there is no such folder.
    """
    own = Path(given.config_dir) if given.config_dir else None
    if own is not None and not own.is_dir():
        raise ConfigError(f"--config-dir={own}: there is no such folder.")
    return [CONF, own] if own else [CONF]


def parsed(arguments: Sequence[str]) -> Namespace:
    """As Hydra will parse them."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(arguments)}: {message}; flags go before all values, see --help.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def sentence(error: HydraException | OmegaConfBaseException) -> str:
    """What Hydra or OmegaConf refused, and what they would accept."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        section = str(cause.full_key).rpartition(".")[0]
        known = [str(key) for key in cause.parent_node]
        advice = f" To add one that its _target_ takes, write +{cause.full_key}." if "_target_" in known else ""
        where = f"{section} has" if section else "there is"
        return f"{cause.full_key}: {where} no key {cause.key!r}{nearest(str(cause.key), known)}{advice}"
    override = str(error).splitlines()[0].removeprefix("Error merging override ").rstrip(".")
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {override}; quote values that hold brackets or spaces for the shell."
    if override.startswith("Ambiguous value"):
        return f"{override}: several values need -m, which runs each of them; a list is written [1,2]."
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key if cause is error else override}: {str(cause).splitlines()[0].rstrip('.')}."
    return f"{override}."


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of a sentence that says what would be accepted."""
    near = get_close_matches(word, known, n=1)
    return (f"; did you mean {near[0]!r}? " if near else ". ") + f"Known: {', '.join(known)}."
