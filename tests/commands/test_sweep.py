"""Multiruns: the parent, its trials, what choosing costs, failure and resumption."""

import json
import math
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dp_accounting
import numpy as np
import pandas as pd
import pytest
from dp_accounting import rdp
from jobs import result_of, signal_after, store_of
from matplotlib.figure import Figure
from runs import composed, ledger, sampled
from scipy.optimize import brentq

import dpexp
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
    """What the sweep in a folder has left in MLflow."""

    def __init__(self, folder):
        self.client = store_of(folder)

    def parents(self):
        return self.client.search_runs(["1"], "tags.`dpexp.sweep_hash` != ''")

    def parent(self):
        (parent,) = self.parents()
        return parent

    def trials(self, status=None):
        found = self.client.search_runs(["1"], "tags.`mlflow.parentRunId` != ''")
        return [run for run in found if status in (None, run.info.status)]

    def files(self):
        return {item.path for item in self.client.list_artifacts(self.parent().info.run_id)}

    def note(self):
        return self.parent().data.tags["mlflow.note.content"]

    def cost(self, of):
        return self.parent().data.metrics[f"with selection {of}_epsilon"]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def ledgers_in(folder):
    return [*folder.glob("outputs/multirun/*/*/*/ledger.jsonl")]


def test_a_parent_stands_above_its_trials(tmp_path, dpexp_job, store, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "savefig", DRAW)
    dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2,4", "seed=range(2)")
    printed, parent, trials = capsys.readouterr().out, store.parent(), store.trials("FINISHED")
    assert parent.info.status == "FINISHED" and len(trials) == len(store.trials()) == 4
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parent.info.run_id}
    assert {"trials.csv", "summary.csv", "test_accuracy_by_epsilon.png"} <= store.files()
    (folder,) = tmp_path.glob("outputs/multirun/*/*")
    rows = pd.read_csv(folder / "trials.csv")
    assert {"epsilon", "epsilon_planned", "delta", "test_loss", "test_auc", "knob_value"} <= {*rows}
    assert {*rows["run_id"]} == {run.info.run_id for run in trials}
    for z, mean in rows.groupby("privacy.noise_multiplier")["test_accuracy"].mean().items():
        spent = rows["epsilon"][rows["privacy.noise_multiplier"] == z].max()
        assert f"Test accuracy {mean:.2%} at ε = {up(spent, 2)} (mean of 2 runs, " in store.note()
        assert re.search(rf"^│ {z:g} +│ [\d.]+ +│ {mean:.2%} +│ .*│ 2 +│$", printed, re.M)
    assert "Best" not in store.note() and "test_accuracy" not in parent.data.metrics, "more ε always wins"
    ledgers = [*map(read_ledger, ledgers_in(tmp_path))]
    assert len(ledgers) == 4 and store.cost("single_run") == max(dpexp.epsilon(one, 1e-4) for one in ledgers)
    assert store.cost("all_runs") == pytest.approx(dpexp.epsilon(concatenate(ledgers), 1e-4), rel=1e-9)
    view = store.client.get_experiment("1").tags["mlflow.sharedViewState.dpexp"]
    assert "metrics.`epsilon`" in json.loads(view)["selectedColumns"]

    assert "4 trials, 4 finished" in printed and "only if the choice used no private data" in " ".join(printed.split())
    trial = r"^\[(\d)/4\] privacy\.noise_multiplier=(\d) seed=(\d) · ε \d\.\d+ · \d+\.\d% · 0:00:\d\d$"
    assert ["".join(found) for found in re.findall(trial, printed, re.M)] == ["120", "221", "340", "441"]
    assert f"Folder: {folder}: summary.csv, test_accuracy_by_epsilon.png, trials.csv\n" in printed
    assert f"On one page: python -m dpexp report {folder}\n" in printed

    shutil.rmtree(folder)
    dpexp_job("report", parent.info.run_id)
    page = (tmp_path / "report.html").read_text()
    assert page.count('alt="test_accuracy_by_epsilon"') == 1 and "with 3 earlier runs on these data" in page
    assert "noise_multiplier=2" in page and "noise_multiplier=4" in page


