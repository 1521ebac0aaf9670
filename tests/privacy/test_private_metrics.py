"""Private metrics: clipped, summed, noised and accounted like gradients."""

import math

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from jobs import result_of, store_of
from plans import plan_of, trainer
from torch import nn
from torch.nn import functional as F

import dpexp
from dpexp.accounting.ledger import LedgerWriter, read_ledger
from dpexp.accounting.sampling import Poisson, event_of
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.privacy.round import RoundEngine
from dpexp.reporting.terminal import plan_table

B, Q, N = 7, 0.1, 100
RELEASE = {
    "loss": {"clip_norm": 0.6, "budget_share": 0.01},
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


def released(engine, path, batch, loss_of, rounds=1):
    """Σ_i c_i v^i of each value, in the last of some rounds on the same sample."""
    plan = engine.plan
    ledger = LedgerWriter(path, plan.adjacency, plan.sampling_events(), False, None, None)
    for t in range(rounds):
        ledger.sample(event_of(plan.at_round(t).sampling, plan.n, 0))
        engine.begin(t)
        engine.add_chunk(lambda _, one: loss_of(one), batch, len(batch[0]))
        engine.raise_if_none_contributed()
        averages = engine.release(ledger)
    ledger.close()
    return {name: average * Q * N for name, average in averages.items()}


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(B, 3, dtype=torch.float64), torch.randint(0, 2, (B,))


def by_hand(model, batch):
    """One record at a time."""
    sums = {"loss": 0.0, "histogram": torch.zeros(3), "correct": 0.0, "inputs": torch.zeros(3)}
    for x, y in zip(*batch, strict=True):
        given = {}
        step(model, (x, y), given.__setitem__)
        for name in ("loss", "histogram"):
            v = given[name].detach().reshape(-1)
            sums[name] = sums[name] + v * min(1.0, RELEASE[name]["clip_norm"] / float(v.norm()))
        correct, inputs = (given[name].detach().double().reshape(-1) for name in ("correct", "inputs"))
        norm = math.sqrt(float(correct.norm()) ** 2 + float(inputs.norm()) ** 2 / 4)
        c = min(1.0, 1.2 / norm)
        sums["correct"], sums["inputs"] = sums["correct"] + c * correct, sums["inputs"] + c * inputs
    return sums


@pytest.mark.parametrize("name", MODELS)
def test_float64_equals_one_record_at_a_time(name, tmp_path, recwarn):
    model, batch = MODELS[name]().double(), data()
    engine = RoundEngine(own_plan(model), model, GaussianNoise())
    found = released(engine, tmp_path / "ledger", batch, lambda b: step(model, b), rounds=2)
    for value, expected in by_hand(model, batch).items():
        expected = torch.as_tensor(expected, dtype=torch.float64).reshape(-1)
        torch.testing.assert_close(found[f".value {value}"], expected, rtol=1e-6, atol=1e-6)
    assert engine.step.mode == name


def test_a_value_inside_a_transform_is_refused(tmp_path, recwarn):

    class Gives(nn.Module):
        def forward(self, x):
            def given(t):
                dpexp.release("loss", t.sum())
                return t

            return torch.func.vmap(given)(x)

    model = nn.Sequential(nn.Linear(3, 4), Gives(), nn.Linear(4, 2)).double()
    plan = own_plan(model, {"loss": {"clip_norm": 1, "budget_share": 0.1}})
    x, y = data()
    loss_of = lambda b: F.cross_entropy(model(b[0][None]), b[1][None])  # noqa: E731
    with pytest.raises(ConfigError, match="must be called with a value"):
        released(RoundEngine(plan, model, GaussianNoise()), tmp_path / "ledger", (x, y), loss_of)


COUNTED = {"sample_size": {"budget_share": 0.1}, "loss": {"clip_norm": 0.6, "budget_share": 0.1}}


@pytest.mark.parametrize("name, given", [*(("traced", given) for given in (None, 0.0, 7.0)), ("one at a time", 7.0)])
def test_the_size_of_a_sample_is_counted_whatever_the_step_gives(name, given, tmp_path, recwarn):
    """A record counts 1 = S, and one without a loss 0; what is shown is the size."""
    model, batch = MODELS[name]().double(), data()

    def loss_of(one):
        if given is not None:
            dpexp.release("sample_size", given)
        return step(model, one)

    plan = own_plan(model, COUNTED)
    engine, estimates = RoundEngine(plan, model, GaussianNoise()), MetricEstimates()
    sums = released(engine, tmp_path / "ledger", batch, loss_of)
    assert float(sums[value_key("sample_size")]) == pytest.approx(B, abs=1e-5)
    assert engine.step.mode == name, engine.step.reason
    (group,) = [group for group in plan.groups if group.name == "sample_size"]
    assert group.S == 1.0 and group.sigma == pytest.approx(1e-8 / math.sqrt(0.1))
    shown = estimates.add(plan, 1, {key: value / (Q * N) for key, value in sums.items()})
    assert shown["private/sample_size"] == pytest.approx(B, abs=1e-5)
    assert shown["private/sample_size_noise_std"] == pytest.approx(group.sigma)
    assert f"{group.sigma:.3g}" in [*plan_table(plan).columns[-1].cells]
    assert shown["private/loss_noise_std"] == pytest.approx(0.6e-8 / math.sqrt(0.1) / (Q * N))
    fewer = tuple(part[1:] for part in batch)
    sums = released(RoundEngine(plan, model, GaussianNoise()), tmp_path / "fewer", fewer, loss_of)
    assert float(sums[value_key("sample_size")]) == pytest.approx(B - 1, abs=1e-5), "a record moves it by S"


def test_the_mean_of_estimates_is_the_mean_size_of_poisson_samples(dpexp_job):
    output = dpexp_job(
        "model=logistic", "private_metrics.release={sample_size: {budget_share: 0.1}}", "sampling.steps=20",
        "sampling.expected_batch_size=100", "privacy.noise_multiplier=1e-6", "privacy.noise_seed=1",
        "trainer.num_evaluations=0", "tracking=none", "accountant=rdp",
    )  # fmt: skip
    found = result_of(output)["released"]["sample_size"]
    policy, stream = Poisson(sampling_rate=100 / 1437), KeyStream.known(1, "sampling", 0)
    sizes = [len(policy.draw(1437, stream)[0]) for _ in range(20)]
    assert found["estimate"] == pytest.approx(sum(sizes[-4:]) / 4, abs=1e-3) and found["sd"] < 1e-4


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3e38])
def test_a_record_moves_a_sum_by_no_more_than_S(bad, tmp_path):
    model, (x, y) = MODELS["traced"](), data()
    x = x.float()

    def loss_of(batch):
        one, label = batch
        dpexp.release("loss", torch.where(one[0] > 50, bad, one.sum()))
        dpexp.release("histogram", torch.where(one[0] > 50, bad * one, one))
        return F.cross_entropy(model(one[None] / 100), label[None])

    release = {name: RELEASE[name] | {"every_n_rounds": 1} for name in ("loss", "histogram")}
    without = released(RoundEngine(own_plan(model, release), model, GaussianNoise()), tmp_path / "1", (x, y), loss_of)
    more = torch.cat([x, torch.full((1, 3), 99.0)]), torch.cat([y, y[:1]])
    with_it = released(RoundEngine(own_plan(model, release), model, GaussianNoise()), tmp_path / "2", more, loss_of)
    for name in release:
        moved = (with_it[f".value {name}"] - without[f".value {name}"]).norm()
        assert moved <= release[name]["clip_norm"] + 1e-5
        if not math.isfinite(bad):
            assert moved < 1e-5, "it contributes nothing"


