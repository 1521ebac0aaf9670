"""Whose data is added, removed or replaced: the privacy unit, as a ledger's header says it.

A header without "record" is about single examples. Otherwise it says {"kind": "microbatch", "k": 8}, units of 8
examples by position, or {"kind": "user", "most": 16, …}, users of whose examples at most 16 took part in a round.
"""

import math
from collections.abc import Mapping
from typing import Any

from dpexp.errors import ConfigError

LARGEST_Z = 1e8


def is_number(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


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
