"""Makes the privacy plan of a training: calibrates the noise, or another value, and checks the options together."""

import math
from collections.abc import Mapping
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
    GroupClipping,
    Joint,
    Mechanism,
    Separate,
    check_clip_rule,
    clipping_of,
    options_by_group,
)
from dpexp.privacy.plan.groups import VECTORS, Grouping, Vector, flat, trainable, vectors
from dpexp.privacy.plan.options import AUTO, Banded, Gaussian, Schedules, Target
from dpexp.privacy.plan.plan import AdaptiveTargets, Group, PrivacyPlan
from dpexp.privacy.preprocessing_methods import rounds_before_training
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease, metric_releases
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling.privacy_unit import Example


@checks_arguments
@dataclass(frozen=True)
class Clipping:
    """What is clipped together, to which norms, and by which rule (arXiv 1812.06210, section 2).

    Examples:
        >>> import dpexp
        >>> dpexp.Clipping(group=dpexp.per_layer(), clip_norm=dpexp.UniformClipNorm(total=1.0)).vectors
        'layer'
        >>> dpexp.Clipping(mechanism=dpexp.Joint(alpha=dpexp.FixedClipNorm([1.0, 100.0]))).mechanism
        Joint(alpha=FixedClipNorm(value=[1.0, 100.0]))

    Args:
        group: divides the parameters into groups; by default one.
        mechanism: `Separate()`, the default, or `Joint()`; or one for each group, by name.
        clip_norm: gives S_g; by default 1/√G for separate clipping of one of G groups, and √k for joint clipping of
            k vectors; or one for each group, by name.
        clip_rule: by default Abadi's; or one for each group, by name.
        vectors: `layer`: a layer's weight and bias are one vector; or `parameter`.

    Raises:
        ConfigError: a clip rule is none, `vectors` is unknown, or joint clipping of all groups has a clipping norm but
            no `alpha`.
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

    Examples:
        >>> import dpexp, torch
        >>> sampling, target = dpexp.Poisson(expected_batch_size=100, epochs=2), dpexp.Target(epsilon=1.0, delta=1e-5)
        >>> dpexp.make_plan(torch.nn.Linear(3, 1), n=10_000, sampling=sampling, target=target)
        PrivacyPlan: 200 rounds of Poisson(q=0.01), n = 10000, z = 0.9674; groups: 1
          all: 4 numbers, S = 1, σ̃ = 0.9674

    Args:
        n: published number of training examples.
        sampling: how each round's sample is drawn, and how many rounds there are.
        users: published number of users, if `privacy_unit` is a `User`.
        target: the privacy target, for which z is calibrated; or z itself.
        clipping: by default `Clipping()`; allocation: `Proportional()`; noise: `Gaussian()`; schedules: `Schedules()`.
        private_metrics: what is released besides gradients (`dpexp.privacy.private_metrics.metric_releases`).
        privacy_unit: by default `Example()`.
        adjacency: `add_remove`, `replace_one` or `replace_null`; by default the first that `sampling` covers.
        calibrate: what is solved for to meet the target, one of `dpexp.accounting.calibration.CALIBRATABLE`.

    Raises:
        ConfigError: a value is out of range, options contradict each other, or a layer of the model mixes records.
    """
    refuse_mixed("model", module)
    refuse_mixing_layers(module)
    clipping, allocation = clipping or Clipping(), allocation or Proportional()
    noise, schedules, privacy_unit = noise or Gaussian(), schedules or Schedules(), privacy_unit or Example()
    records = privacy_unit.num_records(n, users)
    sampling = _with_a_rate(sampling, calibrate, allocation)
    policy, rounds = sampling.resolve(n, records)
    adjacency = check_covered(type(policy), adjacency, target.accountant)
    target.check(calibrate, isinstance(allocation, Explicit))
    schedules.check(sampling, calibrate)
    aim = _privacy_target(target)
    noise.check(policy, calibrate, aim is not None)
    before_training = rounds_before_training(module, records, privacy_unit, adjacency, aim.mu if aim else None)
    released = _released(module, clipping, allocation, private_metrics or {})
    released.check(policy, schedules, calibrate)
    z = released.noise_multiplier(target, allocation, policy.q * records)
    plan = PrivacyPlan(
        policy, records, rounds, released.groups, adjacency, adaptive=released.adaptive,
        before_training=before_training, privacy_unit=privacy_unit, delta=target.delta,
    )  # fmt: skip
    return _Draft(plan, sampling, schedules, calibrate, z, aim, target.accountant).finished(noise)