def test_no_value_counts_as_zero_and_two_values_as_their_mean(tmp_path):
    model, (x, y) = MODELS["traced"]().double(), data()

    def loss_of(batch):
        if batch[0][0] > 0:
            dpexp.release("loss", 0.25)
            dpexp.release("loss", 0.75)
        return F.cross_entropy(model(batch[0][None]), batch[1][None])

    plan = own_plan(model, {"loss": {"clip_norm": 1, "budget_share": 0.1}})
    found = released(RoundEngine(plan, model, GaussianNoise()), tmp_path / "ledger", (x, y), loss_of)
    assert float(found[".value loss"]) == pytest.approx(0.5 * float((x[:, 0] > 0).sum()), abs=1e-6)


def test_values_of_another_dimension_are_refused(tmp_path):
    model, batch = MODELS["traced"]().double(), data()

    def loss_of(one):
        dpexp.release("loss", one[0])
        return F.cross_entropy(model(one[0][None]), one[1][None])

    engine = RoundEngine(own_plan(model), model, GaussianNoise())
    with pytest.raises(ConfigError, match=r"3 entries.*dim=1"):
        released(engine, tmp_path / "ledger", batch, loss_of)


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
    lines = read_lines(output / "ledger.jsonl")
    specs = [line for line in lines if isinstance(line, dict) and "spec" in line]
    rounds = [line[1] for line in lines if isinstance(line, list)]
    assert rounds == [0, 1, 0, 1]
    ratios = [{query["group"]: (query["S"] / query["sigma"]) ** 2 for query in spec["queries"]} for spec in specs]
    assert set(ratios[1]) - set(ratios[0]) == {"train_accuracy"} and "train_loss" in ratios[0]
    assert sum(ratios[1].values()) == pytest.approx(1.0)
    assert sum(ratios[0].values()) == pytest.approx(0.8)
    assert ratios[1]["train_loss"] == pytest.approx(0.1) and ratios[1]["train_accuracy"] == pytest.approx(0.2)
    accountant = PLDAccountant()
    for spec, times in zip(specs, (2, 2), strict=True):
        z = sum(ratios[spec["spec"]].values()) ** -0.5
        q = spec["sampling"]["q"]
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), times)
    result = result_of(output)
    assert result["epsilon"]["pld"] == pytest.approx(accountant.get_epsilon(1e-4), rel=2e-3)
    assert set(result["released"]) == {"train_loss", "train_accuracy"}
    assert (output / "released.png").read_bytes().startswith(b"\x89PNG")
    client = store_of(tmp_path)
    run = client.get_run(result["mlflow_run_id"])
    history = client.get_metric_history(run.info.run_id, "private/train_accuracy")
    assert [point.step for point in history] == [2, 4]
    sd = result["groups"]["train_accuracy"]["sigma"] / (result["q"] * result["n"])
    assert run.data.metrics["private/train_accuracy_noise_std"] == pytest.approx(sd)
    assert "released.png" in {item.path for item in client.list_artifacts(run.info.run_id)}


