"""How z, q and S_g vary over the rounds: as factors of what the plan says, constant over stretches of rounds."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dpexp.errors import ConfigError, positive

LINEAR_STEPS = 32  # a ramp of as many stairs keeps the ledger small and its accounting quick

# (first round, factor) of each stretch
Segments = tuple[tuple[int, float], ...]
CONSTANT: Segments = ((0, 1.0),)


@dataclass(frozen=True)
class Multipliers:
    """What z, q and S are multiplied by in one round."""

    z: float = 1.0
    q: float = 1.0
    S: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """The factors of every round. S scales each S_g, and σ̃_g with it, since σ̃_g = z S_g/√w_g."""

    z: Segments = CONSTANT
    q: Segments = CONSTANT
    S: Segments = CONSTANT

    def at_round(self, t: int) -> Multipliers:
        kinds = (getattr(self, field.name) for field in fields(self))
        return Multipliers(*(kind[bisect_right(kind, (t, math.inf)) - 1][1] for kind in kinds))

    def segments(self, rounds: int, breaks: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """(first round, number of rounds) over which nothing changes, nor any of `breaks` falls."""
        starts = {start for field in fields(self) for start, _ in getattr(self, field.name)}
        ordered = sorted(start for start in {*starts, *breaks} if start < rounds)
        for start, end in zip(ordered, [*ordered[1:], rounds], strict=True):
            yield start, end - start


def schedule(rounds: int, **kinds: Any) -> Schedule:
    """Reads a configuration's `schedule` section.

    Args:
        kinds: for z, q and S: null, a number, a list of T numbers, `{linear: [first, last]}` (in 32 stairs) or
            `{step: {0: 1.0, 500: 0.5}}` (from which round on, which factor).

    Raises:
        ConfigError: anything else, or a factor that is not a finite number above 0.
    """
    return Schedule(**{name: _stretches(f"schedule.{name}", kind, rounds) for name, kind in kinds.items()})


def _stretches(key: str, kind: Any, rounds: int) -> Segments:
    if kind is None:
        return CONSTANT
    if isinstance(kind, int | float):
        return ((0, positive(key, kind)),)
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        if len(kind) != rounds:
            raise ConfigError(f"{key} lists {len(kind)} numbers for {rounds} rounds; give one for each.")
        return _changes([(t, positive(key, value)) for t, value in enumerate(kind)])
    match kind:
        case {"linear": [first, last]} if len(kind) == 1:
            first, last = positive(key, first), positive(key, last)
            stairs = min(LINEAR_STEPS, rounds)
            return _changes(
                [(round(k * rounds / stairs), first + (last - first) * k / max(1, stairs - 1)) for k in range(stairs)]
            )
        case {"step": Mapping() as steps} if len(kind) == 1:
            if 0 not in steps or not all(isinstance(t, int) and t >= 0 for t in steps):
                raise ConfigError(f"{key}={kind} must give a factor from round 0 on, and name rounds by whole numbers.")
            return _changes([(t, positive(key, steps[t])) for t in sorted(steps)])
    raise ConfigError(
        f"{key}={kind} is not understood; give a number, a list of one number a round, {{linear: [first, last]}} "
        "or {step: {0: 1.0, 500: 0.5}}."
    )


def _changes(pairs: Sequence[tuple[int, float]]) -> Segments:
    return tuple(pair for k, pair in enumerate(pairs) if k == 0 or pair[1] != pairs[k - 1][1])
