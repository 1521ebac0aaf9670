"""Values of records that are released besides gradients: which ones, how `training_step` gives them, and what their
releases, and those of gradients, say round by round.

A value is a vector like any other: v̂ = (Σ_i c_i v^i + α N(0, σ̃² I))/qn estimates the mean of what records gave, of
which what is longer than S_g is clipped, with noise of the known standard deviation α σ̃/qn.

How much of a released gradient is signal: v̂_j = v̄_j + N(0, s_j² I) with s_j = α_j σ̃/qn. In units of α_j, as the
mechanism measures a group's vectors,

    E Σ_j ‖v̂_j/α_j‖² = Σ_j ‖v̄_j/α_j‖² + d (σ̃/qn)²,

so that Σ_j ‖v̂_j/α_j‖² - d (σ̃/qn)² estimates the signal's squared length without bias; its variance is
2 d (σ̃/qn)⁴ + 4 (σ̃/qn)² Σ_j ‖v̄_j/α_j‖². Correlated noise σ̃ y_t is larger, by the spread of y_t, and means over rounds
vary as if there were fewer of them: the first term is multiplied by Σ_k ρ_k², the second by at most Σ_k |ρ_k| (see
`bands.ties`). Estimates are post-processing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpexp._torch_compat import current_level
from dpexp.errors import ConfigError, positive, whole
from dpexp.privacy.gradients.branches import Unreadable
from dpexp.privacy.noise.correlated import spread, ties
from dpexp.privacy.plan.clipping import GroupClipping, at_most_root
from dpexp.privacy.plan.groups import Vector, value_key

if TYPE_CHECKING:
    from dpexp.privacy.plan.plan import Group, PrivacyPlan

BATCHNORM, UNCLIPPED = (
    "batchnorm",
    "fraction_within_clip_norm",
)  # what private batch normalization and adaptive bounds release
WEIGHT = ".weight"  # the key of a record's weight, which is not released
_KEYS = ("clip_norm", "budget_share", "dim", "every_n_rounds", "values")
_RECENT = 5  # the smoothed value is the mean over the last fifth of the releases
_WINDOWS = 20  # that a run's rounds are averaged in
# What a record gave, by the key of each value that is released, and the innermost transform meanwhile.
_given: ContextVar[tuple[dict[str, list[Any]], int | None]] = ContextVar("given", default=({}, None))


@dataclass(frozen=True)
class MetricRelease:
    """A group of vectors: w_g, its share of the budget in a round that releases all groups, and that it is released in
    each round whose number, counted from 1, `every` divides."""

    vectors: tuple[Vector, ...]
    clipping: GroupClipping
    budget_share: float
    every_n_rounds: int = 1


def releases(asked: Mapping[str, Any]) -> dict[str, MetricRelease]:
    """Reads a configuration's `private_metrics.release`: by the name of the value, `{clip_norm, budget_share}`, with
    `dim` for a value of several numbers (default 1) and `every_n_rounds` (default 1). Several values make one group,
    clipped
    together, by `values: {name: {alpha, dim}}`, where clip_norm is at most √k for k values, its default (see `Joint`).

    Raises:
        ConfigError: names what is missing, unknown or out of range.
    """
    if not isinstance(asked, Mapping) or not all(isinstance(name, str) and name for name in asked):
        raise ConfigError(
            f"private_metrics.release={asked} must name values, such as {{train_loss: {{clip_norm: 4, budget_share: "
            f"0.01}}}}."
        )
    found = {name: _release(f"private_metrics.release.{name}", name, entry) for name, entry in asked.items()}
    total = sum(release.budget_share for release in found.values())
    if total >= 1:
        raise ConfigError(f"private_metrics.release: the shares add up to {total:.6g}; gradients need the rest of 1.")
    vectors = [vector for release in found.values() for vector in release.vectors]
    for name, times in Counter(vector.name for vector in vectors).items():
        if times > 1:
            raise ConfigError(f"private_metrics.release: {name} is released by two groups; once a round is enough.")
    for name, times in Counter(name for vector in vectors for name in shown_as(vector.name, vector.d)).items():
        if times > 1 or name.startswith(("clip_norm/", "joint_scale/")):
            raise ConfigError(
                f"private_metrics.release: {name} is what another number is shown as; rename one of them."
            )
    return found


def shown_as(value: str, d: int) -> list[str]:
    """The names of a value's d numbers."""
    return [value] if d == 1 else [f"{value}/{k}" for k in range(d)]


