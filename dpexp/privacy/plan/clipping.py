"""Clipping norms S_g, scales α_j, mechanisms and clip rules (arXiv 1812.06210, section 2).

These are the choices of a plan, made once before training. `dpexp.privacy.mechanism` carries them out in each round.

*Formula.* For a group with vectors v_1…v_k, scales α_j, clipping norm S and noise σ̃, over the records i of a sample:

    x_i = (Σ_j ‖v_j^i‖²/α_j²)^½,   c_i = min(rule(x_i), S/x_i),   v̂_j = (1/qn) (Σ_i c_i v_j^i + α_j N(0, σ̃² I)).

Separate clipping is joint clipping with every α_j = 1. In both cases the privacy tuple is (S, σ̃).

*Clip rules.* rule(x) is what a clip rule returns for the scaled norm x of a record; c is what its vectors are
multiplied by. The default is rule(x) = min(1, S/x). A training step may also give a record a weight in [0, 1], which
multiplies c (`dpexp.privacy.mechanism`).

- *Bound.* c is at most S/x, whatever the rule returns, and x as computed is never below the true norm
  (`dpexp.privacy.gradients.norms`).
- *Consequence.* A record adds at most S under any rule, also one of the user's, so the noise is always enough. For
  the rules here c is rule(x) up to rounding.
- *Duties of a rule's author.* A rule is a frozen dataclass with a `name`; its other fields are shown with the plan. It
  must be continuous in x, since the last digits of a norm may vary with the number of records that are processed
  together. It must keep nothing of the norms that it gets: they are private, and what it kept could leave the training
  without noise. Therefore it gets one norm at a time, and a copy of it is called.

| Case | rule(x) of `Abadi`, `Automatic`, `Psac`, `Global` |
|---|---|
| x = 0, the zero vector | 1, S/γ, S, 1/Z: finite, so that the record adds zero |
| S larger than every norm x | 1, S/(x + γ), S/(x + r/(x + r)), 1/Z if x <= 0.99 Z S |
| x infinite | 0 |
| x is NaN | NaN, for which c is 0 (`dpexp.privacy.mechanism.clip_factors`) |

| Case | Clipping norm |
|---|---|
| separate clipping without S_g | 1/√G, for G groups in the whole model |
| joint clipping without S_g | √k, for k vectors in the group |
| joint clipping with S_g above √k | ConfigError |
| a group's number is missing, or is not of the model | ConfigError |

Read next: `dpexp.privacy.mechanism` (how a round clips), `adaptive_clipping` (clipping norms that follow a quantile).
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpexp.errors import ConfigError, Positive, checks_arguments, in_one_line, positive
from dpexp.privacy.plan.groups import Vector


class ClipNorm(Protocol):
    def __call__(self, groups: Sequence[str], dimensions: Sequence[int], key: str = "clip_norm") -> list[float]:
        """One number for each entry of `groups`.

        A plan calls it for two purposes: for the clipping norm S_g of each group (`clip_norm`), and under joint
        clipping for the scale α_j of each vector (`Joint.alpha`).

        Args:
            groups: the names of the groups; for scales the name of each vector's group, so that names repeat.
            dimensions: of each group, or of each vector.
            key: the option that the numbers are given by, for messages: `clip_norm` or `alpha`.
        """


@dataclass(frozen=True)
class FixedClipNorm:
    """One number for all, a number by the name of each group, or a list in the order of the plan.

    Examples:
        >>> from dpexp import FixedClipNorm
        >>> FixedClipNorm({"conv": 1.0, "fc": 0.5})(["conv", "fc"], [100, 900])
        [1.0, 0.5]
    """

    value: float | Mapping[str, float] | Sequence[float]

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int], key: str = "clip_norm") -> list[float]:
        return by_group(f"{key}.value", self.value, groups)


@checks_arguments
@dataclass(frozen=True)
class UniformClipNorm:
    """S*/√m each, so that m of them add up to a total L2 norm of S* (arXiv 1812.06210, section 2).

    Examples:
        >>> from dpexp import UniformClipNorm
        >>> UniformClipNorm(total=1.0)(["conv", "fc", "a", "b"], [100, 900, 10, 10])
        [0.5, 0.5, 0.5, 0.5]
    """

    total: Positive

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int], key: str = "clip_norm") -> list[float]:
        return [self.total / math.sqrt(len(dimensions))] * len(dimensions)


@checks_arguments
@dataclass(frozen=True)
class DimensionClipNorm:
    """S*·√(d/D), where D is the sum of all dimensions d.

    arXiv 1812.06210, section 2, prints S*/√(d_g/D). That is an erratum: with it Σ S_g² ≠ S*².

    Examples:
        >>> from dpexp import DimensionClipNorm
        >>> DimensionClipNorm(total=1.0)(["conv", "fc"], [360, 640])
        [0.6, 0.8]
    """

    total: Positive

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int], key: str = "clip_norm") -> list[float]:
        return [self.total * math.sqrt(d / sum(dimensions)) for d in dimensions]


def by_group(
    key: str, value: Any, groups: Sequence[str], number: Callable[[str, float], float] = positive
) -> list[float]:
    """The number of each group: the same for all, by name, or listed in order. `number` checks one."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != len(groups):
            raise ConfigError(f"{key} lists {len(value)} numbers for {len(groups)}: {', '.join(groups)}.")
        return [number(f"{key}[{i}]", listed) for i, listed in enumerate(value)]
    if isinstance(value, Mapping):
        own = options_by_group(key, value, groups)
        return [number(f"{key}.{group}", own[group]) for group in groups]
    return [number(key, value) for _ in groups]


