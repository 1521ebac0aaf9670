"""The HTML page of a report: trials, the best ones, their privacy costs, and figures."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, isna

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import NAMES
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.releases import applicable_accountants
from dpexp.reporting.comparisons import (
    best,
    best_baselines,
    best_by_data,
    common_label,
    configurations,
    finished,
    fixed_settings,
    trained,
)
from dpexp.reporting.panels import NotDrawn
from dpexp.reporting.run_figures import accountant_label, epsilon_by_accountant, epsilon_of_runs, same_cost
from dpexp.reporting.sweep_figures import budget_shares, compared, frontier, noise_and_signal
from dpexp.reporting.wording import up

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1400px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ddd; }
p, figcaption { max-width: 65em; }
table { border-collapse: collapse; font-size: 13px; line-height: 1.35; }
th, td { padding: 3px 8px; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { position: sticky; top: 0; background: #f4f4f4; }
td { white-space: nowrap; }
td:first-child { white-space: normal; min-width: 12em; }
td:last-child:not(.number) { white-space: normal; min-width: 10em; max-width: 40em; }
th.number { text-align: right; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow: auto; max-height: 26em; border: 1px solid #ddd; margin: 1em 0; }
.scroll { width: fit-content; max-width: 100%; }
figure { margin: 1em 0; } figure img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 14px; }
@media print { .scroll { max-height: none; overflow: visible; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """An HTML document without external files."""
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """An HTML heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraphs(texts: Iterable[str], style: str = "") -> list[str]:
    """HTML paragraphs of a CSS class."""
    attribute = f' class="{style}"' if style else ""
    return [f"<p{attribute}>{escape(text)}</p>" for text in texts]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> str:
    """An HTML table of texts; the columns in `numbers` are right-aligned."""
    right = set(numbers)
    classes = [' class="number"' if name in right else "" for name in header]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in zip(classes, cells, strict=True)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{line("th", header)}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def picture(path: Path, figure: Figure, caption: str) -> str:
    """Saves a figure, and returns it as HTML with the image inline."""
    figure.savefig(path, dpi=110)
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _claim(value: float) -> str:
    return up(value, 4)


# Columns of the table of trials: title -> (column of the frame, format)
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "run": ("name", str),
    "group": ("group", str),
    "mechanism": ("mechanism", str),
    "clip norm": ("clip_norm", str),
    "clip rule": ("clip_rule", str),
    "allocation": ("allocation", str),
    "sampling": ("sampling", str),
    "seed": ("seed", str),
    "test accuracy": ("test_accuracy", "{:.2%}".format),
    "ε": ("epsilon", _claim),
    "δ": ("delta", _claim),
    "advantage": ("advantage", _claim),
    "TPR at FPR 0.1 %": ("tpr_at_fpr_0.001", _claim),
    "TPR at FPR 1 %": ("tpr_at_fpr_0.01", _claim),
    "μ": ("mu", _claim),
    "regret": ("regret", _claim),
    "noise multiplier z": ("noise_multiplier", "{:.4g}".format),
    "q": ("sampling_rate", "{:.4g}".format),
    "status": ("status", str),
    "private": ("private", str),
    "error": ("error", str),
}
_SELECTION = {
    "single_run_epsilon": "one trial: may be claimed only if the trial was chosen without private data",
    "all_runs_epsilon": "all trials composed: covers any choice among them",
    "private_selection_epsilon": "private selection: covers the best trial, if the others and their number stay secret",
}


@dataclass(frozen=True)
class Documents:
    """Plans and ledgers of the runs, by run id.

    Attributes:
        plans: the groups of each plan (see `sweep_figures.groups_of`).
        spent: ledger, δ and the reported accountant.
        notes: why a run's documents are missing or incomplete.
    """

    plans: Mapping[str, Sequence[dict[str, Any]]]
    spent: Mapping[str, tuple[Ledger, float, str]]
    notes: Sequence[str]


