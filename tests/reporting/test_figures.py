"""What the figures draw: points, labels, titles and legends, on trials that used to mislead them."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.text import Text
from test_accountants import ledger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import audit
from dpexp.accounting.ledger import concatenate
from dpexp.accounting.rounding import down, up
from dpexp.reporting.audit_figures import audit_figure
from dpexp.reporting.run_figures import class_counts, epsilon_over_rounds, trade_off
from dpexp.reporting.sweep_figures import NotDrawn, against, compared, frontier, needed, progress, scale, swept_numbers
from dpexp.reporting.terminal import print_audit
from tests.trials import TWIN, trials


def grid_of(seeds=(0,), **values):
    """A trial for each combination; its accuracy follows from what it is."""
    names = list(values)
    rows = []
    for row in itertools.product(*values.values()):
        given = dict(zip(names, row, strict=True))
        score = sum((k + 1) * 0.02 * values[name].index(value) for k, (name, value) in enumerate(given.items()))
        rows += [given | {"seed": str(seed), "test_accuracy": 0.4 + score + 0.001 * seed} for seed in seeds]
    return rows


def lines(axes):
    """Points by label, of error bars and plain lines."""
    bars = {bar.get_label(): bar.lines[0].get_data() for bar in axes.containers if hasattr(bar, "lines")}
    plain = {line.get_label(): line.get_data() for line in axes.lines if not line.get_label().startswith("_")}
    return {name: [*zip(*map(list, data), strict=True)] for name, data in (plain | bars).items()}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def notes(figure):
    return figure.legends[0].get_title().get_text()


def ticks(figure, which="x"):
    """What stands along the first axis once drawn."""
    figure.draw_without_rendering()
    axis = getattr(figure.axes[0], f"{which}axis")
    low, high = sorted(getattr(figure.axes[0], f"get_{which}lim")())
    shown = [t.label1.get_text() for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_text()]
    return shown, axis.get_offset_text().get_text()


# The frontier


def test_a_line_of_the_frontier_joins_runs_that_differ_in_epsilon_alone():
    """It used to join the best at each ε, whatever their lengths and rates."""
    frame = trials(*grid_of((0, 1, 2), **{"privacy.epsilon": [1, 2, 4], "optimizer.lr": [0.1, 0.4],
                                          "sampling.epochs": [2, 8]}))  # fmt: skip
    figure = frontier(frame)
    (axes,) = figure.axes
    drawn = lines(axes)
    assert sorted(drawn) == sorted(f"lr={lr} · epochs={t}" for lr in (0.1, 0.4) for t in (2, 8))
    for name, points in drawn.items():
        lr, epochs = (float(word.split("=")[1]) for word in name.split(" · "))
        of = frame[frame["configuration"].map(
            lambda text: json.loads(text)["optimizer.lr"] == str(lr)  # noqa: B023
            and float(json.loads(text)["sampling.epochs"]) == epochs  # noqa: B023
        )]  # fmt: skip
        means = of.groupby("epsilon")["test_accuracy"].mean()
        assert points == [pytest.approx(pair) for pair in means.items()]
    spreads = {round(segment[1][1] - segment[0][1], 9) for bar in axes.containers for segment in
               bar.lines[2][0].get_segments()}  # fmt: skip
    assert spreads == {0.002}, "standard deviation over the seeds, up and down"
    assert sorted(legend(figure)) == sorted(drawn) and "Fixed: data=digits" in notes(figure)
    assert figure.get_suptitle() == "Test accuracy by ε"
    assert ticks(figure) == (["0.999", "2", "4"], "")


def test_values_that_are_nearly_the_same_are_one_tick():
    figure = pyplot.Figure()
    axes = figure.add_subplot()
    axes.plot([2.9976, 2.9976 + 2e-11], [1.13, 1.14])
    scale(axes, "x", [2.9976, 2.9976 + 2e-11], claim=True)
    scale(axes, "y", [1.13, 1.14])
    assert ticks(figure) == (["3"], "") and ticks(figure, "y") == (["1.13", "1.14"], "")
    low, high = axes.get_xlim()
    assert low < 2.7 and high > 3.2


def test_panels_are_made_of_what_else_differs():
    frame = trials(*grid_of(**{"privacy.epsilon": [1, 8], "group": ["flat", "conv_fc"],
                               "mechanism": ["separate", "joint"], "optimizer.lr": [1, 2, 4]}), TWIN)  # fmt: skip
    figure = frontier(frame)
    assert sorted(axes.get_title() for axes in figure.axes) == ["group=conv_fc", "group=flat"]
    assert all(len(lines(axes)) == 7 for axes in figure.axes)  # six, and the twin
    assert len(legend(figure)) == 7 and "without privacy" in legend(figure)


def test_data_sets_have_panels_and_ceilings_of_their_own():
    rows = [{"data": d, "privacy.epsilon": e, "data.n": n} for d, n in (("a", 1), ("b", 2)) for e in (1, 8)]
    twins = [TWIN | {"data": d, "data.n": n, "test_accuracy": 0.9 + n / 100} for d, n in (("a", 1), ("b", 2))]
    worse = TWIN | {"data": "a", "data.n": 1, "optimizer.lr": 7, "test_accuracy": 0.2}
    figure = frontier(trials(*rows, *twins, worse))
    ceilings = {axes.get_title(): [(line.get_label(), line.get_ydata()[0]) for line in axes.lines
                                   if "without" in line.get_label()] for axes in figure.axes}  # fmt: skip
    assert ceilings == {"data=a": [("without privacy (the best of 2)", 0.91)], "data=b": [("without privacy", 0.92)]}


# At one ε


def test_configurations_at_one_epsilon_have_labels_of_their_own():
    """Nine used to be called flat · separate · proportional."""
    frame = trials(*grid_of((0, 1), **{"privacy.epsilon": [3], "optimizer.lr": [0.1, 0.2, 0.4],
                                       "sampling.epochs": [2, 5, 10]}))  # fmt: skip
    figure = compared(frame)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(names)) == 9 and names[-1] == "lr=0.4 · epochs=10 (2 runs)"
    assert figure.get_suptitle() == "Test accuracy at ε = 3" and "target ε=3" in notes(figure)
    drawn = sorted(x for points in lines(axes).values() for x, _ in points)
    assert drawn == pytest.approx(sorted(frame.groupby("configuration")["test_accuracy"].mean()))


def test_equal_configurations_are_shown_as_tied():
    """The best used to be the luckiest of three that are the same."""
    scores = {
        "proportional": [0.84, 0.85, 0.86],
        "dimension_adjusted": [0.80, 0.82, 0.92],
        "explicit": [0.2, 0.21, 0.2],
    }
    frame = trials(*({"allocation": a, "test_accuracy": s, "privacy.epsilon": 3} for a, found in scores.items()
                     for s in found))  # fmt: skip
    figure = compared(frame)
    drawn = lines(figure.axes[0])
    assert {name: len(points) for name, points in drawn.items()} == {
        "highest mean": 1, "not significantly lower": 1, "significantly lower": 1,
    }  # fmt: skip
    assert drawn["highest mean"][0][0] == pytest.approx(0.85) and set(legend(figure)) == set(drawn)


# What was swept


def test_against_a_parameter_nothing_is_averaged_but_seeds():
    """ε and accuracy used to be means over the other parameters, and their spread that over learning rates."""
    frame = trials(*grid_of((0, 1), **{"sampling.epochs": [2, 4, 8], "optimizer.lr": [0.1, 0.4],
                                       "privacy.epsilon": [1, 3]}))  # fmt: skip
    assert swept_numbers(frame) == ["sampling.epochs"]
    figure = against(frame, "sampling.epochs")
    left, right = figure.axes
    assert {round(y, 6) for points in lines(left).values() for _, y in points} == {0.999, 2.997}
    drawn = lines(right)
    assert sorted(drawn) == sorted(f"target ε={e} · lr={lr}" for e in (1, 3) for lr in (0.1, 0.4))
    means = frame.groupby("configuration")["test_accuracy"].mean()
    assert sorted(y for points in drawn.values() for _, y in points) == pytest.approx(sorted(means))
    assert all([x for x, _ in points] == [2, 4, 8] for points in drawn.values())
    spreads = [s[1][1] - s[0][1] for bar in right.containers for s in bar.lines[2][0].get_segments()]
    assert spreads == pytest.approx([2 * 0.001 / math.sqrt(2)] * 12)
    assert sorted(legend(figure)) == sorted(drawn) and ticks(figure) == (["2", "4", "8"], "")


@pytest.mark.parametrize("other", ["scheduler.T_max", "a.first"])
def test_parameters_that_go_together_have_one_figure(other):
    """steps.png and rounds.png used to be the same."""
    frame = trials(*({"sampling.steps": t, other: 10 * t, "optimizer.lr": lr} for t in (3, 5, 9) for lr in (1, 2, 3)))
    assert swept_numbers(frame) == ["optimizer.lr", min("sampling.steps", other)][:: 1 if other > "o" else -1]


def test_ticks_and_legends_are_short():
    frame = trials(*grid_of(**{"optimizer.lr": [0.1, 1.64562, 25.6789], "privacy.epsilon": [1.64412, 8]}))
    figure = against(frame, "optimizer.lr")
    assert ticks(figure) == (["0.1", "1.65", "25.7"], "")
    assert ticks(frontier(frame)) == (["1.65", "8"], "")
    assert sorted(legend(figure)) == ["target ε=1.65", "target ε=8"]
    near = trials(*grid_of(**{"optimizer.lr": [1, 2, 3], "privacy.epsilon": [1.64412, 1.64562]}))
    assert sorted(legend(against(near, "optimizer.lr"))) == ["target ε=1.64412", "target ε=1.64562"]
    sizes = trials(*grid_of(**{"data.n": [1437, 14370, 60001]}))
    assert ticks(against(sizes, "data.n")) == (["1437", "14370", "60001"], "")


def test_what_moves_along_with_the_parameter_is_told():
    frame = trials(*({"optimizer.lr": lr, "sampling.expected_batch_size": 10 * lr} for lr in (1, 2, 4)))
    for key, other in (("optimizer.lr", "expected_batch_size"), ("sampling.expected_batch_size", "lr")):
        figure = against(frame, key)
        assert f"following: {other}." in notes(figure).replace("\n", " ")
        assert [axes.get_xlabel() for axes in figure.axes] == [key, key]
    with pytest.raises(NotDrawn, match="into 4 panels"):
        against(trials(*grid_of(**{"optimizer.lr": [1, 2, 3], "sampling.epochs": [*range(1, 31)]})), "optimizer.lr")


def test_every_z_that_is_drawn_was_needed_by_a_run():
    """Of a parameter with two values, needed.png used to show the mean."""
    zs = {(1, 20): 2.9, (1, 100): 5.8, (4, 20): 1.1, (4, 100): 1.9}
    frame = trials(*({"privacy.epsilon": e, "sampling.steps": t, "knob_value": z, "test_accuracy": math.nan}
                     for (e, t), z in zs.items()))  # fmt: skip
    figure = needed(frame)
    assert lines(figure.axes[0]) == {"steps=20": [(1, 2.9), (4, 1.1)], "steps=100": [(1, 5.8), (4, 1.9)]}
    assert figure.axes[0].get_ylabel() == "noise_multiplier needed" and legend(figure) == ["steps=20", "steps=100"]
    assert ticks(figure) == (["1", "4"], "") and ticks(figure, "y") == (["1.1", "1.9", "2.9", "5.8"], "")


def test_what_the_knob_does_not_depend_on_is_one_line():
    frame = trials(*grid_of((0, 1), **{"privacy.epsilon": [1, 2], "optimizer.lr": [1, 2, 4]}))
    figure = needed(frame)
    assert [[*map(list, line.get_data())] for line in figure.axes[0].lines] == [[[1, 2], [5, 2.5]]]
    assert "The same for every lr." in notes(figure) and not legend(figure)


def test_progress_shows_every_training_of_a_configuration():
    histories = {"lr=1": [[(0.5, 0.1), (1, 0.2)], [(0.5, 0.3), (1, 0.4)], []], "lr=2": [[(0.5, 0.9)]]}
    figure = progress(histories, "Fixed: a", "The 2 best of 5 configurations.")
    (axes,) = figure.axes
    assert [[*zip(*line.get_data(), strict=True)] for line in axes.lines] == [
        [(0.5, 0.1), (1, 0.2)], [(0.5, 0.3), (1, 0.4)], [(0.5, 0.9)],
    ]  # fmt: skip
    colours = [line.get_color() for line in axes.lines]
    assert colours[0] == colours[1] != colours[2] and legend(figure) == ["lr=1 (2 runs)", "lr=2 (1 run)"]
    assert notes(figure) == "Fixed: a\nThe 2 best of 5 configurations."


# Of one run


def test_rounds_whose_order_a_ledger_does_not_keep_are_not_said_to_have_one():
    mixed = concatenate([ledger(2.0, 0.05, 30), ledger(3.0, 0.05, 40)])
    assert epsilon_over_rounds(mixed, 1e-5, ["pld"]).axes[0].get_xlabel() == "round, equal rounds together"
    figure = epsilon_over_rounds(ledger(2.0, 0.05, 30), 1e-5, ["pld", "gdp"])
    assert figure.axes[0].get_xlabel() == "round"
    assert "gdp (approximation, no bound)" in [line.get_label() for line in figure.axes[0].lines]


def test_an_approximation_bounds_no_error():
    run = ledger(2.0, 0.05, 30)
    assert trade_off(run, 1e-5, ["pld", "gdp"]).axes[1].get_ylabel() == "type II error, at least (by pld)"
    assert trade_off(run, 1e-5, ["gdp"]).axes[1].get_ylabel() == "type II error, about (by gdp)"


MANY = grid_of(**{"privacy.epsilon": [1, 8], "optimizer.lr": [*range(1, 10)], "sampling.epochs": [*range(1, 10)]})
OTHER_KNOB = [{"privacy.epsilon": 1.0}, {"privacy.epsilon": 2.0, "knob": "sampling_rate"}]


@pytest.mark.parametrize(
    "draw, rows, why",
    [
        (frontier, grid_of(**{"privacy.epsilon": [3], "optimizer.lr": [0.1, 0.2]}), "not two values of ε"),
        (frontier, MANY, "^81 settings of lr, epochs do not fit into 12 panels"),
        (compared, grid_of(**{"privacy.epsilon": [1, 3]}), "one data set at one privacy cost"),
        (needed, [{"privacy.epsilon": 1.0}], "two values"),
        (needed, [{"privacy.noise_multiplier": 1.0}, {"privacy.noise_multiplier": 2.0}], "two values"),
        (needed, OTHER_KNOB, "Different parameters.*noise_multiplier, sampling_rate"),
    ],
)
def test_a_figure_that_would_mislead_is_not_drawn(draw, rows, why):
    with pytest.raises(NotDrawn, match=why):
        draw(trials(*rows))


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
ONE = trials(*({"optimizer.lr": lr, "privacy.epsilon": 3, "epsilon": AT} for lr in (1, 2, 4)))
SOME = trials(*({"sampling.steps": t, "epsilon": e} for t, e in ((1, 1.23456), (2, 2.0), (4, AT))))
FIGURES = {
    "frontier": (lambda: frontier(SOME), AT),
    "compared": (lambda: compared(ONE), AT),
    "against": (lambda: against(SOME, "sampling.steps"), AT),
    "needed": (lambda: needed(trials(*grid_of(**{"privacy.epsilon": [1, 2]}))), 1),
    "progress": (lambda: progress({"lr=1": [[(0.5, 0.1), (AT, 0.2)]]}), AT),
    "epsilon": (lambda: epsilon_over_rounds(RUN, 1e-5, ["pld"]), epsilon(RUN, 1e-5)),
    "trade_off": (lambda: trade_off(RUN, 1e-5, ["pld"]), epsilon(RUN, 1e-5)),
    "audit": (lambda: audit_figure(audited(), ledger(2.0, 1.0, 4), "ε = 3"), audited().bounds[0].claimed),
    "counts": (lambda: class_counts([3.0, 4.0], None, "counts"), 1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_title_and_understates_no_epsilon(name):
    draw, claim = FIGURES[name]
    figure = draw()
    assert figure.get_suptitle() or all(axes.get_title() for axes in figure.axes)
    assert not understated(figure, claim)


def test_an_audit_prints_the_jobs_claim_first(capsys):
    """It used to print 7.153 of the attacked rounds and 2.999 of the job as two claims."""
    found = audited()
    print_audit(found, 2.99849, 1e-5)
    printed = " ".join(capsys.readouterr().out.split())
    attacked = found.bounds[0].claimed
    assert printed.startswith("The job claims ε = 2.999 at δ = 1e-05. Its noise is attacked in rounds of all records, ")
    assert f"for which ε = {up(attacked, 4)} would be claimed: sampling, which is tested by itself" in printed


def test_a_shown_lower_bound_is_one():
    found = audited()
    drawn = "".join(texts(audit_figure(found, ledger(2.0, 1.0, 4), "ε = 2.999 at δ = 0.0001")))
    assert "Audit of the job's claim of ε = 2.999 at δ = 0.0001: not refuted" in drawn
    assert f"μ claimed {up(found.mu_claimed, 3)}, at least {down(found.mu_bound, 3)}" in drawn
