"""Whose data is added, removed or replaced: the privacy unit, as a ledger's header says it.

A header without "record" is about single examples. Otherwise it says {"kind": "microbatch", "k": 8}, units of 8
examples by position, or {"kind": "user", "most": 16, …}, users of whose examples at most 16 took part in a round.
"""

from collections.abc import Mapping
from typing import Any

from dpexp.accounting.ledger.numbers import is_whole
from dpexp.errors import ConfigError

_COUNTS = {"microbatch": "k", "user": "most"}


def checked(record: Any) -> dict[str, Any] | None:
    """What a header says.

    Raises:
        ConfigError: it is not understood.
    """
    if record is None:
        return None
    kind = record.get("kind") if isinstance(record, dict) else None
    count = record.get(_COUNTS[kind]) if isinstance(kind, str) and kind in _COUNTS else None
    if count is None or not is_whole(count) or count < 1:
        raise ConfigError(f"the header's record {record!r} is not understood.")
    return dict(record)


def unit(record: Mapping[str, Any] | None) -> str:
    """In words. Only ledgers of the same unit may be composed: what a user's data may change is more than what an
    example may, and units of 8 are others than units of 4."""
    if record is None:
        return "record"
    if record["kind"] == "user":
        by = record.get("by")
        return "user" if by in (None, "user_of") else f"user ({by})"
    return f"unit of {record['k']} examples"
