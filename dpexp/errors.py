"""The exceptions whose messages are whole sentences: of a person's mistake, and of a record; and what others say."""


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
