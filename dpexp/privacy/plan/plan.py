"""The privacy plan: made before training, and all that training executes. It is not changed; an audit makes others."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from dpexp.accounting.calibration import Calibration
from dpexp.accounting.ledger import (
    Ledger,
    Part,
    Round,
    SumQueryEvent,
)
from dpexp.accounting.sampling import Policy, RandomAllocation, SamplingEvent, event_of
from dpexp.accounting.sampling.policy import at_q
from dpexp.privacy.plan.clipping import Abadi, ClipRule, describe
from dpexp.privacy.plan.groups import Vector
from dpexp.privacy.plan.schedules import Multipliers, Schedule
from dpexp.privacy.sampling.privacy_unit import Example

_SHOWN = 8  # groups, in a table


@dataclass(frozen=True)
class Group:
    """A group of vectors, with its clipping and noise.

    Examples:
        >>> from dpexp.privacy.plan.groups import Vector
        >>> from dpexp.privacy.plan.plan import Group
        >>> group = Group("fc", (Vector("fc", ("fc.weight", "fc.bias"), 10),), (1.0,), S=0.5, sigma=0.5, share=0.25)
        >>> group.with_noise(z=2.0).sigma
        2.0

    Attributes:
        name: of the group, as in the ledger.
        vectors: those that are clipped together.
        alphas: α_j of each vector; all 1 under separate clipping.
        S: clipping norm of a record's scaled vector.
        sigma: σ̃, the standard deviation of the noise on the scaled sum.
        share: w_g of the budget.
        every_n_rounds: it is released in the rounds whose number, from 1, is a multiple of this.
        clip_rule: the factor of a record's vector; a record adds at most S under any rule.
        bands: c, the noise's correlation over rounds: σ̃ y_t with C y = Z; (1,): it is independent.
    """

    name: str
    vectors: tuple[Vector, ...]
    alphas: tuple[float, ...]
    S: float
    sigma: float
    share: float
    every_n_rounds: int = 1
    clip_rule: ClipRule = field(default_factory=Abadi)
    bands: tuple[float, ...] = (1.0,)

    @property
    def is_metric(self) -> bool:
        """Whether it is released in addition to gradients."""
        return self.vectors[0].is_value

    @property
    def d(self) -> int:
        return sum(vector.d for vector in self.vectors)

    @cached_property
    def query(self) -> SumQueryEvent:
        """The event of one release of this group."""
        return SumQueryEvent(self.name, self.S, self.sigma, self.bands if len(self.bands) > 1 else None)

    def with_noise(self, z: float, scale: float = 1.0) -> "Group":
        """With S times `scale`, and with its part of the noise multiplier z.

        σ̃_g = z S_g/√w_g (arXiv 1812.06210, section 4).
        """
        S = self.S * scale
        return replace(self, S=S, sigma=z * S / math.sqrt(self.share))


@dataclass(frozen=True)
class AdaptiveMember:
    """A clipping norm that adapts.

    Attributes:
        group: the group whose S adapts, or to which the vector belongs.
        vector: the vector whose scale α adapts; None: S of the group does.
        target_quantile: γ.
        learning_rate: η.
    """

    group: str
    vector: str | None
    target_quantile: float
    learning_rate: float


@dataclass(frozen=True)
class AdaptiveTargets:
    """Which clipping norms of a plan adapt, and to what; in the order of the plan's groups and vectors."""

    members: tuple[AdaptiveMember, ...]

    @property
    def names(self) -> list[str]:
        """The members' names: the group's, or the vector's, after its group's if another group has such a vector."""
        short = [m.vector or m.group for m in self.members]
        return [
            name if short.count(name) == 1 else f"{m.group}/{name}" for name, m in zip(short, self.members, strict=True)
        ]


