"""Jobs from the command line: what is asked for is in the plan, the ledger, the result, the card and MLflow."""

import json
import math
import signal

import pytest
import torch
from jobs import result_of, signal_after, store_of
from runs import losses_of

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.risk import FIGURES, in_words, risk
from dpexp.accounting.rounding import up
from dpexp.commands.account import account
from dpexp.tracking.job_folder import PLANNED_LEDGER
from dpexp.tracking.read import trials
from dpexp.training.models import logistic

SMALL = ("model=logistic", "trainer.num_evaluations=0")
LAYERS = ["model.0", "model.3", "model.7", "model.9"]
SEPARATE, JOINT = "clip_norm=dimension clip_norm.total=0.6", "mechanism=joint alpha=dimension alpha.total=0.6"
# options -> the names of the groups
CHOSEN = {
    f"group=flat {SEPARATE}": ["all"],
    f"group=per_layer {JOINT} allocation=dimension_adjusted": LAYERS,
    f"group=per_layer {SEPARATE} allocation=min_variance": LAYERS,
    f"group=conv_fc {JOINT} allocation=weighted allocation.weights={{conv:0.7,fc:0.3}}": ["conv", "fc"],
}


def plan_of(options):
    return dpexp.plan(dpexp.compose("sampling.sampling_rate=0.05", "sampling.steps=3", *options.split()))


def noise_multiplier_of(round_):
    return 1 / math.hypot(*(query.S / query.sigma for query in round_.queries))


@pytest.mark.parametrize("options, names", CHOSEN.items())
def test_groups_mechanisms_and_allocations_cost_what_the_noise_multiplier_says(options, names):
    ((round_, count),) = plan_of(f"{options} privacy.noise_multiplier=1.3").ledger().rounds.items()
    sampling = round_.sampling
    assert (count, sampling.q, sampling.n, sampling.policy.name) == (3, 0.05, 1437, "poisson")
    assert [query.group for query in round_.queries] == names
    assert noise_multiplier_of(round_) == pytest.approx(1.3, rel=1e-12)


def test_noise_may_be_given_for_each_group():
    plan = plan_of("group=conv_fc allocation=explicit privacy.epsilon=null allocation.sigma={conv:14,fc:6}")
    (round_,) = plan.ledger().rounds
    assert [query.sigma for query in round_.queries] == pytest.approx([14, 6], rel=1e-12)
    assert plan.noise_multiplier == pytest.approx(noise_multiplier_of(round_), rel=1e-12)


def test_a_number_of_bands_and_of_partitions_may_be_given():
    plan = plan_of("noise=banded noise.bands=3 sampling.partitions=5 privacy.noise_multiplier=1 optimizer=adam")
    (round_,) = plan.ledger().rounds
    assert (round_.bands, round_.sampling.policy.partitions) == (3, 5)


@pytest.mark.parametrize(
    "mechanism, conv, fc",
    [
        ("joint", 2, 2),
        ("separate", 0.5, 0.5),
        ("by_group mechanism.by_group={conv:joint,fc:separate}", 2, 0.5),
        ("by_group mechanism.by_group={conv:separate,fc:joint}", 0.5, 2),
    ],
)
def test_a_groups_default_clipping_norm_is_that_of_its_mechanism(mechanism, conv, fc):
    """√k of joint clipping of k vectors, 1/√2 of separate clipping of each of two groups."""
    groups = plan_of(f"group=conv_fc privacy.noise_multiplier=1 mechanism={mechanism}").groups
    assert [group.S**2 for group in groups] == pytest.approx([conv, fc])


