"""A budget for all runs on a data set: who is admitted by the Rényi filter, and that no job gets past it."""

import json
import os
import re
import shutil
import signal
import sys
from cProfile import Profile
from dataclasses import asdict

import dp_accounting
import pytest
from dp_accounting import rdp
from jobs import FORKS, store_of
from mlflow import MlflowClient
from test_run_costs import EVENT, rounds, run_on, store

from dpexp.__main__ import main
from dpexp.accounting.calibration import solve
from dpexp.accounting.ledger import Ledger, LedgerWriter, ledger_so_far, read_ledger, write_ledger
from dpexp.accounting.multiple_runs import budget, rho
from dpexp.accounting.risk import Epsilon
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
    run_on(z=60.0, count=1, planned=1, **TAG)
    ask(rounds(60.0, 1))
    with pytest.raises(ConfigError, match=r"not the one that run 1 kept for data.id=.*, which is ε = 0.5 at"):
        ask(rounds(60.0, 1), given={"epsilon": 5, "delta": 1e-5})
    with pytest.raises(ConfigError, match=r"runs for different adjacencies \(add_remove, replace_null\)"):
        ask(rounds(60.0, 1, "replace_null"))


def test_the_second_run_is_planned_from_the_first_ones_result(run_on, ask, capsys):
    """What the first one's rounds showed decides about the second, and the filter over all of them about how much that
    may do."""
    first = rounds(60.0, 3)
    ask(first)
    assert "this job's plan asks for" in (said := " ".join(capsys.readouterr().out.split())) and "and fits" in said
    run_on(z=60.0, count=3, planned=3, **TAG)
    seen = 0.3  # what was released
    z = 40.0 if seen > 0.2 else 80.0
    fits = most(z, before=first)
    renyi = rdp.RdpAccountant([KEPT.order])
    for noise, count in ((60.0, 3), (z, fits)):
        renyi.compose(dp_accounting.PoissonSampledDpEvent(EVENT.q, dp_accounting.GaussianDpEvent(noise)), count)
    assert fits >= 1 and float(renyi.rdp[0]) <= KEPT.limit * 1.001
    ask(rounds(z, fits))
    with pytest.raises(ConfigError, match=r"by 1 run, \S+ % is left"):
        ask(rounds(z, fits + 1))


@pytest.mark.parametrize("epsilon, count", [(0.5, 40), (3.0, 300)])
def test_a_refusal_names_the_epsilon_that_fits(run_on, ask, epsilon, count):
    run_on(z=60.0, count=3, planned=3, **TAG)
    with pytest.raises(
        ConfigError, match=r"by 1 run, .* % is left.*asks for .* %.*fits at privacy.epsilon="
    ) as refused:
        ask(plan_of(epsilon, count))
    fits = float(re.search(r"privacy\.epsilon=([\d.]+)", str(refused.value))[1])
    ask(plan_of(fits, count))
    with pytest.raises(ConfigError, match="asks for"):
        ask(plan_of(fits * 1.02, count))


def test_nothing_fits_into_a_budget_that_is_used_up(run_on, ask):
    run_on(z=60.0, count=most(60.0) + 1, planned=most(60.0) + 1)
    with pytest.raises(ConfigError, match=r"0 % is left.*no plan like it fits"):
        ask(rounds(60.0, 1))


def test_a_budget_counts_the_plan_of_who_has_not_ended(run_on, ask):
    half = most(60.0) // 2 + 1
    output = run_on.begin(rounds(60.0, half))
    with pytest.raises(ConfigError, match="by 1 run"):
        ask(rounds(60.0, half))
    shutil.rmtree(output)
    run_on.client.delete_run(run_on.client.search_runs([run_on.experiment])[0].info.run_id)
    with pytest.raises(ConfigError, match="by 1 run"):
        ask(rounds(60.0, half))
    other = run_on.begin(rounds(60.0, 1))
    write_ledger(other / LEDGER, Ledger("add_remove", {}))  # it failed before its first round
    run_on.end(other, "FAILED")
    assert run_on.tag(other) == LEDGER
    ask(rounds(60.0, most(60.0, before=rounds(60.0, half))))


def test_a_run_without_its_artifact_refuses_every_budget(run_on, ask):
    output = run_on(z=60.0, count=1)
    run_on.artifact(output, LEDGER).unlink()
    with pytest.raises(
        ConfigError, match=r"cannot be kept: what the run run 1 spent is unknown .there is no ledger\.jsonl"
    ):
        ask(rounds(60.0, 1))


def test_a_job_is_resumed_if_what_it_did_and_still_does_fits(run_on, ask):
    full = most(60.0)
    output = run_on(z=60.0, count=2, planned=full, status="KILLED", **TAG)
    ask(rounds(60.0, full), earlier=output)
    with pytest.raises(ConfigError, match=r"asks for .* so it cannot go on"):
        ask(rounds(60.0, full + 1), earlier=output)  # a round that is done again
    run_on(z=60.0, count=1, planned=1)  # another takes some meanwhile
    with pytest.raises(ConfigError, match="is spent or reserved by 1 run"):
        ask(rounds(60.0, full), earlier=output)


