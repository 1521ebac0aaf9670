"""The Gaussian noise, from a key stream.

Two uniform words of 63 bits give two normal numbers (Box & Muller 1958), computed in float64 and rounded once, to the
type of what they are added to. So fine are they that float32, which leaves, does not show which values the method can
take and which it cannot; and the radius √(-2 log u) reaches 9.4 standard deviations, with P(|N| > 8) right to 1e-4
of itself.
"""

import math
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from dpexp.privacy.keystream import BLOCK, KeyStream

PAIRS = 2**16  # computed at once: what they need stays in the cache
_WORDS = BLOCK // 8
_SMALL = 2**14  # numbers; tensors below that are done together


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
        most = min(PAIRS, whole_blocks(len(total)))
        buffers = [torch.empty(2 * most, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.float64)]
        for k, part in enumerate(total.split(2 * PAIRS)):
            pairs = min(PAIRS, whole_blocks(len(part)))
            words, uniform, normal = (buffer[: 2 * pairs].view(2, pairs) for buffer in buffers)
            self.stream.fill(words, nonce, first=k * 2 * PAIRS // _WORDS)
            box_muller(words, sigma, uniform, normal)
            in_float64 = uniform.view(-1)[: len(part)]
            part.copy_(in_float64.copy_(part).add_(normal.view(-1)[: len(part)]).div_(divisor))


def whole_blocks(numbers: int) -> int:
    """Of how many pairs so many numbers are made: of as many as whole blocks of the stream give."""
    return math.ceil(numbers / (2 * _WORDS)) * _WORDS


def box_muller(words: Tensor, sigma: float, uniform: Tensor, normal: Tensor) -> None:
    """Writes N(0, σ²) to `normal` [2, n], from uniform `words` [2, n] of 64 bits; overwrites all it is given."""
    words[0].bitwise_and_(2**63 - 1)
    uniform.copy_(words)
    radius, angle = uniform[0], uniform[1]
    radius.add_(0.5).mul_(2.0**-63).log_().mul_(-2 * sigma**2).sqrt_()
    angle.mul_(math.pi * 2.0**-63)  # in [-π, π)
    torch.cos(angle, out=normal[0]).mul_(radius)
    torch.sin(angle, out=normal[1]).mul_(radius)
