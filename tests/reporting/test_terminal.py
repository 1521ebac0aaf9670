"""What the terminal says of a job that goes on."""

import math

import pytest
from plans import plan_of
from torch import nn

from dpexp import epsilon
from dpexp.accounting.ledger.writer import LedgerWriter
from dpexp.accounting.rounding import up
from dpexp.reporting.terminal import print_plan, print_resumed


def test_a_resumed_job_says_at_which_epsilon_it_ends_unless_that_is_the_plans(tmp_path, printed):
    """Also where no round is lost, but an epoch that was broken off counts as a whole."""
    plan, dearer = (plan_of(nn.Linear(2, 1), n=100, q=0.1, noise_multiplier=z, steps=20) for z in (2.0, 1.5))
    LedgerWriter(tmp_path / "ledger.jsonl", plan.adjacency).close()
    most = up(epsilon(dearer.ledger(), 1e-3), 4)
    for at_end, said in ((dearer.ledger(), f"so the job will end at ε ≤ {most}."), (plan.ledger(), ""), (None, "")):
        print_resumed(plan, tmp_path, 1e-3, "pld", 7, at_end)
        shown = printed()
        assert shown.startswith("Resuming at round 7 of 20") and shown.count("will end") == bool(said)
        assert said in shown


@pytest.mark.parametrize("z", [1.0, 400.0])
def test_a_plan_whose_noise_drowns_the_gradients_says_by_how_much(z, printed):
    plan = plan_of(nn.Linear(2, 1), n=100, q=0.1, noise_multiplier=z, steps=25)
    ratio = z * math.sqrt(3) / (100 * 0.1 * math.sqrt(25))  # z√d/(q n √T)
    assert plan.noise_ratio == pytest.approx(ratio)
    print_plan(plan, 1e-3, {}, [])
    shown = printed()
    said = f"Noise drowns the gradients: over all 25 rounds it is {ratio:.2g} times as long"
    assert (said in shown) == (z == 400.0) == ("drowns" in shown)
