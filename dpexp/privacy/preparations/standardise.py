"""Private mean and variance of features (Tramèr & Boneh 2021, arXiv 2011.11660, section 2.3 and appendix B)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpexp.privacy.bounds import positive
from dpexp.privacy.engine.rounding import norms
from dpexp.privacy.preparations.preparation import Preparation

_MARGIN = 1 - 2.0**-49
_LEAST = 1e-3  # of a variance, as a part of the mean square of all features


class Standardise(Preparation):
    """Shifts and scales each feature to mean 0 and variance 1, as noisy sums of x and x² tell them.

    Of images [C, …] a channel is a feature, and a record's x and x² are means over its places. A record's vector
    (x, x²), of 2C numbers, is clipped to S.

    Args:
        shape: of one input; S: for features within [-1, 1], √(2C) clips none, and is the default.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        S: float | None = None,
        share: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        super().__init__(share, noise_multiplier)
        features = shape[0]
        self.S = math.sqrt(2 * features) if S is None else positive("prepare.standardise.S", S)
        self.d = 2 * features
        self.S_replaced = 2 * self.S
        self._shape = tuple(shape)
        per_feature = (features, *(1 for _ in shape[1:]))
        self.register_buffer("mean", torch.zeros(per_feature))
        self.register_buffer("deviation", torch.ones(per_feature))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        places = x.double().reshape(len(x), self._shape[0], math.prod(self._shape[1:]))
        v = torch.cat([places.mean(2), places.square().mean(2)], dim=1)
        length = norms(v)[:, None]
        factor = (_MARGIN * self.S / length.clamp(min=1e-300)).clamp(max=1.0)
        return torch.where(torch.isfinite(length), v * factor, 0.0).sum(0)

    def use(self, noisy: Tensor, n: int) -> None:
        mean, square = (noisy.double() / n).chunk(2)
        least = _LEAST * square.mean().clamp(min=1e-6)
        self.mean.copy_(mean.view_as(self.mean))
        self.deviation.copy_((square - mean.square()).clamp(min=least).sqrt().view_as(self.mean))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation
