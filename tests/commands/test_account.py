"""`python -m dpexp account`, and what it draws."""

import sys
import warnings
from pathlib import Path

import pytest
from jobs import result_of
from made import tracked_job, write_run
from runs import ledger

from dpexp.__main__ import main
from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.ledger import concatenate, read_ledger
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.rounding import up
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.reporting.run_figures import epsilon_over_rounds, trade_off


@pytest.fixture
def written(tmp_path):
    """Writes a ledger file and returns its path."""

    def write(name, run):
        write_run(tmp_path / name, run)
        return str(tmp_path / name)

    return write


def test_a_ledger_file_by_several_accountants(written, capsys):
    run = ledger(2.0, 0.05, 300)
    costs = account([written("a.jsonl", run), "accountant=pld,rdp", "delta=1e-6", "epsilon=2"])
    assert costs == {name: epsilon(run, 1e-6, name) for name in ("pld", "rdp")}
    printed = capsys.readouterr().out
    assert "Privacy cost of 300 rounds, all alike, for adding or removing one record, at δ = 1e-06:" in printed
    for name in costs:
        assert up(costs[name], 6) in printed and up(delta(run, 2.0, name), 4) in printed


def test_several_ledgers_are_composed(written, capsys):
    first, second = ledger(2.0, 0.05, 30), ledger(3.0, 0.1, 20)
    costs = account([written("a.jsonl", first), written("b.jsonl", second), "delta=1e-5"])
    assert costs["pld"] == epsilon(concatenate([first, second]), 1e-5)
    assert "Privacy cost of 2 runs, 50 rounds of 2 kinds, for adding or removing one record" in capsys.readouterr().out


def test_another_adjacency_is_a_claim_of_its_own(written):
    path = written("a.jsonl", ledger(4.0, 1.0, 5))
    replaced = account([path, "delta=1e-5", "adjacency=replace_one"])
    assert replaced["pld"] == pytest.approx(epsilon(ledger(2.0, 1.0, 5), 1e-5), rel=1e-12)
    with pytest.raises(ConfigError, match="adjacency=add_remove cannot be claimed for sampling=fixed_size"):
        account(
            [
                written("b.jsonl", ledger(policy="fixed_size", adjacency="replace_one")),
                "delta=1e-5",
                "adjacency=add_remove",
            ]
        )
    assert account([path, "delta=1e-5", "adjacency=replace_null"]) == account([path, "delta=1e-5"])


@pytest.mark.parametrize("lost, rounds", [("half a closing line", 9), ("half a round", 8), ("but the header", 0)])
def test_a_ledger_that_ends_early_is_read_so_far_and_said_once(written, capsys, lost, rounds):
    path = Path(written("a.jsonl", ledger(2.0, 0.05, 9)))
    end_of(path).unlink(missing_ok=True)  # as of a run that was killed before it came to write it
    lines = path.read_bytes().splitlines(keepends=True)
    left = {
        "half a closing line": [*lines[:-1], lines[-1][:9]],
        "half a round": [*lines[:-2], lines[-2][:9]],
        "but the header": lines[:1],
    }
    path.write_bytes(b"".join(left[lost]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs = account([str(path), "delta=1e-5"])
    assert costs["pld"] == (epsilon(ledger(2.0, 0.05, rounds), 1e-5) if rounds else 0)
    assert f"a.jsonl ends early, after {rounds} rounds: the run was killed" in " ".join(capsys.readouterr().out.split())


def say_the_same(folder, run_id, delta):
    expected = epsilon(read_ledger(folder / "ledger.jsonl"), delta, "moments")
    assert account([str(folder), "accountant=moments"]) == {"moments": expected}
    folder.rename("elsewhere")
    assert account([run_id, "accountant=moments"]) == {"moments": expected}


def test_a_run_of_mlflow_and_its_folder_say_the_same(job):
    say_the_same(job, result_of(job)["mlflow_run_id"], 1e-4)


@pytest.mark.usefixtures("dpexp_job")
def test_a_run_of_mlflow_and_its_folder_remember_delta(tmp_path):
    folder = tracked_job(tmp_path / "made", "privacy.delta=1e-6")
    say_the_same(folder, (folder / "mlflow_run_id").read_text(), 1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a ledger file"),
        (["nowhere.jsonl", "delta=1e-5"], "cannot be read"),
        (["0123abcd", "delta=1e-5"], "no file or folder here, and no run"),
        (["LEDGER"], "delta must be given"),
        (["LEDGER", "delta=2"], "at least 1e-300 and below 1"),
        (["LEDGER", "delta=x"], "could not be converted to Float"),
        (["LEDGER", "delta=1e-5", "accountant=prv"], "known: pld, rdp"),
        (
            ["LEDGER", "delta=1e-5", "acountant=rdp"],
            "acountant: there is no key 'acountant'; did you mean 'accountant'",
        ),
        (["LEDGER", "delta=1e-5", "figure=x.docx"], "figure=x.docx cannot be written .*docx.*; name a .png"),
        (["LEDGER", "delta=1e-5", "figure=nowhere/x.png"], "figure=nowhere/x.png cannot be written .No such file"),
        (["LEDGER", "delta=1e-5", "adjacency=remove"], "known: add_remove"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, written, tmp_path, monkeypatch):
    path = written("a.jsonl", ledger(2.0, 0.05, 3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dpexp", "account", *(path if a == "LEDGER" else a for a in arguments)])
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        main()


def test_figures_show_what_was_computed():
    run = ledger(2.0, 0.05, 300)
    left, right = trade_off(run, 1e-5, ["pld", "rdp"]).axes
    assert [line.get_label() for line in left.lines[:2]] == ["pld", "rdp"]
    x, y = left.lines[0].get_data()
    assert y[0] == epsilon(run, x[0], "pld") and right.lines[0].get_data()[1][0] == pytest.approx(1, abs=1e-5)
    (axes,) = epsilon_over_rounds(run, 1e-5, ["pld", "basic"]).axes
    ends = {line.get_label(): line.get_data()[1][-1] for line in axes.lines}
    assert ends["basic"] == epsilon(run, 1e-5, "basic")
    assert axes.get_yscale() == "log"
