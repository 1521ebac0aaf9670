"""What releases say of values, and of the gradients' signal, round by round. All of it is post-processing.

How much of a released gradient is signal: v̂_j = v̄_j + N(0, s_j² I) with s_j = α_j σ̃/qn. In units of α_j, as the
mechanism measures a group's vectors,

    E Σ_j ‖v̂_j/α_j‖² = Σ_j ‖v̄_j/α_j‖² + d (σ̃/qn)²,

so that Σ_j ‖v̂_j/α_j‖² - d (σ̃/qn)² estimates the signal's squared length without bias; its variance is
2 d (σ̃/qn)⁴ + 4 (σ̃/qn)² Σ_j ‖v̄_j/α_j‖².

Correlated noise σ̃ y_t is larger, by the spread of y_t. Means over rounds then vary as if there were fewer of them: the
first term is multiplied by Σ_k ρ_k², the second by at most Σ_k |ρ_k| (see `bands.ties`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.adaptive import UNCLIPPED
from dpexp.privacy.bands import spread, ties
from dpexp.privacy.batchnorm import GROUP as BATCHNORM
from dpexp.privacy.groups import value_key
from dpexp.privacy.metrics import shown_as
from dpexp.privacy.plan import Group, PrivacyPlan

_RECENT = 5  # the smoothed value is the mean over the last fifth of the releases


class Estimates:
    """Estimates of the means of what records gave.

    Attributes:
        history: by name, the (round, estimate, standard deviation of its noise) of each release; a value of d > 1
            numbers has d names. Also what follows from releases alone, such as adaptive bounds, with a deviation of 0.
    """

    def __init__(self, history: dict[str, list[tuple[int, float, float]]] | None = None) -> None:
        self.history = history or {}
        self._totals: dict[str, list[tuple[float, float]]] = {}  # of estimates, and of variances, up to each release

    def add(self, now: PrivacyPlan, completed: int, released: Mapping[str, Tensor]) -> dict[str, float]:
        """The metrics of a round's releases: each as `private/…`, its noise as `…_sd`, and smoothed as `…_smooth`.

        Args:
            completed: the number of the round, counted from 1.
            released: v̂ by key.
        """
        metrics: dict[str, float] = {}
        for name, estimate, sd in _of_round(now, released):
            self.history.setdefault(name, []).append((completed, estimate, sd))
            smooth, _ = self.smoothed(name)
            metrics |= {f"private/{name}": estimate, f"private/{name}_sd": sd, f"private/{name}_smooth": smooth}
        return metrics

    def smoothed(self, name: str, releases: int | None = None) -> tuple[float, float]:
        """The mean of the last fifth of a value's releases, or of the first so many, and the standard deviation of its
        noise."""
        history, totals = self.history[name], self._totals.setdefault(name, [(0.0, 0.0)])
        for _, estimate, sd in history[len(totals) - 1 :]:
            totals.append((totals[-1][0] + estimate, totals[-1][1] + sd**2))
        end = len(history) if releases is None else releases
        count = math.ceil(end / _RECENT)
        estimate, variance = (after - before for after, before in zip(totals[end], totals[end - count], strict=True))
        return estimate / count, math.sqrt(max(0.0, variance)) / count


def _of_round(now: PrivacyPlan, released: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """(name, estimate, standard deviation) of each number."""
    for group in now.groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            if vector.is_value and group.name != UNCLIPPED and not vector.name.startswith(f"{BATCHNORM}/"):
                numbers = released[value_key(vector.name)].tolist()
                for name, number in zip(shown_as(vector.name, len(numbers)), numbers, strict=True):
                    yield name, number, alpha * group.sigma / (now.sampling.q * now.n)


_WINDOWS = 20  # that a run's rounds are averaged in


class Signals:
    """What releases tell of the gradients of each group.

    Attributes:
        history: by group, of each release its round, Σ_j ‖v̂_j/α_j‖², d and the noise's standard deviation; and, of
            correlated noise, both factors.
    """

    def __init__(self, history: dict[str, list[tuple[float, ...]]] | None = None) -> None:
        self.history = history or {}
        self._added = 0  # since the job began, and its noise with it

    def add(self, now: PrivacyPlan, completed: int, released: Mapping[str, Tensor]) -> None:
        """Notes a round's releases.

        Args:
            completed: the number of the round, counted from 1.
            released: v̂ by parameter.
        """
        groups = [group for group in now.groups if not group.is_of_values]
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


class Course(NamedTuple):
    """Of one group, over windows of rounds [m]: the last round of each; the mean of the signal's squared length, as
    estimated, and the standard deviation of that estimate; and of the noise's squared length."""

    rounds: np.ndarray
    signal: np.ndarray
    sd: np.ndarray
    noise: np.ndarray


def course(history: Sequence[tuple[float, ...]]) -> Course:
    """The signal and the noise of a group, in about 20 windows of equally many rounds."""
    told = np.array(history, dtype=float)
    windows = np.array_split(told, min(_WINDOWS, len(told)))
    return Course(*map(np.array, zip(*map(_over, windows), strict=True)))


def _over(window: np.ndarray) -> tuple[float, float, float, float]:
    """The last round, the mean of the signal's estimates and its standard deviation, and the mean of the noise."""
    rounds, square, d, sd, *ties = window.T
    of_squares, of_sums = ties or (1.0, 1.0)
    noise = d * sd**2
    signal = (square - noise).mean()
    variance = (2 * d * sd**4 * of_squares + 4 * sd**2 * max(signal, 0) * of_sums).mean()
    return rounds[-1], signal, np.sqrt(variance / len(window)), noise.mean()


def _square(group: Group, released: Mapping[str, Tensor]) -> Tensor:
    """Σ_j ‖v̂_j/α_j‖², a scalar in float64: of large vectors float32 loses more than the signal is."""
    lengths = [
        torch.linalg.vector_norm(released[name], dtype=torch.float64) / alpha
        for vector, alpha in zip(group.vectors, group.alphas, strict=True)
        for name in vector.parameters
    ]
    return torch.linalg.vector_norm(torch.stack([length.to(lengths[0].device) for length in lengths])) ** 2
