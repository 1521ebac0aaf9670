"""Turns a ledger into the releases that accountants compose, and checks that they are stated for them.

Under `replace_one` a clipped sum moves by up to 2S (one record out, another in), so that accountants are given
z = σ̃/(2S). Under `add_remove` and `replace_null` it moves by up to S.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from dpexp.accounting.coverage import NAMES, NOISE, check_covered, coverage, is_covered, yaml_name
from dpexp.accounting.ledger import Ledger, Query, Round
from dpexp.accounting.sampling.policy import Policy, Release, Released
from dpexp.errors import ConfigError

_ROUNDING = 1e-12  # relative: values of z closer than this count as equal


def releases(ledger: Ledger, accountant: str | None = None) -> dict[Release, int]:
    """The ledger's distinct releases with their counts, as its sampling policies give them.

    Raises:
        ConfigError: no accountant, or not this one, is stated for the ledger; rounds cannot have been drawn together as
            the ledger says; or noise is correlated over more rounds than lie between two samples of a record.
    """
    counts: dict[Release, int] = defaultdict(int)
    together: dict[tuple[type[Policy], int | None], list[Released]] = defaultdict(list)
    for round_, count in ledger.rounds.items():
        event = round_.sampling
        check_covered(type(event.policy), ledger.adjacency, accountant)
        for query in round_.queries:
            _check_noise(query, accountant)
        _check_bands(round_)
        z = round_.z(ledger.adjacency)
        if round_.queries[0].noise == "laplace":  # then it is the only query, on all records
            counts[Release(z, policy="laplace")] += count
        else:
            together[type(event.policy), event.first].append(Released(event, z, count, round_.correlation))
    for (policy, _), rounds in together.items():
        for release, count in policy.releases(rounds, ledger.adjacency):
            counts[release] += count
    return _merged(counts)


def _check_bands(round_: Round) -> None:
    """Refuses noise that is correlated with that of other rounds in which a record may be."""
    policy = round_.sampling.policy
    parts = policy.rounds_apart
    if round_.bands > parts:
        raise ConfigError(
            f"noise with {round_.bands} bands needs samples in which a record is at most every {round_.bands} rounds, "
            f"unlike sampling={yaml_name(policy.name)} with {parts} partition{'s' if parts > 1 else ''}; "
            f"choose sampling=cyclic_poisson with at least {round_.bands} partitions."
        )


def _check_noise(query: Query, accountant: str | None) -> None:
    own = coverage(accountant) if accountant is not None else None
    if query.noise not in (own.noise if own is not None else NOISE):
        raise ConfigError(
            f"accountant={accountant or 'pld'} is not stated for the noise of the query {query.name!r} "
            f"({query.noise}); choose accountant=pld, or other noise."
        )


def applicable_accountants(ledger: Ledger) -> list[str]:
    """The accountants that cover all of the ledger, the tightest first.

    Raises:
        ConfigError: its adjacency cannot be claimed for one of its sampling policies.
    """
    policies = {type(round_.sampling.policy) for round_ in ledger.rounds}
    for policy in policies:
        check_covered(policy, ledger.adjacency)
    if not policies:
        return ["pld"]
    return [name for name in NAMES if all(is_covered(policy, ledger.adjacency, name) for policy in policies)]


def _merged(counts: Mapping[Release, int]) -> dict[Release, int]:
    """Counts releases whose z differ only by rounding as the one with the smallest z of them."""
    found: dict[Release, int] = {}
    last: dict[Release, Release] = {}
    for release in sorted(counts, key=lambda release: release.z):
        rest = replace(release, z=0.0)
        if rest not in last or release.z > last[rest].z * (1 + _ROUNDING):
            last[rest] = release
        found[last[rest]] = found.get(last[rest], 0) + counts[release]
    return found