def options_by_group(key: str, option: Any, groups: Iterable[str]) -> dict[str, Any]:
    """Each group's own option: the same for all, or by name."""
    if not isinstance(option, Mapping):
        return dict.fromkeys(groups, option)
    check_names(key, option, groups)
    return {group: option[group] for group in groups}


def distinct(options: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    """Each different option, with the names of the groups that have it."""
    found: list[tuple[Any, list[str]]] = []
    for group, option in options.items():
        same = [groups for other, groups in found if other == option]
        if same:
            same[0].append(group)
        else:
            found.append((option, [group]))
    return found


def check_names(key: str, value: Any, groups: Iterable[str]) -> None:
    """Raises ConfigError unless the value is a mapping from the names of the groups."""
    names = ", ".join(map(str, dict.fromkeys(groups)))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value} must be {{group: number}} for the model's groups: {names}.")
    if set(value) != set(groups):
        raise ConfigError(f"{key} names the groups {', '.join(map(str, value))}; the model has {names}.")


@dataclass(frozen=True)
class GroupClipping:
    """A group's scales α_j, one for each vector, and the clipping norm S of its scaled norm."""

    alphas: tuple[float, ...]
    S: float


class Mechanism(Protocol):
    def __call__(
        self, groups: Mapping[str, Sequence[Vector]], clip_norms: Mapping[str, float | None]
    ) -> dict[str, GroupClipping]:
        """The clipping of each of the groups.

        Args:
            groups: the vectors of each group that is clipped by this mechanism; the model may have other groups.
            clip_norms: S_g of every group of the model; None: no clipping norm is given.
        """


@dataclass(frozen=True)
class Separate:
    """Each group is clipped as one concatenated vector to S_g, by default 1/√G for G groups in all.

    Examples:
        >>> from dpexp import Separate
        >>> from dpexp.privacy.plan.groups import Vector
        >>> groups = {"conv": [Vector("conv", ("conv.weight",), 9)], "fc": [Vector("fc", ("fc.weight",), 90)]}
        >>> Separate()(groups, {"conv": 1.0, "fc": 0.5})["fc"]
        GroupClipping(alphas=(1.0,), S=0.5)
    """

    def __call__(
        self, groups: Mapping[str, Sequence[Vector]], clip_norms: Mapping[str, float | None]
    ) -> dict[str, GroupClipping]:
        default = 1 / math.sqrt(len(clip_norms))  # of all groups of the model, of which `groups` may be some
        return {
            name: GroupClipping((1.0,) * len(vectors), default if (S := clip_norms[name]) is None else S)
            for name, vectors in groups.items()
        }


