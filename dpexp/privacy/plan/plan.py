"""The privacy plan: made before training, immutable, and the only thing that the callback executes."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import nn

from dpexp.accounting.calibration import Calibration, solve
from dpexp.accounting.ledger import (
    DiscreteSumQueryEvent,
    Ledger,
    OneTimeQueryEvent,
    ParallelQueryEvent,
    Round,
    SamplingEvent,
    SumQueryEvent,
)
from dpexp.accounting.releases import check_covered
from dpexp.accounting.risk import Epsilon, MaxAdvantage, MaxTpr, Target
from dpexp.errors import ConfigError, positive
from dpexp.privacy.noise.correlated import candidates, coefficients, error, least
from dpexp.privacy.noise.discrete_gaussian import SIGMA2, Lattice, lattice
from dpexp.privacy.plan import options
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm, AdaptiveTargets
from dpexp.privacy.plan.allocation import AdaptiveMinVariance, Allocation, Explicit, Proportional
from dpexp.privacy.plan.clipping import (
    Abadi,
    ClipNorm,
    ClipRule,
    FixedClipNorm,
    GroupClipping,
    Mechanism,
    Separate,
    check_clip_rule,
    in_words,
)
from dpexp.privacy.plan.groups import Grouping, Vector, flat, trainable, vectors
from dpexp.privacy.plan.options import AUTO, Banded
from dpexp.privacy.plan.schedules import Multipliers, Schedule, schedule
from dpexp.privacy.preprocessing_methods import parts_of, queries
from dpexp.privacy.private_metrics import UNCLIPPED, MetricRelease, releases
from dpexp.privacy.sampling.policies import CyclicPoisson, Policy
from dpexp.privacy.sampling.privacy_unit import Example
from dpexp.privacy.unsupported import refuse_mixing_layers


@dataclass(frozen=True)
class Group:
    """A group of vectors with its mechanism's numbers.

    Attributes:
        alphas: α_j, one a vector; all 1 under separate clipping.
        S: bound on a record's scaled norm; σ̃: standard deviation of the noise on the scaled sum; share: w_g.
        exact: noise is a discrete Gaussian on whole numbers (`dpexp.privacy.noise.discrete_gaussian`).
        every: it is released in each round whose number, counted from 1, this divides.
        bands: c, by which its noise is correlated from round to round, σ̃ y_t with C y = Z; (1,): it is not.
        clip: how much of a record is added, by its norm; whatever it says, at most S.
    """

    name: str
    vectors: tuple[Vector, ...]
    alphas: tuple[float, ...]
    S: float
    sigma: float
    share: float
    discrete: bool = False
    every_n_rounds: int = 1
    clip_rule: ClipRule = field(default_factory=Abadi)
    bands: tuple[float, ...] = (1.0,)

    @property
    def is_metric(self) -> bool:
        """Not of gradients."""
        return self.vectors[0].is_value

    @property
    def d(self) -> int:
        return sum(vector.d for vector in self.vectors)

    @property
    def lattice(self) -> Lattice:
        """Of exact noise."""
        return lattice(self.S, self.sigma)

    def query(self) -> SumQueryEvent | DiscreteSumQueryEvent:
        """The event that one release of this group writes."""
        if self.discrete:
            return DiscreteSumQueryEvent(self.name, self.lattice.grid, self.lattice.S2, SIGMA2)
        return SumQueryEvent(self.name, self.S, self.sigma, self.bands if len(self.bands) > 1 else None)


@dataclass(frozen=True)
class PrivacyPlan:
    """What is sampled, clipped and noised, for how many rounds.

    Attributes:
        sampling: the sampling policy that runs and is accounted.
        n: the published number of records, the constant of the denominator q·n; never counted from the data.
        rounds: T.
        adjacency: which data sets are neighbours: `add_remove`, `replace_one` or `replace_null` (one record).
        schedule: what z, q and S_g are multiplied by in each round; `sampling` and `groups` are before that.
        following: what the bounds follow, if they are adaptive; `groups` has those of the first round.
        calibration: how a knob was solved for, if one was.
        preparations: what is released of all records before the first round.
        record: whose data a record is.
    """

    sampling: Policy
    n: int
    rounds: int
    groups: tuple[Group, ...]
    adjacency: str = "add_remove"
    schedule: Schedule = field(default_factory=Schedule)
    adaptive: AdaptiveTargets | None = None
    calibration: Calibration | None = None
    preprocessing: tuple[OneTimeQueryEvent | ParallelQueryEvent, ...] = ()
    privacy_unit: Example = field(default_factory=Example)

    @property
    def noise_multiplier(self) -> float:
        """z = (Σ_g (S_g/σ̃_g)²)^(-1/2) (paper, section 4), before the schedule, of a round that releases all groups."""
        return 1 / math.sqrt(sum((group.S / group.sigma) ** 2 for group in self.groups))

    @property
    def bands(self) -> tuple[float, ...]:
        """c of the noise of gradients."""
        return max((group.bands for group in self.groups), key=len)

    @property
    def discrete(self) -> bool:
        return any(group.discrete for group in self.groups)

    @property
    def clip_rules(self) -> str:
        """The clip rules other than Abadi's, in words; empty if there are none."""
        return " and ".join(
            dict.fromkeys(in_words(group.clip_rule) for group in self.groups if group.clip_rule != Abadi())
        )

    def at_round(self, t: int) -> "PrivacyPlan":
        """The plan of round t alone."""
        if self.schedule == Schedule() and not self._pauses:
            return self
        return _in_round(
            self, self.schedule.at_round(t), tuple((t + 1) % group.every_n_rounds == 0 for group in self.groups)
        )

    def ledger(self, since: int = 0) -> Ledger:
        """What carrying out the whole plan would write, or its rounds from number `since` on, before the first of which
        are the preparations."""
        per_epoch = self.sampling.rounds_per_epoch
        epochs = range(0, self.rounds, per_epoch) if isinstance(per_epoch, int) else ()
        rounds: Counter[Round] = Counter()
        for event in () if since else self.preprocessing:
            rounds[Round(SamplingEvent("all", 1.0, self.n), (event,))] += 1
        for start, count in self.schedule.segments(self.rounds, (*epochs, since)):
            if start < since:
                continue
            epoch = start - start % per_epoch if isinstance(per_epoch, int) else since
            for t, times in self._alike(start, count):
                now = self.at_round(t)
                rounds[Round(now.sampling.event(self.n, epoch), tuple(group.query() for group in now.groups))] += times
        return Ledger(self.adjacency, dict(rounds), record=self.privacy_unit.to_header())

    @property
    def _pauses(self) -> tuple[int, ...]:
        return tuple(sorted({group.every_n_rounds for group in self.groups} - {1}))

    def _alike(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """(a round, how many like it) for each choice of groups that is released in some of `count` rounds."""
        if not self._pauses:
            yield start, count
            return
        due = (np.arange(start, start + count)[:, None] + 1) % np.array(self._pauses) == 0
        _, first, times = np.unique(due, axis=0, return_index=True, return_counts=True)
        yield from ((start + int(t), int(n)) for t, n in zip(first, times, strict=True))

    def sampling_events(self) -> tuple[SamplingEvent, ...]:
        """Those that the rounds may report, but for their epochs."""
        starts = [start for start, _ in self.schedule.segments(self.rounds)]
        return tuple(self.at_round(start).sampling.event(self.n, 0) for start in starts)


@lru_cache(maxsize=256)
def _in_round(plan: PrivacyPlan, by: Multipliers, due: tuple[bool, ...]) -> PrivacyPlan:
    """S of gradients alone is scaled: that of a metric belongs to what it measures."""
    if by == Multipliers() and all(due):
        return plan
    released = [group for group, now in zip(plan.groups, due, strict=True) if now]
    scales = [1.0 if group.is_metric else by.S for group in released]
    return replace(
        plan,
        sampling=plan.sampling if by.q == 1 else replace(plan.sampling, q=plan.sampling.q * by.q),
        groups=tuple(
            replace(group, S=group.S * scale, sigma=group.sigma * scale * by.z, every_n_rounds=1)
            for group, scale in zip(released, scales, strict=True)
        ),
        schedule=Schedule(),
    )


def make_plan(
    module: nn.Module,
    *,
    n: int,
    sampling: str = "poisson",
    q: float | None = None,
    expected_batch_size: float | None = None,
    maximum: int | None = None,
    parts: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    epsilon: float | None = None,
    advantage: float | None = None,
    tpr: Mapping[float, float] | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    adjacency: str | None = None,
    group: Grouping | None = None,
    vectors_by: str = "layer",
    bound: ClipNorm | None = None,
    mechanism: Mechanism | None = None,
    clip: ClipRule | None = None,
    allocation: Allocation | None = None,
    schedules: Mapping[str, Any] | None = None,
    accountant: str = "pld",
    calibrate: str = "noise",
    noise: str | Banded = "gaussian",
    release: Mapping[str, Any] | None = None,
    record: Example | None = None,
    users: int | None = None,
) -> PrivacyPlan:
    """The plan for training `module`'s trainable parameters.

    Args:
        n: published number of training examples.
        sampling: policy; `q`: sampling rate, or `expected_batch_size` = q·n, of examples; `maximum`: of
            truncated_poisson, of records; `parts`: of cyclic_poisson, by default as many as noise has bands.
        steps: rounds T, or `epochs` E for T = ⌈E/q⌉.
        epsilon: target at `delta`, for which z is solved with `accountant`; or give another target: `advantage`, the
            largest TPR - FPR of a test for one record, or `tpr`, the largest TPR at each FPR; or `noise_multiplier` z.
        adjacency: default the first that the policy may claim.
        group: default one group; `bound`: default 1 each; `mechanism`: default separate; `clip`: default
            Abadi's; `allocation`: default proportional.
        schedules: of z, q and S; see `dpexp.privacy.plan.schedules.schedule`.
        calibrate: the knob that is solved for the target: `noise`, or from the noise given (`noise_multiplier`, or
            `allocation=explicit`) `q`, `q_at_fixed_z`, `steps` or `bound` (see `dpexp.accounting.calibration`).
        noise: `gaussian`, `exact` (see `dpexp.privacy.noise.discrete_gaussian`), or a `Banded` (`banded`: by its
            defaults), correlated.
        release: values of records that are released besides gradients (see `dpexp.privacy.private_metrics.releases`).
        record: default an example (see `dpexp.privacy.sampling.privacy_unit`); `users`: published number of users, if
            it is a user.

    Raises:
        ConfigError: a value out of range, contradictory choices, a claim that cannot be made, or a model whose
            layers mix records.
    """
    refuse_mixing_layers(module)
    record, bound, mechanism = record or Example(), bound or FixedClipNorm(1.0), mechanism or Separate()
    allocation = allocation or Proportional()
    records = record.num_records(n, users)
    policy, rounds = options.sampled(n, sampling, q, expected_batch_size, maximum, steps, epochs, records, parts)
    rate, n = policy.q, records
    adjacency = options.claimed(sampling, adjacency)
    exact = options.check_kind(noise) == "exact"
    banded = Banded() if noise == "banded" else noise if isinstance(noise, Banded) else None
    options.check_noise(epsilon, noise_multiplier, delta, calibrate, isinstance(allocation, Explicit), advantage, tpr)
    options.check_schedules(schedules or {}, sampling, calibrate)
    target = _target(epsilon, delta, advantage, tpr)
    if banded:
        options.check_banded(banded, sampling, calibrate, target is not None, parts)
    if not trainable(module):
        raise ConfigError(
            "model: it has no trainable parameter (all are frozen, or have no element), so there is nothing to release."
        )
    members = (group or flat())(module)
    grouped = {name: vectors(module, parameters, vectors_by) for name, parameters in members.items()}
    clipping = mechanism(grouped, bound)
    w = allocation.shares(grouped, clipping)
    values, following = _besides(grouped, release or {}, bound, mechanism, allocation)
    left = 1 - sum(value.budget_share for value in values.values())
    if left <= 0:
        raise ConfigError(f"metrics.release and bound.share leave {left:.6g} of the budget to gradients; ask for less.")
    if following is not None:
        options.check_adaptive(schedules or {}, calibrate, noise)
    rule = Abadi() if clip is None else clip
    check_clip_rule(rule)

    preparations = queries(module, adjacency, target.mu if target else None)
    prepared = preparations[0].query if preparations else None
    if prepared and record != Example():
        raise ConfigError(f"prepare={prepared} bounds what an example gives, not a {record}; choose record=example.")
    if prepared and exact:
        raise ConfigError(f"noise=exact cannot be had for prepare={prepared}, in float64; choose noise=gaussian.")

    def with_bands(b: int) -> PrivacyPlan:
        c = coefficients(banded, b, rounds) if banded else (1.0,)
        sampled_by = replace(policy, partitions=parts or b) if isinstance(policy, CyclicPoisson) else policy

        def plan_at(z: float, q: float = rate, steps: int = rounds, scale: float = 1.0) -> PrivacyPlan:
            gradients = {
                name: MetricRelease(grouped[name], GroupClipping(own.scales, scale * own.clip_norm), left * w[name])
                for name, own in clipping.items()
            }
            groups = []
            for name, one in (gradients | values).items():
                own, ruled = one.clipping, (rule, c) if name in gradients else ()
                sigma = z * own.clip_norm / math.sqrt(one.budget_share)
                groups.append(
                    Group(
                        name,
                        one.vectors,
                        own.scales,
                        own.clip_norm,
                        sigma,
                        one.budget_share,
                        exact,
                        one.every_n_rounds,
                        *ruled,
                    )
                )
            by_q = sampled_by if q == rate else replace(sampled_by, q=q)
            varied = schedule(steps, **(schedules or {}))
            return PrivacyPlan(
                by_q,
                n,
                steps,
                tuple(groups),
                adjacency,
                varied,
                following,
                preprocessing=preparations,
                privacy_unit=record,
            )

        z = noise_multiplier
        if isinstance(allocation, Explicit):  # of gradients
            z = allocation.noise_multiplier(clipping) * math.sqrt(left)
        if z is not None and calibrate == "noise":
            plan = plan_at(z)
            plan.ledger()  # every round's numbers make sense
            return _checked(plan)
        assert target is not None  # as `check_noise` has it
        check_covered(sampling, adjacency, accountant)
        z = z or 1.0
        ways: dict[str, tuple[Callable[[float], PrivacyPlan], float]] = {
            "noise": (plan_at, 1.0),
            "q": (lambda q: plan_at(z * q / rate, q=q), rate),
            "q_at_fixed_z": (lambda q: plan_at(z, q=q), rate),
            "steps": (lambda steps: plan_at(z, steps=int(steps)), rounds),
            "bound": (lambda scale: plan_at(z / scale, scale=scale), 1.0),
        }
        at, start = ways[calibrate]
        solved = solve(
            calibrate, lambda value: at(value).ledger(), target, accountant,
            start=start, lowest=1 / n if calibrate.startswith("q") else None,
        )  # fmt: skip
        return _checked(replace(at(solved.value), calibration=solved))

    if not banded or banded.bands != AUTO:
        return with_bands(int(banded.bands) if banded else parts or 1)
    made = (with_bands(b) for b in candidates(rate, rounds, parts))
    return least((plan.noise_multiplier * error(plan.bands, rounds, banded.momentum), plan) for plan in made)


def _target(
    epsilon: float | None, delta: float | None, advantage: float | None, tpr: Mapping[float, float] | None
) -> Target | None:
    if tpr is not None:
        return MaxTpr(tpr)
    if advantage is not None:
        return MaxAdvantage(float(advantage))
    if epsilon is None:
        return None
    if delta is None:
        raise ConfigError("privacy.delta must be given with privacy.epsilon.")
    return Epsilon(float(epsilon), delta)


def _besides(
    grouped: Mapping[str, tuple[Vector, ...]],
    release: Mapping[str, Any],
    bound: ClipNorm,
    mechanism: Mechanism,
    allocation: Allocation,
) -> tuple[dict[str, MetricRelease], AdaptiveTargets | None]:
    """What is released besides groups of gradients, by name, and what adaptive bounds follow by it."""
    values = releases(release)
    both = sorted(set(values) & set(grouped))
    if both:
        raise ConfigError(f"metrics.release: {both[0]} is the name of a group of gradients too; rename one of them.")
    if UNCLIPPED in {*values, *grouped, *(vector.name for value in values.values() for vector in value.vectors)}:
        raise ConfigError(f"{UNCLIPPED} is what bound=adaptive counts under; rename what else is called so.")
    if isinstance(bound, AdaptiveClipNorm):
        following = bound.targets(grouped, mechanism, allocation)
        return values | {UNCLIPPED: following.counts(positive("bound.share", bound.budget_share))}, following
    if isinstance(allocation, AdaptiveMinVariance):
        raise ConfigError("allocation=measured goes by bounds that are measured; choose bound=adaptive.")
    return values, None


def _checked(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan, if float32 keeps the digits of its bounds, and exact noise can be had for every group and round."""
    scheduled = [factor for _, factor in plan.schedule.S]
    bounds = [
        (f"group {g.name}: the bound S", g.S * by) for g in plan.groups for by in (min(scheduled), max(scheduled))
    ]
    bounds += [(f"group {group.name}: the bound α", alpha) for group in plan.groups for alpha in group.alphas]
    bounds += [(f"prepare.{one.query}: the bound S", part.S) for one in plan.preprocessing for part in parts_of(one)]
    for told, number in bounds:
        if not 1e-20 <= number <= 1e20:
            raise ConfigError(f"{told}={number:g} must lie between 1e-20 and 1e20.")
    if plan.discrete:
        for start, _ in plan.schedule.segments(plan.rounds):
            for group in plan.at_round(start).groups:
                group.lattice.check(group.name, group.d, plan.n)
    return plan
