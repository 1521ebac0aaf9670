"""What all runs on a named data set (`data.id`) have spent, and a budget (ε, δ) that all of them together keep.

A run counts as one ledger among its artifacts, which its tag `dpexp.counts_as` names:

- `planned_ledger.jsonl`, the most that the job will have released at its end. The store has it, and the tag, before
  the job's first round, and again before that of each resumption, then with the rounds that are done again.
- `ledger.jsonl`, once the job has ended and closed it, and the store gives back what was sent.

So neither machines, folders nor processes need to be there to know what a run costs. A job that was killed outright, or
whose server died, keeps its plan until it is resumed. If the artifact is missing or damaged, the cost is unknown.

A budget admits a job by the Rényi filter over all rounds of all runs (`dpexp.accounting.multiple_runs`), under a lock:
of jobs of a machine that start at once, each sees the plans of those before it.
"""

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from getpass import getuser
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from rich.console import Console
from scipy.optimize import brentq

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, incomplete_reason
from dpexp.accounting.ledger.events import check_same
from dpexp.accounting.ledger.integrity import end_of, read_end
from dpexp.accounting.ledger.reader import contents
from dpexp.accounting.multiple_runs import Budget, rho, runs_of_one_record
from dpexp.accounting.multiple_runs import budget as budget_of
from dpexp.accounting.rounding import down, up
from dpexp.errors import ConfigError
from dpexp.tracking.client import database, locked
from dpexp.tracking.job_folder import LEDGER, PLANNED_LEDGER, RUN
from dpexp.tracking.read import existing, pulled, readable, search

DATA_ID, BUDGET, COUNTS_AS = "dpexp.data_id", "dpexp.budget", "dpexp.counts_as"  # tags
MOST_NOISE = 1e3  # times that of a plan: how far a like one that fits is looked for

console = Console()


# A job's own run


def start(
    uri: str,
    client: MlflowClient,
    facts: Mapping[str, Any],
    planned: Ledger | None,
    output: Path,
    earlier: Run | None,
    begin: Callable[[], str],
) -> str:
    """Starts a job's run on a named data set, if its budget has room, and returns the run's id.

    From then on, the run counts as its plan.

    Args:
        facts: those of the job's record.
        planned: the planned ledger in the job's folder; None if nothing is asked of the budget, since the job is not
            private, or has run.
        earlier: the run of a resumed job.
        begin: creates the run, or opens it again, and returns its id.
    """
    data_id, given = facts["spends"]["data_id"], facts["spends"]["budget"]
    budget = budget_of(given) if given else None
    with locked(lock_of(uri, data_id), f"the runs on data.id={data_id}"):
        if planned is not None and budget is not None:
            _admit(uri, data_id, budget, planned, facts["delta"], earlier)
        run_id = begin()
        if not facts["spends"]["trains"]:  # it only plans, which costs nothing
            return run_id
        tags = {BUDGET: json.dumps(asdict(budget))} if budget else {}
        if (output / PLANNED_LEDGER).exists():
            client.log_artifact(run_id, str(output / PLANNED_LEDGER))
            tags[COUNTS_AS] = PLANNED_LEDGER
        # The last tag makes it one of the data set's runs.
        for tag, value in {**tags, DATA_ID: data_id}.items():
            client.set_tag(run_id, tag, value)
    return run_id


def end(client: MlflowClient, uri: str, run_id: str, output: Path) -> None:
    """Lets an ended run count as its ledger, if that is closed, and the store gives it back as it was sent.

    After an error of the folder or the store, the run goes on counting as its plan, which is never less than its cost.
    """
    with suppress(ConfigError, MlflowException, OSError):
        if _whole(output / LEDGER) == _artifact(uri, run_id, LEDGER):
            client.set_tag(run_id, COUNTS_AS, LEDGER)


def lock_of(uri: str, data_id: str) -> Path:
    """A file beside a store that is a file; one for all other stores of a user, which may have several addresses."""
    base = database(uri) or Path(tempfile.gettempdir()) / f"dpexp-{getuser()}"
    return base.with_name(f"{base.stem}.{hashlib.sha256(data_id.encode()).hexdigest()[:16]}.budget.lock")


# What runs cost


@dataclass(frozen=True)
class RunCost:
    """What a run counts as.

    Attributes:
        name: of the run, or its path.
        identity: equal for the same run, wherever it was found.
        shown: its id, user and status in the store.
        delta: that of its configuration.
        budget: the budget that it was held to, if any.
        ledger: what it counts as; None: what it spent is unknown, or has no bound.
        note: why it counts as its plan, or as nothing known; "" if it counts as its ledger.
    """

    name: str
    identity: str
    shown: str = ""
    delta: float | None = None
    budget: Budget | None = None
    ledger: Ledger | None = None
    note: str = ""


