"""The privacy plan: made before training, immutable, and the only thing that the callback executes."""

import math
from dataclasses import dataclass

from torch import nn

from dpexp.accounting.accountants import check_delta
from dpexp.accounting.calibration import solve_noise_multiplier
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent
from dpexp.errors import ConfigError
from dpexp.privacy.allocation import Allocation, Explicit, Proportional
from dpexp.privacy.bounds import Bound, Fixed, positive
from dpexp.privacy.groups import Grouping, Vector, flat, vectors
from dpexp.privacy.mechanisms import Mechanism, Separate
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling import Poisson


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
        adjacency: `add_remove` (of one record).
    """

    sampling: Poisson
    n: int
    rounds: int
    groups: tuple[Group, ...]
    adjacency: str = "add_remove"

    @property
    def noise_multiplier(self) -> float:
        """z = (Σ_g (S_g/σ̃_g)²)^(-1/2) (paper, section 4)."""
        return self.round().noise_multiplier

    def round(self) -> Round:
        return Round(self.sampling.event(self.n), tuple(group.query() for group in self.groups))

    def ledger(self) -> Ledger:
        """What carrying out the whole plan would write."""
        return Ledger(self.adjacency, {self.round(): self.rounds})


def make_plan(
    module: nn.Module,
    *,
    n: int,
    q: float | None = None,
    expected_batch_size: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    group: Grouping | None = None,
    vectors_by: str = "layer",
    bound: Bound | None = None,
    mechanism: Mechanism | None = None,
    allocation: Allocation | None = None,
    accountant: str = "pld",
) -> PrivacyPlan:
    """The plan for training `module`'s trainable parameters.

    Args:
        n: published number of training records.
        q: sampling rate, or `expected_batch_size` = q·n.
        steps: rounds T, or `epochs` E for T = ⌈E/q⌉.
        epsilon: target at `delta`, for which z is solved with `accountant`; or give `noise_multiplier` z.
        group: default one group; `bound`: default 1 each; `mechanism`: default separate;
            `allocation`: default proportional.

    Raises:
        ConfigError: a value out of range, contradictory choices, or a model whose layers mix records.
    """
    refuse_mixing_layers(module)
    if not (isinstance(n, int) and n >= 1):
        raise ConfigError(f"data.n={n} must be a whole number of at least 1.")
    _exactly_one("sampling", q=q, expected_batch_size=expected_batch_size)
    _exactly_one("sampling", steps=steps, epochs=epochs)
    sampling = Poisson(
        q if q is not None else _rate(positive("sampling.expected_batch_size", expected_batch_size or 0), n)
    )
    rounds = sampling.rounds(epochs) if epochs is not None else steps
    if rounds is None or rounds < 1:
        raise ConfigError(f"sampling.steps={rounds} must be at least 1.")
    members = (group or flat())(module)
    if not members:
        raise ConfigError("model: it has no trainable parameter, so there is nothing to release.")
    grouped = {name: vectors(module, parameters, vectors_by) for name, parameters in members.items()}
    clipping = (mechanism or Separate())(grouped, bound or Fixed(1.0))
    allocation = allocation or Proportional()
    shares = allocation.shares(grouped, clipping) if not isinstance(allocation, Explicit) else None

    def plan_at(z: float) -> PrivacyPlan:
        w = shares if shares is not None else allocation.shares(grouped, clipping)
        return PrivacyPlan(
            sampling,
            n,
            rounds,
            tuple(
                Group(name, grouped[name], c.alphas, c.S, z * c.S / math.sqrt(w[name]), w[name])
                for name, c in clipping.items()
            ),
        )

    if isinstance(allocation, Explicit):
        if epsilon is not None or noise_multiplier is not None:
            raise ConfigError(
                "allocation=explicit fixes the noise itself; set privacy.epsilon=null and "
                "privacy.noise_multiplier=null."
            )
        return plan_at(allocation.noise_multiplier(clipping))
    _exactly_one("privacy", epsilon=epsilon, noise_multiplier=noise_multiplier)
    if noise_multiplier is not None:
        return plan_at(positive("privacy.noise_multiplier", noise_multiplier))
    if delta is None:
        raise ConfigError("privacy.delta must be given with privacy.epsilon.")
    check_delta(delta)
    return plan_at(solve_noise_multiplier(lambda z: plan_at(z).ledger(), float(epsilon or 0), delta, accountant))


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
