"""What it costs to choose the best of several private trials (Papernot & Steinke 2022, arXiv 2110.03620).

The number of trials is drawn at random: K ~ a truncated negative binomial distribution with a given mean and shape η
(η = 1: geometric; η = 0: logarithmic), or Poisson (η = ∞). Each trial draws its configuration uniformly at random.
"""

import math

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting import rdp
from scipy.optimize import brentq

from dpexp.accounting.claims import releases
from dpexp.accounting.ledger import Ledger
from dpexp.errors import ConfigError

ORDERS = [1 + k / 10 for k in range(1, 100)] + list(range(11, 129)) + [2**k for k in range(8, 15)]


def check_repetitions(mean: float, shape: float) -> None:
    """Raises:
    ConfigError: no such distribution.
    """
    if not (math.isfinite(mean) and mean >= 1):
        raise ConfigError(f"hydra.sweeper.mean={mean} must be a finite number of at least 1.")
    if not (0 <= shape <= 20 or shape == math.inf):
        raise ConfigError(f"hydra.sweeper.shape={shape} must lie between 0 and 20 (1: geometric), or be inf: Poisson.")


def draw_repetitions(mean: float, shape: float, random: np.random.Generator) -> int:
    """K. Poisson's may be 0, which the guarantee needs too."""
    check_repetitions(mean, shape)
    if math.isinf(shape):
        return int(random.poisson(mean))
    if mean == 1:
        return 1
    gamma = brentq(lambda g: _mean(g, shape) - mean, 1e-12, 1 - 1e-12)
    u, k, total = random.random(), 1, 0.0
    mass = -(1 - gamma) / math.log(gamma) if shape == 0 else (1 - gamma) * shape / math.expm1(-shape * math.log(gamma))
    while True:
        total += mass
        if u < total or mass < 1e-300:
            return k
        mass *= (1 - gamma) * (k + shape) / (k + 1)
        k += 1


def _mean(gamma: float, shape: float) -> float:
    """Papernot & Steinke 2022, definition 1."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def selection_epsilon(ledger: Ledger, delta: float, mean: float, shape: float) -> float:
    """ε at `delta` of releasing only the best of K trials, each of which costs what `ledger` records, by Rényi DP.

    Raises:
        ConfigError: the claim cannot be made, or the trial's sampling has no Rényi bound.
    """
    check_repetitions(mean, shape)
    trial = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(release.q, dp_accounting.GaussianDpEvent(release.z)), count
        )
        for release, count in releases(ledger, "rdp").items()
        if release.policy == "poisson" or _no_bound(release.policy)
    ]
    accountant = rdp.RdpAccountant(ORDERS)  # z is relative to the sensitivity already, whatever the adjacency
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # orders whose series does not converge are left out, which is safe
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.ComposedDpEvent(trial), mean, shape))
    logging.set_verbosity(before)
    return float(accountant.get_epsilon(delta))


def _no_bound(policy: str) -> bool:
    raise ConfigError(f"sampling={policy} has no bound for private selection; choose sampling=poisson.")
