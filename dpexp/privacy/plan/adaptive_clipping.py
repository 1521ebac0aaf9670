"""Bounds that follow a quantile of the norms, learnt privately (Andrew et al. 2021, arXiv 1905.03871).

Of each record it is counted whether its norm is within the bound: b_i = 1[‖v_i‖ <= S] - 1/2. The counts are a vector
of the same round with its own share of the budget; b̂ = Σ_i b_i/qn + 1/2, with noise, estimates the fraction of records
that are not clipped, and S <- S exp(-η (b̂ - γ)) moves S towards the quantile γ. σ̃_g = z S_g/√w_g moves with S_g, so
that a round costs what was planned.

Under separate clipping that is S_g of each group; under joint clipping the scale α_j of each vector, from
1[‖v_j‖ <= α_j], so that vectors of very different lengths come to make equal use of S (McMahan et al. 2018, section 2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from dpexp.errors import ConfigError, positive
from dpexp.privacy.plan.allocation import AdaptiveMinVariance, Allocation
from dpexp.privacy.plan.clipping import RAMP, GroupClipping, Joint, Mechanism, Separate, by_group
from dpexp.privacy.plan.groups import Vector, value_key
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease

if TYPE_CHECKING:
    from dpexp.privacy.plan.plan import Group, PrivacyPlan

_FURTHEST = 1e8  # from where a bound began


@dataclass(frozen=True)
class AdaptiveClipNorm:
    """Bounds that begin somewhere and follow a quantile.

    Args:
        initial: one number for all, or one for each group by name.
        target_quantile: γ in [0, 1], the fraction of records that is not to be clipped; one for all, or by group.
        learning_rate: η.
        budget_share: of the budget, for all counts together.
    """

    initial: float | Mapping[str, float] = 1.0
    target_quantile: float | Mapping[str, float] = 0.5
    learning_rate: float = 0.2
    budget_share: float = 0.01

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int]) -> list[float]:
        return by_group("clip_norm.initial", self.initial, groups)

    def targets(
        self, groups: Mapping[str, Sequence[Vector]], mechanism: Mechanism, allocation: Allocation
    ) -> "AdaptiveTargets":
        """What a plan for some groups follows, if the mechanism's bounds can be followed."""
        if isinstance(mechanism, Joint) and mechanism.alpha is None:
            members = [(group, vector.name) for group, vectors in groups.items() for vector in vectors]
        elif isinstance(mechanism, Separate):
            members = [(group, group) for group in groups]
        else:
            raise ConfigError(
                "clip_norm=adaptive needs mechanism=separate, or mechanism=joint with mechanism.alpha=null."
            )
        gammas = tuple(
            by_group("clip_norm.target_quantile", self.target_quantile, [group for group, _ in members], _fraction)
        )
        rate = positive("clip_norm.learning_rate", self.learning_rate)
        return AdaptiveTargets(
            tuple(members), isinstance(mechanism, Joint), gammas, rate, isinstance(allocation, AdaptiveMinVariance)
        )


