"""Noise, sampling rate and contributions, as releases show them, beside what was planned.

Each check is a test of one number at a level: if what runs is what was planned, it is refuted at most so often. It also
says which smallest error it would have found.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom, chi2, norm
from scipy.stats import t as student

from dpexp.accounting.renyi import Array

POWER = 0.95  # with which an error of the size that is told is found


@dataclass(frozen=True)
class Check:
    """One number, found and planned.

    Attributes:
        limit: of the true number, at the level of the test; lower, but of noise, of which it is an upper one.
        detectable: the number nearest to the plan that would have been refuted with probability `POWER`.
    """

    name: str
    planned: float
    found: float
    limit: float
    detectable: float
    refuted: bool

    def words(self) -> str:
        """What is refuted, in words."""
        side = "at most" if self.limit < self.planned else "at least"
        return f"the {self.name} is {side} {self.limit:.4g}, and {self.planned:.4g} was planned"


def noise_scale(noise: Array, level: float) -> Check:
    """The standard deviation of noise [P, D] that is planned to be independent standard normal: by its sum of squares,
    which is χ² with PD degrees of freedom. Refuted if smaller."""
    squares, count = float((noise.astype(np.float64) ** 2).sum()), noise.size
    found, limit = math.sqrt(squares / count), math.sqrt(squares / chi2.ppf(level, count))
    detectable = math.sqrt(chi2.ppf(level, count) / chi2.ppf(POWER, count))
    return Check("noise", 1.0, found, limit, detectable, limit < 1)


def noise_reuse(noise: Array, level: float) -> Check:
    """The largest correlation of two of P rows of noise [P, D] that is planned to be independent: t = r √((D-2)/(1-r²))
    is Student's with D - 2 degrees of freedom for two normal rows, and the level is shared out among the pairs."""
    rows, places = noise.shape
    r = np.atleast_2d(np.corrcoef(noise.astype(np.float64)))
    found = float(np.abs(np.nan_to_num(r[np.triu_indices(rows, 1)])).max(initial=0.0))
    quantile = student.isf(level / max(1, rows * (rows - 1)), places - 2)  # of both signs
    most = float(quantile / math.sqrt(places - 2 + quantile**2))
    reach = norm.ppf(POWER) / math.sqrt(places)
    return Check("correlation of noise", 0.0, found, max(0.0, found - most), most + reach, found > most)


def rate_of_inclusion(drawn: int, chances: int, q: float, level: float) -> Check:
    """The rate at which records are in samples, in units of q: `drawn` of as many `chances`, with the lower limit of
    Clopper & Pearson (1934). It holds also where samples depend on one another as the policies say: of indicators with
    mean q, fixed sizes and turns vary less than independent ones (Hoeffding 1956, 1963). Refuted if larger."""
    limit = float(beta.ppf(level, drawn, chances - drawn + 1)) if drawn else 0.0
    enough = int(binom.isf(level, chances, q)) + 1
    detectable = float(beta.ppf(POWER, enough, chances - enough + 1)) if enough <= chances else 1.0
    return Check("rate of inclusion", 1.0, drawn / chances / q, limit / q, detectable / q, limit > q)


def contribution(name: str, values: NDArray[np.float64], error: float, level: float) -> Check:
    """What canaries contribute, in units of the bound: the mean of `values`, each with noise of standard deviation
    `error`. Refuted if larger than 1."""
    found, error = float(values.mean()), error / math.sqrt(len(values))
    limit, detectable = found - norm.isf(level) * error, 1 + (norm.isf(level) + norm.ppf(POWER)) * error
    return Check(name, 1.0, found, limit, detectable, limit > 1)


def largest_contribution(values: NDArray[np.float64], error: float, level: float) -> Check:
    """The largest of `values`, as `contribution` has them: one record that counts twice is found."""
    reach = float(norm.isf(level / len(values))) * error
    found = float(values.max())
    return Check(
        "largest contribution", 1.0, found, found - reach, 1 + reach + norm.ppf(POWER) * error, found - reach > 1
    )
