"""Turns a ledger into the releases that accountants compose, and checks that they are stated for them.

Under `replace_one` a clipped sum moves by up to 2S (one record out, another in), so that accountants are given
z = σ̃/(2S). Under `add_remove` and `replace_null` it moves by up to S.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpexp.accounting.coverage import CLAIMS, SENSITIVITY, accountants_for_noise, check_covered, coverage, yaml_name
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Query, Round, SumQueryEvent
from dpexp.errors import ConfigError

_ROUNDING = 1e-12  # relative: values of z closer than this count as equal


@dataclass(frozen=True)
class Release:
    """One mechanism as an accountant sees it: Gaussian, unless its policy is `laplace`.

    Attributes:
        z: σ̃ over the sensitivity.
        q: the probability that a record is in it; 1: no amplification by sampling, but in random_allocation.
        policy: poisson (a record is removed, added or nulled), poisson_replaced, truncated_poisson, fixed_size;
            random_allocation: `steps` rounds, of which a record is in one, drawn at random; or laplace: a query on all
            records with Laplace noise, which is 1/z-DP.
        n, maximum: for truncated_poisson and fixed_size the number of records, for the former the largest sample.
    """

    z: float
    q: float = 1.0
    policy: str = "poisson"
    n: int | None = None
    maximum: int | None = None
    steps: int | None = None


def releases(ledger: Ledger, accountant: str | None = None) -> dict[Release, int]:
    """The ledger's distinct releases with their counts.

    In `shuffle`, each record is in one batch of an epoch, and the batch is not counted as random: an epoch costs as
    much as its most expensive round. For `cyclic_poisson` see `_participations`, for `random_allocation` `_allocated`.

    Raises:
        ConfigError: no accountant, or not this one, is stated for the ledger; the batches of an epoch contain more
            than all records, or are more than its `num_steps`; or noise is correlated over more rounds than lie between
            two samples of a record.
    """
    counts: dict[Release, int] = defaultdict(int)
    epochs: dict[int, float] = {}
    drawn: dict[int, float] = defaultdict(float)
    blocks: dict[int, list[tuple[Round, float, int]]] = defaultdict(list)
    allocated: dict[int, list[tuple[Round, float, int]]] = defaultdict(list)
    for round_, count in ledger.rounds.items():
        sampling = round_.sampling
        check_covered(sampling.policy, ledger.adjacency, accountant)
        for query in round_.queries:
            _check_noise(query, accountant)
        if round_.one_time_query is not None:
            z = 1 / round_.one_time_query.ratio(ledger.adjacency)
            counts[Release(z, policy="laplace" if round_.one_time_query.noise == "laplace" else "poisson")] += count
            continue
        _check_bands(round_)
        z = round_.noise_multiplier / SENSITIVITY[ledger.adjacency]
        match sampling.policy:
            case "poisson" | "all":
                counts[_poisson(z, sampling.q, ledger.adjacency)] += count
            case "cyclic_poisson":
                assert sampling.block is not None
                blocks[sampling.block].append((round_, z, count))
            case "random_allocation":
                assert sampling.epoch is not None
                allocated[sampling.epoch].append((round_, z, count))
            case "shuffle":
                assert sampling.epoch is not None
                epochs[sampling.epoch] = min(epochs.get(sampling.epoch, math.inf), z)
                drawn[sampling.epoch] += count * sampling.q
                if drawn[sampling.epoch] > 1 + 1e-9:
                    raise ConfigError(
                        f"the ledger's batches of epoch {sampling.epoch} make up {drawn[sampling.epoch]:.3g} of the "
                        "records, so they cannot have been disjoint."
                    )
            case "truncated_poisson":
                counts[Release(z, sampling.q, sampling.policy, sampling.n, sampling.maximum)] += count
            case "fixed_size" if sampling.q == 1:
                counts[Release(z)] += count
            case "fixed_size":
                size = math.ceil(sampling.q * sampling.n * (1 - 1e-9))  # an integer, up to rounding
                counts[Release(z, size / sampling.n, sampling.policy, sampling.n)] += count
            case policy:
                raise AssertionError(f"{policy} is covered, but makes no release")
    for z in epochs.values():
        counts[Release(z)] += 1
    for rounds in blocks.values():
        for z, rate, count in _participations(rounds):
            counts[_poisson(z, rate, ledger.adjacency)] += count
    for rounds in allocated.values():
        for release, count in _allocated(rounds):
            counts[release] += count
    return _merged(counts)


def _participations(rounds: list[tuple[Round, float, int]]) -> Iterator[tuple[float, float, int]]:
    """(z, rate, count) of the worst-case rounds in which a record can be, of a block of `cyclic_poisson`, given as
    (round, z, count). Their noise may be correlated (banded matrix factorization).

    With b partitions and at most b bands c, a block of N rounds costs no more than ⌈N/b⌉ rounds of Poisson sampling at
    rate qb with independent noise and z = σ̃/(S‖c‖) ([proof](../mathematics.md#correlated-noise), after Choquette-Choo
    et al. 2023, arXiv 2306.08153). A resumed job does not know the earlier noise: it begins a new block.
    """
    sampling = rounds[0][0].sampling
    if len({_signature(round_) for round_, _, _ in rounds}) > 1:
        raise ConfigError(
            f"the ledger's rounds of block {sampling.block} have different rates, numbers of partitions or bands, so "
            "they cannot have been of one block, as which they are accounted."
        )
    left = math.ceil(sum(count for _, _, count in rounds) / sampling.parts)  # type: ignore[operator]
    for z, count in sorted((z, count) for _, z, count in rounds):
        yield z, sampling.rate, min(count, left)
        left -= min(count, left)
        if not left:
            break


def _allocated(rounds: list[tuple[Round, float, int]]) -> Iterator[tuple[Release, int]]:
    """(release, count) of an epoch of `random_allocation`, given as (round, z, count).

    The whole epoch counts, however many of its t rounds the ledger has, at the smallest z of these. A record in k
    random rounds is in one random round of each of k random blocks of ⌊t/k⌋ or ⌈t/k⌉ rounds, and costs no more than if
    the blocks were known ([proof](../mathematics.md#random-allocation)).
    """
    sampling, (k, t) = rounds[0][0].sampling, _allocation(rounds[0][0])
    drawn, kinds = sum(count for _, _, count in rounds), {_allocation(round_) for round_, _, _ in rounds}
    if drawn > t or len(kinds) > 1:
        raise ConfigError(
            f"the ledger has {drawn} rounds of epoch {sampling.epoch} in which each record is in "
            f"{' and '.join(sorted(f'{k} of {t}' for k, t in kinds))}, so they cannot have been drawn together."
        )
    z, longer = min(z for _, z, _ in rounds), t % k
    for steps, count in ((t // k, k - longer), (t // k + 1, longer)):
        if count:
            yield Release(z) if steps == 1 else Release(z, policy="random_allocation", steps=steps), count


def _allocation(round_: Round) -> tuple[int, int]:
    assert round_.sampling.num_selected is not None and round_.sampling.num_steps is not None
    return round_.sampling.num_selected, round_.sampling.num_steps


def _signature(round_: Round) -> tuple[Any, ...]:
    """What all rounds of a block have in common."""
    bands = {q.group: q.bands for q in round_.queries if isinstance(q, SumQueryEvent) and q.bands is not None}
    return round_.sampling.rate, round_.sampling.parts, tuple(sorted(bands.items()))


def _check_bands(round_: Round) -> None:
    """Refuses noise that is correlated with that of other rounds in which a record may be."""
    parts = round_.sampling.parts or 1
    if round_.bands > parts:
        raise ConfigError(
            f"noise with {round_.bands} bands needs samples in which a record is at most every {round_.bands} rounds, "
            f"unlike sampling={yaml_name(round_.sampling.policy)} with {parts} partition{'s' if parts > 1 else ''}; "
            f"choose sampling=cyclic_poisson with at least {round_.bands} partitions."
        )


def _check_noise(query: Query, accountant: str | None) -> None:
    allowed = accountants_for_noise(query.noise)
    if not allowed or (accountant is not None and query.noise not in coverage(accountant).noise):
        name = query.query if isinstance(query, OneTimeQueryEvent) else query.group
        raise ConfigError(
            f"accountant={accountant or 'pld'} is not stated for the noise of the query {name!r} ({query.noise}); "
            + (f"choose accountant={' or '.join(allowed)}, or other noise." if allowed else "no accountant is.")
        )


def applicable_accountants(ledger: Ledger) -> list[str]:
    """The accountants that cover all of the ledger, the tightest first.

    Raises:
        ConfigError: its adjacency cannot be claimed for one of its sampling policies.
    """
    policies = sorted({round_.sampling.policy for round_ in ledger.rounds})
    for policy in policies:
        check_covered(policy, ledger.adjacency)
    allowed = [CLAIMS[policy][ledger.adjacency] for policy in policies] or [("pld",)]
    allowed += [accountants_for_noise(query.noise) for round_ in ledger.rounds for query in round_.queries]
    return [name for name in allowed[0] if all(name in others for others in allowed)]


def _poisson(z: float, q: float, adjacency: str) -> Release:
    return Release(z, q, "poisson_replaced" if q < 1 and adjacency == "replace_one" else "poisson")


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
