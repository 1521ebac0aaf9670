"""The private release of a table's size and ranges, which fills in its schema."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.preprocessing_methods import Preprocessing


class TableRanges(Preprocessing):
    """The number of rows and the ranges of the numbers of a table, released before a job by `python -m dpexp schema`.

    In a job, which uses the released facts, it accounts for that release, and releases nothing again.

    A row adds 1 to the count, and 1 to a bin of each number's histogram, of bins between 0 and ±2^k: a range is that of
    the bins with counts above four standard deviations of their noise, which no row needs to reach.

    Args:
        ranges: number of numeric columns K. Adding or removing a row moves the released vector by √(1 + K) in L2 norm,
            and replacing one moves two bins of each histogram, by √(2K).
    """

    _EDGES = (*(-(2.0**k) for k in range(40, -11, -1)), 0.0, *(2.0**k for k in range(-10, 41)))

    def __init__(self, ranges: int, **budget: float | None) -> None:
        super().__init__(**budget)
        self.S, self.replace_sensitivity = math.sqrt(1 + ranges), math.sqrt(2 * max(ranges, 1))
        self.d = 1 + ranges * (len(self._EDGES) - 1)

    def sums_of(self, columns: Sequence[np.ndarray], count: int) -> Tensor:
        """The vector of `count` rows, of whose columns NaN and infinite values are in no bin."""
        counts = [np.histogram(x[np.isfinite(x)], self._EDGES)[0] for x in columns]
        return torch.from_numpy(np.concatenate([[count], *counts]).astype(np.float64))

    def ranges(self, noisy: Tensor, sigma: float) -> list[tuple[float, float]]:
        """(min, max) of each column; (0, 1) where no count exceeds the noise."""
        found = []
        for counts in noisy[1:].view(-1, len(self._EDGES) - 1):
            bins = (counts > 4 * sigma).nonzero().flatten().tolist() or [len(counts) // 2]
            found.append((self._EDGES[bins[0]], self._EDGES[bins[-1] + 1]))
        return found

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(self.d, dtype=torch.float64)

    def fit(self, noisy: Tensor, n: int) -> None:
        pass
