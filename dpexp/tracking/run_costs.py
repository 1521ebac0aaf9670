"""The privacy cost of each run on a data set; it is never less than what the run has released.

A run that has ended, with an intact ledger in its folder, counts as that; if it was killed, with a round more. A run
that is running, is elsewhere or has lost its ledger counts as its reservation: the most that it may release, which it
sends to its store before its first round.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
from dpexp.tracking.job_folder import RESERVED, RUN, is_running
from dpexp.tracking.provenance import HOST, without_passwords
from dpexp.tracking.read import existing, search

DATA_ID = "dpexp.data_id"  # tags
BUDGET = "dpexp.budget"
AUDITS = "dpexp.audit_trainings"  # of jobs whose audit trained on the data too; none does any more
_LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class RunCost:
    """What a run counts as.

    Attributes:
        name, run_id, user, status: of the run; "" if unknown.
        ledger: what it counts as; None: unknown.
        note: why that is not simply its ledger; "" if it is.
        ledger_missing: its ledger is lost, so that the cost is unknown, or at most that of `ledger`, its reservation.
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


def runs_on(client: MlflowClient, uri: str, data_id: str) -> list[Run]:
    """The runs with that `data.id`, oldest first."""
    try:
        experiments, token = [], None
        while token != "":
            page = client.search_experiments(view_type=ViewType.ALL, page_token=token)
            experiments += [experiment.experiment_id for experiment in page]
            token = page.token or ""
        found = [
            run
            for run in search(client, experiments, f"tags.`{DATA_ID}` LIKE '%'", ViewType.ALL)
            if run.data.tags[DATA_ID] == data_id
        ]
    except MlflowException as error:
        raise ConfigError(f"uri={without_passwords(uri)} cannot be read: {one_line(error)}") from error
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def cost_of_run(client: MlflowClient, run: Run) -> RunCost:
    """The cost of a run, by its folder if it ran last on this machine."""
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
    folder, reservation = Path(tags.get(OUTPUT, "")), partial(_sent_reservation, client, run_id)
    if AUDITS in tags:
        return _as_reserved(known, reservation, "its audit trains on the data too")
    if tags.get("dpexp.host") != HOST or not _is_folder_of(folder, run_id):
        return _as_reserved(known, reservation, "its folder is not here")
    known = replace(known, identity=str(folder.resolve()))
    running = is_running(folder)
    unknown = running is None or not (folder / f"{RUN}.lock").exists()  # the lock file may have been deleted
    if running or (unknown and status == "RUNNING"):
        return _as_reserved(known, reservation, "it is running")
    if status == "RUNNING":
        known = replace(known, status="KILLED")  # the next job in its experiment will tell the store
    return _of_ended(known, folder, reservation)


def cost_of_job(folder: Path) -> RunCost:
    """The cost of the job in a folder, tracked or not."""
    configuration = folder / "config.yaml"
    cfg = yaml.safe_load(configuration.read_text()) if configuration.exists() else {}
    cfg = cfg if isinstance(cfg, Mapping) else {}
    privacy, audit = cfg.get("privacy", {}), cfg.get("audit")
    delta = privacy.get("delta")
    known = RunCost(
        str(folder), (folder / RUN).read_text() if (folder / RUN).exists() else "", "", "", None, "",
        delta=float(delta) if delta is not None else None, identity=str(folder.resolve()),
        budget=budget(privacy["budget"]) if privacy.get("budget") else None,
    )  # fmt: skip
    if privacy.get("enabled") is False:
        return replace(known, note="it was trained without privacy", not_private_reason="trained without privacy")
    reservation = partial(_reservation_in, folder)
    if isinstance(audit, Mapping) and audit.get("canary_type") == "mislabelled":  # of an earlier version
        return _as_reserved(known, reservation, "its audit trains on the data too")
    if is_running(folder) is not False:
        return _as_reserved(known, reservation, "it is running")
    return _of_ended(known, folder, reservation)


def cost_of_ledger(path: Path) -> RunCost:
    """The cost of a ledger file."""
    return _of_ledger(RunCost(str(path), "", "", "", None, "", identity=str(path.resolve())), path)


def distinct_runs(costs: list[RunCost]) -> list[RunCost]:
    """Each run once, if it was found in several places; the first stays."""
    return list({cost.identity: cost for cost in reversed(costs)}.values())[::-1]


