"""What it costs to choose the best of several private trials (Papernot & Steinke 2022, arXiv 2110.03620).

The number of trials is drawn at random: K ~ a truncated negative binomial distribution with a given mean and shape η
(η = 1: geometric; η = 0: logarithmic), or Poisson (η = ∞). Each trial draws its configuration uniformly at random.
"""

import math
from collections.abc import Iterable

import numpy as np
from dp_accounting import rdp
from scipy.optimize import brentq

from dpexp._accounting_compat import repeated_and_selected
from dpexp.accounting.claims import releases
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.moments import moments_of
from dpexp.accounting.renyi import Array
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


def trial_curve(ledger: Ledger) -> Array:
    """Rényi DP of one trial at ORDERS.

    Raises:
        ConfigError: the claim cannot be made, or the trial's sampling has no Rényi bound here.
    """
    counts = releases(ledger, "rdp")
    for release in counts:
        if release.policy not in ("poisson", "laplace"):
            raise ConfigError(f"sampling={release.policy} has no bound for private selection; choose sampling=poisson.")
    z, q = np.array([release.z for release in counts]), np.array([release.q for release in counts])
    times = np.array(list(counts.values()), dtype=float)
    laplace = np.array([release.policy == "laplace" for release in counts])
    return np.array([float(times @ moments_of(z, q, order, laplace)) / (order - 1) for order in ORDERS])


def dearest_curve(ledgers: Iterable[Ledger]) -> Array:
    """Rényi DP at ORDERS that holds whichever trial is run: at each order that of the dearest.

    Raises:
        ConfigError: as for `trial_curve`, or the ledgers are stated for different adjacencies or privacy units.
    """
    trials = {(ledger.adjacency, frozenset(ledger.rounds.items()), ledger.unit): ledger for ledger in ledgers}
    adjacencies = sorted({ledger.adjacency for ledger in trials.values()})
    units = sorted({ledger.unit for ledger in trials.values()})
    if len(units) > 1:
        raise ConfigError(f"trials about different privacy units ({', '.join(units)}) cannot be selected among.")
    if len(adjacencies) > 1:
        raise ConfigError(f"trials for different adjacencies ({', '.join(adjacencies)}) cannot be selected among.")
    return np.max([trial_curve(ledger) for ledger in trials.values()], axis=0)


def selection_epsilon(curve: Array, delta: float, mean: float, shape: float) -> float:
    """ε at `delta` of releasing only the best of K trials (theorems 2 and 6).

    Args:
        curve: Rényi DP at ORDERS of the mechanism that is repeated: draw a configuration from the whole grid, and run
            that trial.
    """
    check_repetitions(mean, shape)
    repeated = repeated_and_selected(ORDERS, curve, mean, shape)
    return max(0.0, float(rdp.compute_epsilon(ORDERS, repeated, delta)[0]))
