"""The exceptions whose messages are whole sentences: of a person's mistake, and of a record; and what others say."""

import traceback
from pathlib import Path


class ConfigError(ValueError):
    """A choice that cannot be honoured. The message names the key, the value and what would be accepted."""


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
