"""Multiruns: the parent, its trials, what choosing costs, failure and resumption."""

import csv
import io
import json
import math
import re
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from jobs import result_of, signal_after, store_of
from matplotlib.figure import Figure
from runs import ledger
from scipy.optimize import brentq

import dpexp
from dpexp.accounting.composition import log_moments
from dpexp.accounting.ledger import concatenate, ledger_so_far, read_ledger
from dpexp.accounting.multiple_runs import ORDERS, draw_repetitions, run_rdp, selection_epsilon, worst_case_rdp
from dpexp.accounting.rounding import up
from dpexp.commands import train
from dpexp.commands.objective import objective
from dpexp.reporting.comparisons import WHY

QUICK = ("model=logistic", "sampling.steps=3", "trainer.num_evaluations=0")
SAME = "hydra.sweep.dir=outputs/multirun/a/b"  # in which a sweep goes on
pytestmark = pytest.mark.usefixtures("bare")
DRAW = Figure.savefig


class Store:
    """What the jobs in a folder have left in MLflow."""

    def __init__(self, folder):
        self.client = store_of(folder)

    def parents(self):
        return self.client.search_runs(["1"], "tags.`dpexp.sweep_hash` != ''")

    def trials(self, status=None):
        found = self.client.search_runs(["1"], "tags.`mlflow.parentRunId` != ''")
        return [run for run in found if status in (None, run.info.status)]

    def files(self, run):
        return {item.path for item in self.client.list_artifacts(run.info.run_id)}

    def note(self):
        return self.parents()[0].data.tags["mlflow.note.content"]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def ledgers_in(folder):
    return [*folder.glob("outputs/multirun/*/*/*/ledger.jsonl")]


def test_a_parent_stands_above_its_trials(tmp_path, dpexp_job, store, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", DRAW)
    printed = io.StringIO()
    with redirect_stdout(printed):
        dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2,4", "seed=range(2)")
    (parent,), trials = store.parents(), store.trials()
    assert parent.info.status == "FINISHED" and [run.info.status for run in trials] == ["FINISHED"] * 4
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parent.info.run_id}
    assert {"trials.csv", "test_accuracy_by_epsilon.png"} <= store.files(parent)
    table = Path(store.client.download_artifacts(parent.info.run_id, "trials.csv", str(tmp_path))).read_text()
    rows = list(csv.DictReader(io.StringIO(table)))
    summary = Path(store.client.download_artifacts(parent.info.run_id, "summary.csv", str(tmp_path))).read_text()
    shown = {float(row["privacy.noise_multiplier"]): row for row in csv.DictReader(io.StringIO(summary))}
    columns = "privacy.noise_multiplier seed status private epsilon epsilon_planned delta test_accuracy test_loss"
    assert [*rows[0]] == [*columns.split(), "knob_value", "test_auc", "run_id"]
    assert {row["run_id"] for row in rows} == {run.info.run_id for run in trials}
    of = {z: [row for row in rows if float(row["privacy.noise_multiplier"]) == z] for z in (2, 4)}
    means = {z: np.mean([float(row["test_accuracy"]) for row in own]) for z, own in of.items()}
    spent = {z: max(float(row["epsilon"]) for row in own) for z, own in of.items()}
    for z, mean in means.items():
        assert f"Test accuracy {mean:.2%} at ε = {up(spent[z], 2)} (mean of 2 runs, " in store.note()
        assert (shown[z]["ε"], shown[z]["test accuracy"]) == (up(spent[z], 4), f"{mean:.2%}")
    assert "Best" not in store.note() and "test_accuracy" not in parent.data.metrics, "more ε always wins"
    ledgers = [*map(read_ledger, ledgers_in(tmp_path))]
    assert len(ledgers) == 4
    costs = parent.data.metrics
    assert costs["with selection single_run_epsilon"] == max(dpexp.epsilon(one, 1e-4) for one in ledgers)
    assert costs["with selection all_runs_epsilon"] == pytest.approx(
        dpexp.epsilon(concatenate(ledgers), 1e-4), rel=1e-9
    )
    view = store.client.get_experiment("1").tags["mlflow.sharedViewState.dpexp"]
    assert "metrics.`epsilon`" in json.loads(view)["selectedColumns"]

    printed = printed.getvalue()
    assert "4 trials, 4 finished" in printed and "only if the choice used no private data" in " ".join(printed.split())
    lines = re.findall(r"^\[.*", printed, re.M)
    for number, line in enumerate(lines, 1):
        place = rf"\[{number}/4\] privacy\.noise_multiplier={2 if number < 3 else 4} seed={(number - 1) % 2}"
        assert re.fullmatch(rf"{place} · ε \d\.\d+ · \d+\.\d% · 0:00:\d\d", line), line
    assert len(lines) == 4
    (folder,) = tmp_path.glob("outputs/multirun/*/*")
    assert f"Folder: {folder}: summary.csv, test_accuracy_by_epsilon.png, trials.csv\n" in printed
    assert f"On one page: python -m dpexp report {folder}\n" in printed
    assert (folder / "trials.csv").read_text() == table
    for z, mean in means.items():
        cells = [cell.strip() for cell in re.search(rf"^│ {z} .*", printed, re.M)[0].strip("│").split("│")]
        assert cells[0] == str(z) and cells[2] == f"{mean:.2%}" and cells[-1] == "2"


