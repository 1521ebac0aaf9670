"""What each run on a data set counts as: its ledger, or its whole plan where the ledger is not final or lost."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from dpexp.accounting.ledger import Ledger, ledger_so_far, write_ledger
from dpexp.accounting.ledger.reader import contents
from dpexp.accounting.multiple_runs import Budget, budget, rho
from dpexp.errors import ConfigError
from dpexp.tracking.client import OUTPUT, one_line
from dpexp.tracking.job_folder import BEGUN, RESERVED, RUN, is_running
from dpexp.tracking.provenance import HOST, without_passwords
from dpexp.tracking.read import existing, search

DATA_ID = "dpexp.data_id"  # tags
BUDGET = "dpexp.budget"
AUDITS = "dpexp.audit_trainings"  # of jobs whose audit trained on the data too; none does any more
LEDGER_STATE = "dpexp.ledger_state"  # "nothing": the run ended before its ledger was begun
_LEDGER = "ledger.jsonl"
_FILES = (_LEDGER, "ledger.end.json", RESERVED)


@dataclass(frozen=True)
class RunCost:
    """What a run counts as.

    Attributes:
        name, run_id, user, status: of the run; "" if unknown.
        ledger: what it counts as; None: unknown.
        note: why that is not simply its ledger; "" if it is.
        ledger_missing: its ledger is lost, so that the cost is unknown, or at most that of `ledger`, its plan.
        not_private_reason: why its (ε, δ) does not cover what it shows, if so.
        delta: of its configuration.
        identity: equal for the same run, wherever it was found.
        budget: the budget that it was held to, if any.
    """

    name: str
    run_id: str
    user: str
    status: str
    ledger: Ledger | None
    note: str
    ledger_missing: bool = False
    not_private_reason: str | None = None
    delta: float | None = None
    identity: str = ""
    budget: Budget | None = None

    @property
    def has_released(self) -> bool:
        """Whether it has released anything, or may be about to."""
        return self.ledger is not None and bool(self.ledger.rounds)


def reserve(output: Path, ledger: Ledger) -> None:
    """Writes the most that a job may release into its folder, before its run is created."""
    temporary = output / f"{RESERVED}.part"
    write_ledger(temporary, ledger)
    temporary.replace(output / RESERVED)


def costs_in(uri: str, data_id: str) -> list[RunCost]:
    """The costs of all runs of a store with that `data.id`, oldest first.

    Runs of all experiments count, also deleted, failed, killed and running ones.
    """
    client = existing(uri)
    return [cost_of_run(client, run) for run in runs_on(client, uri, data_id)]


def budgets_in(uri: str, data_id: str) -> list[str]:
    """The tags with the budgets that those runs were held to."""
    found = runs_on(existing(uri), uri, data_id)
    return [run.data.tags[BUDGET] for run in found if BUDGET in run.data.tags]


def runs_on(client: MlflowClient, uri: str, data_id: str) -> list[Run]:
    """The runs with that `data.id`, oldest first. One without a folder never reached its training."""
    try:
        experiments, token = [], None
        while token != "":
            page = client.search_experiments(view_type=ViewType.ALL, page_token=token)
            experiments += [experiment.experiment_id for experiment in page]
            token = page.token or ""
        found = [
            run
            for run in search(client, experiments, f"tags.`{DATA_ID}` LIKE '%'", ViewType.ALL)
            if run.data.tags[DATA_ID] == data_id and OUTPUT in run.data.tags
        ]
    except MlflowException as error:
        raise ConfigError(f"uri={without_passwords(uri)} cannot be read: {one_line(error)}") from error
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def cost_of_run(client: MlflowClient, run: Run) -> RunCost:
    """The cost of a run, from its folder if that is on this machine, else from what it sent to its store."""
    tags, run_id, status = run.data.tags, run.info.run_id, run.info.status
    private = tags.get("dpexp.private", "yes")
    delta = run.data.params.get("privacy.delta")
    known = RunCost(
        run.info.run_name or run_id, run_id, tags.get("mlflow.user", ""), status, None, "", identity=run_id,
        not_private_reason=None if private == "yes" else private.removeprefix("no: "),
        delta=float(delta) if delta else None,
        budget=Budget(**json.loads(tags[BUDGET])) if BUDGET in tags else None,
    )  # fmt: skip
    if private.startswith("no: trained without"):
        return replace(known, note="it was trained without privacy")
    folder = Path(tags[OUTPUT])
    if _is_folder_of(folder, run_id):
        running = is_running(folder)
        unlocked = not (folder / f"{RUN}.lock").exists()  # the lock file was deleted
        if running is None or unlocked or (status == "RUNNING" and tags.get("dpexp.host") != HOST):
            running = status == "RUNNING"
        elif status == "RUNNING" and not running:
            known = replace(known, status="KILLED")  # the next job in its experiment will tell the store
        not_begun = not (folder / BEGUN).exists()
        known = replace(known, identity=str(folder.resolve()))
        return _from_folder(known, folder, running, not_begun, AUDITS in tags)
    if tags.get("dpexp.host") == HOST and _never_trained(folder):
        return replace(known, ledger=Ledger("", {}), note="it ended before its first round")
    with tempfile.TemporaryDirectory() as copied:
        try:
            for artifact in sorted(client.list_artifacts(run_id), key=lambda one: str(one.path)):  # ends before ledgers
                if artifact.path in _FILES:
                    client.download_artifacts(run_id, artifact.path, copied)
        except (MlflowException, OSError) as error:
            reason = f"its folder is not here, and its artifacts cannot be fetched: {one_line(error)[:200]}"
            return replace(known, note=reason, ledger_missing=True)
        not_begun = tags.get(LEDGER_STATE) == "nothing"
        found = _from_folder(known, Path(copied), status == "RUNNING", not_begun, AUDITS in tags)
        if status not in ("RUNNING", "FINISHED") and found.has_released:
            return _whole_plan(found, Path(copied), "its folder is not here, and it may have been resumed", lost=True)
        return found


def cost_of_job(folder: Path) -> RunCost:
    """The cost of the job in a folder, tracked or not."""
    configuration = folder / "config.yaml"
    cfg = yaml.safe_load(configuration.read_text()) if configuration.exists() else {}
    cfg = cfg if isinstance(cfg, Mapping) else {}
    privacy, audit = cfg.get("privacy", {}), cfg.get("audit")
    delta = privacy.get("delta")
    run_id = (folder / RUN).read_text() if (folder / RUN).exists() else ""
    known = RunCost(
        str(folder), run_id, "", "", None, "",
        delta=float(delta) if delta is not None else None, identity=str(folder.resolve()),
        budget=budget(privacy["budget"]) if privacy.get("budget") else None,
    )  # fmt: skip
    if privacy.get("enabled") is False:
        return replace(known, note="it was trained without privacy", not_private_reason="trained without privacy")
    not_begun = (folder / RESERVED).exists() and not (folder / BEGUN).exists()
    # The audit of such a run of an earlier version also trained on the data.
    audits = isinstance(audit, Mapping) and audit.get("canary_type") == "mislabelled"
    return _from_folder(known, folder, is_running(folder) is not False, not_begun, audits)


def cost_of_ledger(path: Path) -> RunCost:
    """The cost of a ledger file."""
    return _from_ledger(RunCost(str(path), "", "", "", None, "", identity=str(path.resolve())), path)


def distinct_runs(costs: list[RunCost]) -> list[RunCost]:
    """Each run once, if it was found in several places; the first stays."""
    return list({cost.identity: cost for cost in reversed(costs)}.values())[::-1]


def _is_folder_of(folder: Path, run_id: str) -> bool:
    """Whether a folder is that run's: another machine may have one of the same name."""
    try:
        return (folder / RUN).read_text() == run_id
    except OSError:
        return False


