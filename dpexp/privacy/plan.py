"""The privacy plan: made before training, immutable, and the only thing that the callback executes."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import nn

from dpexp.accounting.calibration import KNOBS, Calibration, solve
from dpexp.accounting.claims import adjacencies, check_claim
from dpexp.accounting.ledger import ADJACENCIES, Ledger, Round, SamplingEvent, SumQueryEvent
from dpexp.errors import ConfigError
from dpexp.privacy.allocation import Allocation, Explicit, Proportional
from dpexp.privacy.bounds import Bound, Fixed, positive
from dpexp.privacy.groups import Grouping, Vector, flat, vectors
from dpexp.privacy.mechanisms import Mechanism, Separate
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling import Policy, make_policy
from dpexp.privacy.schedules import Factors, Schedule, schedule


@dataclass(frozen=True)
class Group:
    """A group of vectors with its mechanism's numbers.

    Attributes:
        alphas: α_j, one a vector; all 1 under separate clipping.
        S: bound on a record's scaled norm; σ̃: standard deviation of the noise on the scaled sum.
        share: w_g, the group's part of the budget.
    """

    name: str
    vectors: tuple[Vector, ...]
    alphas: tuple[float, ...]
    S: float
    sigma: float
    share: float

    @property
    def d(self) -> int:
        return sum(vector.d for vector in self.vectors)

    def query(self) -> SumQueryEvent:
        """The event that one release of this group writes."""
        return SumQueryEvent(self.name, self.S, self.sigma)


@dataclass(frozen=True)
class PrivacyPlan:
    """What is sampled, clipped and noised, for how many rounds.

    Attributes:
        sampling: the sampling policy that runs and is accounted.
        n: the published number of records, the constant of the denominator q·n; never counted from the data.
        rounds: T.
        adjacency: which data sets are neighbours: `add_remove`, `replace_one` or `replace_null` (one record).
        schedule: what z, q and S_g are multiplied by in each round; `sampling` and `groups` are before that.
        calibration: how a knob was solved for, if one was.
    """

    sampling: Policy
    n: int
    rounds: int
    groups: tuple[Group, ...]
    adjacency: str = "add_remove"
    schedule: Schedule = field(default_factory=Schedule)
    calibration: Calibration | None = None

    @property
    def noise_multiplier(self) -> float:
        """z = (Σ_g (S_g/σ̃_g)²)^(-1/2) (paper, section 4), before the schedule."""
        return 1 / math.sqrt(sum((group.S / group.sigma) ** 2 for group in self.groups))

    def at(self, t: int) -> "PrivacyPlan":
        """The plan of round t alone."""
        return self if self.schedule == Schedule() else _scaled(self, self.schedule.at(t))

    def ledger(self) -> Ledger:
        """What carrying out the whole plan would write."""
        per_epoch = self.sampling.rounds_per_epoch
        epochs = range(0, self.rounds, per_epoch) if isinstance(per_epoch, int) else ()
        rounds: Counter[Round] = Counter()
        for start, count in self.schedule.stretches(self.rounds, epochs):
            now = self.at(start)
            epoch = start - start % per_epoch if isinstance(per_epoch, int) else None
            rounds[Round(now.sampling.event(self.n, epoch), tuple(group.query() for group in now.groups))] += count
        return Ledger(self.adjacency, dict(rounds))

    def sampling_events(self) -> tuple[SamplingEvent, ...]:
        """Those that the rounds may report, but for their epochs."""
        starts = [start for start, _ in self.schedule.stretches(self.rounds)]
        return tuple(self.at(start).sampling.event(self.n, 0) for start in starts)


@lru_cache(maxsize=256)
def _scaled(plan: PrivacyPlan, by: Factors) -> PrivacyPlan:
    if by == Factors():
        return plan
    return replace(
        plan,
        sampling=plan.sampling if by.q == 1 else replace(plan.sampling, q=plan.sampling.q * by.q),
        groups=tuple(replace(group, S=group.S * by.S, sigma=group.sigma * by.S * by.z) for group in plan.groups),
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
    steps: int | None = None,
    epochs: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    adjacency: str | None = None,
    group: Grouping | None = None,
    vectors_by: str = "layer",
    bound: Bound | None = None,
    mechanism: Mechanism | None = None,
    allocation: Allocation | None = None,
    schedules: Mapping[str, Any] | None = None,
    accountant: str = "pld",
    calibrate: str = "noise",
) -> PrivacyPlan:
    """The plan for training `module`'s trainable parameters.

    Args:
        n: published number of training records.
        sampling: policy; `q`: sampling rate, or `expected_batch_size` = q·n; `maximum`: of truncated_poisson.
        steps: rounds T, or `epochs` E for T = ⌈E/q⌉.
        epsilon: target at `delta`, for which z is solved with `accountant`; or give `noise_multiplier` z.
        adjacency: default the first that the policy may claim.
        group: default one group; `bound`: default 1 each; `mechanism`: default separate;
            `allocation`: default proportional.
        schedules: of z, q and S; see `dpexp.privacy.schedules.schedule`.
        calibrate: the knob that is solved for the target: `noise`, or from the noise given (`noise_multiplier`, or
            `allocation=explicit`) `q`, `q_at_fixed_z`, `steps` or `bound` (see `dpexp.accounting.calibration`).

    Raises:
        ConfigError: a value out of range, contradictory choices, a claim that cannot be made, or a model whose
            layers mix records.
    """
    refuse_mixing_layers(module)
    if not (isinstance(n, int) and n >= 1):
        raise ConfigError(f"data.n={n} must be a whole number of at least 1.")
    _exactly_one("sampling", q=q, expected_batch_size=expected_batch_size)
    _exactly_one("sampling", steps=steps, epochs=epochs)
    rate = q if q is not None else _rate(positive("sampling.expected_batch_size", expected_batch_size or 0), n)
    policy = make_policy(sampling, rate, n, maximum)
    adjacency = adjacency or adjacencies(sampling)[0]
    _check_claim(sampling, adjacency)
    rounds = policy.rounds(epochs) if epochs is not None else steps
    if rounds is None or rounds < 1:
        raise ConfigError(f"sampling.steps={rounds} must be at least 1.")
    members = (group or flat())(module)
    if not members:
        raise ConfigError("model: it has no trainable parameter, so there is nothing to release.")
    grouped = {name: vectors(module, parameters, vectors_by) for name, parameters in members.items()}
    clipping = (mechanism or Separate())(grouped, bound or Fixed(1.0))
    w = (allocation or Proportional()).shares(grouped, clipping)
    _check_schedules(schedules or {}, sampling)

    def plan_at(z: float, q: float = rate, steps: int = rounds, scale: float = 1.0) -> PrivacyPlan:
        return PrivacyPlan(
            policy if q == rate else replace(policy, q=q),
            n,
            steps,
            tuple(
                Group(name, grouped[name], c.alphas, scale * c.S, z * scale * c.S / math.sqrt(w[name]), w[name])
                for name, c in clipping.items()
            ),
            adjacency,
            schedule(steps, **(schedules or {})),
        )

    z = _noise_given(allocation, clipping, epsilon, noise_multiplier, calibrate)
    if z is not None and calibrate == "noise":
        plan = plan_at(z)
        plan.ledger()  # every round's numbers make sense
        return plan
    if delta is None:
        raise ConfigError("privacy.delta must be given with privacy.epsilon.")
    check_claim(sampling, adjacency, accountant)
    z = z or 1.0
    if calibrate.startswith("q") and (schedules or {}).get("q") is not None:
        raise ConfigError(f"calibrate={calibrate} solves for q itself; set schedule.q=null.")
    if calibrate == "steps" and any(isinstance(kind, list) for kind in (schedules or {}).values()):
        raise ConfigError("calibrate=steps cannot stretch a schedule that lists every round; give linear or step.")
    if calibrate.startswith("q") and sampling not in ("poisson", "truncated_poisson"):
        raise ConfigError(f"calibrate={calibrate} needs a q that can take any value; choose sampling=poisson.")
    ways: dict[str, tuple[Callable[[float], PrivacyPlan], float]] = {
        "noise": (plan_at, 1.0),
        "q": (lambda q: plan_at(z * q / rate, q=q), rate),
        "q_at_fixed_z": (lambda q: plan_at(z, q=q), rate),
        "steps": (lambda steps: plan_at(z, steps=int(steps)), rounds),
        "bound": (lambda scale: plan_at(z / scale, scale=scale), 1.0),
    }
    at, start = ways[calibrate]
    solved = solve(
        calibrate, lambda value: at(value).ledger(), float(epsilon or 0), delta, accountant,
        start=start, lowest=1 / n if calibrate.startswith("q") else None,
    )  # fmt: skip
    return replace(at(solved.value), calibration=solved)


def _noise_given(
    allocation: Allocation | None,
    clipping: Mapping[str, Any],
    epsilon: float | None,
    noise_multiplier: float | None,
    calibrate: str,
) -> float | None:
    """z where the configuration gives it, and None where it is to be solved for."""
    if calibrate not in KNOBS:
        raise ConfigError(f"calibrate={calibrate} is unknown; choose one of {', '.join(KNOBS)}.")
    if isinstance(allocation, Explicit):
        if noise_multiplier is not None or (epsilon is not None and calibrate == "noise"):
            raise ConfigError(
                "allocation=explicit fixes the noise itself; set privacy.noise_multiplier=null, and "
                "privacy.epsilon=null unless another knob is calibrated."
            )
        return allocation.noise_multiplier(clipping)  # type: ignore[arg-type]
    if calibrate == "noise":
        _exactly_one("privacy", epsilon=epsilon, noise_multiplier=noise_multiplier)
    elif noise_multiplier is None or epsilon is None:
        raise ConfigError(
            f"calibrate={calibrate} solves for the target privacy.epsilon={epsilon} from the noise "
            f"privacy.noise_multiplier={noise_multiplier}; give both."
        )
    return None if noise_multiplier is None else positive("privacy.noise_multiplier", noise_multiplier)


def _check_claim(sampling: str, adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"privacy.adjacency={adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
    check_claim(sampling, adjacency)


def _check_schedules(schedules: Mapping[str, Any], sampling: str) -> None:
    unknown = sorted(set(schedules) - {"z", "q", "S"})
    if unknown:
        raise ConfigError(f"schedule.{unknown[0]} is unknown; known: z, q, S.")
    if schedules.get("q") is not None and sampling not in ("poisson", "truncated_poisson"):
        raise ConfigError(f"schedule.q={schedules['q']} needs sampling=poisson; {sampling}'s q cannot vary.")


def _rate(expected_batch_size: float, n: int) -> float:
    if expected_batch_size > n:
        raise ConfigError(
            f"sampling.expected_batch_size={expected_batch_size:g} exceeds data.n={n}, so q would exceed 1."
        )
    return expected_batch_size / n


def _exactly_one(section: str, **choices: float | None) -> None:
    given = [f"{section}.{key}={value}" for key, value in choices.items() if value is not None]
    if len(given) != 1:
        wanted = " or ".join(f"{section}.{key}" for key in choices)
        raise ConfigError(f"exactly one of {wanted} must be given; got {' and '.join(given) or 'neither'}.")
