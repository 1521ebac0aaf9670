"""What `account` and the budget say of ledgers that have lost lines at their end."""

import pytest
from test_ledger_end import cut, resumed  # noqa: F401

from dpexp.accounting.ledger.integrity import end_of
from dpexp.commands.account import account
from dpexp.tracking.data_budget import cost_at


@pytest.fixture
def said(resumed, capsys):  # noqa: F811
    def said():
        account([str(resumed), "delta=1e-5"])
        return " ".join(capsys.readouterr().out.split())

    return said


def test_lines_that_are_missing_are_said_and_the_cost_is_unknown(resumed, said):  # noqa: F811
    cut(resumed, 6)
    assert "ends early, after 3 rounds: lines are missing" in said()
    assert cost_at(resumed).ledger is None


def test_what_the_end_file_cannot_show_is_said(resumed, said):  # noqa: F811
    assert "if it and ledger.end.json were both restored to an earlier state, nothing would show it" in said()
    end_of(resumed).unlink()
    cut(resumed, 6)
    assert "ledger.jsonl: there is no ledger.end.json next to it, so that it may have been cut at an earlier" in said()
