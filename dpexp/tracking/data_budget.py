"""A budget for all runs on one data set, kept where several jobs of a machine start at once.

A job reserves its whole plan by beginning its run: under a lock it looks at what all runs count as, is refused or
writes its plan into its folder, and begins. So there are no books beside the runs themselves.

Two rules admit a job, and which one does is settled by the plan of the first, before its first round:

- *Whole plan.* No other run on these data has released anything or may be about to, and the Rényi filter has no room
  for the job's plan. All of its rounds were fixed before the first result, so that their composition by `pld` is what
  counts. To stop early may be to choose by a result, so the job counts as its whole plan ever after. That leaves the
  filter no room for a later run: to go on after a result by another rule than the one until then could cost δ twice.
- *Rényi filter*, over all rounds of all runs, for everything else. It holds however runs are planned, which a sum of
  privacy losses, and the natural filter of f-DP, do not (arXiv 2602.06756).
"""

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from getpass import getuser
from pathlib import Path

from filelock import FileLock, Timeout
from mlflow import MlflowClient
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from sqlalchemy import make_url

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.accounting.multiple_runs import Budget, budget, rho
from dpexp.accounting.releases import releases
from dpexp.config import audit_trainings
from dpexp.errors import ConfigError
from dpexp.reporting.wording import up
from dpexp.tracking.client import OUTPUT
from dpexp.tracking.job_folder import PROMISED, RUN
from dpexp.tracking.run_costs import AUDITS, BUDGET, DATA_ID, RunCost, adjacencies, cost_of_run, reserve, runs_on

console = Console()

_PATIENCE = 600  # seconds for others that look at the same data set's runs


def budget_of(cfg: DictConfig) -> Budget | None:
    """`privacy.budget`.

    Raises:
        ConfigError: it is none.
    """
    if cfg.privacy.budget is None:
        return None
    return budget(OmegaConf.to_container(cfg.privacy.budget, resolve=True))


def tags_of(cfg: DictConfig) -> dict[str, str]:
    """What tells others of a run on a named data set. A run that only plans spends nothing on it."""
    if cfg.data.id is None or not _spends(cfg):
        return {}
    kept, audits = budget_of(cfg), audit_trainings(cfg)
    about = {BUDGET: json.dumps(asdict(kept))} if kept else {}
    return {DATA_ID: cfg.data.id} | about | ({AUDITS: str(audits)} if audits else {})


def _spends(cfg: DictConfig) -> bool:
    return bool(cfg.train) or audit_trainings(cfg) > 0


@contextmanager
def reserved(cfg: DictConfig, client: MlflowClient, asked: Ledger | None, output: Path) -> Iterator[None]:
    """While a run on a data set with a name is begun: no other on the same begins meanwhile, at least on this machine.

    Args:
        asked: what the job will have released at its end, at most; None if it is not private.

    Raises:
        ConfigError: with it there would be more than `privacy.budget` allows, or nobody knows.
    """
    if cfg.data.id is None:
        yield
        return
    kept = budget_of(cfg)
    with _lock(cfg):
        if kept is not None and asked is not None:
            _refuse_overdraft(cfg, client, kept, asked, output)
        if asked is not None and _spends(cfg):
            reserve(output, asked)
        yield