def test_the_standard_deviation_of_an_estimate(tmp_path):
    """400 rounds without records show the noise alone."""
    model = nn.Linear(3, 2)
    release = {"both": {"budget_share": 0.1, "values": {"a": {"alpha": 1, "dim": 2}, "b": {"alpha": 3}}}}
    plan = own_plan(model, n=N, q=Q, steps=400, noise_multiplier=1.0, private_metrics=release)
    engine, estimates = RoundEngine(plan, model, GaussianNoise()), MetricEstimates()
    ledger = LedgerWriter(tmp_path / "ledger", plan.adjacency, plan.sampling_events(), False, None, None)
    for t in range(400):
        ledger.sample(event_of(plan.sampling, N, 0))
        engine.begin(t)
        engine.raise_if_none_contributed()
        metrics = estimates.add(engine.current_plan, t + 1, engine.release(ledger))
    ledger.close()
    assert set(estimates.history) == {"a/0", "a/1", "b"}
    for name, factor in (("a/0", 1), ("a/1", 1), ("b", 3)):
        values = torch.tensor([value for _, value, _ in estimates.history[name]])
        sd = estimates.history[name][0][2]
        assert sd == pytest.approx(factor * math.sqrt(2) / math.sqrt(0.1) / (Q * N))
        assert float((values**2).mean()) == pytest.approx(sd**2, rel=0.3)  # 4 sd of a chi-square of 400
        average, average_sd = estimates.moving_average(name)
        assert average == pytest.approx(float(values[-80:].mean()), abs=1e-6)
        assert average_sd == pytest.approx(sd / math.sqrt(80))
        assert metrics[f"private/{name}_moving_average"] == average


