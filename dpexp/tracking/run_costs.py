"""What each run on a data set counts as: its ledger, or its whole plan while nobody knows how far that will be carried
out."""

import fnmatch
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
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
from dpexp.tracking.client import OUTPUT
from dpexp.tracking.job_folder import BEGUN, PROMISED, RUN, under_way
from dpexp.tracking.provenance import HOST, without_passwords
from dpexp.tracking.read import existing, search

DATA_ID = "dpexp.data_id"  # tags
BUDGET = "dpexp.budget"
AUDITS = "dpexp.audit_trainings"  # on the data, besides the job's own
RELEASED = "dpexp.ledger_state"  # "nothing", of a run that ended before its ledger was begun
_LEDGER = "ledger.jsonl"
_TOLD = ("ledger*.jsonl", "ledger*.end.json", PROMISED)


@dataclass(frozen=True)
class RunCost:
    """A run, and what it counts as.

    Attributes:
        name, run_id, user, status: of the run; "" where nobody knows.
        ledger: what it counts as; None: that is unknown.
        note: why that is not its ledger as it stands, or what is the matter with it; "" if nothing is.
        lost: its ledger is not at hand, so that what was spent is not known, or only that it is no more than the plan.
        exposed: why its (ε, δ) does not cover what it shows, if it does not.
        delta: of its configuration; `mark`: the same for the same run, wherever it was found.
        kept: the budget that it kept, if any.
    """

    name: str
    run_id: str
    user: str
    status: str
    ledger: Ledger | None
    note: str
    ledger_missing: bool = False
    exposed: str | None = None
    delta: float | None = None
    identity: str = ""
    kept: Budget | None = None


def reserve(output: Path, ledger: Ledger) -> None:
    """Says in a job's folder what it may come to release, before anybody is told that the job runs."""
    beside = output / f"{PROMISED}.part"
    write_ledger(beside, ledger)
    beside.replace(output / PROMISED)


def costs_in(uri: str, data_id: str) -> list[RunCost]:
    """Of all runs of a store with that `data.id`, whatever their experiment, the oldest first; deleted, failed, killed
    and running ones included.

    Raises:
        ConfigError: there is no such store, or it cannot be read.
    """
    client = existing(uri)
    return [cost_of_run(client, run) for run in runs_on(client, uri, data_id)]


def kept_in(uri: str, data_id: str) -> list[str]:
    """The budgets that those runs kept, as their tags say."""
    found = runs_on(existing(uri), uri, data_id)
    return [run.data.tags[BUDGET] for run in found if BUDGET in run.data.tags]


def runs_on(client: MlflowClient, uri: str, data_id: str) -> list[Run]:
    """Those runs. One without a folder never came to training.

    Raises:
        ConfigError: the store cannot be read.
    """
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
        raise ConfigError(f"uri={without_passwords(uri)} cannot be read: {' '.join(str(error).split())}") from error
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def cost_of_run(client: MlflowClient, run: Run) -> RunCost:
    """What a run counts as, from its folder if that is here, else from what it has sent to its store."""
    tags, run_id, status = run.data.tags, run.info.run_id, run.info.status
    private = tags.get("dpexp.private", "yes")
    said = run.data.params.get("privacy.delta")
    known = RunCost(
        run.info.run_name or run_id, run_id, tags.get("mlflow.user", ""), status, None, "",
        exposed=None if private == "yes" else private.removeprefix("no: "), delta=float(said) if said else None,
        kept=Budget(**json.loads(tags[BUDGET])) if BUDGET in tags else None,
    )  # fmt: skip
    if private.startswith("no: trained without"):
        return replace(known, note="it was trained without privacy", identity=run_id)
    folder = Path(tags[OUTPUT])
    if _is_at(folder, run_id):
        running = under_way(folder)
        unlocked = not (folder / f"{RUN}.lock").exists()  # somebody has cleared it away
        if running is None or unlocked or (status == "RUNNING" and tags.get("dpexp.host") != HOST):
            running = status == "RUNNING"
        elif status == "RUNNING" and not running:
            known = replace(known, status="KILLED")  # which the next job in its experiment will tell the store
        nothing = not (folder / BEGUN).exists()
        return _from_folder(replace(known, identity=str(folder.resolve())), folder, running, nothing, AUDITS in tags)
    if tags.get("dpexp.host") == HOST and _never_came_to_train(folder):
        return replace(known, ledger=Ledger("", {}), note="it ended before its first round", identity=run_id)
    with tempfile.TemporaryDirectory() as copied:
        try:
            for artifact in sorted(client.list_artifacts(run_id), key=lambda one: str(one.path)):  # ends before ledgers
                if any(fnmatch.fnmatch(artifact.path, pattern) for pattern in _TOLD):
                    client.download_artifacts(run_id, artifact.path, copied)
        except (MlflowException, OSError) as error:
            why = f"its folder is not here, and its artifacts cannot be fetched: {' '.join(str(error).split())[:200]}"
            return replace(known, note=why, ledger_missing=True, identity=run_id)
        nothing = tags.get(RELEASED) == "nothing"
        known = replace(known, identity=run_id)
        found = _from_folder(known, Path(copied), status == "RUNNING", nothing, AUDITS in tags)
        if status not in ("RUNNING", "FINISHED") and found.ledger is not None and found.ledger.rounds:
            return _at_most(found, Path(copied), "its folder is not here, and it may have been resumed", lost=True)
        return found


