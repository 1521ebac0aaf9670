"""`python -m dpexp report [SOURCE ...] [key=value ...]` draws which trials were best, what they cost, and why: a page.

A SOURCE is the name of an MLflow experiment (default: dpexp), a parent run's id (which stands for its children) or a
single run's id.

    out=FOLDER    for report.html and the figures; default: outputs/report
    uri=…         where MLflow runs are; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pandas import DataFrame

from dpexp.accounting.coverage import check_delta
from dpexp.accounting.ledger import ledger_so_far
from dpexp.accounting.releases import claimable
from dpexp.commands.overrides import sentence
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.reporting.report_page import Documents, documented, write_page
from dpexp.reporting.sweep_figures import groups_of

_MOST = 60  # configurations whose plans and ledgers are fetched


@dataclass
class Options:
    out: str = "outputs/report"
    uri: str | None = None


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
    uri = cfg.uri or tracking_uri()
    frame = trials(uri, sources)
    if frame.empty:
        raise ConfigError(f"there are no runs in {', '.join(sources)}, so there is nothing to report.")
    chosen = selections(uri, frame["parent_id"].dropna().unique())
    left = _documents(frame, uri)
    try:
        return write_page(", ".join(sources), frame, chosen, left, Path(cfg.out))
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written ({error.strerror}).") from error


def _options(given: list[str]) -> Options:
    try:
        return OmegaConf.to_object(OmegaConf.merge(Options, OmegaConf.from_dotlist(given)))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error


def _documents(trials: DataFrame, uri: str) -> Documents:
    """Plan and ledger of one run of each configuration."""
    from dpexp.tracking.read import downloaded_files

    points, _ = documented(trials)
    plans, spent, notes = {}, {}, []
    if len(points) > _MOST:
        notes.append(f"Plans and ledgers are those of the {_MOST} most accurate of {len(points)} configurations.")
    runs = trials.set_index("run_id", drop=False).loc[points["run_id"].head(_MOST)]
    for run in runs.to_dict("records"):
        try:
            with downloaded_files(uri, run["run_id"], ["plan.json", "ledger.end.json", "ledger.jsonl"]) as folder:
                if (folder / "plan.json").exists():
                    plans[run["run_id"]] = groups_of(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
                ledger = ledger_so_far(folder / "ledger.jsonl")
            check_delta(run["delta"])
            accountants = claimable(ledger)
            reported = run["accountant"] if run["accountant"] in accountants else accountants[0]
            spent[run["run_id"]] = (ledger, run["delta"], reported)
            if ledger.incomplete:
                notes.append(f"The ledger of {run['name']} ({run['run_id']}) ends early, after {len(ledger)} rounds.")
        except (ValueError, KeyError, TypeError) as error:  # a document from elsewhere
            notes.append(f"Left out: {run['name']} ({run['run_id']}): {error}")
    return Documents(plans, spent, notes)
