"""A privacy budget for all runs on one data set, also of jobs of a machine that start at once.

A job reserves its whole plan when its run starts: under a lock it computes what all runs count as, is refused or writes
its plan into its folder, and starts. The runs themselves are the only record.

One of two rules admits a job; the first job's plan decides which, before its first round:

- *Whole plan.* No other run on these data has released anything or may be about to, and the job's plan exceeds the
  Rényi filter. All of its rounds were fixed before the first result, so their composition by `pld` counts. Stopping
  early may be a choice by a result, so the job counts as its whole plan for good. The filter then admits no later run:
  continuing after a result by another rule could cost δ twice.
- *Rényi filter*, over all rounds of all runs, in all other cases. It holds however runs are chosen; a sum of privacy
  losses and the natural filter of f-DP do not (arXiv 2602.06756).
"""

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from getpass import getuser
from pathlib import Path
from shlex import quote

from mlflow import MlflowClient
from omegaconf import DictConfig
from rich.console import Console

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.accounting.ledger.events import check_same
from dpexp.accounting.multiple_runs import Budget, budget, rho, runs_of_one_record
from dpexp.accounting.releases import releases
from dpexp.accounting.rounding import down, up
from dpexp.errors import ConfigError
from dpexp.tracking.client import database, locked
from dpexp.tracking.job_folder import RESERVED_LEDGER
from dpexp.tracking.run_costs import BUDGET, DATA_ID, RunCost, cost_of_run, is_run_of, reserve, runs_on

console = Console()


def data_tags(cfg: DictConfig) -> dict[str, str]:
    """Tags of a run on a named data set; none if the run only plans, which costs nothing."""
    if cfg.data.id is None or not cfg.train:
        return {}
    kept = cfg.privacy.budget and budget(cfg.privacy.budget)
    return {DATA_ID: cfg.data.id} | ({BUDGET: json.dumps(asdict(kept))} if kept else {})


@contextmanager
def reserved(cfg: DictConfig, client: MlflowClient, plan: Ledger | None, output: Path) -> Iterator[None]:
    """Reserves a job's plan while its run is created; no other run on the same data starts meanwhile on this machine.

    Args:
        plan: the most that the job will have released at its end; None if it is not private.
    """
    if cfg.data.id is None:
        yield
        return
    kept = cfg.privacy.budget and budget(cfg.privacy.budget)
    with locked(lock_of(cfg.tracking.uri, cfg.data.id), f"the runs on data.id={cfg.data.id}"):
        if plan is not None and kept is not None:
            _admit(cfg, client, kept, plan, output)
        if plan is not None and cfg.train:
            reserve(output, plan)
        yield


def lock_of(uri: str, data_id: str) -> Path:
    """A file beside a store that is a file; one for all other stores of a user, which may have several addresses."""
    base = database(uri) or Path(tempfile.gettempdir()) / f"dpexp-{getuser()}"
    return base.with_name(f"{base.stem}.{hashlib.sha256(data_id.encode()).hexdigest()[:16]}.budget.lock")


def _admit(cfg: DictConfig, client: MlflowClient, kept: Budget, plan: Ledger, output: Path) -> None:
    """Says which rule admits a job, or refuses it."""
    data_id, resumes = cfg.data.id, cfg.checkpoint.resume
    found = runs_on(client, cfg.tracking.uri, data_id)
    costs = [cost_of_run(client, run) for run in found if not (resumes and is_run_of(run, output))]
    for other in costs:
        if other.budget is not None and other.budget != kept:
            raise ConfigError(
                f"privacy.budget={kept} (Rényi order {kept.order:g}) is not the one that {other.name} kept for "
                f"data.id={data_id}, which is {other.budget} (order {other.budget.order:g}); a budget holds only if it "
                "was fixed before the first run was looked at, so give that one."
            )
    released = [cost.ledger for cost in costs if cost.ledger]
    check_same([*released, plan], f"data.id={data_id}: runs", "composed")
    costs = [
        one
        for one in costs  # all but private runs on other records than the plan's
        if not one.ledger or one.not_private_reason or len(runs_of_one_record([one.ledger, plan])) == 1
    ]
    used = budget_used(costs, kept, data_id)
    for run_cost in costs:
        if run_cost.ledger_missing:
            warnings.warn(f"data.id={data_id}: of the run {run_cost.name}, {run_cost.note}")
    cost = rho(plan, kept.order)
    worth = f"ε = {up(kept.gaussian(cost), 3)}"
    first = ledger_so_far(output / RESERVED_LEDGER) if resumes else plan  # which was admitted, or would be
    admitted = ""
    if kept.holds(rho(first, kept.order)):
        if kept.holds(used.spent + cost):
            admitted = f"the Rényi filter over all rounds admits this job, whose plan takes {_percent(cost, kept)}; "
            admitted += f"before it, {used.description}."
    elif not any(cost.ledger for cost in costs):
        planned = epsilon(plan, kept.delta)
        worth = f"ε = {up(planned, 4)} by pld"
        if not _repeats_allowed(first, plan):
            worth += ", with rounds of several types done again, which its whole plan did not have"
        elif planned <= kept.epsilon:
            admitted = f"its whole plan admits this job, with {worth}, since no other run on its records has released "
            admitted += "anything. It gives nothing back if it stops early, and no later run fits."
    if not admitted:
        raise ConfigError(
            f"privacy.budget of {kept} for data.id={data_id}: {used.description}; this job's plan asks for "
            f"{_percent(cost, kept)} ({worth}), so ask for less, or see "
            f"python -m dpexp account {quote(f'data.id={data_id}')}."
        )
    console.print(f"Budget of {kept} for data.id={data_id}: {admitted}", soft_wrap=True, markup=False)