def test_a_sweep_whose_folder_is_gone_has_a_page_by_its_id(tmp_path, dpexp_job, store, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", DRAW)
    dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2,4")
    shutil.rmtree(tmp_path / "outputs" / "multirun")
    (parent,) = store.parents()
    dpexp_job("report", parent.info.run_id)
    page = (tmp_path / "report.html").read_text()
    assert page.count('alt="test_accuracy_by_epsilon"') == 1 and "with 1 earlier run on these data" in page
    for row in ("noise_multiplier=2", "noise_multiplier=4"):
        assert row in page


def test_a_failing_trial_is_named_and_the_others_finish_and_a_rerun_does_what_is_missing(dpexp_job, store):
    sweep = ("-m", *QUICK, SAME, "calibrate=sampling_rate", "privacy.noise_multiplier=2", "privacy.epsilon=1e-3,3")
    with pytest.raises(SystemExit, match="cannot be reached"):
        dpexp_job(*sweep)
    (parent,), (failed,), (finished,) = store.parents(), store.trials("FAILED"), store.trials("FINISHED")
    assert parent.info.status == "FAILED" and "cannot be reached" in failed.data.tags["dpexp.error"]
    assert "privacy.epsilon=0.001" in store.note() and "cannot be reached" in store.note()

    with pytest.raises(SystemExit, match="cannot be reached"):
        dpexp_job(*sweep)
    assert [run.info.run_id for run in store.parents()] == [parent.info.run_id], "one parent"
    (again,) = store.trials("FINISHED")
    assert again.info.run_id == finished.info.run_id, "finished trials are not run again"
    assert len(store.trials("FAILED")) == 2, "the failed one is"

    with pytest.raises(SystemExit, match="already holds a run, with its multirun"):
        dpexp_job(*sweep[:-1], "privacy.epsilon=3")


def test_a_sweep_whose_files_have_changed_does_not_go_on(dpexp_job, store, tmp_path):
    own = tmp_path / "own/optimizer"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\n")
    sweep = ("-m", f"--config-dir={own.parent}", *QUICK, SAME, "privacy.noise_multiplier=2", "optimizer=mine",
             "train=false")  # fmt: skip
    dpexp_job(*sweep)
    dpexp_job(*sweep)
    assert len(store.trials()) == 1
    (own / "mine.yaml").write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.2\n")
    with pytest.raises(SystemExit, match="holds another sweep, or its configuration has changed"):
        dpexp_job(*sweep)


def test_a_sweep_that_is_killed_goes_on_and_every_ledger_counts(forked, dpexp_job, tmp_path, store, capsys):
    """Killed without a checkpoint, a trial starts again in another folder; with one, it goes on where it was."""
    sweep = ("-m", "model=logistic", "trainer.num_evaluations=0", "privacy.noise_multiplier=20", "sampling.steps=2,12",
             "checkpoint.every_n_rounds=4", "hydra.sweep.dir=outputs/multirun/a/b")  # fmt: skip
    folder = tmp_path / "outputs/multirun/a/b"

    def start_and_end(by, after):
        return forked(*sweep, first=(signal_after, after, by)).ended()

    start_and_end(signal.SIGKILL, 3)
    before = (folder / "1" / "ledger.jsonl").read_bytes()
    assert store.parents()[0].info.status == "RUNNING" and len(store.trials("FINISHED")) == 1
    printed = start_and_end(signal.SIGTERM, 6)
    assert "[1/2] sampling.steps=2 · finished before" in printed and "Interrupted after" in printed
    assert store.parents()[0].info.status == "KILLED"
    killed = {run.data.tags["dpexp.error"].split()[-1].strip("."): run for run in store.trials("KILLED")}
    assert sorted(run.info.status for run in store.trials()) == ["FINISHED", "KILLED", "KILLED"]
    assert any("SIGKILL" in run.data.tags["dpexp.error"] for run in killed.values())
    (stopped,) = [run for run in killed.values() if "SIGTERM" in run.data.tags["dpexp.error"]]
    start_and_end(signal.SIGKILL, 9)
    capsys.readouterr()
    dpexp_job(*sweep)
    assert "[2/2] sampling.steps=12 · ε " in capsys.readouterr().out

    finished = {run.info.run_id: run for run in store.trials("FINISHED")}
    assert len(finished) == 2 and len(store.trials()) == 3
    assert "dpexp.error" not in finished[stopped.info.run_id].data.tags, "the same MLflow run"
    paths = [*folder.glob("*/ledger.jsonl")]
    assert {path.parent.name for path in paths} == {"0", "1", "1.2"}
    assert (folder / "1" / "ledger.jsonl").read_bytes() == before
    assert "sampling.steps=12" in (folder / "1.2" / ".hydra" / "overrides.yaml").read_text(), "a report counts it"
    repeated = len(read_ledger(folder / "1.2" / "ledger.jsonl")) - 12
    assert 1 <= repeated <= 2, "rounds after the last checkpoint twice; and one that SIGTERM met after its line"
    all_runs = concatenate([ledger_so_far(path) for path in paths])
    costs = store.parents()[0].data.metrics
    assert costs["with selection all_runs_epsilon"] == pytest.approx(dpexp.epsilon(all_runs, 1e-4), rel=1e-9)


def test_all_trials_are_checked_before_the_first_starts(dpexp_job, store, tmp_path):
    """What its trials share is sound, the last two of them cannot be."""
    grid = ("privacy.noise_multiplier=2", "group=flat,conv_fc", "optimizer.lr=0.1,0.2")
    with pytest.raises(SystemExit) as refused:
        dpexp_job("-m", *QUICK, *grid)
    words = str(refused.value)
    assert words.startswith("dpexp: no trial was started, since one cannot run: trial 3 of 4 (group=conv_fc ")
    assert words.endswith("(Nor can 1 more.)") and "\n" not in words
    assert not store.trials() and not store.parents() and not list(tmp_path.glob("**/ledger.jsonl"))


def test_the_non_private_baseline_is_trained_once(dpexp_job, store, tmp_path):
    """A report called the trial that is not trained again unfinished."""
    dpexp_job("-m", *QUICK, SAME, "privacy.epsilon=inf", "group=flat,per_layer", "seed=range(2)")
    first, second = store.trials()
    assert first.data.tags["dpexp.private"].startswith("no: trained without privacy")
    assert "nothing has been spent" in store.note()
    dpexp_job("report", "outputs/multirun/a/b")
    page = (tmp_path / "report.html").read_text()
    accuracies = [run.data.metrics["test_accuracy"] for run in (first, second)]
    assert "<h1>2 runs</h1>" in page and "not finished" not in page
    assert f"<td>not private<td>{np.mean(accuracies):.2%}<td>" in page


def test_a_sweep_that_is_not_tracked_names_its_folder(dpexp_job, tmp_path, capsys):
    dpexp_job(
        "-m", "model=logistic", "train=false", "tracking=none", "privacy.noise_multiplier=2,4", "hydra.sweep.dir=a b"
    )
    printed, folder = capsys.readouterr().out, tmp_path / "a b"
    assert f"Folder: {folder}: a folder for each trial" in printed
    assert f"On one page: python -m dpexp report '{folder}'" in printed


def test_calibration_without_training_whose_trials_print_their_plans_if_asked_for(dpexp_job, store, capsys):
    dpexp_job("-m", "model=logistic", "train=false", "privacy.epsilon=1,4", "sampling.steps=10", "verbose=true")
    trials = store.trials("FINISHED")
    assert len(trials) == capsys.readouterr().out.count("noise per coordinate") == 2
    for run in trials:
        target = float(run.data.params["privacy.epsilon"])
        assert target * (1 - 1e-3) <= run.data.metrics["epsilon_planned"] <= target
        assert not {"test_accuracy", "epsilon", "noise"} & {*run.data.metrics}
        probes = store.client.get_metric_history(run.info.run_id, "tried epsilon")
        assert [probe.step for probe in probes] == list(range(len(probes)))
    assert {"knob_by_privacy.epsilon.png", "trials.csv"} <= store.files(store.parents()[0])
    assert "nothing has been spent" in store.note()


def test_what_is_solved_is_shown_in_place_of_what_was_given(dpexp_job, store, capsys):
    """In the terminal, in MLflow and by the sweep needed_q, which trains nothing."""
    quick = ("model=logistic",)
    dpexp_job("-m", "sweep=needed_q", *quick, "privacy.epsilon=2,8")
    printed = " ".join(capsys.readouterr().out.split())
    assert f" {WHY['sampling_rate']} " in printed and WHY["sampling_rate"] in store.note() and "% ·" not in printed
    few, many = (run.data for run in sorted(store.trials(), key=lambda run: run.data.params["privacy.epsilon"]))
    q = [float(run.params["plan.q"]) for run in (few, many)]
    assert 0 < q[1] < q[0] < 0.2 and [f"{one:.4g}" for one in q] == re.findall(r"· sampling_rate (\S+)", printed)
    assert f"│ 2 │ 2 │ {q[0]:.4g} │" in printed
    assert "sampling.expected_batch_size" not in few.params and few.params["allocation.sigma_of_average"] == "0.02"
    assert {"knob_by_privacy.epsilon.png", "trials.csv"} <= store.files(store.parents()[0])

    by_z = ("calibrate=sampling_rate", "privacy.noise_multiplier=2", "sampling.sampling_rate=0.1", "sampling.epochs=8")
    output = dpexp_job(*quick, "train=false", "privacy.epsilon=3", *by_z)
    result, printed = result_of(output), " ".join(capsys.readouterr().out.split())
    z, rounds = result["noise_multiplier"], math.ceil(8 / result["q"] - 1e-6)
    assert result["rounds"] == rounds and z == pytest.approx(2 * result["q"] / 0.1, rel=1e-12) and abs(z - 2) > 0.1
    solved = f"with each σ_g of the averages held, q = {result['q']:.5g}, z = {z:.4g}, T = {rounds} in place of"
    assert f"{solved} sampling.sampling_rate=0.1, privacy.noise_multiplier=2.0" in printed
    assert "expected_batch_size" not in printed
    run = store.client.get_run(result["mlflow_run_id"])
    given = {"replaced.sampling.sampling_rate": "0.1", "replaced.privacy.noise_multiplier": "2.0"}
    assert given.items() <= run.data.params.items() and "privacy.noise_multiplier" not in run.data.params
    assert run.data.params["plan.z"] == f"{z:.6g}" and run.data.params["rounds"] == str(rounds)
    dpexp_job(*quick, "train=false", "calibrate=steps", "privacy.noise_multiplier=1", "privacy.epsilon=9")
    assert " would cost more than privacy.epsilon=9 at " in " ".join(capsys.readouterr().out.split())
    assert "ε=3" in run.info.run_name and "z=" not in run.info.run_name and "sampling_rate=0" not in run.info.run_name


def test_the_job_returns_its_objective(dpexp_job, monkeypatch):
    returned, run = [], train.run
    monkeypatch.setattr(train, "run", lambda cfg: returned.append(run(cfg)))
    output = dpexp_job(*QUICK, "tracking=none", "privacy.epsilon=2", "callbacks=ema", "objective=test_loss_unaveraged")
    result = result_of(output)
    assert returned == [result["metrics"]["test_loss_unaveraged"]] and returned[0] > 0
    for name, low, high in (("noise_multiplier", 0.5, 9), ("epsilon", 1.9, 2), ("test_accuracy", 0, 1)):
        assert low < objective(name, result) <= high


def test_an_objective_that_a_job_does_not_give_is_refused_before_it_trains(dpexp_job, tmp_path):
    for more in (
        ("objective=f1",),
        ("objective=test_loss", "train=false"),
        ("objective=noise_multiplier",),
        ("objective=test_loss_unaveraged",),
        ("objective=epsilon", "privacy.enabled=false"),
    ):
        with pytest.raises(SystemExit, match=f"{more[0]} is not an objective of this job: "):
            dpexp_job(*QUICK, "privacy.noise_multiplier=1", *more)
    assert not list(tmp_path.rglob("ledger.jsonl")) and not (tmp_path / "outputs" / "mlflow.db").exists()


def test_an_objective_of_ones_own_module_is_only_known_afterwards(dpexp_job, tmp_path, monkeypatch):
    (tmp_path / "own_metric.py").write_text(
        "from dpexp.training.classifier import Classifier\n"
        "from dpexp.training.models import logistic\n"
        "from torch.optim import SGD\n"
        "class Own(Classifier):\n"
        "    def __init__(self):\n"
        "        super().__init__(logistic([1, 8, 8], 10), lambda parameters: SGD(parameters, lr=0.1))\n"
        "    def test_step(self, batch):\n"
        "        self.log('f1', 0.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = (*QUICK, "~model.shape", "~model.classes", "model._target_=own_metric.Own", "tracking=none",
           "privacy.noise_multiplier=1")  # fmt: skip
    with pytest.raises(SystemExit, match="objective=f2 is not an objective of this job: f1, epsilon"):
        dpexp_job(*own, "objective=f2", "hydra.run.dir=outputs/a/kept")
    assert result_of(tmp_path / "outputs/a/kept")["metrics"] == {"f1": 0.5}, "the run is not lost"


def test_nothing_is_claimed_for_trials_whose_guarantee_does_not_hold(dpexp_job, store, capsys):
    dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2", "diagnostics=unsafe", "accountant=moments")
    assert capsys.readouterr().out.count("not private ·") == 1
    assert not any(key.startswith("with selection ") for key in store.parents()[0].data.metrics)
    assert "Nothing may be claimed" in store.note()


def test_deleted_runs_count_and_damaged_or_lost_ledgers_are_reported(dpexp_job, store, tmp_path, recwarn):
    sweep = ("-m", *QUICK, SAME, "privacy.noise_multiplier=2", "accountant=moments")

    def all_runs():
        return store.parents()[0].data.metrics["with selection all_runs_epsilon"]

    dpexp_job(*sweep)
    before = all_runs()
    (trial,) = store.trials()
    store.client.delete_run(trial.info.run_id)
    result = Path(trial.data.tags["dpexp.output"]) / "result.json"
    result.unlink()  # so that it runs again
    dpexp_job(*sweep)
    paths = sorted(ledgers_in(tmp_path))
    assert len(store.trials()) == 1 and len(paths) == 2 and "ends early" not in store.note()
    both = dpexp.epsilon(concatenate([*map(read_ledger, paths)]), 1e-4)
    assert all_runs() == pytest.approx(both, rel=1e-9) and all_runs() > before

    paths[0].write_text(paths[0].read_text().rpartition('{"line"')[0])
    dpexp_job(*sweep)
    assert "1 with a ledger that ends early) covers" in store.note()
    assert not any("ends early" in str(warning.message) for warning in recwarn)

    damaged = tmp_path / "killed" / "ledger.jsonl"  # of a trial that was killed before its first ε was logged
    damaged.parent.mkdir()
    damaged.write_text(paths[1].read_text().partition("\n")[0] + "\nnonsense\n")
    (parent,) = store.parents()
    tags = {"mlflow.parentRunId": parent.info.run_id, "dpexp.output": str(damaged.parent), "dpexp.private": "yes"}
    store.client.create_run(parent.info.experiment_id, tags=tags, run_name="killed")
    dpexp_job(*sweep)
    assert "the ledgers of killed are missing" in store.note()
    damaged.unlink()
    dpexp_job(*sweep)
    assert "are missing" not in store.note()
    end = damaged.with_name("ledger.end.json")
    end.write_text("{}")  # a ledger was begun, and is lost
    dpexp_job(*sweep)
    assert "the ledgers of killed are missing" in store.note()
    end.unlink()

    for path in tmp_path.glob("outputs/m*/**/ledger.jsonl"):
        path.unlink()
    dpexp_job(*sweep)
    assert "are missing" in store.note()
    metrics = store.parents()[0].data.metrics
    withdrawn = [value for key, value in metrics.items() if key.startswith("with selection ")]
    assert withdrawn and all(math.isnan(value) for value in withdrawn)


def test_a_sweep_whose_parent_cannot_begin_does_not_train(dpexp_job, monkeypatch, tmp_path):
    def breaking(*args):
        raise OSError("database is locked")

    monkeypatch.setattr("dpexp.tracking.sweep_run.SweepRun.__init__", breaking)
    with pytest.raises(SystemExit, match="dpexp: database is locked"):
        dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2,4")
    assert not ledgers_in(tmp_path)


# Private selection

SELECT = ("-m", "hydra/sweeper=private_selection", *QUICK, SAME)


def refused_when_resumed(*arguments):
    raise AssertionError("a sweep that is resumed must not draw or account again")


def test_private_selection_is_accounted_as_dp_accounting_does(dpexp_job, store, monkeypatch):
    monkeypatch.setattr("dpexp.accounting.multiple_runs.draw_repetitions", lambda mean, shape, random: 2)
    sweep = (*SELECT, "hydra.sweeper.mean=4", "privacy.noise_multiplier=8", "optimizer.lr=0.1,0.2")
    dpexp_job(*sweep)
    (parent,), trials = store.parents(), store.trials("FINISHED")
    assert len(trials) == 2 and {run.data.params["draw"] for run in trials} == {"0", "1"}
    one = dp_accounting.PoissonSampledDpEvent(359 / 1437, dp_accounting.GaussianDpEvent(8.0))
    trial = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(one, 3)])
    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, 4.0, 1.0))
    costs = parent.data.metrics
    assert costs["with selection private_selection_epsilon"] == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-12)
    assert costs["with selection single_run_epsilon"] < costs["with selection private_selection_epsilon"]
    note, metrics = store.note(), parent.data.metrics
    both = (metrics["with selection all_runs_epsilon"], "covers all that was printed and logged of them"), (
        metrics["with selection private_selection_epsilon"], "covers the best trial alone, for those who see nothing"
    )  # fmt: skip
    at = [note.index(f"ε = {up(cost, 3)} (") for cost, _ in sorted(both)]
    assert at == sorted(at) and all(words in note for _, words in both), "the smaller one first"
    best = max(trials, key=lambda run: run.data.metrics["test_accuracy"]).data.metrics
    assert {name: metrics[name] for name in ("test_accuracy", "epsilon")} == {
        name: pytest.approx(best[name]) for name in ("test_accuracy", "epsilon")
    }

    monkeypatch.setattr("dpexp.accounting.multiple_runs.draw_repetitions", refused_when_resumed)
    dpexp_job(*sweep)
    assert len(store.parents()) == 1 and len(store.trials()) == 2


