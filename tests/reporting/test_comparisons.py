"""Which configuration is best: one answer, with its interval and its ties."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from dpexp.reporting.comparisons import (
    best,
    best_baselines,
    best_of_trials,
    compact,
    configurations,
    described,
    finished,
    summary,
    trained,
)
from dpexp.reporting.sweep_figures import swept_numbers
from tests.trials import TWIN, trials, trials_by_column


def scored(accuracies, **same):
    """A configuration a list, told apart by its learning rate."""
    return trials(
        *({"optimizer.lr": lr, "test_accuracy": a, "seed": str(k)}
          for lr, found in enumerate(accuracies, 1) for k, a in enumerate(found)), **same,
    )  # fmt: skip


def test_configurations_are_means_over_seeds_of_what_finished():
    points, by = configurations(
        finished(
            trials(
                {"optimizer.lr": 0.1, "epsilon": 1.999, "test_accuracy": 0.8},
                {"optimizer.lr": 0.1, "epsilon": 2.001, "test_accuracy": 0.9},
                {"optimizer.lr": 10, "epsilon": 2.0, "test_accuracy": 0.7},
                {"optimizer.lr": 2, "epsilon": 8.0, "test_accuracy": 0.6},
                {"optimizer.lr": 2.0, "epsilon": 8.0, "test_accuracy": 0.4},
                {"optimizer.lr": 2, "epsilon": 1.0, "test_accuracy": 0.99, "status": "KILLED"},
                TWIN,
            )
        )
    )
    assert by == ["optimizer.lr"] and points["optimizer.lr"].tolist() == ["0.1", "2", "10"], "numbers by size"
    assert points["epsilon"].tolist() == pytest.approx([2.001, 8.0, 2.0]), "a claim is no mean"
    assert points["test_accuracy"].tolist() == pytest.approx([0.85, 0.5, 0.7])
    t = math.tan(math.pi * 0.475)  # Student's, of two runs: a Cauchy distribution's quantile
    assert points["margin"].tolist()[:2] == pytest.approx([t * 0.05, t * 0.1])
    assert points["runs"].tolist() == [2, 2, 1] and math.isnan(points["margin"][2])
    assert points["level"].tolist() == ["2", "8", "2"]


def test_no_two_configurations_have_the_same_label():
    keys = ("optimizer.lr", "sampling.epochs", "group", "privacy.epsilon")
    rows = itertools.product((0.1, 0.2), (1, 5), ("flat", "conv_fc"), (1.0, 3.0))
    frame = trials(*(dict(zip(keys, row, strict=True)) for row in rows))
    points, by = configurations(finished(frame))
    assert by == ["group", "privacy.epsilon", "optimizer.lr", "sampling.epochs"], "group._target_ follows from group"
    assert points["label"].nunique() == len(points) == 16
    assert "group=flat · privacy.epsilon=3 · optimizer.lr=0.1 · sampling.epochs=5" in set(points["label"])


RANDOM = np.random.default_rng(1)
SAMPLES = [
    [RANDOM.normal(mean, 0.02, 4).tolist() for mean in (0.9, 0.88, 0.86, 0.84, 0.82)],
    [[mean - 0.01, mean, mean + 0.01] for mean in (0.9, 0.88, 0.878, 0.876, 0.7)],  # two by two the second is apart
    [RANDOM.normal(mean, 0.02, count).tolist() for mean, count in ((0.9, 2), (0.88, 5), (0.8, 3))],
]


@pytest.mark.parametrize("samples", SAMPLES)
def test_ties_are_those_of_tukeys_test(samples):
    found = best(configurations(trained(scored(samples)))[0])
    top, count = int(np.argmax([np.mean(sample) for sample in samples])), len(samples)
    values = stats.tukey_hsd(*samples).pvalue[top]
    tied = {f"optimizer.lr={k + 1}" for k, p in enumerate(values) if k != top and p >= 0.05}
    half = stats.sem(samples[top]) * stats.t.ppf(0.975, len(samples[top]) - 1)
    assert found.row["label"] == f"optimizer.lr={top + 1}" and found.row["margin"] == pytest.approx(half)
    assert {*found.tied} == tied and 0 < len(tied) < found.others == count - 1
    assert found.certainty == (
        f"mean of {len(samples[top])} runs, 95 % interval ± {half:.2%}; "
        f"significantly above {count - 1 - len(tied)} of {count - 1} others"
    )


@pytest.mark.parametrize(
    "accuracies, said",
    [  # seed 2 of the second is the most accurate trial, though its mean is lower
        (
            [[0.83, 0.84, 0.85], [0.80, 0.81, 0.90], [0.82, 0.82, 0.83]],
            "mean of 3 runs, 95 % interval ± 2.48%; significantly above 0 of 2 others",
        ),
        ([[0.9], [0.2]], "1 run, no interval"),  # nor any comparison
        ([[0.9, 0.9], [0.2, 0.2]], "mean of 2 runs, no interval"),
        ([[0.9, 0.91], [0.2]], "mean of 2 runs, 95 % interval ± 6.35%; significantly above 0 of 1 others"),
    ],
)
def test_chance_alone_makes_no_best(accuracies, said):
    found = best_of_trials(scored(accuracies))[""]
    assert str(found) == f"optimizer.lr=1 ({said})"
    assert len(found.tied) == len(accuracies) - 1


def test_draws_of_private_selection_are_not_averaged():
    """What it covers is the best single draw."""
    from dpexp.tracking.read import _configuration

    accuracies = {(0.1, 0): 0.6, (0.4, 1): 0.9, (0.4, 2): 0.1}
    read = [_configuration({"optimizer.lr": str(lr), "seed": "0", "draw": str(k)}) for lr, k in accuracies]
    frame = trials(*({"test_accuracy": a} for a in accuracies.values())).assign(configuration=read)
    found = best_of_trials(frame)[""]
    assert str(found).startswith("optimizer.lr=0.4 · draw=1 (1 run") and found.row["test_accuracy"] == 0.9
    assert swept_numbers(frame) == []


@pytest.mark.parametrize(
    "same, costs",
    [
        ({"privacy.epsilon": [1, 1.64562, 8]}, ["ε = 1", "ε = 1.64562", "ε = 8"]),
        ({"privacy.noise_multiplier": [2, 4], "epsilon": [8.01, 3.7]}, ["ε = 8.1", "ε = 3.7"]),
        ({"sampling.epochs": [1, 4], "epsilon": [1.0, 2.5]}, ["ε = 1", "ε = 2.5"]),
        ({"data.n": [100, 1000], "epsilon": [3.4, 0.2]}, ["ε = 3.4", "ε = 0.2"]),
        ({"data": ["a", "b"], "data.n": [5, 8]}, ["a", "b"]),
        ({"privacy.delta": [1e-5, 1e-3], "delta": [1e-5, 1e-3]}, ["ε = 1, δ = 1e-05", "ε = 1, δ = 0.001"]),
        (
            {"sampling": ["poisson", "fixed_size"], "adjacency": ["add_remove", "replace_one"]},
            ["ε = 1, adjacency = add_remove", "ε = 1, adjacency = replace_one"],
        ),
    ],
)
def test_trials_that_cost_more_are_not_the_better_ones(same, costs):
    """The largest ε always won."""
    scores = {"test_accuracy": [0.5 + 0.1 * k for k in range(len(costs))]}
    said = described(best_of_trials(trials_by_column(same | scores)))
    assert said == [f"Test accuracy {50 + 10 * k}.00% at {cost} (1 run, no interval)" for k, cost in enumerate(costs)]
    twice = {key: 2 * values for key, values in (same | scores).items()}
    twice = trials_by_column(twice | {"optimizer.lr": [1] * len(costs) + [2] * len(costs)})
    assert [*best_of_trials(twice)] == costs and described(best_of_trials(twice))[0].startswith(f"Best at {costs[0]}: ")
    (one,) = described(best_of_trials(twice, apart=()))  # of private selection
    assert one.startswith("Best: ")


def test_the_best_is_private_unless_nothing_is():
    twins = [TWIN | {"test_accuracy": 0.95 + k / 100, "optimizer.lr": 1 + k // 2} for k in range(4)]
    frame = trials({"test_accuracy": 0.7, "privacy.epsilon": 1.0}, *twins)
    assert best_of_trials(frame)[""].row["test_accuracy"] == 0.7
    assert best_of_trials(trials(*twins))[""].row["test_accuracy"] == pytest.approx(0.975)
    assert best_of_trials(trials({"status": "FAILED"})) == {}
    (top,) = best_baselines(frame).values()
    assert top.row["test_accuracy"] == pytest.approx(0.975) and top.row["label"] == "optimizer.lr=2" and top.others == 1


def test_a_table_has_what_was_varied_and_the_baseline():
    """The terminal used to name the best configurations alone."""
    rows = [{"privacy.epsilon": e, "group": group, "seed": str(k), "test_accuracy": a + 0.01 * k}
            for e, group, a in ((1, "conv_fc", 0.5), (1, "flat", 0.6), (4, "conv_fc", 0.7), (4, "flat", 0.8))
            for k in range(2)]  # fmt: skip
    twins = [TWIN | {"privacy.epsilon": math.inf, "epsilon": math.nan, "knob_value": math.nan, "test_accuracy": 0.9}]
    failed = {"privacy.epsilon": 4, "group": "flat", "status": "FAILED", "error": "no disk", "test_accuracy": math.nan}
    frame = trials(*rows, *twins, failed)
    table = summary(frame)
    half = f"{0.005 * math.tan(math.pi * 0.475):.2%}"
    assert [*table.columns] == ["privacy.epsilon", "group", "ε", "test accuracy", "± (95 %)", "runs"]
    assert ["|".join(row) for row in table.to_numpy()] == [
        f"1|conv_fc|0.999|50.50%|{half}|2",
        f"1|flat|0.999|60.50%|{half}|2",
        f"4|conv_fc|3.996|70.50%|{half}|2",
        f"4|flat|3.996|80.50%|{half}|2",
        "inf||not private|90.00%||1",
    ]
    every = compact(frame)
    assert len(every) == len(frame) and "configuration" not in every
    assert [*every.columns[:4]] == ["privacy.epsilon", "group", "seed", "status"]
    assert every["error"].tolist() == [None] * 9 + ["no disk"] and every["test_accuracy"].count() == 9


def test_a_table_shows_what_was_measured_or_solved_and_claims_nothing_that_is_not_private():
    def shown(**columns):
        return summary(trials_by_column(columns, test_accuracy=math.nan)).to_dict("list")

    planned = shown(**{"privacy.epsilon": [1, 2], "epsilon": math.nan, "epsilon_planned": [1, 2]})
    columns = {"privacy.epsilon": ["1", "2"], "ε": ["1", "2"], "noise_multiplier": ["5", "2.5"], "runs": ["1", "1"]}
    assert planned == columns and [*planned] == [*columns]
    assert shown(**{"optimizer.lr": [1, 2]}, test_loss=[1.5, 2.0])["test loss"] == ["1.5", "2"]
    assert shown(private=["no: diagnostics"], **{"privacy.epsilon": 1})["ε"] == ["not private"]
    nothing = summary(trials({"status": "FAILED"}))
    assert nothing.to_dict("list") == {"ε": [], "test accuracy": [], "runs": []}, "which a report can read"
