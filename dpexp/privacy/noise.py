"""The Gaussian noise."""

import random
import secrets

import torch
from torch import Tensor


def derived_seed(noise_seed: int, purpose: str, completed: int) -> int:
    """A seed of its own for each purpose, and for each round that a run resumes at."""
    return random.Random(f"{noise_seed}/{purpose}/{completed}").getrandbits(63)


class GaussianNoise:
    """Standard normal tensors from a generator of its own on each device.

    Args:
        seed: None takes fresh entropy from the operating system. A known seed makes the noise reproducible,
            and lets whoever knows it subtract the noise: for tests only.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """N(0, I) in the shape, dtype and device of `like`."""
        generator = self._generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(self._seed)
            self._generators[like.device] = generator
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
