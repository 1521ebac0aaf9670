"""What is asked of a plan before any model is looked at: sampling, target, noise, schedules. Imports nothing slow.

Each is a frozen dataclass with the names of the configuration's section, and checks its own values when it is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.accounting.coverage import adjacencies, check_advantage, check_covered, check_delta, check_tpr
from dpexp.accounting.ledger import ADJACENCIES
from dpexp.errors import ConfigError, exactly_one, positive, whole
from dpexp.privacy.plan.schedules import Schedule, schedule
from dpexp.privacy.sampling.policies import Policy, make_policy

NOISES = ("gaussian", "discrete_gaussian", "banded")
COEFFICIENTS = ("optimal", "sqrt")
AUTO = "auto"


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn, and for how many rounds.

    Args:
        policy: `poisson`, `truncated_poisson`, `fixed_size`, `shuffle`, `full_batch`, `cyclic_poisson`; or the dotted
            name of a `Policy` of your own.
        sampling_rate: q in (0, 1]; or `expected_batch_size` = q·n, in examples.
        max_batch_size: of truncated_poisson, in records.
        partitions: of cyclic_poisson; by default as many as the noise has bands.
        steps: rounds T; or `epochs` E, for T = ⌈E/q⌉.

    Raises:
        ConfigError: not exactly one of each pair is given.
    """

    policy: str = "poisson"
    sampling_rate: float | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    partitions: int | None = None
    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        exactly_one("sampling", sampling_rate=self.sampling_rate, expected_batch_size=self.expected_batch_size)
        exactly_one("sampling", steps=self.steps, epochs=self.epochs)

    def resolve(self, n: int, records: int | None = None) -> tuple[Policy, int]:
        """The policy and the number of rounds T.

        Args:
            n: published number of examples; records: of records, if they are not examples.

        Raises:
            ConfigError: a value is out of range.
        """
        whole("data.n", n)
        q = self.sampling_rate
        if q is None:
            size = positive("sampling.expected_batch_size", self.expected_batch_size)
            if size > n:
                raise ConfigError(f"sampling.expected_batch_size={size:g} exceeds data.n={n}, so q would exceed 1.")
            q = size / n
        records = records or n
        policy = make_policy(self.policy, q, records, self.max_batch_size, n / records, self.partitions)
        if self.epochs is not None:
            return policy, policy.rounds(self.epochs)
        return policy, whole("sampling.steps", self.steps)


