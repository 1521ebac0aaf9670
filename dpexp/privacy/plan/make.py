"""Makes the privacy plan of a training: calibrates the noise, or another value, and checks the options together."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dpexp._lightning_compat import refuse_mixed
from dpexp.accounting.calibration import solve
from dpexp.accounting.coverage import check_covered
from dpexp.accounting.risk import Epsilon, MaxAdvantage, MaxTpr
from dpexp.accounting.sampling import CyclicPoisson, Policy, RandomAllocation
from dpexp.accounting.sampling.policy import RatedPolicy, at_q
from dpexp.errors import ConfigError, checks_arguments
from dpexp.privacy.noise.correlated import candidates, coefficients, error, least_error
from dpexp.privacy.plan.adaptive_clipping import adaptive_targets, count_release
from dpexp.privacy.plan.allocation import Allocation, Explicit, Proportional
from dpexp.privacy.plan.clipping import (
    Abadi,
    ClipNorm,
    ClipRule,
    Joint,
    Mechanism,
    Separate,
    check_clip_rule,
    clip,
    options_by_group,
)
from dpexp.privacy.plan.groups import VECTORS, Grouping, Vector, flat, trainable, vectors
from dpexp.privacy.plan.options import AUTO, Banded, Gaussian, Schedules, Target
from dpexp.privacy.plan.plan import Group, PrivacyPlan
from dpexp.privacy.preprocessing_methods import rounds_before_training
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease, metric_releases
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling.privacy_unit import Example


@checks_arguments
@dataclass(frozen=True)
class Clipping:
    """What is clipped together, to which norms, and by which rule (paper, section 2).

    Args:
        group: divides the parameters into groups; by default one.
        mechanism: `Separate()`, the default, or `Joint()`; or one for each group, by name.
        clip_norm: gives S_g; by default 1/√G for separate clipping of one of G groups, and √k for joint clipping of
            k vectors; or one for each group, by name.
        clip_rule: by default Abadi's; or one for each group, by name.
        vectors: `layer`: a layer's weight and bias are one vector; or `parameter`.

    Raises:
        ConfigError: a clip rule is none, `vectors` is unknown, or joint clipping has a clipping norm but no `alpha`.
    """

    group: Grouping = field(default_factory=flat)
    mechanism: Mechanism | Mapping[str, Mechanism] = field(default_factory=Separate)
    clip_norm: ClipNorm | Mapping[str, ClipNorm | None] | None = None
    clip_rule: ClipRule | Mapping[str, ClipRule] = field(default_factory=Abadi)
    vectors: str = "layer"

    def __post_init__(self) -> None:
        for rule in self.clip_rule.values() if isinstance(self.clip_rule, Mapping) else [self.clip_rule]:
            check_clip_rule(rule)
        if isinstance(self.mechanism, Joint) and self.mechanism.alpha is None and self.clip_norm is not None:
            raise ConfigError(
                f"clip_norm={self.clip_norm} gives S_g with mechanism=joint, too, where it gave the scales α_j before; "
                "say these as well: alpha=fixed, uniform, dimension or adaptive."
            )
        if self.vectors not in VECTORS:
            raise ConfigError(f"vectors={self.vectors} is unknown; choose one of {', '.join(VECTORS)}.")


def make_plan(
    module: nn.Module,
    *,
    n: int,
    sampling: Policy,
    target: Target,
    clipping: Clipping | None = None,
    allocation: Allocation | None = None,
    noise: Gaussian | None = None,
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
        target: the privacy target, for which z is calibrated; or z itself.
        clipping: by default `Clipping()`; allocation: `Proportional()`; noise: `Gaussian()`; schedules: `Schedules()`.
        private_metrics: values that are released in addition to gradients, by name (see
            `dpexp.privacy.private_metrics.metric_releases`).
        privacy_unit: by default `Example()`.
        adjacency: `add_remove`, `replace_one` or `replace_null`; by default the first that `sampling` covers.
        calibrate: what is solved for to meet the target: `noise_multiplier`; or, at the noise of the target's
            `noise_multiplier` or of an `Explicit` allocation, `sampling_rate`, `sampling_rate_at_fixed_noise`, `steps`
            or `clip_norm` (see `dpexp.accounting.calibration`). With `sigma_of_average`, `sampling_rate` needs no q.

    Raises:
        ConfigError: a value is out of range, options contradict each other, the accountant does not cover the policy
            and adjacency, or a layer of the model mixes records.
    """
    refuse_mixed("model", module)
    refuse_mixing_layers(module)
    clipping, allocation = clipping or Clipping(), allocation or Proportional()
    noise, schedules, privacy_unit = noise or Gaussian(), schedules or Schedules(), privacy_unit or Example()
    records = privacy_unit.num_records(n, users)
    has_no_q = isinstance(sampling, RatedPolicy) and sampling.sampling_rate is sampling.expected_batch_size is None
    if has_no_q and calibrate == "sampling_rate" and isinstance(allocation, Explicit) and allocation.sigma is None:
        sampling = at_q(sampling, 1.0)  # or any other: σ_g determines the noise at each q
    policy, rounds = sampling.resolve(n, records)
    adjacency = check_covered(type(policy), adjacency, target.accountant)
    target.check(calibrate, isinstance(allocation, Explicit))
    schedules.check(sampling, calibrate)
    privacy_target = _privacy_target(target)
    noise.check(policy, calibrate, privacy_target is not None)
    mu = privacy_target.mu if privacy_target else None
    before_training = rounds_before_training(module, records, privacy_unit, adjacency, mu)
    if not trainable(module):
        raise ConfigError(
            "model: it has no trainable parameter (all are frozen, or have no element), so there is nothing to release."
            + " Call its configure_model() first." * hasattr(module, "configure_model")
        )
    grouped = {name: vectors(module, names, clipping.vectors) for name, names in clipping.group(module).items()}
    mechanisms, clip_norms, clip_rules = (
        options_by_group(name, getattr(clipping, name), grouped) for name in ("mechanism", "clip_norm", "clip_rule")
    )
    clipped = clip(grouped, mechanisms, clip_norms)
    adaptive, share = adaptive_targets(grouped, mechanisms, clip_norms)
    metrics = _metrics(grouped, private_metrics or {})
    if adaptive is not None:
        metrics |= {UNCLIPPED: count_release(adaptive, share)}
    remaining = 1 - sum(metric.budget_share for metric in metrics.values())
    if remaining <= 0:
        raise ConfigError(
            f"private_metrics.release and clip_norm.budget_share leave {remaining:.6g} of the budget to gradients; "
            "choose smaller shares."
        )
    if adaptive is not None:
        schedules.check_adaptive(calibrate)
    apart = next((name for name, metric in metrics.items() if metric.every_n_rounds > 1), None)
    if apart is not None and isinstance(policy, RandomAllocation):
        raise ConfigError(
            f"private_metrics.release.{apart}.every_n_rounds={metrics[apart].every_n_rounds} must be 1 with "
            f"sampling={policy.name}, where all rounds of an epoch are accounted as equal; or choose sampling=poisson."
        )
    shares = allocation.shares(grouped, clipped)
    gradients = {name: MetricRelease(grouped[name], own, remaining * shares[name]) for name, own in clipped.items()}
    z = target.noise_multiplier
    if isinstance(allocation, Explicit):
        z = allocation.noise_multiplier(clipped, policy.q * records) * math.sqrt(remaining)

    def with_bands(b: int) -> PrivacyPlan:
        c: tuple[float, ...] = (1.0,)
        if isinstance(noise, Banded):
            c = coefficients(noise.coefficients, b, rounds, noise.momentum)
        in_turn = replace(policy, partitions=policy.partitions or b) if isinstance(policy, CyclicPoisson) else policy

        def plan_at(z: float, q: float = policy.q, steps: int | None = None, scale: float = 1.0) -> PrivacyPlan:
            """The plan at a noise multiplier, sampling rate, number of rounds and scale of the clipping norms."""
            groups, sampled = [], in_turn if q == policy.q else at_q(in_turn, q)
            steps = steps or sampling.length(sampled)
            for name, release in (gradients | metrics).items():
                S, w = release.clipping.S * (scale if name in gradients else 1.0), release.budget_share
                sigma, for_gradients = z * S / math.sqrt(w), (clip_rules[name], c) if name in gradients else ()
                alphas = release.clipping.alphas
                groups.append(Group(name, release.vectors, alphas, S, sigma, w, release.every_n_rounds, *for_gradients))
            return PrivacyPlan(
                sampled, records, steps, tuple(groups), adjacency, schedules.over(steps), adaptive,
                before_training=before_training, privacy_unit=privacy_unit, delta=target.delta,
            )  # fmt: skip

        if z is not None and calibrate == "noise_multiplier":
            plan = plan_at(z)
            plan.ledger()  # refuses values of a round that are out of range
            return _checked(plan)
        assert privacy_target is not None  # as Target.check requires
        fixed = z or 1.0
        plans: dict[str, tuple[Callable[[float], PrivacyPlan], float]] = {
            "noise_multiplier": (plan_at, 1.0),
            "sampling_rate": (lambda q: plan_at(fixed * q / policy.q, q=q), policy.q),
            "sampling_rate_at_fixed_noise": (lambda q: plan_at(fixed, q=q), policy.q),
            "steps": (lambda steps: plan_at(fixed, steps=int(steps)), rounds),
            "clip_norm": (lambda scale: plan_at(fixed / scale, scale=scale), 1.0),
        }
        at, start = plans[calibrate]
        solved = solve(
            calibrate, lambda value: at(value).ledger(), privacy_target, target.accountant,
            start=start, lowest=1 / records if calibrate.startswith("sampling_rate") else None,
        )  # fmt: skip
        return _checked(replace(at(solved.value), calibration=solved))

    if not isinstance(noise, Banded) or noise.bands != AUTO:
        return with_bands(noise.bands)
    partitions = policy.partitions if isinstance(policy, CyclicPoisson) else None
    tried = (with_bands(b) for b in candidates(policy.q, rounds, partitions))
    return least_error((plan.noise_multiplier * error(plan.bands, rounds, noise.momentum), plan) for plan in tried)


