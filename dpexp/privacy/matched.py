"""What an attacker makes of the releases that canaries are in, where noise is correlated and records are not in any
round.

A canary that is in round t adds c_i times as much to row t+i of C(X/σ̃), i < b, whose noise is independent, standard
normal and, for rounds at least b apart, another's. So Σ_i c_i (C(X/σ̃))_{t+i} is all that there is to know of it, and
these, weighted by how much it may add, are added up over the rounds in which it might have been. With one band and one
part, that is the sum over rounds.
"""

import numpy as np
from numpy.typing import NDArray

from dpexp.accounting.renyi import Array

PARITIES = 2  # of a record's turns, of which what is released is kept apart


class Matched:
    """Of one group's releases in D coordinates.

    Attributes:
        sums, expected: [PARITIES, D], what was found, and what an included canary adds to it on average.
    """

    def __init__(self, coordinates: int) -> None:
        self._released: dict[int, Array] = {}
        self._rounds: dict[int, tuple[float, NDArray[np.bool_], NDArray[np.int64]]] = {}
        self._turns = np.zeros(coordinates, dtype=np.int64)
        self.sums, self.expected = np.zeros((2, PARITIES, coordinates))

    def add(
        self, t: int, released: Array, weight: float, sign: int, bands: tuple[float, ...], there: NDArray[np.bool_]
    ) -> None:
        """Takes round t.

        Args:
            released: [D], in units of σ̃; weight: what an included canary adds to it on average, but for its sign.
            there: [D], whether the canary might have been in the round.
        """
        self._released[t], self._rounds[t] = released, (sign * weight, there, self._turns % PARITIES)
        self._turns = self._turns + there
        row = sum(c * self._released[t - i] for i, c in enumerate(bands) if t - i in self._released)
        for i, c in enumerate(bands):
            if t - i not in self._rounds:
                continue
            adds, those, parity = self._rounds[t - i]
            for p in range(PARITIES):
                own = those & (parity == p)
                self.sums[p, own] += adds * c * np.broadcast_to(row, own.shape)[own]
                self.expected[p, own] += (adds * c) ** 2
        for past in (self._released, self._rounds):
            past.pop(t - len(bands) + 1, None)
