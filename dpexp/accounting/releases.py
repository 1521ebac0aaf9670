"""What may be claimed for a ledger: which accountant suits which sampling policy under which adjacency.

Under `replace_one` a clipped sum moves by up to 2S (one record out, another in), so that an accountant is given
z = σ̃/(2S); under `add_remove` and `replace_null` it moves by S.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpexp.accounting.coverage import CLAIMS, SENSITIVITY, check_covered, composing, coverage
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, ParallelQueryEvent, Query, Round, SumQueryEvent
from dpexp.errors import ConfigError


class Blocks:
    """The rounds of each block, of which the order is not known."""

    def __init__(self) -> None:
        self._alike: dict[int, tuple[Any, ...]] = {}
        self._rounds: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def add(self, round_: Round, z: float, count: int) -> None:
        """
        Raises:
            ConfigError: other rounds of the block have another rate, another number of parts, or other bands.
        """
        sampling = round_.sampling
        assert sampling.block is not None and sampling.parts is not None
        banded = [query for query in round_.queries if isinstance(query, SumQueryEvent) and query.bands is not None]
        about = sampling.rate, sampling.parts, sorted((query.group, query.bands) for query in banded)
        if self._alike.setdefault(sampling.block, about) != about:
            raise ConfigError(
                f"the ledger's rounds of block {sampling.block} have different rates, numbers of parts or bands, so "
                "they cannot have been of one block, which is what they are accounted as."
            )
        self._rounds[sampling.block].append((z, count))

    def participations(self) -> Iterator[tuple[float, float, int]]:
        """(z, rate, how many): a record is in one round of b, and those may be the costliest of the block."""
        for block, rounds in self._rounds.items():
            rate, parts, _ = self._alike[block]
            left = math.ceil(sum(count for _, count in rounds) / parts)
            for z, count in sorted(rounds):
                yield z, rate, min(count, left)
                left -= min(count, left)
                if not left:
                    break


def check_bands(round_: Round) -> None:
    """Raises:
    ConfigError: the round's noise is correlated with that of others in which a record may be too.
    """
    parts = round_.sampling.parts or 1
    if round_.bands > parts:
        raise ConfigError(
            f"noise with {round_.bands} bands needs samples in which a record is at most every {round_.bands} rounds; "
            f"sampling={round_.sampling.policy} with {parts} part{'s' if parts > 1 else ''} has none: choose "
            f"sampling=cyclic_poisson with at least {round_.bands} parts."
        )


_SAME = 1e-12  # relative: what rounding may do to z
MIN_AMPLIFIED_Z = 0.02  # a z below which sampling is not counted on: it gains next to nothing there


def claimable(ledger: Ledger) -> list[str]:
    """The accountants that have a bound for all of the ledger, the tightest first.

    Raises:
        ConfigError: its adjacency cannot be claimed for one of its sampling policies.
    """
    policies = sorted({round_.sampling.policy for round_ in ledger.rounds})
    for policy in policies:
        check_covered(policy, ledger.adjacency)
    allowed = [CLAIMS[policy][ledger.adjacency] for policy in policies] or [("pld",)]
    allowed += [composing(query.noise) for round_ in ledger.rounds for query in round_.queries]
    return [name for name in allowed[0] if all(name in others for others in allowed)]


def _check_noise(query: Query, accountant: str | None) -> None:
    allowed = composing(query.noise)
    if not allowed or (accountant is not None and query.noise not in coverage(accountant).noise):
        name = query.query if isinstance(query, OneTimeQueryEvent | ParallelQueryEvent) else query.group
        raise ConfigError(
            f"accountant={accountant or 'pld'} is not stated for the noise of the query {name!r} ({query.noise}); "
            + (f"choose accountant={' or '.join(allowed)}, or other noise." if allowed else "no accountant is.")
        )


@dataclass(frozen=True)
class Release:
    """One query as an accountant sees it: a Gaussian one, unless its policy says otherwise.

    Attributes:
        z: σ̃ over the sensitivity; q: 1 means that no sampling amplifies.
        policy: poisson (a record is removed, added or nulled), poisson_replaced, truncated_poisson or fixed_size; or
            laplace, of all records with Laplace noise, which is 1/z-DP.
        n: of truncated_poisson and fixed_size; maximum: of truncated_poisson.
    """

    z: float
    q: float = 1.0
    policy: str = "poisson"
    n: int | None = None
    maximum: int | None = None


def releases(ledger: Ledger, accountant: str | None = None) -> dict[Release, int]:
    """The ledger's distinct releases with their counts.

    A record is in one batch of each epoch of `shuffle`, without it being random which in any useful way: an epoch
    counts as the one of its rounds that is the costliest. Of `cyclic_poisson` see `dpexp.accounting.releases`.

    Raises:
        ConfigError: the claim cannot be made, an epoch has more batches than 1/q, or noise is correlated further than
            the sampling keeps a record's rounds apart.
    """
    counts: dict[Release, int] = defaultdict(int)
    epochs: dict[int, float] = {}
    dealt: dict[int, float] = defaultdict(float)
    blocks = Blocks()
    for round_, count in ledger.rounds.items():
        sampling = round_.sampling
        check_covered(sampling.policy, ledger.adjacency, accountant)
        for query in round_.queries:
            _check_noise(query, accountant)
        if round_.one_time_query is not None:
            z = 1 / round_.one_time_query.ratio(ledger.adjacency)
            counts[Release(z, policy="laplace" if round_.one_time_query.noise == "laplace" else "poisson")] += count
            continue
        check_bands(round_)
        z = round_.noise_multiplier / SENSITIVITY[ledger.adjacency]
        match sampling.policy:
            case "poisson" | "all":
                counts[_poisson(z, sampling.q, ledger.adjacency)] += count
            case "cyclic_poisson":
                blocks.add(round_, z, count)
            case "shuffle":
                assert sampling.epoch is not None
                epochs[sampling.epoch] = min(epochs.get(sampling.epoch, math.inf), z)
                dealt[sampling.epoch] += count * sampling.q
                if dealt[sampling.epoch] > 1 + 1e-9:
                    raise ConfigError(
                        f"the ledger's batches of epoch {sampling.epoch} make up {dealt[sampling.epoch]:.3g} of the "
                        "records, so they cannot have been disjoint."
                    )
            case "truncated_poisson":
                counts[Release(z, sampling.q, sampling.policy, sampling.n, sampling.maximum)] += count
            case "fixed_size" if sampling.q == 1:
                counts[Release(z)] += count
            case "fixed_size":
                size = math.ceil(sampling.q * sampling.n * (1 - 1e-9))  # whole, but for rounding
                counts[Release(z, size / sampling.n, sampling.policy, sampling.n)] += count
            case policy:
                raise ConfigError(f"sampling={policy} has no accountant; choose {', '.join(CLAIMS)}.")
    for z in epochs.values():
        counts[Release(z)] += 1
    for z, rate, count in blocks.participations():
        counts[_poisson(z, rate, ledger.adjacency)] += count
    return _alike(counts)


def unamplified(ledger: Ledger) -> str | None:
    """Says of how many rounds ε does not count on sampling, though records are sampled; None if there are none."""
    without = {
        release: count for release, count in releases(ledger).items() if release.q < 1 and release.z < MIN_AMPLIFIED_Z
    }
    if not without:
        return None
    return (
        f"ε does not count on sampling in {sum(without.values())} rounds, whose z is as low as "
        f"{min(release.z for release in without):.3g}: below {MIN_AMPLIFIED_Z:g} it gains next to nothing, and is "
        f"left out."
    )


def _poisson(z: float, q: float, adjacency: str) -> Release:
    return Release(z, q, "poisson_replaced" if q < 1 and adjacency == "replace_one" else "poisson")


def _alike(counts: Mapping[Release, int]) -> dict[Release, int]:
    """Those that differ in the last digits of z alone, as where S and σ̃ vary together, are as costly as the worst."""
    found: dict[Release, int] = {}
    last: dict[Release, Release] = {}
    for release in sorted(counts, key=lambda release: release.z):
        rest = replace(release, z=0.0)
        if rest not in last or release.z > last[rest].z * (1 + _SAME):
            last[rest] = release
        found[last[rest]] = found.get(last[rest], 0) + counts[release]
    return found