def _privacy_target(target: Target) -> Epsilon | MaxAdvantage | MaxTpr | None:
    """The target as accountants measure it; None: only the noise multiplier is given."""
    if target.max_tpr_at_fpr is not None:
        return MaxTpr(target.max_tpr_at_fpr)
    if target.max_advantage is not None:
        return MaxAdvantage(float(target.max_advantage))
    if target.epsilon is None:
        return None
    if target.delta is None:
        raise ConfigError("privacy.delta must be given with privacy.epsilon.")
    return Epsilon(float(target.epsilon), target.delta)


def _metrics(grouped: Mapping[str, tuple[Vector, ...]], specs: Mapping[str, Any]) -> dict[str, MetricRelease]:
    """The releases in addition to gradients, by name."""
    metrics = metric_releases(specs)
    both = sorted(set(metrics) & set(grouped))
    if both:
        raise ConfigError(
            f"private_metrics.release: {both[0]} is the name of a group of gradients too; rename one of them."
        )
    if UNCLIPPED in {*metrics, *grouped, *(vector.name for metric in metrics.values() for vector in metric.vectors)}:
        raise ConfigError(f"{UNCLIPPED} is the name of what adaptive clipping norms release; choose another name.")
    return metrics


def _checked(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan, if float32 can hold its bounds."""
    multipliers = [multiplier for _, multiplier in plan.schedule.S]
    bounds = [
        (f"group {group.name}: the clipping norm S", group.S * by)
        for group in plan.groups
        for by in (min(multipliers), max(multipliers))
    ]
    bounds += [(f"group {group.name}: the scale α", alpha) for group in plan.groups for alpha in group.alphas]
    bounds += [
        (f"preprocessing.{query.name}: the clipping norm S", query.S)
        for round_ in plan.before_training
        for query in round_.queries
    ]
    for what, number in bounds:
        if not 1e-20 <= number <= 1e20:
            raise ConfigError(f"{what}={number:g} must lie between 1e-20 and 1e20.")
    return plan