def test_the_ledger_says_what_was_asked_for(dpexp_job, read_lines, capsys):
    """It is judged by its file alone, and ε by dp-accounting."""
    output = dpexp_job(
        "tracking=none", "trainer.num_evaluations=0", "group=conv_fc", *JOINT.split(), "allocation=weighted",
        "allocation.weights={conv:0.7,fc:0.3}", "sampling.sampling_rate=0.05", "sampling.steps=3",
        "privacy.noise_multiplier=1.3", "accountant=all",
    )  # fmt: skip
    header, spec, *rounds, closing = read_lines(output / "ledger.jsonl")
    assert (header["adjacency"], len(rounds), closing["rounds"]) == ("add_remove", 3, 3)
    assert header["sampling"] | {"q": 0.05} == spec["sampling"] == {"policy": "poisson", "q": 0.05, "n": 1437}
    shares = {query["group"]: (1.3 * query["S"] / query["sigma"]) ** 2 for query in spec["queries"]}
    assert shares == pytest.approx({"conv": 0.7, "fc": 0.3}, rel=1e-12)

    result, printed = result_of(output), capsys.readouterr().out
    assert (result["rounds"], result["delta"], result["private"], [*result["groups"]]) == (3, 1e-4, True, [*shares])
    assert [*result["epsilon"]] == ["pld", "rdp", "moments", "strong", "basic"]
    assert result["epsilon"]["pld"] == pytest.approx(losses_of(1.3, 0.05, 3).get_epsilon_for_delta(1e-4), rel=1e-4)
    assert result["noise_multiplier"] == pytest.approx(1.3, rel=1e-12)
    assert 0 <= result["metrics"]["test_accuracy"] <= 1 and result["seconds"] > 0
    for expected in ("conv", "σ̃_g", "Test accuracy", "ε =", "round 3/3"):
        assert expected in printed
    assert "is not below 1/n" not in printed


@pytest.mark.usefixtures("bare")
def test_a_job_says_everywhere_how_it_clips_and_what_an_attack_may_achieve(dpexp_job, printed):
    """With options by group, users as its privacy unit, and an attack's true positive rate as its target."""
    output = dpexp_job(
        "group=conv_fc", "trainer.num_evaluations=0", "privacy_unit=user", "sampling.epochs=null", "sampling.steps=2",
        "sampling.expected_batch_size=30",  # of few users, since users of another size are traced again
        "privacy.max_tpr_at_fpr={0.01: 0.05}", "mechanism=by_group", "mechanism.by_group={conv: joint, fc: separate}",
        "alpha=adaptive", "clip_norm=by_group",
        "clip_norm.by_group={conv: null, fc: {_target_: dpexp.FixedClipNorm, value: 0.5}}",
        "clip_rule=by_group", "clip_rule.by_group={conv: abadi, fc: automatic}",
    )  # fmt: skip
    shown, card, result = printed(), (output / "card.md").read_text(), result_of(output)
    client = store_of(output.parents[2])
    (run,) = client.search_runs(["1"])
    conv, fc, _ = (group["clip_rule"] for group in json.loads((output / "plan.json").read_text())["groups"])
    assert conv == {"name": "abadi"} and fc == {"gamma": 0.01, "name": "automatic"}
    (row,) = trials(f"sqlite:///{output.parents[1]}/mlflow.db", ["dpexp"]).to_dict("records")
    assert row["mechanism"] == "conv: joint, fc: separate" and row["alpha"] == "adaptive"
    assert row["clip_rule"] == "conv: abadi, fc: automatic"

    expected = risk(read_ledger(output / "ledger.jsonl")).figures()
    assert result["risk"] == expected and {*expected} == {*FIGURES} and 0.0499 < expected["tpr_at_fpr_0.01"] <= 0.05
    assert (result["unit"], result["n"], run.data.tags["dpexp.privacy_unit"]) == ("user", 200, "user")
    logged = {name: float(up(value, 5)) for name, value in expected.items()}
    assert {name: run.data.metrics[f"with {name}"] for name in FIGURES} == logged
    assert run.data.metrics["tried tpr"] <= 1.01 and "epsilon" in run.data.metrics
    changed = f"One user changes the probability of any result at most {up(math.exp(result['epsilon']['pld']), 3)}-fold"
    for words in ("which costs TPR at FPR 0.01 = 0.0", f"{changed}, plus 0.0001."):
        assert words in shown
    assert shown.count("noise_multiplier = ") == 1 and "z = " not in shown and "The step is" not in shown
    assert "for adding or removing one user" in card and f"μ = {up(expected['mu'], 4)}" in card
    risk_in_words = in_words(expected, "user")
    for words in (f"In words: {risk_in_words}", "clip abadi of conv and automatic (gamma = 0.01) of fc"):
        assert words in shown and words in card
    account([run.info.run_id])
    assert f"by pld: {risk_in_words}" in printed()


