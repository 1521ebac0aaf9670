"""Signal and noise of each group of gradients, over the rounds."""

import numpy as np
from matplotlib.figure import Figure

from dpexp.privacy.values import Signals, course

_MOST = 8


def signal_and_noise(signals: Signals) -> Figure:
    """One panel a group: the length of the average gradient as releases tell it, where they tell it from 0, with a band
    of two standard deviations, beside the length of its noise. Of many groups the first eight are drawn."""
    shown = list(signals.history)[:_MOST]
    figure = Figure(figsize=(6.5, 0.8 + 2.2 * len(shown)), layout="constrained")
    for k, name in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, k + 1, ylabel=name, yscale="log")
        found = course(signals.history[name])
        low, middle, high = (np.sqrt(np.maximum(found.signal + sign * 2 * found.sd, 0)) for sign in (-1, 0, 1))
        floor = 0.3 * min([np.sqrt(found.noise).min(), *high[high > 0]])  # a logarithmic axis has no 0
        axes.plot(found.rounds, np.sqrt(found.noise), color="C7", label="noise")
        seen = low > 0
        axes.plot(found.rounds, np.where(seen, middle, np.nan), "o-", color="C0", markersize=3, label="signal")
        axes.fill_between(found.rounds, np.maximum(low, floor), high, color="C0", alpha=0.2, label="± 2 sd")
        axes.set_ylim(bottom=floor)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small", ncols=3)
    figure.axes[0].set_title("Length of a round's average gradient, in the mechanism's units", fontsize="medium")
    figure.axes[-1].set_xlabel("round")
    return figure