def _repeats_allowed(admitted: Ledger, plan: Ledger) -> bool:
    """Whether a resumed job only adds rounds of the one type that was admitted more than once.

    How many of those fit is a number that depends on no result (mechanisms that are totally ordered when composed:
    arXiv 2602.15815). Which of several types to repeat may be chosen by a result.
    """
    before, now = releases(admitted), releases(plan)
    more = {release for release, count in now.items() if count > before.get(release, 0)}
    repeated = {release for release, count in before.items() if count > 1}
    return not more or (len(repeated) == 1 and more <= repeated)


@dataclass(frozen=True)
class BudgetUse:
    """What runs have used of a budget.

    Attributes:
        spent: ρ at the budget's order, of the runs' ledgers, and of the plans of runs that run or lost theirs.
        whole: ε by pld of the only run's whole plan, if that plan keeps the budget and the filter does not.
        description: the use and the remaining budget.
    """

    spent: float
    whole: float | None
    description: str


def budget_used(costs: Sequence[RunCost], kept: Budget, data_id: str) -> BudgetUse:
    """What the runs have used of a budget: those that used one record, of all such sets of runs where the most is used.
    Only one run in a set, whose whole plan was admitted, may use more than the filter has."""
    for run in costs:
        if run.not_private_reason is not None:
            raise ConfigError(
                f"privacy.budget of {kept} for data.id={data_id} cannot be kept: the run {run.name} is not private "
                f"({run.not_private_reason}), so that nothing bounds what it showed."
            )
        if run.ledger is None:
            raise ConfigError(
                f"privacy.budget of {kept} for data.id={data_id} cannot be kept: what the run {run.name} spent is "
                f"unknown ({run.note}); bring back its ledger, or begin another data.id and say why."
            )
    released = [(run, run.ledger) for run in costs if run.ledger]
    check_same([ledger for _, ledger in released], f"data.id={data_id}: runs", "composed")
    try:
        spent_by = [rho(ledger, kept.order) for _, ledger in released]
    except ConfigError as error:
        raise ConfigError(f"data.id={data_id}: {error}") from error
    found = []
    for one in runs_of_one_record([ledger for _, ledger in released]):
        spent, whole = math.fsum(spent_by[k] for k in one), None
        if len(one) == 1 and released[one[0]][0].budget == kept and not kept.holds(spent):
            planned = epsilon(released[one[0]][1], kept.delta)
            whole = planned if planned <= kept.epsilon else None
        found.append((whole is None and not kept.holds(spent), spent, whole, len(costs) - len(released) + len(one)))
    _, spent, whole, count = max(found, key=lambda use: use[:2])
    left, others = max(0.0, kept.limit - spent), " (others are on disjoint parts)" * (count < len(costs))
    description = (
        f"{_percent(spent, kept)} is spent or reserved by {count} run{'s' * (count != 1)}{others}, "
        f"{down(100 * left / kept.limit, 3)} % is left, worth one Gaussian release of "
        f"ε = {down(kept.gaussian(left), 4)}"
        if whole is None
        else f"the first run's whole plan takes it{others}, with ε = {up(whole, 4)} by pld, and nothing is left"
    )
    return BudgetUse(spent, whole, description)


def _percent(part: float, kept: Budget) -> str:
    percent = 100 * part / kept.limit
    return f"{up(percent, 3) if percent < 999 else math.ceil(percent)} %"
