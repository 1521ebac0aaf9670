"""What each accountant is stated for, and that it refuses everything else."""

import math
from dataclasses import dataclass

import pytest
from runs import ledger, round_of

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import NAMES, Coverage, check_covered, coverage
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round
from dpexp.accounting.releases import releases
from dpexp.accounting.sampling import Poisson
from dpexp.errors import ConfigError


@dataclass(frozen=True)
class Unknown:
    """Noise that no accountant covers."""

    name: str = "all"
    noise: str = "gaussian"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ask", [epsilon, delta])
@pytest.mark.parametrize(
    "adjacency, noise, message",
    [
        ("add_one", "gaussian", "adjacency=add_one is unknown; known: add_remove, "),
        ("add_remove", "cauchy", "of the query 'all' .cauchy"),
    ],
)
def test_anything_not_covered_is_refused(adjacency, noise, message, ask, name):
    run = Ledger(adjacency, {Round(round_of().sampling, (Unknown(noise=noise),)): 3})
    with pytest.raises(ConfigError, match=message):
        ask(run, 0.1, name)


@pytest.mark.parametrize("name", ["PLD", "pld ", "zcdp", ""])
@pytest.mark.parametrize(
    "ask, given", [(epsilon, (ledger(), 1e-5)), (releases, (ledger(),)), (check_covered, (Poisson, "add_remove"))]
)
def test_an_unknown_accountant_is_refused(name, ask, given):
    with pytest.raises(ConfigError, match=f"accountant={name} is unknown; known: pld, "):
        ask(*given, name)


class Concentrated:
    """Zero-concentrated DP: ρ = Σ 1/(2z²), and ε = ρ + 2√(ρ log 1/δ)."""

    coverage = Coverage({"all": ("add_remove",)}, ("gaussian",))

    def __init__(self, releases):
        assert all(release.q == 1 and release.policy != "laplace" for release in releases)
        self._rho = sum(count / (2 * release.z**2) for release, count in releases.items())

    def epsilon(self, delta):
        return self._rho + 2 * math.sqrt(self._rho * math.log(1 / delta))


OWN = "test_coverage.Concentrated"
LAPLACE = Round(round_of(policy="all").sampling, (OneTimeQueryEvent("x", "laplace", 1.0, 2.0, 9.0),))


def test_an_accountant_of_ones_own_is_used():
    expected = 7 / 18 + 2 * math.sqrt(7 / 18 * math.log(1e5))
    assert epsilon(ledger(3.0, 1.0, 7, "all"), 1e-5, OWN) == pytest.approx(expected)


@pytest.mark.parametrize(
    "run, message",
    [
        (ledger(3.0, 0.1, 7), f"accountant={OWN} has no bound for sampling=poisson under adjacency=add_remove"),
        (ledger(3.0, 1.0, 7, "all", "replace_one"), "no bound for sampling=full_batch under adjacency=replace_on"),
        (Ledger("add_remove", {LAPLACE: 1}), f"accountant={OWN} is not stated for the noise of the query 'x'"),
    ],
)
def test_an_accountant_of_ones_own_is_used_for_what_it_covers_alone(run, message):
    with pytest.raises(ConfigError, match=message):
        epsilon(run, 1e-5, OWN)


def test_what_is_no_accountant_is_refused():
    with pytest.raises(ConfigError, match="Round is unknown"):
        coverage("test_coverage.Round")


def test_what_an_accountant_of_ones_own_gives_must_be_an_epsilon(monkeypatch):
    monkeypatch.setattr(Concentrated, "epsilon", lambda *_: math.nan)
    with pytest.raises(ConfigError, match="Concentrated gives ε = nan, which is not a number of at least 0"):
        epsilon(ledger(policy="all"), 1e-5, OWN)


def test_a_policy_that_covers_nothing_has_no_accountant():
    class Uncovered(Poisson):
        name, covers = "mine", {}

    with pytest.raises(ConfigError, match="sampling=mine has no accountant; give its class `covers`"):
        check_covered(Uncovered, None)
