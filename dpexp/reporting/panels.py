"""Common parts of the figures of trials: panels, line styles, legends, axes."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from pandas import DataFrame

from dpexp.reporting.comparisons import labels, short_names

LINES, PANELS = 6, 12  # at most: lines in a panel, panels in a figure
_TICKS = 8
_MARKERS = "osD^vP"


class NotDrawn(Exception):
    """A figure would mislead or be unreadable; the message says why."""


def arrange(points: DataFrame, by: Sequence[str], max_panels: int = PANELS) -> tuple[list[str], list[str]]:
    """Splits settings into those that make panels and those that make lines: as few panels as possible, of few lines.

    Data sets and models never share a panel.

    Raises:
        NotDrawn: there are too many.
    """
    separate = [key for key in by if key in ("data", "model")]
    free = [key for key in by if key not in separate]
    found = []
    for size in range(len(free) + 1 if len(free) <= _TICKS else 0):
        for chosen in itertools.combinations(free, size):
            panels, lines = [*separate, *chosen], [key for key in free if key not in chosen]
            count = len(points[panels].drop_duplicates()) if panels else 1
            fullest = max(len(part[lines].drop_duplicates()) if lines else 1 for _, part in parts(points, panels))
            if count <= max_panels and fullest <= LINES:
                found.append((count, panels, lines))
    if not found:
        names = ", ".join(short_names(by).values())
        raise NotDrawn(
            f"{len(points[[*by]].drop_duplicates())} settings of {names} do not fit into {max_panels} "
            f"panels of {LINES} lines; draw fewer trials at a time."
        )
    _, panels, lines = min(found, key=lambda option: option[0])
    return panels, lines


def parts(points: DataFrame, keys: Sequence[str]) -> Iterator[tuple[str, DataFrame]]:
    """(label, rows) for each combination of values of the keys; all rows together if there are no keys."""
    if not keys:
        yield "", points
        return
    for _, part in points.groupby([*keys], sort=False):
        yield labels(part.head(1), keys)[0], part


def grid(count: int, width: float = 4.0, height: float = 3.4, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels with shared axes."""
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (max(8.0, width * columns) if columns > 1 else 8.0, height * rows + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for spare in axes.flat[count:]:
        spare.remove()
    for column in axes.T[count % columns or columns :]:  # the last row is short
        column[rows - 2].xaxis.set_tick_params(labelbottom=True)
    return figure, list(axes.flat[:count])


def styles_of(labels_: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each line."""
    return {
        label: {"color": f"C{k % 10}", "marker": _MARKERS[k % len(_MARKERS)], "linestyle": ("-", "--")[k // 10 % 2]}
        for k, label in enumerate(dict.fromkeys(labels_))
    }


def legend(figure: Figure, columns: int = 2) -> None:
    """Adds one legend for all panels, if any line has a label."""
    found = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize="small")


def caption(figure: Figure, *texts: str) -> None:
    """Writes notes above the figure, such as the fixed settings."""
    figure.suptitle("\n".join(filter(None, texts)), fontsize="x-small", color="dimgrey")


def scale(axes: Axes, which: str, values: Iterable[float], logarithmic: bool | None = None, digits: int = 6) -> None:
    """Scales an axis: ticks at the values if they are few; nearly equal values are not magnified.

    Args:
        which: x or y.
        values: all that are drawn along the axis; non-finite ones are ignored.
        logarithmic: by default, if the values lie far apart.
        digits: significant digits of the ticks.
    """
    axis: Axis = getattr(axes, f"{which}axis")
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        lowest, highest = finite[0], finite[-1]
        if logarithmic is None:
            logarithmic = highest > 4 * lowest
        logarithmic = logarithmic and lowest > 0
        if logarithmic:
            getattr(axes, f"set_{which}scale")("log")
        size = max(abs(lowest), abs(highest))
        if highest - lowest <= 5e-3 * size:
            getattr(axes, f"set_{which}lim")(lowest - (0.1 * size or 1), highest + (0.1 * size or 1))
        ticks = sorted({float(f"{value:.{digits}g}") for value in finite})
        if len(ticks) <= _TICKS:
            axis.set_major_locator(FixedLocator(_spaced(ticks, logarithmic)))
            axis.set_minor_locator(NullLocator())
        elif logarithmic:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _spaced(ticks: list[float], logarithmic: bool) -> list[float]:
    """Drops ticks whose label would overlap the one before."""
    places = [math.log(tick) for tick in ticks] if logarithmic else ticks
    room = 0.06 * (places[-1] - places[0])
    kept: list[int] = []
    for k, place in enumerate(places):
        if not kept or place - places[kept[-1]] > room:
            kept.append(k)
    return [ticks[k] for k in kept]


def percent(axes: Axes, which: str) -> None:
    """Formats an axis in percent."""
    axis: Axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
