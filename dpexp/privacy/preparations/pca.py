"""Principal components of a noisy covariance (Abadi et al. 2016, sections 4 and 5.2; Dwork et al. 2014)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpexp.errors import ConfigError
from dpexp.privacy.engine.rounding import norms
from dpexp.privacy.preparations.preparation import Preparation

_MARGIN = 1 - 2.0**-49  # for what rounding adds to a unit vector's products
_FARTHEST = 1e20


class Pca(Preparation):
    """Projects inputs onto the first k principal components.

    Each record, seen from `origin` and scaled to length 1, adds u uᵀ to the covariance, which is symmetric: of it the
    upper triangle is released, what is off the diagonal times √2, so that the L2 norm is the Frobenius norm ‖u‖² = 1.
    For another record in its place, ‖u uᵀ - v vᵀ‖² = 2 - 2(u·v)² is at most 2.

    Args:
        shape: of one input; k: components; the model then has inputs [k].
        origin: a published constant from which inputs are seen, such as the colour of the background.
    """

    S, S_replaced = 1.0, math.sqrt(2)
    components: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        k: int,
        origin: float = 0.0,
        share: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        super().__init__(share, noise_multiplier)
        size = math.prod(shape)
        if not isinstance(k, int) or not 1 <= k <= size:
            raise ConfigError(
                f"prepare.pca.k={k} must be a whole number between 1 and {size}, the size of an input of {list(shape)}."
            )
        if not isinstance(origin, int | float) or not abs(origin) < _FARTHEST:
            raise ConfigError(f"prepare.pca.origin={origin} must be a number within ±{_FARTHEST:g}.")
        self.origin, self._size, self.d = origin, size, size * (size + 1) // 2
        self.register_buffer("components", torch.eye(k, size))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.double().reshape(len(x), self._size) - self.origin
        length = norms(rows)[:, None]
        usable = (length > 1e-300) & torch.isfinite(length)
        unit = torch.where(usable, rows / length, 0.0) * _MARGIN
        i, j = torch.triu_indices(self._size, self._size)
        return (unit.T @ unit)[i, j] * (1 + (i != j)).double().sqrt()

    def use(self, noisy: Tensor, n: int) -> None:
        i, j = torch.triu_indices(self._size, self._size)
        upper = torch.zeros(self._size, self._size, dtype=torch.float64)
        upper[i, j] = noisy.double() / (1 + (i != j)).double().sqrt()
        _, vectors = torch.linalg.eigh(upper, UPLO="U")
        self.components.copy_(vectors.T.flip(0)[: len(self.components)])

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.origin) @ self.components.T
