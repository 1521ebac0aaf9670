"""Secret random numbers: ChaCha20 (RFC 8439) under a 256-bit key, which also seeds the random number generators."""

import hashlib
import itertools
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators for a device."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    for of, to in zip((torch.set_rng_state, lambda to: torch.cuda.set_rng_state(to, device)), state, strict=False):
        of(to)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Restores the states of torch's generators afterwards."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, state)


def all_random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of torch's, Python's and NumPy's generators."""
    return random_state(device), random.getstate(), np.random.get_state()


def set_all_random_states(device: torch.device, of_torch: tuple[Tensor, ...], of_python: Any, of_numpy: Any) -> None:
    set_random_state(device, of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


BLOCK = 64  # bytes of the cipher's stream for each value of its counter
_ZEROS = memoryview(bytes(2**20))


class KeyStream:
    """Random words that cannot be predicted without the key.

    Every use has a nonce of its own, so that no part of the stream is used twice. The key, 32 bytes, by default from
    the operating system, is never saved: a resumed training has another one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(32) if key is None else key
        self._numbers = itertools.count()

    @classmethod
    def known(cls, seed: int, purpose: str, rounds: int) -> "KeyStream":
        """A reproducible stream, for tests: whoever knows the seed can subtract the noise.

        Args:
            purpose: what the stream is for.
            rounds: in the ledger when the fit begins.
        """
        return cls(hashlib.sha256(f"{seed}/{purpose}/{rounds}".encode()).digest())

    def nonce(self) -> bytes:
        """A new nonce [12 bytes]."""
        return next(self._numbers).to_bytes(12, "little")

    def fill(self, out: Tensor, nonce: bytes, first: int = 0) -> None:
        """Fills a contiguous CPU tensor from block `first` of a nonce on. Thread-safe."""
        cipher = Cipher(algorithms.ChaCha20(self.key, first.to_bytes(4, "little") + nonce), None).encryptor()
        view = memoryview(out.numpy()).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            cipher.update_into(_ZEROS[: len(part)], part)

    def words(self, count: int) -> Tensor:
        """[count] independent uniform integers in [0, 2^63)."""
        out = torch.empty(count, dtype=torch.int64)
        if count:
            self.fill(out, self.nonce())
        return out.bitwise_and_(2**63 - 1)

    def permutation(self, size: int) -> Tensor:
        """A permutation of 0 … size-1, uniform unless two words are equal, which has probability size²/2^64."""
        return self.words(size).argsort()


@dataclass(frozen=True)
class Keys:
    """The key streams of a fit, one for each purpose.

    Attributes:
        sampling: draws the samples; dealing: assigns their records to processes. All processes share both.
        noise: of the releases.
        records: of what is random in a record's loss, such as dropout; each process has its own.
    """

    sampling: KeyStream = field(default_factory=KeyStream)
    dealing: KeyStream = field(default_factory=KeyStream)
    noise: KeyStream = field(default_factory=KeyStream)
    records: KeyStream = field(default_factory=KeyStream)

    def make_known(self, seed: int, rounds: int, rank: int = 0) -> None:
        """Replaces the keys by reproducible ones, for tests (see `KeyStream.known`); `rank`: of the process."""
        own = "randomness" if rank == 0 else f"randomness of process {rank}"
        streams = {"sampling": self.sampling, "dealing": self.dealing, "noise": self.noise, own: self.records}
        for purpose, stream in streams.items():
            stream.key = KeyStream.known(seed, purpose, rounds).key


@contextmanager
def own_randomness(device: torch.device, stream: KeyStream) -> Iterator[None]:
    """Seeds the random number generators from the stream, and restores their states afterwards.

    A record's loss may be random, as with dropout. That does not change the guarantee as long as the random numbers are
    secret and independent of the data: the release is then a mixture of private releases.
    """
    states = all_random_states(device)
    try:
        reseed(device, stream)
        yield
    finally:
        set_all_random_states(device, *states)


def reseed(device: torch.device, stream: KeyStream) -> None:
    """Seeds the generators of this process and the device."""
    seed_everything(stream)
    if device.type == "cuda":
        torch.cuda.manual_seed(int(stream.words(1)))


def seed_everything(stream: KeyStream) -> None:
    """Fills the states of this process's generators; torch's own seeds would have only 32 bits."""
    state = torch.Generator().get_state()
    words = stream.words(2 * _MERSENNE)
    state[:8] = stream.words(1).view(torch.uint8)  # the seed that the generator reports
    state[_LEGACY : _LEGACY + 8 * _MERSENNE] = (words[:_MERSENNE] & 0xFFFFFFFF).view(torch.uint8)
    torch.set_rng_state(state)
    np.random.set_state(("MT19937", (words[_MERSENNE:] & 0xFFFFFFFF).numpy().astype(np.uint32), _MERSENNE, 0, 0.0))
    random.seed(stream.words(4).numpy().tobytes())


_MERSENNE, _LEGACY = 624, 24  # words of a Mersenne twister's state; bytes before them in torch's
