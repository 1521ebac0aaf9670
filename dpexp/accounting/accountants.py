"""From a ledger to (ε, δ), by Google's dp-accounting. Reads nothing but the ledger."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dp_accounting
from absl import logging as absl_logging
from dp_accounting import NeighboringRelation, PrivacyAccountant, pld, rdp

from dpexp.accounting.ledger import Ledger
from dpexp.errors import ConfigError

# dp-accounting's default orders stop at 1024, too early for large z and many rounds.
RDP_ORDERS = sorted(
    {1 + k / 10 for k in range(1, 100)} | set(range(11, 64)) | {round(2 ** (k / 4)) for k in range(24, 57)}
)
_RELATIONS = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE}
_ACCOUNTANTS: dict[str, Callable[[NeighboringRelation], PrivacyAccountant]] = {
    "pld": lambda relation: pld.PLDAccountant(relation),
    "rdp": lambda relation: rdp.RdpAccountant(RDP_ORDERS, relation),
}
NAMES = tuple(_ACCOUNTANTS)


def event(ledger: Ledger) -> dp_accounting.DpEvent:
    """The ledger as a dp-accounting event, each round collapsed to one Gaussian first (paper, equation 1)."""
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    round_.sampling.q, dp_accounting.GaussianDpEvent(round_.noise_multiplier)
                ),
                count,
            )
            for round_, count in ledger.rounds.items()
        ]
    )


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
    with _quiet():
        ledger_accountant = _ACCOUNTANTS[accountant](_RELATIONS[ledger.adjacency])
        ledger_accountant.compose(event(ledger))
        return float(ledger_accountant.get_epsilon(delta))


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