def test_a_failing_trial_is_named_and_the_others_finish_and_a_rerun_does_what_is_missing(dpexp_job, store):
    sweep = ("-m", *QUICK, SAME, "calibrate=sampling_rate", "privacy.noise_multiplier=2", "privacy.epsilon=1e-3,3")
    for failures in (1, 2):
        with pytest.raises(SystemExit, match="cannot be reached"):
            dpexp_job(*sweep)
        (finished,), failed = store.trials("FINISHED"), store.trials("FAILED")
        if failures == 1:
            first = store.parent().info.run_id, finished.info.run_id
            assert "privacy.epsilon=0.001" in store.note() and "cannot be reached" in store.note()
        assert (store.parent().info.run_id, finished.info.run_id) == first, "what has finished is not run again"
        assert store.parent().info.status == "FAILED" and len(failed) == failures
        assert "cannot be reached" in failed[0].data.tags["dpexp.error"]
    with pytest.raises(SystemExit, match="already holds a run, with its multirun"):
        dpexp_job(*sweep[:-1], "privacy.epsilon=3")


def test_a_sweep_whose_files_have_changed_does_not_go_on(dpexp_job, store, tmp_path):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    file = tmp_path / "own" / "optimizer" / "mine.yaml"
    file.write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\n")
    sweep = (
        "-m",
        f"--config-dir={tmp_path}/own",
        *QUICK,
        SAME,
        "privacy.noise_multiplier=2",
        "optimizer=mine",
        "train=false",
    )
    for _ in range(2):
        dpexp_job(*sweep)
    assert len(store.trials()) == 1
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(SystemExit, match="holds another sweep, or its configuration has changed"):
        dpexp_job(*sweep)


def test_a_sweep_that_is_killed_goes_on_and_every_ledger_counts(forked, dpexp_job, tmp_path, store, capsys):
    """Killed without a checkpoint, a trial starts again in another folder; with one, it goes on where it was."""
    sweep = ("-m", "model=logistic", "trainer.num_evaluations=0", "privacy.noise_multiplier=20", "sampling.steps=2,12",
             "checkpoint.every_n_rounds=4", SAME)  # fmt: skip
    folder = tmp_path / "outputs/multirun/a/b"

    def start_and_end(by, after):
        return forked(*sweep, first=(signal_after, after, by)).ended()

    start_and_end(signal.SIGKILL, 3)
    before = (folder / "1" / "ledger.jsonl").read_bytes()
    assert store.parent().info.status == "RUNNING" and len(store.trials("FINISHED")) == 1
    printed = start_and_end(signal.SIGTERM, 6)
    assert "[1/2] sampling.steps=2 · finished before" in printed and "Interrupted after" in printed
    assert store.parent().info.status == "KILLED" and len(store.trials("FINISHED")) == 1
    errors = {run.info.run_id: run.data.tags["dpexp.error"] for run in store.trials("KILLED")}
    (stopped,) = (run_id for run_id, error in errors.items() if "SIGTERM" in error)
    assert len(errors) == 2 and any("SIGKILL" in error for error in errors.values())
    start_and_end(signal.SIGKILL, 9)
    capsys.readouterr()
    dpexp_job(*sweep)
    assert "[2/2] sampling.steps=12 · ε " in capsys.readouterr().out

    finished = {run.info.run_id: run for run in store.trials("FINISHED")}
    assert len(finished) == 2 and len(store.trials()) == 3
    assert "dpexp.error" not in finished[stopped].data.tags, "the same MLflow run"
    paths = {path.parent.name: path for path in folder.glob("*/ledger.jsonl")}
    assert {*paths} == {"0", "1", "1.2"} and paths["1"].read_bytes() == before
    assert "sampling.steps=12" in (folder / "1.2" / ".hydra" / "overrides.yaml").read_text(), "a report counts it"
    repeated = len(read_ledger(paths["1.2"])) - 12
    assert 1 <= repeated <= 2, "rounds after the last checkpoint twice; and one that SIGTERM met after its line"
    all_runs = concatenate([*map(ledger_so_far, paths.values())])
    assert store.cost("all_runs") == pytest.approx(dpexp.epsilon(all_runs, 1e-4), rel=1e-9)


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