def _is_folder_of(folder: Path, run_id: str) -> bool:
    """Whether a folder is that run's: another machine may have one of the same name."""
    try:
        return (folder / RUN).read_text() == run_id
    except OSError:
        return False


def _of_ended(known: RunCost, folder: Path, reservation: Callable[[], Ledger | None]) -> RunCost:
    """The cost of a run that has ended in a folder of this machine."""
    found = _of_ledger(known, folder / _LEDGER)
    if found.ledger is None:
        return _as_reserved(found, reservation, found.note)
    finished = known.status in ("FINISHED", "FAILED") or (folder / "result.json").exists()
    if found.ledger.incomplete and finished:  # a training that ends closes its ledger
        return _as_reserved(found, reservation, "its ledger has lost its end", lost=True)
    if known.budget is not None and _admitted_by_whole_plan(folder, known.budget):
        return _as_reserved(found, reservation, "its whole plan was admitted, before any result")
    if not found.ledger.incomplete:
        return found
    plan = _as_reserved(found, reservation, found.note)
    return plan if plan.ledger is None else replace(found, ledger=_one_more(found.ledger, plan.ledger))


def _of_ledger(known: RunCost, path: Path) -> RunCost:
    """The cost by a ledger; None where it is missing or not intact."""
    try:
        found = contents(path)
    except ConfigError as error:
        return replace(known, note=str(error).removesuffix("."), ledger_missing=True)
    ledger = found.ledger
    reason = ledger.not_private_reason or known.not_private_reason
    if ledger.lost is not None:
        note = f"its ledger has lost lines: {ledger.lost}"
        return replace(known, note=note, ledger_missing=True, not_private_reason=reason)
    early = "its ledger ends early: the run was killed, or lines are missing and more was spent"
    return replace(
        known,
        ledger=ledger,
        note=early if ledger.incomplete else "",
        not_private_reason=reason,
        identity=hashlib.sha256(path.read_bytes()).hexdigest() if "run" in found.header else known.identity,
    )


def _one_more(ledger: Ledger, plan: Ledger) -> Ledger:
    """Adds the round in which a run was killed: one of each kind of round that its plan has left."""
    left = [round_ for round_, count in plan.rounds.items() if count > ledger.rounds.get(round_, 0)]
    return replace(plan, rounds=Counter(ledger.rounds) + Counter(left))


def _as_reserved(
    known: RunCost, reservation: Callable[[], Ledger | None], reason: str, lost: bool = False
) -> RunCost:  # fmt: skip
    """The cost of a run whose ledger does not count, or is `lost`."""
    ledger = reservation()
    if ledger is None:
        return replace(known, ledger=None, note=f"{reason}, and its plan is missing too", ledger_missing=True)
    lost = lost or known.ledger_missing
    return replace(known, ledger=ledger, note=f"{reason}: counted as its whole plan", ledger_missing=lost)


def _reservation_in(folder: Path) -> Ledger | None:
    try:
        return ledger_so_far(folder / RESERVED)
    except ConfigError:
        return None


def _sent_reservation(client: MlflowClient, run_id: str) -> Ledger | None:
    """The reservation in the store. (A folder may be out of date: the run may have been resumed elsewhere.)"""
    with tempfile.TemporaryDirectory() as copied, suppress(MlflowException, OSError):
        client.download_artifacts(run_id, RESERVED, copied)
        return _reservation_in(Path(copied))
    return None


def _admitted_by_whole_plan(folder: Path, kept: Budget) -> bool:
    """Whether a job was admitted by its whole plan (see `tracking.data_budget`), or may have been: the plan is lost."""
    plan = _reservation_in(folder)
    return plan is None or not kept.holds(rho(plan, kept.order))


def check_same_adjacency(costs: Sequence[RunCost], data_id: str) -> None:
    """Refuses runs that are stated for several adjacencies or privacy units."""
    stated: dict[str, str] = {}  # adjacency -> the name of the first run
    for cost in costs:
        if cost.ledger is not None and cost.has_released:
            unit = f" of a {cost.ledger.unit}" if cost.ledger.record else ""
            stated.setdefault(cost.ledger.adjacency + unit, cost.name)
    if len(stated) > 1:
        (first, one), (second, other) = list(stated.items())[:2]
        raise ConfigError(
            f"data.id={data_id}: {one} is stated for adjacency={first}, and {other} for adjacency={second}; no theorem "
            f"composes them, so choose privacy.adjacency={first} and a sampling policy that may claim it."
        )
