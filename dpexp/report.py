"""Which trials were best, what they cost, and why: a page of its own, and its figures.

    python -m dpexp report [SOURCE ...] [key=value ...]

A SOURCE is the name of an MLflow experiment (default: dpexp), a parent run's id (which stands for its children) or a
single run's id.

    out=FOLDER    for report.html and the figures; default: outputs/report
    uri=…         where MLflow runs are; default: outputs/mlflow.db here
"""

import base64
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pandas import DataFrame, isna

from dpexp import figures
from dpexp.accounting.accountants import APPROXIMATIONS, NAMES, check_delta, epsilon
from dpexp.accounting.claims import claimable
from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.commands.overrides import sentence
from dpexp.errors import ConfigError

# What the table of trials shows: title, column and format.
_COLUMNS = {
    "run": ("name", "{}"),
    "group": ("group", "{}"),
    "mechanism": ("mechanism", "{}"),
    "bound": ("bound", "{}"),
    "allocation": ("allocation", "{}"),
    "sampling": ("sampling", "{}"),
    "seed": ("seed", "{}"),
    "test accuracy": ("test_accuracy", "{:.2%}"),
    "ε": ("epsilon", "{:.4g}"),
    "δ": ("delta", "{:g}"),
    "noise multiplier z": ("noise_multiplier", "{:.4g}"),
    "q": ("q", "{:.4g}"),
    "status": ("status", "{}"),
    "private": ("private", "{}"),
    "error": ("error", "{}"),
}
_SELECTION = {
    "one_trial": "one trial: may be claimed for the chosen one only if the choice used no private data",
    "all_composed": "all trials composed: covers any choice among them",
    "private": "private selection: covers the best trial, if the others and their number stay secret",
}
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


@dataclass
class Options:
    out: str = "outputs/report"
    uri: str | None = None


@dataclass(frozen=True)
class Spent:
    """What a run's ledger says, and how the run accounts for it."""

    ledger: Ledger
    delta: float
    accountant: str


def report(arguments: Sequence[str]) -> Path:
    """Writes the page and its figures, and returns the page's path.

    Args:
        arguments: sources and options, as on the command line.

    Raises:
        ConfigError: a mistake in the arguments, a source that cannot be read or has no runs, or a folder that cannot
            be written.
    """
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        sys.exit()
    from dpexp.tracking.read import selections, trials

    cfg = _options([argument for argument in arguments if "=" in argument])
    sources = [argument for argument in arguments if "=" not in argument] or ["dpexp"]
    uri = cfg.uri or f"sqlite:///{Path.cwd()}/outputs/mlflow.db"
    frame = trials(uri, sources)
    if frame.empty:
        raise ConfigError(f"there are no runs in {', '.join(sources)}, so there is nothing to report.")
    chosen = selections(uri, frame["parent_id"].dropna().unique())
    try:
        return _page(sources, frame, chosen, uri, Path(cfg.out))
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written ({error.strerror}).") from error


def _options(given: list[str]) -> Options:
    try:
        return OmegaConf.to_object(OmegaConf.merge(Options, OmegaConf.from_dotlist(given)))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error


def _page(
    sources: Sequence[str], frame: DataFrame, chosen: list[tuple[str, dict[str, float]]], uri: str, out: Path
) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    drawn = figures.drawn(frame)
    plans, spent, notes = _documents(drawn.drop_duplicates(["line", "level"]), uri)
    body = [
        f"<h1>{escape('Trials of ' + ', '.join(sources))}</h1>",
        *_paragraphs(_summary(frame)),
        _trials_table(frame),
        *(_selection_table(name, costs) for name, costs in chosen),
        *_frontier(frame, out),
        *_plans(drawn, plans, out),
        *_rounds(drawn, spent, out),
        *_accountants(drawn, spent, out),
        *_paragraphs(notes, "note"),
    ]
    path = out / "report.html"
    path.write_text(
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(', '.join(sources))}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return path


# What the runs left


