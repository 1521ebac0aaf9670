"""The bands c of correlated noise, ‖c‖ = 1: y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0, that is C y = Z.

The optimizer is linear in the noise: it adds A C⁻¹Z to the weights, where A has prefix sums, with momentum β:
a_k = 1 + β + … + β^k. The mean squared error is ‖A C⁻¹‖_F²/T = Σ_k (T-k) m_k²/T with the power series
m(x) = a(x)/c(x), since Toeplitz matrices multiply as their series do (McKenna 2024, arXiv 2405.15913, section 4).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from dpexp.accounting.composition import Array

Plan = TypeVar("Plan")
_LOG_OVERFLOW = 1e3  # above the logarithm of any float, but not so far above that line searches fail
_MAX_LAG = 2**13  # rounds over which d_k² is summed; beyond the bands it decays quickly


def coefficients(kind: str, b: int, rounds: int, momentum: float) -> tuple[float, ...]:
    """c of b bands, for T rounds. `kind`: `optimal` or `sqrt`."""
    b = min(b, rounds)
    return square_root(b, momentum) if kind == "sqrt" else optimal(b, rounds, momentum)


def error(c: tuple[float, ...], rounds: int, momentum: float = 0.0) -> float:
    """‖A C⁻¹‖_F/√T: the root mean square over the rounds of the noise in the weights, at σ̃ = 1."""
    m = lfilter([1.0], c, _workload(rounds, momentum))
    return math.sqrt(float(np.dot(rounds - np.arange(rounds), m**2)) / rounds)


def candidates(q: float, rounds: int, partitions: int | None = None) -> Iterator[int]:
    """The numbers of bands to try: powers of two with qb ≤ 1, up to the number of rounds or partitions."""
    b = 1
    while b <= min(rounds, partitions or rounds) and q * b <= 1 + 1e-9:
        yield b
        b *= 2


def least_error(plans: Iterable[tuple[float, Plan]]) -> Plan:
    """The plan with the least error, among those until the error rises twice in a row.

    With more bands the accumulated noise shrinks, but sampling amplifies privacy less.
    """
    tried: list[tuple[float, Plan]] = []
    for plan in plans:
        tried.append(plan)
        if len(tried) > 2 and tried[-1][0] > tried[-2][0] > tried[-3][0]:
            break
    return min(tried, key=lambda plan: plan[0])[1]


def square_root(b: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The first b coefficients of √a(x), scaled to ‖c‖ = 1 (Kalinin & Lampert 2024, arXiv 2405.13763, theorem 1).

    √a(x) = r(x) r(βx) with r(x) = (1-x)^(-1/2), whose coefficients are r_k = r_{k-1} (2k-1)/2k.
    """
    k = np.arange(1, b)
    r = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    return _normalised(np.convolve(r, r * momentum ** np.arange(b))[:b])


@lru_cache(maxsize=64)
def optimal(b: int, rounds: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The c that minimises ‖A C⁻¹‖_F for T rounds (McKenna 2024, section 4.2)."""
    start = np.array(square_root(b, momentum))
    if b == 1:
        return (1.0,)
    with np.errstate(all="ignore"):  # a line search may overflow
        found = minimize(
            lambda u: _log_error(u, rounds, momentum), start[1:] / start[0], jac=True, method="L-BFGS-B",
            options={"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-9},
        )  # fmt: skip
    return _normalised(np.concatenate([[1.0], found.x]))


def inverse(c: tuple[float, ...], length: int) -> Array:
    """d = 1/c, the first column of C⁻¹ [length]."""
    return lfilter([1.0], c, np.eye(1, length)[0])


def max_noise_std(sigma: float, c: Sequence[float]) -> float:
    """The largest standard deviation of the noise σ̃ y_t: σ̃ if it is independent, σ̃ √Σ_k d_k² if it is correlated."""
    return sigma * math.sqrt(np.sum(inverse(tuple(c), _MAX_LAG) ** 2)) if len(c) > 1 else sigma


def _workload(rounds: int, momentum: float) -> Array:
    return lfilter([1.0], [1.0, -momentum], np.ones(rounds))


def _log_error(u: Array, rounds: int, momentum: float) -> tuple[float, Array]:
    """log ‖c‖²‖A C⁻¹‖_F² of c = (1, u), which does not depend on the scale of c, and its gradient.

    Since dm/dc_j = -x^j m/c, the gradient by c_j is -Σ_k h_k m_{k-j}, where h is g filtered backwards by 1/c, and
    g_k = 2(T-k) m_k.
    """
    c = np.concatenate([[1.0], u])
    weights = rounds - np.arange(rounds)
    m = lfilter([1.0], c, _workload(rounds, momentum))
    total = float(np.dot(weights, m**2))
    if not math.isfinite(total):
        return _LOG_OVERFLOW, np.zeros_like(u)
    h = lfilter([1.0], c, (2 * weights * m)[::-1])[::-1]
    slopes = -np.array([np.dot(h[j:], m[: rounds - j]) for j in range(1, len(c))])
    norm = float(np.dot(c, c))
    return math.log(norm) + math.log(total), 2 * u / norm + slopes / total


def _normalised(c: Array) -> tuple[float, ...]:
    """c scaled to ‖c‖ = 1, less what rounding may add."""
    return tuple((c / np.linalg.norm(c) * (1 - 2.0**-50)).tolist()) if len(c) > 1 else (1.0,)
