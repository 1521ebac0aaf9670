"""What is asked of a plan before any model is looked at: samples, rounds, claim, noise. Imports nothing slow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.accounting.ledger import ADJACENCIES
from dpexp.accounting.releases import adjacencies, check_advantage, check_covered, check_delta, check_tpr
from dpexp.errors import ConfigError, exactly_one, positive, whole
from dpexp.privacy.sampling.policies import Policy, make_policy

COEFFICIENTS = ("optimal", "sqrt")
AUTO = "auto"


@dataclass(frozen=True)
class Banded:
    """Correlated noise.

    Args:
        bands: b, or `auto` for the power of two with the least predicted error (see `dpexp.privacy.noise.correlated`).
        coefficients: `optimal` for the workload, or `sqrt`, its square root, cut off after b.
        momentum: β of the optimizer.
    """

    bands: int | str = AUTO
    coefficients: str = "optimal"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.bands != AUTO:
            whole("noise.bands", self.bands, ", or auto")
        if self.coefficients not in COEFFICIENTS:
            raise ConfigError(f"noise.coefficients={self.coefficients} is unknown; known: {', '.join(COEFFICIENTS)}.")
        number = isinstance(self.momentum, int | float) and not isinstance(self.momentum, bool)
        if not (number and 0 <= self.momentum < 1):
            raise ConfigError(f"noise.momentum={self.momentum} must lie in [0, 1).")


NOISES = ("gaussian", "exact", "banded")


def sampled(
    n: int,
    sampling: str,
    q: float | None,
    expected_batch_size: float | None,
    maximum: int | None,
    steps: int | None,
    epochs: float | None,
    records: int | None = None,
    parts: int | None = None,
) -> tuple[Policy, int]:
    """The sampling policy and the number of rounds T; arguments as of `make_plan`; `records`: as many as n examples."""
    whole("data.n", n)
    exactly_one("sampling", q=q, expected_batch_size=expected_batch_size)
    exactly_one("sampling", steps=steps, epochs=epochs)
    if q is None:
        q = positive("sampling.expected_batch_size", expected_batch_size) / n
        if q > 1:
            raise ConfigError(
                f"sampling.expected_batch_size={expected_batch_size:g} exceeds data.n={n}, so q would exceed 1."
            )
    policy = make_policy(sampling, q, records or n, maximum, n / (records or n), parts)
    return policy, whole("sampling.steps", steps) if epochs is None else policy.rounds(epochs)


def claimed(sampling: str, adjacency: str | None) -> str:
    """The adjacency, by default the first that the policy may claim."""
    adjacency = adjacency or adjacencies(sampling)[0]
    if adjacency not in ADJACENCIES:
        raise ConfigError(f"privacy.adjacency={adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
    check_covered(sampling, adjacency)
    return adjacency


def check_norms(norms: str) -> None:
    """Raises ConfigError: they are not to be exact. (Exact ones are too large, if anything, in floating point.)"""
    if norms == "jl":  # a record may contribute S/ψ, ψ² being χ²_r/r
        raise ConfigError(
            "norms=jl cannot be accounted for: norms estimated by r random projections may be too small, and the "
            "ledger has no event for that; leave norms=exact (benchmarks/jl.py compares them)."
        )
    if norms != "exact":
        raise ConfigError(f"norms={norms} is unknown; known: exact.")


def check_kind(noise: str | Banded) -> str:
    """The kind of noise."""
    kind = "banded" if isinstance(noise, Banded) else noise
    if kind not in NOISES:
        raise ConfigError(f"noise={kind} is unknown; choose {', '.join(NOISES[:-1])} or {NOISES[-1]}.")
    return kind


def check_banded(noise: Banded, sampling: str, calibrate: str, aimed: bool, parts: int | None = None) -> None:
    """Whether such noise can be had beside what else was asked. `aimed`: there is a target."""
    if sampling != "cyclic_poisson" and noise.bands != 1:
        raise ConfigError(
            f"noise=banded with noise.bands={noise.bands} needs samples that keep a record's rounds apart, and "
            f"sampling={sampling} does not; choose sampling=cyclic_poisson."
        )
    if noise.bands == AUTO and (calibrate != "noise" or not aimed):
        raise ConfigError(
            "noise.bands=auto goes by the noise that a target needs; give privacy.epsilon, advantage or tpr with "
            "calibrate=noise, or a number of bands."
        )
    if parts is not None and isinstance(noise.bands, int) and noise.bands > parts:
        raise ConfigError(
            f"noise.bands={noise.bands} must be at most sampling.parts={parts}, by which a record's rounds are apart; "
            "without sampling.parts there are as many parts as bands."
        )


def check_noise(
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float | None,
    calibrate: str,
    explicit: bool,
    advantage: float | None = None,
    tpr: Mapping[float, float] | None = None,
) -> None:
    """Whether there is one noise to be had. `explicit`: the allocation gives every σ̃_g."""
    if calibrate not in CALIBRATABLE:
        raise ConfigError(f"calibrate={calibrate} is unknown; choose one of {', '.join(CALIBRATABLE)}.")
    if epsilon is not None:
        positive("privacy.epsilon", epsilon)
    if noise_multiplier is not None:
        positive("privacy.noise_multiplier", noise_multiplier)
    if delta is not None:
        check_delta(delta)
    given = check_targets(epsilon, advantage, tpr)
    if explicit:
        if noise_multiplier is not None or (given and calibrate == "noise"):
            raise ConfigError(
                "allocation=explicit fixes the noise itself; set privacy.noise_multiplier=null, and a target only if "
                "another knob is calibrated."
            )
    elif calibrate == "noise":
        exactly_one("privacy", epsilon=epsilon, noise_multiplier=noise_multiplier, advantage=advantage, tpr=tpr)
    elif noise_multiplier is None or not given:
        raise ConfigError(
            f"calibrate={calibrate} solves for the target {given[0] if given else 'privacy.epsilon=None'} from the "
            f"noise privacy.noise_multiplier={noise_multiplier}; give both."
        )


def check_targets(epsilon: float | None, advantage: float | None, tpr: Mapping[float, float] | None) -> list[str]:
    """Those that are given, as they were asked for."""
    if advantage is not None:
        check_advantage(advantage)
    if tpr is not None:
        check_tpr(tpr)
    targets = {"epsilon": epsilon, "advantage": advantage, "tpr": tpr}
    given = [f"privacy.{key}={value}" for key, value in targets.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are {len(given)} targets; give one of them.")
    return given


def check_schedules(schedules: Mapping[str, Any], sampling: str, calibrate: str) -> None:
    """Whether z, q and S may vary as asked, and the knob be solved for beside."""
    unknown = sorted(set(schedules) - {"z", "q", "S"})
    if unknown:
        raise ConfigError(f"schedule.{unknown[0]} is unknown; known: z, q, S.")
    given = [f"schedule.{name}={kind}" for name, kind in schedules.items() if kind is not None]
    if given and sampling == "cyclic_poisson":
        raise ConfigError(f"{given[0]} cannot be had with sampling=cyclic_poisson; choose sampling=poisson.")
    varies = sampling in ("poisson", "truncated_poisson")
    if schedules.get("q") is not None and not varies:
        raise ConfigError(f"schedule.q={schedules['q']} needs sampling=poisson; {sampling}'s q cannot vary.")
    if calibrate.startswith("q") and schedules.get("q") is not None:
        raise ConfigError(f"calibrate={calibrate} solves for q itself; set schedule.q=null.")
    if calibrate == "steps" and any(isinstance(kind, list) for kind in schedules.values()):
        raise ConfigError("calibrate=steps cannot stretch a schedule that lists every round; give linear or step.")
    if calibrate.startswith("q") and not varies:
        raise ConfigError(f"calibrate={calibrate} needs a q that can take any value; choose sampling=poisson.")


def check_adaptive(schedules: Mapping[str, Any], calibrate: str, noise: str | Banded) -> None:
    """Whether bounds may follow quantiles beside what else was asked."""
    if schedules.get("S") is not None:
        raise ConfigError(f"schedule.S={schedules['S']} and bound=adaptive both say how S varies; choose one.")
    if calibrate == "bound":
        raise ConfigError("calibrate=bound solves for a bound that bound=adaptive would change; choose another knob.")
    if noise == "exact":
        raise ConfigError("noise=exact needs bounds that stay; choose noise=gaussian, or another bound than adaptive.")
