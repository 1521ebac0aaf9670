"""Private metrics: clipped, summed, noised and accounted like gradients."""

import math

import pytest
import torch
from dp_accounting.pld import PLDAccountant
from jobs import result_of, store_of
from plans import plan_of, trainer
from runs import composed, sampled
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainings import released_averages, released_sums

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.allocation import DimensionAdjusted, Explicit
from dpexp.privacy.plan.groups import per_layer, value_key
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.privacy.round import RoundEngine
from dpexp.reporting.terminal import plan_table

B, Q, N = 7, 0.1, 100
LOSS = {"loss": {"clip_norm": 0.6, "budget_share": 0.01}}
RELEASE = LOSS | {
    "histogram": {"clip_norm": 0.5, "budget_share": 0.1, "dim": 3, "every_n_rounds": 2},
    "both": {
        "budget_share": 0.1,
        "clip_norm": 1.2,
        "values": {"correct": {"alpha": 1}, "inputs": {"alpha": 2, "dim": 3}},
    },
}


class Branching(nn.Module):
    """Branches on a value of the record."""

    def forward(self, x):
        return x * (1 + int(x.sum() * 1e6) % 1000 / 1e6)


MODELS = {
    "traced": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "one at a time": lambda: nn.Sequential(nn.Linear(3, 4), Branching(), nn.Linear(4, 2)),
}


def step(model, batch, give=dpexp.release):
    x, y = batch
    scores = model(x[None])
    loss = F.cross_entropy(scores, y[None])
    give("loss", loss)
    give("histogram", x)
    give("correct", (scores.argmax(1) == y).float())
    give("inputs", x[None] ** 2)
    give("unnamed", x)
    return loss


def own_plan(model, release=RELEASE, **options):
    defaults = {"n": N, "q": Q, "steps": 4, "noise_multiplier": 1e-8, "private_metrics": release}
    return plan_of(model, **defaults | options)


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(B, 3, dtype=torch.float64), torch.randint(0, 2, (B,))


def model_of(name="traced", dtype=torch.float64):
    torch.manual_seed(1)
    return MODELS[name]().to(dtype)


def sums(folder, loss_of=step, batch=None, release=RELEASE, name="traced", rounds=1, dtype=torch.float64):
    """Σ_i c_i v^i of each value, and of each parameter's gradient."""
    model = model_of(name, dtype)
    engine = RoundEngine(own_plan(model, release), model, GaussianNoise())
    found = released_sums(engine, folder, loss_of, batch or data(), rounds)
    assert engine.step.mode == name, engine.step.reason
    return {key.removeprefix(value_key("")): total for key, total in found.items()}


def by_hand(model, batch):
    """One record at a time."""
    sums = dict.fromkeys(("loss", "histogram", "correct", "inputs"), 0.0)
    for record in zip(*batch, strict=True):
        given = {}
        step(model, record, given.__setitem__)
        v = {name: given[name].detach().double().reshape(-1) for name in sums}
        norms = {name: float(v[name].norm()) for name in sums}
        both = math.hypot(norms["correct"], norms["inputs"] / 2)
        for name in sums:
            bound, norm = (RELEASE[name]["clip_norm"], norms[name]) if name in RELEASE else (1.2, both)
            sums[name] = sums[name] + min(1.0, bound / norm) * v[name]
    return sums


@pytest.mark.parametrize("name", MODELS)
def test_float64_equals_one_record_at_a_time(name, tmp_path, recwarn):
    found = sums(tmp_path, name=name, rounds=2)
    for value, expected in by_hand(model_of(name), data()).items():
        torch.testing.assert_close(found[value], expected, rtol=1e-6, atol=1e-6)


def gives_in_a_transform(model, one):
    torch.func.vmap(lambda t: dpexp.release("loss", t.sum()) or t)(one[0][None])
    return F.cross_entropy(model(one[0][None]), one[1][None])