def selected_geometrically(z, q, rounds, mean, delta):
    """Papernot & Steinke 2022, theorem 2 for η = 1 (γ = 1/mean), with Rényi DP by quadrature."""
    orders = np.array(ORDERS)
    moments = np.array([float(log_moments(np.array([z]), np.array([q]), a)[0]) for a in orders])  # see their own test
    trial = rounds * moments / (orders - 1)
    other = np.min((1 - 1 / orders) * trial + math.log(mean) / orders)
    best = trial + math.log(mean) / (orders - 1) + 2 * other
    return np.min(best + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))


def test_selection_costs_the_worst_case_of_the_grid_whatever_was_drawn(dpexp_job, store, monkeypatch):
    """Only z = 8 is drawn; z = 1 might have been."""
    random = np.random.default_rng

    class Last:
        def __init__(self):
            self.random = random(0)

        def integers(self, n):
            return n - 1

    monkeypatch.setattr(np.random, "default_rng", lambda *seed: random(*seed) if seed else Last())
    sweep = (*SELECT, "hydra.sweeper.mean=1", "privacy.noise_multiplier=1,8")
    dpexp_job(*sweep)
    (parent,), (trial,) = store.parents(), store.trials("FINISHED")
    assert trial.data.metrics["with noise_multiplier"] == 8
    price = parent.data.metrics["with selection private_selection_epsilon"]
    assert price == pytest.approx(selected_geometrically(1.0, 359 / 1437, 3, 1.0, 1e-4), rel=1e-9)
    assert price > 10 * parent.data.metrics["with selection single_run_epsilon"]

    monkeypatch.setattr("dpexp.commands.build.plan", refused_when_resumed)
    dpexp_job(*sweep)
    (parent,) = store.parents()
    assert parent.data.metrics["with selection private_selection_epsilon"] == price and len(store.trials()) == 1


