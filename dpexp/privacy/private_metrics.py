"""Private metrics: per-record values that `training_step` marks for release, and estimates from released values.

A metric is a vector like a gradient: v̂ = (Σ_i c_i v^i + α N(0, σ̃² I))/qn estimates the mean of the records' values,
clipped to S_g, with noise of standard deviation α σ̃/qn.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpexp._torch_compat import current_level
from dpexp.errors import ConfigError, positive, positive_integer
from dpexp.privacy.gradients.branches import HiddenNumber
from dpexp.privacy.plan.clipping import GroupClipping, at_most_root
from dpexp.privacy.plan.groups import Vector, value_key
from dpexp.privacy.plan.plan import PrivacyPlan

BATCHNORM = "batchnorm"  # metric group of private batch normalization
UNCLIPPED = "fraction_within_clip_norm"  # metric group of adaptive clipping
SAMPLE_SIZE = "sample_size"  # metric whose value is 1 for each record, and whose estimate is shown times qn
WEIGHT = ".weight"  # key of a record's weight, which is not released
_COUNT = value_key(SAMPLE_SIZE)
_KEYS = ("clip_norm", "budget_share", "dim", "every_n_rounds", "values")
_WINDOW_SHARE = 5  # the moving average is over the last 1/5 of the releases
# A record's values by metric key, and the functorch level at which they are recorded.
_marked: ContextVar[tuple[dict[str, list[Any]], int | None]] = ContextVar("marked", default=({}, None))


@dataclass(frozen=True)
class MetricRelease:
    """A metric group.

    Attributes:
        budget_share: w_g, in a round that releases all groups.
        every_n_rounds: released in rounds n, 2n, ...
    """

    vectors: tuple[Vector, ...]
    clipping: GroupClipping
    budget_share: float
    every_n_rounds: int = 1


def metric_releases(configured: Mapping[str, Any]) -> dict[str, MetricRelease]:
    """Reads `private_metrics.release`: `{clip_norm, budget_share, dim: 1, every_n_rounds: 1}` by metric name.

    `values: {name: {alpha, dim: 1}}` clips k metrics jointly, with clip_norm at most √k, its default (see `Joint`).
    `sample_size` counts the sample's records, with or without a value of the training step; it takes no clip_norm.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    if not isinstance(configured, Mapping) or not all(isinstance(name, str) and name for name in configured):
        raise ConfigError(
            f"private_metrics.release={configured} must map names, such as {{train_loss: {{clip_norm: 4, budget_share: "
            f"0.01}}}}."
        )
    found = {name: _release(f"private_metrics.release.{name}", name, entry) for name, entry in configured.items()}
    total = sum(release.budget_share for release in found.values())
    if total >= 1:
        raise ConfigError(
            f"private_metrics.release: the budget shares add up to {total:.6g}, and must leave a share for gradients."
        )
    vectors = [vector for release in found.values() for vector in release.vectors]
    for name, times in Counter(vector.name for vector in vectors).items():
        if times > 1:
            raise ConfigError(f"private_metrics.release: {name} is in two groups; release it once.")
    for name, times in Counter(name for vector in vectors for name in entry_names(vector.name, vector.d)).items():
        if times > 1 or name.startswith(("clip_norm/", "alpha/")):
            raise ConfigError(
                f"private_metrics.release: {name} is also the name of another logged metric; rename one of them."
            )
    return found


def entry_names(metric: str, d: int) -> list[str]:
    """Names of a metric's d entries."""
    return [metric] if d == 1 else [f"{metric}/{k}" for k in range(d)]


