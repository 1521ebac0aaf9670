"""The privacy cost of each run on a data set; it is never less than what the run has released.

A run that has ended and closed its ledger counts as that; one that was killed, as its ledger and a round more of each
kind that its plan has left. A run that is running, is elsewhere or has lost its ledger counts as its reservation: the
most that it may release, which it sends to its store before its first round.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from dpexp.accounting.ledger import Ledger, ledger_so_far, write_ledger
from dpexp.accounting.ledger.integrity import read_end
from dpexp.accounting.ledger.reader import contents
from dpexp.accounting.multiple_runs import Budget, budget, rho
from dpexp.errors import ConfigError
from dpexp.tracking.client import OUTPUT
from dpexp.tracking.job_folder import RESERVED_LEDGER, RUN, is_running
from dpexp.tracking.provenance import HOST
from dpexp.tracking.read import existing, readable, search

DATA_ID = "dpexp.data_id"  # tags
BUDGET = "dpexp.budget"


@dataclass(frozen=True)
class RunCost:
    """What a run counts as.

    Attributes:
        name, run_id, user, status: of the run; "" if unknown.
        identity: equal for the same run, wherever it was found.
        delta: of its configuration.
        budget: the budget that it was held to, if any.
        not_private_reason: why its (ε, δ) does not cover what it shows, if so.
        ledger: what it counts as, with rounds if it has released anything, or may be about to; None: unknown.
        note: why that is not simply its ledger; "" if it is.
        ledger_missing: its ledger is lost, so that the cost is unknown, or at most that of `ledger`, its reservation.
    """

    name: str
    identity: str
    run_id: str = ""
    user: str = ""
    status: str = ""
    delta: float | None = None
    budget: Budget | None = None
    not_private_reason: str | None = None
    ledger: Ledger | None = None
    note: str = ""
    ledger_missing: bool = False


def reserve(output: Path, ledger: Ledger) -> None:
    """Writes the most that a job may release into its folder, before its run is created."""
    temporary = output / f"{RESERVED_LEDGER}.part"
    write_ledger(temporary, ledger)
    temporary.replace(output / RESERVED_LEDGER)


def costs_in(uri: str, data_id: str) -> list[RunCost]:
    """The costs of all runs of a store with that `data.id`, oldest first.

    Runs of all experiments count, also deleted, failed, killed and running ones.
    """
    client = existing(uri)
    return [cost_of_run(client, run) for run in runs_on(client, uri, data_id)]


def runs_on(client: MlflowClient, uri: str, data_id: str) -> list[Run]:
    """The runs with that `data.id`, oldest first."""
    with readable(uri):
        experiments, token = [], None
        while token != "":
            page = client.search_experiments(view_type=ViewType.ALL, page_token=token)
            experiments += [experiment.experiment_id for experiment in page]
            token = page.token or ""
        tagged = [*search(client, experiments, f"tags.`{DATA_ID}` LIKE '%'", ViewType.ALL)]
    found = [run for run in tagged if run.data.tags[DATA_ID] == data_id]
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def is_run_of(run: Run, folder: Path) -> bool:
    """Whether a job's folder is that run's, and no copy: another machine may have one of the same name."""
    said = Path(run.data.tags.get(OUTPUT, folder))
    try:
        return (folder / RUN).read_text() == run.info.run_id and (not said.exists() or said.samefile(folder))
    except OSError:
        return False


def cost_of_run(client: MlflowClient, run: Run) -> RunCost:
    """The cost of a run, by its folder if it ran last on this machine."""
    tags, run_id, status = run.data.tags, run.info.run_id, run.info.status
    private, delta = tags.get("dpexp.private", "yes"), run.data.params.get("privacy.delta")
    known = RunCost(
        run.info.run_name or run_id, run_id, run_id, tags.get("mlflow.user", ""), status,
        delta=float(delta) if delta else None,
        budget=Budget(**json.loads(tags[BUDGET])) if BUDGET in tags else None,
        not_private_reason=None if private == "yes" else private.removeprefix("no: "),
    )  # fmt: skip
    if private.startswith("no: trained without"):
        return replace(known, note="it was trained without privacy")
    folder, reservation = Path(tags.get(OUTPUT, "")), partial(_sent_reservation, client, run_id)
    if tags.get("dpexp.host") != HOST or not is_run_of(run, folder):
        return _as_reserved(known, reservation, "its folder is not here")
    held = is_running(folder)
    unknown = held is None or not (folder / f"{RUN}.lock").exists()  # the lock file may have been deleted
    running = bool(held) or (unknown and status == "RUNNING")
    if status == "RUNNING" and not running:
        known = replace(known, status="KILLED")  # the next job in its experiment will tell the store
    return _by_folder(replace(known, identity=str(folder.resolve())), folder, running, reservation)


def cost_of_job(folder: Path) -> RunCost:
    """The cost of the job in a folder, tracked or not."""
    configuration, run = folder / "config.yaml", folder / RUN
    cfg = yaml.safe_load(configuration.read_text()) if configuration.exists() else None
    privacy = cfg.get("privacy", {}) if isinstance(cfg, dict) else {}
    delta, kept = privacy.get("delta"), privacy.get("budget")
    known = RunCost(
        str(folder), str(folder.resolve()), run.read_text() if run.exists() else "",
        delta=None if delta is None else float(delta), budget=budget(kept) if kept else None,
    )  # fmt: skip
    if privacy.get("enabled") is False:
        return replace(known, note="it was trained without privacy", not_private_reason="trained without privacy")
    return _by_folder(known, folder, is_running(folder) is not False, partial(_reservation_in, folder))


def cost_of_ledger(path: Path) -> RunCost:
    """The cost of a ledger file."""
    return _by_ledger(RunCost(str(path), str(path.resolve())), path)


def distinct_runs(costs: list[RunCost]) -> list[RunCost]:
    """Each run once, if it was found in several places; the first stays."""
    return list({cost.identity: cost for cost in reversed(costs)}.values())[::-1]


def _by_folder(known: RunCost, folder: Path, running: bool, reservation: Callable[[], Ledger | None]) -> RunCost:
    """The cost of a run whose folder is on this machine."""
    if running:
        return _as_reserved(known, reservation, "it is running")
    found = _by_ledger(known, folder / "ledger.jsonl")
    ledger = found.ledger
    if ledger is None:
        return _as_reserved(found, reservation, found.note)
    ended_itself = known.status in ("FINISHED", "FAILED") or (folder / "result.json").exists()
    has_ended = not ledger.incomplete and (not ledger.rounds or read_end(folder / "ledger.jsonl") is not None)
    if ended_itself and not has_ended:  # it has closed its ledger, and written where that ends
        return _as_reserved(replace(found, ledger_missing=True), reservation, "its ledger has lost its end")
    if known.budget is not None:
        plan = _reservation_in(folder)
        if plan is None or not known.budget.holds(rho(plan, known.budget.order)):
            return _as_reserved(found, reservation, "its whole plan was admitted, before any result")
    if has_ended:
        return found
    counted = _as_reserved(found, reservation, found.note)
    if counted.ledger is None:
        return counted
    left = [round_ for round_, count in counted.ledger.rounds.items() if count > ledger.rounds.get(round_, 0)]
    return replace(found, ledger=replace(counted.ledger, rounds=Counter(ledger.rounds) + Counter(left)))


def _by_ledger(known: RunCost, path: Path) -> RunCost:
    """The cost by a ledger; None where it is missing or not intact."""
    try:
        found = contents(path)
    except ConfigError as error:
        return replace(known, note=str(error).removesuffix("."), ledger_missing=True)
    ledger = found.ledger
    known = replace(known, not_private_reason=ledger.not_private_reason or known.not_private_reason)
    if ledger.lost is not None:
        return replace(known, note=f"its ledger has lost lines: {ledger.lost}", ledger_missing=True)
    early = "its ledger ends early: the run was killed, or lines are missing and more was spent"
    identity = hashlib.sha256(path.read_bytes()).hexdigest() if "run" in found.header else known.identity
    return replace(known, ledger=ledger, note=early if ledger.incomplete else "", identity=identity)


def _as_reserved(known: RunCost, reservation: Callable[[], Ledger | None], reason: str) -> RunCost:
    """The cost of a run whose ledger does not count."""
    ledger = reservation()
    if ledger is None:
        return replace(known, ledger=None, note=f"{reason}, and its plan is missing too", ledger_missing=True)
    return replace(known, ledger=ledger, note=f"{reason}: counted as its whole plan")


def _reservation_in(folder: Path) -> Ledger | None:
    try:
        return ledger_so_far(folder / RESERVED_LEDGER)
    except ConfigError:
        return None


def _sent_reservation(client: MlflowClient, run_id: str) -> Ledger | None:
    """The reservation in the store. (A folder may be out of date: the run may have been resumed elsewhere.)"""
    with tempfile.TemporaryDirectory() as copied, suppress(MlflowException, OSError):
        client.download_artifacts(run_id, RESERVED_LEDGER, copied)
        return _reservation_in(Path(copied))
    return None
