"""Rényi moments of rounds and of queries that are answered once, side by side."""

import numpy as np
from numpy.typing import NDArray

from dpexp.accounting.laplace import laplace_moments
from dpexp.accounting.renyi import Array, log_moments

Mask = NDArray[np.bool_]


def moments_of(z: Array, q: Array, alpha: float, laplace: Mask | None = None) -> Array:
    """log E[e^(αL)] under Q, for rounds (z, q) [R] and one real order α.

    Args:
        laplace: [R], those that are Laplace queries of all records, which are 1/z-DP.
    """
    if laplace is None or not laplace.any():
        return log_moments(z, q, alpha)
    result = np.empty(len(z))
    result[laplace] = laplace_moments(1 / z[laplace], alpha)
    result[~laplace] = log_moments(z[~laplace], q[~laplace], alpha)
    return result