def test_a_sweep_that_is_not_tracked_names_its_folder_and_prints_plans_if_asked_for(dpexp_job, tmp_path, capsys):
    planned = ("model=logistic", "train=false", "verbose=true", "privacy.noise_multiplier=2,4")
    dpexp_job("-m", *planned, "tracking=none", "hydra.sweep.dir=a b")
    printed, folder = capsys.readouterr().out, tmp_path / "a b"
    assert f"Folder: {folder}: a folder for each trial" in printed and printed.count("noise per coordinate") == 2
    assert f"On one page: python -m dpexp report '{folder}'" in printed


def test_what_is_solved_is_shown_in_place_of_what_was_given(dpexp_job, store, printed):
    """In the terminal, in MLflow and by the sweep needed_q, which trains nothing."""
    dpexp_job("-m", "sweep=needed_q", "model=logistic", "privacy.epsilon=2,8")
    text = printed()
    assert f" {WHY['sampling_rate']} " in text and WHY["sampling_rate"] in store.note() and "% ·" not in text
    trials = sorted(store.trials("FINISHED"), key=lambda run: float(run.data.params["privacy.epsilon"]))
    few, many = (float(run.data.params["plan.q"]) for run in trials)
    assert 0 < many < few < 0.2 and [f"{q:.4g}" for q in (few, many)] == re.findall(r"· sampling_rate (\S+)", text)
    assert f"│ 2 │ 2 │ {few:.4g} │" in text
    for run, target in zip(trials, (2, 8), strict=True):
        assert target * (1 - 1e-3) <= run.data.metrics["epsilon_planned"] <= target
        assert not {"test_accuracy", "epsilon", "noise"} & {*run.data.metrics}
        probes = store.client.get_metric_history(run.info.run_id, "tried epsilon")
        assert [probe.step for probe in probes] == list(range(len(probes))) != []
        assert "sampling.expected_batch_size" not in run.data.params
        assert run.data.params["allocation.sigma_of_average"] == "0.02"
    assert {"knob_by_privacy.epsilon.png", "trials.csv"} <= store.files() and "nothing has been spent" in store.note()


def test_a_job_shows_what_is_solved_in_place_of_what_was_given(dpexp_job, store, printed):
    planned = ("model=logistic", "train=false")
    by_z = ("calibrate=sampling_rate", "privacy.noise_multiplier=2", "sampling.sampling_rate=0.1", "sampling.epochs=8")
    result, text = result_of(dpexp_job(*planned, "privacy.epsilon=3", *by_z)), printed()
    z, rounds = result["noise_multiplier"], math.ceil(8 / result["q"] - 1e-6)
    assert result["rounds"] == rounds and z == pytest.approx(2 * result["q"] / 0.1, rel=1e-12) and abs(z - 2) > 0.1
    solved = f"with each σ_g of the averages held, q = {result['q']:.5g}, z = {z:.4g}, T = {rounds} in place of"
    assert f"{solved} sampling.sampling_rate=0.1, privacy.noise_multiplier=2.0" in text
    assert "expected_batch_size" not in text
    run = store.client.get_run(result["mlflow_run_id"])
    shown = {"replaced.sampling.sampling_rate": "0.1", "replaced.privacy.noise_multiplier": "2.0",
             "plan.z": f"{z:.6g}", "rounds": str(rounds)}  # fmt: skip
    assert shown.items() <= run.data.params.items() and "privacy.noise_multiplier" not in run.data.params
    assert "ε=3" in run.info.run_name and "z=" not in run.info.run_name and "sampling_rate=0" not in run.info.run_name
    dpexp_job(*planned, "calibrate=steps", "privacy.noise_multiplier=1", "privacy.epsilon=9")
    assert " would cost more than privacy.epsilon=9 at " in printed()