def gives_three_numbers(model, one):
    dpexp.release("loss", one[0])
    return F.cross_entropy(model(one[0][None]), one[1][None])


@pytest.mark.parametrize(
    "loss_of, said", [(gives_in_a_transform, "must be called with a value"), (gives_three_numbers, r"3 entries.*dim=1")]
)
def test_values_inside_a_transform_or_of_another_dimension_are_refused(loss_of, said, tmp_path, recwarn):
    with pytest.raises(ConfigError, match=said):
        sums(tmp_path, loss_of, release=LOSS)


COUNTED = {"sample_size": {"budget_share": 0.1}, "loss": {"clip_norm": 0.6, "budget_share": 0.1}}


@pytest.mark.parametrize("name, given", [("traced", None), ("traced", 0.0), ("one at a time", 0.0)])
def test_the_size_of_a_sample_is_counted_whatever_the_step_gives(name, given, tmp_path, recwarn):
    """A record counts 1 = S."""

    def loss_of(model, one):
        if given is not None:
            dpexp.release("sample_size", given)
        return step(model, one)

    for size in (B, B - 1):
        found = sums(tmp_path, loss_of, [part[:size] for part in data()], COUNTED, name)
        assert float(found["sample_size"]) == pytest.approx(size, abs=1e-5), "a record moves it by S"


def test_the_size_of_a_sample_is_shown_with_its_noise():
    plan = own_plan(model_of(), COUNTED)
    group = next(group for group in plan.groups if group.name == "sample_size")
    assert group.S == 1.0 and group.sigma == pytest.approx(1e-8 / math.sqrt(0.1))
    averages = {value_key(name): torch.tensor([B / (Q * N)]) for name in COUNTED}
    shown = MetricEstimates().add(plan, 1, averages)
    assert shown["private/sample_size"] == pytest.approx(B, abs=1e-5)
    assert shown["private/sample_size_noise_std"] == pytest.approx(group.sigma)
    assert shown["private/loss_noise_std"] == pytest.approx(0.6e-8 / math.sqrt(0.1) / (Q * N))
    assert f"{group.sigma:.3g}" in [*plan_table(plan).columns[-1].cells]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3e38])
def test_a_record_moves_a_sum_by_no_more_than_S(bad, tmp_path):
    x, y = data()
    more = torch.cat([x, torch.full((1, 3), 99.0)]).float(), torch.cat([y, y[:1]])

    def loss_of(model, batch):
        one, label = batch
        dpexp.release("loss", torch.where(one[0] > 50, bad, one.sum()))
        dpexp.release("histogram", torch.where(one[0] > 50, bad * one, one))
        return F.cross_entropy(model(one[None] / 100), label[None])

    release = {name: RELEASE[name] | {"every_n_rounds": 1} for name in ("loss", "histogram")}
    without, with_it = (
        sums(tmp_path, loss_of, [part[:size] for part in more], release, dtype=torch.float32) for size in (B, B + 1)
    )
    for name in release:
        moved = (with_it[name] - without[name]).norm()
        assert moved <= release[name]["clip_norm"] + 1e-5
        if not math.isfinite(bad):
            assert moved < 1e-5, "it contributes nothing"


def test_no_value_counts_as_zero_and_two_values_as_their_mean(tmp_path):
    def loss_of(model, one):
        if one[0][0] > 0:
            dpexp.release("loss", 0.25)
            dpexp.release("loss", 0.75)
        return F.cross_entropy(model(one[0][None]), one[1][None])

    x, y = data()
    release = {"loss": {"clip_norm": 1, "budget_share": 0.1}}
    found = sums(tmp_path, loss_of, (x, y), release, "one at a time")
    assert float(found["loss"]) == pytest.approx(0.5 * float((x[:, 0] > 0).sum()), abs=1e-6)


ASKED = (
    "private_metrics.release={train_loss: {clip_norm: 4, budget_share: 0.1}, "
    "train_accuracy: {clip_norm: 1, budget_share: 0.2, every_n_rounds: 2}}"
)


