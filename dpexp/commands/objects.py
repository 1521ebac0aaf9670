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
    if numbers := numbers_of_texts(section, target, node):
        node = {**node} | numbers
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
    """The refusal of a section whose object raised an error, with the section's values."""
    given = ", ".join(f"{section}.{key}={value}" for key, value in node.items() if key != "_target_")
    made = f"{node.get('_target_')} cannot be made" + (f" of {given}" if given else "")
    return ConfigError(f"{section}: {made}: {in_one_line(cause)}.")


def numbers_of_texts(section: str, target: str, node: Any) -> dict[str, float]:
    """The texts of a section, as of an environment variable, whose arguments are numbers by a `_target_`'s annotations.

    Raises:
        ConfigError: a text, list or mapping is no number, where one is needed.
    """
    try:
        parameters = inspect.signature(get_object(target), eval_str=True).parameters
    except Exception:  # no Python function, or an unknown name, which is refused where it is called
        return {}
    found = {}
    for key, parameter in parameters.items():
        value = node.get(key)
        if not isinstance(value, str | DictConfig | ListConfig) or not _is_number(parameter.annotation):
            continue
        try:
            number = float(str(value))
        except ValueError as error:
            raise ConfigError(f"{section}.{key}={value} must be a number, as {target} takes it.") from error
        found[key] = int(number) if number.is_integer() else number
    return found


def _is_number(annotation: Any) -> bool:
    """Whether the values of an annotation are numbers; one of numbers or texts, as `auto`, may be a text."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {getattr(part, "__origin__", part) for part in parts}  # of Annotated its type
    return {getattr(kind, "__name__", "") for kind in kinds} <= _NUMBERS
