"""Checks the command line before Hydra does, and states every mistake in one sentence.

Hydra's own messages take several lines, and advise to add a misspelt group as a new one.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dpexp._hydra_compat import get_args_parser
from dpexp.commands.arguments import COMMANDS
from dpexp.config import CONF, Config
from dpexp.errors import ConfigError

INTERNAL = {"rounds": "follows from sampling; give sampling.steps", "draw": "is set by hydra/sweeper=private_selection"}
# Options of hydra/launcher and hydra/sweeper that need an extra: option -> (extra, its distribution)
EXTRAS = {
    "joblib": ("joblib", "hydra-joblib-launcher"),
    "submitit_local": ("slurm", "hydra-submitit-launcher"),
    "submitit_slurm": ("slurm", "hydra-submitit-launcher"),
    "ray": ("ray", "hydra-ray-launcher"),
    "ray_aws": ("ray", "hydra-ray-launcher"),
    "optuna": ("optuna", "hydra-optuna-sweeper"),
}
# Short names, and names of other libraries, -> the keys and options that mean the same here
SYNONYMS = {
    "bound": ("clip_norm",), "max_grad_norm": ("clip_norm",), "S": ("clip_norm",), "clip": ("clip_rule",),
    "prepare": ("preprocessing",), "record": ("privacy_unit",), "unit": ("privacy_unit",),
    "metrics": ("private_metrics",), "tuning": ("fine_tuning",), "q": ("sampling_rate",),
    "sample_rate": ("sampling_rate",), "maximum": ("max_batch_size",), "parts": ("partitions",),
    "most": ("max_examples",), "by": ("user_attribute",), "local": ("local_training",), "k": ("size",),
    "every": ("every_n_rounds",), "share": ("budget_share",), "quantile": ("target_quantile",),
    "rate": ("learning_rate", "initial_rate"), "scale": ("clip_scale",), "Z": ("threshold",), "d": ("dim",),
    "origin": ("center",), "floor": ("min_eigenvalue",), "start": ("first_feature",), "tpr": ("max_tpr_at_fpr",),
    "advantage": ("max_advantage",), "sigma": ("noise_multiplier",), "z": ("noise_multiplier",),
    "canaries": ("canary_type",), "canaries_count": ("num_canaries",), "attacked": ("target_models",),
    "references": ("shadow_models",), "pixels": ("max_shift",), "unsent": ("offline_dir",),
    "private_select": ("private_selection",), "all": ("full_batch",), "exact": ("discrete_gaussian",),
    "measured": ("adaptive_min_variance",),
}  # fmt: skip


def check(arguments: Sequence[str]) -> None:
    """Refuses a flag or an override whose key or option does not exist, naming the nearest that does.

    Raises:
        ConfigError: names the flag or the override, and what would be accepted.
    """
    namespace = parsed(arguments)
    if namespace.shell_completion:  # then install=bash and the like are no values
        if sys.argv[0].endswith(".py"):
            raise ConfigError(
                'the shell completes the installed command, not python -m dpexp: eval "$(dpexp -sc install=bash)".'
            )
        return
    if namespace.resolve and not namespace.cfg:
        raise ConfigError("--resolve needs --cfg job, which then shows every value resolved.")
    roots = roots_of(namespace)
    groups = sorted({path.name for root in roots for path in root.iterdir() if path.is_dir()})
    keys = sorted({*groups, *(f.name for f in fields(Config)), "hydra"} - {*INTERNAL})
    for argument in namespace.overrides:
        key, equals, value = argument.partition("=")
        if argument.startswith("~"):
            continue
        if not equals:
            raise ConfigError(
                f"{argument}: this is no key=value, and no command{nearest(argument, COMMANDS)} Values are key=value."
            )
        head = key.lstrip("+").partition(".")[0].partition("/")[0].partition("@")[0]
        is_new = not get_close_matches(head, keys, n=1, cutoff=0.8) and head not in SYNONYMS
        if head in INTERNAL:
            raise ConfigError(f"{argument}: {head} is internal and {INTERNAL[head]}.")
        if key.startswith("+") and is_new:
            continue
        if head not in keys:
            raise ConfigError(f"{argument}: there is no {head!r}{nearest(head, keys)}")
        chosen = any(other.startswith((f"{head}=", "experiment=", "sweep=")) for other in namespace.overrides)
        if head == "audit" and "." in key and not chosen:  # which is null by default
            raise ConfigError(f"{argument}: no audit is chosen; add audit=dirac or audit=mislabelled.")
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
    """The arguments of the job that only audits its plan."""
    audit = [] if any(argument.startswith("audit=") for argument in arguments) else ["audit=dirac"]
    return [*arguments, *audit, "train=false"]


def roots_of(namespace: Namespace) -> list[Path]:
    """The folders with configuration groups: dpexp's own, and that of --config-dir."""
    own = Path(namespace.config_dir) if namespace.config_dir else None
    if own is not None and not own.is_dir():
        raise ConfigError(f"--config-dir={own}: there is no such folder.")
    return [CONF, own] if own else [CONF]


def parsed(arguments: Sequence[str]) -> Namespace:
    """The arguments, parsed as Hydra parses them."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(arguments)}: {message}; flags go before all values, see --help.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def sentence(error: HydraException | OmegaConfBaseException) -> str:
    """An error of Hydra or OmegaConf as one sentence, with what would be accepted."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        section = str(cause.full_key).rpartition(".")[0]
        known = [str(key) for key in cause.parent_node]
        advice = f" To add one that its _target_ takes, write +{cause.full_key}." if "_target_" in known else ""
        where = f"{section} has" if section else "there is"
        return f"{cause.full_key}: {where} no key {cause.key!r}{nearest(str(cause.key), known)}{advice}"
    override = str(error).splitlines()[0].removeprefix("Error merging override ").rstrip(".")
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {override}; quote values with brackets or spaces for the shell."
    if override.startswith("Ambiguous value"):
        return f"{override}: several values need -m, which runs each of them; a list is written [1,2]."
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key if cause is error else override}: {str(cause).splitlines()[0].rstrip('.')}."
    return f"{override}."


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the nearest of the known words, and all of them."""
    known = [*known]
    near = [name for name in SYNONYMS.get(word, ()) if name in known] or get_close_matches(word, known, n=1)
    return (f"; did you mean {near[0]!r}? " if near else ". ") + f"Known: {', '.join(known)}."
