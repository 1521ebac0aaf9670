"""From a ledger to (ε, δ), by Google's dp-accounting. Reads nothing but the ledger.

Each round is collapsed to one Gaussian sum query first (paper, equation 1).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
from absl import logging as absl_logging
from dp_accounting import NeighboringRelation, pld, rdp

from dpexp.accounting.ledger import Ledger
from dpexp.errors import ConfigError

# dp-accounting's default orders stop at 1024, too early for large z and many rounds.
RDP_ORDERS = sorted(
    {1 + k / 10 for k in range(1, 100)} | set(range(11, 64)) | {round(2 ** (k / 4)) for k in range(24, 57)}
)
_RELATIONS = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE}


def _by_pld(ledger: Ledger, delta: float) -> float:
    composed = None
    for round_, count in ledger.rounds.items():
        part = _round_pld(round_.noise_multiplier, round_.sampling.q, ledger.adjacency).self_compose(count)
        composed = part if composed is None else composed.compose(part)
    return float(composed.get_epsilon_for_delta(delta))  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def _round_pld(z: float, q: float, adjacency: str) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, use_connect_dots=True, neighboring_relation=_RELATIONS[adjacency]
    )


def _by_rdp(ledger: Ledger, delta: float) -> float:
    accountant = rdp.RdpAccountant(RDP_ORDERS, _RELATIONS[ledger.adjacency])
    with _quiet():
        for round_, count in ledger.rounds.items():
            noise = dp_accounting.GaussianDpEvent(round_.noise_multiplier)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(round_.sampling.q, noise), count)
        return float(accountant.get_epsilon(delta))


_ACCOUNTANTS: dict[str, Callable[[Ledger, float], float]] = {"pld": _by_pld, "rdp": _by_rdp}
NAMES = tuple(_ACCOUNTANTS)


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float:
    """ε such that what the ledger records is (ε, δ)-differentially private; 0 for an empty ledger.

    Args:
        accountant: `pld` (privacy loss distributions, the tightest here) or `rdp` (Rényi DP).

    Raises:
        ConfigError: δ outside (0, 1) or an unknown accountant.
    """
    check_delta(delta)
    if accountant not in _ACCOUNTANTS:
        raise ConfigError(f"accountant={accountant} is unknown; known: {', '.join(NAMES)}.")
    if not ledger.rounds:
        return 0.0
    return _ACCOUNTANTS[accountant](ledger, delta)


def check_delta(delta: float) -> None:
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ConfigError(f"privacy.delta={delta} must lie strictly between 0 and 1; well below 1/n is usual.")


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting warns of each fractional order whose series does not converge; it leaves that order out,
    which is safe."""
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(before)
