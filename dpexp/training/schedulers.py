"""Learning rates by round."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, rounds: int, warmup: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's rate to 0, after a linear rise over the first part of the rounds.

    Args:
        warmup: that part, in [0, 1).
    """
    rise = _rise(rounds, warmup)

    def factor(t: int) -> float:
        return (t + 1) / (rise + 1) if t < rise else (1 + math.cos(math.pi * (t - rise) / max(1, rounds - rise))) / 2

    return LambdaLR(optimizer, factor)


def linear_warmup(optimizer: Optimizer, rounds: int, warmup: float = 0.1) -> LambdaLR:
    """A linear rise over the first part of the rounds to the optimizer's rate, which then stays."""
    rise = _rise(rounds, warmup)
    return LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / (rise + 1)))


def step(optimizer: Optimizer, rounds: int, at: list[float], factor: float = 0.1) -> LambdaLR:
    """Times a factor after each of some parts of the rounds.

    Args:
        at: parts, in (0, 1).
    """
    return LambdaLR(optimizer, lambda t: factor ** sum(t >= part * rounds for part in at))


def _rise(rounds: int, warmup: float) -> int:
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must lie in [0, 1)")
    return math.floor(warmup * rounds)