def cost_of_job(folder: Path) -> RunCost:
    """What the job in a folder counts as, whether or not it was tracked."""
    configuration = folder / "config.yaml"
    cfg = yaml.safe_load(configuration.read_text()) if configuration.exists() else {}
    privacy = cfg.get("privacy", {}) if isinstance(cfg, Mapping) else {}
    delta = privacy.get("delta")
    run_id = (folder / RUN).read_text() if (folder / RUN).exists() else ""
    known = RunCost(
        str(folder), run_id, "", "", None, "",
        delta=float(delta) if delta is not None else None, identity=str(folder.resolve()),
        kept=budget(privacy["budget"]) if privacy.get("budget") else None,
    )  # fmt: skip
    if privacy.get("enabled") is False:
        return replace(known, note="it was trained without privacy", exposed="trained without privacy")
    nothing = (folder / PROMISED).exists() and not (folder / BEGUN).exists()
    audit = cfg.get("audit") if isinstance(cfg, Mapping) else None
    audits = isinstance(audit, Mapping) and audit.get("canaries") == "mislabelled"
    return _from_folder(known, folder, under_way(folder) is not False, nothing, audits)


def cost_from(path: Path) -> RunCost:
    """What a ledger file counts as."""
    known = RunCost(str(path), "", "", "", None, "", identity=str(path.resolve()))
    return _from_ledgers(known, [path])


def once(charges: list[RunCost]) -> list[RunCost]:
    """Each run once, though it was found in two places; the first stays."""
    return list({charge.identity: charge for charge in reversed(charges)}.values())[::-1]


def _is_at(folder: Path, run_id: str) -> bool:
    """Whether a folder is here and that run's: another machine may have one of the same name."""
    try:
        return (folder / RUN).read_text() == run_id
    except OSError:
        return False


def _never_came_to_train(folder: Path) -> bool:
    """Whether a job was killed between telling the store of its run and its folder, which it does before it trains."""
    left = [name for name in (RUN, BEGUN, _LEDGER) if (folder / name).exists()]
    return (folder / PROMISED).exists() and not left and under_way(folder) is False


def _from_folder(known: RunCost, folder: Path, running: bool, nothing: bool, audits: bool) -> RunCost:
    """
    Args:
        nothing: if there is no ledger in the folder, that is because none was begun.
        audits: the job's audit trains on the data too, of which its ledger knows nothing.
    """
    begun = sorted(folder.glob(_TOLD[0]))
    if running:
        return _at_most(known, folder, "it is running", lost=False)
    if not begun and nothing:
        return replace(known, ledger=Ledger("", {}), note="it ended before its first round")
    found = _from_ledgers(known, begun)
    known = replace(known, exposed=found.exposed)
    if audits:
        return _at_most(known, folder, "its audit trains on the data too", lost=False)
    if folder / _LEDGER not in begun:
        return _at_most(known, folder, "its ledger is missing", lost=True)
    if found.ledger_missing or found.ledger is None:
        return _at_most(known, folder, found.note, lost=True)
    ended = known.status in ("FINISHED", "FAILED") or (folder / "result.json").exists()
    if found.ledger.incomplete and ended:  # whoever ends a training closes its ledger
        return _at_most(known, folder, "its ledger has lost its end", lost=True)
    if known.kept is not None and _admitted_whole(folder, known.kept):
        return _at_most(known, folder, "its whole plan was admitted, before any result", lost=False)
    return found


def _admitted_whole(folder: Path, kept: Budget) -> bool:
    """Whether a job was admitted by its whole plan (see `tracking.budget`), or may have been: its plan is lost."""
    try:
        return not kept.holds(rho(ledger_so_far(folder / PROMISED), kept.order))
    except ConfigError:
        return True


def _from_ledgers(known: RunCost, paths: list[Path]) -> RunCost:
    """The ledger of most rounds among a run's own and those that it rescued."""
    read, why = [], ""
    for path in paths:
        try:
            read.append((contents(path), path))
        except ConfigError as error:
            why = str(error).removesuffix(".")
    if why or not read:
        return replace(known, note=why, ledger_missing=True)
    found, path = max(read, key=lambda pair: len(pair[0].ledger))
    ledger = found.ledger
    if ledger.lost is not None:
        return replace(
            known,
            note=f"its ledger has lost lines: {ledger.lost}",
            ledger_missing=True,
            exposed=ledger.not_private_reason,
        )
    early = "its ledger ends early: the run was killed, or lines are missing and more was spent"
    return replace(
        known,
        ledger=ledger,
        note=early if ledger.incomplete else "",
        exposed=ledger.not_private_reason or known.exposed,
        identity=hashlib.sha256(path.read_bytes()).hexdigest() if "run" in found.header else known.identity,
    )


def _at_most(known: RunCost, folder: Path, why: str, lost: bool) -> RunCost:
    try:
        ledger = ledger_so_far(folder / PROMISED)
    except ConfigError:
        return replace(known, note=f"{why}, and its plan is not at hand", ledger_missing=True)
    return replace(known, ledger=ledger, note=f"{why}: counted as its whole plan", ledger_missing=lost)


def adjacencies(charges: list[RunCost]) -> Iterator[tuple[str, str]]:
    """(adjacency, name of a run) for those adjacencies, and privacy units other than a record, that the runs are stated
    for; of each the first run."""
    seen = set()
    for charge in charges:
        if charge.ledger is None or not charge.ledger.rounds:
            continue
        stated = charge.ledger.adjacency + (f" of a {charge.ledger.unit}" if charge.ledger.record else "")
        if stated not in seen:
            seen.add(stated)
            yield stated, charge.name