@pytest.mark.usefixtures("bare")
def test_noise_banded_is_all_that_a_job_needs(dpexp_job, tmp_path, capsys):
    output = dpexp_job(
        *SMALL, "noise=banded", "noise.momentum=0", "sampling.expected_batch_size=64", "sampling.steps=40"
    )
    result, ledger = result_of(output), read_ledger(output / "ledger.jsonl")
    ((round_, count),) = ledger.rounds.items()
    b, policy = round_.bands, round_.sampling.policy
    assert (count, policy.partitions, policy.name) == (40, b, "cyclic_poisson") and b > 1
    assert sum(releases(ledger).values()) == math.ceil(40 / b)
    assert result["bands"] == list(round_.queries[0].bands) and result["epsilon"]["pld"] <= 3.0
    assert f"noise correlated over b = {b} rounds, c = (" in (output / "card.md").read_text()
    assert f"noise correlated over {b} rounds" in capsys.readouterr().out
    params = store_of(tmp_path).get_run(result["mlflow_run_id"]).data.params
    assert params["plan.bands"] == str(b) and params["noise.bands"] == "auto"


def test_a_killed_job_of_random_allocation_is_shorter_and_costs_what_was_planned(
    dpexp_job, forked, tmp_path, printed
):  # fmt: skip
    """Of five epochs, of five rounds but the last, the second breaks off after one; the checkpoint is of round 3."""
    folder = tmp_path / "job"
    forked(
        *SMALL, "sampling=random_allocation", "sampling.expected_batch_size=300", "sampling.steps=22", "data.id=digits",
        "privacy.noise_multiplier=2", "checkpoint.every_n_rounds=3", f"hydra.run.dir={folder}",
        first=(signal_after, 6, signal.SIGKILL),
    ).ended()  # fmt: skip
    assert sum(releases(ledger_so_far(folder / "ledger.jsonl")).values()) == 2
    with pytest.warns(UserWarning, match="so 7 rounds are lost; a new epoch begins, and 12 rounds are left"):
        dpexp_job("resume", str(folder))
    said = printed()
    assert "each record in 1 of an epoch's 5 rounds; an epoch (the last one, too, of only 2 rounds) costs all" in said
    result, ledger = result_of(folder), read_ledger(folder / "ledger.jsonl")
    assert (result["rounds"], len(ledger)) == (15, 18) and not (folder / "last.ckpt").exists()
    plan = dpexp.make_plan(
        logistic([64], 10), n=1437,
        sampling=dpexp.RandomAllocation(expected_batch_size=300, steps=22),
        target=dpexp.Target(noise_multiplier=2.0),
    ).ledger()  # fmt: skip
    assert len(plan) == 22 and sum(releases(plan).values()) == 5
    planned = read_ledger(folder / PLANNED_LEDGER)
    costs = [result["epsilon"]["pld"], *(dpexp.epsilon(one, 1e-4) for one in (ledger, plan, planned))]
    assert costs == [costs[0]] * 4
    with pytest.raises(SystemExit, match="has finished; there is nothing to resume"):
        dpexp_job("resume", str(folder))


def test_the_non_private_baseline_takes_batches_of_the_same_size_and_says_what_it_is(dpexp_job, monkeypatch):
    """Its records are read by as many processes as are asked for."""
    from dpexp.training.classifier import Classifier
    from dpexp.training.data import TensorData

    sizes, workers, step, loader = [], set(), Classifier.training_step, TensorData.train_dataloader
    monkeypatch.setattr(
        Classifier, "training_step", lambda self, batch: (sizes.append(len(batch[0])), step(self, batch))[1]
    )
    monkeypatch.setattr(TensorData, "train_dataloader", lambda self: (workers.add(self.num_workers), loader(self))[1])
    output = dpexp_job(
        *SMALL, "tracking=none", "sampling.steps=3", "sampling.expected_batch_size=100", "privacy.enabled=false",
        "trainer.num_workers=2",
    )  # fmt: skip
    result, card = result_of(output), (output / "card.md").read_text()
    assert (result["private"], result["rounds"]) == (False, 3) and "epsilon" not in result
    assert not (output / "ledger.jsonl").exists() and sizes == [100, 100, 100] and workers == {2}
    assert "**Not private**" in card and "ε" not in card
    assert dpexp.load(output)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
