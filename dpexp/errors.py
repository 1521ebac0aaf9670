"""Exceptions whose messages are sentences for the user, and checks of single values."""

import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, get_args

Class = TypeVar("Class", bound=type)
_section: ContextVar[str] = ContextVar("section", default="")  # of a configuration, from which an object is made
_format_warning = warnings.formatwarning


class ConfigError(ValueError):
    """A choice that cannot be honoured. The message names the key, the value and what would be accepted.

    Examples:
        >>> import dpexp
        >>> try:
        ...     dpexp.Target(epsilon=-1.0)
        ... except dpexp.ConfigError as error:
        ...     print(error)
        Target(epsilon=-1.0) must be a finite number above 0.
    """


class ClaimRefuted(ConfigError):
    """An audit found more privacy loss than a job claims."""


class RecordError(ValueError):
    """A record without a loss. It contributes nothing; if no record has one, the message says why."""


class Range(NamedTuple):
    """The values that an argument may have, in its annotation.

    Attributes:
        wanted: how a sentence about another value ends.
        has: whether a value is one of them.
    """

    wanted: str
    has: Callable[[Any], bool]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # which an integer may exceed


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def between(low: float, high: float, ends: str, why: str = "") -> Range:
    """The numbers of an interval, whose `ends` are as in mathematics: (] is without the lower one, with the upper."""

    def has(value: object) -> bool:
        inside = is_number(value) and low <= value <= high
        return inside and (value != low or ends[0] == "[") and (value != high or ends[1] == "]")

    return Range(f"must lie in {ends[0]}{low:g}, {high:g}{ends[1]}{why}", has)


def one_of(*names: str) -> Range:
    return Range(f"is unknown; known: {', '.join(names)}", names.__contains__)


POSITIVE = Range("must be a finite number above 0", lambda value: is_number(value) and value > 0)
COUNT = Range("must be an integer of at least 1", is_count)
Positive: TypeAlias = Annotated[float, POSITIVE]
Count: TypeAlias = Annotated[int, COUNT]
Rate: TypeAlias = Annotated[float, between(0, 1, "(]")]


def positive(key: str, value: Any) -> float:
    """The value, if it is a finite number above 0; a ConfigError otherwise."""
    if not POSITIVE.has(value):
        raise ConfigError(f"{key}={value} {POSITIVE.wanted}.")
    return float(value)


def positive_integer(key: str, value: Any) -> int:
    """The value, if it is an integer of at least 1; a ConfigError otherwise."""
    if not is_count(value):
        raise ConfigError(f"{key}={value} {COUNT.wanted}.")
    return value


def exactly_one(section: str, **choices: Any) -> None:
    """Raises ConfigError unless exactly one of several alternative keys has a value."""
    given = [f"{section}.{key}={value}" for key, value in choices.items() if value is not None]
    if len(given) != 1:
        wanted = " or ".join(f"{section}.{key}" for key in choices)
        raise ConfigError(f"exactly one of {wanted} must be given; got {' and '.join(given) or 'neither'}.")


@contextmanager
def made_from(section: str) -> Iterator[None]:
    """In which the arguments of objects are keys of a configuration's section, and are named as such."""
    token = _section.set(section)
    try:
        yield
    finally:
        _section.reset(token)


def key_in(section: str) -> str:
    """The key of a section within the one that an object is made from."""
    return f"{outer}.{section}" if (outer := _section.get()) else ""


def checks_arguments(kind: Class) -> Class:
    """Decorates a class: its arguments must be in the ranges that their annotations have.

    Examples:
        >>> from dpexp import Poisson
        >>> Poisson(sampling_rate=1.5)
        Traceback (most recent call last):
        dpexp.errors.ConfigError: Poisson(sampling_rate=1.5) must lie in (0, 1].

    Of an object that is made from a configuration, the sentence has the key: `sampling.sampling_rate=1.5`. The
    TypeError of a call with wrong arguments has the line to write.
    """
    init, signature = kind.__init__, inspect.signature(kind)  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        try:
            values = signature.bind_partial(*args, **given).arguments  # an unknown name is told before a missing one
            signature.bind(*args, **given)
        except TypeError as error:
            takes = ", ".join(f"{name}=…" for name in signature.parameters)
            raise TypeError(f"{kind.__name__}: {error}; write {kind.__name__}({takes}), or some of it.") from None
        check_ranges(self, signature, values)
        init(self, *args, **given)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def check_ranges(made: object, signature: inspect.Signature, values: Mapping[str, Any]) -> None:
    """Raises ConfigError: a value of an object is not in the range that the annotation of its argument has."""
    for name, parameter in signature.parameters.items():
        parts = (parameter.annotation, *get_args(parameter.annotation))  # of Positive | None: Positive and None
        for allowed in (one for part in parts for one in getattr(part, "__metadata__", ())):
            value = values.get(name)
            may_be = allowed.has(value) or (value is None and type(None) in parts)
            if name in values and not may_be:
                section = _section.get()
                argument = f"{section}.{name}={value}" if section else f"{type(made).__name__}({name}={value!r})"
                raise ConfigError(f"{argument} {allowed.wanted}.")


def words_of(error: object) -> str:
    """The message of an error, whose `__str__` may be a user's code and fail."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "it has no readable message"


def in_one_line(error: object) -> str:
    """`words_of` in one line, without a stop at its end."""
    return " ".join(words_of(error).split()).rstrip(".")


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
