"""What each accountant is stated for, and the checks of a privacy claim.

*Formula.* A record changes a clipped sum by at most `SENSITIVITY` times S: S if it is added, removed or nulled, and 2S
if it is replaced by another. Each sampling policy names the accountants that have a bound for it, by adjacency
(`Policy.covers`).

| Case | What happens |
|---|---|
| no adjacency is given | the policy's first one is claimed |
| an adjacency or an accountant that the policy does not name | ConfigError, which names those that it does |
| a policy without `covers` | ConfigError: nothing can be claimed |
| the dotted name of a class with an attribute `coverage` | the user's own accountant, by what it says it covers |
| any other unknown name | ConfigError |
| `gdp` | ConfigError: its ε was not an upper bound |

Read next: `dpexp.accounting.sampling.poisson` (what one policy is covered for), `accountants`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dpexp.accounting.sampling.policy import ALL_ACCOUNTANTS, Policy
from dpexp.errors import ConfigError, named

SENSITIVITY = {"add_remove": 1, "replace_null": 1, "replace_one": 2}  # of a clipped sum, in units of S


@dataclass(frozen=True)
class Coverage:
    """What a user's own accountant gives an upper bound for. It refuses everything else.

    Attributes:
        covers: the adjacencies that it covers for each sampling policy, by the policy's name in ledgers.
        noise: the types of noise that it composes, as in the `noise` of the ledger's queries.
    """

    covers: Mapping[str, tuple[str, ...]]
    noise: tuple[str, ...]


NAMES = ALL_ACCOUNTANTS
NOISE = ("gaussian", "banded gaussian", "laplace")  # as in the `noise` of the ledger's queries


def coverage(accountant: str) -> Coverage | None:
    """What a user's own accountant covers, by its dotted name; None: it is one of NAMES.

    Those compose all types of NOISE, and each sampling policy names them in its `covers`.

    Raises:
        ConfigError: the accountant is unknown.
    """
    if accountant in NAMES:
        return None
    if accountant == "gdp":
        raise ConfigError(
            "accountant=gdp is gone: its ε was an approximation that may lie below the true one; choose pld, whose "
            "figures of risk have μ of Gaussian DP."
        )
    found = getattr(named(accountant, "accountant="), "coverage", None) if "." in accountant else None
    if not isinstance(found, Coverage):
        raise ConfigError(
            f"accountant={accountant} is unknown; known: {', '.join(NAMES)}, or package.Name with `coverage`."
        )
    return found


def yaml_name(policy: str) -> str:
    """The name under `sampling=` of a ledger's sampling policy."""
    return "full_batch" if policy == "all" else policy


def is_covered(policy: type[Policy], adjacency: str, accountant: str) -> bool:
    """Whether an accountant has a bound for samples by a policy, and an adjacency."""
    if (own := coverage(accountant)) is not None:
        return adjacency in own.covers.get(policy.name, ())
    return accountant in policy.covers.get(adjacency, ())


def check_covered(policy: type[Policy], adjacency: str | None, accountant: str | None = None) -> str:
    """The adjacency, by default the policy's first; a ConfigError if no accountant, or not this one, covers it."""
    if not policy.covers:
        raise ConfigError(f"sampling={yaml_name(policy.name)} has no accountant; give its class `covers`.")
    adjacency = adjacency or next(iter(policy.covers))
    if adjacency not in SENSITIVITY:
        raise ConfigError(f"privacy.adjacency={adjacency} is unknown; known: {', '.join(SENSITIVITY)}.")
    if adjacency not in policy.covers:
        raise ConfigError(
            f"adjacency={adjacency} cannot be claimed for sampling={yaml_name(policy.name)}: {policy.why}; "
            f"choose adjacency={' or '.join(policy.covers)}."
        )
    if accountant is not None and not is_covered(policy, adjacency, accountant):
        raise ConfigError(
            f"accountant={accountant} has no bound for sampling={yaml_name(policy.name)} under adjacency={adjacency}; "
            f"choose accountant={' or '.join(policy.covers[adjacency])}, or another sampling policy."
        )
    return adjacency


def check_delta(delta: float, key: str = "privacy.delta") -> None:
    """Refuses a δ that is not below 1, or too small for double precision."""
    if not 1e-300 <= delta < 1:
        raise ConfigError(f"{key}={delta} must be at least 1e-300 and below 1; well below 1/n is usual.")