def test_the_worst_case_is_taken_order_by_order():
    """At low orders the sampled trial is cheaper, at high orders the one with more noise."""
    sampled, noisy = ledger(1.0, 0.01, 10), ledger(6.0, 1.0, 10)
    curves = np.array([run_rdp(sampled), run_rdp(noisy)])
    assert set(curves.argmax(axis=0)) == {0, 1}
    assert worst_case_rdp([sampled, noisy]).tolist() == curves.max(axis=0).tolist()
    both = selection_epsilon(worst_case_rdp([sampled, noisy]), 1e-6, 5.0, 1.0)
    assert both > max(selection_epsilon(curve, 1e-6, 5.0, 1.0) for curve in curves)


@pytest.mark.parametrize("z, q, rounds", [(1.0, 1.0, 2), (2.0, 0.1, 50), (8.0, 0.4, 300)])
def test_a_trials_curve_is_dp_accountings(z, q, rounds):
    """At whole orders; between them dp-accounting's series is an upper bound, or does not converge."""
    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds)
    curve = run_rdp(ledger(z, q, rounds))
    whole = np.array(ORDERS) % 1 == 0
    assert curve[whole] == pytest.approx(accountant.rdp[whole], rel=1e-7)
    assert np.all(curve <= accountant.rdp * (1 + 1e-9))


