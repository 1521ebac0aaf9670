"""What each accountant is stated for, and that it refuses everything else."""

import math
from dataclasses import dataclass

import pytest
from test_accountants import ledger

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import NAMES, Coverage, check_covered, coverage
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round, SumQueryEvent
from dpexp.accounting.releases import releases
from dpexp.accounting.sampling import Poisson, sampling_event
from dpexp.errors import ConfigError

SAMPLE = sampling_event("poisson", 0.1, 1000)


@dataclass(frozen=True)
class Unknown:
    """Noise that no accountant covers."""

    name: str = "all"
    noise: str = "gaussian"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "run, message",
    [
        (Ledger("add_one", {Round(SAMPLE, (Unknown(),)): 3}), "adjacency=add_one is unknown; known: add_remove, "),
        (Ledger("add_remove", {Round(SAMPLE, (Unknown(noise="cauchy"),)): 3}), "of the query 'all' .cauchy"),
    ],
)  # fmt: skip
def test_anything_not_covered_is_refused(run, message, name):
    for ask in (epsilon, delta):
        with pytest.raises(ConfigError, match=message):
            ask(run, 0.1, name)


@pytest.mark.parametrize("name", ["PLD", "pld ", "zcdp", ""])
def test_an_unknown_accountant_is_refused(name):
    for ask in (lambda: epsilon(ledger(4.0, 0.01, 9), 1e-5, name), lambda: releases(ledger(4.0, 0.01, 9), name),
                lambda: check_covered(Poisson, "add_remove", name)):  # fmt: skip
        with pytest.raises(ConfigError, match=f"accountant={name} is unknown; known: pld, "):
            ask()


class Concentrated:
    """Zero-concentrated DP: ρ = Σ 1/(2z²), and ε = ρ + 2√(ρ log 1/δ)."""

    coverage = Coverage({"all": ("add_remove",)}, ("gaussian",))

    def __init__(self, releases):
        assert all(release.q == 1 and release.policy != "laplace" for release in releases)
        self._rho = sum(count / (2 * release.z**2) for release, count in releases.items())

    def epsilon(self, delta):
        return self._rho + 2 * math.sqrt(self._rho * math.log(1 / delta))


def test_an_accountant_of_ones_own_is_used_for_what_it_covers(monkeypatch):
    own = "test_coverage.Concentrated"
    query = SumQueryEvent("all", 1.0, 3.0)
    full = Round(sampling_event("all", 1.0, 9), (query,))
    assert epsilon(Ledger("add_remove", {full: 7}), 1e-5, own) == pytest.approx(
        7 / 18 + 2 * math.sqrt(7 / 18 * math.log(1e5))
    )
    laplace = Round(sampling_event("all", 1.0, 9), (OneTimeQueryEvent("x", "laplace", 1.0, 2.0, 9.0),))
    for run, message in (
        (ledger(3.0, 0.1, 7), "has no bound for sampling=poisson under adjacency=add_remove"),
        (Ledger("replace_one", {full: 7}), "has no bound for sampling=full_batch under adjacency=replace_one"),
        (Ledger("add_remove", {laplace: 1}), "is not stated for the noise of the query 'x'"),
    ):
        with pytest.raises(ConfigError, match=f"accountant={own} {message}"):
            epsilon(run, 1e-5, own)
    with pytest.raises(ConfigError, match="Round is unknown"):
        coverage("test_coverage.Round")
    monkeypatch.setattr(Concentrated, "epsilon", lambda *_: math.nan)
    with pytest.raises(ConfigError, match="Concentrated gives ε = nan, which is not a number of at least 0"):
        epsilon(Ledger("add_remove", {full: 7}), 1e-5, own)


def test_a_policy_that_covers_nothing_has_no_accountant():
    class Uncovered(Poisson):
        name, covers = "mine", {}

    with pytest.raises(ConfigError, match="sampling=mine has no accountant; give its class `covers`"):
        check_covered(Uncovered, None)