def _with_a_rate(sampling: Policy, calibrate: str, allocation: Allocation) -> Policy:
    """The sampling policy, which needs no q if q is solved for and the noise of the average, σ_g, is given.

    Then q = 1 stands for it until it is found: σ_g gives z at each q.
    """
    if calibrate != "sampling_rate" or not isinstance(sampling, RatedPolicy):
        return sampling
    has_rate = sampling.sampling_rate is not None or sampling.expected_batch_size is not None
    fixes_noise_of_average = isinstance(allocation, Explicit) and allocation.sigma is None
    return at_q(sampling, 1.0) if fixes_noise_of_average and not has_rate else sampling


@dataclass(frozen=True)
class _Released:
    """What a round releases.

    Attributes:
        groups: those of gradients, then those of metrics, each with its σ̃ at z = 1.
        clipped: the clipping of each group of gradients, by name.
        adaptive: the targets of adaptive clipping norms, if any.
        left_for_gradients: the budget less the shares of metrics.
    """

    groups: tuple[Group, ...]
    clipped: Mapping[str, GroupClipping]
    adaptive: AdaptiveTargets | None
    left_for_gradients: float

    def check(self, policy: Policy, schedules: Schedules, calibrate: str) -> None:
        """Raises ConfigError: the groups do not go with the other options."""
        if self.adaptive is not None:
            schedules.check_adaptive(calibrate)
        if isinstance(policy, RandomAllocation):
            for group in self.groups:
                if group.every_n_rounds > 1:
                    raise ConfigError(
                        f"private_metrics.release.{group.name}.every_n_rounds={group.every_n_rounds} must be 1 with "
                        f"sampling={policy.name}, where all rounds of an epoch are accounted as equal; or choose "
                        "sampling=poisson."
                    )

    def noise_multiplier(self, target: Target, allocation: Allocation, records: float) -> float | None:
        """z as it is given, or as it follows from an explicit noise, of which gradients take what metrics leave.

        `records`: q·n. None: z is to be found.
        """
        if not isinstance(allocation, Explicit):
            return target.noise_multiplier
        return allocation.noise_multiplier(self.clipped, records) * math.sqrt(self.left_for_gradients)


def _released(
    module: nn.Module, clipping: Clipping, allocation: Allocation, configured: Mapping[str, Any]
) -> _Released:
    """Clips the groups of gradients and metrics, and divides the budget among them."""
    if not trainable(module):
        hint = " Call its configure_model() first." if hasattr(module, "configure_model") else ""
        raise ConfigError(
            "model: it has no trainable parameter (all are frozen, or have no element), so there is nothing to release."
            f"{hint}"
        )
    grouped = {name: vectors(module, names, clipping.vectors) for name, names in clipping.group(module).items()}
    mechanisms, clip_norms, clip_rules = (
        options_by_group(name, getattr(clipping, name), grouped) for name in ("mechanism", "clip_norm", "clip_rule")
    )
    clipped = clipping_of(grouped, mechanisms, clip_norms)
    adaptive, share = adaptive_targets(grouped, mechanisms, clip_norms)
    metrics = _metrics(grouped, configured)
    if adaptive is not None:
        metrics |= {UNCLIPPED: count_release(adaptive, share)}

    left = 1 - sum(metric.budget_share for metric in metrics.values())
    if left <= 0:
        raise ConfigError(
            f"private_metrics.release and clip_norm.budget_share leave {left:.6g} of the budget to gradients; "
            "choose smaller shares."
        )
    shares = allocation.shares(grouped, clipped)
    groups = []
    unknown = math.nan  # σ̃, which `with_noise` sets
    for name, own in clipped.items():
        share, rule = left * shares[name], clip_rules[name]
        group = Group(name, grouped[name], own.alphas, own.S, sigma=unknown, share=share, clip_rule=rule)
        groups.append(group.with_noise(1.0))
    for name, metric in metrics.items():
        alphas, S, share, k = metric.clipping.alphas, metric.clipping.S, metric.budget_share, metric.every_n_rounds
        group = Group(name, metric.vectors, alphas, S, sigma=unknown, share=share, every_n_rounds=k)
        groups.append(group.with_noise(1.0))
    return _Released(tuple(groups), clipped, adaptive, left)


