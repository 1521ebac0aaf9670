"""Counts that were released with noise."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpexp.accounting.ledger import PartsEvent


def counts(numbers: Sequence[float], event: PartsEvent | None, name: str) -> Figure:
    """Bars, with a standard deviation of the noise each way, which is √2 b of Laplace noise.

    Args:
        event: how they were released; None: without noise.
    """
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="class", ylabel="records")
    scale = 0.0 if event is None else max(query.scale for query in event.queries)
    deviation = scale * (math.sqrt(2) if event is not None and event.noise == "laplace" else 1.0)
    axes.bar(range(len(numbers)), numbers, yerr=deviation or None, capsize=3, alpha=0.8)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_title(f"{name}: noise of standard deviation {deviation:.3g}", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", alpha=0.3)
    return figure