def _release(key: str, name: str, entry: Any) -> MetricRelease:
    if name == SAMPLE_SIZE and isinstance(entry, Mapping):
        if unused := sorted({*entry} - {"budget_share", "every_n_rounds"}):
            raise ConfigError(f"{key}.{unused[0]} is not taken: each record counts 1; give budget_share alone.")
        entry = {"clip_norm": 1.0} | {**entry}
    if not isinstance(entry, Mapping) or not set(entry) <= {*_KEYS} or "budget_share" not in entry:
        known = ", ".join(_KEYS)
        raise ConfigError(
            f"{key}={entry} must set clip_norm and budget_share, such as {{clip_norm: 1, budget_share: 0.01}}; "
            f"known: {known}."
        )
    share = positive(f"{key}.budget_share", entry["budget_share"])
    every = positive_integer(f"{key}.every_n_rounds", entry.get("every_n_rounds", 1))
    if "clip_norm" not in entry and "values" not in entry:
        raise ConfigError(f"{key}={dict(entry)} must set clip_norm, the bound on one record's value.")
    values = entry.get("values", {name: {"alpha": 1.0, "dim": entry.get("dim", 1)}})
    if not isinstance(values, Mapping) or not values or ("values" in entry and "dim" in entry):
        raise ConfigError(f"{key}.values={values} must map names, such as {{a: {{alpha: 1}}}}, each with its own dim.")
    vectors, alphas = [], []
    for value, one in values.items():
        where = f"{key}.values.{value}" if "values" in entry else key
        if not isinstance(value, str) or ("values" in entry and value == SAMPLE_SIZE):
            raise ConfigError(f"{key}.values: {value} must be a name, and {SAMPLE_SIZE} is released by itself.")
        if not isinstance(one, Mapping) or not {"alpha"} <= set(one) <= {"alpha", "dim"}:
            raise ConfigError(f"{where}={one} must set alpha, the scale, and dim if it is above 1.")
        dim = positive_integer(f"{where}.dim", one.get("dim", 1))
        vectors.append(Vector(value, (value_key(value),), dim))
        alphas.append(positive(f"{where}.alpha", one["alpha"]))
    S = positive(f"{key}.clip_norm", entry.get("clip_norm", math.sqrt(len(vectors))))
    if "values" in entry:
        S = at_most_root(f"{key}.clip_norm={S}", S, len(vectors))
    return MetricRelease(tuple(vectors), GroupClipping(tuple(alphas), S), share, every)


def release(name: str, value: Any) -> None:
    """Marks a value of the current record for private release: a number, or a tensor with d entries.

    If the plan releases the metric (`private_metrics.release`), values are clipped, summed over the sample and released
    with noise. A record with several values, as of a layer called twice, contributes their mean; a record without a
    value contributes zero. Other metrics, and all calls outside private training, are ignored.

    Examples:
        >>> import dpexp, torch
        >>> def training_step(self, batch, batch_idx):  # of a LightningModule
        ...     x, y = batch
        ...     dpexp.release("share_of_class_1", (y == 1).float().mean())
        ...     return torch.nn.functional.cross_entropy(self.model(x), y)

    Raises:
        RuntimeError: called inside another vmap, or outside the record's own step.
    """
    marked, level = _marked.get()
    if value_key(name) not in marked or name == SAMPLE_SIZE:
        return
    if current_level() != level:  # it would count as a value of every record
        raise RuntimeError(f"dpexp.release({name!r}) must be called with a value of training_step's one record.")
    marked[value_key(name)].append(value)


def say_dropped(logged: set[str], plan: PrivacyPlan) -> None:
    """Warns of values that training_step logs and the plan does not release, by name."""
    names = logged - {vector.name for group in plan.groups for vector in group.vectors}
    if names:
        warnings.warn(
            f"what training_step logs is private, and is dropped: {', '.join(sorted(names))}; to release a value with "
            "noise, give private_metrics.release='{NAME: {clip_norm: 4, budget_share: 0.01}}'"
        )


def weigh(weight: Any) -> None:
    """Multiplies the current record's clipped gradient by `weight`, at most once per record.

    Clipping would undo a weight in the loss. This weight is applied after clipping and clamped to [0, 1] (NaN: 0), so
    that a record still adds at most S. It does not apply to metrics, nor outside private training.

    Examples:
        >>> import dpexp, torch
        >>> def training_step(self, batch, batch_idx):  # of a LightningModule
        ...     x, y = batch
        ...     dpexp.weigh(torch.where(y == 1, 1.0, 0.2).mean())
        ...     return torch.nn.functional.cross_entropy(self.model(x), y)

    Raises:
        RuntimeError: called inside another vmap.
        ConfigError: users train locally, with many gradients each.
    """
    marked, level = _marked.get()
    if WEIGHT not in marked:
        return
    if current_level() != level:
        raise RuntimeError("dpexp.weigh must be called with a weight of training_step's one record.")
    if not isinstance(marked[WEIGHT], list):
        raise ConfigError(
            "privacy_unit.local_training: dpexp.weigh weights a record's gradient, but a user who trains locally has "
            "many, clipped together; remove it, or set privacy_unit.local_training=null."
        )
    marked[WEIGHT].append(weight)


