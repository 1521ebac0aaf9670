"""Which values of records are released besides gradients, as groups of their own.

A metric is a vector like any other: v̂ = (Σ_i c_i v^i + α N(0, σ̃² I))/qn estimates the mean of what records gave, of
which what is longer than S_g is clipped, with noise of the known standard deviation α σ̃/qn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpexp.errors import ConfigError
from dpexp.privacy.bounds import positive
from dpexp.privacy.groups import Vector, value_key
from dpexp.privacy.mechanisms import Clipping

_KEYS = ("S", "share", "d", "every", "values")


@dataclass(frozen=True)
class Release:
    """One group of values.

    Attributes:
        share: w_g, its part of the budget in a round that releases all groups; gradients divide what is left.
        every: it is released in each round whose number, counted from 1, this divides.
    """

    vectors: tuple[Vector, ...]
    clipping: Clipping
    share: float
    every: int = 1


def releases(asked: Mapping[str, Any]) -> dict[str, Release]:
    """Reads a configuration's `metrics.release`.

    Args:
        asked: by the name of the value, `{S, share}`, with `d` for a value of d numbers (default 1) and `every`
            (default 1). Several values make one group, clipped together, by `values: {name: {alpha, d}}`, where S is at
            most √k for k values, its default (see `Joint`).

    Raises:
        ConfigError: names what is missing, unknown or out of range.
    """
    if not isinstance(asked, Mapping) or not all(isinstance(name, str) and name for name in asked):
        raise ConfigError(f"metrics.release={asked} must name values, such as {{train_loss: {{S: 4, share: 0.01}}}}.")
    found = {name: _release(f"metrics.release.{name}", name, entry) for name, entry in asked.items()}
    total = sum(release.share for release in found.values())
    if total >= 1:
        raise ConfigError(f"metrics.release: the shares add up to {total:.6g}; gradients need the rest of 1.")
    named = [vector.name for release in found.values() for vector in release.vectors]
    for name in named:
        if named.count(name) > 1:
            raise ConfigError(f"metrics.release: {name} is released by two groups; once a round is enough.")
    shown = [
        name for release in found.values() for vector in release.vectors for name in shown_as(vector.name, vector.d)
    ]
    for name in shown:
        if shown.count(name) > 1 or name.startswith(("S/", "alpha/")):
            raise ConfigError(f"metrics.release: {name} is what another number is shown as; rename one of them.")
    return found


def shown_as(value: str, d: int) -> list[str]:
    """The names of a value's d numbers."""
    return [value] if d == 1 else [f"{value}/{k}" for k in range(d)]


def _release(key: str, name: str, entry: Any) -> Release:
    if not isinstance(entry, Mapping) or not set(entry) <= {*_KEYS} or "share" not in entry:
        raise ConfigError(
            f"{key}={entry} must give S and share, such as {{S: 1, share: 0.01}}; known: {', '.join(_KEYS)}."
        )
    share = positive(f"{key}.share", entry["share"])
    every = _whole(f"{key}.every", entry.get("every", 1))
    if "values" not in entry:
        if "S" not in entry:
            raise ConfigError(f"{key}={dict(entry)} must give S, the bound on one record's value.")
        vector = Vector(name, (value_key(name),), _whole(f"{key}.d", entry.get("d", 1)))
        return Release((vector,), Clipping((1.0,), positive(f"{key}.S", entry["S"])), share, every)
    values = entry["values"]
    if not isinstance(values, Mapping) or not values or "d" in entry:
        raise ConfigError(f"{key}.values={values} must name values, such as {{a: {{alpha: 1}}}}, each with its own d.")
    vectors, alphas = [], []
    for value, one in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{key}.values: {value} must be a name.")
        if not isinstance(one, Mapping) or not {"alpha"} <= set(one) <= {"alpha", "d"}:
            raise ConfigError(f"{key}.values.{value}={one} must give alpha, a scale, and d if it is not one number.")
        vectors.append(Vector(value, (value_key(value),), _whole(f"{key}.values.{value}.d", one.get("d", 1))))
        alphas.append(positive(f"{key}.values.{value}.alpha", one["alpha"]))
    root = math.sqrt(len(vectors))
    S = positive(f"{key}.S", entry.get("S", root))
    if root < S:
        raise ConfigError(f"{key}.S={S} must lie in (0, √k] for its k values: at most {root:.6g}.")
    return Release(tuple(vectors), Clipping(tuple(alphas), S), share, every)


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number of at least 1.")
    return value
