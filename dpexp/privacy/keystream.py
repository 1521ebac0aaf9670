"""The source of everything in a fit that must stay secret: ChaCha20 (RFC 8439) under a 256-bit key."""

import hashlib
import itertools
import secrets

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

BLOCK = 64  # bytes that one value of the cipher's counter gives
_ZEROS = memoryview(bytes(2**20))


class KeyStream:
    """Random words that nobody without the key can predict, reconstruct or rule out.

    Every use takes a number of its own as the cipher's nonce, whatever round, group or device it is for, so that no
    part of the stream is ever used twice. The key is never written anywhere: whoever resumes a training draws another.

    Args:
        key: 32 bytes; by default from the operating system.
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
