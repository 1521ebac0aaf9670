"""Clipping norms that follow a quantile of the norms, privately (Andrew et al. 2021, arXiv 1905.03871).

For each record an indicator says whether its norm is within the clipping norm: b_i = 1[‖v_i‖ <= S] - 1/2. The sum of
the indicators is released in the same round with its own share of the budget; b̂ = Σ_i b_i/qn + 1/2, with noise,
estimates the fraction of records that are not clipped, and S <- S exp(-η (b̂ - γ)) moves S towards the quantile γ.
σ̃_g = z S_g/√w_g moves with S_g, so that every round costs what was planned.

Under separate clipping S_g of each group adapts (`clip_norm=adaptive`); under joint clipping the scale α_j of each
vector (`alpha=adaptive`), from 1[‖v_j‖ <= α_j], so that vectors of very different lengths use S equally (arXiv
1812.06210, section 2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dpexp.errors import ConfigError, Positive, checks_arguments
from dpexp.privacy.plan.clipping import RAMP, GroupClipping, Joint, Mechanism, Separate, by_group, distinct
from dpexp.privacy.plan.groups import Vector, value_key
from dpexp.privacy.plan.plan import AdaptiveMember, AdaptiveTargets, Group, PrivacyPlan
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease

_LARGEST_MULTIPLIER = 1e8  # of an initial clipping norm


@checks_arguments
@dataclass(frozen=True)
class AdaptiveClipNorm:
    """Clipping norms that adapt towards a quantile of the norms.

    Examples:
        >>> from dpexp import AdaptiveClipNorm
        >>> AdaptiveClipNorm(initial=0.5)(["conv", "fc"], [100, 900])  # S in the first round
        [0.5, 0.5]

    Args:
        initial: the first clipping norm, for all groups or by group.
        target_quantile: γ in [0, 1], the fraction of records that is not to be clipped, for all groups or by group.
        learning_rate: η.
        budget_share: the share of the budget for all its indicators together.
    """

    initial: float | Mapping[str, float] = 1.0
    target_quantile: float | Mapping[str, float] = 0.5
    learning_rate: Positive = 0.2
    budget_share: Positive = 0.01

    def __call__(self, groups: Sequence[str], dimensions: Sequence[int], key: str = "clip_norm") -> list[float]:
        return by_group(f"{key}.initial", self.initial, groups)


def adaptive_targets(
    groups: Mapping[str, Sequence[Vector]], mechanisms: Mapping[str, Mechanism], clip_norms: Mapping[str, Any]
) -> tuple[AdaptiveTargets | None, float]:
    """The adaptive clipping norms of a plan, None if there are none, and their share of the budget."""
    adapting = {name: ("clip_norm", norm) for name, norm in clip_norms.items() if isinstance(norm, AdaptiveClipNorm)}
    for name in adapting:
        if not isinstance(mechanisms[name], Separate):
            raise ConfigError(
                f"clip_norm=adaptive needs mechanism=separate for the group {name}; with mechanism=joint, choose "
                "alpha=adaptive."
            )
    for name, mechanism in mechanisms.items():
        if isinstance(mechanism, Joint) and isinstance(mechanism.alpha, AdaptiveClipNorm):
            adapting[name] = ("alpha", mechanism.alpha)
    members: list[AdaptiveMember] = []
    total = 0.0
    for (key, norm), names in distinct(adapting):
        total += norm.budget_share
        quantiles = by_group(f"{key}.target_quantile", norm.target_quantile, names, _fraction)
        for name, quantile in zip(names, quantiles, strict=True):
            vectors = [vector.name for vector in groups[name]] if key == "alpha" else [None]
            members += [AdaptiveMember(name, vector, quantile, float(norm.learning_rate)) for vector in vectors]
    members.sort(key=lambda member: [*groups].index(member.group))
    return AdaptiveTargets(tuple(members)) if members else None, total


def _fraction(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must be a fraction between 0 and 1.")
    return float(value)


def count_release(targets: AdaptiveTargets, budget_share: float) -> MetricRelease:
    """The release of k indicators of ±1/2, a vector of norm √k/2."""
    k = len(targets.members)
    vector = Vector(UNCLIPPED, (value_key(UNCLIPPED),), k)
    return MetricRelease((vector,), GroupClipping((1.0,), math.sqrt(k) / 2), budget_share)


class AdaptiveState:
    """The clipping norms of the current round, as multipliers of the initial ones."""

    def __init__(self, targets: AdaptiveTargets) -> None:
        self._targets = targets
        self.multipliers = [1.0] * len(targets.members)

    def restore(self, multipliers: Sequence[float]) -> None:
        """Continues from a checkpoint's multipliers; a ConfigError if they are another plan's, or there are none."""
        if len(multipliers) != len(self.multipliers):
            raise ConfigError(
                "the checkpoint holds no clipping norms that clip_norm=adaptive could continue from; begin a new run."
            )
        self.multipliers = [*multipliers]

    def plan_of_round(self, plan: PrivacyPlan) -> PrivacyPlan:
        """A round's plan with the current clipping norms."""
        members = zip(self._targets.members, self.multipliers, strict=True)
        multipliers = {(member.group, member.vector): multiplier for member, multiplier in members}
        return replace(plan, groups=tuple(g if g.is_metric else _scaled(g, multipliers) for g in plan.groups))

    def record_and_update(
        self, now: PrivacyPlan, counts: Tensor, completed: int, history: dict[str, list[tuple[int, float, float]]]
    ) -> dict[str, float]:
        """Updates the clipping norms by the counts of a round.

        Args:
            now: the round's plan.
            counts: released, see `update`.
            completed: the number of the round, from 1.
            history: the round's clipping norms are added to it (see `MetricEstimates`).

        Returns:
            The round's clipping norms and fractions, as metrics.
        """
        norms = dict(self.clip_norms(now))
        fractions = self.update(counts, now.sampling.weight)
        for name, norm in norms.items():
            history.setdefault(name, []).append((completed, norm, 0.0))
        return norms | {f"private/{UNCLIPPED}/{name}": fraction for name, fraction in fractions.items()}

    def update(self, released: Tensor, weight: float = 1.0) -> dict[str, float]:
        """Updates the multipliers by the noisy counts of a sample.

        Args:
            released: [k], Σ_i b_i/qn of each member, with noise.
            weight: of the sample, see `Policy.weight`.

        Returns:
            b̂ by the member's name.
        """
        fractions = {}
        for k, (name, member) in enumerate(zip(self._targets.names, self._targets.members, strict=True)):
            fraction = float(released[k]) + 0.5
            exponent = -member.learning_rate * weight * (fraction - member.target_quantile)
            # Noise may put b̂ far outside [0, 1]: no round changes a clipping norm by more than a factor of e.
            multiplier = self.multipliers[k] * math.exp(max(-1.0, min(1.0, exponent)))
            self.multipliers[k] = min(max(multiplier, 1 / _LARGEST_MULTIPLIER), _LARGEST_MULTIPLIER)
            fractions[name] = fraction
        return fractions

    def clip_norms(self, now: PrivacyPlan) -> Iterator[tuple[str, float]]:
        """A round's clipping norms by the name of their metric: clip_norm/group or alpha/vector."""
        groups = {group.name: group for group in now.groups}
        for name, member in zip(self._targets.names, self._targets.members, strict=True):
            group = groups[member.group]
            if member.vector is None:
                yield f"clip_norm/{name}", group.S
            else:
                alphas = dict(zip((vector.name for vector in group.vectors), group.alphas, strict=True))
                yield f"alpha/{name}", alphas[member.vector]


def _scaled(group: Group, multipliers: Mapping[tuple[str, str | None], float]) -> Group:
    """The group with S and σ̃, or its α_j, times their multipliers.

    Args:
        multipliers: by group and vector; the vector is None where S adapts.
    """
    factor = multipliers.get((group.name, None), 1.0)
    alphas = zip(group.vectors, group.alphas, strict=True)
    return replace(
        group, S=group.S * factor, sigma=group.sigma * factor,
        alphas=tuple(alpha * multipliers.get((group.name, vector.name), 1.0) for vector, alpha in alphas),
    )  # fmt: skip


def indicator(norms: Tensor) -> Tensor:
    """1 for each norm, in units of its clipping norm, that is within it, else 0.

    The last hundredth is a ramp, for the reason of `dpexp.privacy.plan.clipping.Global`.
    """
    return ((1 - norms) / RAMP).nan_to_num(0, posinf=1, neginf=0).clamp(0, 1)
