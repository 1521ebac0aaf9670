"""What the test set shows of a classifier, and the defaults that follow the number of records and the plan."""

import math

import pytest
import torch
from plans import plan_of
from sklearn.metrics import balanced_accuracy_score, recall_score
from torch import nn

from dpexp import compose, plan
from dpexp.commands.build import add_optimizer
from dpexp.commands.train import defaults
from dpexp.errors import ConfigError
from dpexp.reporting.model_card import card
from dpexp.reporting.terminal import print_tested
from dpexp.reporting.wording import RECALL
from dpexp.training.classifier import Classifier, _metrics_of_all, noisy_learning_rate

SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}


def skewed(classes, share, right=0.0, count=1000):
    """Scores and labels of a test set with a `share` of the last class, of which a part is recognized."""
    y = (torch.arange(count) < share * count).long() * (classes - 1)
    given = torch.where(torch.arange(count) < right * share * count, y, torch.zeros_like(y))
    return torch.eye(classes)[given] + 1e-3 * torch.rand(count, classes, generator=torch.manual_seed(0)), y


@pytest.mark.parametrize("classes, share, right", [(2, 0.09, 0.0), (2, 0.09, 0.5), (2, 0.6, 0.2), (4, 0.3, 1.0)])
def test_recall_by_class_balanced_accuracy_and_the_majoritys_share_are_those_of_scikit_learn(classes, share, right):
    scores, y = skewed(classes, share, right)
    found = {name: float(value) for name, value in _metrics_of_all(scores, y).items()}
    assert found["test_majority_accuracy"] == pytest.approx(max(share, 1 - share))
    assert found["test_balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, scores.argmax(1)))
    present = sorted({*y.tolist()})
    recalls = recall_score(y, scores.argmax(1), labels=present, average=None)
    assert {k: found[f"{RECALL}{k}"] for k in present} == pytest.approx(dict(zip(present, recalls, strict=True)))
    assert f"{RECALL}1" not in found or classes == 2  # a class that the test set lacks


NO_BETTER = "no better than always giving the most frequent class"
RANKS = "It ranks the classes (AUC 0.79; chance is 0.5), but at the threshold 0.5 it finds {} of yes: give public"


@pytest.mark.parametrize("recalls, auc, weighted, said", [
    ((1, 0), 0.794, False, RANKS.format("none")), ((1, 0.02), 0.794, False, RANKS.format("2.0%")),
    ((1, 0.7), 0.794, True, None), ((1, 0), 0.54, False, NO_BETTER), ((1, 0.5), 0.54, True, NO_BETTER),
    ((1, 0, 0.05), 0.7, False, NO_BETTER), ((0.8, 0.5, 0.4), 0.7, False, None), ((), 0.7, False, NO_BETTER),
])  # fmt: skip
def test_two_classes_are_judged_by_how_they_are_ranked_and_more_by_balanced_accuracy(
    recalls, auc, weighted, said, capsys
):
    found = {"test_accuracy": 0.9, "test_majority_accuracy": 0.914, "test_auc": auc}
    found |= {f"{RECALL}{k}": float(recall) for k, recall in enumerate(recalls)}
    found["test_balanced_accuracy"] = sum(recalls) / max(1, len(recalls))
    print_tested(found, ["no", "yes"] if len(recalls) == 2 else None, weighted)
    printed = " ".join(capsys.readouterr().out.split())
    assert said is None or said in printed
    for words in (NO_BETTER, "It ranks"):
        assert (words in printed) == (words in str(said))


def test_recalls_of_averaged_weights_are_those_that_are_printed(capsys):
    metrics = {f"{RECALL}0": 0.5, f"{RECALL}1": 1.0, "test_accuracy": 0.75, "test_majority_accuracy": 0.5,
               "test_balanced_accuracy": 0.75}  # fmt: skip
    last = {f"{name}_unaveraged": 0.25 for name in metrics}
    print_tested(metrics | {"test_auc": 0.9} | last, ["no", "yes"])
    assert "; recall: no 50.0%, yes 100.0%\n" in capsys.readouterr().out
    text = card({}, {"private": False, "metrics": metrics | last, "class_names": ["no", "yes"]}, None, "run")
    assert "| test_recall_1 (yes) | 1 |" in text and "| test_recall_1_unaveraged | 0.25 |" in text


def test_of_many_classes_the_lowest_recalls_are_printed_and_of_a_regression_r2(capsys):
    metrics = {f"{RECALL}{k}": k / 10 for k in range(10)} | {"test_accuracy": 0.5, "test_auc": 0.9}
    print_tested(metrics | {"test_majority_accuracy": 0.1, "test_balanced_accuracy": 0.45}, None)
    assert "lowest recall: 0 0.0%, 1 10.0%, 2 20.0%, 3 30.0%, 4 40.0%\n" in capsys.readouterr().out
    print_tested({"test_r2": 0.25}, None)
    assert "Test R² 0.250; always the mean of its targets: 0" in capsys.readouterr().out


@pytest.mark.parametrize("overrides, size", [
    ("data.n=1437", 359), ("data=mnist", 512), ("data.n=300", 75), ("data.n=3", 1), ("data.n=300 sampling=shuffle", 75),
    ("data.n=1200 privacy_unit=microbatch privacy_unit.size=4", 300), ("sampling.sampling_rate=0.1", None),
    ("data=mnist privacy_unit=user data.users=100", 15_000),
])  # fmt: skip
def test_the_default_batch_is_a_quarter_of_the_units_and_at_most_512_if_no_rate_is_given(overrides, size):
    assert compose(*overrides.split()).sampling.expected_batch_size == (size if size is None else pytest.approx(size))


def test_the_default_learning_rate_is_that_of_noisy_sgd():
    model = nn.Linear(9, 10)
    small, noisy = (plan_of(model, n=1000, q=0.1, steps=25, noise_multiplier=z) for z in (1e-6, 50.0))
    assert small.gradient_norm == pytest.approx(1.0)  # S
    assert noisy.gradient_norm == pytest.approx(math.sqrt(1 + 100 * (50.0 / 100) ** 2))
    assert noisy_learning_rate(SGD, 25, small.gradient_norm) == pytest.approx(0.1 * 20 / 5)
    assert noisy_learning_rate(SGD | {"momentum": 0.0}, 100, noisy.gradient_norm) == pytest.approx(2 / math.sqrt(26))
    assert noisy_learning_rate({"_target_": "torch.optim.Adam"}, 100, 1.0) == pytest.approx(0.028)
    with pytest.raises(ConfigError, match=r"optimizer.lr=auto is for .* give torch.optim.RMSprop a number"):
        noisy_learning_rate({"_target_": "torch.optim.RMSprop"}, 1, 1.0)


@pytest.mark.parametrize("groups", ["group=flat", "group=conv_fc mechanism=joint", "group=per_layer"])
def test_grouping_changes_the_gradient_norm_by_its_noise_alone(groups):
    """S* is the same total for each grouping; at the same z, more groups have more noise."""
    made = plan(compose(*groups.split(), "privacy.noise_multiplier=1e-6"))
    assert made.gradient_norm == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("overrides, said", [
    ("privacy_unit=user", "data.users=200 synthetic users, to whom the records are assigned at random"),
    ("data=images data.path=a data.n=300 data.class_names=[a,b]", "data.shape=[3, 8, 8], for a small model"),
    ("data=images data.path=a data.n=30000 data.class_names=[a,b]", "data.shape=[3, 32, 32]"),
])  # fmt: skip
def test_what_data_have_by_default_is_said(overrides, said):
    assert any(said in one for one in defaults(compose(*overrides.split()), None, None))


def test_a_jobs_optimizer_has_the_learning_rate_of_its_plan():
    cfg = compose("sampling.epochs=400", "privacy.noise_multiplier=10")
    module = Classifier(nn.Linear(3, 2), torch.optim.SGD)
    made = plan(cfg)
    cfg.rounds = made.rounds
    learning_rate = add_optimizer(cfg, module, made)
    (group,) = module.configure_optimizers().param_groups
    assert group["lr"] == learning_rate == noisy_learning_rate(SGD, made.rounds, made.gradient_norm)
    assert cfg.optimizer.lr == "auto"
    size, rate = defaults(cfg, made, learning_rate)
    assert size == "sampling.expected_batch_size=359, of a quarter of the records, at most 512"
    assert rate.startswith(f"optimizer.lr={group['lr']:.3g}, ")
    of_users = compose("privacy_unit=user", "privacy.noise_multiplier=10", "data.users=200", "data.n=320")
    *_, said = defaults(of_users, plan(of_users), None)
    assert said.endswith("size=80 (the examples of 50 users), of a quarter of the users, at most 512")
    cfg.optimizer.lr, cfg.sampling.expected_batch_size = 0.5, 100.0
    assert add_optimizer(cfg, module, made) is None and defaults(cfg, made, None) == []