def _release(key: str, name: str, entry: Any) -> MetricRelease:
    if not isinstance(entry, Mapping) or not set(entry) <= {*_KEYS} or "budget_share" not in entry:
        known = ", ".join(_KEYS)
        raise ConfigError(
            f"{key}={entry} must give clip_norm and budget_share, such as {{clip_norm: 1, budget_share: 0.01}}; "
            f"known: {known}."
        )
    share = positive(f"{key}.budget_share", entry["budget_share"])
    every = whole(f"{key}.every_n_rounds", entry.get("every_n_rounds", 1))
    if "values" not in entry:
        if "clip_norm" not in entry:
            raise ConfigError(f"{key}={dict(entry)} must give clip_norm, the bound on one record's value.")
        vector = Vector(name, (value_key(name),), whole(f"{key}.dim", entry.get("dim", 1)))
        return MetricRelease(
            (vector,), GroupClipping((1.0,), positive(f"{key}.clip_norm", entry["clip_norm"])), share, every
        )
    values = entry["values"]
    if not isinstance(values, Mapping) or not values or "dim" in entry:
        raise ConfigError(
            f"{key}.values={values} must name values, such as {{a: {{alpha: 1}}}}, each with its own dim."
        )
    vectors, alphas = [], []
    for value, one in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{key}.values: {value} must be a name.")
        if not isinstance(one, Mapping) or not {"alpha"} <= set(one) <= {"alpha", "dim"}:
            raise ConfigError(f"{key}.values.{value}={one} must give alpha, a scale, and dim if it is not one number.")
        vectors.append(Vector(value, (value_key(value),), whole(f"{key}.values.{value}.dim", one.get("dim", 1))))
        alphas.append(positive(f"{key}.values.{value}.alpha", one["alpha"]))
    S = positive(f"{key}.clip_norm", entry.get("clip_norm", math.sqrt(len(vectors))))
    return MetricRelease(
        tuple(vectors),
        GroupClipping(tuple(alphas), at_most_root(f"{key}.clip_norm={S}", S, len(vectors))),
        share,
        every,
    )


def release(name: str, value: Any) -> None:
    """Gives a value of the one record that `training_step` sees: a number, or a tensor of d numbers.

    If the plan releases values of this name (`private_metrics.release`), they are clipped, summed over the sample, and
    released with noise; a record that gives several, as does a layer that is called twice, contributes their mean, and
    one that gives none contributes zero. Other values, and what is given outside private training, are dropped.

    Raises:
        RuntimeError: it is called where another vmap runs, or for one record after another.
    """
    given, level = _given.get()
    if value_key(name) not in given:
        return
    if current_level() != level:  # else it would be taken for a value of every record
        raise RuntimeError(f"{name} is given for release where it is not a value of training_step's one record.")
    given[value_key(name)].append(value)


def weigh(weight: Any) -> None:
    """Weighs the one record that `training_step` sees: its clipped gradient is multiplied by `weight`, a number in
    [0, 1], at most once a record.

    A weight in the loss is taken away again by clipping. This one comes after, so that a record adds at most S whatever
    its weight: one outside of [0, 1] is brought to the nearer end, and NaN to 0. Values for release are not weighed.
    Outside of private training it does nothing.

    Raises:
        RuntimeError: it is called where another vmap runs. ConfigError: users train locally, by many gradients each.
    """
    given, level = _given.get()
    if WEIGHT not in given:
        return
    if current_level() != level:
        raise RuntimeError("dpexp.weigh is given what is not a weight of training_step's one record.")
    if not isinstance(given[WEIGHT], list):
        raise ConfigError(
            "privacy_unit.local_training: dpexp.weigh weighs a record's gradient, and a user who trains locally has "
            "many, clipped "
            "together; leave it out, or choose privacy_unit.local_training=null."
        )
    given[WEIGHT].append(weight)


