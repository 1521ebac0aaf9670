"""Makes the plan of a training: solves for the noise or another number, and checks that all goes together."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dpexp.accounting.calibration import solve
from dpexp.accounting.coverage import check_covered
from dpexp.accounting.risk import Epsilon, MaxAdvantage, MaxTpr
from dpexp.errors import ConfigError, positive
from dpexp.privacy.noise.correlated import candidates, coefficients, error, least
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm, AdaptiveTargets
from dpexp.privacy.plan.allocation import AdaptiveMinVariance, Allocation, Explicit, Proportional
from dpexp.privacy.plan.clipping import (
    Abadi,
    ClipNorm,
    ClipRule,
    FixedClipNorm,
    Mechanism,
    Separate,
    check_clip_rule,
)
from dpexp.privacy.plan.groups import Grouping, Vector, flat, trainable, vectors
from dpexp.privacy.plan.options import AUTO, Noise, Sampling, Schedules, Target, claimed
from dpexp.privacy.plan.plan import Group, PrivacyPlan
from dpexp.privacy.preprocessing_methods import parts_of, queries
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease, releases
from dpexp.privacy.sampling.policies import CyclicPoisson
from dpexp.privacy.sampling.privacy_unit import Example
from dpexp.privacy.unsupported import refuse_mixing_layers


@dataclass(frozen=True)
class Clipping:
    """What is clipped together, to which norms, and by which rule (paper, section 2).

    Args:
        group: divides the parameters into groups; by default one.
        mechanism: `Separate()`, the default, or `Joint()`.
        clip_norm: 1 for each group by default.
        clip_rule: Abadi's by default.
        vectors: `layer`: a layer's weight and bias are one vector; or `parameter`.
    """

    group: Grouping = field(default_factory=flat)
    mechanism: Mechanism = field(default_factory=Separate)
    clip_norm: ClipNorm = field(default_factory=lambda: FixedClipNorm(1.0))
    clip_rule: ClipRule = field(default_factory=Abadi)
    vectors: str = "layer"

    def __post_init__(self) -> None:
        check_clip_rule(self.clip_rule)


def make_plan(
    module: nn.Module,
    *,
    n: int,
    sampling: Sampling,
    target: Target,
    clipping: Clipping | None = None,
    allocation: Allocation | None = None,
    noise: Noise | None = None,
    schedules: Schedules | None = None,
    private_metrics: Mapping[str, Any] | None = None,
    privacy_unit: Example | None = None,
    users: int | None = None,
    adjacency: str | None = None,
    calibrate: str = "noise_multiplier",
) -> PrivacyPlan:
    """The plan for training `module`'s trainable parameters.

    Args:
        n: published number of training examples; users: of users, if `privacy_unit` is a `User`.
        target: what may be spent, for which z is solved; or z itself.
        clipping, allocation, noise, schedules: by default `Clipping()`, `Proportional()`, `Noise()`, `Schedules()`.
        privacy_unit: by default `Example()`.
        private_metrics: values of records that are released besides gradients, by name (see
            `dpexp.privacy.private_metrics.releases`).
        adjacency: `add_remove`, `replace_one` or `replace_null`; by default the first that `sampling` may claim.
        calibrate: what is solved for the target: `noise_multiplier`; or from the noise given (the target's
            `noise_multiplier`, or an `Explicit` allocation) `sampling_rate`, `sampling_rate_at_fixed_noise`, `steps`
            or `clip_norm` (see `dpexp.accounting.calibration`).

    Raises:
        ConfigError: a value out of range, contradictory choices, a claim that cannot be made, or a model whose
            layers mix records.
    """
    refuse_mixing_layers(module)
    clipping, allocation = clipping or Clipping(), allocation or Proportional()
    noise, schedules, privacy_unit = noise or Noise(), schedules or Schedules(), privacy_unit or Example()
    records = privacy_unit.num_records(n, users)
    policy, rounds = sampling.resolve(n, records)
    adjacency = claimed(policy.name, adjacency)
    target.check(calibrate, isinstance(allocation, Explicit))
    schedules.check(policy.name, calibrate)
    aim = _aim(target)
    noise.check(policy.name, calibrate, aim is not None, sampling.partitions)
    if not trainable(module):
        raise ConfigError(
            "model: it has no trainable parameter (all are frozen, or have no element), so there is nothing to release."
        )
    members = clipping.group(module)
    grouped = {name: vectors(module, parameters, clipping.vectors) for name, parameters in members.items()}
    clipped = clipping.mechanism(grouped, clipping.clip_norm)
    metrics, adaptive = _metrics(grouped, private_metrics or {}, clipping, allocation)
    left = 1 - sum(metric.budget_share for metric in metrics.values())
    if left <= 0:
        raise ConfigError(
            f"private_metrics.release and clip_norm.budget_share leave {left:.6g} of the budget to gradients; ask for "
            "less."
        )
    if adaptive is not None:
        schedules.check_adaptive(calibrate, noise)
    preprocessing = queries(module, adjacency, aim.mu if aim else None)
    if preprocessing and privacy_unit != Example():
        raise ConfigError(
            f"preprocessing={preprocessing[0].query} bounds what an example contributes, not a {privacy_unit}; choose "
            "privacy_unit=example."
        )
    if preprocessing and noise.kind == "discrete_gaussian":
        raise ConfigError(
            f"noise=discrete_gaussian cannot be had for preprocessing={preprocessing[0].query}, in float64; choose "
            "noise=gaussian."
        )
    shares = allocation.shares(grouped, clipped)
    gradients = {name: MetricRelease(grouped[name], own, left * shares[name]) for name, own in clipped.items()}
    z = target.noise_multiplier
    if isinstance(allocation, Explicit):  # of gradients
        z = allocation.noise_multiplier(clipped) * math.sqrt(left)

    def with_bands(b: int) -> PrivacyPlan:
        c: tuple[float, ...] = (1.0,)
        if noise.kind == "banded":
            c = coefficients(str(noise.coefficients), b, rounds, noise.momentum or 0.0)
        by_bands = replace(policy, partitions=sampling.partitions or b) if isinstance(policy, CyclicPoisson) else policy

        def plan_at(z: float, q: float = policy.q, steps: int = rounds, scale: float = 1.0) -> PrivacyPlan:
            groups = []
            for name, one in (gradients | metrics).items():
                S, w = one.clipping.clip_norm * (scale if name in gradients else 1.0), one.budget_share
                ruled = (clipping.clip_rule, c) if name in gradients else ()
                sigma, discrete = z * S / math.sqrt(w), noise.kind == "discrete_gaussian"
                groups.append(
                    Group(name, one.vectors, one.clipping.scales, S, sigma, w, discrete, one.every_n_rounds, *ruled)
                )
            return PrivacyPlan(
                by_bands if q == policy.q else replace(by_bands, q=q), records, steps, tuple(groups), adjacency,
                schedules.over(steps), adaptive, preprocessing=preprocessing, privacy_unit=privacy_unit,
            )  # fmt: skip

        if z is not None and calibrate == "noise_multiplier":
            plan = plan_at(z)
            plan.ledger()  # every round's numbers make sense
            return _checked(plan)
        assert aim is not None  # as `Target.check` has it
        check_covered(policy.name, adjacency, target.accountant)
        given = z or 1.0
        options: dict[str, tuple[Callable[[float], PrivacyPlan], float]] = {
            "noise_multiplier": (plan_at, 1.0),
            "sampling_rate": (lambda q: plan_at(given * q / policy.q, q=q), policy.q),
            "sampling_rate_at_fixed_noise": (lambda q: plan_at(given, q=q), policy.q),
            "steps": (lambda steps: plan_at(given, steps=int(steps)), rounds),
            "clip_norm": (lambda scale: plan_at(given / scale, scale=scale), 1.0),
        }
        at, start = options[calibrate]
        solved = solve(
            calibrate, lambda value: at(value).ledger(), aim, target.accountant,
            start=start, lowest=1 / records if calibrate.startswith("sampling_rate") else None,
        )  # fmt: skip
        return _checked(replace(at(solved.value), calibration=solved))

    if noise.bands != AUTO:
        return with_bands(int(noise.bands or sampling.partitions or 1))
    plans = (with_bands(b) for b in candidates(policy.q, rounds, sampling.partitions))
    return least((plan.noise_multiplier * error(plan.bands, rounds, noise.momentum or 0.0), plan) for plan in plans)


def _aim(target: Target) -> Epsilon | MaxAdvantage | MaxTpr | None:
    """The target as the accountants measure it; None: the noise is given."""
    if target.max_tpr_at_fpr is not None:
        return MaxTpr(target.max_tpr_at_fpr)
    if target.max_advantage is not None:
        return MaxAdvantage(float(target.max_advantage))
    if target.epsilon is None:
        return None
    if target.delta is None:
        raise ConfigError("privacy.delta must be given with privacy.epsilon.")
    return Epsilon(float(target.epsilon), target.delta)


def _metrics(
    grouped: Mapping[str, tuple[Vector, ...]], asked: Mapping[str, Any], clipping: Clipping, allocation: Allocation
) -> tuple[dict[str, MetricRelease], AdaptiveTargets | None]:
    """What is released besides groups of gradients, by name, and what adaptive bounds follow by it."""
    values, bound = releases(asked), clipping.clip_norm
    both = sorted(set(values) & set(grouped))
    if both:
        raise ConfigError(
            f"private_metrics.release: {both[0]} is the name of a group of gradients too; rename one of them."
        )
    if UNCLIPPED in {*values, *grouped, *(vector.name for value in values.values() for vector in value.vectors)}:
        raise ConfigError(f"{UNCLIPPED} is what clip_norm=adaptive counts under; rename what else is called so.")
    if isinstance(bound, AdaptiveClipNorm):
        following = bound.targets(grouped, clipping.mechanism, allocation)
        return values | {UNCLIPPED: following.counts(positive("clip_norm.budget_share", bound.budget_share))}, following
    if isinstance(allocation, AdaptiveMinVariance):
        raise ConfigError(
            "allocation=adaptive_min_variance goes by bounds that are measured; choose clip_norm=adaptive."
        )
    return values, None


def _checked(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan, if float32 keeps the digits of its bounds, and exact noise can be had for every group and round."""
    scheduled = [factor for _, factor in plan.schedule.S]
    bounds = [
        (f"group {g.name}: the bound S", g.S * by) for g in plan.groups for by in (min(scheduled), max(scheduled))
    ]
    bounds += [(f"group {group.name}: the bound α", alpha) for group in plan.groups for alpha in group.alphas]
    bounds += [
        (f"preprocessing.{one.query}: the bound S", part.S) for one in plan.preprocessing for part in parts_of(one)
    ]
    for told, number in bounds:
        if not 1e-20 <= number <= 1e20:
            raise ConfigError(f"{told}={number:g} must lie between 1e-20 and 1e20.")
    if plan.discrete:
        for start, _ in plan.schedule.segments(plan.rounds):
            for group in plan.at_round(start).groups:
                group.lattice.check(group.name, group.d, plan.n)
    return plan