def test_a_resumed_run_keeps_earlier_releases(tmp_path):
    from torch.utils.data import DataLoader, TensorDataset

    from dpexp.training.classifier import Classifier

    def fit(steps, resume=None):
        torch.manual_seed(0)
        module = Classifier(nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, 0.1))
        plan = own_plan(
            module, n=20, q=0.5, steps=6, noise_multiplier=1.0,
            private_metrics={"train_loss": {"clip_norm": 1, "budget_share": 0.1}},
        )  # fmt: skip
        callback = dpexp.PrivacyCallback(plan, tmp_path / "ledger")
        run = trainer(callback, max_steps=steps)
        batch = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
        run.fit(module, DataLoader(batch, 4), ckpt_path=resume)
        run.save_checkpoint(tmp_path / "checkpoint")
        return callback.estimates.history["train_loss"]

    before = fit(3)
    after = fit(6, resume=tmp_path / "checkpoint")
    assert after[:3] == before and [at for at, _, _ in after] == [1, 2, 3, 4, 5, 6]
    assert len(read_ledger(tmp_path / "ledger")) == 6


@pytest.mark.parametrize(
    "release, message",
    [
        ({"a": {"clip_norm": 1}}, "must set clip_norm and budget_share"),
        ({"a": {"budget_share": 0.1}}, "must set clip_norm, the bound"),
        ({"a": {"clip_norm": 1, "budget_share": 1.0}}, "add up to 1"),
        ({"a": {"clip_norm": -1, "budget_share": 0.1}}, "private_metrics.release.a.clip_norm=-1"),
        (
            {"a": {"clip_norm": 1, "budget_share": 0.1, "every_n_rounds": 0}},
            "private_metrics.release.a.every_n_rounds=0",
        ),
        ({"a": {"clip_norm": 1, "budget_share": 0.1, "dim": 1.5}}, "private_metrics.release.a.dim=1.5"),
        ({"a": {"clip_norm": 1, "budget_share": 0.1, "k": 2}}, "known: "),
        ({"all": {"clip_norm": 1, "budget_share": 0.1}}, "name of a group of gradients too"),
        ({"a": {"budget_share": 0.1, "values": {"b": {"alpha": 1}}, "clip_norm": 1.1}}, "at most 1"),
        ({"a": {"budget_share": 0.1, "values": {"b": {}}}}, "must set alpha"),
        ({"a": {"budget_share": 0.1, "values": []}}, "must map names"),
        ({"a": {"budget_share": 0.1, "values": {"sample_size": {"alpha": 1}}}}, "sample_size is released by itself"),
        ({"sample_size": {"budget_share": 0.1, "clip_norm": 4}}, "sample_size.clip_norm is not taken"),
        ({"sample_size": {"clip_norm": 1}}, "sample_size.clip_norm is not taken"),
        ({"sample_size": {}}, "must set clip_norm and budget_share"),
        (
            {"a": {"budget_share": 0.1, "clip_norm": 1}, "c": {"budget_share": 0.1, "values": {"a": {"alpha": 1}}}},
            "is in two groups",
        ),
    ],
)
def test_mistakes_are_refused(release, message):
    with pytest.raises(dpexp.ConfigError, match=message):
        own_plan(nn.Linear(3, 2), release)


def test_shares_leave_the_rest_to_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    from dpexp.privacy.plan.allocation import DimensionAdjusted, Explicit
    from dpexp.privacy.plan.groups import per_layer

    plan = own_plan(model, group=per_layer(), allocation=DimensionAdjusted())
    shares = {group.name: group.share for group in plan.groups}
    assert sum(shares.values()) == pytest.approx(1) and shares["0"] == pytest.approx(0.79 * 16 / 26)
    assert plan.noise_multiplier == pytest.approx(1e-8)
    explicit = own_plan(model, noise_multiplier=None, group=per_layer(), allocation=Explicit({"0": 2.0, "1": 4.0}))
    sigmas = {group.name: group.sigma for group in explicit.groups}
    assert sigmas["0"] == pytest.approx(2.0) and sigmas["1"] == pytest.approx(4.0)
    assert explicit.noise_multiplier == pytest.approx((0.15625 / 0.79) ** -0.5)  # S = 1/√2 each


def test_schedules_of_S_leave_metrics_alone():
    plan = own_plan(nn.Linear(3, 2), schedules={"S": {"step": {0: 1.0, 2: 0.5}}})
    groups = {group.name: group for group in plan.at_round(3).groups}
    assert groups["all"].S == 0.5 and groups["loss"].S == 0.6 and groups["loss"].sigma == plan.groups[1].sigma
    assert sum(plan.ledger().rounds.values()) == 4
