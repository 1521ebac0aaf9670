"""The source of everything in a fit that must stay secret: ChaCha20 (RFC 8439) under a 256-bit key; and the states of
the random number generators that training draws from, which it fills."""

import hashlib
import itertools
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators that a step on the device draws from."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    for of, to in zip((torch.set_rng_state, lambda to: torch.cuda.set_rng_state(to, device)), state, strict=False):
        of(to)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Meanwhile whatever is drawn leaves torch's generators as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, state)


def all_random_states(device: torch.device) -> tuple[Any, ...]:
    """Of torch, Python and NumPy."""
    return random_state(device), random.getstate(), np.random.get_state()


def set_all_random_states(device: torch.device, of_torch: tuple[Tensor, ...], of_python: Any, of_numpy: Any) -> None:
    set_random_state(device, of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


BLOCK = 64  # bytes that one value of the cipher's counter gives
_ZEROS = memoryview(bytes(2**20))


class KeyStream:
    """Random words that nobody without the key can predict, reconstruct or rule out.

    Every use takes a number of its own as the cipher's nonce, whatever round, group or device it is for, so that no
    part of the stream is ever used twice. The key, 32 bytes, by default from the operating system, is never written
    anywhere: whoever resumes a training draws another.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(32) if key is None else key
        self._numbers = itertools.count()

    @classmethod
    def known(cls, seed: int, purpose: str, rounds: int) -> "KeyStream":
        """A stream that whoever knows the seed can repeat, and its noise subtract: for tests. Another one for each
        purpose and each number of rounds that the ledger holds when the fit begins."""
        return cls(hashlib.sha256(f"{seed}/{purpose}/{rounds}".encode()).digest())

    def nonce(self) -> bytes:
        """A nonce [12 bytes] that this stream has not given before."""
        return next(self._numbers).to_bytes(12, "little")

    def fill(self, out: Tensor, nonce: bytes, first: int = 0) -> None:
        """Fills a contiguous CPU tensor from the block number `first` of a nonce on. Safe in several threads."""
        cipher = Cipher(algorithms.ChaCha20(self.key, first.to_bytes(4, "little") + nonce), None).encryptor()
        view = memoryview(out.numpy()).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            cipher.update_into(_ZEROS[: len(part)], part)

    def words(self, count: int) -> Tensor:
        """[count] independent uniform whole numbers in [0, 2^63)."""
        out = torch.empty(count, dtype=torch.int64)
        if count:
            self.fill(out, self.nonce())
        return out.bitwise_and_(2**63 - 1)

    def permutation(self, size: int) -> Tensor:
        """A uniform permutation of 0 … size-1, but for a probability of size²/2^64 that two words are equal."""
        return self.words(size).argsort()


@contextmanager
def own_randomness(device: torch.device, stream: KeyStream) -> Iterator[None]:
    """Meanwhile the random number generators go on from secret states of full size; afterwards they are as before.

    A record's loss may be random, as with dropout. That costs nothing as long as its random numbers are independent of
    all else and nobody knows them: the release is then a mixture of releases of which each is private.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        renew(device, stream)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def renew(device: torch.device, stream: KeyStream) -> None:
    """The generators go on from other states, that of a device too."""
    seed_everything(stream)
    if device.type == "cuda":
        torch.cuda.manual_seed(int(stream.words(1)))


def seed_everything(stream: KeyStream) -> None:
    """Fills the whole states of this process's generators: torch's own seed would be one of only 2^32."""
    state = torch.Generator().get_state()
    words = stream.words(2 * _MERSENNE)
    state[:8] = stream.words(1).view(torch.uint8)  # what the generator takes for its seed, so that to seed it shows
    state[_LEGACY : _LEGACY + 8 * _MERSENNE] = (words[:_MERSENNE] & 0xFFFFFFFF).view(torch.uint8)
    torch.set_rng_state(state)
    np.random.set_state(("MT19937", (words[_MERSENNE:] & 0xFFFFFFFF).numpy().astype(np.uint32), _MERSENNE, 0, 0.0))
    random.seed(stream.words(4).numpy().tobytes())


_MERSENNE, _LEGACY = 624, 24  # numbers of a Mersenne twister; bytes before them in torch's state