@pytest.mark.parametrize(
    "grid, message",
    [
        ("privacy.epsilon=1,inf", r"privacy.epsilon=inf: it is not private \(trained without privacy\)"),
        ("privacy.noise_seed=null,1 privacy.noise_multiplier=2", "noise_seed=1, .*: it is not private"),
        ("sampling=fixed_size,shuffle privacy.noise_multiplier=2", "no bound for private selection"),
        ("privacy.noise_multiplier=1,-1", "noise_multiplier=-1: privacy.noise_multiplier=-1.0 must be"),
        ("privacy.adjacency=add_remove,replace_null privacy.noise_multiplier=2", "different adjacencies"),
        ("hydra.sweeper.mean=0.5", "hydra.sweeper.mean=0.5"),
    ],
)
def test_a_grid_without_a_price_is_refused_before_it_starts(dpexp_job, store, tmp_path, grid, message):
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        dpexp_job(*SELECT, *grid.split())
    assert not store.trials() and not ledgers_in(tmp_path)


class Spread:
    """Its numbers are in the middles of `count` equal parts of [0, 1), one after the other."""

    def __init__(self, count):
        self._numbers = iter((np.arange(count) + 0.5) / count)

    def random(self):
        return next(self._numbers)


def chances(shape, gamma, k):
    """Of k trials, in a truncated negative binomial distribution; a logarithmic one if the shape is 0."""
    if shape == 0:
        return (1 - gamma) ** k / (k * -math.log(gamma))
    ways = np.cumprod((k - 1 + shape) / k)
    return (1 - gamma) ** k * ways / (gamma**-shape - 1)