@dataclass(frozen=True)
class _Draft:
    """A plan at z = 1, from which plans at other values are made, until one meets the target.

    `finished` tries each number of bands; `solved` finds the value for one of them; `with_value` and `at` make plans.

    Attributes:
        plan: the plan at z = 1.
        sampling: as given, with its epochs or steps; schedules: as given.
        calibrate: the name of the value, one of CALIBRATABLE; z: if it is given.
        aim: the privacy target; None: z is given, and nothing is to be found.
    """

    plan: PrivacyPlan
    sampling: Policy
    schedules: Schedules
    calibrate: str
    z: float | None
    aim: Epsilon | MaxAdvantage | MaxTpr | None
    accountant: str

    def finished(self, noise: Gaussian) -> PrivacyPlan:
        """The finished plan; of the numbers of bands that `noise` allows, the one with the least predicted error."""
        if not isinstance(noise, Banded) or noise.bands != AUTO:
            return self.with_bands(noise, noise.bands).solved()
        policy, rounds = self.plan.sampling, self.plan.rounds
        partitions = policy.partitions if isinstance(policy, CyclicPoisson) else None
        tried = (self.with_bands(noise, b).solved() for b in candidates(policy.q, rounds, partitions))
        return least_error((plan.noise_multiplier * error(plan.bands, rounds, noise.momentum), plan) for plan in tried)

    def with_bands(self, noise: Gaussian, b: int) -> "_Draft":
        """With noise that is correlated over b rounds, and as many partitions unless they are given."""
        groups, policy = self.plan.groups, self.plan.sampling
        if isinstance(noise, Banded):
            c = coefficients(noise.coefficients, b, self.plan.rounds, noise.momentum)
            groups = tuple(group if group.is_metric else replace(group, bands=c) for group in groups)
        if isinstance(policy, CyclicPoisson):
            policy = replace(policy, partitions=policy.partitions or b)
        return replace(self, plan=replace(self.plan, groups=groups, sampling=policy))

    def solved(self) -> PrivacyPlan:
        """The plan at the z that is given, or at the value that meets the target.

        Raises:
            ConfigError: no value meets it, or a value of a round is out of range.
        """
        if self.z is not None and self.calibrate == "noise_multiplier":
            plan = self.at(self.z)
            plan.ledger()  # refuses values of a round that are out of range
            return _checked(plan)
        assert self.aim is not None  # as Target.check requires
        start, lowest = 1.0, None
        if self.calibrate == "steps":
            start = self.plan.rounds
        elif self.calibrate.startswith("sampling_rate"):
            start, lowest = self.plan.sampling.q, 1 / self.plan.n
        solved = solve(
            self.calibrate, lambda value: self.with_value(value).ledger(), self.aim, self.accountant,
            start=start, lowest=lowest,
        )  # fmt: skip
        return _checked(replace(self.with_value(solved.value), calibration=solved))

    def with_value(self, value: float) -> PrivacyPlan:
        """The plan at a value of what is calibrated.

        CALIBRATABLE says what of the noise is held: σ̃_g = z S_g/√w_g on the sum, or σ_g = σ̃_g/(qn) on the average.
        """
        q, z = self.plan.sampling.q, self.z or 1.0
        match self.calibrate:
            case "noise_multiplier":
                return self.at(value)
            case "sampling_rate":  # each σ_g is held: z grows as q
                return self.at(z * value / q, q=value)
            case "sampling_rate_at_fixed_noise":
                return self.at(z, q=value)
            case "steps":
                return self.at(z, rounds=int(value))
            case _:  # clip_norm: each σ̃_g is held, so that z falls as S grows
                return self.at(z / value, scale=value)

    def at(self, z: float, q: float | None = None, rounds: int | None = None, scale: float = 1.0) -> PrivacyPlan:
        """The plan at a noise multiplier, sampling rate, number of rounds and scale of the clipping norms."""
        policy = self.plan.sampling
        if q is not None and q != policy.q:
            policy = at_q(policy, q)
        rounds = rounds or self.sampling.length(policy)
        groups = tuple(group.with_noise(z, 1.0 if group.is_metric else scale) for group in self.plan.groups)
        schedule = self.schedules.over(rounds)
        return replace(self.plan, sampling=policy, rounds=rounds, groups=groups, schedule=schedule)


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
