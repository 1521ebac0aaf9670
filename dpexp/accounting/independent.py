"""ε of releases by dp-accounting, between an optimistic and a pessimistic estimate: a check of the accountant `pld`.

dp-accounting puts the privacy losses on a grid. The pessimistic estimate connects the dots (Doroshenko et al. 2022,
arXiv 2207.04380) and hardly depends on the grid; the optimistic one rounds each loss down, by half a step on average.
"""

from collections.abc import Mapping
from functools import reduce

import numpy as np
from dp_accounting import NeighboringRelation as Relation
from dp_accounting.pld import privacy_loss_distribution as pld

from dpexp.accounting.composition import log_mixed
from dpexp.accounting.releases import Release
from dpexp.errors import ConfigError

SMALLEST_DELTA, LARGEST_EPSILON = 1e-10, 500  # beyond them, dp-accounting's rounding errors count
_LEAST, _FINEST = 1e-3, 1e-6  # ε; step of the grid relative to it: composed losses have a few times 1e6 points
_MOST_POINTS, _FEWEST_POINTS = 2**19, 2**12  # of the losses of all distinct releases; and of each at least
_TAIL = 10.5  # standard deviations; beyond it, dp-accounting ignores a mass of e^-50


def estimates(found: Mapping[Release, int], delta: float, near: float) -> tuple[float, float]:
    """The optimistic and the pessimistic ε of releases with their counts, on a grid fine enough for an ε `near` it.

    Raises:
        ConfigError: dp-accounting has no privacy loss distribution for a release, or is not exact enough at δ or ε.
    """
    if delta < SMALLEST_DELTA or near > LARGEST_EPSILON:
        raise ConfigError(f"it is not exact at a δ below {SMALLEST_DELTA} or an ε above {LARGEST_EPSILON}.")
    widest = max((_width(release) for release in found), default=0.0)
    coarsest = widest / max(_MOST_POINTS // max(len(found), 1), _FEWEST_POINTS)
    step = max(max(near, _LEAST) * max(1e-3 / max(sum(found.values()), 1), _FINEST), coarsest)

    def epsilon(upper: bool) -> float:
        losses = (_loss(release, upper, step).self_compose(count) for release, count in found.items())
        composed = reduce(pld.PrivacyLossDistribution.compose, losses, pld.identity(step, upper))
        return float(composed.get_epsilon_for_delta(delta))

    pessimistic = epsilon(True)
    return min(epsilon(False), pessimistic), pessimistic


def _loss(release: Release, upper: bool, step: float) -> pld.PrivacyLossDistribution:
    grid = {"pessimistic_estimate": upper, "value_discretization_interval": step, "use_connect_dots": upper}
    z, sampled = release.z, {"sampling_prob": release.q, **grid}
    match release.policy:
        case "laplace":
            return pld.from_laplace_mechanism(z, **grid)
        case "poisson_replaced":  # one contribution by its opposite: two sensitivities apart
            return pld.from_gaussian_mechanism(2 * z, neighboring_relation=Relation.REPLACE_ONE, **sampled)
        case "truncated_poisson" if upper:
            return pld.from_truncated_subsampled_gaussian_mechanism(release.n, release.q, release.maximum, z, step)
        case "poisson" | "truncated_poisson":  # the optimistic estimate leaves out the maximum
            return pld.from_gaussian_mechanism(z, **sampled)
    raise ConfigError(f"it has no privacy loss distribution for {release.policy}.")


def _width(release: Release) -> float:
    """About the range of a release's privacy loss, or more."""
    z = release.z / 4 if release.policy == "truncated_poisson" else release.z
    most = np.array(_TAIL / z + 1 / (2 * z**2))
    return float(log_mixed(release.q, most) - log_mixed(release.q, -most))
