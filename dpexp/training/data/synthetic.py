"""Gaussian clusters, for quick tries and tests."""

import math
from collections.abc import Sequence

import torch

from dpexp.training.data.tensors import TensorData


class Synthetic(TensorData):
    """Each class is a unit-variance Gaussian around its own random mean.

    Args:
        n: training records; a quarter as many are added for testing.
        shape: of one record.
        separation: standard deviation of the means' coordinates.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int],
        classes: int,
        separation: float = 0.5,
        seed: int = 0,
        batch_size: int = 256,
        workers: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        means = separation * torch.randn(classes, math.prod(shape), generator=generator)
        total = n + n // 4
        y = torch.randint(classes, (total,), generator=generator)
        x = (means[y] + torch.randn(total, math.prod(shape), generator=generator)).reshape(total, *shape)
        super().__init__((x[:n], y[:n]), (x[n:], y[n:]), batch_size, workers)
