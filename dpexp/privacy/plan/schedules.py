"""How z, q and S_g vary over the rounds: multipliers of the plan's values, constant over segments of rounds."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dpexp.errors import ConfigError, positive

LINEAR_STEPS = 32  # a linear schedule is a staircase, so that the ledger stays small and its accounting quick

Segments = tuple[tuple[int, float], ...]  # (first round, multiplier) of each segment
CONSTANT: Segments = ((0, 1.0),)


@dataclass(frozen=True)
class Multipliers:
    """What z, q and S are multiplied by in one round."""

    z: float = 1.0
    q: float = 1.0
    S: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """The multipliers of all rounds. S scales each S_g, and σ̃_g with it, since σ̃_g = z S_g/√w_g."""

    z: Segments = CONSTANT
    q: Segments = CONSTANT
    S: Segments = CONSTANT

    def at_round(self, t: int) -> Multipliers:
        every = (getattr(self, field.name) for field in fields(self))
        return Multipliers(*(segments[bisect_right(segments, (t, math.inf)) - 1][1] for segments in every))

    def segments(self, rounds: int, breaks: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """(first round, number of rounds) of segments in which no multiplier changes; `breaks` begin new ones."""
        starts = {start for field in fields(self) for start, _ in getattr(self, field.name)}
        ordered = sorted(start for start in {*starts, *breaks} if start < rounds)
        for start, end in zip(ordered, [*ordered, rounds][1:], strict=True):
            yield start, end - start


def segments(key: str, spec: Any, rounds: int) -> Segments:
    """The segments of one schedule.

    Args:
        spec: null, a number, a list of T numbers, `{linear: [first, last]}` (in 32 steps) or
            `{step: {0: 1.0, 500: 0.5}}` (first round: multiplier).

    Raises:
        ConfigError: anything else, or a multiplier that is not a finite number above 0.
    """
    if spec is None:
        return CONSTANT
    if isinstance(spec, int | float):
        return ((0, positive(key, spec)),)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if len(spec) != rounds:
            raise ConfigError(f"{key} lists {len(spec)} numbers for {rounds} rounds; give one for each.")
        return _merged([(t, positive(key, value)) for t, value in enumerate(spec)])
    match spec:
        case {"linear": [first, last]} if len(spec) == 1:
            first, last = positive(key, first), positive(key, last)
            steps = min(LINEAR_STEPS, rounds)
            return _merged(
                [(round(k * rounds / steps), first + (last - first) * k / max(1, steps - 1)) for k in range(steps)]
            )
        case {"step": Mapping() as starts} if len(spec) == 1:
            if 0 not in starts or not all(isinstance(t, int) and t >= 0 for t in starts):
                raise ConfigError(f"{key}={spec} must give a factor from round 0 on, and name rounds by integers.")
            return _merged([(t, positive(key, starts[t])) for t in sorted(starts)])
    raise ConfigError(
        f"{key}={spec} is not understood; give a number, a list of one number a round, {{linear: [first, last]}} "
        "or {step: {0: 1.0, 500: 0.5}}."
    )


def _merged(pairs: Sequence[tuple[int, float]]) -> Segments:
    return tuple(pair for k, pair in enumerate(pairs) if k == 0 or pair[1] != pairs[k - 1][1])
