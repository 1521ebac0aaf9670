"""What one input of a trained model is, as the public test set tells, and which inputs cannot be one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpexp.errors import ConfigError

_WHOLE = "whole numbers"
_SLACK = 0.25  # of the whole range, by which new inputs may exceed what the test set has


@dataclass(frozen=True)
class OneInput:
    """The numbers of one input.

    Attributes:
        shape: of one input; where it varies, of the first.
        kind: numbers, or whole numbers, such as tokens.
        ends: the ranges of an input's smallest number, and of its largest.
        raw_max: see `TensorData`.
    """

    shape: Sequence[int]
    kind: str
    ends: Sequence[Sequence[float]]
    raw_max: int | None = None

    @classmethod
    def of(cls, batches: Iterable[Tensor], raw_max: int | None = None) -> "OneInput":
        """Of batches x [B, …] of finite numbers."""
        first, *others = batches
        kind = "numbers" if first.is_floating_point() else _WHOLE
        low, high = torch.cat([*map(_ends, (first, *others))], 1).aminmax(dim=1)
        return cls([*first.shape[1:]], kind, torch.stack([low, high], 1).tolist(), raw_max)

    def __str__(self) -> str:
        low, high = (f"from {start:.3g} to {stop:.3g}" for start, stop in self.ends)
        raw = f", or raw ones from 0 to {self.raw_max}" if self.raw_max else ""
        return f"{self.kind} of shape {self.shape}, the smallest {low} and the largest {high}{raw}"

    def converted(self, x: Tensor) -> Tensor:
        """Inputs x [B, …] as the model takes them.

        Raises:
            ConfigError: some are no such numbers, or most are unlike any input of the test set, as of another scale.
        """
        given = f"from {x.min():.3g} to {x.max():.3g}"
        if self.raw_max and x.min() >= 0 and 1 < x.max() <= self.raw_max:
            x = scaled(x, self.raw_max)
        ends = _ends(x)
        known = ends.new_tensor(self.ends)
        slack = _SLACK * (known.max() - known.min())
        fits = ((known[:, :1] - slack <= ends) & (ends <= known[:, 1:] + slack)).all(0)
        is_kind = x.isfinite().all() and (self.kind != _WHOLE or not (x % 1).any())
        if not is_kind or fits.float().mean() < 0.5:
            raise ConfigError(f"data: numbers {given} cannot be those of the test set, where one input is {self}.")
        return x.long() if self.kind == _WHOLE else x.float()


def scaled(x: Tensor, raw_max: int) -> Tensor:
    """Numbers in [-1, 1] of raw ones from 0 to `raw_max`."""
    return x.float() / (raw_max / 2) - 1


def _ends(x: Tensor) -> Tensor:
    """The smallest and the largest number of each input, [2, B]."""
    return torch.stack(x.reshape(len(x), -1).double().aminmax(dim=1))