class Values:
    """The values that a plan releases: their `sizes` d, by `value_key`. They are summed on the device of a tensor, in
    its precision, or float32."""

    def __init__(self, sizes: Mapping[str, int], like: Tensor) -> None:
        self.sizes = sizes
        self.device, self.dtype = like.device, torch.promote_types(torch.float32, like.dtype)

    @contextmanager
    def given(self, weighed: bool = True) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Meanwhile `release` takes values of a record, or of each of several under vmap, and `weigh` its weight, if it
        is to have one; afterwards, in the same vmap, the function gives them as [d], by key, or raises ValueError: one
        has not as many numbers as the plan says."""
        given: dict[str, Any] = {key: [] for key in self.sizes} | {WEIGHT: [] if weighed else ()}
        token = _given.set((given, current_level()))
        try:
            yield lambda: {key: self._one(key, values) for key, values in given.items() if values}
        finally:
            _given.reset(token)

    def _one(self, key: str, values: list[Any]) -> Tensor:
        found = [self._flat(key, value) for value in values]
        if key == WEIGHT and [len(value) for value in found] != [1]:
            raise ValueError(
                "dpexp.weigh takes one number for a record, once; of several examples, one for all, such as w.mean()."
            )
        for value in found:
            if len(value) != self.sizes.get(key, 1):
                told = f"training_step gives {len(value)} numbers as the {key[1:]} for release"
                raise ValueError(f"{told}; private_metrics.release says d={self.sizes[key]}.")
        return sum(found[1:], start=found[0]) / len(found)

    def _flat(self, key: str, value: Any) -> Tensor:
        if isinstance(value, Unreadable):
            value = value.tensor if value.tensor is not None else "metric"
        try:
            return torch.as_tensor(value, device=self.device).detach().to(self.dtype).reshape(-1)
        except Exception as error:
            told = f"training_step gives a {type(value).__name__} as the {key[1:]} for release"
            raise ValueError(f"{told}; give a number or a tensor.") from error


class MetricEstimates:
    """Estimates of the means of what records gave.

    Attributes:
        history: by name, the (round, estimate, standard deviation of its noise) of each release; a value of d > 1
            numbers has d names. Also what follows from releases alone, such as adaptive bounds, with a deviation of 0.
    """

    def __init__(self, history: dict[str, list[tuple[int, float, float]]] | None = None) -> None:
        self.history = history or {}
        self._totals: dict[str, list[tuple[float, float]]] = {}  # of estimates, and of variances, up to each release

    def add(self, now: "PrivacyPlan", completed: int, released: Mapping[str, Tensor]) -> dict[str, float]:
        """The metrics of what round number `completed`, counted from 1, released (v̂ by key): each as `private/…`, its
        noise as `…_noise_std`, and smoothed as `…_moving_average`."""
        metrics: dict[str, float] = {}
        for name, estimate, sd in _of_round(now, released):
            self.history.setdefault(name, []).append((completed, estimate, sd))
            smooth, _ = self.moving_average(name)
            metrics |= {
                f"private/{name}": estimate,
                f"private/{name}_noise_std": sd,
                f"private/{name}_moving_average": smooth,
            }
        return metrics

    def moving_average(self, name: str, releases: int | None = None) -> tuple[float, float]:
        """The mean of the last fifth of a value's releases, or of the first so many, and the standard deviation of its
        noise."""
        history, totals = self.history[name], self._totals.setdefault(name, [(0.0, 0.0)])
        for _, estimate, sd in history[len(totals) - 1 :]:
            totals.append((totals[-1][0] + estimate, totals[-1][1] + sd**2))
        end = len(history) if releases is None else releases
        count = math.ceil(end / _RECENT)
        estimate, variance = (after - before for after, before in zip(totals[end], totals[end - count], strict=True))
        return estimate / count, math.sqrt(max(0.0, variance)) / count


def _of_round(now: "PrivacyPlan", released: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """(name, estimate, standard deviation) of each number."""
    for group in now.groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            if vector.is_value and group.name != UNCLIPPED and not vector.name.startswith(f"{BATCHNORM}/"):
                numbers = released[value_key(vector.name)].tolist()
                for name, number in zip(shown_as(vector.name, len(numbers)), numbers, strict=True):
                    yield name, number, alpha * group.sigma / (now.sampling.q * now.n)


class GradientSignal:
    """What releases tell of the gradients of each group: `history` has by group, of each release, its round,
    Σ_j ‖v̂_j/α_j‖², d and the noise's standard deviation; and, of correlated noise, both factors."""

    def __init__(self, history: dict[str, list[tuple[float, ...]]] | None = None) -> None:
        self.history = history or {}
        self._added = 0  # since the job began, and its noise with it

    def add(self, now: "PrivacyPlan", completed: int, released: Mapping[str, Tensor]) -> None:
        """Notes what round number `completed`, counted from 1, released: v̂ by parameter."""
        groups = [group for group in now.groups if not group.is_metric]
        squares = torch.stack([_square(group, released) for group in groups]).tolist()
        for group, square in zip(groups, squares, strict=True):
            sd = group.sigma / (now.sampling.q * now.n)
            told: tuple[float, ...] = (completed, square, group.d, sd)
            if len(group.bands) > 1:
                rounds = max(now.rounds, self._added + 1)
                sd *= float(spread(group.bands, rounds)[self._added])
                told = (completed, square, group.d, sd, *ties(group.bands, rounds))
            self.history.setdefault(group.name, []).append(told)
        self._added += 1


