"""What releases of values say, round by round. All of it is post-processing."""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from dpexp.privacy.adaptive import UNCLIPPED
from dpexp.privacy.batchnorm import GROUP as BATCHNORM
from dpexp.privacy.groups import value_key
from dpexp.privacy.metrics import shown_as
from dpexp.privacy.plan import PrivacyPlan

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