def documented(trials: DataFrame) -> tuple[DataFrame, DataFrame]:
    """The configurations that released anything, the most accurate first, and their distinguishing settings.

    The settings have one row of texts per configuration, indexed by the id of one of its runs.
    """
    points, by = configurations(finished(trials[trials["epsilon"].notna()]))
    points = points.sort_values("accuracy", ascending=False, kind="stable")
    return points, points.set_index("run_id")[by]


def write_page(
    title: str, trials: DataFrame, selections: Sequence[tuple[str, dict[str, float]]], documents: Documents, out: Path
) -> Path:
    """Writes the page and its figures into a folder, and returns the page's path.

    Args:
        trials: with the columns of `dpexp.tracking.read.TRIAL`.
        selections: (sweep, cost of choosing among its trials by type of claim).
    """
    out.mkdir(parents=True, exist_ok=True)
    points, settings = documented(trials)
    body = [
        heading(f"Trials of {title}", 1),
        *paragraphs(_summary(trials)),
        _trials_table(trials),
        *(part for name, costs in selections for part in _selection(name, costs)),
        *_accuracies(trials, out),
        *_plans(trials, points, settings, documents.plans, out),
        *_rounds(trials, settings, documents.spent, out),
        *_accountants(trials, settings, documents.spent, out),
        *paragraphs(documents.notes, "note"),
    ]
    path = out / "report.html"
    path.write_text(page(title, body), encoding="utf-8")
    return path


def _summary(trials: DataFrame) -> list[str]:
    counts = ", ".join(f"{count} {status.lower()}" for status, count in trials["status"].value_counts().items())
    lines = [f"{len(trials)} trials: {counts}."]
    scored = trained(trials)
    for data, top in best_by_data(scored).items():
        lines.append(
            f"Best on {data}: {top}, with test accuracy {top.row['accuracy']:.2%} at ε = {_claim(top.row['epsilon'])}, "
            f"δ = {_claim(top.row['delta'])}."
        )
    for (data, model), top in best_baselines(trials).items():
        lines.append(f"Without privacy on {data} ({model}): {top.row['accuracy']:.2%} ({top.certainty}).")
    lines.append(
        "Each ε is that of one trial by itself. Choosing the best of several trials on the same private data costs "
        "more: that choice is covered by the ε of all of them composed, or of a private selection."
    )
    if scored["delta"].nunique() > 1:
        lines.append("The trials differ in δ, so their ε are not comparable.")
    exposing = int((finished(trials)["private"] != "yes").sum())
    if exposing:
        lines.append(f"{exposing} of the trials show more than their (ε, δ) covers; the column “private” says why.")
    return lines


def _trials_table(trials: DataFrame) -> str:
    ranked = trials.sort_values("test_accuracy", ascending=False, kind="stable")
    rows = [[_shown(run[column], form) for column, form in _COLUMNS.values()] for run in ranked.to_dict("records")]
    return table(list(_COLUMNS), rows, [title for title, (_, form) in _COLUMNS.items() if form is not str])


def _shown(value: Any, form: Callable[[Any], str] = str) -> str:
    return "–" if value is None or value == "" or isna(value) else form(value)


def _selection(name: str, costs: Mapping[str, float]) -> list[str]:
    keys = sorted(costs, key=[*_SELECTION, *costs].index)
    rows = [[_SELECTION.get(key, key), _claim(costs[key])] for key in keys]
    return [heading(f"Cost of choosing among the trials: {name}"), table(["claim", "ε"], rows, ["ε"])]


def _accuracies(trials: DataFrame, out: Path) -> list[str]:
    runs = trained(trials)
    if runs.empty:
        return [heading("Accuracy"), *paragraphs(["No finished trial has both an ε and a test accuracy."], "note")]
    points, _ = configurations(runs)
    tops = [best(part) for _, part in points.groupby(["data", "level"])]
    tops.sort(key=lambda top: (top.row["data"], top.row["epsilon"]))
    columns = ["data", "ε", "configuration", "test accuracy", "certainty"]
    rows = [
        [top.row["data"], _claim(top.row["epsilon"]), top.label, f"{top.row['accuracy']:.2%}", top.certainty]
        for top in tops
    ]
    spread = "Each point is a configuration: the mean over its runs, with their standard deviation. "
    if points["level"].nunique() > 1:
        text = spread + "A line joins configurations that differ only in ε. Dotted: the best without privacy, if any."
        drawn = _drawn(out / "frontier.png", lambda: frontier(trials), text)
    else:
        text = (
            spread + "Filled: the best, and those that are not significantly lower. Dotted: the best without privacy."
        )
        drawn = _drawn(out / "accuracy.png", lambda: compared(trials), text)
    note = (
        "The best configuration at each ε, by its mean over runs, compared with the others at 95 % by the "
        "Tukey-Kramer test of all pairs."
    )
    return [heading("Accuracy against ε"), drawn, *paragraphs([note]), table(columns, rows, ["ε", "test accuracy"])]


