"""Averages of weights over rounds, which are post-processing and cost no privacy."""

from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from dpexp.errors import ConfigError


class WarmAveraging(WeightAveraging):
    """The exponential average of the weights after each round, in which the factor of what was averaged before grows to
    `decay`: with n rounds before, min(decay, (1 + n)/(10 + n)), as De et al. 2022 have it (arXiv 2204.13650, section
    3.2), so that the beginning is forgotten also where there are fewer rounds than 1/(1 - decay).

    Args:
        decay: in [0, 1).

    Raises:
        ConfigError: another decay.
    """

    def __init__(self, decay: float) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(f"callbacks.warm_ema.decay={decay} must be at least 0 and below 1.")

        def averaged(before: Tensor, now: Tensor, n: Tensor | int) -> Tensor:
            kept = min(decay, (1 + int(n)) / (10 + int(n)))
            return kept * before + (1 - kept) * now

        super().__init__(avg_fn=averaged)
