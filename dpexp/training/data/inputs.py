"""What one input of a trained model is, as the public test set tells, and which inputs cannot be one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpexp.errors import ConfigError

_SLACK = 0.25  # of the whole range, by which new inputs may exceed what the test set has


@dataclass(frozen=True)
class OneInput:
    """The numbers of one input.

    Attributes:
        shape: of one input; where it varies, of the first.
        is_whole: they are whole numbers, such as tokens.
        ends: the ranges of an input's smallest number, and of its largest.
        raw_max: see `TensorData`.
    """

    shape: Sequence[int]
    is_whole: bool
    ends: Sequence[Sequence[float]]
    raw_max: int | None = None

    @classmethod
    def of(cls, batches: Iterable[Tensor], raw_max: int | None = None) -> "OneInput":
        """Of batches x [B, …] of numbers."""
        batches = [*batches]
        low, high = torch.cat([*map(_ends, batches)], 1).aminmax(dim=1)
        first = batches[0]
        return cls([*first.shape[1:]], not first.is_floating_point(), torch.stack([low, high], 1).tolist(), raw_max)

    def __str__(self) -> str:
        (low, _), (_, high) = self.ends
        kind = "whole numbers" if self.is_whole else "numbers"
        raw = f", or raw ones from 0 to {self.raw_max}" if self.raw_max else ""
        return f"{kind} of shape {self.shape} from {low:.3g} to {high:.3g}{raw}"

    def converted(self, x: Tensor) -> Tensor:
        """Inputs x [B, …] as the model takes them.

        Raises:
            ConfigError: some are no such numbers, or most are unlike any input of the test set, as of another scale.
        """
        given = f"from {x.min():.3g} to {x.max():.3g}"
        if self.raw_max and x.min() >= 0 and x.max() > 1:
            x = scaled(x, self.raw_max)
        usual, known = _ends(x).median(dim=1).values, torch.tensor(self.ends, dtype=torch.float64)
        slack = _SLACK * (known.max() - known.min())
        is_like = (known[:, 0] - slack <= usual).all() and (usual <= known[:, 1] + slack).all()
        if not (is_like and x.isfinite().all()) or (self.is_whole and (x % 1).any()):
            raise ConfigError(f"data: numbers {given} cannot be those of the test set, where one input is {self}.")
        return x.long() if self.is_whole else x.float()


def scaled(x: Tensor, raw_max: int) -> Tensor:
    """Numbers in [-1, 1] of raw ones from 0 to `raw_max`."""
    return x.float() / (raw_max / 2) - 1


def _ends(x: Tensor) -> Tensor:
    """The smallest and the largest number of each input, [2, B]."""
    return torch.stack(x.reshape(len(x), -1).double().aminmax(dim=1))