def _drawn(path: Path, draw: Callable[[], Figure], text: str) -> str:
    """The figure, or the reason why it is not drawn."""
    try:
        return picture(path, draw(), text)
    except NotDrawn as why:
        path.unlink(missing_ok=True)  # an earlier report's
        return "\n".join(paragraphs([f"{path.name} is not drawn. {why}"], "note"))


def _plans(
    trials: DataFrame, points: DataFrame, settings: DataFrame, plans: Mapping[str, Sequence[dict]], out: Path
) -> list[str]:
    if not plans:
        return []
    known = points[points["run_id"].isin([*plans])]
    level = known.groupby("level", sort=False).size().idxmax()
    of_level = {run_id: plans[run_id] for run_id in known[known["level"] == level]["run_id"]}
    fixed = _fixed(trials, of_level)
    noise = (
        f"All plans at ε = {level}, the ε of most configurations, before any schedule; plans that differ by less than "
        "10 % as one. The noise hides the contribution of any one record, so it lies to the right of it; what many "
        "records have in common remains visible, up to the open circle. α is 1 or, under joint clipping, the largest "
        "scale of the group’s vectors, and for the noise their root mean square."
    )
    shares = "w_g of each group: σ̃_g = z·S_g/√w_g, so a larger share means less noise."
    return [
        heading("Noise against signal, by group"),
        picture(out / "noise.png", noise_and_signal(of_level, settings, fixed), noise),
        heading("Budget share of each group"),
        picture(out / "shares.png", budget_shares(of_level, settings, fixed), shares),
    ]


def _rounds(
    trials: DataFrame, settings: DataFrame, spent: Mapping[str, tuple[Ledger, float, str]], out: Path
) -> list[str]:
    if not spent:
        return []
    text = "From the ledgers: one line for all configurations of equal cost."
    return [
        heading("ε over rounds"),
        picture(out / "epsilon.png", epsilon_of_runs(spent, settings, _fixed(trials, spent)), text),
    ]


def _accountants(
    trials: DataFrame, settings: DataFrame, spent: Mapping[str, tuple[Ledger, float, str]], out: Path
) -> list[str]:
    if not spent:
        return []
    everywhere = settings.loc[[*spent]]
    by_label = {common_label(settings.loc[members], everywhere): spent[members[0]] for members in same_cost(spent)}
    costs = DataFrame.from_dict(
        {label: by_accountant(ledger, delta) for label, (ledger, delta, _) in by_label.items()}, orient="index"
    )
    costs = costs[[name for name in NAMES if name in costs]]
    header = [accountant_label(name) for name in costs]
    rows = [
        [label, _claim(by_label[label][1]), *(_shown(value, _claim) for value in row)]
        for label, row in zip(costs.index, costs.to_numpy().tolist(), strict=True)
    ]
    text = "One row for all configurations of equal cost. A run reports the first that has a bound by default."
    return [
        heading("ε by accountant"),
        table(["configuration", "δ", *header], rows, ["δ", *header]),
        picture(out / "accountants.png", epsilon_by_accountant(costs, _fixed(trials, spent)), text),
    ]


def _fixed(trials: DataFrame, run_ids: Iterable[str]) -> str:
    return fixed_settings(trials[trials["run_id"].isin([*run_ids])])


def by_accountant(ledger: Ledger, delta: float) -> dict[str, float]:
    """ε by every accountant that has a bound."""
    return {name: epsilon(ledger, delta, name) for name in applicable_accountants(ledger)}
