"""Ledgers of runs in one line, and what they cost by closed forms and by dp-accounting called directly."""

import math
from collections import Counter
from functools import cache

import dp_accounting
from dp_accounting import NeighboringRelation, pld
from scipy.optimize import brentq
from scipy.stats import norm

from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SumQueryEvent
from dpexp.accounting.sampling import sampling_event

# What an event of a policy says beside q and n.
FACTS = {
    "truncated_poisson": {"maximum": 120}, "shuffle": {"epoch": 0}, "cyclic_poisson": {"parts": 2, "block": 0},
    "random_allocation": {"epoch": 0, "num_selected": 1, "num_steps": 10},
}  # fmt: skip


def round_of(z=1.0, q=0.1, policy="poisson", n=1000, bands=None, **facts):
    """A round of one query with S = 1."""
    event = sampling_event(policy, 1.0 if policy == "all" else q, n, **FACTS.get(policy, {}) | facts)
    return Round(event, (SumQueryEvent("all", 1.0, z, bands=bands),))


def ledger(z=4.0, q=0.1, rounds=20, policy="poisson", adjacency="add_remove", **facts):
    return Ledger(adjacency, {round_of(z, q, policy, **facts): rounds})


def add(writer, *rounds):
    for round_ in rounds:
        writer.sample(round_.sampling)
        for query in round_.queries:
            writer.query(query)
        writer.commit()


def write_run(path, ledger, close=True, resume=False):
    """Writes a run's ledger, round by round, and its end file if the run has ended; returns the writer."""
    facts = {"not_private_reason": ledger.not_private_reason, "record": ledger.record, "part": ledger.part}
    planned = [round_.sampling for round_ in ledger.training]
    writer = LedgerWriter(path, ledger.adjacency, planned, resume, **facts)
    add(writer, *Counter(ledger.rounds).elements())
    if close:
        writer.close()
    return writer


def exact_gaussian(mu, d):
    """ε of one Gaussian query by Balle & Wang 2018, theorem 8."""

    def excess(e):
        first, second = norm.logcdf(mu / 2 - e / mu), e + norm.logcdf(-mu / 2 - e / mu)
        return first + math.log(-math.expm1(second - first)) - math.log(d)

    return brentq(excess, 1e-9 * mu, mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / d)), xtol=1e-13)


def sampled(z, q):
    """A Poisson round, for dp-accounting."""
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))


def composed(accountant, *events):
    """The accountant after these events of dp-accounting, each with a count."""
    for event, count in events:
        accountant.compose(event, count)
    return accountant


@cache
def loss_of(z, q, relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
    """dp-accounting's loss of a Poisson round. Its usual interval, 1e-4, is too coarse where the loss varies little."""
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, neighboring_relation=relation,
        value_discretization_interval=max(2e-6, min(2e-3, 0.03 * q * math.sqrt(math.expm1(1 / z**2)))),
    )  # fmt: skip


@cache
def losses_of(z, q, rounds, *relation):
    return loss_of(z, q, *relation).self_compose(rounds)
