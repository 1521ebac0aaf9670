"""A budget for all runs on a data set: who is admitted by the Rényi filter, and that no job gets past it."""

import json
import re
import shutil
from dataclasses import asdict

import pytest
from jobs import FORKS, store_of
from mlflow import MlflowClient
from test_run_costs import first_lines, lengths, rounds, run_on, store, words

from dpexp.accounting.calibration import solve
from dpexp.accounting.ledger import Ledger, LedgerWriter, read_ledger
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.risk import Epsilon
from dpexp.commands import train
from dpexp.errors import ConfigError
from dpexp.tracking import data_budget
from dpexp.tracking.data_budget import COUNTS_AS, costs_in, lock_of
from dpexp.tracking.job_folder import LEDGER, OUTPUT_TAG, PLANNED_LEDGER, START_TAG
from dpexp.tracking.mirror import earlier_run

__all__ = ["run_on", "store"]  # fixtures
pytestmark = pytest.mark.usefixtures("bare")
SMALL = {"epsilon": 0.5, "delta": 1e-5}
KEPT = budget(SMALL)
TAG = {"dpexp.budget": json.dumps(asdict(KEPT))}
FIRST = rounds(60.0, 3)


def plan_of(epsilon, count):
    """Rounds that cost ε by pld, and not more than a thousandth less."""
    value = solve("noise_multiplier", lambda z: rounds(z, count), Epsilon(epsilon, 1e-5), start=5.0).value
    return rounds(value, count)


def most(z, before=None):
    """How many rounds fit into the budget, after others."""
    spent = rho(before, KEPT.order) if before else 0.0
    return next(n for n in range(1, 10**4) if not KEPT.holds(spent + rho(rounds(z, n), KEPT.order))) - 1


@pytest.fixture
def ask(run_on):
    """Whether a job that plans `asked` is admitted, and by what it says."""

    def ask(asked, earlier=None, given=SMALL):
        facts = {"delta": 1e-5, "spends": {"data_id": run_on.data_id, "budget": given, "trains": False}}
        run = earlier and run_on.client.get_run(run_on.id(earlier))
        data_budget.start(run_on.uri, run_on.client, facts, asked, None, run, lambda: None)

    return ask


def test_a_budget_and_an_adjacency_are_those_of_the_runs_before(run_on, ask):
    run_on(rounds(60.0, 1), **TAG)
    ask(rounds(60.0, 1))
    with pytest.raises(ConfigError, match=r"not the one that run 1 kept for data.id=.*, which is ε = 0.5 at"):
        ask(rounds(60.0, 1), given={"epsilon": 5, "delta": 1e-5})
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(rounds(60.0, 1, "replace_null"))


def test_the_second_run_is_planned_from_the_first_ones_result(run_on, ask, capsys):
    """What the first one's rounds showed decides about the second, and the filter over all of them about how much that
    may do."""
    ask(FIRST)
    said = words(capsys)
    assert "this job's plan asks for" in said and "and fits" in said
    run_on(FIRST, **TAG)
    fits = most(40.0, before=FIRST)
    assert fits >= 1
    ask(rounds(40.0, fits))
    with pytest.raises(ConfigError, match=r"by 1 run, \S+ % is left"):
        ask(rounds(40.0, fits + 1))


@pytest.mark.parametrize("epsilon, count", [(0.5, 40), (3.0, 300)])
def test_a_refusal_names_the_epsilon_that_fits(run_on, ask, epsilon, count):
    run_on(FIRST, **TAG)
    with pytest.raises(
        ConfigError, match=r"by 1 run, .* % is left.*asks for .* %.*fits at privacy.epsilon="
    ) as refused:
        ask(plan_of(epsilon, count))
    fits = float(re.search(r"privacy\.epsilon=([\d.]+)", str(refused.value))[1])
    ask(plan_of(fits, count))
    with pytest.raises(ConfigError, match="asks for"):
        ask(plan_of(fits * 1.02, count))


def test_nothing_fits_into_a_budget_that_is_used_up(run_on, ask):
    run_on(rounds(60.0, most(60.0) + 1))
    with pytest.raises(ConfigError, match=r"0 % is left.*no plan like it fits"):
        ask(rounds(60.0, 1))


