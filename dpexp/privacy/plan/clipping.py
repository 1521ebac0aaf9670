"""What a group's mechanism clips to: bounds S_g, scales α_j, and clip rules (paper, section 2).

For a group with vectors v_1…v_k, scales α_j, bound S and noise σ̃:

    c_i = min(1, S / sqrt(Σ_j ‖v_j^i‖² / α_j²)),   v̂_j = (1/qn) (Σ_i c_i v_j^i + α_j N(0, σ̃² I)).

Separate clipping is joint clipping with every α_j = 1. Either way the privacy tuple is (S, σ̃).

*Clip rules* give the factor c of a vector with norm x in the group's own scale, x = (Σ_j ‖v_j‖²/α_j²)^½, for the bound
S. Their sensitivity is S: c(x)·x ≤ S for every x, and x is never less than the true norm (see
`dpexp.privacy.gradients.norms`). What is added is min(c, S/x) (`dpexp.privacy.mechanism.clip_factors`), which for these
rules is c but for rounding, and a rule sees one norm at a time: the noise fits whatever a rule of yours answers. But it
must not jump, since the last digits of a norm may vary with how many records are processed together. A rule is a frozen
dataclass with a `name`; its other fields are shown with the plan.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dpexp.errors import ConfigError, positive
from dpexp.privacy.plan.groups import Vector

if TYPE_CHECKING:
    from dpexp.privacy.plan.plan import PrivacyPlan

# One bound for each thing that is clipped by itself, from the name of its group and its dimension: S_g of a group under
# separate clipping, the scale α_j of a vector under joint clipping.
ClipNorm = Callable[[Sequence[str], Sequence[int]], list[float]]


@dataclass(frozen=True)
class FixedClipNorm:
    """One number for every group, or a number per group by name."""

    value: float | Mapping[str, float]

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        return by_group("clip_norm.value", self.value, groups)


@dataclass(frozen=True)
class UniformClipNorm:
    """S*/√m each, so that m of them add up to a total L2 bound of S* (McMahan et al. 2018, section 2)."""

    total: float

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        return [positive("clip_norm.total", self.total) / math.sqrt(len(dimensions))] * len(dimensions)


@dataclass(frozen=True)
class DimensionClipNorm:
    """S*·√(d/D): in proportion to the root of the dimension, D being the sum of all d.

    The paper (section 2) prints S*/√(d_g/D). That is an erratum: with it Σ S_g² ≠ S*².
    """

    total: float

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        total = positive("clip_norm.total", self.total)
        return [total * math.sqrt(d / sum(dimensions)) for d in dimensions]


def by_group(
    key: str,
    value: float | Mapping[str, float],
    groups: Sequence[str],
    number: Callable[[str, float], float] = positive,
) -> list[float]:
    """The number of each group: the same for all, or its own by name. `number` checks one."""
    if not isinstance(value, Mapping):
        return [number(key, value)] * len(groups)
    check_names(key, value, groups)
    return [number(f"{key}.{group}", value[group]) for group in groups]


def check_names(key: str, given: Any, groups: Iterable[str]) -> None:
    names = ", ".join(dict.fromkeys(groups))
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given} must be {{group: number}} for the model's groups: {names}.")
    if set(given) != set(groups):
        raise ConfigError(f"{key} names the groups {', '.join(map(str, given))}; the model has {names}.")


@dataclass(frozen=True)
class GroupClipping:
    """What one group's mechanism clips to: a scale α_j for each vector and the bound S on the scaled norm."""

    scales: tuple[float, ...]
    clip_norm: float


Mechanism = Callable[[Mapping[str, Sequence[Vector]], ClipNorm], dict[str, GroupClipping]]


