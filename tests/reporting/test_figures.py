"""What the figures draw: points, labels, titles and legends, on trials that used to mislead them."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from matplotlib.text import Text
from runs import ledger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import audit
from dpexp.accounting.ledger import concatenate
from dpexp.accounting.rounding import down, up
from dpexp.reporting.comparisons import WHY, best_of_trials
from dpexp.reporting.run_figures import audit_figure, class_counts, epsilon_over_rounds, trade_off
from dpexp.reporting.sweep_figures import ROUND, curves, figures_of
from dpexp.reporting.terminal import print_audit
from tests.trials import TWIN, trials, trials_by_column


def grid_of(seeds=(0,), **values):
    """A trial for each combination; its accuracy follows from what it is."""
    rows = []
    for places in itertools.product(*(range(len(each)) for each in values.values())):
        given = {name: values[name][place] for name, place in zip(values, places, strict=True)}
        score = sum(0.02 * k * place for k, place in enumerate(places, 1))
        rows += [given | {"seed": str(seed), "test_accuracy": 0.4 + score + 0.001 * seed} for seed in seeds]
    return rows


def lines(axes):
    """Points by label, of error bars and plain lines."""
    bars = {bar.get_label(): bar.lines[0].get_data() for bar in axes.containers if hasattr(bar, "lines")}
    plain = {line.get_label(): line.get_data() for line in axes.lines if not line.get_label().startswith("_")}
    return {name: [*zip(*map(list, data), strict=True)] for name, data in (plain | bars).items()}


def spreads(axes):
    """Half the length of each error bar."""
    segments = [segment for bar in axes.containers for segment in bar.lines[2][0].get_segments()]
    return [(high - low) / 2 for (_, low), (_, high) in segments]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def ticks(figure):
    """What stands along x once drawn."""
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    found = [t.label1.get_text() for t in axes.xaxis.get_major_ticks() if low <= t.get_loc() <= high]
    return [text for text in found if text]


# Of a sweep


def test_a_line_joins_the_configurations_that_differ_in_nothing_else():
    frame = trials(*grid_of((0, 1, 2), **{"privacy.epsilon": [1, 2, 4], "optimizer.lr": [0.1, 0.4],
                                          "sampling.epochs": [2, 8]}))  # fmt: skip
    figure = curves(frame, "epsilon", "test_accuracy")
    (axes,) = figure.axes
    drawn = lines(axes)
    names = [f"optimizer.lr={lr} · sampling.epochs={t}" for lr in (0.1, 0.4) for t in (2, 8)]
    assert sorted(drawn) == sorted(legend(figure)) == names
    assert drawn[names[-1]] == [pytest.approx((0.999 * e, 0.501 + 0.02 * k)) for k, e in enumerate((1, 2, 4))]
    assert spreads(axes) == pytest.approx([4.302652730 * 0.001 / 3**0.5] * 12), "Student's 95 % interval of three seeds"
    assert axes.get_ylabel() == "test accuracy, mean ± 95 % interval"
    assert figure.get_suptitle() == "test accuracy by ε: digits, cnn" and ticks(figure) == ["0.999", "2", "4"]
    along = lines(curves(frame, "sampling.epochs", "test_accuracy").axes[0])
    assert sorted(along) == [f"privacy.epsilon={e} · optimizer.lr={lr}" for e in (1, 2, 4) for lr in (0.1, 0.4)]
    assert all([x for x, _ in points] == [2, 8] for points in along.values())


def test_the_best_without_privacy_is_a_horizontal_line():
    twins = TWIN | {"test_accuracy": 0.91}, TWIN | {"optimizer.lr": 7, "test_accuracy": 0.2}
    (axes,) = curves(trials({"privacy.epsilon": 1}, {"privacy.epsilon": 8}, *twins), "epsilon", "test_accuracy").axes
    assert {y for _, y in lines(axes)["cnn without privacy (the best of 2)"]} == {0.91}
    assert axes.get_ylim()[1] > 0.92, "it is within the figure"


def test_the_interval_of_a_figure_is_the_terminals_and_no_accuracy_exceeds_one():
    """It was one standard deviation, of the same runs."""
    accuracies = [0.91, 0.99, 0.92, 0.99, 0.94, 0.99]
    frame = trials_by_column({"optimizer.lr": [1, 1, 2, 2, 4, 4], "seed": [*"010101"], "test_accuracy": accuracies})
    (axes,) = curves(frame, "optimizer.lr", "test_accuracy").axes
    assert f"95 % interval ± {spreads(axes)[2]:.2%}" in str(best_of_trials(frame)[""])
    assert max(spreads(axes)) > 0.1 and axes.get_ylim()[1] == 1.02
    (axes,) = curves(frame[frame["seed"] == "0"], "optimizer.lr", "test_accuracy").axes
    assert axes.get_ylabel() == "test accuracy", "single runs have none"


def test_words_have_no_line():
    frame = trials(*grid_of(group=["conv_fc", "flat"], mechanism=["joint", "separate"]))
    figure = curves(frame, "group", "test_accuracy")
    assert ticks(figure) == ["conv_fc", "flat"] and sorted(legend(figure)) == ["mechanism=joint", "mechanism=separate"]
    assert all(bar.lines[0].get_linestyle() == "None" for bar in figure.axes[0].containers)


def test_ticks_and_legends_are_short():
    frame = trials(*grid_of(**{"optimizer.lr": [0.1, 1.64562, 25.6789], "privacy.epsilon": [1.64412, 8]}))
    figure = curves(frame, "optimizer.lr", "test_accuracy")
    assert ticks(figure) == ["0.1", "1.65", "25.7"]
    assert ticks(curves(frame, "epsilon", "test_accuracy")) == ["1.65", "8"]
    assert sorted(legend(figure)) == ["privacy.epsilon=1.65", "privacy.epsilon=8"]
    near = trials(*grid_of(**{"optimizer.lr": [1, 2, 3], "privacy.epsilon": [1.64412, 1.64562]}))
    found = legend(curves(near, "optimizer.lr", "test_accuracy"))
    assert sorted(found) == ["privacy.epsilon=1.64412", "privacy.epsilon=1.64562"]
    many = trials_by_column({"optimizer.lr": np.geomspace(0.01, 10, 30)})
    assert " ".join(ticks(curves(many, "optimizer.lr", "test_accuracy"))) == "0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10"


def test_every_value_that_is_drawn_was_needed_by_a_run():
    """Of a parameter with two values, needed.png used to show the mean."""
    steps, knobs = [20, 100, 20, 100], [2.9, 5.8, 1.1, 1.9]
    frame = trials_by_column({"privacy.epsilon": [1, 1, 4, 4], "sampling.steps": steps, "knob_value": knobs})
    figure = curves(frame, "privacy.epsilon", "knob_value")
    (axes,) = figure.axes
    needed = {"sampling.steps=20": [(1, 2.9), (4, 1.1)], "sampling.steps=100": [(1, 5.8), (4, 1.9)]}
    assert lines(axes) == needed and legend(figure) == [*needed] and ticks(figure) == ["1", "4"]
    assert axes.get_ylabel() == "noise_multiplier needed" and not axes.get_title()


def test_the_q_of_each_epsilon_is_drawn_and_why_it_falls():
    """A sweep that only plans, as needed_q, has one figure: of q, not of accuracy."""
    epsilons, qs = [1, 2, 8], [0.06, 0.045, 0.027]
    planned = {"privacy.epsilon": epsilons, "epsilon_planned": epsilons, "knob_value": qs}
    frame = trials_by_column(planned, knob="sampling_rate", epsilon=math.nan, test_accuracy=math.nan)
    drawn, omitted = figures_of(frame, NONE)
    assert {*drawn} == {"knob_by_privacy.epsilon.png"} and not omitted
    (axes,) = drawn["knob_by_privacy.epsilon.png"].axes
    assert [*lines(axes).values()] == [
        [*zip(epsilons, qs, strict=True)]
    ] and axes.get_ylabel() == "sampling_rate needed"
    assert axes.get_title() == WHY["sampling_rate"]


EVALUATED = trials(*({"optimizer.lr": lr, "seed": seed, "round": k, "epsilon": 0.5 * k, "test_accuracy": lr * k / 10,
                      "test_loss": 3.0 - lr * k / 10}
                     for lr in (1, 2) for seed in "01" for k in (1, 2, 3)))  # fmt: skip
EVALUATED["configuration"] = [
    json.dumps(json.loads(text) | {ROUND: k}) for text, k in zip(EVALUATED["configuration"], [1, 2, 3] * 4, strict=True)
]
ACCURACIES = [[(k, lr * k / 10) for k in (1, 2, 3)] for lr in (1, 2)]  # by round


def test_accuracy_during_training_is_drawn_by_epsilon():
    figure = curves(EVALUATED, "epsilon", "test_accuracy")
    assert lines(figure.axes[0]) == {
        f"optimizer.lr={lr}": [(0.5 * k, accuracy) for k, accuracy in points] for lr, points in enumerate(ACCURACIES, 1)
    }
    assert figure.get_suptitle() == "test accuracy by the ε spent during training: digits, cnn"
    ended = trials(*grid_of((0, 1), **{"optimizer.lr": [1, 2]}))
    for during, panels in ((EVALUATED, 2), (EVALUATED.assign(test_loss=math.nan), 1)):  # of accuracy, and of loss
        drawn, _ = figures_of(ended, during)
        assert "progress.png" in drawn and len(drawn["rounds.png"].axes) == panels


def test_accuracy_and_loss_are_drawn_by_the_round_with_the_final_epsilon():
    figure = curves(EVALUATED, ROUND, "test_accuracy", "test_loss")
    accuracy, loss = map(lines, figure.axes)
    assert [*accuracy] == [*loss] == legend(figure) == [f"optimizer.lr={lr} · ε = 1.5" for lr in (1, 2)]
    assert [*accuracy.values()] == ACCURACIES
    assert [*loss.values()] == [[(k, 3.0 - y) for k, y in points] for points in ACCURACIES]
    assert figure.get_suptitle() == "test accuracy and test loss by round: digits, cnn"
    assert legend(curves(EVALUATED.head(3), ROUND, "test_loss")) == ["ε = 1.5"]


NONE = EVALUATED.head(0)
MANY = grid_of(**{"privacy.epsilon": [1, 8], "optimizer.lr": [*range(1, 5)], "sampling.epochs": [*range(1, 6)]})


@pytest.mark.parametrize(
    "rows, names",
    [
        (grid_of(**{"privacy.epsilon": [1, 8]}), {"test_accuracy_by_epsilon", "knob_by_privacy.epsilon"}),
        (grid_of(**{"optimizer.lr": [1, 2, 3]}), {"test_accuracy_by_optimizer.lr"}),
        (grid_of(group=["flat", "conv_fc"]), {"test_accuracy_by_group"}),
        (grid_of((0, 1)), set()),
        ([{"sampling.steps": t, "scheduler.T_max": 10 * t} for t in (3, 5, 9)], {"test_accuracy_by_sampling.steps"}),
        ([{"sampling.steps": t, "epsilon": math.nan, "epsilon_planned": t, "test_accuracy": math.nan}
          for t in (1, 2, 3)], {"epsilon_by_sampling.steps"}),
    ],
)  # fmt: skip
def test_a_sweep_has_a_figure_for_what_it_varies(rows, names):
    drawn, omitted = figures_of(trials(*rows), NONE)
    assert {*drawn} == {f"{name}.png" for name in names} and not omitted


def test_too_many_lines_are_compared_in_mlflow():
    drawn, omitted = figures_of(trials(*MANY), NONE)
    assert {*drawn} == {"test_accuracy_by_sampling.epochs.png", "test_accuracy_by_optimizer.lr.png"}
    assert omitted[0].endswith("is not drawn: optimizer.lr, sampling.epochs make 20 lines; compare in MLflow.")


# Of one run


def test_figures_of_a_run_show_what_was_computed():
    """And do not say that rounds have an order, where a ledger does not keep it."""
    run = ledger(2.0, 0.05, 30)
    left, right = trade_off(run, 1e-5, ["pld", "rdp"]).axes
    assert [line.get_label() for line in left.lines[:2]] == ["pld", "rdp"]
    (x, *_), (y, *_) = left.lines[0].get_data()
    assert y == epsilon(run, x, "pld") and right.lines[0].get_data()[1][0] == pytest.approx(1, abs=1e-5)
    mixed = concatenate([run, ledger(3.0, 0.05, 40)])
    for of, label in ((run, "round"), (mixed, "round, equal rounds together")):
        (axes,) = epsilon_over_rounds(of, 1e-5, ["pld", "basic"]).axes
        assert axes.get_xlabel() == label and axes.get_yscale() == "log"
        ends = {line.get_label(): line.get_data()[1][-1] for line in axes.lines}
        assert [*ends] == ["pld", "basic"] and ends["basic"] == epsilon(of, 1e-5, "basic")


# Claims and titles


def texts(figure):
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def understated(figure, value):
    """The numbers of a figure that are meant to be `value`, and are less."""
    numbers = [float(found) for text in texts(figure) for found in re.findall(r"\d+\.\d+", text)]
    return [found for found in numbers if 0.99 * value < found < value]


def audited():
    included = np.arange(200) % 2 == 0
    scores = np.where(included, 1.0, 0.0) + np.linspace(-2, 2, 200)
    return audit(scores, included, ledger(2.0, 1.0, 4), (1e-5, 1e-2), 1e-4, [])


RUN = ledger(2.0, 0.05, 30)
AT = 2.99849
ONE = trials_by_column({"optimizer.lr": [1, 2, 4]}, epsilon=AT, **{"privacy.epsilon": 3})
SOME = trials_by_column({"sampling.steps": [1, 2, 4], "epsilon": [1.23456, 2.0, AT]})
FIGURES = {
    "lr": (lambda: curves(ONE, "optimizer.lr", "epsilon"), AT),
    "spent": (lambda: curves(SOME, "epsilon", "test_accuracy"), AT),
    "target": (lambda: curves(trials(*grid_of(**{"privacy.epsilon": [1, AT]})), "privacy.epsilon", "knob_value"), AT),
    "progress": (lambda: curves(EVALUATED, "epsilon", "test_accuracy"), 1.5),
    "epsilon": (lambda: epsilon_over_rounds(RUN, 1e-5, ["pld"]), epsilon(RUN, 1e-5)),
    "trade_off": (lambda: trade_off(RUN, 1e-5, ["pld"]), epsilon(RUN, 1e-5)),
    "audit": (lambda: audit_figure(audited(), ledger(2.0, 1.0, 4), "ε = 3"), audited().bounds[0].claimed),
    "counts": (lambda: class_counts([3.0, 4.0], 0.0, "counts"), 1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_title_and_understates_no_epsilon(name):
    draw, claim = FIGURES[name]
    figure = draw()
    assert figure.get_suptitle() or all(axes.get_title() for axes in figure.axes)
    assert not understated(figure, claim)


def test_an_audit_tells_the_jobs_claim_first_and_its_lower_bound_is_one(printed):
    """It used to print 7.153 of the attacked rounds and 2.999 of the job as two claims."""
    print_audit(audited(), 2.99849, 1e-5)
    shown = printed()
    attacked = up(audited().bounds[0].claimed, 4)
    assert shown.startswith("The job claims ε = 2.999 at δ = 1e-05. Its noise is attacked in rounds of all records, ")
    assert f"for which ε = {attacked} would be claimed: sampling, which is tested by itself" in shown
    found = audited()
    drawn = "".join(texts(audit_figure(found, ledger(2.0, 1.0, 4), "ε = 2.999 at δ = 0.0001")))
    assert "Audit of the job's claim of ε = 2.999 at δ = 0.0001: not refuted" in drawn
    assert f"μ claimed {up(found.mu_claimed, 3)}, at least {down(found.mu_bound, 3)}" in drawn
