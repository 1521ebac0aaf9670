"""Weights of clipped gradients, and what is said of losses that mean something else among other records."""

import math
import re

import pytest
import torch
from jobs import result_of
from plans import plan_of
from test_isolation import CLASSES, Model, rows, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainings import released_sums

import dpexp
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.preprocessing_methods import ClassCounts
from dpexp.privacy.round import RoundEngine
from dpexp.training.classifier import Classifier

B, N, S = 6, 100, 0.5
WEIGHTS = torch.tensor([0.0, 1.0, 7.0, math.nan, -3.0, 0.25], dtype=torch.float64)
BROUGHT = [0.0, 1.0, 1.0, 0.0, 0.0, 0.25]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def records(seed=0):
    torch.manual_seed(seed)
    return 3 * torch.randn(B, 3, dtype=torch.float64), torch.randint(0, 2, (B,)), WEIGHTS.clone()


def step(model, batch):
    x, y, w = batch
    loss = F.cross_entropy(model(x[None]), y[None])
    dpexp.weigh(w)
    dpexp.release("loss", loss)
    return loss


@pytest.fixture(params=[TRACED, LOOP])
def sums_of(request, tmp_path):
    """Gives Σ_i c_i w_i g_i of each parameter, and Σ_i c_i v_i of the value, of a batch by one engine."""
    model = net()
    plan = plan_of(
        model, n=N, q=0.1, steps=1, clip_norm=FixedClipNorm(S), noise_multiplier=1e-7,
        private_metrics={"loss": {"clip_norm": 9, "budget_share": 0.01}},
    )  # fmt: skip
    engine = RoundEngine(plan, model, GaussianNoise())
    if request.param != TRACED:
        engine.step.mode = request.param
    yield lambda batch, loss_of=step: released_sums(engine, tmp_path, loss_of, batch)
    assert engine.step.mode == request.param


def by_hand(model, batch):
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    expected[".value loss"] = torch.zeros(1, dtype=torch.float64)
    for x, y, w in zip(*batch[:2], BROUGHT, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        found = dict(zip(expected, torch.autograd.grad(loss, [*model.parameters()]), strict=False))
        c = min(1, S / math.sqrt(sum(float(g.square().sum()) for g in found.values())))
        for name, g in found.items():
            expected[name] += c * w * g
        expected[".value loss"] += loss.detach()
    return expected


def test_a_weight_is_of_the_clipped_gradient_and_of_nothing_else(sums_of, recwarn):
    found = sums_of(records())
    for name, value in by_hand(net(), records()).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_a_record_more_moves_the_sum_by_at_most_S_whatever_its_weight(sums_of, recwarn):
    x, *others = records()
    batch = (1e3 * x, *others)
    whole = sums_of(batch)
    for i, w in enumerate(BROUGHT):
        rest = sums_of([torch.cat([t[:i], t[i + 1 :]]) for t in batch])
        moved = math.sqrt(sum(float((whole[n] - rest[n]).square().sum()) for n in whole if n != ".value loss"))
        assert moved <= S + 1e-5 and moved == pytest.approx(w * S, abs=1e-5)


@pytest.mark.parametrize("sums_of", [LOOP], indirect=True)
def test_a_weight_of_several_numbers_or_given_twice_is_an_error(sums_of, recwarn):
    def twice(model, batch):
        dpexp.weigh(0.5)
        return step(model, batch)

    with pytest.raises(ValueError, match="takes one number per record, once"):
        sums_of([part.repeat_interleave(11, 0) for part in records()], twice)  # enough to end


# What is said before the first round


def hot(y):
    return F.one_hot(y, CLASSES).double()


def by_hand_weighted(net, x, y):
    w = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64)[y]
    return (w * F.cross_entropy(net(x), y, reduction="none")).sum() / w.sum()


