"""`python -m dpexp report`: a page that compares the trials of sweeps and their costs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pandas import DataFrame

from dpexp.accounting.coverage import check_delta
from dpexp.accounting.ledger import ledger_so_far
from dpexp.accounting.releases import applicable_accountants
from dpexp.commands.command_line import sentence
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.reporting.report_page import Documents, documented, write_page
from dpexp.reporting.sweep_figures import groups_of

_MAX_DOCUMENTS = 60  # configurations whose plans and ledgers are fetched


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
    from dpexp.tracking.read import selections, trials

    try:
        given = OmegaConf.from_dotlist([argument for argument in arguments if "=" in argument])
        cfg: Options = OmegaConf.to_object(OmegaConf.merge(Options, given))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    sources = [argument for argument in arguments if "=" not in argument] or ["dpexp"]
    uri = cfg.uri or tracking_uri()
    frame = trials(uri, sources)
    if frame.empty:
        raise ConfigError(f"there are no runs in {', '.join(sources)}, so there is nothing to report.")
    chosen = selections(uri, frame["parent_id"].dropna().unique())
    documents = _documents(frame, uri)
    try:
        page = write_page(", ".join(sources), frame, chosen, documents, Path(cfg.out))
    except OSError as error:
        raise ConfigError(f"out={cfg.out} cannot be written ({error.strerror}).") from error
    print(f"Report: {page}")
    return page


def _documents(trials: DataFrame, uri: str) -> Documents:
    """The plan and ledger of one run per configuration."""
    from dpexp.tracking.read import downloaded_files

    points, _ = documented(trials)
    plans, spent, notes = {}, {}, []
    if len(points) > _MAX_DOCUMENTS:
        notes.append(
            f"Plans and ledgers are those of the {_MAX_DOCUMENTS} most accurate of {len(points)} configurations."
        )
    runs = trials.set_index("run_id", drop=False).loc[points["run_id"].head(_MAX_DOCUMENTS)]
    for run in runs.to_dict("records"):
        try:
            with downloaded_files(uri, run["run_id"], ["plan.json", "ledger.end.json", "ledger.jsonl"]) as folder:
                if (folder / "plan.json").exists():
                    plans[run["run_id"]] = groups_of(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
                ledger = ledger_so_far(folder / "ledger.jsonl")
            check_delta(run["delta"])
            accountants = applicable_accountants(ledger)
            reported = run["accountant"] if run["accountant"] in accountants else accountants[0]
            spent[run["run_id"]] = (ledger, run["delta"], reported)
            if ledger.incomplete:
                notes.append(f"The ledger of {run['name']} ({run['run_id']}) ends early, after {len(ledger)} rounds.")
        except (ValueError, KeyError, TypeError) as error:  # a file that dpexp did not write
            notes.append(f"Left out: {run['name']} ({run['run_id']}): {error}")
    return Documents(plans, spent, notes)
