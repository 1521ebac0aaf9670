"""A trial's place in its sweep: its number, what distinguishes it from the others, and the time left.

Imports nothing slow.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

_SWEEP = "DPEXP_SWEEP"  # environment variable, which reaches the processes of every launcher


@dataclass(frozen=True)
class Trial:
    """`label`: number, number of trials, and distinguishing overrides. `is_serial`: no other trial runs meanwhile."""

    label: str
    is_serial: bool


def begin(members: Sequence[Sequence[str]]) -> None:
    """Stores the trials of a sweep, each given by its overrides."""
    values: dict[str, set[str]] = {}
    for overrides in members:
        for override in overrides:
            values.setdefault(override.partition("=")[0], set()).add(override)
    varied = [key for key, found in values.items() if len(found) > 1]
    os.environ[_SWEEP] = json.dumps({"of": len(members), "varied": varied, "since": time.time(), "done": 0})


def end() -> None:
    os.environ.pop(_SWEEP, None)


def current(cfg: DictConfig) -> Trial | None:
    """The trial that this process runs; None for a single job, or a trial with `verbose=true`."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN or cfg.verbose:
        return None
    of = _stored().get("of")
    number = f"[{_number()}/{of}]" if of else f"[{_number()}]"
    is_serial = hydra.runtime.choices.get("hydra/launcher", "basic") == "basic"
    return Trial(f"{number} {name_of(list(map(str, hydra.overrides.task)))}", is_serial)


def seconds_left() -> float | None:
    """Estimated seconds until the sweep ends, when a trial has ended; None if unknown."""
    stored = _stored()
    if "of" not in stored:
        return None
    return (time.time() - stored["since"]) / max(1, _number() - stored["done"]) * (stored["of"] - _number())


def skip() -> None:
    """Excludes this trial, which had finished before, from the estimate of the time left."""
    if stored := _stored():
        os.environ[_SWEEP] = json.dumps(stored | {"since": time.time(), "done": _number()})


def name_of(overrides: Sequence[str]) -> str:
    """The overrides that differ among the trials; all, if that is unknown."""
    varied = _stored().get("varied", [one.partition("=")[0] for one in overrides])
    return " ".join([one for one in overrides if one.partition("=")[0] in varied] or overrides)


def _stored() -> dict[str, Any]:
    return json.loads(os.environ.get(_SWEEP, "{}"))


def _number() -> int:
    """The trial's number, from 1."""
    return int(HydraConfig.get().job.num) + 1