def dice(net, x, y):
    p, t = net(x).softmax(1), hot(y)
    return 1 - ((2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()


def of_pairs(net, x, y):
    z = net(x)[:, 0]
    return F.softplus(-(z[:, None] - z[None]) * (y[:, None] - y[None]).sign()).mean()


def decorrelating(net, x, y):
    z = net(x)
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()


LOSSES = {
    "weighted": (
        lambda net, x, y: F.cross_entropy(net(x), y, torch.tensor([1.0, 5.0, 9.0]).double()),
        r"is given class weights \(cross_entropy\).*set data.class_weights, or call dpexp.weigh",
    ),
    "weighted by hand": (by_hand_weighted, "no sum or mean of their losses.*set data.class_weights"),
    "dice": (dice, "no sum or mean of their losses.*Dice over its places"),
    "balanced by the batch": (
        lambda net, x, y: F.cross_entropy(net(x), y, 1 / (1 + hot(y).sum(0)), reduction="sum") / len(x),
        "is given class weights",
    ),
    "weighed as well": (
        lambda net, x, y: dpexp.weigh(0.5) or F.cross_entropy(net(x), y, torch.tensor([1.0, 5.0, 9.0]).double()),
        None,
    ),
    "plain": (lambda net, x, y: F.cross_entropy(net(x), y, label_smoothing=0.1), None),
}


def module_with(loss, validated=False):
    """`validated`: made-up records are then like the first one of the validation set."""
    parts = {"training_step": lambda self, batch, batch_idx: loss(self.net, *batch)}
    if validated:
        parts |= {"validation_step": parts["training_step"], "val_dataloader": lambda self: DataLoader(rows(3, 1), 2)}
    return type("Own", (Model,), parts)()


@pytest.mark.parametrize("name, validated", [*((name, False) for name in LOSSES), ("dice", True), ("plain", True)])
def test_a_loss_that_means_another_thing_is_told(name, validated, tmp_path, monkeypatch):
    (loss, sentence), said = LOSSES[name], []
    monkeypatch.setattr("dpexp.privacy.dry_run.warnings.warn", lambda message, *_, **__: said.append(str(message)))
    trained(tmp_path, module_with(loss, validated), rows(5))
    told = [one for one in said if re.search("loss of several records|class weights|depending on others", one)]
    assert len(told) == (sentence is not None)
    assert sentence is None or re.search(sentence, told[0])


@pytest.mark.parametrize("loss, validated", [(of_pairs, False), (decorrelating, True)])
def test_a_loss_that_compares_records_is_refused(loss, validated, tmp_path):
    with pytest.raises(ConfigError, match="the loss of a single record has no gradient, as with contrastive losses"):
        trained(tmp_path, module_with(loss, validated), rows(5))


# data.class_weights


def test_counts_are_floored_at_two_deviations_of_their_noise():
    counts = ClassCounts(4, budget_share=0.1)
    counts.fit(torch.tensor([1000.0, 50.0, 3.0, -20.0]), 1050)
    assert counts.weights().tolist() == pytest.approx([1e-3, 0.02, 1 / 3, 1.0]), "without noise, at 1"
    counts.sd = 10.0
    assert counts.weights().tolist() == pytest.approx([1e-3, 0.02, 0.05, 0.05])


def test_a_classifier_weighs_by_class_and_its_twin_has_the_weighted_mean():
    model, weights = nn.Linear(3, 2), torch.tensor([1.0, 19.0])
    one = Classifier(model, torch.optim.SGD, class_weights=weights)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    one.log_dict = lambda *_: None
    torch.testing.assert_close(one.training_step((x, y)), F.cross_entropy(model(x), y, weights))
    assert "class_weights" not in one.state_dict()


QUICK = ("data=synthetic", "model=logistic", "tracking=none", "sampling.steps=2", "checkpoint.every_n_rounds=null")


@pytest.mark.parametrize("weights", ["[1,2,3,4,5]", "counts"])
def test_a_job_takes_class_weights(weights, dpexp_job, recwarn):
    asked = ("preprocessing=[class_counts]",) if weights == "counts" else ()
    output = dpexp_job(*QUICK, *asked, f"data.class_weights={weights}")
    assert result_of(output)["rounds"] == 2
    assert not [w for w in recwarn if "weights of" in str(w.message) or "neither parameters" in str(w.message)]


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (("data.class_weights=[1,2]",), "must be a list of 5 public numbers"),
        (("data.class_weights=[1,2,3,4,-5]",), "none negative"),
        (("data.class_weights=[0,0,0,0,0]",), "not all 0"),
        (("data.class_weights=rare",), "or counts"),
        (("data.class_weights=counts",), "add preprocessing=\\[class_counts\\]"),
        (("data.class_weights=[1]", "data.classes=null", "model.classes=5", "data.module.classes=5"), "needs data"),
        (("data.class_weights=counts", "preprocessing=[class_counts]", "preprocessing.class_counts.classes=4"),
        "not 4"),
        (("data.class_weights=[1,1,1,1,9]", "privacy_unit=user", "privacy_unit.local_training={lr: 0.1, steps: 2}"),
         "with privacy_unit.local_training a user has many"),
    ],
)  # fmt: skip
def test_class_weights_that_cannot_be_honoured_are_refused(overrides, sentence, dpexp_job):
    with pytest.raises(SystemExit, match=sentence):
        dpexp_job(*QUICK, *overrides)
