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
        is_whole: whether they are whole numbers, such as tokens.
        ends: the ranges of an input's smallest number, and of its largest.
        raw_max: see `TensorData`.
    """

    shape: Sequence[int]
    is_whole: bool
    ends: Sequence[Sequence[float]]
    raw_max: int | None = None

    @classmethod
    def of(cls, batches: Iterable[Tensor], raw_max: int | None = None) -> "OneInput":
        """Of batches x [B, …] of finite numbers."""
        parts = [*batches]
        low, high = torch.cat([_ends(x) for x in parts], 1).aminmax(dim=1)
        return cls(
            [*parts[0].shape[1:]], not parts[0].is_floating_point(), torch.stack([low, high], 1).tolist(), raw_max
        )

    def __str__(self) -> str:
        (low, high_low), (low_high, high) = self.ends
        kind = "whole numbers" if self.is_whole else "numbers"
        inner = f"the smallest at most {high_low:.3g}, the largest at least {low_high:.3g}"
        raw = f"; raw ones from 0 to {self.raw_max} are scaled" if self.raw_max else ""
        return f"{self.shape} {kind} from {low:.3g} to {high:.3g}, {inner}{raw}"

    def converted(self, x: Tensor) -> Tensor:
        """Inputs x [B, …] as the model takes them.

        Raises:
            ConfigError: some are no such numbers, or most are unlike any input of the test set, as of another scale.
        """
        given = f"from {x.min():.3g} to {x.max():.3g}"
        if self.raw_max and x.min() >= 0 and 1 < x.max() <= self.raw_max:
            x = scaled(x, self.raw_max)
        ends, known = _ends(x), torch.tensor(self.ends)
        slack = _SLACK * (known.max() - known.min())
        fits = ((known[:, :1] - slack <= ends) & (ends <= known[:, 1:] + slack)).all(0)
        is_kind = x.isfinite().all() and not (self.is_whole and (x % 1).any())
        if not is_kind or fits.float().mean() < 0.5:
            raise ConfigError(f"data: numbers {given} cannot be those of the test set, where one input is {self}.")
        return x.long() if self.is_whole else x.float()


def scaled(x: Tensor, raw_max: int) -> Tensor:
    """Numbers in [-1, 1] of raw ones from 0 to `raw_max`."""
    return x.float() / (raw_max / 2) - 1


def _ends(x: Tensor) -> Tensor:
    """The smallest and the largest number of each input, [2, B]."""
    return torch.stack(x.reshape(len(x), -1).double().aminmax(dim=1))