@pytest.mark.parametrize("mean, shape", [(3.0, 1.0), (5.0, 0.0), (4.0, 0.5)])
def test_the_number_of_trials_has_the_distribution_that_is_accounted(mean, shape):
    """Papernot & Steinke 2022, definition 1."""
    k, count = np.arange(1, 3000), 400
    expected = chances(shape, brentq(lambda gamma: k @ chances(shape, gamma, k) - mean, 0.01, 0.99), k)
    assert expected.sum() == pytest.approx(1)
    random = Spread(count)
    drawn = np.bincount([draw_repetitions(mean, shape, random) for _ in range(count)], minlength=len(k) + 1)
    assert drawn[0] == 0 and np.all(np.abs(drawn[1:] - count * expected) <= 1)


def test_the_number_of_trials_may_be_that_of_a_poisson_distribution_or_one():
    """Definition 2; no other has a mean of 1."""
    random = np.random.default_rng(0)
    drawn = np.array([draw_repetitions(6.0, math.inf, random) for _ in range(4000)])
    assert drawn.min() == 0 and drawn.mean() == pytest.approx(6.0, abs=5 * drawn.std() / 4000**0.5)
    assert drawn.var() == pytest.approx(6.0, rel=0.15) and draw_repetitions(1.0, 1.0, random) == 1
