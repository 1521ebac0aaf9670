"""Exceptions whose messages are sentences for the user, and checks of single values."""

import inspect
import math
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

Public = TypeVar("Public", bound=Callable[..., Any])
_format_warning = warnings.formatwarning


class ConfigError(ValueError):
    """A choice that cannot be honoured. The message names the key, the value and what would be accepted."""


class ClaimRefuted(ConfigError):
    """An audit found more privacy loss than a job claims."""


class RecordError(ValueError):
    """A record without a loss. It contributes nothing; if no record has one, the message says why."""


def positive(key: str, value: Any) -> float:
    """The value, if it is a finite number above 0; a ConfigError otherwise."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}={value} must be a finite number above 0.")
    return float(value)


def positive_integer(key: str, value: Any, alternative: str = "") -> int:
    """The value, if it is an integer of at least 1; a ConfigError otherwise. `alternative` ends its sentence."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} must be an integer of at least 1{alternative}.")
    return value


def exactly_one(section: str, **choices: Any) -> None:
    """Raises ConfigError unless exactly one of several alternative keys has a value."""
    given = [f"{section}.{key}={value}" for key, value in choices.items() if value is not None]
    if len(given) != 1:
        wanted = " or ".join(f"{section}.{key}" for key in choices)
        raise ConfigError(f"exactly one of {wanted} must be given; got {' and '.join(given) or 'neither'}.")


def says_how_to_call(public: Public) -> Public:
    """Decorates a class or function: the TypeError of a call with wrong arguments has the line to write."""
    is_class, parameters = isinstance(public, type), inspect.signature(public).parameters
    called: Any = public.__init__ if is_class else public  # type: ignore[misc]
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]

    @wraps(called)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            return called(*args, **given)
        except TypeError as error:
            if getattr(error.__traceback__, "tb_next", None):  # raised inside, not by the call
                raise
            ends = [name.split("_")[-1] for name in given if name not in parameters]
            likely = [name for name in parameters if name.split("_")[-1] in ends][:1]
            line = ", ".join(f"{name}=…" for name in likely or needed or parameters)
            raise TypeError(f"{error}; write {public.__name__}({line}).") from None

    if not is_class:
        return checked  # type: ignore[return-value]
    public.__init__ = checked  # type: ignore[method-assign]
    return public


def words_of(error: BaseException) -> str:
    """The message of an error, whose `__str__` may be a user's code and fail."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "it has no readable message"


def in_one_line(error: object) -> str:
    """The message of an error in one line, without a stop at its end."""
    return " ".join(str(error).split()).rstrip(".")


def root_of(error: BaseException) -> BaseException:
    """The cause that an error began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def place_of(error: BaseException) -> str:
    """The type of an error, and where it was raised: what may be told where its text may quote a record."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}, {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}"


def is_own(error: BaseException) -> bool:
    """Whether dpexp or a library raised an error and all its causes; a user's code may quote records."""
    here, last = Path(__file__).parent, traceback.extract_tb(error.__traceback__)[-1:]
    own = not last or Path(last[0].filename).is_relative_to(here) or "site-packages" in last[0].filename
    return own and (error.__cause__ is None or is_own(error.__cause__))


def named(path: str, key: str = "") -> Any:
    """The object of a dotted name, such as `package.Name`; a ConfigError if it cannot be imported, with its `key=`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}{path} cannot be imported: {error}.") from error


def _as_a_sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats warnings; those of dpexp's own modules without their place in the code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"dpexp: {message}\n"
    return _format_warning(message, category, filename, lineno, line)


warnings.formatwarning = _as_a_sentence  # in commands, programs and notebooks alike
