"""Gaussian, correlated and Laplace noise from a key stream.

Two uniform words of 63 bits give two normal numbers (Box & Muller 1958). They are computed in float64 and rounded once,
to the dtype of the sum, so finely that float32 does not show which values the method can produce. The radius
√(-2 log u) reaches 9.4 standard deviations, and P(|N| > 8) has a relative error of 1e-4.

Correlated noise is y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0, that is C y = Z. It needs the past noise, (b-1)·d numbers in
float64, which are as secret as the key: they stay in the memory of the process, and a resumed job starts without them.
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

PAIRS = 2**17  # computed at once; more do not fit into the cache, and with fewer threads wait for one another
_MULTITHREADED = 2**15  # entries; with fewer, threads on a busy processor would wait for milliseconds (measured)
_WORDS = BLOCK // 8
SMALL = 2**14  # entries; smaller tensors get their noise from one draw


class GaussianNoise:
    """Adds independent normal noise from a key stream, by default one with a fresh key."""

    def __init__(self, stream: KeyStream | None = None) -> None:
        self.stream = stream or KeyStream()
        self._box_muller = BoxMuller(_WORDS)

    def add_to(self, sums: Iterable[tuple[Tensor, float]], divisor: float = 1.0) -> None:
        """Adds N(0, σ²) to each entry of contiguous tensors and divides them, in place, for pairs (tensor, σ)."""
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
        pairs = min(PAIRS, pairs_for(len(total)))
        if pairs > self._box_muller.max_pairs:
            self._box_muller = BoxMuller(pairs)
        with threads(1 if len(total) < _MULTITHREADED else torch.get_num_threads()):
            for k, part in enumerate(total.split(2 * PAIRS)):
                words = self._box_muller.words(min(PAIRS, pairs_for(len(part))))
                self.stream.fill(words, nonce, first=k * 2 * PAIRS // _WORDS)
                noise, buffer = (t[: len(part)] for t in self._box_muller.normal(words, sigma / divisor))
                part.copy_(torch.add(noise, buffer.copy_(part), alpha=1 / divisor, out=buffer))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of PyTorch's threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pairs_for(numbers: int) -> int:
    """The number of pairs that are computed for so many numbers: those of whole blocks of the stream."""
    return math.ceil(numbers / (2 * _WORDS)) * _WORDS


class BoxMuller:
    """Buffers for normal numbers, up to `max_pairs` pairs at once."""

    def __init__(self, max_pairs: int) -> None:
        self.max_pairs = max_pairs
        self._words = torch.empty(2 * max_pairs, dtype=torch.int64)
        self._uniform, self._normal = (torch.empty(2 * max_pairs, dtype=torch.float64) for _ in range(2))

    def words(self, pairs: int) -> Tensor:
        """The buffer [2, pairs] for uniform words."""
        return self._words[: 2 * pairs].view(2, pairs)

    def normal(self, words: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """N(0, σ²) [2·pairs] from uniform words of 64 bits, which are overwritten; and a free buffer of that size."""
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
    """A sum that gets the noise σ y_t; its name is the same in every round."""

    name: str
    total: Tensor
    sigma: float
    bands: Bands


class CorrelatedNoise:
    """Adds σ y_t to sums with several bands, and independent normal noise to sums with one."""

    def __init__(self, gaussian: GaussianNoise) -> None:
        self._gaussian = gaussian
        self._past: dict[str, deque[Tensor]] = {}  # y_{t-1}, y_{t-2}, …

    def add_to(self, sums: Sequence[Noisy], divisor: float = 1.0) -> None:
        """Adds a round's noise to contiguous tensors and divides them, in place. Call it once a round."""
        self._gaussian.add_to([(one.total, one.sigma) for one in sums if len(one.bands) == 1], divisor)
        banded = [one for one in sums if len(one.bands) > 1]
        if not banded:
            return
        drawn = [torch.zeros(one.total.numel(), dtype=torch.float64, device=one.total.device) for one in banded]
        self._gaussian.add_to([(z, 1.0) for z in drawn])
        for one, z in zip(banded, drawn, strict=True):
            y = self._next(one.name, z, one.bands)
            one.total.copy_((y * one.sigma).view_as(one.total).add_(one.total).div_(divisor))

    def _next(self, name: str, z: Tensor, c: Bands) -> Tensor:
        """y_t from Z_t, in place."""
        past = self._past.setdefault(name, deque(maxlen=len(c) - 1))
        for c_j, y in zip(c[1:], past, strict=False):
            z.sub_(y, alpha=c_j)
        past.appendleft(z.div_(c[0]))
        return z

    def __reduce__(self) -> NoReturn:
        raise TypeError("past noise is secret; it must not be copied or saved.")


def add_laplace(sums: Iterable[tuple[Tensor, float]], stream: KeyStream) -> None:
    """Adds Laplace noise of density e^(-|x|/b)/2b to float64 tensors [d], in place, for pairs (tensor, b).

    The size -b log u is from 62 random bits, which reaches 43 b; another bit is the sign.
    """
    for total, b in sums:
        words = stream.words(len(total))
        size = (words >> 1).double().add_(0.5).mul_(2.0**-62).log_().neg_()
        total.add_(size * (1 - 2 * (words & 1)), alpha=b)
