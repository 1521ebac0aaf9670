"""Laws of ε for every policy, adjacency and accountant: it falls in z and δ, rises in q and T, is the inverse of δ, and
is that of all rounds together."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ledger

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.ledger import concatenate
from dpexp.accounting.sampling import POLICIES

N = 10**6  # records
FACTS = {"truncated_poisson": {"maximum": N // 4}}
RISES = {"z": False, "q": True, "rounds": True, "delta": False}
CLAIMED = [
    (policy, adjacency, accountant)
    for policy in ("poisson", "cyclic_poisson", "truncated_poisson", "fixed_size", "all")  # the others count epochs
    for adjacency, accountants in POLICIES[policy].covers.items()
    for accountant in accountants
]
claimed = pytest.mark.parametrize("policy, adjacency, accountant", CLAIMED)


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@claimed
def test_epsilon_is_monotone(policy, adjacency, accountant):
    """`pld` within 1e-4, the precision of its grids; the others within 1e-6. Across the ends of the scale."""
    tolerance = 1e-4 if accountant == "pld" else 1e-6
    plain = policy == "poisson" and adjacency == "add_remove" and accountant != "pld"  # which takes no time
    points = 50 if plain else 3 if policy in ("all", "cyclic_poisson") else 6

    def cost(z, q, rounds, delta):
        q = min(q, 1 / 2) if policy == "cyclic_poisson" else round(q * N) / N if policy == "fixed_size" else q
        run = ledger(z, q, round(rounds), policy, adjacency, n=N, **FACTS.get(policy, {}))
        return epsilon(run, delta, accountant)

    @settings(max_examples=points, deadline=None, derandomize=True, database=None)
    @given(
        z=logarithmic(1e-2, 1e4), q=logarithmic(1e-6, 1), rounds=logarithmic(1, 1e6), delta=logarithmic(1e-12, 0.1),
        name=st.sampled_from([*RISES]), factor=st.sampled_from([1.001, 1.1, 2.0]),
    )  # fmt: skip
    def check(name, factor, **at):
        more = at | {name: min(at[name] * factor, 1.0) if name == "q" else at[name] * factor}
        low, high = (cost(**values) for values in ((at, more) if RISES[name] else (more, at)))
        assert low <= high * (1 + tolerance), (at, name, factor, low, high)

    check()


@claimed
def test_epsilon_is_the_inverse_of_delta_and_that_of_all_rounds(policy, adjacency, accountant):
    run = ledger(2.0, 0.05, 300, policy, adjacency)
    e = epsilon(run, 1e-6, accountant)
    assert delta(run, e, accountant) == pytest.approx(1e-6, rel=1e-3)
    assert epsilon(run, delta(run, e, accountant), accountant) <= e * (1 + 1e-6)
    both = epsilon(concatenate([run, run]), 1e-6, accountant)
    assert e < both == epsilon(ledger(2.0, 0.05, 600, policy, adjacency), 1e-6, accountant)