@dataclass(frozen=True)
class Joint:
    """Vectors are scaled by 1/α_j, clipped together to S_g, and scaled back.

    S_g lies in (0, √k] for a group of k vectors, where √k, the default, never clips a record with ‖v_j‖ ≤ α_j for all
    j.

    Examples:
        >>> from dpexp import FixedClipNorm, Joint
        >>> from dpexp.privacy.plan.groups import Vector
        >>> both = [Vector("conv", ("conv.weight",), 9), Vector("fc", ("fc.weight",), 90)]
        >>> Joint(alpha=FixedClipNorm([1.0, 100.0]))({"all": both}, {"all": 1.0})["all"]
        GroupClipping(alphas=(1.0, 100.0), S=1.0)

    Args:
        alpha: gives the scale of each vector; by default `UniformClipNorm(1)`. It is called once, with the vectors of
            all groups that are clipped by this mechanism: a total is that of all of them.
    """

    alpha: ClipNorm | None = None

    def __call__(
        self, groups: Mapping[str, Sequence[Vector]], clip_norms: Mapping[str, float | None]
    ) -> dict[str, GroupClipping]:
        vectors = [(group, vector) for group, members in groups.items() for vector in members]
        alpha = self.alpha or UniformClipNorm(1.0)
        if not callable(alpha):
            raise ConfigError(f"mechanism.alpha={alpha} gives no scales; choose alpha=fixed 'alpha.value={alpha}'.")
        alphas = iter(alpha([group for group, _ in vectors], [vector.d for _, vector in vectors], "alpha"))
        found: dict[str, GroupClipping] = {}
        for name, members in groups.items():
            own = tuple(next(alphas) for _ in members)  # they are listed group by group
            found[name] = GroupClipping(own, _at_most_root(name, clip_norms[name], members))
        return found


def _at_most_root(group: str, S: float | None, vectors: Sequence[Vector]) -> float:
    k = len(vectors)
    return math.sqrt(k) if S is None else at_most_root(f"clip_norm={S:g} of group {group}", S, k)


def clipping_of(
    groups: Mapping[str, Sequence[Vector]], mechanisms: Mapping[str, Mechanism], clip_norms: Mapping[str, Any]
) -> dict[str, GroupClipping]:
    """The clipping of each group by its own mechanism and clipping norm, a `ClipNorm` or None."""
    for group, mechanism in mechanisms.items():
        _check_callable("mechanism", mechanism, group)
    for group, clip_norm in clip_norms.items():
        if clip_norm is not None:
            _check_callable("clip_norm", clip_norm, group)
    S: dict[str, float | None] = dict.fromkeys(groups)
    for clip_norm, names in distinct(clip_norms):
        if clip_norm is not None:
            norms = clip_norm(names, [sum(vector.d for vector in groups[name]) for name in names])
            S |= dict(zip(names, norms, strict=True))
    found: dict[str, GroupClipping] = {}
    for mechanism, names in distinct(mechanisms):
        found |= mechanism({name: groups[name] for name in names}, S)
    return {name: found[name] for name in groups}


def _check_callable(key: str, option: Any, group: str) -> None:
    if not callable(option):
        raise ConfigError(
            f"{key}={option} of the group {group} is none; give an object as Joint() or FixedClipNorm(1)."
        )


def at_most_root(what: str, S: float, k: int) -> float:
    """S, if it is at most √k: no record with ‖v_j‖ ≤ α_j for all k vectors is clipped there."""
    if math.sqrt(k) < S:
        raise ConfigError(f"{what} must lie in (0, √k] for its k={k} vectors: at most {math.sqrt(k):.6g}.")
    return S


