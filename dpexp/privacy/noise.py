"""The Gaussian noise, from a key stream.

Two uniform words of 63 bits give two normal numbers (Box & Muller 1958), computed in float64 and rounded once, to the
type of what they are added to. So fine are they that float32, which leaves, does not show which values the method can
take and which it cannot; and the radius √(-2 log u) reaches 9.4 standard deviations, with P(|N| > 8) right to 1e-4
of itself.
"""

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.keystream import BLOCK, KeyStream

# Computed at once, by one thread: what they need stays in the cache. Torch would set all its threads to work for more
# than 2^15 numbers (for more than 2^11, where it computes functions), only for them to wait for one another each time.
PAIRS = 2**14
_FUNCTION = 2**11
_WORDS = BLOCK // 8
_SMALL = 2**14  # numbers; tensors below that are done together
_WORTH_A_THREAD = 4  # parts


class GaussianNoise:
    """Adds independent normal noise, no number of which is ever drawn twice.

    Args:
        stream: where it comes from; by default one with a fresh key.
    """

    def __init__(self, stream: KeyStream | None = None) -> None:
        self.stream = stream or KeyStream()

    def add_to(self, sums: Iterable[tuple[Tensor, float]], divisor: float = 1.0) -> None:
        """Adds N(0, σ²) to each coordinate of contiguous tensors and divides them, in place, for pairs (tensor, σ)."""
        small: dict[torch.device, list[tuple[Tensor, float]]] = {}
        for total, sigma in sums:
            if total.numel() == 0:
                continue
            if total.numel() < _SMALL:
                small.setdefault(total.device, []).append((total, sigma))
            else:
                self._add(total.view(-1), sigma, divisor)
        for device, some in small.items():
            sizes = [total.numel() for total, _ in some]
            drawn = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
            self._add(drawn, 1.0, 1.0)
            for (total, sigma), noise in zip(some, drawn.split(sizes), strict=True):
                total.copy_(noise.view_as(total).mul_(sigma).add_(total).div_(divisor))

    def _add(self, total: Tensor, sigma: float, divisor: float) -> None:
        if total.device.type == "cpu":
            self._add_on_cpu(total, sigma, divisor)
        elif total.device.type == "cuda" and find_spec("triton") is not None:
            from dpexp.privacy.noise_cuda import add_normals

            add_normals(total, sigma, divisor, self.stream, PAIRS)
        else:
            drawn = torch.zeros(total.shape, dtype=torch.float64)
            self._add_on_cpu(drawn, sigma, 1.0)
            total.copy_(drawn.to(total.device).add_(total).div_(divisor))

    def _add_on_cpu(self, total: Tensor, sigma: float, divisor: float) -> None:
        nonce = self.stream.nonce()
        parts = list(enumerate(total.split(2 * PAIRS)))
        threads = min(torch.get_num_threads(), len(parts) // _WORTH_A_THREAD)
        if threads < 2:
            return self._add_parts(parts, nonce, sigma, divisor)
        with ThreadPoolExecutor(threads) as pool:
            shares = [parts[k::threads] for k in range(threads)]
            list(pool.map(lambda share: self._add_parts(share, nonce, sigma, divisor), shares))

    def _add_parts(self, parts: list[tuple[int, Tensor]], nonce: bytes, sigma: float, divisor: float) -> None:
        block = BoxMuller(min(PAIRS, whole_blocks(len(parts[0][1]))))
        for k, part in parts:
            pairs = min(PAIRS, whole_blocks(len(part)))
            if pairs != block.pairs:
                block = BoxMuller(pairs)
            self.stream.fill(block.words, nonce, first=k * 2 * PAIRS // _WORDS)
            noise = block.normal(sigma / divisor)[: len(part)]
            in_float64 = block.uniform.view(-1)[: len(part)].copy_(part)
            part.copy_(torch.add(noise, in_float64, alpha=1 / divisor, out=in_float64))


def whole_blocks(numbers: int) -> int:
    """Of how many pairs so many numbers are made: of as many as whole blocks of the stream give."""
    return math.ceil(numbers / (2 * _WORDS)) * _WORDS


class BoxMuller:
    """Room for as many pairs of numbers. It is cut for torch once: cutting takes longer than its functions."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.words = torch.empty(2, pairs, dtype=torch.int64)
        self.uniform, self._normal = (torch.empty(2, pairs, dtype=torch.float64) for _ in range(2))
        angle, cos, sin = self.uniform[1], *self._normal
        self._cuts = list(zip(*(part.split(_FUNCTION) for part in (angle, cos, sin)), strict=True))

    def normal(self, sigma: float) -> Tensor:
        """N(0, σ²) [2·pairs], from uniform `words` of 64 bits; overwrites all that there is."""
        self.words[0].bitwise_and_(2**63 - 1)
        self.uniform.copy_(self.words)
        radius, angle = self.uniform[0], self.uniform[1]
        numbers = radius.add_(0.5).mul_(2.0**-63).numpy()
        np.log(numbers, out=numbers)
        radius.mul_(-2 * sigma**2)
        np.sqrt(numbers, out=numbers)
        angle.mul_(math.pi * 2.0**-63)  # in [-π, π)
        for a, cos, sin in self._cuts:
            torch.cos(a, out=cos)
            torch.sin(a, out=sin)
        return self._normal.mul_(radius).view(-1)