def test_a_copy_of_a_jobs_folder_is_not_resumed_as_the_job(run_on):
    output = run_on(count=3)
    copy = output.with_name(f"{output.name} copy")
    shutil.copytree(output, copy)
    run_on.client.set_tag(run_on.id(output), OUTPUT_TAG, str(output))
    first = {"starts": ["a"]}
    assert earlier_run(run_on.client, output, first).info.run_id == run_on.id(output)
    assert earlier_run(run_on.client, copy, first) is None
    shutil.rmtree(output)  # or another machine
    assert earlier_run(run_on.client, copy, first).info.run_id == run_on.id(copy)
    run_on.client.set_tag(run_on.id(copy), START_TAG, "b")  # which went on elsewhere since
    assert earlier_run(run_on.client, copy, first) is None
    assert earlier_run(run_on.client, copy, {"starts": ["a", "b"]}).info.run_id == run_on.id(copy)


# Jobs

KEEP = "privacy.budget={epsilon: 4, delta: 1e-5}"
QUICK = (
    "model=logistic", "sampling.steps=4", "trainer.num_evaluations=0", "data.id=digits",
    "sampling.expected_batch_size=512",
)  # fmt: skip


def job(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dpexp", *QUICK, *arguments])
    main()


def test_a_budget_is_kept_from_job_to_job(dpexp_job, tmp_path, monkeypatch):
    output = dpexp_job(*QUICK, KEEP, "privacy.epsilon=2")
    client = store_of(tmp_path)
    (run,) = client.search_runs(["1"])
    assert run.data.params["data.id"] == "digits" and run.data.tags["dpexp.data_id"] == "digits"
    assert "id: digits" in (output / "config.yaml").read_text() and "budget" not in run.info.run_name
    with pytest.raises(SystemExit, match=r"by 1 run, 5[34]\S* % is left.*asks for 132 %.*fits at privacy.epsilon=2"):
        job(monkeypatch, KEEP, "privacy.epsilon=3", "train=false")
    assert len(client.search_runs(["1"])) == 1
    for name in ("config.yaml", "ledger.jsonl", "result.json"):
        (output / name).unlink()
    with pytest.raises(SystemExit, match="already holds a run, with its mlflow_run_id"):
        job(monkeypatch, KEEP, "privacy.epsilon=2.5", f"hydra.run.dir={output}")


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


def kill_in_round(number):
    commits, commit = 0, LedgerWriter.commit

    def counted(self):
        nonlocal commits
        commit(self)
        commits += 1
        if commits == number:
            os.kill(os.getpid(), signal.SIGKILL)

    LedgerWriter.commit = counted


@pytest.fixture
def killed(forked, tmp_path):
    """Gives the folder of a job that was killed as it wrote a round."""

    def start(number, *arguments):
        job = forked(*QUICK, *arguments, "checkpoint.every_n_rounds=1", first=(kill_in_round, number))
        said = job.ended()
        assert job.exitcode == -signal.SIGKILL, said
        (checkpoint,) = tmp_path.glob("outputs/*/*/last.ckpt")
        return checkpoint.parent

    return start


def test_a_killed_job_counts_as_its_plan_until_it_is_resumed(tmp_path, monkeypatch, dpexp_job, killed):
    folder = killed(2, KEEP, "privacy.epsilon=2")
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert len(ledger_so_far(folder / LEDGER)) == 2 and len(read_ledger(folder / PLANNED_LEDGER)) == 4
    (crashed,) = costs_in(uri, "digits")
    assert len(crashed.ledger) == 4 and "as its plan" in crashed.note
    # The second round was written and not finished, so that a resumed job does it again: three more, five in all.
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup)
    (began,) = store_of(tmp_path).search_runs(["1"])
    assert began.data.tags[COUNTS_AS] == PLANNED_LEDGER
    short = b"".join((folder / LEDGER).read_bytes().splitlines(keepends=True)[:2])
    (folder / LEDGER).write_bytes(short)  # of which no plan may be sent
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
    with pytest.raises(SystemExit, match="has lost lines"):
        main()
    assert [len(cost.ledger) for cost in costs_in(uri, "digits")] == [4]
    (folder / LEDGER).write_bytes((backup / LEDGER).read_bytes())
    elsewhere = (f"tracking.uri=sqlite:///{tmp_path}/b.db", "checkpoint.resume=true", f"hydra.run.dir={folder}")
    monkeypatch.setattr(sys, "argv", ["dpexp", *QUICK, KEEP, "privacy.epsilon=2", *elsewhere])
    with pytest.raises(
        SystemExit, match=r"mlflow\.db would not know that the job in .* releases more of data\.id=digits"
    ):
        main()
    shutil.copytree(backup / ".hydra", folder / ".hydra", dirs_exist_ok=True)  # which has the options of the last start
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
    main()
    (run,) = store_of(tmp_path).search_runs(["1"])
    resumed_tags = {tag for tag in run.data.tags if "resumed" in tag}
    may_change = {"dpexp.pid", START_TAG, COUNTS_AS, "mlflow.note.content"} | resumed_tags
    changed = {tag for tag, _ in run.data.tags.items() ^ began.data.tags.items()} - may_change
    assert not changed and run.data.tags["dpexp.resumed.command"] == f"dpexp resume {folder}"
    assert len(read_ledger(folder / PLANNED_LEDGER)) == 5
    (resumed,) = costs_in(uri, "digits")
    assert len(resumed.ledger) == 5 and not resumed.note
    # The folder is put back to before: what its job has done meanwhile would count nowhere.
    shutil.rmtree(folder)
    for now in (backup, folder):
        if now == folder:
            backup.rename(folder)
        monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(now)])
        with pytest.raises(SystemExit, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
            main()
        (charge,) = costs_in(uri, "digits")
        assert len(charge.ledger) == 5


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


def kill_before(request):
    setattr(MlflowClient, request, lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("before, counts", [("log_artifact", 0), ("log_batch", 4)])
def test_a_job_killed_as_it_starts_counts_as_its_plan_from_when_it_may_train(forked, tmp_path, before, counts):
    """`before` a request; a run that no budget knows has not begun to train."""
    job = forked(*QUICK, KEEP, "privacy.epsilon=1", first=(kill_before, before))
    said = job.ended()
    assert job.exitcode == -signal.SIGKILL, said
    charges = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert sum(len(charge.ledger) for charge in charges) == counts


def test_a_job_that_fails_before_its_first_round_spends_nothing(dpexp_job, tmp_path, monkeypatch):
    from dpexp.privacy.callback import PrivacyCallback

    def broken(*args):
        raise RuntimeError("no data")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(PrivacyCallback, "on_fit_start", broken)
        dpexp_job(*QUICK, KEEP, "privacy.epsilon=2")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert "failed" in charge.shown and len(charge.ledger) == 0 and not charge.note
    assert read_ledger(*tmp_path.glob("outputs/*/*/ledger.jsonl")) == Ledger("add_remove", {})


def test_a_job_whose_server_takes_no_ledger_keeps_its_plan(dpexp_job, tmp_path, monkeypatch, capsys):
    send = MlflowClient.log_artifact

    def refused(self, run_id, path, *more):
        if path.endswith(f"/{LEDGER}"):
            raise ConnectionError("no route to host")
        send(self, run_id, path, *more)

    monkeypatch.setattr(MlflowClient, "log_artifact", refused)
    output = dpexp_job(*QUICK, KEEP, "privacy.epsilon=2", "sampling.steps=5")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert "finished" in charge.shown and len(charge.ledger) == 5 and "as its plan" in charge.note
    assert "The tracking server lacks some of this run" in capsys.readouterr().out
    assert len(read_ledger(output / LEDGER)) == 5


def test_a_server_that_does_not_take_the_plan_starts_no_job(dpexp_job, tmp_path, monkeypatch):
    def refused(*given):
        raise OSError("no route to host")

    monkeypatch.setattr(MlflowClient, "log_artifact", refused)
    with pytest.raises(SystemExit, match=r"^dpexp: tracking.uri=.* cannot be used: no route to host$"):
        dpexp_job(*QUICK, "privacy.epsilon=2")
    assert not [*tmp_path.glob("outputs/*/*/ledger.jsonl")]


def test_a_job_that_names_no_data_enters_no_code_about_other_runs(dpexp_job, monkeypatch):
    from dpexp.commands import account

    code = {function.__code__ for function in (account.earlier_on_data, account.with_earlier)}

    def traced(*arguments):
        profile = Profile()
        profile.runcall(dpexp_job, *arguments)
        entered = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
        return {one.co_qualname for one in entered if one in code or one.co_filename == data_budget.__file__}

    assert not traced(*QUICK, "privacy.epsilon=2", "data.id=null")
    assert {"start", "end", "costs_in", "earlier_on_data"} <= traced(*QUICK, "privacy.epsilon=2")


def test_the_trials_of_a_sweep_are_counted_and_held_to_the_budget(dpexp_job, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"5[34]\S* % is left"):
        dpexp_job("-m", *QUICK, KEEP, "privacy.epsilon=2,3")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert "finished" in charge.shown and "2 trials, 1 finished" in capsys.readouterr().out
    assert len(list(tmp_path.glob("outputs/multirun/*/*/*/ledger.jsonl"))) == 1


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
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "argv", ["dpexp", *arguments])
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        main()
