"""True Poisson sampling, and its delivery in physical chunks."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from dpexp.accounting.ledger import SamplingEvent
from dpexp.errors import ConfigError


@dataclass(frozen=True)
class Poisson:
    """Each record enters a sample independently with probability q (paper, section 5: i.i.d. samples)."""

    q: float

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise ConfigError(f"sampling.q={self.q} must lie in (0, 1].")

    def event(self, n: int) -> SamplingEvent:
        return SamplingEvent("poisson", self.q, n)

    def rounds(self, epochs: float) -> int:
        """T = ⌈E/q⌉, where a quotient within rounding error of a whole number counts as that number."""
        if not (math.isfinite(epochs) and epochs > 0):
            raise ConfigError(f"sampling.epochs={epochs} must be a finite number above 0.")
        rounds = epochs / self.q
        whole = round(rounds)
        return whole if math.isclose(rounds, whole, rel_tol=1e-9) else math.ceil(rounds)

    def draw(self, size: int, generator: torch.Generator) -> list[int]:
        """Indices of one sample. Uniforms are float64: float32's 2^-24 steps would bias a small q."""
        uniforms = torch.rand(size, generator=generator, dtype=torch.float64)
        return torch.nonzero(uniforms < self.q).flatten().tolist()


@dataclass(frozen=True)
class Chunk:
    """One physical part of a sample: `size` rows, first and last of its round or not. The rows of an empty
    sample's only chunk are a stand-in that counts for nothing."""

    size: int
    first: bool
    last: bool
    empty: bool


class RoundSampler(Sampler[list[int]]):
    """A batch sampler that draws one sample a round and yields it in chunks of at most `physical_batch`.

    It is drawn in the main process, so loader workers change nothing. Every chunk yielded is also queued in
    `pending`, from which whoever consumes the loader's batches takes them in the same order, however far the
    loader reads ahead. One iteration is one epoch: the rounds up to the next multiple of 1/q.
    """

    def __init__(
        self, policy: Poisson, size: int, rounds: int, physical_batch: int, generator: torch.Generator
    ) -> None:
        if size < 1:
            raise ConfigError("data: the training set is empty.")
        self.policy = policy
        self.size = size
        self.rounds = rounds
        self.physical_batch = physical_batch
        self.generator = generator
        self.completed = 0
        self.pending: deque[Chunk] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        pending: deque[Chunk] = deque()
        self.pending = pending
        for _ in range(self._epoch_end() - self.completed):
            sample = self.policy.draw(self.size, self.generator)
            rows = sample or [0]
            for start in range(0, len(rows), self.physical_batch):
                chunk = rows[start : start + self.physical_batch]
                pending.append(Chunk(len(chunk), start == 0, start + self.physical_batch >= len(rows), not sample))
                yield chunk

    def _epoch_end(self) -> int:
        """The round at which the epoch that is under way ends; rounds are never lost between epochs."""
        epoch = max(1, math.floor(self.completed * self.policy.q))
        while self.policy.rounds(epoch) <= self.completed:
            epoch += 1
        return min(self.policy.rounds(epoch), self.rounds)
