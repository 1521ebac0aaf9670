"""Channels whose scales and correlations their private second moments even out (zero-phase whitening; Kessy, Lewin and
Strimmer 2018, arXiv 1512.00809)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpexp.errors import ConfigError
from dpexp.privacy.bounds import positive
from dpexp.privacy.engine.rounding import norms
from dpexp.privacy.preparations.preparation import Preparation

_MARGIN = 1 - 2.0**-30  # for what rounding adds to products


class Whiten(Preparation):
    """Gives each feature mean 0, and multiplies channels by C^-power, of their covariance C as noisy sums tell it.

    Of an image [channels, …] of P places a record's vector is (x/√P, x xᵀ/P), of x [channels, P], clipped to S. Of the
    symmetric x xᵀ the upper triangle is released, what is off the diagonal times √2, so that the L2 norm is the
    Frobenius norm.

    Args:
        shape: of one input.
        power: in (0, 1/2]. With 1/2 channels are not correlated any more; below, large directions stay larger.
        floor: eigenvalues of C below so much of the largest are taken for that much: noise hides them.
        S: for features within [-1, 1], √(channels·(channels + 1)) clips none, and is the default.
        start: of a longer input, flattened, it is about the features from this one on, and the others stay as they are;
            None: it is about all of an input.
        scale: what it gives is multiplied by so much, which weighs it against the others.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        power: float = 0.5,
        floor: float = 0.02,
        S: float | None = None,
        share: float | None = None,
        noise_multiplier: float | None = None,
        start: int | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(share, noise_multiplier)
        if not isinstance(power, int | float) or not 0 < power <= 0.5:
            raise ConfigError(f"prepare.whiten.power={power} must be above 0 and at most 0.5.")
        if not isinstance(floor, int | float) or not 1e-9 <= floor <= 1:
            raise ConfigError(f"prepare.whiten.floor={floor} must be between 1e-9 and 1.")
        if start is not None and not (isinstance(start, int) and start >= 0):
            raise ConfigError(f"prepare.whiten.start={start} must be a whole number, 0 or above, or null.")
        self.scale = positive("prepare.whiten.scale", scale)
        channels = shape[0]
        self._own = slice(None) if start is None else slice(start, start + math.prod(shape))
        self.S = math.sqrt(channels * (channels + 1)) if S is None else positive("prepare.whiten.S", S)
        self.S_replaced = 2 * self.S
        self._places = math.prod(shape[1:])
        self.d = channels * self._places + channels * (channels + 1) // 2
        self.power, self.floor, self._channels = power, floor, channels
        self.register_buffer("mean", torch.zeros(channels, self._places))
        self.register_buffer("matrix", torch.eye(channels))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        own = x.flatten(1)[:, self._own].double()
        scaled = own.reshape(len(x), self._channels, self._places) / math.sqrt(self._places)
        # ‖x xᵀ‖ = ‖xᵀ x‖, of which one is the smaller.
        products = scaled @ scaled.mT if self._channels < self._places else scaled.mT @ scaled
        length = torch.hypot(norms(scaled), norms(products))[:, None, None]
        usable = torch.isfinite(length)
        clipped = torch.where(usable, (_MARGIN * self.S / length.clamp(min=1e-300)).clamp(max=1.0) * scaled, 0.0)
        rows, others = (v.transpose(0, 1).flatten(1) for v in (clipped, torch.where(usable, scaled, 0.0)))
        i, j = torch.triu_indices(self._channels, self._channels)
        upper = (rows @ others.T)[i, j] * (1 + (i != j)).double().sqrt()
        return torch.cat([clipped.sum(0).flatten(), upper])

    def use(self, noisy: Tensor, n: int) -> None:
        scaled, products = (noisy.double() / n).tensor_split([self.mean.numel()])
        scaled = scaled.view_as(self.mean)
        i, j = torch.triu_indices(self._channels, self._channels)
        upper = torch.zeros(self._channels, self._channels, dtype=torch.float64)
        upper[i, j] = products / (1 + (i != j)).double().sqrt()
        values, vectors = torch.linalg.eigh(upper - scaled @ scaled.T, UPLO="U")
        values = values.clamp(min=self.floor * float(values[-1].clamp(min=1e-6)))
        self.matrix.copy_((vectors * (self.scale * values.pow(-self.power))) @ vectors.T)
        self.mean.copy_(scaled * math.sqrt(self._places))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        centred = flat[:, self._own].unflatten(1, self.mean.shape) - self.mean
        with torch.autocast(x.device.type, enabled=False):
            whitened = torch.einsum("ij,bjp->bip", self.matrix.to(centred.dtype), centred).flatten(1)
        before, after = flat[:, : self._own.start or 0], flat[:, self._own.stop or flat.shape[1] :]
        return torch.cat([before.to(whitened.dtype), whitened, after.to(whitened.dtype)], dim=1).unflatten(
            1, x.shape[1:]
        )