def test_the_job_returns_its_objective(dpexp_job, monkeypatch):
    returned, run = [], train.run
    monkeypatch.setattr(train, "run", lambda cfg: returned.append(run(cfg)))
    output = dpexp_job(*QUICK, "tracking=none", "privacy.epsilon=2", "callbacks=ema", "objective=test_loss_unaveraged")
    result = result_of(output)
    known = {name: objective(name, result) for name in ("test_loss_unaveraged", "noise_multiplier", "epsilon")}
    assert returned == [known["test_loss_unaveraged"]] and returned[0] > 0
    assert known["noise_multiplier"] == result["noise_multiplier"] and 1.9 < known["epsilon"] <= 2


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
    own = ("~model.shape", "~model.classes", "model._target_=own_metric.Own", "tracking=none", "hydra.run.dir=kept")
    with pytest.raises(SystemExit, match="objective=f2 is not an objective of this job: f1, epsilon"):
        dpexp_job(*QUICK, *own, "privacy.noise_multiplier=1", "objective=f2")
    assert result_of(tmp_path / "kept")["metrics"] == {"f1": 0.5}, "the run is not lost"


def test_nothing_is_claimed_for_trials_whose_guarantee_does_not_hold(dpexp_job, store, capsys):
    dpexp_job("-m", *QUICK, "privacy.noise_multiplier=2", "diagnostics=unsafe", "accountant=moments")
    assert capsys.readouterr().out.count("not private ·") == 1
    assert not any(key.startswith("with selection ") for key in store.parent().data.metrics)
    assert "Nothing may be claimed" in store.note()


def test_deleted_runs_count_and_damaged_or_lost_ledgers_are_reported(dpexp_job, store, tmp_path, recwarn):
    def note_of_rerun():
        dpexp_job("-m", *QUICK, SAME, "privacy.noise_multiplier=2", "accountant=moments")
        return store.note()

    note_of_rerun()
    before, (trial,) = store.cost("all_runs"), store.trials()
    store.client.delete_run(trial.info.run_id)
    (Path(trial.data.tags["dpexp.output"]) / "result.json").unlink()  # so that it runs again
    assert "ends early" not in note_of_rerun() and len(store.trials()) == 1
    first, second = sorted(ledgers_in(tmp_path))
    both = concatenate([read_ledger(first), read_ledger(second)])
    assert (
        store.cost("all_runs") == pytest.approx(dpexp.epsilon(both, 1e-4), rel=1e-9) and store.cost("all_runs") > before
    )

    first.write_text(first.read_text().rpartition('{"line"')[0])
    assert "1 with a ledger that ends early) covers" in note_of_rerun()
    assert not any("ends early" in str(warning.message) for warning in recwarn)

    # Of trials that were killed before their first ε was logged: two had begun a ledger, which cannot be read any more.
    parent, begun = store.parent().info, second.read_text().partition("\n")[0]
    for name, file, content in (
        ("damaged", "ledger.jsonl", f"{begun}\nnonsense\n"), ("lost", "ledger.end.json", "{}"), ("idle", "x", ""),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
        tags = {"mlflow.parentRunId": parent.run_id, "dpexp.output": str(tmp_path / name), "dpexp.private": "yes"}
        store.client.create_run(parent.experiment_id, tags=tags, run_name=name)
    assert re.search("the ledgers of (damaged, lost|lost, damaged) are missing", note_of_rerun())

    for path in (first, second):
        path.unlink()
    assert "are missing" in note_of_rerun()
    metrics = store.parent().data.metrics
    withdrawn = [value for key, value in metrics.items() if key.startswith("with selection ")]
    assert withdrawn and all(math.isnan(value) for value in withdrawn)


def test_a_sweep_whose_parent_cannot_begin_does_not_train(dpexp_job, monkeypatch, tmp_path):
    monkeypatch.setattr("dpexp.tracking.sweep_run.end_dead_runs", mock.Mock(side_effect=OSError("database is locked")))
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
    trials, best_alone = store.trials("FINISHED"), store.cost("private_selection")
    assert sorted(run.data.params["draw"] for run in trials) == ["0", "1"]
    trial = dp_accounting.SelfComposedDpEvent(sampled(8.0, 359 / 1437), 3)
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, 4.0, 1.0)
    price = composed(rdp.RdpAccountant(ORDERS), (event, 1)).get_epsilon(1e-4)
    assert best_alone == pytest.approx(price, rel=1e-12) and best_alone > store.cost("single_run")
    said = {"covers all that was printed and logged of them": store.cost("all_runs"),
            "covers the best trial alone, for those who see nothing": best_alone}  # fmt: skip
    at = [store.note().index(f"ε = {up(cost, 3)} (") for cost in sorted(said.values())]
    assert at == sorted(at) and all(words in store.note() for words in said), "the smaller one first"
    best = max(trials, key=lambda run: run.data.metrics["test_accuracy"]).data.metrics
    for name in ("test_accuracy", "epsilon"):
        assert store.parent().data.metrics[name] == pytest.approx(best[name])

    monkeypatch.setattr("dpexp.accounting.multiple_runs.draw_repetitions", refused_when_resumed)
    dpexp_job(*sweep)
    assert len(store.parents()) == 1 and len(store.trials()) == 2