def costs_in(uri: str, data_id: str) -> list[RunCost]:
    """The costs of all runs of a store with that `data.id`, oldest first.

    Runs of all experiments count, also deleted, failed, killed and running ones.
    """
    client = existing(uri)
    with readable(uri):
        experiments, token = [], None
        while token != "":
            page = client.search_experiments(view_type=ViewType.ALL, page_token=token)
            experiments += [experiment.experiment_id for experiment in page]
            token = page.token or ""
        tagged = [*search(client, experiments, f"tags.`{DATA_ID}` LIKE '%'", ViewType.ALL)]
    found = [run for run in tagged if run.data.tags[DATA_ID] == data_id]
    return [_cost_of(uri, run) for run in sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))]


def cost_at(path: Path) -> RunCost:
    """The cost of the job in a folder, tracked or not, or of a ledger file."""
    folder = path.parent if path.name == LEDGER else path
    if not folder.is_dir():
        return _counted(RunCost(str(path), str(path.resolve())), path.name, partial(_whole, path))
    configuration, run = folder / "config.yaml", folder / RUN
    said = yaml.safe_load(configuration.read_text()) if configuration.exists() else None
    privacy: dict[str, Any] = (said or {}).get("privacy", {})
    delta, budget = privacy.get("delta"), privacy.get("budget")
    known = RunCost(
        str(path), run.read_text() if run.exists() else str(folder.resolve()), delta=float(delta) if delta else None,
        budget=budget_of(budget) if budget else None,
    )  # fmt: skip
    if privacy.get("enabled") is False:
        return replace(known, note=_not_private("trained without privacy"))
    by_ledger = _counted(known, LEDGER, partial(_whole, folder / LEDGER))
    if by_ledger.ledger is not None:
        return by_ledger
    by_plan = _counted(known, PLANNED_LEDGER, partial(_whole, folder / PLANNED_LEDGER))
    return by_ledger if by_plan.ledger is None else by_plan


def distinct_runs(costs: Sequence[RunCost]) -> list[RunCost]:
    """Each run once. A run that was found in several places counts as the most that any of them says."""
    found: dict[str, RunCost] = {}
    for cost in costs:
        before = found.setdefault(cost.identity, cost)
        if before.ledger is not None and cost.ledger is not None:
            most = Counter(before.ledger.rounds) | Counter(cost.ledger.rounds)  # the larger count of each kind
            found[cost.identity] = replace(before, ledger=replace(before.ledger, rounds=dict(most)))
        elif cost.ledger is None:
            found[cost.identity] = replace(before, ledger=None, note=cost.note)
    return [*found.values()]


def _cost_of(uri: str, run: Run) -> RunCost:
    tags, run_id, delta = run.data.tags, run.info.run_id, run.data.params.get("privacy.delta")
    shown = "  ".join(filter(None, (run_id, tags.get("mlflow.user"), run.info.status.lower())))
    known = RunCost(
        run.info.run_name or run_id, run_id, shown, float(delta) if delta else None,
        Budget(**json.loads(tags[BUDGET])) if BUDGET in tags else None,
    )  # fmt: skip
    private, counts_as = tags.get("dpexp.private", "yes"), tags.get(COUNTS_AS)
    if private != "yes":
        return replace(known, note=_not_private(private.removeprefix("no: ")))
    if counts_as not in (LEDGER, PLANNED_LEDGER):
        return replace(known, note=f"its tag {COUNTS_AS} names no ledger, as of an earlier version of dpexp")
    return _counted(known, counts_as, partial(_artifact, uri, run_id, counts_as))


def _counted(known: RunCost, name: str, read: Callable[[], Ledger]) -> RunCost:
    """The cost of a run as `read` gives its ledger, or why it is unknown.

    Args:
        known: what is known of the run without its ledger.
        name: the name of the ledger's file.
    """
    by_plan = "it counts as its plan, as no ledger of its end is there"
    try:
        return replace(known, ledger=read(), note=by_plan if name == PLANNED_LEDGER else "")
    except ConfigError as error:
        return replace(known, note=str(error).removesuffix("."))


def _artifact(uri: str, run_id: str, name: str) -> Ledger:
    """The ledger of that name among a run's artifacts."""
    with pulled(uri, run_id, name, end_of(Path(name)).name) as folder:
        return _whole(folder / name)


