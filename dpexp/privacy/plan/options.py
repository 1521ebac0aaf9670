"""The options of a plan that need no model, besides the sampling policy: target, noise and schedules.

Each is a dataclass with the names of a configuration's section. It checks its own values when it is made; its `check`
methods compare it with the other options. Imports nothing slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.accounting.coverage import check_delta, yaml_name
from dpexp.accounting.sampling import CyclicPoisson, Policy
from dpexp.errors import COUNT, ConfigError, Positive, Range, between, checks_arguments, exactly_one, is_count, one_of
from dpexp.privacy.plan.schedules import Schedule, segments

AUTO = "auto"
ADVANTAGE = between(0, 1, "()", ": it is the largest TPR - FPR of a test for one record, which is 0 for guessing")
BANDS = Range(f"{COUNT.wanted}, or auto", lambda bands: bands == AUTO or is_count(bands))


@checks_arguments
@dataclass(frozen=True)
class Target:
    """The privacy target, for which the noise is calibrated; or the noise multiplier itself. Give one of four.

    Examples:
        >>> from dpexp import Target
        >>> Target(epsilon=3.0, delta=1e-5).given
        ['privacy.epsilon=3.0']
        >>> Target(noise_multiplier=1.1).given
        []

    Args:
        epsilon: ε at `delta`, above 0.
        max_advantage: the largest TPR - FPR of a membership test for one record.
        max_tpr_at_fpr: the largest TPR at each FPR.
        noise_multiplier: z. If `calibrate` is not noise_multiplier, it is given in addition to a target.
        accountant: the accountant that the target is calibrated with.

    Raises:
        ConfigError: a value is out of range, or several targets are given.
    """

    epsilon: Positive | None = None
    delta: float | None = None
    max_advantage: Annotated[float, ADVANTAGE] | None = None
    max_tpr_at_fpr: Mapping[float, float] | None = None
    noise_multiplier: Positive | None = None
    accountant: str = "pld"

    def __post_init__(self) -> None:
        if self.delta is not None:
            check_delta(self.delta)
        if self.max_tpr_at_fpr is not None:
            _check_tpr(self.max_tpr_at_fpr)
        if len(self.given) > 1:
            raise ConfigError(f"{' and '.join(self.given)} are {len(self.given)} targets; give one of them.")

    @property
    def given(self) -> list[str]:
        """The targets that are given, as `key=value`."""
        names = ("epsilon", "max_advantage", "max_tpr_at_fpr")
        return [f"privacy.{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]

    def check(self, calibrate: str, explicit: bool) -> None:
        """Raises ConfigError unless it determines the noise. `explicit`: the allocation fixes every σ̃_g."""
        if calibrate not in CALIBRATABLE:
            raise ConfigError(f"calibrate={calibrate} is unknown; choose one of {', '.join(CALIBRATABLE)}.")
        if explicit:
            if self.noise_multiplier is not None or (self.given and calibrate == "noise_multiplier"):
                raise ConfigError(
                    "allocation=explicit fixes the noise itself; set privacy.noise_multiplier=null, and a target only "
                    "if something else is calibrated."
                )
            if not self.given and calibrate != "noise_multiplier":
                raise ConfigError(
                    f"calibrate={calibrate} solves for a target, and none is given; give privacy.epsilon."
                )
        elif calibrate == "noise_multiplier":
            exactly_one(
                "privacy", epsilon=self.epsilon, noise_multiplier=self.noise_multiplier,
                max_advantage=self.max_advantage, max_tpr_at_fpr=self.max_tpr_at_fpr,
            )  # fmt: skip
        elif self.noise_multiplier is None or not self.given:
            target = self.given[0] if self.given else "privacy.epsilon=None"
            raise ConfigError(
                f"calibrate={calibrate} solves for the target {target} from the noise "
                f"privacy.noise_multiplier={self.noise_multiplier}; give both."
            )


def _check_tpr(rates: Mapping[float, float]) -> None:
    """Refuses a target that is not {FPR: largest TPR} with 0 < FPR < TPR < 1."""
    key = "privacy.max_tpr_at_fpr"
    if not isinstance(rates, Mapping) or not rates:
        raise ConfigError(f"{key}={rates} must be {{FPR: largest TPR}}, such as {{0.01: 0.05}}.")
    for fpr, tpr in rates.items():
        if not all(isinstance(rate, float | int) for rate in (fpr, tpr)):
            raise ConfigError(f"{key}={rates} must hold numbers, {{FPR: largest TPR}}, such as {{0.01: 0.05}}.")
        if not 0 < fpr < tpr < 1:
            raise ConfigError(
                f"{key}={{{fpr:g}: {tpr:g}}} must be {{FPR: largest TPR}} with 0 < FPR < TPR < 1, such as "
                "{0.01: 0.05}: guessing has a TPR equal to its FPR."
            )


@checks_arguments
@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise, independent in each round.

    Examples:
        >>> from dpexp import Gaussian
        >>> Gaussian().bands
        1
    """

    bands = 1

    def check(self, policy: Policy, calibrate: str, has_target: bool) -> None:
        """Raises ConfigError: the noise does not go with the other options."""