@dataclass(frozen=True)
class PrivacyPlan:
    """What is sampled, clipped and noised, and for how many rounds.

    Examples:
        >>> import dpexp, torch
        >>> sampling = dpexp.Poisson(sampling_rate=0.01, steps=200)
        >>> plan = dpexp.make_plan(
        ...     torch.nn.Linear(3, 1), n=10_000, sampling=sampling, target=dpexp.Target(epsilon=1.0, delta=1e-5)
        ... )
        >>> plan.rounds, plan.adjacency, len(plan.ledger())
        (200, 'add_remove', 200)
        >>> dpexp.epsilon(plan.ledger(), 1e-5) <= 1
        True

    Attributes:
        sampling: the sampling policy.
        n: published number of records, for the denominator q·n; never counted from the data.
        rounds: T.
        groups: the groups of gradients, then those of private metrics.
        adjacency: how neighbouring data sets differ in a record: `add_remove`, `replace_one` or `replace_null`.
        schedule: multipliers of z, q and S_g in each round; `sampling` and `groups` do not include them.
        adaptive: the targets of adaptive clipping norms, if any; `groups` has the norms of the first round.
        calibration: the value that was calibrated, if one was.
        before_training: the rounds of preprocessing, each one query over all records.
        privacy_unit: what a record is.
        delta: the δ at which ε is stated, if one was given.
        part: the only records of the data set that are used; None: all.
    """

    sampling: Policy
    n: int
    rounds: int
    groups: tuple[Group, ...]
    adjacency: str = "add_remove"
    schedule: Schedule = field(default_factory=Schedule)
    adaptive: AdaptiveTargets | None = None
    calibration: Calibration | None = None
    before_training: tuple[Round, ...] = ()
    privacy_unit: Example = field(default_factory=Example)
    delta: float | None = None
    part: Part | None = None

    def __repr__(self) -> str:
        """A short table, for notebooks."""
        plan = f"PrivacyPlan: {self.rounds} rounds of {self.sampling}, n = {self.n}, z = {self.noise_multiplier:.4g}"
        groups = [f"{group.name}: {group.d} numbers, S = {group.S:.4g}, σ̃ = {group.sigma:.4g}" for group in self.groups]
        return "\n  ".join([f"{plan}; groups: {len(groups)}", *groups[:_SHOWN]])

    @property
    def noise_multiplier(self) -> float:
        """z of a round that releases all groups, before the schedule.

        z = (Σ_g (S_g/σ̃_g)²)^(-1/2) (arXiv 1812.06210, section 4).
        """
        return 1 / math.sqrt(sum((group.S / group.sigma) ** 2 for group in self.groups))

    @property
    def gradient_norm(self) -> float:
        """A bound on the root mean square of the norm of a round's noisy average gradient.

        The square root of Σ_g (S_g max α_j)² + Σ_j d_j (α_j σ̃_g/(qn))². The default learning rate follows from it
        (`dpexp.training.classifier.noisy_learning_rate`).
        """
        square = 0.0
        for group in self.groups:
            if not group.is_metric:
                noise = group.sigma / (self.sampling.q * self.n)
                square += (group.S * max(group.alphas)) ** 2
                square += sum(v.d * (alpha * noise) ** 2 for v, alpha in zip(group.vectors, group.alphas, strict=True))
        return math.sqrt(square)

    @property
    def noise_ratio(self) -> float:
        """The norm of the noise of all T rounds over the largest that the sum of their clipped gradients can have.

        For one group z√d/(q n √T). A plan with a ratio above 1 is shown with a warning: little was learnt then.
        """
        clipped = sum((group.S * max(group.alphas)) ** 2 for group in self.groups if not group.is_metric)
        return math.sqrt(max(0.0, self.gradient_norm**2 / clipped - 1) / self.rounds)

    @property
    def bands(self) -> tuple[float, ...]:
        """c of the gradients' noise."""
        return max((group.bands for group in self.groups), key=len, default=(1.0,))

    @property
    def clip_rules(self) -> str:
        """Description of the clip rules other than Abadi's, with their groups if these differ; empty: none."""
        rules: dict[str, list[str]] = {}
        for group in self.groups:
            if not group.is_metric:
                rules.setdefault(describe(group.clip_rule), []).append(group.name)
        if len(rules) == 1:
            return "".join(rules).removeprefix(Abadi().name)
        return " and ".join(f"{rule} of {', '.join(names)}" for rule, names in rules.items())

    def at_round(self, t: int) -> "PrivacyPlan":
        """The plan of round t, from 0: of its sample, without schedule, and of the groups that it releases."""
        sampling = self.sampling.at_round(t, self.n)
        if self.schedule == Schedule() and not self._periods and sampling is self.sampling:
            return self
        due = tuple((t + 1) % group.every_n_rounds == 0 for group in self.groups)
        return _in_round(self, self.schedule.at_round(t), due, sampling)

    def ledger(self, since: int = 0) -> Ledger:
        """The ledger of the plan; if `since` is above 0, of its rounds of training from that number on."""
        per_epoch = self.sampling.rounds_per_epoch
        rounds = Counter(() if since else self.before_training)
        for start, count in self.schedule.segments(self.rounds, (*self._breaks, since)):
            if start < since:
                continue
            first_round = start - start % per_epoch if isinstance(per_epoch, int) else since  # of those drawn together
            for t, times in self._equal_rounds(start, count):
                now = self.at_round(t)
                event = event_of(now.sampling, self.n, first_round)
                rounds[Round(event, tuple(group.query for group in now.groups))] += times
        return Ledger(self.adjacency, dict(rounds), record=self.privacy_unit.to_header(), part=self.part)

    def resumed_at(self, completed: int, ledger: Ledger) -> int:
        """The round, counted from 0, at which a resumed training goes on.

        Under random allocation a resumed job cannot go on within an epoch: the ledger has charged the whole epoch, and
        the allocation of its records was not kept. So it begins the next epoch that is not charged yet, and never
        charges more than planned. For example, with 100 rounds in epochs of 20, a state after 30 rounds and a ledger
        of 45 rounds, in which three epochs are charged: it goes on at round 60. Other policies go on at round 30.

        Args:
            completed: rounds of the state; it may be older than the ledger.
            ledger: of the run so far.
        """
        events = (round_.sampling for round_ in ledger.rounds)
        charged = len({event.first for event in events if isinstance(event.policy, RandomAllocation)})
        return max(completed, min(charged * int(self.sampling.rounds_per_epoch), self.rounds))

    @cached_property
    def _breaks(self) -> tuple[int, ...]:
        """The first and the last rounds of epochs whose samples are drawn together; () if none are."""
        per_epoch = self.sampling.rounds_per_epoch
        starts = range(0, self.rounds, per_epoch) if isinstance(per_epoch, int) else ()
        return tuple(t for start in starts for t in (start, start + int(per_epoch) - 1))

    @cached_property
    def _periods(self) -> tuple[int, ...]:
        """The different `every_n_rounds` of groups that are not released in every round."""
        return tuple(sorted({group.every_n_rounds for group in self.groups} - {1}))

    def _equal_rounds(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Divides the `count` rounds from `start` on by the groups that they release.

        Yields the first round of each kind, and how many rounds there are of it.
        """
        if not self._periods:
            yield start, count
            return
        due = (np.arange(start, start + count)[:, None] + 1) % np.array(self._periods) == 0
        _, first, times = np.unique(due, axis=0, return_index=True, return_counts=True)
        yield from ((start + int(t), int(n)) for t, n in zip(first, times, strict=True))

    def sampling_events(self) -> tuple[SamplingEvent, ...]:
        """The different sampling events of the rounds, all as of the first epoch."""
        starts = [start for start, _ in self.schedule.segments(self.rounds, self._breaks)]
        return tuple(event_of(self.at_round(start).sampling, self.n, 0) for start in starts)


@lru_cache(maxsize=256)
def _in_round(plan: PrivacyPlan, by: Multipliers, due: tuple[bool, ...], sampling: Policy) -> PrivacyPlan:
    """The plan of one round, without a schedule.

    Args:
        plan: of all rounds.
        by: the round's multipliers. S of gradients alone is multiplied: a metric's S depends on what it measures.
        due: whether each group is released in the round.
        sampling: the round's policy, before its q is multiplied.
    """
    if by == Multipliers() and all(due) and sampling == plan.sampling:
        return plan
    released = [group for group, now in zip(plan.groups, due, strict=True) if now]
    scales = [1.0 if group.is_metric else by.S for group in released]
    return replace(
        plan,
        sampling=sampling if by.q == 1 else at_q(sampling, sampling.q * by.q),
        groups=tuple(  # each is released in this round, and the schedule is in the numbers
            replace(group, S=group.S * scale, sigma=group.sigma * scale * by.z, every_n_rounds=1)
            for group, scale in zip(released, scales, strict=True)
        ),
        schedule=Schedule(),
    )