def _whole(path: Path) -> Ledger:
    """A plan, or the ledger of a run that has ended.

    Raises:
        ConfigError: it is missing, damaged or not closed, may have lost its end, or is of a run that is not private.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path.name}")
    try:
        found = contents(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(path), path.name)) from error
    ledger = found.ledger
    if ledger.incomplete:
        raise ConfigError(f"{path.name} ends early: {incomplete_reason(ledger)}")
    if "run" in found.header and read_end(path) is None:
        raise ConfigError(f"there is no {end_of(path).name} to show that {path.name} has not lost its end")
    if ledger.not_private_reason is not None:
        raise ConfigError(_not_private(ledger.not_private_reason))
    return ledger


def _not_private(reason: str) -> str:
    return f"it is not private ({reason}), so that nothing bounds what it showed"


# The budget


def _admit(uri: str, data_id: str, budget: Budget, planned: Ledger, delta: float, earlier: Run | None) -> None:
    """Refuses a job for which the budget has no room."""
    costs = costs_in(uri, data_id)
    if earlier is not None:
        costs = [cost for cost in costs if cost.identity != earlier.info.run_id]
    for other in costs:
        if other.budget is not None and other.budget != budget:
            raise ConfigError(
                f"privacy.budget={budget} (Rényi order {budget.order:g}) is not the one that {other.name} kept for "
                f"data.id={data_id}, which is {other.budget} (order {other.budget.order:g}); a budget holds only if it "
                "was fixed before the first run was looked at, so give that one."
            )
    check_same([*[cost.ledger for cost in costs if cost.ledger], planned], f"data.id={data_id}: runs", "composed")
    # Runs on parts of the data that are disjoint from this job's do not count; runs whose cost is unknown may.
    costs = [one for one in costs if not one.ledger or _may_share_a_record(one.ledger, planned)]
    spent, description = budget_used(costs, budget, data_id)
    cost = rho(planned, budget.order)
    asked = f"this job's plan asks for {_percent(cost, budget)}"
    if not budget.holds(spent + cost):
        fits = _epsilon_that_fits(planned, budget, budget.limit - spent, delta)
        advice = f"a plan like it fits at privacy.epsilon={fits}" if fits else "no plan like it fits"
        if earlier is not None:
            advice = "so it cannot go on"
        raise ConfigError(
            f"privacy.budget of {budget} for data.id={data_id}: {description}; {asked} (ε = "
            f"{up(epsilon(planned, delta), 4)} by pld); {advice}; see "
            f"python -m dpexp account {quote(f'data.id={data_id}')}."
        )
    console.print(
        f"Budget of {budget} for data.id={data_id}: {description}; {asked}, and fits.", soft_wrap=True, markup=False
    )


def _may_share_a_record(one: Ledger, other: Ledger) -> bool:
    """Whether one record may have been used by both runs: they are not on disjoint parts of the data."""
    return len(runs_of_one_record([one, other])) == 1


def _epsilon_that_fits(planned: Ledger, budget: Budget, left: float, delta: float) -> str | None:
    """The largest ε that fits into what is left, of plans with the same rounds and more noise; None: none fits.

    The noise of all queries grows by one factor.
    """

    def excess(log_factor: float) -> float:
        return rho(_noisier(planned, math.exp(log_factor)), budget.order) - left * (1 - 1e-6)

    highest = math.log(MOST_NOISE)
    if left <= 0 or not excess(0.0) > 0 >= excess(highest):
        return None
    found = _noisier(planned, math.exp(brentq(excess, 0.0, highest)))
    return down(epsilon(found, delta), 3)


def _noisier(planned: Ledger, factor: float) -> Ledger:
    rounds = {
        replace(round_, queries=tuple(query.noisier(factor) for query in round_.queries)): count
        for round_, count in planned.rounds.items()
    }
    return replace(planned, rounds=rounds)


def budget_used(costs: Sequence[RunCost], budget: Budget, data_id: str) -> tuple[float, str]:
    """What the runs have spent or plan, as ρ at the budget's order, and a description of it and of what is left.

    Runs on disjoint parts do not add up. The figure is the largest total that any single record can have been charged.

    Raises:
        ConfigError: the cost of a run is unknown, or the runs cannot be composed.
    """
    for run in costs:
        if run.ledger is None:
            raise ConfigError(
                f"privacy.budget of {budget} for data.id={data_id} cannot be kept: what the run {run.name} spent is "
                f"unknown ({run.note}); bring back that artifact of the run {run.identity}, or begin another data.id "
                "and say why."
            )
    ledgers = [run.ledger for run in costs if run.ledger]
    sets = runs_of_one_record(ledgers)
    try:
        spent_by = [rho(ledger, budget.order) for ledger in ledgers]
    except ConfigError as error:
        raise ConfigError(f"data.id={data_id}: {error}") from error
    spent, count = max((math.fsum(spent_by[k] for k in one), len(one)) for one in sets)
    runs = "1 run" if count == 1 else f"{count} runs"
    if count < len(ledgers):
        runs += " (others are on disjoint parts)"
    left = max(0.0, budget.limit - spent)
    return spent, (
        f"{_percent(spent, budget)} is spent or reserved by {runs}, {down(100 * left / budget.limit, 3)} % is left, "
        f"worth one Gaussian release of ε = {down(budget.gaussian(left), 4)}"
    )


def _percent(part: float, budget: Budget) -> str:
    percent = 100 * part / budget.limit
    return f"{up(percent, 3) if percent < 999 else math.ceil(percent)} %"
