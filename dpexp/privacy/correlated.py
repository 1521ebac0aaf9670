"""Noise that is correlated from round to round: y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0, that is C y = Z.

To take back later a part of what was added before, past noise must be remembered: (b-1)·d numbers in float64. They are
as secret as the key that they come from, and stay where it does, in the memory of the process that adds the noise, for
as long as a job runs. A resumed job begins anew.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dpexp.privacy.noise import GaussianNoise

Bands = tuple[float, ...]


class Noisy(NamedTuple):
    """A sum that noise of standard deviation σ, times that of y_t, is to be added to; its name is the same in every
    round."""

    name: str
    total: Tensor
    sigma: float
    bands: Bands


class CorrelatedNoise:
    """Adds σ y_t to each coordinate of sums that have bands, and independent normal noise to those that have one."""

    def __init__(self, gaussian: GaussianNoise) -> None:
        self._gaussian = gaussian
        self._past: dict[str, deque[Tensor]] = {}  # y_{t-1}, y_{t-2}, …

    def add_to(self, sums: Sequence[Noisy], divisor: float = 1.0) -> None:
        """Adds a round's noise to contiguous tensors and divides them, in place. To be called once a round."""
        self._gaussian.add_to([(one.total, one.sigma) for one in sums if len(one.bands) == 1], divisor)
        banded = [one for one in sums if len(one.bands) > 1]
        drawn = [torch.zeros(one.total.numel(), dtype=torch.float64, device=one.total.device) for one in banded]
        self._gaussian.add_to([(z, 1.0) for z in drawn])
        for one, z in zip(banded, drawn, strict=True):
            y = self._next(one.name, z, one.bands)
            one.total.copy_((y * one.sigma).view_as(one.total).add_(one.total).div_(divisor))

    def _next(self, name: str, z: Tensor, c: Bands) -> Tensor:
        """y_t, in the place of Z_t."""
        past = self._past.setdefault(name, deque(maxlen=len(c) - 1))
        for c_j, y in zip(c[1:], past, strict=False):
            z.sub_(y, alpha=c_j)
        past.appendleft(z.div_(c[0]))
        return z

    def __reduce__(self) -> NoReturn:
        raise TypeError("past noise is secret, and neither copied nor saved.")
