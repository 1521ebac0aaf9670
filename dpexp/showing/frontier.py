"""What accuracy each ε buys.

A frame of trials has the columns of `dpexp.tracking.read.TRIAL`; every point is a configuration, its mean over seeds
with their standard deviation.
"""

from matplotlib.figure import Figure
from pandas import DataFrame

from dpexp.showing.best import Best, best
from dpexp.showing.configurations import ceilings, configurations, trained
from dpexp.showing.panels import NotDrawn, arrange, caption, grid, legend, look, parts, percent, scale
from dpexp.showing.settings import EPSILON, Z, held, labels



def frontier(trials: DataFrame) -> Figure:
    """Test accuracy against ε. A line joins configurations that differ in their target ε alone (or in z, where no
    target differs); panels are made of whatever else differs. Horizontal: the best non-private twin of the same data
    and model.

    Raises:
        NotDrawn: nothing is private and trained, all have one ε, or there is more than can be told apart.
    """
    runs = trained(trials)
    if runs["level"].nunique() < 2:
        raise NotDrawn("There are not two values of ε to draw accuracy against.")
    points, by = configurations(runs)
    along = next((key for key in (EPSILON, Z) if key in by), None)
    panels, lines = arrange(points, [key for key in by if key != along])
    points = points.assign(line=labels(points, lines))
    tops, styles = ceilings(trials), look(points["line"])
    count = len(points[panels].drop_duplicates()) if panels else 1
    figure, grid_ = grid(count)
    for axes, (title, panel) in zip(grid_, parts(points, panels), strict=True):
        for name, line in panel.sort_values("epsilon").groupby("line", sort=False):
            axes.errorbar(line["epsilon"], line["accuracy"], line["spread"], label=name or None, capsize=3,
                          elinewidth=1, markersize=5, **styles[str(name)])  # fmt: skip
        if top := tops.get((panel["data"].iloc[0], panel["model"].iloc[0])):
            accuracy, spread = top.row["accuracy"], top.row["spread"]
            axes.axhline(accuracy, label=_without_privacy(top), color="black", linestyle=":")
            if spread > 0:
                axes.axhspan(accuracy - spread, accuracy + spread, color="black", alpha=0.08, lw=0)
        axes.set(xlabel="ε", ylabel="test accuracy")
        axes.label_outer()
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
    scale(grid_[0], "x", points["epsilon"], digits=2)
    percent(grid_[0], "y")
    caption(figure, held(runs))
    legend(figure)
    return figure


def _without_privacy(top: Best, of: str = "") -> str:
    among = f" (the best of {top.others + 1})" if top.others else ""
    return f"{of} without privacy{among}".strip()


def compared(trials: DataFrame) -> Figure:
    """Test accuracy of each configuration, the best on top; filled are the best and those that chance may have put
    below it. For trials of one data set and one ε.

    Raises:
        NotDrawn: there is none that is private and trained, or they differ in data or ε.
    """
    runs = trained(trials)
    if runs["data"].nunique() != 1 or runs["level"].nunique() != 1:
        raise NotDrawn("Only trials of one data set at one ε are compared by accuracy alone.")
    points, _ = configurations(runs)
    points = points.sort_values("accuracy", kind="stable")
    top = best(points)
    everything, points = len(points), points.tail(_MOST_ROWS)
    names = [f"{row['label'] or 'the only one'} ({_runs(row['runs'])})" for row in points.to_dict("records")]
    wide = max(9, 5 + 0.075 * max(map(len, names)))
    figure = Figure(figsize=(wide, 1.8 + 0.28 * max(4, len(points))), layout="constrained")
    axes = figure.add_subplot(xlabel=f"test accuracy at ε = {points['level'].iloc[-1]}")
    kinds = ["the best" if row["label"] == top.row["label"] else "tied" if row["label"] in top.tied else "lower"
             for row in points.to_dict("records")]  # fmt: skip
    for kind, (name, fill) in _KINDS.items():
        at = [y for y, found in enumerate(kinds) if found == kind]
        if at:
            rows = points.iloc[at]
            axes.errorbar(rows["accuracy"], at, xerr=rows["spread"], fmt="o", capsize=2, color="C0", label=name,
                          markerfacecolor=fill)  # fmt: skip
    models = points["model"].unique()
    for (data, model), ceiling in ceilings(trials).items():
        if data == top.row["data"] and model in models:
            label = _without_privacy(ceiling, model if len(models) > 1 else "")
            axes.axvline(
                ceiling.row["accuracy"], color="black", linestyle=(0, (1, 1 + [*models].index(model))), label=label
            )
    axes.set_yticks(range(len(points)), names, fontsize="small")
    axes.set_ylim(-0.6, max(3.4, len(points) - 0.4))
    axes.grid(alpha=0.3)
    percent(axes, "x")
    legend(figure, columns=4)
    caption(figure, held(runs), f"The {len(points)} best of {everything}." if len(points) < everything else "")
    return figure


_KINDS = {
    "the best": ("highest mean", "C0"),
    "tied": ("not told apart from it", "lightskyblue"),
    "lower": ("lower by more than chance", "white"),
}


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
