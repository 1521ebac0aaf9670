"""`python -m dpexp account` of runs, of ledgers that have lost lines, and of parts of one data set."""

from dataclasses import replace

import pytest
from made import tracked_job, write_run
from omegaconf import OmegaConf
from runs import ledger

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.ledger import Part, concatenate, read_ledger, write_ledger
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.risk import risk
from dpexp.accounting.rounding import up
from dpexp.commands.account import account, with_earlier
from dpexp.commands.train import _on_these_data
from dpexp.config import register
from dpexp.errors import ConfigError

RULE, OTHER = "sha256 of 'name' in data.id='people'", "sha256 of 'name' in data.id='others'"


def on(low, high, rule=RULE, z=2.0, rounds=30):
    """A run on a part of the data."""
    return replace(ledger(z, 0.1, rounds), part=Part(rule, low, high))


@pytest.fixture
def accounted(tmp_path, printed):
    """Accounts for runs, at δ = 1e-5 if no other is given; returns their costs, and what is shown."""

    def accounted(*runs, **options):
        paths = [tmp_path / f"{k}.jsonl" for k in range(len(runs))]
        for path, run in zip(paths, runs, strict=True):
            write_ledger(path, run)
        options = {"delta": "1e-5"} | options
        costs = account([*map(str, paths), *(f"{name}={value}" for name, value in options.items())])
        return costs, printed()

    return accounted


def test_a_ledger_is_accounted_by_several_accountants(accounted):
    run = ledger(2.0, 0.05, 300)
    costs, printed = accounted(run, accountant="pld,rdp", delta=1e-6, epsilon=2)
    assert costs == {name: epsilon(run, 1e-6, name) for name in ("pld", "rdp")}
    assert "Privacy cost of 300 rounds, all alike, for adding or removing one record, at δ = 1e-06:" in printed
    for name, cost in costs.items():
        assert up(cost, 6) in printed and up(delta(run, 2.0, name), 4) in printed


def test_several_ledgers_are_composed(accounted):
    runs = ledger(2.0, 0.05, 30), ledger(3.0, 0.1, 20)
    costs, printed = accounted(*runs)
    assert costs == {"pld": epsilon(concatenate(runs), 1e-5)}
    assert "Privacy cost of 2 runs, 50 rounds of 2 kinds, for adding or removing one record" in printed


def test_another_adjacency_is_a_claim_of_its_own(accounted):
    run = ledger(4.0, 1.0, 5)
    of = {name: accounted(run, adjacency=name)[0]["pld"] for name in ("add_remove", "replace_null", "replace_one")}
    assert of["replace_one"] == pytest.approx(epsilon(ledger(2.0, 1.0, 5), 1e-5), rel=1e-12)
    assert of["replace_null"] == of["add_remove"] == epsilon(run, 1e-5)
    with pytest.raises(ConfigError, match="adjacency=add_remove cannot be claimed for sampling=fixed_size"):
        accounted(ledger(policy="fixed_size", adjacency="replace_one"), adjacency="add_remove")


