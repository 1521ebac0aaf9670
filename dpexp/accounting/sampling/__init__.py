"""Sampling policies, one class in one file each (arXiv 1812.06210, section 5).

To add one, add its file, a line here and a YAML. What the classes share is in `policy`.
"""

from functools import lru_cache
from typing import Any

from dpexp.accounting.sampling.cyclic_poisson import CyclicPoisson
from dpexp.accounting.sampling.fixed_size import FixedSize
from dpexp.accounting.sampling.full_batch import FullBatch
from dpexp.accounting.sampling.poisson import Poisson
from dpexp.accounting.sampling.policy import Policy, Release, Released, SamplingEvent, own_fields
from dpexp.accounting.sampling.random_allocation import RandomAllocation
from dpexp.accounting.sampling.shuffle import Shuffle
from dpexp.accounting.sampling.truncated_poisson import TruncatedPoisson
from dpexp.errors import ConfigError, named

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Poisson, TruncatedPoisson, FixedSize, Shuffle, FullBatch, CyclicPoisson, RandomAllocation)
}  # fmt: skip

__all__ = [
    "POLICIES", "CyclicPoisson", "FixedSize", "FullBatch", "Poisson", "Policy", "RandomAllocation", "Release",
    "Released", "SamplingEvent", "Shuffle", "TruncatedPoisson", "event_of", "sampling_event",
]  # fmt: skip


def sampling_event(policy: str, q: float, n: int, **facts: Any) -> SamplingEvent:
    """The event that a ledger describes (format 2), as `SamplingEvent.facts` gives them.

    Examples:
        >>> from dpexp.accounting.sampling import sampling_event
        >>> str(sampling_event("poisson", q=0.01, n=60000).policy)
        'Poisson(q=0.01)'

    Raises:
        ConfigError: the policy is unknown, a value is out of range, or facts are missing or contradict each other.
    """
    kind = policy_of_name(policy)
    given = {"sampling_rate": q} | {name: facts.get(there) for name, there in kind.written.items()}
    own: dict[str, Any] = {name: value for name, value in given.items() if name in own_fields(kind)}
    missing = [there for there in kind.written.values() if facts.get(there) is None]
    if missing:
        raise ConfigError(f"sampling policy {policy} needs {missing[0]}.")
    found = SamplingEvent(kind(**own), n, facts.get(kind.drawn_with) if kind.drawn_with else None)
    said, own_facts = {"policy": policy, "q": float(q), "n": n, **facts}, found.facts()
    for name in said | own_facts:
        if repr(said.get(name)) != repr(own_facts.get(name)):  # 4.0 is not 4
            raise ConfigError(
                f"sampling {name}={said.get(name)} contradicts the rest of {said}, from which "
                f"{name}={own_facts.get(name)} follows."
            )
    return found


def policy_of_name(name: str) -> type[Policy]:
    """The policy that a ledger names: one of POLICIES, or the dotted name of a user's own class."""
    found = POLICIES.get(name) or (named(name, "sampling policy ") if "." in str(name) else None)
    if not (isinstance(found, type) and issubclass(found, Policy)) or found.name != name:
        raise ConfigError(f"sampling policy {name!r} is unknown; known: {', '.join(POLICIES)}.")
    return found


@lru_cache(maxsize=4096)  # rounds mostly have equal events
def event_of(policy: Policy, n: int, first: int | None = None) -> SamplingEvent:
    """The event of a sample by a policy at its rate, as its ledger's readers will see it.

    Args:
        n: published number of records.
        first: the first round of those that are drawn with it.
    """
    return sampling_event(**SamplingEvent(policy, n, first if policy.drawn_with else None).facts())
