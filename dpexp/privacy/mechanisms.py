"""Separate and joint clipping, the paper's two mechanisms for a group of vectors (section 2), as one.

For a group with vectors v_1…v_k, scales α_j, bound S and noise σ̃:

    c_i = min(1, S / sqrt(Σ_j ‖v_j^i‖² / α_j²)),   v̂_j = (1/qn) (Σ_i c_i v_j^i + α_j N(0, σ̃² I)).

Separate clipping is joint clipping with every α_j = 1. Either way the privacy tuple is (S, σ̃).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dpexp.errors import ConfigError
from dpexp.privacy.bounds import Bound, positive
from dpexp.privacy.groups import Vector


@dataclass(frozen=True)
class Clipping:
    """What one group's mechanism clips to: a scale α_j for each vector and the bound S on the scaled norm."""

    alphas: tuple[float, ...]
    S: float


class Mechanism(Protocol):
    def __call__(self, groups: Mapping[str, Sequence[Vector]], bound: Bound) -> dict[str, Clipping]: ...


@dataclass(frozen=True)
class Separate:
    """The group is clipped as one concatenated vector to S_g, which `bound` gives."""

    def __call__(self, groups: Mapping[str, Sequence[Vector]], bound: Bound) -> dict[str, Clipping]:
        sizes = [sum(vector.d for vector in vectors) for vectors in groups.values()]
        bounds = bound(list(groups), sizes)
        return {
            name: Clipping((1.0,) * len(vectors), S) for (name, vectors), S in zip(groups.items(), bounds, strict=True)
        }


@dataclass(frozen=True)
class Joint:
    """Vectors are scaled by 1/α_j, clipped together to S_g, and scaled back.

    Args:
        alpha: the scales: null (`bound` gives one for each vector), one number for all, or a list in the order
            of the plan's vectors.
        S: in (0, √k] for a group of k vectors, where √k, the default (null), never clips a record with
            ‖v_j‖ ≤ α_j; one number for all groups, or a list in the order of the groups.
    """

    alpha: float | Sequence[float] | None = None
    S: float | Sequence[float] | None = None

    def __call__(self, groups: Mapping[str, Sequence[Vector]], bound: Bound) -> dict[str, Clipping]:
        vectors = [(group, vector) for group, members in groups.items() for vector in members]
        if self.alpha is None:
            alphas = bound([group for group, _ in vectors], [vector.d for _, vector in vectors])
        else:
            alphas = _each("mechanism.alpha", self.alpha, [vector.name for _, vector in vectors], "vectors")
        scales = dict(zip((vector.parameters for _, vector in vectors), alphas, strict=True))
        roots = [math.sqrt(len(members)) for members in groups.values()]
        bounds = roots if self.S is None else _each("mechanism.S", self.S, list(groups), "groups")
        for name, S, root in zip(groups, bounds, roots, strict=True):
            if root < S:
                raise ConfigError(
                    f"mechanism.S={S} of group {name} must lie in (0, √k], k being its number of vectors: "
                    f"at most {root:.6g}."
                )
        return {
            name: Clipping(tuple(scales[vector.parameters] for vector in members), S)
            for (name, members), S in zip(groups.items(), bounds, strict=True)
        }


def _each(key: str, value: float | Sequence[float], names: Sequence[str], what: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [positive(key, value)] * len(names)
    if len(value) != len(names):
        raise ConfigError(f"{key} lists {len(value)} numbers for {len(names)} {what}: {', '.join(names)}.")
    return [positive(f"{key}[{i}]", number) for i, number in enumerate(value)]
