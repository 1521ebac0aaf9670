"""Which configuration is best, and which others chance may have put below it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Best:
    """The configuration with the highest mean accuracy.

    Attributes:
        row: of the frame of configurations; others: how many it was the highest of, less one.
        margin: half the width of the mean's 95 % interval; NaN where no runs tell what chance does.
        tied: labels of the others whose difference from it could be chance.
    """

    row: dict[str, Any]
    others: int
    margin: float
    tied: list[str]

    @property
    def label(self) -> str:
        return self.row["label"] or "the only configuration"

    def __str__(self) -> str:
        return f"{self.label} ({self.certainty})"

    @property
    def certainty(self) -> str:
        """How sure it is, in words: of how many runs a mean, and how it stands among the others."""
        runs = "1 run" if self.row["runs"] == 1 else f"mean of {self.row['runs']} runs"
        chance = "chance unknown" if math.isnan(self.margin) else f"95 % interval ± {self.margin:.2%}"
        return "; ".join(filter(None, (f"{runs}, {chance}", self._standing)))

    @property
    def _standing(self) -> str:
        if not self.others:
            return ""
        every = "the only other" if self.others == 1 else f"all {self.others} others"
        if not self.tied:
            return f"above {every} by more than chance"
        if len(self.tied) < self.others:
            return f"not told apart from {len(self.tied)} of {self.others} others"
        return f"not told apart from {every.replace('all', 'any of')}"


def best(points: "DataFrame") -> Best:
    """Of configurations (see there), at least one, the best by its mean over seeds.

    Its interval is Student's, with one variance for all that are compared, pooled over their seeds. Others are tied
    with it unless their means lie further apart than chance explains at 95 %, all pairs considered, since the best
    was chosen among all: Tukey 1949 and Kramer 1956. Where no configuration has several runs that differ, nothing is
    told apart.
    """
    ranked = points.sort_values("accuracy", ascending=False, kind="stable").to_dict("records")
    top, rest = ranked[0], ranked[1:]
    repeated = [row for row in ranked if row["runs"] > 1]
    freedom = sum(row["runs"] - 1 for row in repeated)
    variance = sum((row["runs"] - 1) * row["spread"] ** 2 for row in repeated) / max(freedom, 1)
    if not variance > 0:
        return Best(top, len(rest), math.nan, [row["label"] for row in rest])
    from scipy.stats import studentized_range, t

    margin = t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance / top["runs"])
    range_ = studentized_range.ppf(CONFIDENCE, len(ranked), freedom) if rest else math.inf
    tied = [
        row["label"]
        for row in rest
        if top["accuracy"] - row["accuracy"] <= range_ * math.sqrt(variance * (1 / top["runs"] + 1 / row["runs"]) / 2)
    ]
    return Best(top, len(rest), float(margin), tied)


def best_by_data(trials: "DataFrame") -> dict[str, Best]:
    """The best configuration on each data set."""
    from dpexp.showing.configurations import configurations

    return {data: best(configurations(runs)[0]) for data, runs in trials.groupby("data", sort=False)}


def best_of_trials(trials: "DataFrame") -> dict[str, Any] | None:
    """What a sweep says of its best configuration, private where any is: `name`, with how sure that is, and
    `test_accuracy`, its mean. Of several data sets the name tells the bests on the others first."""
    from dpexp.showing.configurations import trained

    found = trained(trials)
    if found.empty:
        found = trials[(trials["status"] == "FINISHED") & trials["test_accuracy"].notna()]
    if found.empty:
        return None
    tops = best_by_data(found)
    names = [f"on {data}: {top}" if len(tops) > 1 else str(top) for data, top in tops.items()]
    *others, last = zip(names, (top.row["accuracy"] for top in tops.values()), strict=True)
    before = "".join(f"{name}, test accuracy {accuracy:.2%}; " for name, accuracy in others)
    return {"name": before + last[0], "test_accuracy": last[1]}
