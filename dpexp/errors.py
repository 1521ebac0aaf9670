"""The exceptions whose messages are whole sentences: of a person's mistake, and of a record; and what others say."""

import math
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A choice that cannot be honoured. The message names the key, the value and what would be accepted."""


def positive(key: str, value: Any) -> float:
    """The value, if it is a finite number above 0.

    Raises:
        ConfigError: it is none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}={value} must be a finite number above 0.")
    return float(value)


def whole(key: str, value: Any, other: str = "") -> int:
    """The value, if it is a whole number of at least 1. `other`: what would be accepted besides.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number of at least 1{other}.")
    return value


def exactly_one(section: str, **choices: Any) -> None:
    """Refuses none and several of alternatives.

    Raises:
        ConfigError: not one alone is given.
    """
    given = [f"{section}.{key}={value}" for key, value in choices.items() if value is not None]
    if len(given) != 1:
        wanted = " or ".join(f"{section}.{key}" for key in choices)
        raise ConfigError(f"exactly one of {wanted} must be given; got {' and '.join(given) or 'neither'}.")


class ClaimRefuted(ConfigError):
    """An audit found more than a job claims. The message says what."""


class RecordError(ValueError):
    """A record that has no loss. It contributes nothing; if none of all records has one, the message says why."""


def words_of(error: BaseException) -> str:
    """What an error says, which may be code of anybody's: it may not be able to say it.

    Raises:
        KeyboardInterrupt: is of nobody.
    """
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "it does not say why"


def is_own(error: BaseException) -> bool:
    """Whether dpexp or a library raised an error and all its causes, so that no code of a user's wrote the text, which
    may quote a record."""
    here, last = Path(__file__).parent, traceback.extract_tb(error.__traceback__)[-1:]
    own = not last or Path(last[0].filename).is_relative_to(here) or "site-packages" in last[0].filename
    return own and (error.__cause__ is None or is_own(error.__cause__))


def named(path: str) -> Any:
    """What a dotted name, such as `package.Name`, stands for.

    Raises:
        ConfigError: nothing of that name can be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported: {error}.") from error
