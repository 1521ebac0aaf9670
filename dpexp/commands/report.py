"""`python -m dpexp report`: runs or a sweep on one HTML page, which needs no server and runs no script."""

import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from omegaconf import OmegaConf
from pandas import read_csv
from yaml import YAMLError

from dpexp.accounting.ledger import ledger_so_far
from dpexp.accounting.rounding import counted, up
from dpexp.commands.account import console, with_earlier
from dpexp.commands.command_line import config_file, is_option, read_options
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError, in_one_line
from dpexp.reporting.model_card import NOT_COVERED
from dpexp.reporting.wording import BASELINES, guarantee_in_words, measured
from dpexp.tracking.provenance import without_passwords
from dpexp.tracking.read import is_sweep, pulled, pulled_sweep
from dpexp.tracking.sweep_run import SUMMARY

OF_A_PAGE = ("overrides.yaml", "result.json", "ledger.jsonl", "ledger.end.json", "*.png")  # artifacts


@dataclass
class Options:
    out: str = "report.html"
    uri: str | None = None


def report(arguments: Sequence[str]) -> None:
    """Writes the page of the jobs and sweeps that are named on the command line."""
    cfg: Options = read_options(Options, [*filter(is_option, arguments)])
    names, uri = [argument for argument in arguments if not is_option(argument)], cfg.uri or tracking_uri()
    with ExitStack() as fetched:
        named = [Path(name) if Path(name).is_dir() else fetched.enter_context(_fetched(uri, name)) for name in names]
        _write(cfg, named, arguments)


def _fetched(uri: str, run_id: str) -> AbstractContextManager[Path]:
    """The folder of a run, or of a sweep with its trials."""
    if is_sweep(uri, run_id):
        return pulled_sweep(uri, run_id, "config.yaml", SUMMARY, *OF_A_PAGE)
    return pulled(uri, run_id, "config.yaml", *OF_A_PAGE)


def _write(cfg: Options, named: Sequence[Path], arguments: Sequence[str]) -> None:
    """Writes the page of all jobs in the named folders, of which one may be that of a sweep."""
    found = {one: folder for folder in named for one in (folder, *folder.glob("[!.]*/")) if _kept(one).is_file()}
    jobs = sorted(found, key=lambda job: (str(job.parent), len(job.name), job.name))  # trial 2 before trial 10
    if not jobs or {*named} - {*found, *found.values()}:
        raise ConfigError(f"report {' '.join(arguments)}: name folders of jobs or sweeps, or MLflow run ids.")
    runs = [_run(job) for job in jobs]
    delta = max((run["result"]["delta"] for run in runs if "delta" in run["result"]), default=1.0)
    ledgers = [ledger_so_far(path) for job in jobs if (path := job / "ledger.jsonl").exists()]
    template = Environment(loader=PackageLoader("dpexp.reporting", ""), autoescape=True).get_template("report.html")
    shown = {"measured": measured, "up": up, "in_words": guarantee_in_words, "baselines": BASELINES}
    shown |= {"runs": runs, "delta": delta, "not_covered": NOT_COVERED.replace("`", "").splitlines()}
    shown["claims"] = {(run["result"]["adjacency"], run["result"]["delta"]) for run in runs if "delta" in run["result"]}
    is_private = all(run["result"].get("private", True) for run in runs)
    shown["is_private"] = is_private and all(ledger.not_private_reason is None for ledger in ledgers)
    shown["together"] = ledgers and with_earlier(ledgers[:-1], ledgers[-1], delta)
    shown["pictures"] = [one for folder in named if folder not in found for one in _pictures(folder)]
    summaries = [path for folder in named if (path := folder / SUMMARY).exists()]
    shown["means"] = [read_csv(path, dtype=str, keep_default_na=False) for path in summaries]
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    Path(cfg.out).write_text(template.render(shown))
    console.print(f"{counted(len(runs), 'run')}: {cfg.out}", markup=False)


def _kept(job: Path, name: str = "config") -> Path:
    """A file of the options of a job; that of a run that was fetched is among its others."""
    folder = job / ".hydra" if (job / ".hydra").is_dir() else job
    return folder / f"{name}.yaml"


def _run(job: Path) -> dict[str, Any]:
    """The values of a job for the page; `result` is empty if it has not finished."""
    result = job / "result.json"
    try:
        cfg, given = (OmegaConf.load(_kept(job, name)) for name in ("config", "overrides"))
        hydra = _kept(job, "hydra")
        file = config_file(OmegaConf.load(hydra).hydra) if hydra.exists() else None
        found = json.loads(result.read_text()) if result.exists() else {}
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{job} has a damaged file of its job: {in_one_line(error)}.") from error
    targets = (OmegaConf.select(cfg, key) for key in ("model._target_", "data.module._target_"))
    model, data = (str(target).rpartition(".")[2] for target in targets)
    words = [*([file.name] if file else []), *map(str, given)]
    overrides = without_passwords(shlex.join(words))
    return {"title": f"{model} on {data}", "overrides": overrides, "result": found, "pictures": _pictures(job)}


def _pictures(folder: Path) -> list[tuple[str, str]]:
    """The figures in a folder: name, and PNG in base64."""
    return [(path.stem, b64encode(path.read_bytes()).decode()) for path in sorted(folder.glob("*.png"))]