@dataclass(frozen=True)
class Target:
    """What may be spent, for which noise is solved; or the noise itself. Give one of four.

    Args:
        epsilon: ε at `delta`, above 0.
        max_advantage: the largest TPR - FPR of a test for one record.
        max_tpr_at_fpr: the largest TPR at each FPR.
        noise_multiplier: z. With `calibrate` other than noise_multiplier it is given beside a target.
        accountant: by which the target is met.
    """

    epsilon: float | None = None
    delta: float | None = None
    max_advantage: float | None = None
    max_tpr_at_fpr: Mapping[float, float] | None = None
    noise_multiplier: float | None = None
    accountant: str = "pld"

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            positive("privacy.epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            positive("privacy.noise_multiplier", self.noise_multiplier)
        if self.delta is not None:
            check_delta(self.delta)
        if self.max_advantage is not None:
            check_advantage(self.max_advantage)
        if self.max_tpr_at_fpr is not None:
            check_tpr(self.max_tpr_at_fpr)
        if len(self.given) > 1:
            raise ConfigError(f"{' and '.join(self.given)} are {len(self.given)} targets; give one of them.")

    @property
    def given(self) -> list[str]:
        """The targets that are given, as they were asked for."""
        names = ("epsilon", "max_advantage", "max_tpr_at_fpr")
        return [f"privacy.{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]

    def check(self, calibrate: str, explicit: bool) -> None:
        """Raises ConfigError unless it determines the noise. `explicit`: the allocation gives every σ̃_g."""
        if calibrate not in CALIBRATABLE:
            raise ConfigError(f"calibrate={calibrate} is unknown; choose one of {', '.join(CALIBRATABLE)}.")
        if explicit:
            if self.noise_multiplier is not None or (self.given and calibrate == "noise_multiplier"):
                raise ConfigError(
                    "allocation=explicit fixes the noise itself; set privacy.noise_multiplier=null, and a target only "
                    "if something else is calibrated."
                )
        elif calibrate == "noise_multiplier":
            exactly_one(
                "privacy", epsilon=self.epsilon, noise_multiplier=self.noise_multiplier,
                max_advantage=self.max_advantage, max_tpr_at_fpr=self.max_tpr_at_fpr,
            )  # fmt: skip
        elif self.noise_multiplier is None or not self.given:
            asked = self.given[0] if self.given else "privacy.epsilon=None"
            raise ConfigError(
                f"calibrate={calibrate} solves for the target {asked} from the noise "
                f"privacy.noise_multiplier={self.noise_multiplier}; give both."
            )


@dataclass(frozen=True)
class Noise:
    """Which noise is added.

    Args:
        kind: `gaussian`; `discrete_gaussian` (see `dpexp.privacy.noise.discrete_gaussian`); or `banded`, which is
            correlated over rounds (see `dpexp.privacy.noise.correlated`) and takes what follows.
        bands: b, or `auto`, the default, for the power of two with the least predicted error.
        coefficients: `optimal`, the default, for the workload; or `sqrt`, its square root, cut off after b.
        momentum: β of the optimizer, in [0, 1).
    """

    kind: str = "gaussian"
    bands: int | str | None = None
    coefficients: str | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in NOISES:
            raise ConfigError(f"noise={self.kind} is unknown; choose {', '.join(NOISES[:-1])} or {NOISES[-1]}.")
        given = {"bands": self.bands, "coefficients": self.coefficients, "momentum": self.momentum}
        for key, value in given.items():
            if self.kind != "banded" and value is not None:
                raise ConfigError(f"noise.{key}={value} is of noise=banded alone, and noise={self.kind} is chosen.")
        if self.kind != "banded":
            return
        defaults = {"bands": AUTO, "coefficients": "optimal", "momentum": 0.0}
        for key, value in given.items():
            object.__setattr__(self, key, defaults[key] if value is None else value)
        if self.bands != AUTO:
            whole("noise.bands", self.bands, ", or auto")
        if self.coefficients not in COEFFICIENTS:
            raise ConfigError(f"noise.coefficients={self.coefficients} is unknown; known: {', '.join(COEFFICIENTS)}.")
        number = isinstance(self.momentum, int | float) and not isinstance(self.momentum, bool)
        if not (number and 0 <= self.momentum < 1):  # type: ignore[operator]
            raise ConfigError(f"noise.momentum={self.momentum} must lie in [0, 1).")

    def check(self, sampling: str, calibrate: str, has_target: bool, partitions: int | None = None) -> None:
        """Raises ConfigError: banded noise does not go with what else is asked for."""
        if self.kind != "banded":
            return
        if sampling != "cyclic_poisson" and self.bands != 1:
            raise ConfigError(
                f"noise=banded with noise.bands={self.bands} needs samples that keep a record's rounds apart, and "
                f"sampling={sampling} does not; choose sampling=cyclic_poisson."
            )
        if self.bands == AUTO and (calibrate != "noise_multiplier" or not has_target):
            raise ConfigError(
                "noise.bands=auto needs the noise that a target needs; give privacy.epsilon, max_advantage or "
                "max_tpr_at_fpr with calibrate=noise_multiplier, or a number of bands."
            )
        if partitions is not None and isinstance(self.bands, int) and self.bands > partitions:
            raise ConfigError(
                f"noise.bands={self.bands} must be at most sampling.partitions={partitions}, by which a record's "
                f"rounds "
                "are apart; without sampling.partitions there are as many partitions as bands."
            )


@dataclass(frozen=True)
class Schedules:
    """How z, q and S vary over the rounds: factors of what the plan says (see `dpexp.privacy.plan.schedules`).

    Args:
        z, q, S: null, a number, a list of T numbers, `{linear: [first, last]}` or `{step: {0: 1.0, 500: 0.5}}`.
    """

    z: Any = None
    q: Any = None
    S: Any = None

    def over(self, rounds: int) -> Schedule:
        """Raises ConfigError: a schedule is not understood."""
        return schedule(rounds, z=self.z, q=self.q, S=self.S)

    def check(self, sampling: str, calibrate: str) -> None:
        """Raises ConfigError: the schedules do not go with the sampling policy, or with what is solved for."""
        kinds = {"z": self.z, "q": self.q, "S": self.S}
        given = [f"schedule.{name}={kind}" for name, kind in kinds.items() if kind is not None]
        if given and sampling == "cyclic_poisson":
            raise ConfigError(f"{given[0]} cannot be had with sampling=cyclic_poisson; choose sampling=poisson.")
        varies = sampling in ("poisson", "truncated_poisson")
        if self.q is not None and not varies:
            raise ConfigError(f"schedule.q={self.q} needs sampling=poisson; {sampling}'s q cannot vary.")
        if calibrate.startswith("sampling_rate") and self.q is not None:
            raise ConfigError(f"calibrate={calibrate} solves for q itself; set schedule.q=null.")
        if calibrate == "steps" and any(isinstance(kind, list) for kind in kinds.values()):
            raise ConfigError("calibrate=steps cannot stretch a schedule that lists every round; give linear or step.")
        if calibrate.startswith("sampling_rate") and not varies:
            raise ConfigError(f"calibrate={calibrate} needs a q that can take any value; choose sampling=poisson.")

    def check_adaptive(self, calibrate: str, noise: Noise) -> None:
        """Raises ConfigError: clipping norms cannot adapt beside what else is asked for."""
        if self.S is not None:
            raise ConfigError(f"schedule.S={self.S} and clip_norm=adaptive both say how S varies; choose one.")
        if calibrate == "clip_norm":
            raise ConfigError(
                "calibrate=clip_norm solves for a clipping norm that clip_norm=adaptive would change; calibrate "
                "something else."
            )
        if noise.kind == "discrete_gaussian":
            raise ConfigError(
                "noise=discrete_gaussian needs clipping norms that stay; choose noise=gaussian, or another "
                "clip_norm than "
                "adaptive."
            )


def claimed(sampling: str, adjacency: str | None) -> str:
    """The adjacency, by default the first that is covered for the sampling policy."""
    adjacency = adjacency or adjacencies(sampling)[0]
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"privacy.adjacency={adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
    check_covered(sampling, adjacency)
    return adjacency