class SignalCurve(NamedTuple):
    """Of one group, over windows of rounds [m]: the last round of each; the mean of the signal's squared length, as
    estimated, and the standard deviation of that estimate; and of the noise's squared length."""

    rounds: np.ndarray
    signal: np.ndarray
    sd: np.ndarray
    noise: np.ndarray


def course(history: Sequence[tuple[float, ...]]) -> SignalCurve:
    """The signal and the noise of a group, in about 20 windows of equally many rounds."""
    told = np.array(history, dtype=float)
    windows = np.array_split(told, min(_WINDOWS, len(told)))
    return SignalCurve(*map(np.array, zip(*map(_over, windows), strict=True)))


def _over(window: np.ndarray) -> tuple[float, float, float, float]:
    """The last round, the mean of the signal's estimates and its standard deviation, and the mean of the noise."""
    rounds, square, d, sd, *ties = window.T
    of_squares, of_sums = ties or (1.0, 1.0)
    noise = d * sd**2
    signal = (square - noise).mean()
    variance = (2 * d * sd**4 * of_squares + 4 * sd**2 * max(signal, 0) * of_sums).mean()
    return rounds[-1], signal, np.sqrt(variance / len(window)), noise.mean()


def _square(group: "Group", released: Mapping[str, Tensor]) -> Tensor:
    """Σ_j ‖v̂_j/α_j‖², a scalar in float64: of large vectors float32 loses more than the signal is."""
    lengths = [
        torch.linalg.vector_norm(released[name], dtype=torch.float64) / alpha
        for vector, alpha in zip(group.vectors, group.alphas, strict=True)
        for name in vector.parameters
    ]
    return torch.linalg.vector_norm(torch.stack([length.to(lengths[0].device) for length in lengths])) ** 2
