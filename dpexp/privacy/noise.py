"""The Gaussian noise, from a key stream.

Two uniform words of 63 bits give two normal numbers (Box & Muller 1958), computed in float64 and rounded once, to the
type of what they are added to. So fine are they that float32, which leaves, does not show which values the method can
take and which it cannot; and the radius √(-2 log u) reaches 9.4 standard deviations, with P(|N| > 8) right to 1e-4
of itself.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from dpexp.privacy.keystream import BLOCK, KeyStream

PAIRS = 2**17  # computed at once: of more, what they need leaves the cache; of fewer, threads wait for one another
_WORTH_THREADS = 2**15  # numbers; for fewer, beside a busy processor, threads would wait for milliseconds (measured)
_WORDS = BLOCK // 8
SMALL = 2**14  # numbers; tensors below that are done together


class GaussianNoise:
    """Adds independent normal noise, no number of which is ever drawn twice.

    Args:
        stream: where it comes from; by default one with a fresh key.
    """

    def __init__(self, stream: KeyStream | None = None) -> None:
        self.stream = stream or KeyStream()
        self._box_muller = BoxMuller(_WORDS)

    def add_to(self, sums: Iterable[tuple[Tensor, float]], divisor: float = 1.0) -> None:
        """Adds N(0, σ²) to each coordinate of contiguous tensors and divides them, in place, for pairs (tensor, σ)."""
        small: dict[torch.device, list[tuple[Tensor, float]]] = {}
        for total, sigma in sums:
            if total.numel() == 0:
                continue
            if total.numel() < SMALL:
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
        most = min(PAIRS, whole_blocks(len(total)))
        if most > self._box_muller.most:
            self._box_muller = BoxMuller(most)
        with threads(1 if len(total) < _WORTH_THREADS else torch.get_num_threads()):
            for k, part in enumerate(total.split(2 * PAIRS)):
                words = self._box_muller.words(min(PAIRS, whole_blocks(len(part))))
                self.stream.fill(words, nonce, first=k * 2 * PAIRS // _WORDS)
                noise, room = (t[: len(part)] for t in self._box_muller.normal(words, sigma / divisor))
                part.copy_(torch.add(noise, room.copy_(part), alpha=1 / divisor, out=room))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Of PyTorch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole_blocks(numbers: int) -> int:
    """Of how many pairs so many numbers are made: of as many as whole blocks of the stream give."""
    return math.ceil(numbers / (2 * _WORDS)) * _WORDS


class BoxMuller:
    """Room for as many pairs of numbers."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._words = torch.empty(2 * most, dtype=torch.int64)
        self._uniform, self._normal = (torch.empty(2 * most, dtype=torch.float64) for _ in range(2))

    def words(self, pairs: int) -> Tensor:
        """[2, pairs], to be filled."""
        return self._words[: 2 * pairs].view(2, pairs)

    def normal(self, words: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """N(0, σ²) [2·pairs] from uniform words of 64 bits, which are overwritten, and as much room besides."""
        words[0].bitwise_and_(2**63 - 1)
        uniform, normal = (t[: words.numel()] for t in (self._uniform, self._normal))
        radius, angle = uniform.view_as(words).copy_(words)
        radius.add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_().mul_(sigma)
        angle.mul_(math.pi * 2.0**-63)  # in [-π, π)
        cos, sin = normal.view_as(words)
        torch.cos(angle, out=cos).mul_(radius)
        torch.sin(angle, out=sin).mul_(radius)
        return normal, uniform
