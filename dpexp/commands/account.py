"""`python -m dpexp account SOURCE [SOURCE ...] [key=value ...]` says what ledgers cost, by any accountant, afterwards.

A SOURCE is a ledger file, a job's output folder or an MLflow run id. Several are composed, as runs on the same data.
With data.id=NAME it says what all runs on that data set have spent, by whom, and what a budget leaves:
see `account data.id=NAME --help`.

    accountant=pld    or rdp, moments, strong, basic, gdp; several as pld,rdp; or all
    delta=1e-5        default: the run's own
    epsilon=1         print the δ for this ε too
    adjacency=…       add_remove, replace_one or replace_null; default: the ledger's own
    figure=F.png      draw ε(δ), and the errors of whoever tests for one record
    write=true        log ε and the risk in words as metrics to the MLflow run
    uri=…             where MLflow runs are; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import check_delta, check_names, is_bound
from dpexp.accounting.ledger import ADJACENCIES, Ledger, early, joined, ledger_so_far
from dpexp.accounting.multiple_runs import Budget, budget
from dpexp.accounting.releases import claimable, unamplified
from dpexp.accounting.risk import risk
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.reporting.wording import in_words, up

console = Console()


@dataclass
class OfData:
    id: str = MISSING


@dataclass
class DataOptions:
    data: OfData = field(default_factory=OfData)
    uri: str | None = None
    budget: Any = None
    delta: float | None = None
    accountant: str = "pld"


def spent(arguments: Sequence[str]) -> dict[str, float]:
    """Prints what has been spent on a data set.

    Args:
        arguments: sources and options, as on the command line.

    Returns:
        `composed`: ε of the plain composition; where there is a budget, `spent` and `limit`: ρ and B of its filter; and
        `whole`: ε by pld of the whole plan that keeps it, if one does.
        Where a run is unknown these are of the others alone, and `unknown` says how many are.

    Raises:
        ConfigError: a store that cannot be read, or runs that cannot be composed.
    """
    from dpexp.tracking.run_costs import adjacencies, cost_from, cost_of_job, costs_in, kept_in, once

    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return {}
    cfg = _options([argument for argument in arguments if "=" in argument])
    stores = (cfg.uri or tracking_uri()).split(",")
    charges = [charge for uri in stores for charge in costs_in(uri, cfg.data.id)]
    for name in (argument for argument in arguments if "=" not in argument):
        charges.append(cost_of_job(Path(name)) if Path(name).is_dir() else cost_from(Path(name)))
    charges = once(charges)
    if not charges:
        raise ConfigError(f"data.id={cfg.data.id} has no runs in {', '.join(stores)}; give the jobs that name.")
    given = OmegaConf.to_container(cfg.budget) if OmegaConf.is_config(cfg.budget) else cfg.budget
    before = {one for uri in stores for one in kept_in(uri, cfg.data.id)}
    kept = budget(given) if given is not None else _kept([*before])
    delta = cfg.delta if cfg.delta is not None else kept.delta if kept else _common([c.delta for c in charges])
    check_delta(delta)
    known = [charge.ledger for charge in charges if charge.ledger is not None and charge.ledger.rounds]
    runs = f"{len(charges)} run{'s' * (len(charges) != 1)}"
    console.print(f"[bold]data.id={escape(cfg.data.id)}[/]: {runs}; ε by {cfg.accountant} at δ = {up(delta, 4)}")
    for charge in charges:
        if charge.ledger is None:
            rounds, cost = "?", "unknown"
        else:
            rounds = str(charge.ledger.training_rounds)
            cost = up(epsilon(charge.ledger, delta, cfg.accountant), 4) if charge.ledger.rounds else "0"
            cost = f"unknown, at most {cost}" if charge.ledger_missing else cost
        matter = [f"({charge.note})"] if charge.note else []
        facts = [
            charge.run_id,
            charge.user,
            charge.status.lower(),
            f"{rounds} rounds",
            f"ε = {cost}",
            charge.name,
            *matter,
        ]
        console.print(escape("  ".join(fact for fact in facts if fact)), soft_wrap=True, highlight=False)
    for charge in charges:
        if charge.ledger_missing:
            console.print(
                f"[bold red]What {escape(charge.name)} spent is unknown[/]: {escape(charge.note)}.", soft_wrap=True
            )
        if charge.exposed:
            console.print(
                f"[bold red]No ε covers what {escape(charge.name)} shows[/]: {escape(charge.exposed)}.", soft_wrap=True
            )
    stated = list(adjacencies(charges))
    if len(stated) > 1:
        raise ConfigError(
            f"data.id={cfg.data.id}: no theorem composes runs that are stated for different adjacencies: "
            + ", ".join(f"{name} for {adjacency}" for adjacency, name in stated)
            + "."
        )
    unknown = sum(charge.ledger is None or charge.exposed is not None for charge in charges)
    composed = epsilon(joined(known), delta, cfg.accountant) if known else 0.0
    found = {"composed": composed, "unknown": float(unknown)}
    lost = any(charge.ledger_missing for charge in charges)
    more = f"at most {up(composed, 4)}" if lost else up(composed, 4)
    if unknown:
        more = f"more than {up(composed, 4)}, by an amount that nobody knows"
    console.print(
        f"Plain composition by {cfg.accountant}: ε = {more}. It holds if what each run was to do had been fixed before "
        "the first was looked at.",
        soft_wrap=True,
    )
    if kept is None:
        console.print(
            "No budget was kept: budget='{epsilon: 8, delta: 1e-5}' says what one would leave.", soft_wrap=True
        )
        return found
    for other in (one for one in map(_budget, sorted(before)) if one != kept):
        console.print(
            f"[bold red]Not the budget that the jobs kept[/], which is {other}, and holds only if it stays as it was "
            "fixed before the first run:",
            soft_wrap=True,
        )
        _against(other, charges, cfg.data.id)
    return found | _against(kept, charges, cfg.data.id)


def _against(kept: Budget, charges: Sequence[Any], data_id: str) -> dict[str, float]:
    from dpexp.tracking.data_budget import budget_used

    counted = [charge for charge in charges if charge.ledger is not None and charge.exposed is None]
    taken = budget_used(counted, kept, data_id)
    if len(counted) < len(charges):
        console.print(f"[bold red]The budget of {kept} cannot be kept any more[/]; see the runs above.", soft_wrap=True)
    if taken.whole is not None:
        console.print(
            f"Budget of {kept}: {taken.said}. That holds because all of its rounds were fixed before the first result "
            "on these data, if all runs on them are counted here.",
            soft_wrap=True,
        )
        return {"spent": taken.spent, "limit": kept.limit, "whole": taken.whole}
    console.print(
        f"Budget of {kept}, by a Rényi filter of order {kept.order:g}: {taken.said}. "
        + (
            "[bold red]It is overdrawn[/], so that it holds for nothing."
            if not kept.holds(taken.spent)
            else "The budget holds also where runs were planned by looking at those before, if it was fixed before the "
            "first, and all of them are counted here."
        ),
        soft_wrap=True,
    )
    return {"spent": taken.spent, "limit": kept.limit}


def _options(given: list[str]) -> DataOptions:
    cfg = OmegaConf.to_object(OmegaConf.merge(DataOptions, OmegaConf.from_dotlist(given)))
    assert isinstance(cfg, DataOptions)
    check_names([cfg.accountant])
    if not is_bound(cfg.accountant):
        raise ConfigError(f"accountant={cfg.accountant} is an approximation, no bound; choose another.")
    return cfg


def _kept(found: Sequence[str]) -> Budget | None:
    """The budget that the runs kept.

    Raises:
        ConfigError: they kept different ones.
    """
    budgets = [*map(_budget, sorted(set(found)))]
    if len(budgets) > 1:
        raise ConfigError(f"the runs kept different budgets ({'; '.join(map(str, budgets))}); choose one by budget=….")
    return budgets[0] if budgets else None


def _budget(kept: str) -> Budget:
    return Budget(**json.loads(kept))


def _common(deltas: Sequence[float | None]) -> float:
    told = {delta for delta in deltas if delta is not None}
    if len(told) != 1:
        raise ConfigError("delta must be given: " + ("the runs differ in it." if told else "no run tells it."))
    return told.pop()


@dataclass
class Options:
    accountant: str = "pld"
    delta: float | None = None
    epsilon: float | None = None
    adjacency: str | None = None
    figure: str | None = None
    write: bool = False
    uri: str | None = None


@dataclass(frozen=True)
class Source:
    """A ledger with where it came from; δ and the MLflow run where they are known."""

    name: str
    ledger: Ledger
    delta: float | None = None
    run_id: str | None = None


def account(arguments: Sequence[str]) -> dict[str, float]:
    """Prints the cost of the ledgers that are named, and returns ε by accountant.

    Args:
        arguments: sources and options, as on the command line.

    Raises:
        ConfigError: a source that cannot be read, or a claim that cannot be made.
    """
    if any(argument.startswith("data.id=") for argument in arguments):
        from dpexp.commands import account

        return account.spent(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return {}
    given = OmegaConf.from_dotlist([argument for argument in arguments if "=" in argument])
    cfg: Options = OmegaConf.to_object(OmegaConf.merge(Options, given))  # type: ignore[assignment]
    cfg.uri = cfg.uri or tracking_uri()
    sources = [_source(argument, cfg.uri) for argument in arguments if "=" not in argument]
    if not sources:
        raise ConfigError("account needs a ledger file, an output folder or an MLflow run id; see account --help.")
    ledger = joined([source.ledger for source in sources])
    if cfg.adjacency is not None:
        if cfg.adjacency not in ADJACENCIES:
            raise ConfigError(f"adjacency={cfg.adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
        ledger = replace(ledger, adjacency=cfg.adjacency)
    at = cfg.delta if cfg.delta is not None else _common_delta(sources)
    check_delta(at)
    names = _accountants(cfg, ledger)
    costs = {name: epsilon(ledger, at, name) for name in names}
    if cfg.figure is not None:
        from dpexp.reporting.run_figures import trade_off

        figure = trade_off(ledger, at, names)
        try:
            figure.savefig(cfg.figure, dpi=150)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"figure={cfg.figure} cannot be written ({reason}); name a .png or .pdf.") from error
    _print(ledger, sources, at, costs, cfg.epsilon)
    figures = risk(ledger, names[0]).figures()
    least = "by" if is_bound(names[0]) else "about, by"
    console.print(f"In words, {least} {names[0]}: {in_words(figures, ledger.unit)}", soft_wrap=True)
    if cfg.figure is not None:
        console.print(f"Figure: {cfg.figure}", soft_wrap=True)
    if cfg.write:
        _write(sources, costs, {f"{name}_{names[0]}": figure for name, figure in figures.items()}, at, cfg)
    return costs


def _source(name: str, uri: str) -> Source:
    path = Path(name)
    if path.is_dir():
        return Source(name, ledger_so_far(path / "ledger.jsonl"), _delta_of(path))
    if path.exists() or path.suffix:
        return Source(name, ledger_so_far(path))
    from dpexp.tracking.read import downloaded_run

    with downloaded_run(uri, name) as folder:
        return Source(name, ledger_so_far(folder / "ledger.jsonl"), _delta_of(folder), name)


def _delta_of(folder: Path) -> float | None:
    path = folder / "config.yaml"
    if not path.exists():
        return None
    value = yaml.safe_load(path.read_text()).get("privacy", {}).get("delta")
    return float(value) if value is not None else None


def _common_delta(sources: Sequence[Source]) -> float:
    deltas = {source.delta for source in sources} - {None}
    if len(deltas) != 1:
        raise ConfigError("delta must be given: " + ("the runs differ in it." if deltas else "no run tells it."))
    (value,) = deltas
    return float(value)  # type: ignore[arg-type]


def _accountants(cfg: Options, ledger: Ledger) -> list[str]:
    allowed = claimable(ledger)
    if cfg.accountant == "all":
        return allowed
    names = [name.strip() for name in cfg.accountant.split(",")]
    check_names(names)
    return names


def _print(ledger: Ledger, sources: Sequence[Source], at: float, costs: dict[str, float], e: float | None) -> None:
    for source in sources:
        if source.ledger.incomplete:
            console.print(
                f"[bold red]The ledger of {escape(source.name)} ends early[/], after {len(source.ledger)} rounds: "
                f"{escape(early(source.ledger))}."
            )
        elif source.ledger.untold is not None:
            console.print(f"{escape(source.name)}: {escape(source.ledger.untold)}.", soft_wrap=True)
    runs = f"{len(sources)} runs, " if len(sources) > 1 else ""
    distinct = sum(round_.one_time_query is None for round_ in ledger.rounds)
    kinds = f"{distinct} distinct" if distinct > 1 else "all alike"
    once = len(ledger) - ledger.training_rounds
    before = f", {once} release{'s' * (once > 1)} before training" if once else ""
    of = f" of a {ledger.unit}" if ledger.record else ""
    console.print(
        f"{runs}{ledger.training_rounds} rounds ({kinds}){before}, adjacency {ledger.adjacency}{of}, δ = {up(at, 4)}"
    )
    table = Table("accountant", "ε", *([f"δ at ε = {up(e, 6)}"] if e is not None else []), "")
    for name, cost in costs.items():
        also = [up(delta(ledger, e, name), 4)] if e is not None else []
        table.add_row(name, up(cost, 6), *also, "an approximation, no bound" if not is_bound(name) else "")
    console.print(table)
    if (without := unamplified(ledger)) is not None:
        console.print(without, soft_wrap=True)


def _write(
    sources: Sequence[Source], costs: dict[str, float], risks: dict[str, float], at: float, cfg: Options
) -> None:
    from dpexp.tracking.read import log_cost

    runs = [source.run_id for source in sources if source.run_id]
    if len(sources) != 1 or not runs:
        raise ConfigError("write=true needs exactly one source, an MLflow run id.")
    adjacency = f"_{cfg.adjacency}" if cfg.adjacency else ""
    delta_ = f"_delta_{at:g}" if cfg.delta is not None else ""
    metrics = {f"epsilon_{name}{adjacency}{delta_}": cost for name, cost in costs.items()}
    metrics |= {f"{name}{adjacency}": figure for name, figure in risks.items()}
    log_cost(str(cfg.uri), runs[0], metrics, len(sources[0].ledger))
    console.print(f"Logged to run {runs[0]}: {', '.join(metrics)}", soft_wrap=True)
