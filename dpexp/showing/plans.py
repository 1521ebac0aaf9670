"""What plans do to each group of vectors: noise beside signal, and shares of the budget.

Plans are given by run id, a list of groups each; and `settings`, a row of texts a run id, is what tells the runs apart.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame

from dpexp.privacy.bands import deviation
from dpexp.showing.panels import caption
from dpexp.showing.settings import shared

_MOST_ROWS = 60
_LETTERS = 65  # that fit into a whole bar
_ALIKE = 1.1  # plans whose numbers differ by less are drawn as one


def groups_of(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A plan's groups, from plan.json: group, share, and per coordinate of the released average: record = αS/(qn√d),
    what one record can add at most; noise = ασ̃/(qn), or more if it is correlated; and average = αS/√d, what a sample of
    expected size comes to at most. α is the largest scale of the group's vectors, for the noise the root mean square
    over its coordinates."""
    expected = plan["sampling"]["q"] * plan["n"]
    found = []
    for group in plan["groups"]:
        dims, alphas = [vector["d"] for vector in group["vectors"]], group["alphas"]
        average = max(alphas) * group["S"] / math.sqrt(sum(dims))
        scale = math.sqrt(sum(d * alpha**2 for d, alpha in zip(dims, alphas, strict=True)) / sum(dims))
        noise = scale * deviation(group["sigma"], group.get("bands", (1.0,)))  # which older plans have not
        numbers = {"record": average / expected, "noise": noise / expected, "average": average}
        found.append({"group": group["name"], "share": group["share"]} | numbers)
    return found


def noise_and_signal(plans: Mapping[str, Sequence[dict]], settings: DataFrame, told: str = "") -> Figure:
    """For each group of each plan, per coordinate of the released average: what one record can add at most, the
    noise, and what a whole sample comes to at most. Plans whose numbers lie within 10 % of one another are one block.

    Args:
        told: what the caption says is fixed.
    """
    blocks: list[tuple[list[str], Sequence[dict]]] = []
    for run_id, groups in plans.items():
        found = next((members for members, other in blocks if _alike(groups, other)), None)
        if found is None:
            blocks.append(([run_id], groups))
        else:
            found.append(run_id)
    rows: list[dict | str] = []
    drawn = 0
    for members, groups in blocks:
        if not rows or len(rows) + 1 + len(groups) <= _MOST_ROWS:
            rows += [shared(settings.loc[members], settings.loc[[*plans]]), *groups]
            drawn += 1
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="per coordinate of the released average")
    at = [(y, row) for y, row in enumerate(rows) if isinstance(row, dict)]
    y = [place for place, _ in at]
    record, noise, average = ([row[key] for _, row in at] for key in ("record", "noise", "average"))
    axes.hlines(y, record, average, color="lightgrey", linewidth=3, zorder=1)
    axes.scatter(record, y, color="C0", marker="o", label="one record, at most: αS/(qn√d)")
    axes.scatter(noise, y, color="C3", marker="|", s=90, linewidths=2.5, label="noise: ασ̃/(qn)")
    axes.scatter(average, y, facecolors="white", edgecolors="C0", label="a whole sample, at most: αS/√d")
    axes.set_yticks(y, [row["group"] for _, row in at], fontsize="small")
    for place, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(0.01, place, row, transform=axes.get_yaxis_transform(), va="center", fontsize="small",
                      fontweight="bold")  # fmt: skip
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    caption(figure, told, f"{drawn} of {len(blocks)} plans that differ." if drawn < len(blocks) else "")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _alike(plan: Sequence[dict], other: Sequence[dict]) -> bool:
    return [group["group"] for group in plan] == [group["group"] for group in other] and all(
        math.isclose(one[key], two[key], rel_tol=1 - 1 / _ALIKE)
        for one, two in zip(plan, other, strict=True)
        for key in ("record", "noise", "average")
    )


def budget_shares(plans: Mapping[str, Sequence[dict]], settings: DataFrame, told: str = "") -> Figure:
    """How a budget is shared out among groups: w_g, stacked to 1, one bar for all plans with the same shares.

    Args:
        told: what the caption says is fixed.
    """
    bars: dict[tuple, list[str]] = {}
    for run_id, plan in plans.items():
        bars.setdefault(tuple((group["group"], round(group["share"], 3)) for group in plan), []).append(run_id)
    bars = dict(sorted(bars.items()))
    groups = list(dict.fromkeys(group for shares in bars for group, _ in shares))
    figure = Figure(figsize=(10, 1.3 + 0.5 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlabel="share w of the budget", xlim=(0, 1))
    colors = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    named = set()
    for y, shares in enumerate(bars):
        left = 0.0
        for group, share in shares:
            axes.barh(y, share, 0.7, left=left, color=colors(groups.index(group) % colors.N), alpha=0.75,
                      edgecolor="white", label=None if group in named else group)  # fmt: skip
            named.add(group)
            text = (
                f"{group} {share:.0%}" if len(group) + 5 < _LETTERS * share else f"{share:.0%}" if share > 0.04 else ""
            )
            axes.text(left + share / 2, y, text, ha="center", va="center", fontsize="small")
            left += share
    if any(len(group) + 5 >= _LETTERS * share for shares in bars for group, share in shares):
        figure.set_figheight(figure.get_figheight() + 0.4 + 0.22 * -(-len(groups) // 5))
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    everywhere = settings.loc[[*plans]]
    names = [textwrap.fill(shared(settings.loc[members], everywhere), 42) for members in bars.values()]
    axes.set_yticks(range(len(bars)), names, fontsize="small")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    caption(figure, told)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