@checks_arguments
@dataclass(frozen=True)
class Banded(Gaussian):
    """Gaussian noise that is correlated over rounds (see `dpexp.privacy.noise.correlated`).

    Examples:
        >>> from dpexp import Banded
        >>> Banded(bands=8, momentum=0.9)
        Banded(bands=8, coefficients='optimal', momentum=0.9)

    Args:
        bands: b, or `auto`, the default, for the power of two with the least predicted error.
        coefficients: `optimal`, the default, for the workload; or `sqrt`, its square root, cut off after b.
        momentum: β of the optimizer, in [0, 1).

    Raises:
        ConfigError: a value is out of range.
    """

    bands: Annotated[Any, BANDS] = AUTO
    coefficients: Annotated[str, one_of("optimal", "sqrt")] = "optimal"
    momentum: Annotated[float, between(0, 1, "[)")] = 0.0

    def check(self, policy: Policy, calibrate: str, has_target: bool) -> None:
        """Raises ConfigError: the noise does not go with the other options."""
        if not isinstance(policy, CyclicPoisson) and self.bands != 1:
            raise ConfigError(
                f"noise=banded with noise.bands={self.bands} needs samples that keep the rounds of a record apart, and "
                f"sampling={yaml_name(policy.name)} does not; choose sampling=cyclic_poisson."
            )
        if self.bands == AUTO and (calibrate != "noise_multiplier" or not has_target):
            raise ConfigError(
                "noise.bands=auto compares the noise that a target needs; give privacy.epsilon, max_advantage or "
                "max_tpr_at_fpr with calibrate=noise_multiplier, or a number of bands."
            )
        partitions = policy.partitions if isinstance(policy, CyclicPoisson) else None
        if partitions is not None and self.bands != AUTO and self.bands > partitions:
            raise ConfigError(
                f"noise.bands={self.bands} must be at most sampling.partitions={partitions}, the distance between the "
                "rounds of a record; without sampling.partitions there are as many partitions as bands."
            )


@checks_arguments
@dataclass
class Schedules:
    """How z, q and S vary over the rounds: multipliers of the plan's values (see `dpexp.privacy.plan.schedules`).

    Examples:
        >>> from dpexp import Schedules
        >>> Schedules(z={"step": {0: 2.0, 500: 1.0}}).over(rounds=1000).at_round(499).z
        2.0

    Args:
        z: null, a number, a list of T numbers, `{linear: [first, last]}` or `{step: {0: 1.0, 500: 0.5}}`.
        q: as z.
        S: as z.

    Raises:
        ConfigError: anything else, or a multiplier that is not a finite number above 0.
    """

    z: Any = None
    q: Any = None
    S: Any = None

    def __post_init__(self) -> None:
        for name, spec in vars(self).items():
            segments(f"schedule.{name}", spec, len(spec) if isinstance(spec, list | tuple) else 1)

    def over(self, rounds: int) -> Schedule:
        """The schedule of so many rounds; raises ConfigError if a list does not have one number for each."""
        return Schedule(**{name: segments(f"schedule.{name}", spec, rounds) for name, spec in vars(self).items()})

    def check(self, sampling: Policy, calibrate: str) -> None:
        """Raises ConfigError: the schedules do not go with the sampling policy, or with what is calibrated."""
        policy = yaml_name(sampling.name)
        given = [f"schedule.{name}={spec}" for name, spec in vars(self).items() if spec is not None]
        if given and not sampling.has_schedules:
            raise ConfigError(f"{given[0]} is not supported with sampling={policy}; choose sampling=poisson.")
        if self.q is not None and not sampling.rate_can_vary:
            raise ConfigError(f"schedule.q={self.q} needs sampling=poisson; {policy}'s q cannot vary.")
        solves_rate = calibrate.startswith("sampling_rate")
        if solves_rate and self.q is not None:
            raise ConfigError(f"calibrate={calibrate} solves for q itself; set schedule.q=null.")
        solves_rounds = calibrate == "steps" or (solves_rate and sampling.steps is None)
        if solves_rounds and any(isinstance(spec, list) for spec in vars(self).values()):
            raise ConfigError(
                f"calibrate={calibrate} cannot stretch a schedule that lists rounds; give linear or step."
            )
        if solves_rate and not sampling.rate_can_vary:
            raise ConfigError(f"calibrate={calibrate} needs a q that can take any value; choose sampling=poisson.")

    def check_adaptive(self, calibrate: str) -> None:
        """Raises ConfigError: adaptive clipping norms do not go with the other options."""
        if self.S is not None:
            raise ConfigError(f"schedule.S={self.S} and adaptive clipping norms both say how S varies; choose one.")
        if calibrate == "clip_norm":
            raise ConfigError("calibrate=clip_norm solves for a clipping norm that adapts; calibrate something else.")


def Sampling(policy: str = "poisson", **options: Any) -> NoReturn:
    """What 0.1 called sampling of any kind; each policy has a class of its own now."""
    _say_new_call("Sampling", policy.title().replace("_", ""), options)


def Noise(kind: str = "gaussian", **options: Any) -> NoReturn:
    """What 0.1 called noise of any kind; each has a class of its own now."""
    _say_new_call("Noise", kind.title(), options)


def _say_new_call(old: str, new: str, options: Mapping[str, Any]) -> NoReturn:
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    raise ConfigError(
        f"{old}({given}) is {new}({given}) now, from dpexp import {new}; docs/upgrade.md says what changed."
    )