class Values:
    """Collects the records' metric values and weights.

    Args:
        sizes: dimension d of each metric by `value_key`.
        like: its device, and its dtype or at least float32, are those of the sums.
    """

    def __init__(self, sizes: Mapping[str, int], like: Tensor) -> None:
        self.sizes = sizes
        self.device, self.dtype = like.device, torch.promote_types(torch.float32, like.dtype)

    @contextmanager
    def marked(self, weighted: bool = True) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Collects what `release` and, if `weighted`, `weigh` mark for one record, or for each record under vmap.

        Yields a function for use in the same vmap that returns tensors [d] by key; it raises ValueError if a value does
        not have the plan's dimension.
        """
        marked: dict[str, Any] = {key: [1.0] * (key == _COUNT) for key in self.sizes} | {WEIGHT: [] if weighted else ()}
        token = _marked.set((marked, current_level()))
        try:
            yield lambda: {key: self._mean(key, values) for key, values in marked.items() if values}
        finally:
            _marked.reset(token)

    def _mean(self, key: str, values: list[Any]) -> Tensor:
        found = [self._flat(key, value) for value in values]
        if key == WEIGHT and [len(value) for value in found] != [1]:
            raise ValueError(
                "dpexp.weigh takes one number per record, once; for several examples, pass one, such as w.mean()."
            )
        for value in found:
            if len(value) != self.sizes.get(key, 1):
                raise ValueError(
                    f"training_step releases {key[1:]} with {len(value)} entries, but private_metrics.release has "
                    f"dim={self.sizes[key]}."
                )
        return sum(found[1:], start=found[0]) / len(found)

    def _flat(self, key: str, value: Any) -> Tensor:
        if isinstance(value, HiddenNumber):
            value = value.tensor if value.tensor is not None else "metric"
        try:
            return torch.as_tensor(value, device=self.device).detach().to(self.dtype).reshape(-1)
        except Exception as error:
            found = f"training_step releases {key[1:]} as a {type(value).__name__}"
            raise ValueError(f"{found}; it must be a number or a tensor.") from error


class MetricEstimates:
    """Estimates of the metrics' means over records.

    Attributes:
        history: (round, estimate, standard deviation of the noise) of each release by name; a metric of dimension
            d > 1 has d names. Includes post-processed values, such as adaptive clip norms, with deviation 0.
    """

    def __init__(self, history: dict[str, list[tuple[int, float, float]]] | None = None) -> None:
        self.history = history or {}
        self._totals: dict[str, list[tuple[float, float]]] = {}  # cumulative sums of (estimate, variance)

    def add(self, now: PrivacyPlan, completed: int, released: Mapping[str, Tensor]) -> dict[str, float]:
        """Adds the release v̂ by key of round number `completed`, counted from 1.

        Returns metrics to log: `private/…`, `private/…_noise_std` and `private/…_moving_average`.
        """
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
        """The mean of the last fifth of a metric's (first) `releases`, and the standard deviation of its noise."""
        history, totals = self.history[name], self._totals.setdefault(name, [(0.0, 0.0)])
        for _, estimate, sd in history[len(totals) - 1 :]:
            totals.append((totals[-1][0] + estimate, totals[-1][1] + sd**2))
        end = len(history) if releases is None else releases
        count = math.ceil(end / _WINDOW_SHARE)
        estimate, variance = (after - before for after, before in zip(totals[end], totals[end - count], strict=True))
        return estimate / count, math.sqrt(max(0.0, variance)) / count


def _of_round(now: PrivacyPlan, released: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """(name, estimate, standard deviation) of each entry."""
    for group in now.groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            if vector.is_value and group.name != UNCLIPPED and not vector.name.startswith(f"{BATCHNORM}/"):
                numbers = released[value_key(vector.name)].tolist()
                unit = now.sampling.q * now.n if vector.name == SAMPLE_SIZE else 1.0
                for name, number in zip(entry_names(vector.name, len(numbers)), numbers, strict=True):
                    yield name, unit * number, unit * (alpha * group.sigma / (now.sampling.q * now.n))
