"""How the L2 bounds come about: one number for each thing that is clipped by itself.

Under separate clipping that is a group, and the number is S_g; under joint clipping it is a vector, and the
number is its scale α_j. `names` and `dimensions` list these things; `groups` says which group each belongs to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dpexp.errors import ConfigError


class Bound(Protocol):
    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]: ...


@dataclass(frozen=True)
class Fixed:
    """One number for every group, or a number per group by name."""

    value: float | Mapping[str, float]

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        if not isinstance(self.value, Mapping):
            return [positive("bound.value", self.value)] * len(groups)
        if set(self.value) != set(groups):
            raise ConfigError(
                f"bound.value names the groups {', '.join(self.value)}; "
                f"the model has {', '.join(dict.fromkeys(groups))}."
            )
        return [positive(f"bound.value.{group}", self.value[group]) for group in groups]


@dataclass(frozen=True)
class Uniform:
    """S*/√m each, so that m of them add up to a total L2 bound of S* (McMahan et al. 2018, section 2)."""

    total: float

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        return [positive("bound.total", self.total) / math.sqrt(len(dimensions))] * len(dimensions)


@dataclass(frozen=True)
class Dimension:
    """S*·√(d/D): in proportion to the root of the dimension, D being the sum of all d.

    The paper (section 2) prints S*/√(d_g/D). That is an erratum: with it Σ S_g² ≠ S*².
    """

    total: float

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        total = positive("bound.total", self.total)
        return [total * math.sqrt(d / sum(dimensions)) for d in dimensions]


def positive(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value} must be a number above 0.")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}={value} must be a finite number above 0.")
    return float(value)
