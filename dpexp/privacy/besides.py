"""What a plan releases besides gradients."""

from collections.abc import Mapping
from typing import Any

from dpexp.errors import ConfigError
from dpexp.privacy.adaptive import UNCLIPPED, Adaptive, Following
from dpexp.privacy.allocation import Allocation, Measured, Proportional
from dpexp.privacy.bounds import Bound, positive
from dpexp.privacy.groups import Vector
from dpexp.privacy.mechanisms import Mechanism
from dpexp.privacy.metrics import Release, releases


def besides(
    grouped: Mapping[str, tuple[Vector, ...]],
    release: Mapping[str, Any],
    bound: Bound | None,
    mechanism: Mechanism,
    allocation: Allocation | None,
) -> tuple[dict[str, Release], Following | None]:
    """What is released besides groups of gradients, by name, and what adaptive bounds follow by it.

    Raises:
        ConfigError: names that are taken, or as `releases` and `Adaptive.following`.
    """
    values = releases(release)
    both = sorted(set(values) & set(grouped))
    if both:
        raise ConfigError(f"metrics.release: {both[0]} is the name of a group of gradients too; rename one of them.")
    named = {vector.name for value in values.values() for vector in value.vectors}
    if UNCLIPPED in {*values, *named, *grouped}:
        raise ConfigError(f"{UNCLIPPED} is what bound=adaptive counts under; rename what else is called so.")
    if not isinstance(bound, Adaptive):
        if isinstance(allocation, Measured):
            raise ConfigError("allocation=measured goes by bounds that are measured; choose bound=adaptive.")
        return values, None
    following = bound.following(grouped, mechanism, allocation or Proportional())
    return values | {UNCLIPPED: following.counts(positive("bound.share", bound.share))}, following
