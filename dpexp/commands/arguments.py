"""Arguments of the commands that take one run and options of the form key=value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpexp.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    run: str
    options: dict[str, str | None]

    @classmethod
    def parsed(
        cls, command: str, help: str | None, given: Sequence[str], known: Mapping[str, str | None]
    ) -> "Arguments | None":
        """None: help was asked for, and printed.

        Args:
            known: the options and their defaults.

        Raises:
            ConfigError: not exactly one run, or an option that is unknown.
        """
        if "--help" in given or "-h" in given:
            print(help)
            return None
        options = dict(known)
        runs = []
        for argument in given:
            key, equals, value = argument.partition("=")
            if not equals:
                runs.append(argument)
            elif key not in known:
                raise ConfigError(f"{command}: {key} is unknown; known: {', '.join(known) or 'none'}.")
            else:
                options[key] = value
        if len(runs) != 1:
            raise ConfigError(f"{command} needs one job's folder or MLflow run id; see {command} --help.")
        return cls(runs[0], options)
