"""Ledgers that earlier versions wrote are read, and cost what they cost then, to the last digit."""

import json
from pathlib import Path

import pytest

import dpexp

LEDGERS = Path(__file__).parents[1] / "ledgers"
COSTS = json.loads((LEDGERS / "epsilons.json").read_text())


@pytest.mark.parametrize("name", COSTS)
def test_an_old_ledger_costs_what_it_did(name):
    ledger = dpexp.read_ledger(LEDGERS / f"{name}.jsonl")
    said = dict(COSTS[name])
    assert (ledger.training_rounds, ledger.unit) == (said.pop("rounds"), said.pop("unit"))
    found = {accountant: dpexp.epsilon(ledger, 1e-5, accountant) for accountant in said}
    assert found == pytest.approx(said, rel=1e-13)  # exp and FFT differ in their last bits between processors