def test_one_round_in_the_ledger_has_gradients_metrics_and_their_cost(dpexp_job, read_lines, tmp_path, recwarn):
    """Read with json alone; ε is dp-accounting's of the same rounds."""
    output = dpexp_job(
        "group=per_layer", "model=mlp", ASKED, "sampling.steps=4", "trainer.num_evaluations=0",
        "privacy.noise_multiplier=1.0",
    )  # fmt: skip
    assert not [one for one in recwarn if "is dropped" in str(one.message)]
    lines, result, client = read_lines(output / "ledger.jsonl"), result_of(output), store_of(tmp_path)
    specs = [line for line in lines if isinstance(line, dict) and "spec" in line]
    assert [line[1] for line in lines if isinstance(line, list)] == [0, 1, 0, 1]
    ratios = [{query["group"]: (query["S"] / query["sigma"]) ** 2 for query in spec["queries"]} for spec in specs]
    assert [sum(each.values()) for each in ratios] == pytest.approx([0.8, 1.0])
    assert "train_accuracy" not in ratios[0] and ratios[0]["train_loss"] == pytest.approx(0.1)
    assert (ratios[1]["train_loss"], ratios[1]["train_accuracy"]) == pytest.approx((0.1, 0.2))
    rounds = ((sampled(sum(ratios[spec["spec"]].values()) ** -0.5, spec["sampling"]["q"]), 2) for spec in specs)
    assert result["epsilon"]["pld"] == pytest.approx(composed(PLDAccountant(), *rounds).get_epsilon(1e-4), rel=2e-3)
    run_id, accuracy = result["mlflow_run_id"], result["released"]["train_accuracy"]
    assert set(result["released"]) == {"train_loss", "train_accuracy"}
    assert (output / "released.png").read_bytes().startswith(b"\x89PNG")
    history = client.get_metric_history(run_id, "private/train_accuracy")
    assert [point.step for point in history] == [2, 4]
    sd = result["groups"]["train_accuracy"]["sigma"] / (result["q"] * result["n"])
    assert client.get_run(run_id).data.metrics["private/train_accuracy_noise_std"] == pytest.approx(sd)
    assert (accuracy["estimate"], accuracy["sd"]) == pytest.approx((history[-1].value, sd), rel=1e-4)
    assert "released.png" in {item.path for item in client.list_artifacts(run_id)}


def test_the_standard_deviation_of_an_estimate(tmp_path):
    """400 rounds without records show the noise alone."""
    model = nn.Linear(3, 2)
    release = {"both": {"budget_share": 0.1, "values": {"a": {"alpha": 1, "dim": 2}, "b": {"alpha": 3}}}}
    plan = own_plan(model, release, steps=400, noise_multiplier=1.0)
    engine, estimates = RoundEngine(plan, model, GaussianNoise(KeyStream.known(1, "noise", 0))), MetricEstimates()
    for t, averages in enumerate(released_averages(engine, tmp_path, 400), 1):
        metrics = estimates.add(engine.current_plan, t, averages)
    assert set(estimates.history) == {"a/0", "a/1", "b"}
    for name, factor in (("a/0", 1), ("a/1", 1), ("b", 3)):
        values = torch.tensor([value for _, value, _ in estimates.history[name]])
        sd = estimates.history[name][0][2]
        assert sd == pytest.approx(factor * math.sqrt(2) / math.sqrt(0.1) / (Q * N))
        assert float((values**2).mean()) == pytest.approx(sd**2, rel=0.3)  # 4 sd of a chi-square of 400
        average = metrics[f"private/{name}_moving_average"]
        assert estimates.moving_average(name) == (average, pytest.approx(sd / math.sqrt(80)))
        assert average == pytest.approx(float(values[-80:].mean()), abs=1e-6)


