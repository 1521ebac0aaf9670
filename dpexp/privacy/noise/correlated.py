"""The bands of correlated noise: c with ‖c‖ = 1, for y_t = (Z_t - Σ_{j>=1} c_j y_{t-j})/c_0, i.e. C y = Z.

What training does with the noise is linear: A C⁻¹Z, where A has prefix sums, with the optimizer's momentum β:
a_k = 1 + β + … + β^k. Its mean squared size is ‖A C⁻¹‖_F²/T = Σ_k (T-k) m_k²/T, with the power series
m(x) = a(x)/c(x), since Toeplitz matrices multiply as their series do (McKenna 2024, arXiv 2405.15913, section 4).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from scipy.optimize import minimize
from scipy.signal import correlate, lfilter

from dpexp.accounting.rdp import Array

Plan = TypeVar("Plan")
_OVERFLOWN = 1e3  # above the logarithm of any number; were it far above, line searches would lose their way
_LONGEST = 2**13  # rounds over which noise is correlated; beyond the bands correlations fall off quickly


def coefficients(kind: str, b: int, rounds: int, momentum: float) -> tuple[float, ...]:
    """c of b bands, for T rounds. `kind`: `optimal` or `sqrt`."""
    b = min(b, rounds)
    return square_root(b, momentum) if kind == "sqrt" else optimal(b, rounds, momentum)


def error(c: tuple[float, ...], rounds: int, momentum: float = 0.0) -> float:
    """‖A C⁻¹‖_F/√T: how large the noise of a round's weights is, in root mean square over the rounds, at σ̃ = 1."""
    m = lfilter([1.0], c, _workload(rounds, momentum))
    return math.sqrt(float(np.dot(rounds - np.arange(rounds), m**2)) / rounds)


def candidates(q: float, rounds: int, parts: int | None = None) -> Iterator[int]:
    """Powers of two with qb ≤ 1, and no more than there are rounds, or parts."""
    b = 1
    while b <= min(rounds, parts or rounds) and q * b <= 1 + 1e-9:
        yield b
        b *= 2


def least(errors: Iterable[tuple[float, Plan]]) -> Plan:
    """What has the least error, among those until two in a row are worse than what they follow: with b falls what the
    noise adds up to, while less and less is amplified by sampling."""
    tried: list[tuple[float, Plan]] = []
    for one in errors:
        tried.append(one)
        if len(tried) > 2 and tried[-1][0] > tried[-2][0] > tried[-3][0]:
            break
    return min(tried, key=lambda one: one[0])[1]


def square_root(b: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The first b coefficients of √a(x), scaled to ‖c‖ = 1: of r(x) r(βx) with r(x) = (1-x)^(-1/2), of which
    r_k = r_{k-1} (2k-1)/2k (Kalinin & Lampert 2024, arXiv 2405.13763, theorem 1)."""
    k = np.arange(1, b)
    r = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    return _normal(np.convolve(r, r * momentum ** np.arange(b))[:b])


@lru_cache(maxsize=64)
def optimal(b: int, rounds: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The c that minimises ‖A C⁻¹‖_F for T rounds (McKenna 2024, section 4.2)."""
    begin = np.array(square_root(b, momentum))
    if b == 1:
        return (1.0,)
    with np.errstate(all="ignore"):  # of what a line search tries
        found = minimize(
            lambda u: _log_error(u, rounds, momentum), begin[1:] / begin[0], jac=True, method="L-BFGS-B",
            options={"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-9},
        )  # fmt: skip
    return _normal(np.concatenate([[1.0], found.x]))


def inverse(c: tuple[float, ...], length: int) -> Array:
    """d = 1/c, the first column of C⁻¹ [length]."""
    return lfilter([1.0], c, np.eye(1, length)[0])


@lru_cache(maxsize=64)
def spread(c: tuple[float, ...], rounds: int) -> Array:
    """The standard deviation of y_t, t < rounds: √Σ_{k<=t} d_k²."""
    return np.sqrt(np.cumsum(inverse(c, rounds) ** 2))


def deviation(sigma: float, c: Sequence[float]) -> float:
    """Of the noise σ̃ y_t, at its largest: σ̃ if it is independent, and more if it is correlated."""
    return sigma * float(spread(tuple(c), _LONGEST)[-1]) if len(c) > 1 else sigma


@lru_cache(maxsize=64)
def ties(c: tuple[float, ...], rounds: int) -> tuple[float, float]:
    """Σ_k ρ_k² and Σ_k |ρ_k| over all k, with the correlations ρ_k of y_t and y_{t+k} after many rounds: by how much at
    most the variances of a sum over rounds, of ‖y_t‖² and of y_t itself, exceed those of independent rounds."""
    d = inverse(c, min(rounds, _LONGEST))
    found = correlate(d, d)
    found /= found.max()
    return float(np.dot(found, found)), float(np.abs(found).sum())


def _workload(rounds: int, momentum: float) -> Array:
    return lfilter([1.0], [1.0, -momentum], np.ones(rounds))


def _log_error(u: Array, rounds: int, momentum: float) -> tuple[float, Array]:
    """log ‖c‖²‖A C⁻¹‖_F² of c = (1, u), which scaling c does not change, and its gradient.

    With g_k = 2(T-k) m_k, and since dm/dc_j = -x^j m/c, the gradient by c_j is -Σ_k h_k m_{k-j}, where h is g filtered
    backwards by 1/c.
    """
    c = np.concatenate([[1.0], u])
    weights = rounds - np.arange(rounds)
    m = lfilter([1.0], c, _workload(rounds, momentum))
    total = float(np.dot(weights, m**2))
    if not math.isfinite(total):  # 1/c grows too fast for any number
        return _OVERFLOWN, np.zeros_like(u)
    h = lfilter([1.0], c, (2 * weights * m)[::-1])[::-1]
    slopes = -np.array([np.dot(h[j:], m[: rounds - j]) for j in range(1, len(c))])
    norm = float(np.dot(c, c))
    return math.log(norm) + math.log(total), 2 * u / norm + slopes / total


def _normal(c: Array) -> tuple[float, ...]:
    """‖c‖ = 1, or less by what rounding may do to it."""
    return tuple((c / np.linalg.norm(c) * (1 - 2.0**-50)).tolist()) if len(c) > 1 else (1.0,)
