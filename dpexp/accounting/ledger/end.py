"""How far a ledger had come when it was last put where a power cut does not reach it: ledger.end.json beside it.

{"bytes": 4567, "sha256": "…"} is replaced as a whole after the ledger is on disk, so that the ledger may have gone on
since, and never lacks what it says. A ledger that is shorter, or begins otherwise, has lost lines or is another's.
Where both were put back together to an earlier state, nothing here shows it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpexp.accounting.ledger.units import is_whole


def end_of(ledger: Path) -> Path:
    """The file beside it."""
    return ledger.with_suffix(".end.json")


def write_end(ledger: Path, position: Mapping[str, Any]) -> None:
    """Where there is no room for it, the one before stays, which is true too."""
    path = end_of(ledger)
    beside = path.with_suffix(".part")
    with suppress(OSError):
        with beside.open("w") as file:
            file.write(json.dumps(position) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def read_end(ledger: Path) -> dict[str, Any] | None:
    """What it says; None if there is none, or it is damaged. To be read before the ledger, which may be growing."""
    try:
        said = json.loads(end_of(ledger).read_bytes())
    except (OSError, ValueError):
        return None
    made = isinstance(said, dict) and said.keys() == {"bytes", "sha256"} and isinstance(said["sha256"], str)
    return said if made and is_whole(said["bytes"]) and said["bytes"] >= 0 else None


def missing(ledger: Path, end: Mapping[str, Any]) -> str | None:
    """What the ledger lacks of what its end file says; None if nothing.

    Raises:
        OSError: the ledger cannot be read.
    """
    with ledger.open("rb") as file:
        begins = file.read(end["bytes"])
    if hashlib.sha256(begins).hexdigest() == end["sha256"]:
        return None
    if len(begins) < end["bytes"]:
        return f"{end['bytes']} bytes of it were on disk, as {end_of(ledger).name} says, and {len(begins)} are left"
    return f"it does not begin with the {end['bytes']} bytes that were on disk, as {end_of(ledger).name} says"
