"""The one exception that a person's mistake raises: its message is a whole sentence."""


class ConfigError(ValueError):
    """A choice that cannot be honoured. The message names the key, the value and what would be accepted."""


class ClaimRefuted(ConfigError):
    """An audit found more than a job claims. The message says what."""