class ClipRule(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        """rule(x) for one norm x and the clipping norm S, float64 scalars; x may be 0, infinite or NaN."""


@dataclass(frozen=True)
class Abadi:
    """rule(x) = min(1, S/x) (Abadi et al. 2016, algorithm 1).

    Examples:
        >>> import torch
        >>> from dpexp import Abadi
        >>> rule, S = Abadi(), torch.tensor(1.0, dtype=torch.float64)
        >>> [round(float(rule(torch.tensor(x, dtype=torch.float64), S)), 3) for x in (0.01, 0.5, 2.0)]
        [1.0, 1.0, 0.5]
    """

    name: str = field(default="abadi", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return (S / x).clamp(max=1)


@checks_arguments
@dataclass(frozen=True)
class Automatic:
    """rule(x) = S/(x + γ) (Bu et al. 2022, arXiv 2206.07136, Auto-S).

    Every vector gets a norm of about S, which becomes a factor of the learning rate. γ, in the unit of x, keeps the
    shortest vectors shorter.

    Examples:
        >>> import torch
        >>> from dpexp import Automatic
        >>> rule, S = Automatic(gamma=0.01), torch.tensor(1.0, dtype=torch.float64)
        >>> [round(float(rule(torch.tensor(x, dtype=torch.float64), S)), 3) for x in (0.01, 0.5, 2.0)]
        [50.0, 1.961, 0.498]
    """

    gamma: Positive = 0.01
    name: str = field(default="automatic", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.gamma)


@checks_arguments
@dataclass(frozen=True)
class Psac:
    """rule(x) = S/(x + r/(x + r)) (Xia et al. 2023, arXiv 2212.00328, DP-PSAC).

    rule(0) is S, and for r < 1 rule(x) is largest at x = √r - r. The shortest vectors carry the least information in
    their directions. Unlike `Automatic` this rule does not enlarge them much.

    Examples:
        >>> import torch
        >>> from dpexp import Psac
        >>> rule, S = Psac(r=0.1), torch.tensor(1.0, dtype=torch.float64)
        >>> [round(float(rule(torch.tensor(x, dtype=torch.float64), S)), 3) for x in (0.01, 0.5, 2.0)]
        [1.088, 1.5, 0.488]
    """

    r: Positive = 0.1
    name: str = field(default="psac", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.r / (x + self.r))


RAMP = 0.01  # width of the ramp that replaces a step


@checks_arguments
@dataclass(frozen=True)
class Global:
    """rule(x) = (1/Z)·1[x ≤ Z·S] (Bu et al. 2021, arXiv 2106.07830, global clipping).

    Z is the `threshold`, in units of S. Records with a norm up to Z·S are all scaled by the same factor; the others are
    dropped. The step is a ramp over the last hundredth before Z·S, since a rule must be continuous.

    Examples:
        >>> import torch
        >>> from dpexp import Global
        >>> rule, S = Global(threshold=1.0), torch.tensor(1.0, dtype=torch.float64)
        >>> [round(float(rule(torch.tensor(x, dtype=torch.float64), S)), 3) for x in (0.01, 0.5, 2.0)]
        [1.0, 1.0, 0.0]
    """

    threshold: Positive
    name: str = field(default="global", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return ((1 - x / (self.threshold * S)) / RAMP).clamp(0, 1) / self.threshold


def unbounded_clip_factors(rule: ClipRule, norms: Tensor, S: Tensor) -> Tensor:
    """rule(x) [B] for norms [B] in float64, one at a time. A copy of the rule is called, so that it keeps none."""
    rule = copy.deepcopy(rule)
    return torch.func.vmap(lambda x: rule(x, S))(norms.clone())


def check_clip_rule(rule: Any) -> None:
    """Raises ConfigError unless it is a rule that can be called, and shown with the plan."""
    try:
        frozen = is_dataclass(rule) and not isinstance(rule, type) and hash(rule) is not None
    except TypeError:  # it is not frozen
        frozen = False
    if not (frozen and callable(rule) and isinstance(getattr(rule, "name", None), str)):
        raise ConfigError(
            f"clip_rule={rule} is no clip rule; give a frozen dataclass with a name that returns c for a norm and S, "
            "as those of dpexp.privacy.plan.clipping."
        )
    norms = torch.tensor([0.0, 1.0, 1e30], dtype=torch.float64)
    try:
        factors = unbounded_clip_factors(rule, norms, torch.ones((), dtype=torch.float64))
    except Exception as error:
        raise ConfigError(
            f"clip_rule={rule} must accept a norm, a tensor under torch.func.vmap, but it failed: {in_one_line(error)}."
        ) from error
    if factors.shape != norms.shape or not factors.is_floating_point():
        raise ConfigError(f"clip_rule={rule} must return one real number for a norm.")


def describe(rule: ClipRule) -> str:
    """The rule's name and parameters."""
    numbers = [f"{f.name} = {getattr(rule, f.name)}" for f in fields(rule) if f.name != "name"]  # type: ignore[arg-type]
    return f"{rule.name} ({', '.join(numbers)})" if numbers else rule.name