def _fraction(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be a fraction between 0 and 1.")
    return float(value)


@dataclass(frozen=True)
class AdaptiveTargets:
    """What a plan's bounds follow.

    Attributes:
        members: (group, group) whose S_g is followed; or (group, vector) whose α_j is.
        joint: the latter.
        target_quantiles: γ of each; learning_rate: η.
        measured: shares of the budget follow as well (see `AdaptiveMinVariance`).
    """

    members: tuple[tuple[str, str], ...]
    joint: bool
    target_quantiles: tuple[float, ...]
    learning_rate: float
    measured: bool

    @property
    def names(self) -> list[str]:
        """Of the members: the vector's, after its group's if another group has one of that name."""
        vectors = [vector for _, vector in self.members]
        return [v if vectors.count(v) == 1 else f"{group}/{v}" for group, v in self.members]

    def counts(self, share: float) -> MetricRelease:
        """Of k counts: a record's vector holds ±1/2 for each, and so has the norm √k/2."""
        k = len(self.members)
        vector = Vector(UNCLIPPED, (value_key(UNCLIPPED),), k)
        return MetricRelease((vector,), GroupClipping((1.0,), math.sqrt(k) / 2), share)


class AdaptiveState:
    """Where the bounds have come to: `factors` of the initial ones."""

    def __init__(self, following: AdaptiveTargets) -> None:
        self._following, self.joint = following, following.joint
        self.multipliers = [1.0] * len(following.members)

    def restore(self, factors: Sequence[float]) -> None:
        """Goes on from those of a checkpoint.

        Raises:
            ConfigError: they are of another plan, or there are none.
        """
        if len(factors) != len(self.multipliers):
            raise ConfigError(
                "the checkpoint holds no bounds that clip_norm=adaptive could go on from; begin a new run."
            )
        self.multipliers = [*factors]

    def apply(self, plan: "PrivacyPlan") -> "PrivacyPlan":
        """A round's plan with the bounds as they are."""
        by = dict(zip(self._following.members, self.multipliers, strict=True))
        groups = [group if group.is_metric else self._bounded(group, by) for group in plan.groups]
        return replace(plan, groups=tuple(_shared_anew(groups) if self._following.measured else groups))

    def move(
        self, now: "PrivacyPlan", counts: Tensor, completed: int, history: dict[str, list[tuple[int, float, float]]]
    ) -> dict[str, float]:
        """Moves the bounds by what the counts of round number `completed` say; returns the round's bounds, which are
        added to `history` (see `MetricEstimates`), and fractions as metrics."""
        shown = dict(self.shown(now))
        for name, bound in shown.items():
            history.setdefault(name, []).append((completed, bound, 0.0))
        fractions = self.update(counts)
        return shown | {f"private/{UNCLIPPED}/{name}": fraction for name, fraction in fractions.items()}

    def update(self, released: Tensor) -> dict[str, float]:
        """Follows a round's counts Σ_i b_i/qn [k], noise included; returns b̂ by name."""
        found = {}
        for k, (name, gamma) in enumerate(zip(self._following.names, self._following.target_quantiles, strict=True)):
            found[name] = float(released[k]) + 0.5
            factor = self.multipliers[k] * math.exp(
                max(-1.0, min(1.0, -self._following.learning_rate * (found[name] - gamma)))
            )
            self.multipliers[k] = min(max(factor, 1 / _FURTHEST), _FURTHEST)
        return found

    def shown(self, now: "PrivacyPlan") -> Iterator[tuple[str, float]]:
        """The bounds of a round by what they are called: clip_norm/group or joint_scale/vector."""
        alphas = [alpha for group in now.groups if not group.is_metric for alpha in group.alphas]
        bounds = [group.S for group in now.groups if not group.is_metric]
        for name, bound in zip(self._following.names, alphas if self.joint else bounds, strict=True):
            yield f"{'joint_scale' if self.joint else 'clip_norm'}/{name}", bound

    def _bounded(self, group: "Group", by: Mapping[tuple[str, str], float]) -> "Group":
        if self.joint:
            alphas = zip(group.vectors, group.alphas, strict=True)
            return replace(group, alphas=tuple(alpha * by[group.name, vector.name] for vector, alpha in alphas))
        factor = by[group.name, group.name]
        return replace(group, S=group.S * factor, sigma=group.sigma * factor)


def indicator(parts: Tensor) -> Tensor:
    """1 for each norm, in units of its bound, that is within it, else 0. In between lies a ramp over the last
    hundredth, for the reason of `clips.Global`."""
    return ((1 - parts) / RAMP).nan_to_num(0, posinf=1, neginf=0).clamp(0, 1)


def _shared_anew(groups: Sequence["Group"]) -> Iterator["Group"]:
    """Divides what the groups of gradients have of the budget by their bounds as they are."""
    of_gradients = [group for group in groups if not group.is_metric]
    clipping = {group.name: GroupClipping(group.alphas, group.S) for group in of_gradients}
    shares = AdaptiveMinVariance().shares({group.name: group.vectors for group in of_gradients}, clipping)
    whole = sum(group.share for group in of_gradients)
    for group in groups:
        share = whole * shares[group.name] if group.name in shares else group.share
        yield replace(group, share=share, sigma=group.sigma * math.sqrt(group.share / share))
