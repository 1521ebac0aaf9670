"""Replacements for batch normalization, which mixes the records of a batch.

With private statistics (the second type of aggregate of arXiv 1812.06210) a layer normalizes by running statistics,
u = (x - μ)/s, a fixed map of each channel that never mixes records. A record's moments, the means over space of u and
u² - 1 of each channel, are vectors of the metric group `batchnorm`: clipped, summed and noised together. The released
averages are the errors of μ and s² in units of s and s², so that one clip norm serves layers of any scale, and update
them. Gradients treat the statistics as constants; fast statistics would undo what a step gains by scaling a layer's
inputs (Ioffe & Szegedy 2015, section 2). Therefore round t applies 1/t of the released error.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._torch_compat import BatchNorm
from dpexp.errors import ConfigError, Positive, Rate, checks_arguments
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private_metrics import BATCHNORM, release

_MAX_GROWTH = 2.0  # of a variance in one round, and 1 / its shrinkage


class RunningNorm(nn.Module):
    """Normalizes each channel by running statistics, in training and in eval mode.

    Made from an nn.BatchNorm layer, whose parameters and buffers keep their names.

    Args:
        metric_name: of the private metric with each record's moments [2C]; None: not released.
        rate: step size of the statistics in the first round; rate/t in round t.
    """

    def __init__(self, layer: BatchNorm, metric_name: str | None = None, rate: float = 1.0) -> None:
        super().__init__()
        self.metric_name = metric_name
        self.rate = rate
        self.eps = layer.eps
        self.channels = layer.num_features
        self.weight, self.bias = layer.weight, layer.bias
        zeros = torch.zeros(self.channels) if layer.weight is None else torch.zeros_like(layer.weight)
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", zeros if layer.running_mean is None else layer.running_mean)
        self.register_buffer("running_var", zeros + 1 if layer.running_var is None else layer.running_var)
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, ...]."""
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = (self.running_var + self.eps).rsqrt()
        x = (x - self.running_mean.view(shape)) * scale.view(shape)
        if self.metric_name is not None and self.training:
            u = x.detach().transpose(0, 1).flatten(1)
            release(self.metric_name, torch.cat([u.mean(1), u.square().mean(1) - 1]))
        if self.weight is None:
            return x
        return x * self.weight.view(shape) + self.bias.view(shape)

    def update(self, moments: Tensor) -> None:
        """Updates the running statistics by the released average moments [2C]."""
        self.num_batches_tracked += 1
        rate = self.rate / int(self.num_batches_tracked)
        mean, square = moments.to(self.running_mean).split(self.channels)
        self.running_mean += rate * (self.running_var + self.eps).sqrt() * mean
        self.running_var *= (1 + rate * square).clamp(1 / _MAX_GROWTH, _MAX_GROWTH)


@checks_arguments
@dataclass(frozen=True)
class PrivateBatchNorm:
    """Running statistics, released privately.

    Examples:
        >>> from dpexp import PrivateBatchNorm
        >>> from torch import nn
        >>> model = PrivateBatchNorm(budget_share=0.1)(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
        >>> PrivateBatchNorm().release(model)["batchnorm"]["values"]
        {'batchnorm/1': {'alpha': 2.0, 'dim': 4}}

    Args:
        budget_share: of the noise budget, for all layers.
        clip_scale: a layer with C channels has the joint clipping scale α = clip_scale·√(2C).
        initial_rate: `rate` of `RunningNorm`, in (0, 1].
    """

    budget_share: Positive = 0.1
    clip_scale: Positive = 1.0
    initial_rate: Rate = 1.0

    def __call__(self, module: nn.Module) -> nn.Module:
        return _replaced(module, lambda name, layer: RunningNorm(layer, f"{BATCHNORM}/{name}", self.initial_rate))

    def release(self, module: nn.Module) -> dict[str, Any]:
        """The `private_metrics` argument of `make_plan` for the module's layers."""
        values = {
            layer.metric_name: {"alpha": self.clip_scale * math.sqrt(2 * layer.channels), "dim": 2 * layer.channels}
            for layer in private_norm_layers(module)
        }
        return {BATCHNORM: {"budget_share": self.budget_share, "values": values}} if values else {}


@dataclass(frozen=True)
class FrozenBatchNorm:
    """The layers' present statistics, such as those of public pretraining, kept fixed.

    Examples:
        >>> from dpexp import FrozenBatchNorm
        >>> from torch import nn
        >>> type(FrozenBatchNorm()(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))[1]).__name__
        'RunningNorm'
    """

    def __call__(self, module: nn.Module) -> nn.Module:
        return _replaced(module, lambda name, layer: RunningNorm(layer))


@dataclass(frozen=True)
class GroupNormalization:
    """Group normalization (Wu & He 2018) with the layers' scale and shift.

    The number of groups is the largest divisor of the channels that is at most `groups`; of BatchNorm1d, whose channels
    may have one value each, one that leaves at least 16 channels to a group, or one group.

    Examples:
        >>> from dpexp import GroupNormalization
        >>> from torch import nn
        >>> GroupNormalization(groups=4)(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)))[1]
        GroupNorm(4, 8, eps=1e-05, affine=True, bias=True)
    """

    groups: int = 32

    def __call__(self, module: nn.Module) -> nn.Module:
        def grouped(name: str, layer: BatchNorm) -> nn.Module:
            most = layer.num_features // 16 if isinstance(layer, nn.BatchNorm1d) else self.groups
            groups = max(k for k in range(1, max(1, min(most, self.groups)) + 1) if layer.num_features % k == 0)
            new = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
            new.weight, new.bias = layer.weight, layer.bias
            return new

        return _replaced(module, grouped)


def private_norm_layers(module: nn.Module) -> Iterator[RunningNorm]:
    for layer in module.modules():
        if isinstance(layer, RunningNorm) and layer.metric_name is not None:
            yield layer


def refuse_unreleased(module: nn.Module, plan: PrivacyPlan) -> None:
    """Refuses a plan that does not release the statistics of a RunningNorm layer."""
    released = {vector.name for group in plan.groups for vector in group.vectors}
    for layer in private_norm_layers(module):
        if layer.metric_name not in released:
            raise ConfigError(
                f"model: the plan does not release {layer.metric_name}, the statistics of a RunningNorm; give "
                "make_plan private_metrics=PrivateBatchNorm().release(model)."
            )


def _replaced(module: nn.Module, new: Any) -> nn.Module:
    """The module with each batch normalization replaced by `new(name, layer)`."""
    made: dict[int, nn.Module] = {}
    if not any(isinstance(layer, BatchNorm) for layer in module.modules()):
        raise ConfigError("batchnorm: the model has no batch normalization to replace; set batchnorm=null.")
    for name, layer in [*module.named_modules(remove_duplicate=False)]:
        if isinstance(layer, BatchNorm):
            if isinstance(layer, nn.SyncBatchNorm | nn.modules.lazy.LazyModuleMixin):
                raise ConfigError(f"batchnorm: {name} is a {type(layer).__name__}, which cannot be replaced.")
            made.setdefault(id(layer), new(name, layer))
            if not name:
                return made[id(layer)]
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, made[id(layer)])
    return module