def _documents(runs: DataFrame, uri: str) -> tuple[dict[str, list[dict]], dict[str, Spent], list[str]]:
    """By run id the groups of each plan and each ledger; and why a run's are missing or not whole."""
    from dpexp.tracking.read import downloaded_files

    plans, spent, notes = {}, {}, []
    for run in runs.to_dict("records"):
        try:
            with downloaded_files(uri, run["run_id"], ["plan.json", "ledger.jsonl"]) as folder:
                if (folder / "plan.json").exists():
                    plans[run["run_id"]] = _groups(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
                ledger = ledger_so_far(folder / "ledger.jsonl")
            check_delta(run["delta"])
            accountants = claimable(ledger)
            reported = run["accountant"] if run["accountant"] in accountants else accountants[0]
            spent[run["run_id"]] = Spent(ledger, run["delta"], reported)
            if ledger.truncated:
                notes.append(f"The ledger of {run['name']} ({run['run_id']}) ends early, after {len(ledger)} rounds.")
        except (ValueError, KeyError, TypeError) as error:  # a document from elsewhere
            notes.append(f"Left out: {run['name']} ({run['run_id']}): {error}")
    return plans, spent, notes


def _groups(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A plan's groups: share, and per coordinate of the released average what one record can add at most, the noise
    (root mean square), and what a sample of expected size comes to at most."""
    expected = plan["sampling"]["q"] * plan["n"]
    found = []
    for group in plan["groups"]:
        dims, alphas = [vector["d"] for vector in group["vectors"]], group["alphas"]
        average = max(alphas) * group["S"] / math.sqrt(sum(dims))
        scale = math.sqrt(sum(d * alpha**2 for d, alpha in zip(dims, alphas, strict=True)) / sum(dims))
        numbers = {"record": average / expected, "noise": scale * group["sigma"] / expected, "average": average}
        found.append({"group": group["name"], "share": group["share"]} | numbers)
    return found


# The parts of the page


def _summary(frame: DataFrame) -> list[str]:
    counts = ", ".join(f"{count} {status.lower()}" for status, count in frame["status"].value_counts().items())
    lines = [f"{len(frame)} trials: {counts}."]
    drawn = figures.drawn(frame)
    for _, best in drawn.dropna(subset=["test_accuracy"]).drop_duplicates("data").iterrows():
        lines.append(
            f"Best on {best['data']}: {best['name']} ({best['line']}, seed {best['seed']}), with test accuracy "
            f"{best['test_accuracy']:.2%} at ε = {best['epsilon']:.4g}, δ = {best['delta']:g}."
        )
    for top in figures.ceilings(frame).to_dict("records"):
        lines.append(f"Without privacy on {top['data']} ({top['model']}): {_accuracy(top)}.")
    lines.append(
        "Each ε is that of one trial by itself. Choosing the best of many trials that used the same private data costs "
        "more: an ε that covers the choice is that of all of them composed, or of a private selection."
    )
    if drawn["delta"].nunique() > 1:
        lines.append("The trials differ in δ, so that their ε cannot be compared as they stand.")
    open_ = int((drawn["private"] != "yes").sum())
    if open_:
        lines.append(f"{open_} of the trials show more than their (ε, δ) covers; the column “private” says why.")
    return lines


def _accuracy(row: Mapping[str, Any]) -> str:
    if row["seeds"] == 1:
        return f"{row['accuracy']:.2%} (1 seed)"
    return f"{row['accuracy']:.2%} ± {row['spread']:.2%} ({row['seeds']} seeds)"


def _trials_table(frame: DataFrame) -> str:
    ranked = frame.sort_values("test_accuracy", ascending=False, kind="stable")
    rows = [[_shown(run[column], form) for column, form in _COLUMNS.values()] for run in ranked.to_dict("records")]
    return _table(list(_COLUMNS), rows, [title for title, (_, form) in _COLUMNS.items() if form != "{}"])


def _selection_table(name: str, costs: Mapping[str, float]) -> str:
    keys = sorted(costs, key=[*_SELECTION, *costs].index)
    rows = [[_SELECTION.get(key, key), f"{costs[key]:.4g}"] for key in keys]
    return f"<h2>{escape('What choosing among the trials costs: ' + name)}</h2>" + _table(["claim", "ε"], rows, ["ε"])


def _frontier(frame: DataFrame, out: Path) -> list[str]:
    points = figures.configurations(frame)
    title = "<h2>Accuracy against ε</h2>"
    if points.empty:
        return [title, *_paragraphs(["No finished trial has both an ε and a test accuracy."], "note")]
    best = points.sort_values("accuracy", ascending=False).drop_duplicates(["data", "level"]).sort_values("epsilon")
    rows = [[row["data"], f"{row['epsilon']:.4g}", row["line"], _accuracy(row)] for row in best.to_dict("records")]
    caption = (
        "Means over seeds, with standard deviations. A line joins the best configuration at each ε; others are pale."
        + (" Dotted: the same model without privacy." if len(figures.ceilings(frame)) else "")
    )
    return [
        title,
        _figure(out / "frontier.png", figures.frontier(frame), caption),
        "<p>The best configuration at each ε, by its mean over seeds:</p>",
        _table(["data", "ε", "configuration", "test accuracy"], rows, ["ε", "test accuracy"]),
    ]


def _plans(drawn: DataFrame, plans: Mapping[str, list[dict]], out: Path) -> list[str]:
    if not plans:
        return []
    rows = [
        {"line": run["line"], "level": run["level"], "grouping": run["group"], "allocation": run["allocation"]} | group
        for run in _at_one_level(drawn).to_dict("records")
        for group in plans.get(run["run_id"], [])
    ]
    frame = DataFrame(rows)
    labelled = frame.assign(line=frame["line"] + " · ε = " + frame["level"])
    noise = (
        "The best run of each line at the ε that most of them have, before any schedule. The noise is there to hide "
        "what any one record adds, so that it lies to the right of that; what stays visible is what many records have "
        "in common, up to the open circle. α is 1, but under joint clipping the largest scale of the group’s vectors, "
        "and for the noise their root mean square."
    )
    shares = "w_g of each group: σ̃_g = z·S_g/√w_g, so that the larger its share, the less noise a group gets."
    return [
        "<h2>Noise against signal, by group</h2>",
        _figure(out / "noise.png", figures.noise_and_signal(labelled), noise),
        "<h2>How each allocation spends the budget</h2>",
        _figure(out / "shares.png", figures.budget_shares(frame), shares),
    ]


def _at_one_level(drawn: DataFrame) -> DataFrame:
    """The best run of each line, at the ε that most lines have, so that they compare; else at any."""
    common = drawn.groupby("level", sort=False)["line"].nunique().idxmax()
    return drawn.sort_values("level", key=lambda level: level != common, kind="stable").drop_duplicates("line")


def _rounds(drawn: DataFrame, spent: Mapping[str, Spent], out: Path) -> list[str]:
    runs = {
        f"{run['line']} · ε = {run['level']}": (paid.ledger, paid.delta, paid.accountant)
        for run in drawn.drop_duplicates(["line", "level"]).to_dict("records")
        if (paid := spent.get(run["run_id"]))
    }
    if not runs:
        return []
    caption = "From each run’s ledger: the best run of each line at each ε, at most 12 that differ in cost."
    return [
        "<h2>ε over rounds</h2>",
        _figure(out / "epsilon.png", figures.epsilon_of_runs(runs), caption),
    ]


def _accountants(drawn: DataFrame, spent: Mapping[str, Spent], out: Path) -> list[str]:
    runs = {
        f"{run['line']} · ε = {run['level']}": spent[run["run_id"]]
        for run in drawn.drop_duplicates("line").to_dict("records")
        if run["run_id"] in spent
    }
    if not runs:
        return []
    costs = DataFrame.from_dict({label: _costs(paid) for label, paid in runs.items()}, orient="index")
    costs = costs[[name for name in NAMES if name in costs]]
    header = [f"{name} (approximation, no bound)" if name in APPROXIMATIONS else name for name in costs]
    rows = [
        [label, f"{runs[label].delta:g}", *(_shown(value, "{:.4g}") for value in row)]
        for label, row in zip(costs.index, costs.to_numpy().tolist(), strict=True)
    ]
    caption = "The best run of each line. The run reports the first accountant that has a bound, unless told otherwise."
    return [
        "<h2>What each accountant would have said</h2>",
        _table(["run", "δ", *header], rows, ["δ", *header]),
        _figure(out / "accountants.png", figures.epsilon_by_accountant(costs), caption),
    ]


def _costs(paid: Spent) -> dict[str, float]:
    return {name: epsilon(paid.ledger, paid.delta, name) for name in claimable(paid.ledger)}


# HTML


def _shown(value: Any, form: str = "{}") -> str:
    return "–" if value is None or value == "" or isna(value) else form.format(value)


def _paragraphs(texts: Iterable[str], kind: str = "") -> list[str]:
    attribute = f' class="{kind}"' if kind else ""
    return [f"<p{attribute}>{escape(text)}</p>" for text in texts]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> str:
    """A table of plain texts; the columns in `numbers` are set flush right."""
    right = set(numbers)
    kinds = [' class="number"' if name in right else "" for name in header]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{line("th", header)}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _figure(path: Path, figure: Figure, caption: str) -> str:
    """Writes the figure, and returns it as HTML that needs no file."""
    figure.savefig(path, dpi=110)
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
