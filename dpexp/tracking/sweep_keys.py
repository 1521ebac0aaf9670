"""Which configuration keys a sweep varies, and the values that all its trials share."""

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_ANYWHERE = ("experiment", "sweep")  # groups whose options set keys of every section
_OF_A_TRIAL = ("hydra", "rounds", "checkpoint")  # what each trial fills in itself


def swept_keys(overrides: Sequence[str], sweeper: DictConfig) -> set[str]:
    """The keys and groups that a sweep varies."""
    given = OverridesParser.create().parse_overrides(list(overrides))
    swept = {str(override.key_or_group) for override in given if override.is_sweep_override()}
    return swept | {str(key).lstrip("+~") for key in sweeper.get("params") or {}}


def unswept(cfg: DictConfig) -> dict[str, Any]:
    """The values of a sweep's configuration that no trial changes, by key: without the swept keys, the groups whose
    option is swept, and whatever is worked out from them."""
    swept = swept_keys([str(override) for override in cfg.hydra.overrides.task], cfg.hydra.sweeper)
    if swept.intersection(_ANYWHERE):
        return {}
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in _OF_A_TRIAL])
    OmegaConf.set_struct(own, False)
    for key in swept:
        OmegaConf.update(own, key, "???", merge=False)
    return dict(_known(own))


def _known(node: DictConfig, within: str = "") -> Iterator[tuple[str, Any]]:
    for name in map(str, node):
        if OmegaConf.is_missing(node, name):
            continue
        try:
            child = node[name]
            if isinstance(child, DictConfig):
                yield from _known(child, f"{within}{name}.")
                continue
            if isinstance(child, ListConfig):
                child = OmegaConf.to_container(child, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException:  # it is worked out from a swept one
            continue
        yield f"{within}{name}", child
