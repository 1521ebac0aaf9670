"""Which noise multiplier z meets a target (ε, δ)?"""

import math
from collections.abc import Callable

from scipy.optimize import brentq

from dpexp.accounting.accountants import check_delta, epsilon
from dpexp.accounting.ledger import Ledger
from dpexp.errors import ConfigError

LARGEST_Z = 2.0**20
SMALLEST_Z = 2.0**-6


def solve_noise_multiplier(
    ledger_at: Callable[[float], Ledger],
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
    precision: float = 1e-3,
) -> float:
    """The smallest z, to within `precision` in ε, whose ledger costs at most the target.

    Args:
        ledger_at: the ledger that training with noise multiplier z would write; its ε falls as z grows.
        precision: relative. The ε of the returned z lies in [target (1 - precision), target].

    Raises:
        ConfigError: the target is not positive, or no z up to 2^20 reaches it; says the best ε reachable.
    """
    check_delta(delta)
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise ConfigError(f"privacy.epsilon={target_epsilon} must be a finite number above 0.")
    aim = target_epsilon * (1 - precision / 2)
    probes: dict[float, float] = {}

    def excess(log_z: float) -> float:
        """log ε(z) less the log of a target just below the one asked for; 0 is the root sought."""
        if log_z not in probes:
            probes[log_z] = epsilon(ledger_at(math.exp(log_z)), delta, accountant)
        return math.log(min(max(probes[log_z] / aim, 1e-3), 1e3))

    # A privacy loss distribution far from the target may not fit in memory; Rényi DP is cheap anywhere and near.
    start, step = (0.0, math.log(4)) if accountant == "rdp" else (_near(ledger_at, aim, delta), math.log(1.2))
    smallest, largest = math.log(SMALLEST_Z), math.log(LARGEST_Z)
    low = high = start
    while excess(high) > 0:
        if high >= largest:
            raise ConfigError(
                f"privacy.epsilon={target_epsilon} cannot be reached at privacy.delta={delta}: even z=2^20 "
                f"costs ε={probes[high]:.3g} by {accountant}; ask for more ε or δ, or fewer rounds."
            )
        low, high, step = high, min(high + step, largest), 2 * step
    while excess(low) < 0:
        if low <= smallest:
            return math.exp(low)
        low, high, step = max(low - step, smallest), low, 2 * step
    if low < high:
        brentq(excess, low, high, xtol=precision / 100)
    return math.exp(min(log_z for log_z, cost in probes.items() if cost <= target_epsilon))


def _near(ledger_at: Callable[[float], Ledger], target_epsilon: float, delta: float) -> float:
    try:
        return math.log(solve_noise_multiplier(ledger_at, target_epsilon, delta, "rdp", precision=0.1))
    except ConfigError:
        return math.log(LARGEST_Z)
