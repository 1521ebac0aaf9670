"""A trial's place in its sweep: its number, of how many, and what distinguishes it from the others."""

import itertools
import json
import os
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

_TRIALS = "DPEXP_TRIALS"  # environment variable, which reaches the processes of every launcher: number, varied keys


def trial_label(cfg: DictConfig) -> str | None:
    """The place in words; None for a single job, or with `verbose=true`."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN or cfg.verbose:
        return None
    count, _ = _remembered()
    number = f"[{hydra.job.num + 1}/{count}]" if count else f"[{hydra.job.num + 1}]"
    return f"{number} {name_of([*map(str, hydra.overrides.task)])}"


def remember_trials(members: Sequence[Sequence[str]]) -> None:
    """Stores the trials of a sweep, each given by its overrides."""
    values: dict[str, set[str]] = {}
    for override in itertools.chain.from_iterable(members):
        values.setdefault(override.partition("=")[0], set()).add(override)
    os.environ[_TRIALS] = json.dumps([len(members), [key for key, found in values.items() if len(found) > 1]])


def forget_trials() -> None:
    """Deletes what `remember_trials` has stored."""
    os.environ.pop(_TRIALS, None)


def name_of(overrides: Sequence[str]) -> str:
    """The overrides that differ among the trials; all, if that is unknown."""
    _, varied = _remembered()
    return " ".join([one for one in overrides if varied and one.partition("=")[0] in varied] or overrides)


def _remembered() -> tuple[int | None, list[str] | None]:
    count, varied = json.loads(os.environ.get(_TRIALS, "[null, null]"))
    return count, varied
