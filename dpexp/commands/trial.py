"""A trial's place in its sweep: which one of how many it is, what tells it from the others, how long the rest may take.

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

_SWEEP = "DPEXP_SWEEP"  # an environment variable, which reaches the processes of every launcher


@dataclass(frozen=True)
class Trial:
    """`place`: number, of how many, and what tells it from the others. `alone`: no other runs at the same time."""

    place: str
    alone: bool


def begin(members: Sequence[Sequence[str]]) -> None:
    """Remembers what trials a sweep has, each given by its overrides."""
    values: dict[str, set[str]] = {}
    for overrides in members:
        for override in overrides:
            values.setdefault(override.partition("=")[0], set()).add(override)
    varied = [key for key, found in values.items() if len(found) > 1]
    os.environ[_SWEEP] = json.dumps({"of": len(members), "varied": varied, "since": time.time(), "done": 0})


def end() -> None:
    os.environ.pop(_SWEEP, None)


def current(cfg: DictConfig) -> Trial | None:
    """The one that this process runs; None for a job that is no trial, or one that shall say everything (`verbose`)."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN or cfg.verbose:
        return None
    of = _facts().get("of")
    place = f"[{_number()}/{of}]" if of else f"[{_number()}]"
    alone = hydra.runtime.choices.get("hydra/launcher", "basic") == "basic"
    return Trial(f"{place} {name_of(list(map(str, hydra.overrides.task)))}", alone)


def seconds_left() -> float | None:
    """Until the sweep ends, now that this process's trial has, if the others take as long; None: nobody knows."""
    facts = _facts()
    if "of" not in facts:
        return None
    return (time.time() - facts["since"]) / max(1, _number() - facts["done"]) * (facts["of"] - _number())


def skip() -> None:
    """This process's trial was finished before: how long others take begins to be measured after it."""
    if _facts():
        os.environ[_SWEEP] = json.dumps(_facts() | {"since": time.time(), "done": _number()})


def name_of(overrides: Sequence[str]) -> str:
    """Those overrides that differ among the trials; all, where nobody knows."""
    varied = _facts().get("varied", [one.partition("=")[0] for one in overrides])
    return " ".join([one for one in overrides if one.partition("=")[0] in varied] or overrides)


def _facts() -> dict[str, Any]:
    return json.loads(os.environ.get(_SWEEP, "{}"))


def _number() -> int:
    """From 1."""
    return int(HydraConfig.get().job.num) + 1