@contextmanager
def _lock(cfg: DictConfig) -> Iterator[None]:
    """Beside the store where that is a file, else one for all other stores of a user, whose names may be several."""
    uri = make_url(cfg.tracking.uri) if "sqlite" in cfg.tracking.uri.partition(":")[0] else None
    where = Path(uri.database if uri and uri.database else Path(tempfile.gettempdir()) / f"dpexp-{getuser()}").resolve()
    name = hashlib.sha256(cfg.data.id.encode()).hexdigest()[:16]
    path = where.with_name(f"{where.stem}.{name}.budget.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # where that fails, FileLock would try for ever
        with FileLock(path, timeout=_PATIENCE):
            yield
    except Timeout as error:
        raise ConfigError(f"privacy.budget: {path} has been held by another job for {_PATIENCE} s.") from error


def _refuse_overdraft(cfg: DictConfig, client: MlflowClient, kept: Budget, asked: Ledger, output: Path) -> None:
    data_id = cfg.data.id
    found = runs_on(client, cfg.tracking.uri, data_id)
    resumes = cfg.checkpoint.resume
    runs = [run for run in found if not (resumes and _is_own(run.info.run_id, run.data.tags, output))]
    for run in runs:
        other = run.data.tags.get(BUDGET)
        if other is not None and json.loads(other) != asdict(kept):
            before = Budget(**json.loads(other))
            raise ConfigError(
                f"privacy.budget={kept} (Rényi order {kept.order:g}) is not the one that {run.info.run_name} kept for "
                f"data.id={data_id}, which is {before} (order {before.order:g}); a budget holds only if it was fixed "
                "before the first run was looked at, so give that one."
            )
    taken = budget_used([cost_of_run(client, run) for run in runs], kept, data_id)
    for name, note in taken.lost:
        warnings.warn(f"data.id={data_id}: of the run {name}, {note}")
    own = RunCost("this job", "", "", "", asked, "")
    _same_adjacency([*taken.charges, own], data_id)
    wanted = rho(asked, kept.order)
    name, worth = escape(data_id), f"ε = {up(kept.gaussian(wanted), 3)}"
    admitted = ledger_so_far(output / PROMISED) if resumes else asked
    whole = not kept.holds(rho(admitted, kept.order))
    if not whole and kept.holds(taken.spent + wanted):
        console.print(
            f"Budget of {kept} for data.id={name}: the Rényi filter over all rounds admits this job, whose plan takes "
            f"{_percent(wanted, kept)}; before it, {taken.said}.",
            soft_wrap=True,
        )
        return
    if whole and not any(charge.ledger.rounds for charge in taken.charges if charge.ledger):
        planned = epsilon(asked, kept.delta)
        worth = f"ε = {up(planned, 4)} by pld"
        if not _only_repeats(admitted, asked):
            worth += ", of which some rounds of several kinds would be done again, which its whole plan did not have"
        elif planned <= kept.epsilon:
            console.print(
                f"Budget of {kept} for data.id={name}: its whole plan admits this job, with {worth}, since no other "
                "run has released anything. It gives nothing back if it stops early, and no later run fits.",
                soft_wrap=True,
            )
            return
    raise ConfigError(
        f"privacy.budget of {kept} for data.id={data_id}: {taken.said}; this job's plan asks for "
        f"{_percent(wanted, kept)} ({worth}), so ask for less, or see python -m dpexp account data.id={data_id}."
    )


def _only_repeats(admitted: Ledger, asked: Ledger) -> bool:
    """Whether a job that is resumed does what was admitted, but for more rounds of the one kind that it has many of:
    how many fit is a number that no result has a part in (mechanisms that are totally ordered when composed: arXiv
    2602.15815). Which of several kinds to repeat may be chosen by one."""
    before, now = releases(admitted), releases(asked)
    more = {release for release, count in now.items() if count > before.get(release, 0)}
    many = {release for release, count in before.items() if count > 1}
    return not more or (len(many) == 1 and more <= many)


@dataclass(frozen=True)
class BudgetUse:
    """What runs have taken of a budget.

    Attributes:
        spent: ρ at the budget's order, of the runs' ledgers, and of the plans of those that run or lost theirs.
        whole: ε by pld of the only run's whole plan, if that is what keeps the budget, and not the filter.
        said: the same in words, with what is left.
        lost: names of runs whose ledger is not at hand, with what that means.
    """

    charges: list[RunCost]
    spent: float
    whole: float | None
    said: str
    lost: list[tuple[str, str]]


def budget_used(charges: Sequence[RunCost], kept: Budget, data_id: str) -> BudgetUse:
    """Raises:
    ConfigError: no budget can be kept, because of a run that is not private, is unknown, or has no Rényi bound, or of
        runs that are stated for different adjacencies.
    """
    for charge in charges:
        if charge.exposed is not None:
            raise ConfigError(
                f"privacy.budget of {kept} for data.id={data_id} cannot be kept: the run {charge.name} is not private "
                f"({charge.exposed}), so that nothing bounds what it showed."
            )
        if charge.ledger is None:
            raise ConfigError(
                f"privacy.budget of {kept} for data.id={data_id} cannot be kept: what the run {charge.name} spent is "
                f"unknown ({charge.note}); bring back its ledger, or begin another data.id and say why."
            )
    _same_adjacency(charges, data_id)
    costs = []
    for charge in charges:
        try:
            costs.append(rho(charge.ledger, kept.order) if charge.ledger and charge.ledger.rounds else 0.0)
        except ConfigError as error:
            raise ConfigError(f"data.id={data_id}, run {charge.name}: {error}") from error
    spent = math.fsum(costs)
    released = [charge for charge in charges if charge.ledger is not None and charge.ledger.rounds]
    whole = None
    if len(released) == 1 and released[0].kept == kept and not kept.holds(spent):
        assert released[0].ledger is not None
        alone = epsilon(released[0].ledger, kept.delta)
        whole = alone if alone <= kept.epsilon else None
    left = max(0.0, kept.limit - spent)
    worth = math.floor(1000 * kept.gaussian(left)) / 1000
    said = (
        f"{_percent(spent, kept)} is spent or promised by {len(charges)} run{'s' * (len(charges) != 1)}, "
        f"{math.floor(1000 * left / kept.limit) / 10:g} % is left, worth one Gaussian release of ε = {worth:g}"
        if whole is None
        else f"the first run's whole plan takes it, with ε = {up(whole, 4)} by pld, and nothing is left"
    )
    lost = [(charge.name, charge.note) for charge in charges if charge.ledger_missing]
    return BudgetUse(list(charges), spent, whole, said, lost)


def _percent(part: float, kept: Budget) -> str:
    percent = 100 * part / kept.limit
    return f"{up(percent, 3) if percent < 999 else math.ceil(percent)} %"


def _same_adjacency(charges: Sequence[RunCost], data_id: str) -> None:
    found = list(adjacencies(list(charges)))
    if len(found) > 1:
        (first, one), (second, other) = found[:2]
        raise ConfigError(
            f"data.id={data_id}: {one} is stated for adjacency={first}, and {other} for adjacency={second}; no theorem "
            f"composes them, so choose privacy.adjacency={first} and a sampling policy that may claim it."
        )


def _is_own(run_id: str, tags: Mapping[str, str], output: Path) -> bool:
    """Whether that is the run of the job that is gone on with in a folder, whose ledger is in what is asked for."""
    try:
        if (output / RUN).read_text() != run_id:
            return False
    except OSError:
        return False
    folder = Path(tags.get(OUTPUT, output))
    return not folder.exists() or folder.samefile(output)
