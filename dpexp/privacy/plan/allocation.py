"""How one noise multiplier z is allocated to groups (arXiv 1812.06210, section 4).

Every strategy gives shares w_g > 0 of the budget with Σ w_g = 1, and σ̃_g = z S_g / √w_g, so that
Σ (S_g/σ̃_g)² = 1/z².
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dpexp.errors import ConfigError, exactly_one, positive
from dpexp.privacy.plan.clipping import GroupClipping, by_group, check_names
from dpexp.privacy.plan.groups import Vector


class Allocation(Protocol):
    """How the budget is shared among groups."""

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        """Each group's share of the budget, by name."""
        ...


@dataclass(frozen=True)
class Proportional:
    """w_g = 1/G, so that σ̃_g = z √G S_g.

    Examples:
        >>> from dpexp import Proportional
        >>> from dpexp.privacy.plan.clipping import GroupClipping
        >>> from dpexp.privacy.plan.groups import Vector
        >>> groups = {"conv": [Vector("conv", ("conv.weight",), 10)], "fc": [Vector("fc", ("fc.weight",), 90)]}
        >>> Proportional().shares(groups, {"conv": GroupClipping((1.0,), 1.0), "fc": GroupClipping((1.0,), 1.0)})
        {'conv': 0.5, 'fc': 0.5}
    """

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        return {name: 1 / len(groups) for name in groups}


@dataclass(frozen=True)
class DimensionAdjusted:
    """w_g = d_g/D, so that σ̃_g = z √(D/d_g) S_g.

    Examples:
        >>> from dpexp import DimensionAdjusted
        >>> from dpexp.privacy.plan.clipping import GroupClipping
        >>> from dpexp.privacy.plan.groups import Vector
        >>> groups = {"conv": [Vector("conv", ("conv.weight",), 10)], "fc": [Vector("fc", ("fc.weight",), 90)]}
        >>> DimensionAdjusted().shares(groups, {"conv": GroupClipping((1.0,), 1.0), "fc": GroupClipping((1.0,), 1.0)})
        {'conv': 0.1, 'fc': 0.9}
    """

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        return _normalised({name: sum(v.d for v in vectors) for name, vectors in groups.items()})


@dataclass(frozen=True)
class MinVariance:
    """The shares that minimise the released vectors' total noise variance at a given z (ours).

    Group g's noise has total variance A_g σ̃_g² with A_g = Σ_j α_j² d_j (d_g under separate clipping);
    minimising Σ_g A_g z² S_g² / w_g subject to Σ w_g = 1 gives w_g ∝ S_g √A_g.

    Examples:
        >>> from dpexp import MinVariance
        >>> from dpexp.privacy.plan.clipping import GroupClipping
        >>> from dpexp.privacy.plan.groups import Vector
        >>> groups = {"conv": [Vector("conv", ("conv.weight",), 10)], "fc": [Vector("fc", ("fc.weight",), 90)]}
        >>> MinVariance().shares(groups, {"conv": GroupClipping((1.0,), 1.0), "fc": GroupClipping((1.0,), 1.0)})
        {'conv': 0.25, 'fc': 0.75}
    """

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        sizes = {
            name: sum(a * a * v.d for a, v in zip(clipping[name].alphas, vectors, strict=True))
            for name, vectors in groups.items()
        }
        return _normalised({name: clipping[name].S * math.sqrt(size) for name, size in sizes.items()})


@dataclass(frozen=True)
class Weighted:
    """Your own shares, by group name; they must add up to 1.

    Examples:
        >>> from dpexp import Weighted
        >>> from dpexp.privacy.plan.clipping import GroupClipping
        >>> from dpexp.privacy.plan.groups import Vector
        >>> groups = {"conv": [Vector("conv", ("conv.weight",), 10)], "fc": [Vector("fc", ("fc.weight",), 90)]}
        >>> clipping = {"conv": GroupClipping((1.0,), 1.0), "fc": GroupClipping((1.0,), 1.0)}
        >>> Weighted({"conv": 0.2, "fc": 0.8}).shares(groups, clipping)
        {'conv': 0.2, 'fc': 0.8}
    """

    weights: Mapping[str, float]

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        check_names("allocation.weights", self.weights, groups)
        weights = {name: positive(f"allocation.weights.{name}", self.weights[name]) for name in groups}
        if not math.isclose(sum(weights.values()), 1, rel_tol=1e-9):
            total = f"{sum(weights.values()):.12g}"
            raise ConfigError(f"allocation.weights={dict(self.weights)} add up to {total}; they must add up to 1.")
        return _normalised(weights)


@dataclass(frozen=True)
class Explicit:
    """The noise itself, for all groups or by group name; z follows from it, so that z may not be set as well.

    Examples:
        >>> from dpexp import Explicit
        >>> from dpexp.privacy.plan.clipping import GroupClipping
        >>> clipping = {"conv": GroupClipping((1.0,), 1.0), "fc": GroupClipping((1.0,), 1.0)}
        >>> round(Explicit(sigma=2.0).noise_multiplier(clipping, records=100), 4)
        1.4142

    Args:
        sigma: σ̃_g, the standard deviation of the noise on the sum; or
        sigma_of_average: σ_g, that of the noise on the average over q·n records of the privacy unit: σ̃_g = q·n·σ_g.
    """

    sigma: float | Mapping[str, float] | None = None
    sigma_of_average: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        exactly_one("allocation", sigma=self.sigma, sigma_of_average=self.sigma_of_average)

    def noise_multiplier(self, clipping: Mapping[str, GroupClipping], records: float) -> float:
        """z = (Σ_g (S_g/σ̃_g)²)^(-1/2); `records`: q·n."""
        return (records if self.sigma is None else 1.0) * sum(self._squares(clipping).values()) ** -0.5

    def shares(self, groups: Mapping[str, Sequence[Vector]], clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        return _normalised(self._squares(clipping))

    def _squares(self, clipping: Mapping[str, GroupClipping]) -> dict[str, float]:
        key = "sigma" if self.sigma is not None else "sigma_of_average"
        sigmas = by_group(f"allocation.{key}", getattr(self, key), [*clipping])
        return {name: (c.S / s) ** 2 for (name, c), s in zip(clipping.items(), sigmas, strict=True)}


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
