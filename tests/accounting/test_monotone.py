"""ε falls in z and δ, and rises in q and T, by every accountant and across the ends of the scale."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent
from dpexp.accounting.sampling import sampling_event

N = 10**6  # records
SAMPLED = [
    *(("poisson", "add_remove", name) for name in NAMES),
    *(("fixed_size", "replace_one", name) for name in ("pld", "rdp")),
    ("poisson", "replace_one", "pld"),
    ("truncated_poisson", "replace_null", "pld"),
]
RISES = {"z": False, "q": True, "rounds": True, "delta": False}


def cost(policy, adjacency, accountant, z, q, rounds, delta):
    q = round(q * N) / N if policy == "fixed_size" else q
    sampling = sampling_event(policy, q, N, **({"maximum": N // 4} if policy == "truncated_poisson" else {}))
    one = Round(sampling, (SumQueryEvent("all", 1.0, z),))
    return epsilon(Ledger(adjacency, {one: round(rounds)}), delta, accountant)


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@pytest.mark.parametrize("policy, adjacency, accountant", SAMPLED)
def test_epsilon_is_monotone(policy, adjacency, accountant):
    """`pld` within 1e-4, the precision of its grids; the others within 1e-6."""
    tolerance = 1e-4 if accountant == "pld" else 1e-6
    points = 50 if policy == "poisson" and accountant != "pld" else 12  # the others are slower

    @settings(max_examples=points, deadline=None, derandomize=True, database=None)
    @given(
        z=logarithmic(1e-2, 1e4), q=logarithmic(1e-6, 1), rounds=logarithmic(1, 1e6), delta=logarithmic(1e-12, 0.1),
        name=st.sampled_from([*RISES]), factor=st.sampled_from([1.001, 1.1, 2.0]),
    )  # fmt: skip
    def check(name, factor, **at):
        more = at | {name: min(at[name] * factor, 1.0) if name == "q" else at[name] * factor}
        first, second = (cost(policy, adjacency, accountant, **values) for values in (at, more))
        low, high = (first, second) if RISES[name] else (second, first)
        assert low <= high * (1 + tolerance), (at, name, factor, first, second)

    check()
