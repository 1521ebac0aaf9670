"""What becomes of batch normalization, which mixes the records of a batch: private statistics, fixed ones, or none.

With private statistics (the paper's second kind of aggregate) a layer normalises by running ones, u = (x - μ)/s, a
fixed map of each channel by which records never mix. The moments of each record, the means over space of u and
of u² - 1 for each channel, are vectors of the round: clipped, summed and noised together, as the group `batchnorm`.
What is released is how far the statistics are off, in their own units, and moves them: μ by as much of s, s² by as much
of itself, so that one bound serves layers of any scale. Gradients take the statistics as constants, and what a step
gains by scaling a layer's inputs would be taken back by statistics that follow (Ioffe & Szegedy 2015, section 2). So
they move by 1/t of what is found in round t, and come to rest while the network learns.

Spectral normalization makes one power iteration a round, from the weights alone, and none within a step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._torch_compat import BatchNorm, SpectralNorm
from dpexp.errors import ConfigError, positive
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private_metrics import BATCHNORM, release

_FASTEST = 2.0  # that a variance may grow or shrink in one round


class RunningNorm(nn.Module):
    """Normalises each channel by running statistics, whatever the mode; with the names of nn.BatchNorm's parameters and
    buffers, from one of which it is made.

    Args:
        given_as: the name by which it gives each record's moments, 2C numbers, for release; None: it does not.
        rate: by which part of what was found they move in the first round; by 1/t of it in round t.
    """

    def __init__(self, layer: BatchNorm, given_as: str | None = None, rate: float = 1.0) -> None:
        super().__init__()
        self.metric_name = given_as
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
        """[B, C, ...]."""
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = (self.running_var + self.eps).rsqrt()
        x = (x - self.running_mean.view(shape)) * scale.view(shape)
        if self.metric_name is not None and self.training:
            u = x.detach().transpose(0, 1).flatten(1)
            release(self.metric_name, torch.cat([u.mean(1), u.square().mean(1) - 1]))
        if self.weight is None:
            return x
        return x * self.weight.view(shape) + self.bias.view(shape)

    def follow(self, moments: Tensor) -> None:
        """Moves the running statistics by released moments [2C]."""
        self.num_batches_tracked += 1
        rate = self.rate / int(self.num_batches_tracked)
        mean, square = moments.to(self.running_mean).split(self.channels)
        self.running_mean += rate * (self.running_var + self.eps).sqrt() * mean
        self.running_var *= (1 + rate * square).clamp(1 / _FASTEST, _FASTEST)


@dataclass(frozen=True)
class PrivateBatchNorm:
    """Statistics of the data, released privately.

    Args:
        budget_share: of the noise budget, for all layers together.
        clip_scale: a record's moments of a layer with C channels are clipped, together with those of other layers, as
            if they were at most clip_scale·√(2C) long.
        initial_rate: see `RunningNorm`.
    """

    budget_share: float = 0.1
    clip_scale: float = 1.0
    initial_rate: float = 1.0

    def __call__(self, module: nn.Module) -> nn.Module:
        positive("batchnorm.budget_share", self.budget_share)
        if not 0 < self.initial_rate <= 1:
            raise ConfigError(f"batchnorm.initial_rate={self.initial_rate} must lie in (0, 1].")
        return _replaced(module, lambda name, layer: RunningNorm(layer, f"{BATCHNORM}/{name}", self.initial_rate))

    def release(self, module: nn.Module) -> dict[str, Any]:
        """What `make_plan` is to release for the module's layers."""
        scale = positive("batchnorm.clip_scale", self.clip_scale)
        values = {
            layer.given_as: {"alpha": scale * math.sqrt(2 * layer.channels), "dim": 2 * layer.channels}
            for layer in private_norm_layers(module)
        }
        return {BATCHNORM: {"budget_share": self.budget_share, "values": values}} if values else {}


@dataclass(frozen=True)
class FrozenBatchNorm:
    """The statistics that the layers came with, such as those of public pretraining."""

    def __call__(self, module: nn.Module) -> nn.Module:
        return _replaced(module, lambda name, layer: RunningNorm(layer))


@dataclass(frozen=True)
class GroupNormalization:
    """Group normalization, with the layers' scale and shift: statistics of each record by itself (Wu & He 2018), in at
    most so many groups, as divide the channels."""

    groups: int = 32

    def __call__(self, module: nn.Module) -> nn.Module:
        def grouped(name: str, layer: BatchNorm) -> nn.Module:
            groups = max(k for k in range(1, self.groups + 1) if layer.num_features % k == 0)
            new = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
            new.weight, new.bias = layer.weight, layer.bias
            return new

        return _replaced(module, grouped)


def private_norm_layers(module: nn.Module) -> Iterator[RunningNorm]:
    for layer in module.modules():
        if isinstance(layer, RunningNorm) and layer.given_as is not None:
            yield layer


def refuse_unreleased(module: nn.Module, plan: PrivacyPlan) -> None:
    """Raises ConfigError: a layer would never learn its statistics."""
    released = {vector.name for group in plan.groups for vector in group.vectors}
    for layer in private_norm_layers(module):
        if layer.given_as not in released:
            told = f"model: the plan does not release {layer.given_as}, by which a RunningNorm learns its statistics"
            raise ConfigError(f"{told}; give make_plan release=batchnorm.Private().release(model).")


def _replaced(module: nn.Module, new: Any) -> nn.Module:
    """The module with another layer in the place of each batch normalization."""
    made: dict[int, nn.Module] = {}
    if not any(isinstance(layer, BatchNorm) for layer in module.modules()):
        raise ConfigError("batchnorm: the model has no batch normalization that could be replaced; set batchnorm=null.")
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


def spectral_norms(module: nn.Module) -> list[tuple[SpectralNorm, Tensor]]:
    """The module's spectral normalizations, and the weights that they are of."""
    return [
        (parametrization, original.original)
        for layer in module.modules()
        for original in getattr(layer, "parametrizations", {}).values()
        for parametrization in original
        if isinstance(parametrization, SpectralNorm)
    ]


def iterate(spectral: list[tuple[SpectralNorm, Tensor]]) -> None:
    """One power iteration a round, from the weights alone; within a step there are none."""
    for parametrization, weight in spectral:
        if parametrization.training:
            with torch.no_grad():
                parametrization(weight)


@contextmanager
def spectral_norms_fixed(module: nn.Module) -> Iterator[None]:
    """Meanwhile no power iteration is made."""
    training = [parametrization for parametrization, _ in spectral_norms(module) if parametrization.training]
    for parametrization in training:
        parametrization.training = False
    try:
        yield
    finally:
        for parametrization in training:
            parametrization.training = True
