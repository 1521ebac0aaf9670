"""Values that were released privately, over the rounds."""

from matplotlib.figure import Figure

from dpexp.privacy.values import Estimates



def values_over_rounds(estimates: Estimates) -> Figure:
    """One panel a value: each release, and smoothed with a band of two standard deviations of its noise. Of many values
    the first eight are drawn."""
    shown = list(estimates.history)[:_MOST]
    figure = Figure(figsize=(6, 0.6 + 2.4 * len(shown)), layout="constrained")
    for k, name in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, k + 1, ylabel=name)
        rounds, values, _ = zip(*estimates.history[name], strict=True)
        axes.plot(rounds, values, ".", color="C0", alpha=0.35, markersize=3)
        means, sds = zip(*(estimates.smoothed(name, m + 1) for m in range(len(rounds))), strict=True)
        axes.plot(rounds, means, color="C0", label="mean of the last fifth")
        low, high = ([m + sign * 2 * sd for m, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color="C0", alpha=0.2, label="± 2 sd of its noise")
        axes.grid(alpha=0.3)
        settled = slice(len(means) // 10, None)  # the first releases alone are too noisy to set the scale
        axes.set_ylim(min(low[settled]), max(high[settled]))
        axes.set_xlim(0, rounds[-1])
    figure.axes[0].legend(fontsize="small")
    figure.axes[-1].set_xlabel("round")
    return figure
