"""The noise, from a key stream: Gaussian, correlated from round to round, or Laplace.

Two uniform words of 63 bits give two normal numbers (Box & Muller 1958), computed in float64 and rounded once, to the
type of what they are added to: too fine for float32 to show which values the method can take. The radius √(-2 log u)
reaches 9.4 standard deviations, with P(|N| > 8) right to 1e-4 of itself.

Correlated noise is y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0, that is C y = Z. For it past noise is remembered, (b-1)·d
numbers in float64, as secret as the key; they stay in the memory of the process, and a resumed job begins anew.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dpexp.privacy.noise.randomness import BLOCK, KeyStream

PAIRS = 2**17  # computed at once: of more, what they need leaves the cache; of fewer, threads wait for one another
_WORTH_THREADS = 2**15  # numbers; for fewer, beside a busy processor, threads would wait for milliseconds (measured)
_WORDS = BLOCK // 8
SMALL = 2**14  # numbers; tensors below that are done together


class GaussianNoise:
    """Adds independent normal noise, no number of which is ever drawn twice, from a stream, by default a fresh one."""

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
            from dpexp.privacy.noise.gaussian_cuda import add_normals

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


Bands = tuple[float, ...]


class Noisy(NamedTuple):
    """A sum that σ y_t is to be added to; its name is the same in every round."""

    name: str
    total: Tensor
    sigma: float
    bands: Bands


class CorrelatedNoise:
    """Adds σ y_t to each coordinate of sums that have bands, and independent normal noise to those that have one."""

    def __init__(self, gaussian: GaussianNoise) -> None:
        self._gaussian = gaussian
        self._past: dict[str, deque[Tensor]] = {}  # y_{t-1}, y_{t-2}, …

    def add_to(self, sums: Sequence[Noisy], divisor: float = 1.0) -> None:
        """Adds a round's noise to contiguous tensors and divides them, in place. To be called once a round."""
        self._gaussian.add_to([(one.total, one.sigma) for one in sums if len(one.bands) == 1], divisor)
        banded = [one for one in sums if len(one.bands) > 1]
        drawn = [torch.zeros(one.total.numel(), dtype=torch.float64, device=one.total.device) for one in banded]
        self._gaussian.add_to([(z, 1.0) for z in drawn])
        for one, z in zip(banded, drawn, strict=True):
            y = self._next(one.name, z, one.bands)
            one.total.copy_((y * one.sigma).view_as(one.total).add_(one.total).div_(divisor))

    def _next(self, name: str, z: Tensor, c: Bands) -> Tensor:
        """y_t, in the place of Z_t."""
        past = self._past.setdefault(name, deque(maxlen=len(c) - 1))
        for c_j, y in zip(c[1:], past, strict=False):
            z.sub_(y, alpha=c_j)
        past.appendleft(z.div_(c[0]))
        return z

    def __reduce__(self) -> NoReturn:
        raise TypeError("past noise is secret, and neither copied nor saved.")


def add_laplace(sums: Iterable[tuple[Tensor, float]], stream: KeyStream) -> None:
    """Adds independent noise of density e^(-|x|/b)/2b to each coordinate of tensors [d] in float64, in place, for pairs
    (tensor, b): -b log u with u of 62 random bits, which reaches 43 b, and the bit that is left for its sign."""
    for total, b in sums:
        words = stream.words(len(total))
        size = (words >> 1).double().add_(0.5).mul_(2.0**-62).log_().neg_()
        total.add_(size * (1 - 2 * (words & 1)), alpha=b)
