"""dp-accounting's private interface, as far as dpexp uses it: here and nowhere else."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting import rdp

Array = np.ndarray[Any, Any]


def repeated_and_selected(orders: Sequence[float], curve: Array, mean: float, shape: float) -> Array:
    """Renyi DP of releasing the best of a random number of runs; the public event takes no whole curve of one run."""
    return rdp.rdp_privacy_accountant._compute_rdp_repeat_and_select(orders, curve, mean, shape)