def _never_trained(folder: Path) -> bool:
    """Whether a job was killed after creating its run and before writing the run's id, which precedes training."""
    left = [name for name in (RUN, BEGUN, _LEDGER) if (folder / name).exists()]
    return (folder / RESERVED).exists() and not left and is_running(folder) is False


def _from_folder(known: RunCost, folder: Path, running: bool, not_begun: bool, audits: bool) -> RunCost:
    """The cost by a folder's files; `not_begun`: where there is no ledger, none was begun;
    `audits`: the job's audit trains on the data too, which its ledger does not contain."""
    path = folder / _LEDGER
    if running:
        return _whole_plan(known, folder, "it is running", lost=False)
    if not path.exists() and not_begun:
        return replace(known, ledger=Ledger("", {}), note="it ended before its first round")
    found = _from_ledger(known, path)
    known = replace(known, not_private_reason=found.not_private_reason)
    if audits:
        return _whole_plan(known, folder, "its audit trains on the data too", lost=False)
    if not path.exists():
        return _whole_plan(known, folder, "its ledger is missing", lost=True)
    if found.ledger_missing or found.ledger is None:
        return _whole_plan(known, folder, found.note, lost=True)
    ended = known.status in ("FINISHED", "FAILED") or (folder / "result.json").exists()
    if found.ledger.incomplete and ended:  # a training that ends closes its ledger
        return _whole_plan(known, folder, "its ledger has lost its end", lost=True)
    if known.budget is not None and _admitted_by_whole_plan(folder, known.budget):
        return _whole_plan(known, folder, "its whole plan was admitted, before any result", lost=False)
    return found


def _admitted_by_whole_plan(folder: Path, kept: Budget) -> bool:
    """Whether a job was admitted by its whole plan (see `tracking.data_budget`), or may have been: the plan is lost."""
    try:
        return not kept.holds(rho(ledger_so_far(folder / RESERVED), kept.order))
    except ConfigError:
        return True


def _from_ledger(known: RunCost, path: Path) -> RunCost:
    try:
        found = contents(path)
    except ConfigError as error:
        return replace(known, note=str(error).removesuffix("."), ledger_missing=True)
    ledger = found.ledger
    if ledger.lost is not None:
        note = f"its ledger has lost lines: {ledger.lost}"
        return replace(known, note=note, ledger_missing=True, not_private_reason=ledger.not_private_reason)
    early = "its ledger ends early: the run was killed, or lines are missing and more was spent"
    return replace(
        known,
        ledger=ledger,
        note=early if ledger.incomplete else "",
        not_private_reason=ledger.not_private_reason or known.not_private_reason,
        identity=hashlib.sha256(path.read_bytes()).hexdigest() if "run" in found.header else known.identity,
    )


def _whole_plan(known: RunCost, folder: Path, reason: str, lost: bool) -> RunCost:
    try:
        ledger = ledger_so_far(folder / RESERVED)
    except ConfigError:
        return replace(known, note=f"{reason}, and its plan is missing too", ledger_missing=True)
    return replace(known, ledger=ledger, note=f"{reason}: counted as its whole plan", ledger_missing=lost)


def stated_adjacencies(costs: Sequence[RunCost]) -> Iterator[tuple[str, str]]:
    """Each (adjacency and privacy unit, name of the first run with it) that the runs are stated for."""
    seen = set()
    for cost in costs:
        if cost.ledger is None or not cost.ledger.rounds:
            continue
        stated = cost.ledger.adjacency + (f" of a {cost.ledger.unit}" if cost.ledger.record else "")
        if stated not in seen:
            seen.add(stated)
            yield stated, cost.name
