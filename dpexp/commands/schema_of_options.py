"""A JSON schema of the configuration, with which an editor completes and checks YAML files."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from dpexp.config import Config
from dpexp.errors import ConfigError

_OPEN = ("Config", "Trainer")  # may hold other keys: `defaults` and `hydra`; options of Lightning's Trainer
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def schema_of_options(arguments: Sequence[str]) -> None:
    """Prints the schema: the keys and types of all sections. Raises ConfigError for an argument: it takes none."""
    if arguments:
        raise ConfigError(f"schema-of-options {' '.join(arguments)}: it takes no arguments.")
    found: dict[str, Any] = TypeAdapter(Config).json_schema()
    for section in (found, *found["$defs"].values()):
        section["additionalProperties"] = section["title"] in _OPEN
        for name, value in section["properties"].items():
            default = value.pop("default", None)
            section["properties"][name] = {"anyOf": [value, _INTERPOLATION]} | (
                {} if default in (None, "???") else {"default": default}
            )
    print(json.dumps(found, indent=2))