def test_a_budget_counts_the_plan_of_who_has_not_ended(run_on, ask):
    half = rounds(60.0, most(60.0) // 2 + 1)
    run_on.begin(half)
    with pytest.raises(ConfigError, match="by 1 run"):
        ask(half)
    ask(rounds(60.0, most(60.0, before=half)))


def test_a_job_is_resumed_if_what_it_did_and_still_does_fits(run_on, ask):
    full = most(60.0)
    output = run_on(rounds(60.0, 2), rounds(60.0, full), "KILLED", **TAG)
    ask(rounds(60.0, full), earlier=output)
    with pytest.raises(ConfigError, match=r"asks for .* so it cannot go on"):
        ask(rounds(60.0, full + 1), earlier=output)  # a round that is done again
    run_on(rounds(60.0, 1))  # another takes some meanwhile
    with pytest.raises(ConfigError, match="is spent or reserved by 1 run"):
        ask(rounds(60.0, full), earlier=output)


def test_a_copy_of_a_jobs_folder_is_not_resumed_as_the_job(run_on):
    output, client = run_on(FIRST), run_on.client
    run_id, copy = run_on.id(output), output.with_name(f"{output.name} copy")
    shutil.copytree(output, copy)

    def resumed(folder, *starts):
        found = earlier_run(client, folder, {"starts": starts})
        return found and found.info.run_id

    client.set_tag(run_id, OUTPUT_TAG, str(output))
    assert resumed(output) == run_id and resumed(copy) is None
    shutil.rmtree(output)  # or another machine
    assert resumed(copy) == run_id
    client.set_tag(run_id, START_TAG, "b")  # which went on elsewhere since
    assert resumed(copy, "a") is None and resumed(copy, "a", "b") == run_id
    first_lines(copy / LEDGER, 2)  # as before the job went on: what it has done since would count nowhere
    with pytest.raises(ConfigError, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
        resumed(copy)


# Jobs

KEEP = "privacy.budget={epsilon: 4, delta: 1e-5}"
QUICK = (
    "model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "data.id=digits",
    "sampling.expected_batch_size=512",
)  # fmt: skip


@pytest.fixture
def costs(tmp_path):
    """The costs of the jobs."""
    return lambda: costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")


def test_a_budget_is_kept_from_job_to_job_and_over_the_trials_of_a_sweep(dpexp_job, tmp_path, capsys, costs):
    refused = r"by 1 run, 5[34]\S* % is left.*asks for 132 %.*fits at privacy.epsilon=2"
    with pytest.raises(SystemExit, match=refused):
        dpexp_job("-m", *QUICK, KEEP, "privacy.epsilon=2,3")
    assert "2 trials, 1 finished" in capsys.readouterr().out and "finished" in costs()[0].shown
    (ledger,) = tmp_path.glob("outputs/multirun/*/*/*/ledger.jsonl")
    runs = store_of(tmp_path).search_runs(["1"])
    (run,) = [one for one in runs if "dpexp.data_id" in one.data.tags]
    assert run.data.params["data.id"] == run.data.tags["dpexp.data_id"] == "digits"
    assert "id: digits" in (ledger.parent / "config.yaml").read_text() and "budget" not in run.info.run_name
    with pytest.raises(SystemExit, match=refused):
        dpexp_job(*QUICK, KEEP, "privacy.epsilon=3", "train=false")
    assert len(store_of(tmp_path).search_runs(["1"])) == len(runs)
    for name in ("config.yaml", LEDGER, "result.json"):
        (ledger.parent / name).unlink()
    with pytest.raises(SystemExit, match="already holds a run, with its mlflow_run_id"):
        dpexp_job(*QUICK, KEEP, "privacy.epsilon=2.5", f"hydra.run.dir={ledger.parent}")


def race(barrier):
    """Lets a job of this process begin at the same moment as others."""
    from dpexp.tracking import run

    opened = run.open_store

    def together(*args):
        found = opened(*args)
        barrier.wait(60)
        return found

    run.open_store = together


def test_of_processes_that_race_for_the_last_of_a_budget_exactly_one_runs(forked, tmp_path):
    barrier = FORKS.Barrier(2)
    asked = (*QUICK, KEEP, "privacy.epsilon=2.2")  # for one of which there is room, and for no two
    jobs = [forked(*asked, first=(race, barrier)) for _ in range(2)]
    said = {job.ended(): job.exitcode for job in jobs}
    (refused,) = [words for words, code in said.items() if code]
    assert len(said) == 2 and "is spent or reserved by 1 run" in refused
    (path,) = tmp_path.glob("outputs/*/*/ledger.jsonl")
    kept = budget({"epsilon": 4, "delta": 1e-5})
    spent = rho(read_ledger(path), kept.order)
    assert kept.holds(spent) and not kept.holds(2 * spent)


@pytest.fixture
def failed(dpexp_job, tmp_path, monkeypatch):
    """Gives the folder of a job in which a method fails at its so-manieth call."""

    def run(owner, name, number):
        method, calls = getattr(owner, name), []

        def failing(*given):
            result = method(*given)
            calls.append(1)
            if len(calls) == number:
                raise RuntimeError("no data")
            return result

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no data"):
            patched.setattr(owner, name, failing)
            dpexp_job(*QUICK, KEEP, "privacy.epsilon=2", "checkpoint.every_n_rounds=1")
        (folder,) = (path.parent for path in tmp_path.glob("outputs/*/*/run.json"))
        return folder

    return run


def test_a_job_is_resumed_with_all_of_its_rounds_and_in_its_own_store(failed, dpexp_job, tmp_path, costs):
    folder = failed(LedgerWriter, "commit", 2)
    (began,), whole = store_of(tmp_path).search_runs(["1"]), (folder / LEDGER).read_bytes()
    assert lengths(costs()) == [2] and (folder / "last.ckpt").exists()
    first_lines(folder / LEDGER, 2)  # of which no plan may be sent
    with pytest.raises(SystemExit, match="has lost lines"):
        dpexp_job("resume", str(folder))
    assert lengths(costs()) == [2]
    (folder / LEDGER).write_bytes(whole)
    shutil.copytree(folder, copy := tmp_path / "copy")
    elsewhere = (f"tracking.uri=sqlite:///{tmp_path}/b.db", "checkpoint.resume=true", f"hydra.run.dir={copy}")
    with pytest.raises(
        SystemExit, match=r"mlflow\.db would not know that the job in .* releases more of data\.id=digits"
    ):
        dpexp_job(*QUICK, KEEP, "privacy.epsilon=2", *elsewhere)
    dpexp_job("resume", str(folder))
    (run,) = store_of(tmp_path).search_runs(["1"])
    assert run.info.run_id == began.info.run_id
    changed = {tag for tag, _ in run.data.tags.items() ^ began.data.tags.items() if "resumed" not in tag}
    assert changed <= {"dpexp.error", "dpexp.pid", START_TAG, COUNTS_AS, "mlflow.note.content"}
    assert run.data.tags["dpexp.resumed.command"] == f"dpexp resume {folder}"
    # The second round was written and not finished, so that it was done again: three more, five in all.
    assert len(read_ledger(folder / PLANNED_LEDGER)) == 5 and lengths(costs()) == [5] and not costs()[0].note


def test_a_job_that_fails_before_its_first_round_spends_nothing(failed, costs):
    from dpexp.privacy.callback import PrivacyCallback

    folder = failed(PrivacyCallback, "on_fit_start", 1)
    (charge,) = costs()
    assert "failed" in charge.shown and lengths([charge]) == [0] and not charge.note
    assert read_ledger(folder / LEDGER) == Ledger("add_remove", {})


def test_a_store_has_one_lock_whatever_it_is_called(tmp_path):
    names = (
        "sqlite:///{}/s.db",
        "sqlite+pysqlite:///{}/s.db",
        "sqlite:///{}/../{}/s.db",
        "sqlite:///{}/s.db?timeout=9",
    )
    (lock,) = {lock_of(name.format(tmp_path, tmp_path.name), "a") for name in names}
    assert lock.parent == tmp_path and lock != lock_of(names[0].format(tmp_path), "b")
    assert lock_of("http://one", "a") == lock_of("http://127.0.0.1:5000", "a") != lock


def test_a_server_that_does_not_take_the_plan_starts_no_job(dpexp_job, tmp_path, monkeypatch):
    def refused(*given):
        raise OSError("no route to host")

    monkeypatch.setattr(MlflowClient, "log_artifact", refused)
    with pytest.raises(SystemExit, match=r"^dpexp: tracking.uri=.* cannot be used: no route to host$"):
        dpexp_job(*QUICK, "privacy.epsilon=2")
    assert not [*tmp_path.glob("outputs/*/*/ledger.jsonl")]


def test_a_job_that_names_no_data_enters_no_code_about_other_runs(dpexp_job, monkeypatch):
    for owner, name in (
        (train, "earlier_on_data"), (train, "with_earlier"), (data_budget, "start"), (data_budget, "end"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, None)  # whose call would fail
    output = dpexp_job(*QUICK, "privacy.epsilon=2", "data.id=null", "sampling.steps=1")
    assert read_ledger(output / "ledger.jsonl").training_rounds == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["data.id=", KEEP], "data.id='' must be a name"),
        (["data.id=' a'"], "without blanks at its ends"),
        ([KEEP], "privacy.budget needs data.id"),
        (["data.id=d", KEEP, "tracking=none"], "privacy.budget with tracking.uri=null: no later job could know"),
        (["data.id=d", KEEP, "debug=true"], "privacy.budget with debug=true"),
        (["data.id=d", KEEP, "privacy.enabled=false"], "not private .trained without privacy."),
        (["data.id=d", KEEP, "privacy.noise_seed=1"], "not private .the noise seed is known."),
        (["data.id=d", "privacy.budget=8"], "privacy.budget=8 is not understood; give"),
        (
            ["data.id=d", KEEP, "sampling=truncated_poisson", "sampling.max_batch_size=700"],
            "sampling=truncated_poisson under adjacency=replace_null has no bound; choose sampling=poisson",
        ),
        (["data.id=d", KEEP, "privacy.adjacency=replace_one"], "sampling=poisson under adjacency=replace_one has no"),
        (["account", "data.id=d"], "does not exist, so there are no runs to read"),
        (["account", "data.id=d", "acountant=rdp"], "did you mean 'accountant'"),
        (["account", "data.id=d", "accountant=gdp"], "gdp is gone: its ε was an approximation"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, dpexp_job):
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        dpexp_job(*arguments)
