"""What each accountant is stated for, and the checks of a privacy claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from dpexp.errors import ConfigError, named

SENSITIVITY = {"add_remove": 1, "replace_null": 1, "replace_one": 2}  # of a clipped sum, in units of S


@dataclass(frozen=True)
class Coverage:
    """What an accountant is stated for. It refuses everything else.

    Attributes:
        covers: the adjacencies that it covers for each sampling policy, the default one first.
        noise: the types of noise that it composes, as in the `noise` of the ledger's queries.
        is_bound: its ε is an upper bound; otherwise it is an approximation.
    """

    covers: Mapping[str, tuple[str, ...]]
    noise: tuple[str, ...]
    is_bound: bool


# Removing a record from a Poisson sample and nulling it are the same pair of distributions.
_SAMPLED = {
    "poisson": ("add_remove", "replace_null"),
    "cyclic_poisson": ("add_remove", "replace_null"),
    "shuffle": ("replace_one", "replace_null"),
    "all": ("add_remove", "replace_one", "replace_null"),
}
_REPLACED = {policy: (*_SAMPLED[policy], "replace_one") for policy in ("poisson", "cyclic_poisson")}
_FIXED = {"fixed_size": ("replace_one",)}
_BY_PLD = {"truncated_poisson": ("replace_null",), "random_allocation": ("add_remove",)}
_GAUSSIAN = ("gaussian", "banded gaussian")
_ALL_NOISE = (*_GAUSSIAN, "laplace")
_BUILT_IN = {
    "pld": Coverage(_SAMPLED | _REPLACED | _FIXED | _BY_PLD, _ALL_NOISE, True),
    "rdp": Coverage(_SAMPLED | _FIXED, _ALL_NOISE, True),
    "moments": Coverage(_SAMPLED, _ALL_NOISE, True),
    "strong": Coverage(_SAMPLED, _ALL_NOISE, True),
    "basic": Coverage(_SAMPLED, _ALL_NOISE, True),
    "gdp": Coverage(_SAMPLED, _GAUSSIAN, False),
}
NAMES = tuple(_BUILT_IN)
CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {
    policy: {
        adjacency: tuple(name for name, each in _BUILT_IN.items() if adjacency in each.covers.get(policy, ()))
        for adjacency in covered
    }
    for policy, covered in _BUILT_IN["pld"].covers.items()
}
_WHY = {
    "truncated_poisson": "which records are cut off depends on how many there are, so n must be the same on both sides",
    "fixed_size": "a sample of fixed size only exists when n is the same on both sides",
    "shuffle": "the sizes of disjoint batches are public only if n is the same on both sides",
    "random_allocation": "its dominating pair is stated for adding or removing a record",
}


def coverage(accountant: str) -> Coverage:
    """What an accountant is stated for: one of NAMES, or the dotted name of a class of your own with `coverage`.

    Raises:
        ConfigError: the accountant is unknown.
    """
    if accountant in _BUILT_IN:
        return _BUILT_IN[accountant]
    found = getattr(named(accountant, "accountant="), "coverage", None) if "." in accountant else None
    if not isinstance(found, Coverage):
        raise ConfigError(
            f"accountant={accountant} is unknown; known: {', '.join(NAMES)}, or package.Name with `coverage`."
        )
    return found


def yaml_name(policy: str) -> str:
    """The name under `sampling=` of a ledger's sampling policy."""
    return "full_batch" if policy == "all" else policy


def check_covered(policy: str, adjacency: str | None, accountant: str | None = None) -> str:
    """The adjacency, by default the policy's first; a ConfigError if no accountant, or not this one, covers it."""
    if policy not in CLAIMS:
        raise ConfigError(
            f"sampling={policy} has no accountant; choose {', '.join(map(yaml_name, CLAIMS))}; a policy of your own "
            f"names one of {', '.join(CLAIMS)}."
        )
    adjacency = adjacency or next(iter(CLAIMS[policy]))
    if adjacency not in SENSITIVITY:
        raise ConfigError(f"privacy.adjacency={adjacency} is unknown; known: {', '.join(SENSITIVITY)}.")
    if adjacency not in CLAIMS[policy]:
        raise ConfigError(
            f"adjacency={adjacency} cannot be claimed for sampling={yaml_name(policy)}: {_WHY[policy]}; "
            f"choose adjacency={' or '.join(CLAIMS[policy])}."
        )
    if accountant is not None and adjacency not in coverage(accountant).covers.get(policy, ()):
        raise ConfigError(
            f"accountant={accountant} has no bound for sampling={yaml_name(policy)} under adjacency={adjacency}; "
            f"choose accountant={' or '.join(CLAIMS[policy][adjacency])}, or another sampling policy."
        )
    return adjacency


def check_delta(delta: float, key: str = "privacy.delta") -> None:
    """Refuses a δ that is not below 1, or too small for double precision."""
    if not 1e-300 <= delta < 1:
        raise ConfigError(f"{key}={delta} must be at least 1e-300 and below 1; well below 1/n is usual.")


@cache
def accountants_for_noise(noise: str) -> tuple[str, ...]:
    """The accountants that compose this type of noise."""
    return tuple(name for name, each in _BUILT_IN.items() if noise in each.noise)
