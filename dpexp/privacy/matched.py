"""What an attacker makes of the releases that canaries are in, where noise is correlated and each record has its turn.

A canary that is in round t adds c_i times as much to row t+i of C(X/σ̃), i < b, whose noise is independent, standard
normal and, for different rounds of its turn, another's. So Σ_i c_i (C(X/σ̃))_{t+i} is all that there is to know of it,
and these, weighted by how much it may add, are added up over the rounds of its turn. With one band and one part, that
is the sum over rounds.
"""

import numpy as np
from numpy.typing import NDArray

from dpexp.accounting.renyi import Array

PARITIES = 2  # of a record's turns, of which what is released is kept apart


class Matched:
    """Of one group's releases in D coordinates.

    Args:
        turn: [D], the part of the canary in each; parts: how many there are.

    Attributes:
        sums, expected: [PARITIES, D], what was found, and what an included canary adds to it on average.
    """

    def __init__(self, turn: NDArray[np.int64], parts: int) -> None:
        self._turn, self._parts = turn, parts
        self._released: dict[int, Array] = {}
        self._weights: dict[int, float] = {}
        self.sums, self.expected = np.zeros((2, PARITIES, len(turn)))

    def add(self, t: int, released: Array, weight: float, sign: int, bands: tuple[float, ...]) -> None:
        """Takes round t.

        Args:
            released: [D], in units of σ̃; weight: what an included canary adds to it on average, but for its sign.
        """
        self._released[t], self._weights[t] = released, sign * weight
        row = sum(c * self._released[t - i] for i, c in enumerate(bands) if t - i in self._released)
        since = (t - self._turn) % self._parts
        for i, c in enumerate(bands[: self._parts]):
            if t - i not in self._weights:
                continue
            those = since == i
            parity = (t - i) // self._parts % PARITIES
            self.sums[parity, those] += self._weights[t - i] * c * np.broadcast_to(row, those.shape)[those]
            self.expected[parity, those] += (self._weights[t - i] * c) ** 2
        self._released.pop(t - len(bands) + 1, None)