def test_a_resumed_run_keeps_earlier_releases(tmp_path):
    def fit(steps, resume=None):
        module = dpexp.Classifier(nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, 0.1))
        release = {"train_loss": {"clip_norm": 1, "budget_share": 0.1}}
        callback = dpexp.PrivacyCallback(own_plan(module, release, q=0.5, noise_multiplier=1.0), tmp_path / "ledger")
        run = trainer(callback, max_steps=steps)
        x, y = data()
        run.fit(module, DataLoader(TensorDataset(x.float(), y), 4), ckpt_path=resume)
        run.save_checkpoint(tmp_path / "checkpoint")
        return callback.estimates.history["train_loss"]

    before = fit(2)
    after = fit(4, resume=tmp_path / "checkpoint")
    assert after[:2] == before and [at for at, _, _ in after] == [1, 2, 3, 4]
    assert len(read_ledger(tmp_path / "ledger")) == 4


OK, SHARE = {"clip_norm": 1, "budget_share": 0.1}, {"budget_share": 0.1}


@pytest.mark.parametrize(
    "release, message",
    [
        ({"a": {"clip_norm": 1}}, "must set clip_norm and budget_share"),
        ({"a": SHARE}, "must set clip_norm, the bound"),
        ({"a": OK | {"budget_share": 1.0}}, "add up to 1"),
        ({"a": OK | {"clip_norm": -1}}, "private_metrics.release.a.clip_norm=-1"),
        ({"a": OK | {"every_n_rounds": 0}}, "private_metrics.release.a.every_n_rounds=0"),
        ({"a": OK | {"dim": 1.5}}, "private_metrics.release.a.dim=1.5"),
        ({"a": OK | {"k": 2}}, "known: "),
        ({"all": OK}, "name of a group of gradients too"),
        ({"a": OK | {"values": {"b": {"alpha": 1}}, "clip_norm": 1.1}}, "at most 1"),
        ({"a": SHARE | {"values": {"b": {}}}}, "must set alpha"),
        ({"a": SHARE | {"values": []}}, "must map names"),
        ({"a": SHARE | {"values": {"sample_size": {"alpha": 1}}}}, "sample_size is released by itself"),
        ({"sample_size": OK}, "sample_size.clip_norm is not taken"),
        ({"sample_size": {"clip_norm": 1}}, "sample_size.clip_norm is not taken"),
        ({"sample_size": {}}, "must set clip_norm and budget_share"),
        ({"a": OK, "c": SHARE | {"values": {"a": {"alpha": 1}}}}, "is in two groups"),
    ],
)
def test_mistakes_are_refused(release, message):
    with pytest.raises(ConfigError, match=message):
        own_plan(nn.Linear(3, 2), release)


def test_shares_leave_the_rest_to_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plan = own_plan(model, group=per_layer(), allocation=DimensionAdjusted())
    shares = {group.name: group.share for group in plan.groups}
    assert sum(shares.values()) == pytest.approx(1) and shares["0"] == pytest.approx(0.79 * 16 / 26)
    assert plan.noise_multiplier == pytest.approx(1e-8)
    explicit = own_plan(model, noise_multiplier=None, group=per_layer(), allocation=Explicit({"0": 2.0, "1": 4.0}))
    sigmas = {group.name: group.sigma for group in explicit.groups}
    assert (sigmas["0"], sigmas["1"]) == pytest.approx((2.0, 4.0))
    assert explicit.noise_multiplier == pytest.approx((0.15625 / 0.79) ** -0.5)  # S = 1/√2 each


def test_schedules_of_S_leave_metrics_alone():
    plan = own_plan(nn.Linear(3, 2), schedules={"S": {"step": {0: 1.0, 2: 0.5}}})
    groups = {group.name: group for group in plan.at_round(3).groups}
    assert groups["all"].S == 0.5 and groups["loss"].S == 0.6 and groups["loss"].sigma == plan.groups[1].sigma
    assert sum(plan.ledger().rounds.values()) == 4