def test_selection_costs_the_worst_case_of_the_grid_whatever_was_drawn(dpexp_job, store, monkeypatch):
    """Only z = 8 is drawn; z = 1 might have been."""
    drawn = mock.Mock(**{"integers.return_value": 1, "random.return_value": 0.5})
    random = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: random(*seed) if seed else drawn)
    sweep = (*SELECT, "hydra.sweeper.mean=1.5", "privacy.noise_multiplier=1,8")
    dpexp_job(*sweep)
    (trial,), price = store.trials("FINISHED"), store.cost("private_selection")
    assert trial.data.metrics["with noise_multiplier"] == 8
    worst = run_rdp(ledger(1.0, 359 / 1437, 3))
    assert price == pytest.approx(selection_epsilon(worst, 1e-4, 1.5, 1.0)) and price > 10 * store.cost("single_run")

    monkeypatch.setattr("dpexp.commands.build.plan", refused_when_resumed)
    dpexp_job(*sweep)
    assert store.cost("private_selection") == price and len(store.trials()) == 1


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
    accountant = composed(rdp.RdpAccountant(ORDERS), (sampled(z, q), rounds))
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
    numbers = iter((np.arange(count) + 0.5) / count)  # in the middles of equal parts of [0, 1)
    random = SimpleNamespace(random=lambda: next(numbers))
    drawn = np.bincount([draw_repetitions(mean, shape, random) for _ in range(count)], minlength=len(k) + 1)
    assert drawn[0] == 0 and np.all(np.abs(drawn[1:] - count * expected) <= 1)


def test_the_number_of_trials_may_be_that_of_a_poisson_distribution_or_one():
    """Definition 2; no other has a mean of 1."""
    random = np.random.default_rng(0)
    drawn = np.array([draw_repetitions(6.0, math.inf, random) for _ in range(4000)])
    assert drawn.min() == 0 and drawn.mean() == pytest.approx(6.0, abs=5 * drawn.std() / 4000**0.5)
    assert drawn.var() == pytest.approx(6.0, rel=0.15) and draw_repetitions(1.0, 1.0, random) == 1