@dataclass(frozen=True)
class Separate:
    """The group is clipped as one concatenated vector to S_g, which `bound` gives."""

    def __call__(self, groups: Mapping[str, Sequence[Vector]], bound: ClipNorm) -> dict[str, GroupClipping]:
        sizes = [sum(vector.d for vector in vectors) for vectors in groups.values()]
        bounds = bound(list(groups), sizes)
        return {
            name: GroupClipping((1.0,) * len(vectors), S)
            for (name, vectors), S in zip(groups.items(), bounds, strict=True)
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
    clip_norm: float | Sequence[float] | None = None

    def __call__(self, groups: Mapping[str, Sequence[Vector]], bound: ClipNorm) -> dict[str, GroupClipping]:
        vectors = [(group, vector) for group, members in groups.items() for vector in members]
        if self.alpha is None:
            alphas = bound([group for group, _ in vectors], [vector.d for _, vector in vectors])
        else:
            alphas = _each("mechanism.alpha", self.alpha, [vector.name for _, vector in vectors], "vectors")
        scales = dict(zip((vector.parameters for _, vector in vectors), alphas, strict=True))
        roots = [math.sqrt(len(members)) for members in groups.values()]
        bounds = (
            roots if self.clip_norm is None else _each("mechanism.clip_norm", self.clip_norm, list(groups), "groups")
        )
        return {
            name: GroupClipping(
                tuple(scales[vector.parameters] for vector in members),
                at_most_root(f"mechanism.clip_norm={S} of group {name}", S, len(members)),
            )
            for (name, members), S in zip(groups.items(), bounds, strict=True)
        }


def same_as_separate(plan: "PrivacyPlan", bound: ClipNorm, noise_given: bool) -> bool:
    """Whether joint clipping comes to what `Separate` with the same bound would do: where the scales of each group are
    one number α, min(1, S/(‖v‖/α)) is min(1, αS/‖v‖), with noise of ασ̃, and αS is what `bound` gives the group.

    Args:
        noise_given: σ̃ does not follow from S.
    """
    groups = {group.name: group for group in plan.groups if not group.is_metric}
    if plan.adaptive is not None and any(len(group.vectors) > 1 for group in groups.values()):
        return False  # each scale goes its own way
    scaled = plan.calibration.value if plan.calibration and plan.calibration.knob == "clip_norm" else 1.0
    separate = Separate()({name: group.vectors for name, group in groups.items()}, bound)
    for name, group in groups.items():
        alpha = group.alphas[0]
        equal = math.isclose(alpha * group.S, scaled * separate[name].clip_norm, rel_tol=1e-9)
        own = noise_given or group.discrete or group.clip_rule != Abadi()  # lengths that α does not scale
        if len({*group.alphas}) > 1 or not equal or (alpha != 1 and own):
            return False
    return True


def at_most_root(told: str, S: float, k: int) -> float:
    """S, if it is at most √k, beyond which it clips no record with ‖v_j‖ ≤ α_j for all k vectors."""
    if math.sqrt(k) < S:
        raise ConfigError(f"{told} must lie in (0, √k] for its k={k} vectors: at most {math.sqrt(k):.6g}.")
    return S


def _each(key: str, value: float | Sequence[float], names: Sequence[str], what: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [positive(key, value)] * len(names)
    if len(value) != len(names):
        raise ConfigError(f"{key} lists {len(value)} numbers for {len(names)} {what}: {', '.join(names)}.")
    return [positive(f"{key}[{i}]", number) for i, number in enumerate(value)]


class ClipRule(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        """c for one norm x and the bound S, scalars in float64; x may be 0, infinite or NaN."""


@dataclass(frozen=True)
class Abadi:
    """c = min(1, S/x) (Abadi et al. 2016, algorithm 1): long vectors are shortened to S, short ones stay."""

    name: str = field(default="abadi", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return (S / x).clamp(max=1)


@dataclass(frozen=True)
class Automatic:
    """c = S/(x + γ) (Bu et al. 2022, arXiv 2206.07136, Auto-S): every vector gets a length of about S, which thereby is
    but a factor of the learning rate; γ, a length in the group's own scale, lets the shortest stay shorter."""

    gamma: float = 0.01
    name: str = field(default="automatic", init=False)

    def __post_init__(self) -> None:
        positive("clip_rule.gamma", self.gamma)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.gamma)


@dataclass(frozen=True)
class Psac:
    """c = S/(x + r/(x + r)) (Xia et al. 2023, arXiv 2212.00328, DP-PSAC). At x = 0 it is S, and for r < 1 it is largest
    at x = √r - r: the shortest vectors, whose directions say least, are not blown up as they are by `Automatic`."""

    r: float = 0.1
    name: str = field(default="psac", init=False)

    def __post_init__(self) -> None:
        positive("clip_rule.r", self.r)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.r / (x + self.r))


RAMP = 0.01


@dataclass(frozen=True)
class Global:
    """c = (S/Z)·1[x ≤ Z] (Bu et al. 2021, arXiv 2106.07830, global clipping): all records that are kept are scaled
    alike, so that the sum has the direction of theirs; the others are dropped. The step is a ramp over the last
    hundredth before Z, since a rule must not jump. Z is in units of S, and goes with it wherever that goes.
    """

    threshold: float
    name: str = field(default="global", init=False)

    def __post_init__(self) -> None:
        positive("clip_rule.threshold", self.threshold)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return ((1 - x / (self.threshold * S)) / RAMP).clamp(0, 1) / self.threshold


def clip_rule_factors(clip: ClipRule, norms: Tensor, S: Tensor) -> Tensor:
    """c [B] for norms [B] in float64, each by itself. A copy of the rule answers, so that it remembers none of them."""
    rule = copy.deepcopy(clip)
    return torch.func.vmap(lambda x: rule(x, S))(norms.clone())


def check_clip_rule(clip: Any) -> None:
    """Raises ConfigError: it is no rule, or could not be shown with the plan."""
    try:
        made = is_dataclass(clip) and not isinstance(clip, type) and hash(clip) is not None
    except TypeError:  # it is not frozen
        made = False
    if not (made and callable(clip) and isinstance(getattr(clip, "name", None), str)):
        told = (
            f"clip_rule={clip} is no clip rule; give a frozen dataclass with a name, which answers c for a norm and S"
        )
        raise ConfigError(f"{told} as those of dpexp.privacy.plan.clipping do.")
    norms = torch.tensor([0.0, 1.0, 1e30], dtype=torch.float64)
    try:
        answered = clip_rule_factors(clip, norms, torch.ones((), dtype=torch.float64))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"clip_rule={clip} cannot answer for a norm, a tensor under torch.func.vmap: {reason}"
        ) from error
    if answered.shape != norms.shape or not answered.is_floating_point():
        raise ConfigError(f"clip_rule={clip} must answer one real number for a norm.")


def in_words(clip: ClipRule) -> str:
    """Its name and numbers."""
    numbers = [f"{f.name} = {getattr(clip, f.name)}" for f in fields(clip) if f.name != "name"]  # type: ignore[arg-type]
    return f"{clip.name} ({', '.join(numbers)})" if numbers else clip.name
