"""Makes the object of a `_target_` section of a configuration. Imports nothing slow."""

import inspect
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig

from dpexp.errors import ConfigError, in_one_line, made_from, root_of

_NUMBERS = {"int", "float", "bool", "NoneType", "Tensor"}  # types of arguments that are numbers


def made_of(section: str, node: Any, **arguments: Any) -> Any:
    """The object of a section; a mistake in it becomes a ConfigError."""
    target = str(node.get("_target_")) if node else ""
    check_numbers(section, target, node)
    try:
        with made_from(section):
            return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        cause = error.__cause__ or str(error).splitlines()[0]
        if isinstance(cause, ImportError):
            cause = root_of(cause)  # Hydra's own has several lines
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        if unknown and unknown[1] in node:
            key = f"{section}.{unknown[1]}"
            raise ConfigError(
                f"{key}={node[unknown[1]]} is no option of {target}; if an experiment sets it, remove it with ~{key}."
            ) from error
        raise cannot_be_made(section, node, cause) from error


def cannot_be_made(section: str, node: Any, cause: Any) -> ConfigError:
    given = ", ".join(f"{section}.{key}={value}" for key, value in node.items() if key != "_target_")
    made = f"{node.get('_target_')} cannot be made" + (f" of {given}" if given else "")
    return ConfigError(f"{section}: {made}: {in_one_line(cause)}.")


def check_numbers(section: str, target: str, node: Any) -> None:
    """Refuses text, lists and mappings for arguments that are numbers by the annotations of a `_target_`."""
    try:
        parameters = inspect.signature(get_object(target), eval_str=True).parameters
    except Exception:  # no Python function, or an unknown name, which is refused where it is called
        return
    for key, parameter in parameters.items():
        kind, value = parameter.annotation, node.get(key)
        kinds = {*get_args(kind)} if get_origin(kind) in (Union, UnionType) else {kind}
        are_numbers = {getattr(each, "__name__", "") for each in kinds} <= _NUMBERS
        if are_numbers and isinstance(value, str | DictConfig | ListConfig):
            raise ConfigError(f"{section}.{key}={value} must be a number, as {target} takes it.")
