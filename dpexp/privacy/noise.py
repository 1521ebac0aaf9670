"""The Gaussian noise."""

import secrets
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

STREAMS = 8
_LARGE = 2**17


class GaussianNoise:
    """Standard normal tensors from generators of its own on each device.

    On a CPU large tensors are drawn in parts, each from a stream of its own, since torch fills a tensor with random
    numbers on one core only.

    Args:
        seed: None takes fresh entropy from the operating system. A known seed makes the noise reproducible,
            and lets whoever knows it subtract the noise: for tests only.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(60) if seed is None else seed
        self._generators: dict[torch.device, list[torch.Generator]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, like: Tensor) -> Tensor:
        """N(0, I) in the shape, dtype and device of `like`."""
        if like.device not in self._generators:
            self._generators[like.device] = [
                torch.Generator(like.device).manual_seed(self._seed * STREAMS + stream) for stream in range(STREAMS)
            ]
        streams = self._generators[like.device]
        noise = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if noise.is_cpu and noise.numel() >= _LARGE:
            self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads())
            parts = noise.view(-1).tensor_split(STREAMS)
            list(self._pool.map(lambda part, stream: part.normal_(generator=stream), parts, streams))
        else:
            noise.normal_(generator=streams[0])
        return noise