@pytest.mark.parametrize(
    "lines, more, has_end_file, rounds, said",
    [
        (9, 0, True, 5, "if it and ledger.end.json were both restored to an earlier state, nothing would show it"),
        (6, 0, True, 3, "ledger.jsonl ends early, after 3 rounds: lines are missing"),
        (6, 0, False, 3, "ledger.jsonl: there is no ledger.end.json next to it, so that it may have been cut at an"),
        (8, 9, False, 5, "ledger.jsonl ends early, after 5 rounds: the run was killed"),
        (7, 9, False, 4, "ledger.jsonl ends early, after 4 rounds: the run was killed"),
        (1, 0, False, 0, "ledger.jsonl ends early, after 0 rounds: the run was killed"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_of_a_ledger_that_lost_its_end_what_is_left_is_accounted(
    lines, more, has_end_file, rounds, said, tmp_path, printed
):
    """Of a run that was resumed after three rounds and made two more, so many lines are left, and bytes of the next."""
    path = tmp_path / "ledger.jsonl"
    write_run(path, ledger(2.0, 0.05, 3))
    write_run(path, ledger(2.0, 0.05, 2), resume=True)
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[:lines]) + b"".join(written[lines:])[:more])
    if not has_end_file:
        end_of(path).unlink()
    costs = account([str(path), "delta=1e-5"])
    assert costs["pld"] == (epsilon(ledger(2.0, 0.05, rounds), 1e-5) if rounds else 0)
    assert said in printed()


@pytest.mark.usefixtures("dpexp_job")
def test_a_run_of_mlflow_and_its_folder_remember_delta(tmp_path):
    folder = tracked_job(tmp_path / "made", "privacy.delta=1e-6")
    run_id = (folder / "mlflow_run_id").read_text()
    expected = {"moments": epsilon(read_ledger(folder / "ledger.jsonl"), 1e-6, "moments")}
    assert account([str(folder), "accountant=moments"]) == expected
    folder.rename("elsewhere")
    assert account([run_id, "accountant=moments"]) == expected


# Parts of one data set


def test_account_takes_the_worst_of_disjoint_parts_for_each_figure(accounted):
    """One part costs more ε at this δ, the other allows for the larger advantage."""
    rare, *others = on(0, 0.5, z=0.5, rounds=1), on(0.5, 1, rounds=60), on(0.5, 0.75, z=9.0)
    often = concatenate(others)
    costs, printed = accounted(rare, *others, delta="1e-9", epsilon=1, accountant="pld,rdp")
    assert costs == {name: epsilon(rare, 1e-9, name) for name in ("pld", "rdp")}
    assert costs["pld"] > epsilon(often, 1e-9) and risk(rare).advantage < risk(often).advantage
    for said in (
        f"a record is at most in the runs of part [0, 0.5) by {RULE}; or of part [0.5, 1) by {RULE} and", "In parallel",
        "91 rounds", up(max(delta(rare, 1.0), delta(often, 1.0)), 4),
        f"at most {up(100 * risk(often).advantage, 3)} percentage points",
    ):  # fmt: skip
        assert said in printed


@pytest.mark.parametrize(
    "second, adjacency, in_sequence",
    [
        (on(0.4, 1), "add_remove", True),
        (on(0.5, 1, OTHER), "add_remove", True),
        (ledger(2.0, 0.1, 30), "add_remove", True),
        (on(0.5, 1), "replace_null", True),  # a record that is replaced may be in both
        (on(0, 0.5), "add_remove", False),
    ],
)
def test_account_adds_up_parts_that_one_record_may_be_in(accounted, second, adjacency, in_sequence):
    costs, printed = accounted(on(0, 0.5), second, adjacency=adjacency)
    assert costs["pld"] == epsilon(ledger(2.0, 0.1, 60, adjacency=adjacency), 1e-5)
    assert ("In sequence: all costs add up" in printed) == in_sequence


def test_a_figure_of_disjoint_parts_is_refused(accounted, tmp_path):
    with pytest.raises(ConfigError, match=r"figure=.*shows one composition"):
        accounted(on(0, 0.5), on(0.5, 1), figure=tmp_path / "x.png")


def test_a_run_tells_what_it_costs_with_earlier_ones_on_other_parts():
    one, other = on(0, 0.5), on(0.5, 1, z=1.0)
    cost = f"ε = {up(epsilon(other, 1e-5), 4)}"
    assert with_earlier([one], other, 1e-5) == f"with 1 earlier run on these data, {cost}"
    covered = f"{cost} (1 not covered: without privacy, or without a ledger)"
    assert with_earlier([one, None], other, 1e-5) == f"with 2 earlier runs on these data, {covered}"


def test_a_job_says_how_its_data_are_known():
    register()
    by_path = OmegaConf.create({"data": {"path": "/a[b]/rows.csv", "id": "${resolved:${data.path}}"}})
    path = "Earlier runs are known by the path /a[b]/rows.csv; data.id names the data wherever they are."
    earlier = [*_on_these_data(by_path, "with 1 earlier run, ε = 4")]
    assert earlier == ["After this job, with 1 earlier run, ε = 4.", path] and [*_on_these_data(by_path, "")] == [path]
    by_path.data.id = "rows"
    assert [*_on_these_data(by_path, "")] == []
